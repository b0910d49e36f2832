"""Writing a model's tensors as safetensors files of a limited size, one tensor at a time.

safetensors' own writer wants every tensor of a file in memory, and copies them. The format (8 bytes
little-endian length, that many bytes of JSON, then the data) needs only names, dtypes and shapes
beforehand: https://github.com/huggingface/safetensors#format. Names of files and the index are
those that transformers reads.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxft.formats.files import FLOAT_DTYPES, write_json
from jaxft.formats.huggingface import INDEX, SINGLE

Spec = tuple[np.dtype, tuple[int, ...]]
Progress = Callable[[int, int], None]  # tensors written, tensors in all

_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


def total_bytes(tensors: Mapping[str, Spec]) -> int:
    """Size of all the tensors."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Spec],
    make: Callable[[str], np.ndarray],
    max_shard_size: int,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write `model.safetensors`, or shards and their index where that exceeds `max_shard_size`.

    Args:
      folder: where to.
      tensors: dtype and shape of every tensor, in the order of the files.
      make: gives a tensor by its name; called once each.
      max_shard_size: bytes; a larger tensor gets a file of its own.
      progress: told after each tensor.

    Returns:
      The number of weight files.
    """
    shards = _split(tensors, max_shard_size)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        done = len(weight_map)

        def tell(written: int, done: int = done) -> None:
            progress(done + written, len(tensors))

        _write_file(folder / file, {name: tensors[name] for name in names}, make, tell)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        metadata = {"total_size": total_bytes(tensors)}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return len(shards)


def _split(tensors: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Names for each file, in order; a file is full where the next tensor would exceed `limit`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        needed = total_bytes({name: spec})
        if shards[-1] and size + needed > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += needed
    return shards


def _write_file(
    path: Path,
    tensors: Mapping[str, Spec],
    make: Callable[[str], np.ndarray],
    tell: Callable[[int], None],
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # wide ones first, as safetensors does, so that each lies at a multiple of its width
    names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    start = 0
    for name in names:
        dtype, shape = tensors[name]
        end = start + total_bytes({name: tensors[name]})
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for written, name in enumerate(names, 1):
            value = make(name)
            if (value.dtype, value.shape) != tensors[name]:
                raise RuntimeError(f"{name}: made as {value.dtype}{value.shape}")
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            tell(written)
