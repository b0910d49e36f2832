"""tanh that is exact enough everywhere, the same compiled and interpreted."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh of float32 `x`: a series near 0, where the quotient of exponentials loses digits."""
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    quotient = tl.div_rn(1.0 - power, 1.0 + power)
    near = tl.minimum(size, 0.25)
    square = near * near
    series = 1.0 + square * (
        -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
    )
    magnitude = tl.where(size < 0.25, near * series, quotient)
    return tl.where(x < 0, -magnitude, magnitude)
