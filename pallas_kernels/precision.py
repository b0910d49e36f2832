"""Matrix-multiplication precision: float32 inputs mean float32 arithmetic, also on a GPU."""

import jax
from jax import lax


def dot_precision(*operands: jax.Array) -> lax.Precision:
    """HIGHEST for float32 operands (no TF32), DEFAULT (float32 accumulation) for 16-bit ones."""
    wide = all(x.dtype == "float32" for x in operands)
    return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
