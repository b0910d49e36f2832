"""The NF4 format: its two code books, block sizes and the pytree that holds a quantised weight."""

import functools
import math
from dataclasses import dataclass

import jax
import numpy as np

BLOCK_SIZE = 64  # weights that share one scale (absmax)
NESTED_BLOCK_SIZE = 256  # scales that share one scale of scales, when nested

# The 16 levels of NF4, quantiles of a normal distribution scaled to [-1, 1]
# (Dettmers et al., "QLoRA", arXiv:2305.14314, appendix E).
NF4_CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "absmax", "absmax_scale", "absmax_offset"),
    meta_fields=("shape",),
)
@dataclass(frozen=True)
class NF4:
    """A weight [..., out, in] stored as 4-bit codes with one scale for each block of 64.

    Blocks run over the flat row-major matrix; they cross rows where 64 does not divide `in`, and
    the last one may be short. Leading axes (layers) are the same on every array. `nested` scales
    are 8-bit codes themselves: scale = nested_code()[absmax] * absmax_scale + absmax_offset.

    Attributes:
      codes: uint8, two codes a byte, the earlier weight in the high nibble;
        [..., out, in / 2] when 64 divides `in`, else flat [..., ceil(out * in / 2)].
      absmax: float32 [..., blocks], or uint8 [..., blocks] when nested.
      absmax_scale: float32 [..., ceil(blocks / 256)] when nested, else None.
      absmax_offset: float32 [...] when nested, else None.
      shape: (out, in) of one matrix.
    """

    codes: jax.Array
    absmax: jax.Array
    absmax_scale: jax.Array | None
    absmax_offset: jax.Array | None
    shape: tuple[int, int]

    @property
    def nested(self) -> bool:
        """Whether the scales are quantised too."""
        return self.absmax_scale is not None


def num_blocks(shape: tuple[int, int]) -> int:
    """Number of scales of one matrix (out, in)."""
    return math.ceil(shape[0] * shape[1] / BLOCK_SIZE)


def codes_shape(shape: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the codes of one matrix (out, in)."""
    rows, columns = shape
    if columns % BLOCK_SIZE == 0:
        return rows, columns // 2
    return (math.ceil(rows * columns / 2),)


@functools.cache
def nested_code() -> np.ndarray:
    """The signed 8-bit dynamic map [256], float32, ascending: the code book of nested scales.

    Decade i of seven (largest value 10^(i-6)) holds 2^i levels: the midpoints of 2^i equal parts
    of [0.1, 1], times 10^(i-6); each with both signs, then 0 (index 127) and 1 (index 255).
    (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561.)
    bitsandbytes stores what float32 makes of it when the edges are counted from the nearer end
    of [0.1, 1] with one rounding each; in float64, 72 of the 256 levels come out an ulp away.
    """
    start, stop = np.float32(0.1), np.float32(1)
    positive = []
    for i in range(7):
        parts = 2**i
        step = float((stop - start) / np.float32(parts))
        k = np.arange(parts + 1)
        near_start = k < (parts + 1) // 2
        edges = np.where(near_start, float(start) + step * k, float(stop) - step * (parts - k))
        edges = edges.astype(np.float32)
        positive.append((edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6)))
    levels = np.concatenate(positive)
    code = np.sort(np.concatenate([levels, -levels, np.array([0, 1], np.float32)]))
    code.setflags(write=False)
    return code


def midpoints(code: np.ndarray) -> np.ndarray:
    """Decision levels between neighbouring codes, float32 [len(code) - 1]."""
    return (code[:-1] + code[1:]) / np.float32(2)
