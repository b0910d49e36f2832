"""NF4 quantise and dequantise: public functions, checks and choice of the implementation."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import choose
from pallas_kernels.nf4 import reference
from pallas_kernels.nf4.format import NESTED_BLOCK_SIZE, NF4, codes_shape, num_blocks


def quantize(w: jax.Array, *, nested: bool) -> NF4:
    """Quantise weights to 4-bit NormalFloat, in the format of bitsandbytes.

    Args:
      w: [..., out, in], any float dtype. Leading axes are done one matrix at a time, so that only
        one matrix exists in float32.
      nested: store the scales in 8 bits too (double quantisation): 4.127 instead of 4.5 bits a
        weight.

    Returns:
      The codes and scales. A block of zeros decodes to 0 exactly, nested or not. A block that
      holds a NaN or an infinity gets a scale that is not finite (nested: the whole matrix does),
      so it cannot decode to plausible numbers.

    Raises:
      ValueError: w is not a matrix of floats, or has no elements.
    """
    if w.ndim < 2 or w.size == 0 or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"nf4.quantize: expected floats [..., out, in], got {w.dtype}{w.shape}")
    return _quantize(w, nested)


def dequantize(q: NF4, dtype: DTypeLike, implementation: str = "auto") -> jax.Array:
    """Dense weights [..., out, in] of `q`, bit-equal to bitsandbytes' dequantise.

    Each weight is float32(code * scale), then rounded to `dtype`. Where float32 arithmetic on the
    result follows under the same jit, XLA may fuse an addition into the product (one rounding).

    Args:
      q: quantised weights, see `NF4`.
      dtype: float dtype of the result.
      implementation: "auto" or "xla".

    Raises:
      ValueError: arrays of `q` that do not fit its shape, a dtype that is no float, or an
        implementation that is unknown or cannot serve the call.
    """
    _check(q)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"nf4.dequantize: expected a float dtype, got {jnp.dtype(dtype)}")
    choose("nf4.dequantize", implementation, capabilities())
    return _dequantize(q, jnp.dtype(dtype))


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}


@functools.partial(jax.jit, static_argnums=1)
def _quantize(w: jax.Array, nested: bool) -> NF4:
    one = functools.partial(reference.quantize, nested=nested)
    if w.ndim == 2:
        return one(w)
    lead = w.shape[:-2]
    q = lax.map(one, w.reshape(-1, *w.shape[-2:]))
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), q)


_dequantize = jax.jit(reference.dequantize, static_argnums=1)


def _check(q: NF4) -> None:
    lead = q.absmax.shape[:-1]
    blocks = num_blocks(q.shape)
    scales = -(-blocks // NESTED_BLOCK_SIZE)
    expected = {
        "codes": ((*lead, *codes_shape(q.shape)), jnp.uint8),
        "absmax": ((*lead, blocks), jnp.uint8 if q.nested else jnp.float32),
        "absmax_scale": ((*lead, scales), jnp.float32) if q.nested else None,
        "absmax_offset": (lead, jnp.float32) if q.nested else None,
    }
    for name, want in expected.items():
        array = getattr(q, name)
        got = None if array is None else (array.shape, array.dtype)
        if got != want:
            raise ValueError(
                f"nf4.dequantize: {name} of a {q.shape} weight should be {_show(want)}, "
                f"is {_show(got)}"
            )


def _show(array: tuple | None) -> str:
    return "absent" if array is None else f"{jnp.dtype(array[1])}{list(array[0])}"
