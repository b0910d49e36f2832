"""The one rounding from float32 to the tensors' dtype, the same compiled and interpreted."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` in `dtype`: to nearest, ties to even.

    Triton's interpreter cuts a bfloat16's lower bits off. Rounded in integers first, the value
    is one that the cast keeps, in the interpreter and on a GPU.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    return x.to(dtype)
