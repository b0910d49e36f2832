"""The product of two tiles, the same compiled and interpreted."""

import triton
import triton.language as tl

from triton_ref.kernels.launch import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b):
    """float32 `a b`: exact products of 16-bit numbers, unrounded float32 ones."""
    if _INTERPRETED:  # it takes the bits of bfloat16 for integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
