"""NF4: 4-bit weights with blockwise scales, as bitsandbytes stores them."""

from pallas_kernels.nf4.api import dequantize, quantize
from pallas_kernels.nf4.format import (
    BLOCK_SIZE,
    NESTED_BLOCK_SIZE,
    NF4,
    NF4_CODE,
    codes_shape,
    nested_code,
    num_blocks,
)

__all__ = [
    "BLOCK_SIZE",
    "NESTED_BLOCK_SIZE",
    "NF4",
    "NF4_CODE",
    "codes_shape",
    "dequantize",
    "nested_code",
    "num_blocks",
    "quantize",
]
