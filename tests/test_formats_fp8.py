"""fp8 weights are read with their scales, or refused by name."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import FP32, NF4_FP32, load, logits
from merging import make_adapter, merge, weights
from model_oracles import edit_config, edit_tensors, largest, open_in_transformers, their_logits
from safetensors.numpy import save_file
from tiny import tiny_folder

from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.lora import projections
from jaxft.model.families import read_config
from jaxft.preflight import describe_weights
from jaxft.quant import NF4, Storage

E4M3 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.0.mlp.up_proj.weight"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def write(folder: Path, tensors: dict[str, np.ndarray], **quantization) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", **quantization}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 50, shape).astype(E4M3)


def scales(*shape: int, kind=np.float32) -> np.ndarray:
    return np.random.default_rng(1).uniform(1e-3, 4e-3, shape).astype(kind)


GRIDS = {  # name of the scales, their shape, the block that config.json names
    "blocks, cut at the edges": ("_scale_inv", (2, 3), None),
    "other blocks": ("_scale_inv", (3, 5), [64, 64]),
    "rows": ("_scale", (130, 1), None),
    "one of no shape": ("_scale", (), None),
    "one": ("_scale_inv", (1,), None),
}


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("grid", GRIDS)
def test_values(tmp_path, grid, kind):
    """Element by element, by the formula; without scales, or with their neighbours', another."""
    suffix, shape, block = GRIDS[grid]
    weight, scale = values(130, 260), scales(*shape, kind=kind)
    folder = write(tmp_path, {NAME: weight, NAME + suffix: scale}, weight_block_size=block)
    checkpoint = HuggingFaceFolder(folder)
    assert checkpoint.names() == {NAME}
    assert checkpoint.shape(NAME) == (130, 260)
    assert checkpoint.dtype(NAME) is None
    got = checkpoint.read(NAME)
    assert got.dtype == np.float32
    rows, columns = block or (128, 128)
    if shape == (130, 1):
        rows, columns = 1, 260
    by_hand, shifted = np.zeros((130, 260)), np.zeros((130, 260))
    for i in range(130):
        for j in range(260):
            at = (i // rows, j // columns) if len(shape) == 2 else ()
            one = float(scale[at] if at else scale.reshape(()))
            by_hand[i, j] = float(weight[i, j]) * one
            if at:
                shifted[i, j] = float(weight[i, j]) * float(scale[at[0] - 1, at[1]])
    assert np.abs(got - by_hand).max() < 1e-6 * np.abs(by_hand).max()
    assert np.abs(got - weight.astype(np.float32)).max() > 10
    assert np.abs(got - shifted).max() > 1e-2


def scaled(tensors: dict[str, np.ndarray]) -> None:
    """Every projection as e4m3 in blocks of 128 that reach its largest value."""
    for name in [name for name in tensors if "_proj" in name]:
        out, wide = tensors[name].shape
        blocks = tensors[name].reshape(-(-out // 128), min(out, 128), -(-wide // 128), 128)
        scale = np.abs(blocks).max((1, 3)) / 448
        codes = blocks / scale[:, None, :, None]
        tensors[name] = codes.reshape(out, wide).astype(E4M3)
        tensors[name + "_scale_inv"] = scale.astype(np.float32)


def fp8_folder(model: Path, without: str = "") -> Path:
    """A tiny model in fp8; one of its tensors may be left out."""
    edit_tensors(tiny_folder(model, **SIZES), lambda t: (scaled(t), t.pop(without, None)))
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return edit_config(model, {"quantization_config": quantization})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return fp8_folder(tmp_path_factory.mktemp("fp8"))


def test_a_model(folder, tmp_path):
    """Against transformers' own reading; merged in 16 bits, and quantised to NF4."""
    pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(4, 250, (2, 40))
    decoder = load(folder, FP32)
    got = logits(decoder, tokens)
    want = their_logits(open_in_transformers(folder), tokens)
    assert largest(got, want) < 1e-4
    plain = tiny_folder(tmp_path / "plain", **SIZES)
    assert largest(got, logits(load(plain, FP32), tokens)) > 1e-2  # before it was rounded to fp8

    narrow = load(folder, Storage(load_in_4bit=False, nested=True, compute=jnp.dtype("bfloat16")))
    four = load(folder, NF4_FP32)
    for kept, kind in ((narrow, jnp.dtype("bfloat16")), (decoder, jnp.dtype("float32"))):
        assert {w.weight.get_value().array.dtype for _, w in projections(kept)} == {kind}
    assert {type(w.weight.get_value()) for _, w in projections(four)} == {NF4}

    adapter = make_adapter(plain, tmp_path / "adapter")
    merged = weights(merge(adapter, tmp_path / "merged", model_name_or_path=folder))
    assert merged.keys() == weights(plain).keys()
    assert (
        merged[NAME].tobytes() == HuggingFaceFolder(folder).read(NAME).astype("bfloat16").tobytes()
    )
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


def test_the_report_says_so(folder):
    checkpoint = HuggingFaceFolder(folder)
    given = {"model_name_or_path": str(folder), "dataset_name": "x.jsonl", "output_dir": "y"}
    model = read_config(checkpoint.config)
    lines = [
        describe_weights(TrainConfig(**given, load_in_4bit=four), checkpoint, model, "bfloat16")
        for four in (True, False)
    ]
    double = "NF4 with double quantisation"
    assert lines == [double, "as in the checkpoint, dequantised to bfloat16"]


def test_scales_of_activations_are_no_tensors_of_the_model(tmp_path):
    sides = {NAME.replace("weight", kind): scales() for kind in ("input_scale", "activation_scale")}
    tensors = {NAME: values(8, 8), NAME + "_scale": scales()}
    assert HuggingFaceFolder(write(tmp_path, tensors | sides)).names() == {NAME}
    tensors[NAME] = tensors[NAME].astype(np.float32)  # nothing that they could belong to
    assert len(HuggingFaceFolder(write(tmp_path, tensors | sides)).names()) == 4


FAULTS = {
    "no scales": ({NAME: values(8, 8)}, {}, f"tensor {NAME} is stored as F8_E4M3 without scales"),
    "another fp8": (
        {NAME: values(8, 8).astype(ml_dtypes.float8_e5m2), NAME + "_scale": scales()},
        {},
        f"tensor {NAME} is stored as F8_E5M2; only",
    ),
    "another grid": (
        {NAME: values(8, 300), NAME + "_scale_inv": scales(1, 2)},
        {},
        f"tensor {NAME}_scale_inv of shape (1, 2) does not fit {NAME} of shape (8, 300)",
    ),
    "scales as bytes": (
        {NAME: values(8, 8), NAME + "_scale_inv": np.ones((1, 1), np.uint8)},
        {},
        f"tensor {NAME}_scale_inv is stored as U8",
    ),
    "no matrix": (
        {NAME: values(8), NAME + "_scale_inv": scales(1)},
        {},
        f"does not fit {NAME} of shape (8,)",
    ),
    "no block": (
        {NAME: values(8, 8), NAME + "_scale_inv": scales(1, 1)},
        {"weight_block_size": [128]},
        "weight_block_size [128] is not rows and columns",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_scaled_is_refused(tmp_path, fault):
    tensors, quantization, message = FAULTS[fault]
    with pytest.raises(UserError) as caught:
        HuggingFaceFolder(write(tmp_path, tensors, **quantization)).dtype(NAME)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_its_scales_is_refused_before_it_is_read(tmp_path, monkeypatch):
    broken = fp8_folder(tmp_path, without=f"{NAME}_scale_inv")
    monkeypatch.setattr(HuggingFaceFolder, "read", None)
    with pytest.raises(UserError, match=f"tensor {NAME} is stored as F8_E4M3 without scales"):
        load(broken, FP32)
