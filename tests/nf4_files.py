"""Folders of NF4 weights for tests, made by bitsandbytes or byte by byte, and their oracles."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from model_oracles import edit_config, edit_tensors
from safetensors.numpy import load_file, save_file

STATE = ".quant_state.bitsandbytes__nf4"
PROJECTION = re.compile(r".*\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Tensors = dict[str, np.ndarray]


def by_bitsandbytes(
    w: np.ndarray, name: str, nested: bool = True, kind: str = "nf4", blocksize: int = 64
) -> Tensors:
    """The tensors that bitsandbytes makes of a matrix and transformers saves."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    w = torch.tensor(w.astype(np.float32))
    codes, state = quantize_4bit(
        w, quant_type=kind, compress_statistics=nested, blocksize=blocksize
    )
    parts = {f"{name}.{key}": value.numpy() for key, value in state.as_dict(packed=True).items()}
    return {name: codes.numpy(), **parts}


def quantise_folder(
    folder: Path,
    dense: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> Path:
    """Every projection as NF4 by bitsandbytes, but those whose names hold a part of `dense`.

    `plain`: parts of names whose scales are left in float32; `also`: other tensors.
    """

    def change(tensors: Tensors) -> None:
        for name in list(filter(PROJECTION.fullmatch, tensors)):
            if not any(part in name for part in dense):
                quantise(tensors, name)
        for name in also:
            quantise(tensors, name)

    def quantise(tensors: Tensors, name: str) -> None:
        nested = not any(part in name for part in plain)
        tensors.update(by_bitsandbytes(tensors.pop(name), name, nested))

    edit_tensors(folder, change)
    return edit_config(folder, {"quantization_config": CONFIG})


def dequantised_folder(folder: Path, target: Path) -> Path:
    """The same model in float32, its NF4 weights dequantised by bitsandbytes."""
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit

    tensors = load_file(folder / "model.safetensors")
    dense: Tensors = {}
    for name, value in tensors.items():
        sides = {
            side.removeprefix(name + "."): torch.tensor(part)
            for side, part in tensors.items()
            if side.startswith(name + ".")
        }
        if sides:
            state = QuantState.from_dict(sides, device=torch.device("cpu"))
            state.dtype = torch.float32
            codes = torch.tensor(value.view(np.uint8))
            dense[name] = dequantize_4bit(codes, state).reshape(state.shape).numpy()
        elif ".weight." not in name:
            dense[name] = value.astype(np.float32)
    target.mkdir()
    save_file(dense, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "quantization_config"})
    )
    return target


def by_hand(name: str, shape: tuple[int, int], seed: int, nested: bool = True, **state) -> Tensors:
    """Random codes and scales, laid out as bitsandbytes does; weights of about 0.1."""
    from pallas_kernels.nf4 import NF4_CODE, nested_code

    random = np.random.default_rng(seed)
    blocks = -(-shape[0] * shape[1] // 64)
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64}
    about |= {"dtype": "bfloat16", "shape": list(shape)}
    tensors = {
        "": random.integers(0, 256, (-(-shape[0] * shape[1] // 2), 1), np.uint8),
        ".quant_map": np.array(NF4_CODE, np.float32),
        ".absmax": random.uniform(0.1, 0.3, blocks).astype(np.float32),
    }
    if nested:
        about |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
        scales = random.uniform(0.1, 0.3, -(-blocks // 256)).astype(np.float32)
        tensors[".absmax"] = random.integers(0, 256, blocks, np.uint8)
        tensors |= {".nested_absmax": scales, ".nested_quant_map": np.array(nested_code())}
    about = {key: value for key, value in (about | state).items() if value is not None}
    tensors[STATE] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return {name + part: value for part, value in tensors.items()}


def decoded(
    tensors: Tensors, name: str, swapped: bool = False, offset: float | None = None
) -> np.ndarray:
    """What the tensors of a weight stand for, by the formula, in float64.

    `swapped`: the wrong order of nibbles; `offset`: another one than the file's.
    """
    state = json.loads(tensors[name + STATE].tobytes())
    out, wide = state["shape"]
    code = tensors[name + ".quant_map"].astype(np.float64)
    scales = tensors[name + ".absmax"].astype(np.float64)
    if "nested_offset" in state:
        nested = tensors[name + ".nested_quant_map"].astype(np.float64)[tensors[name + ".absmax"]]
        factors = tensors[name + ".nested_absmax"].astype(np.float64)
        offset = state["nested_offset"] if offset is None else offset
        scales = nested * factors[np.arange(len(nested)) // 256] + offset
    values = np.zeros(out * wide)
    raw = tensors[name].view(np.uint8).reshape(-1)
    for j in range(out * wide):
        high = (j % 2 == 0) != swapped
        values[j] = code[raw[j // 2] >> 4 if high else raw[j // 2] & 15] * scales[j // 64]
    return values.reshape(out, wide)


def in_16_bit(folder: Path, kinds: dict[str, str]) -> Path:
    """Tensors by a part of their name in another dtype."""
    dtypes = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

    def change(tensors: Tensors) -> None:
        for name, value in tensors.items():
            for part, kind in kinds.items():
                if part in name:
                    assert value.dtype == np.float32
                    tensors[name] = value.astype(dtypes[kind])

    return edit_tensors(folder, change)
