"""The definition of RMSNorm in XLA; the backward pass recomputes, it saves inputs only."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.checkpoint, static_argnums=(3, 4), prevent_cse=False)
def rms_norm(x, scale, residual, eps, offset):
    """See `api.rms_norm`."""
    h = x if residual is None else x + residual
    return normalise(h.astype(jnp.float32), scale, eps, offset).astype(x.dtype), h


def normalise(h: jax.Array, scale: jax.Array, eps: float, offset: float) -> jax.Array:
    """RMSNorm of float32 `[..., D]` with scale `[D]`, in float32."""
    mean_square = jnp.mean(jnp.square(h), axis=-1, keepdims=True)
    return h * lax.rsqrt(mean_square + eps) * (scale.astype(jnp.float32) + offset)
