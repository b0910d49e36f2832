"""Tensors of a GGUF file: which types are read, and their values in float32 at little memory."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderField, ReaderTensor
from gguf import GGMLQuantizationType as GgmlType
from gguf.quants import dequantize

from jaxft.errors import UserError

PLAIN = {
    GgmlType.F32: np.dtype(np.float32),
    GgmlType.F16: np.dtype(np.float16),
    GgmlType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = (
    *(GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0),
    *(GgmlType.Q2_K, GgmlType.Q3_K, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K),
)
TENSOR_TYPES = (*PLAIN, *_QUANTISED)

# Elements dequantised at once: the gguf package holds three or four copies of what it works on.
_CHUNK = 1 << 16


class _Reader(GGUFReader):
    """The package's reader, which would size the tensors without saying which one it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        known = {kind.value: kind.name for kind in GgmlType}
        read = {kind.value: kind for kind in TENSOR_TYPES}
        for field in fields:
            _, name, _, shape, number, _ = field.parts
            tensor = f"{self._path}: tensor {bytes(name).decode('utf-8', 'replace')}"
            code = int(number[0])
            if code not in read:
                raise UserError(
                    f"{tensor} is stored as {known.get(code, f'type {code}')}; "
                    f"only {', '.join(kind.name for kind in TENSOR_TYPES)} are read"
                )
            block = GGML_QUANT_SIZES[read[code]][0]
            if not len(shape) or int(shape[0]) % block:  # the fastest axis comes first
                raise UserError(
                    f"{tensor} has shape {tuple(int(n) for n in reversed(shape))}, whose rows are "
                    f"no multiple of the {block} elements of a {read[code].name} block"
                )
        super()._build_tensors(start_offs, fields)


def open_reader(path: Path) -> GGUFReader:
    """The file's metadata and tensor entries. Raises UserError for a file that cannot be read.

    Also for a tensor of a type that is not read, or whose rows are no whole number of blocks.
    """
    if not path.is_file():
        raise UserError(f"GGUF file does not exist: {path}")
    try:
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError) as error:  # what the reader meets in damaged bytes
        reason = str(error).replace("\n", " ")
        raise UserError(f"{path}: no readable GGUF file ({reason}); incomplete download?") from None
    if reader.byte_order != "I":
        raise UserError(f"{path}: is stored in the other byte order, which is not supported")
    return reader


def values(tensor: ReaderTensor, permuted_heads: int | None = None) -> np.ndarray:
    """A copy of a tensor; F32, F16 and BF16 as stored, other types dequantised to float32.

    `permuted_heads`: the number of heads of a q or k matrix or bias, whose rows llama.cpp reorders.
    Each row is quantised by itself, so rows can be put in order before they are dequantised, and
    one small chunk is all the memory that is needed beside the result.
    """
    if permuted_heads is not None and len(tensor.shape) == 1:
        bias = values(tensor)
        return bias[row_order(len(bias), permuted_heads)]
    kind: Any = tensor.tensor_type
    stored = tensor.data.view(ml_dtypes.bfloat16) if kind == GgmlType.BF16 else tensor.data
    rows = stored.reshape(-1, stored.shape[-1])
    order = np.arange(len(rows))
    if permuted_heads is not None:
        order = row_order(len(rows), permuted_heads)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if kind in PLAIN:
        return np.asarray(rows[order]).reshape(shape)
    out = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, _CHUNK // shape[-1])
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[order[start : start + step]], kind)
    return out.reshape(shape)


def row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Where each row of Hugging Face's q or k matrix or bias lies in GGUF's.

    llama.cpp rotates neighbouring pairs and so its converter interleaves the two halves of each
    head: row `2 i + h` of a head there is row `h head_dim / 2 + i` here.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
