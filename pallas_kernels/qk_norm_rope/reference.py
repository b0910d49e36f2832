"""The definition of q/k norm and RoPE in XLA; backward recomputes from the inputs alone."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.norm import reference as norm


@partial(jax.checkpoint, static_argnums=(6, 7, 8), prevent_cse=False)
def qk_norm_rope(q, k, positions, inv_freq, q_scale, k_scale, attention_factor, eps, norm_offset):
    """See `api.qk_norm_rope`."""
    angles = positions[..., None].astype(jnp.float32) * inv_freq.astype(jnp.float32)
    cos = attention_factor * jnp.cos(angles)[:, :, None, :]
    sin = attention_factor * jnp.sin(angles)[:, :, None, :]

    def one(x, scale):
        y = x.astype(jnp.float32)
        if scale is not None:
            # the norm's own output dtype is part of the models' definition
            y = norm.normalise(y, scale, eps, norm_offset).astype(x.dtype).astype(jnp.float32)
        half = inv_freq.shape[-1]
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
        return rotated.astype(x.dtype)

    return one(q, q_scale), one(k, k_scale)
