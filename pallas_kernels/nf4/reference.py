"""The definition of NF4 quantise and dequantise in plain XLA; it runs on every device.

The arithmetic is bitsandbytes': float32 throughout, every step rounded on its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.nf4.format import (
    BLOCK_SIZE,
    NESTED_BLOCK_SIZE,
    NF4,
    NF4_CODE,
    codes_shape,
    midpoints,
    nested_code,
    num_blocks,
)


def quantize(w: jax.Array, *, nested: bool) -> NF4:
    """Quantise one matrix [out, in] of any float dtype."""
    shape = (w.shape[0], w.shape[1])
    blocks = _in_blocks(w.astype(jnp.float32).reshape(-1), BLOCK_SIZE)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    x = _normalised(blocks, absmax)
    codes = jnp.zeros(x.shape, jnp.uint8)
    for level in midpoints(np.array(NF4_CODE, np.float32)):
        codes += (x > level).astype(jnp.uint8)
    codes = codes.reshape(-1, 2)
    packed = (codes[:, 0] << 4) | codes[:, 1]
    packed = packed[: (w.size + 1) // 2].reshape(codes_shape(shape))
    if not nested:
        return NF4(packed, absmax, None, None, shape)
    offset = jnp.mean(absmax)
    return NF4(packed, *nest(absmax, offset), offset, shape)


def nest(absmax: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """8-bit codes [blocks] of absmax [blocks] - offset and their scales [ceil(blocks / 256)]."""
    blocks = _in_blocks(absmax - offset, NESTED_BLOCK_SIZE)
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    codes = jnp.searchsorted(midpoints(nested_code()), _normalised(blocks, scale), side="left")
    return codes.astype(jnp.uint8).reshape(-1)[: absmax.size], scale


def dequantize(q: NF4, dtype: jnp.dtype) -> jax.Array:
    """Dense [..., out, in] of `q`."""
    rows, columns = q.shape
    lead = q.absmax.shape[:-1]
    blocks = num_blocks(q.shape)
    codes = q.codes.reshape(*lead, -1)
    missing = blocks * (BLOCK_SIZE // 2) - codes.shape[-1]
    if missing:  # a short last block
        codes = jnp.pad(codes, [(0, 0)] * len(lead) + [(0, missing)])
    codes = codes.reshape(*lead, blocks, BLOCK_SIZE // 2)
    scale = scales(q)[..., None]
    code_book = np.array(NF4_CODE, np.float32)
    # Halves are scaled before they are interleaved and indices stay uint8: README.md has figures.
    high = (_look_up(code_book, codes >> 4) * scale).astype(dtype)
    low = (_look_up(code_book, codes & 15) * scale).astype(dtype)
    w = jnp.stack([high, low], axis=-1).reshape(*lead, -1)
    return w[..., : rows * columns].reshape(*lead, rows, columns)


def scales(q: NF4) -> jax.Array:
    """The scale of each block of `q`, float32 [..., blocks]."""
    if q.absmax_scale is None or q.absmax_offset is None:
        return q.absmax
    scale = jnp.repeat(q.absmax_scale, NESTED_BLOCK_SIZE, axis=-1)[..., : q.absmax.shape[-1]]
    product = _look_up(nested_code(), q.absmax) * scale
    # Without the barrier XLA contracts product and sum into one rounding (4% of weights differ).
    return lax.optimization_barrier(product) + q.absmax_offset[..., None]


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def _in_blocks(flat: jax.Array, size: int) -> jax.Array:
    """[n] -> [ceil(n / size), size]; what is missing in the last block is 0."""
    return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def _normalised(blocks: jax.Array, largest: jax.Array) -> jax.Array:
    """Blocks [n, size] divided by their largest magnitude [n], through its reciprocal.

    A block of zeros (or so small that its reciprocal overflows) gives 0, the code of exactly 0.
    """
    reciprocal = (1 / largest)[:, None]
    return jnp.where(jnp.isfinite(reciprocal), blocks * reciprocal, 0)
