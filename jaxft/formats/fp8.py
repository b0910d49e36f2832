"""fp8 weights (e4m3) with their scales: for blocks, for rows, or for the whole tensor.

`X.weight` is weight times scale: `X.weight_scale_inv` `[ceil(out / 128), ceil(in / 128)]` in
DeepSeek's and Qwen's files (a scale in spite of its name; the block is config.json's
`weight_block_size`), `X.weight_scale` of one element or `[out, 1]` in others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxft.errors import UserError
from jaxft.formats.files import TensorInfo, float_dtype, read_bytes, read_float_tensor

_DTYPE = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
# Scales of activations: here activations are not quantised.
_UNUSED = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class StoredFP8:
    """A weight in a file as fp8 with scales.

    Attributes:
      name: of the weight in the file.
      weight, scale: where they are.
      scale_name: of the scale in the file.
      block: rows and columns that share a scale.
      sides: names of the tensors beside the weight.
    """

    name: str
    weight: TensorInfo
    scale: TensorInfo
    scale_name: str
    block: tuple[int, int]
    sides: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[out, in]`."""
        return self.weight.shape

    def dense(self) -> np.ndarray:
        """Weights times scales, float32 `[out, in]`."""
        raw = read_bytes(self.name, self.weight, math.prod(self.shape))
        values = raw.view(ml_dtypes.float8_e4m3fn).reshape(self.shape).astype(np.float32)
        scale = read_float_tensor(self.scale_name, self.scale).astype(np.float32)
        if scale.size > 1:
            for axis, (size, step) in enumerate(zip(self.shape, self.block, strict=True)):
                scale = scale.repeat(step, axis).take(range(size), axis)
        return values * scale


def find_fp8(tensors: Mapping[str, TensorInfo], quantization: Any) -> dict[str, StoredFP8]:
    """The fp8 weights with scales among a folder's tensors, by name.

    `quantization`: config.json's `quantization_config`, where there is one.

    Raises:
      UserError: scales of a shape or dtype that does not fit.
    """
    given = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    block = given or [128, 128]
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise UserError(f"config.json: weight_block_size {block!r} is not rows and columns")
    found = {}
    for name, info in tensors.items():
        scales = [name + suffix for suffix in _SCALES if name + suffix in tensors]
        if info.dtype == _DTYPE and scales:
            unused = [f"{name.removesuffix('weight')}{suffix}" for suffix in _UNUSED]
            sides = scales[:1] + [side for side in unused if side in tensors]
            scale = tensors[scales[0]]
            float_dtype(scales[0], scale)
            step = _block(name, info, scales[0], scale, block)
            found[name] = StoredFP8(name, info, scale, scales[0], step, sides)
    return found


def _block(
    name: str, weight: TensorInfo, scale_name: str, scale: TensorInfo, block: list[int]
) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if len(weight.shape) == 2:
        out, wide = weight.shape
        for rows, columns in (block, (1, wide), (out, wide)):
            grid = (math.ceil(out / rows), math.ceil(wide / columns))
            if scale.shape == grid or (math.prod(scale.shape) == 1 and grid == (1, 1)):
                return rows, columns
    raise UserError(
        f"{scale.path}: tensor {scale_name} of shape {scale.shape} does not fit {name} of shape "
        f"{weight.shape} in blocks of {tuple(block)}, in rows or as a whole"
    )
