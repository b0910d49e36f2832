"""The definition of gated linear units in XLA; the backward pass saves gate and up only."""

from functools import partial

import jax
import jax.numpy as jnp

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


@partial(jax.checkpoint, static_argnums=(2,), prevent_cse=False)
def glu(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """See `api.glu`."""
    hidden = ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return hidden.astype(gate.dtype)
