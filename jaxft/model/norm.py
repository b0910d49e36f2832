"""RMSNorm as a module."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxft.model.variables import Frozen
from pallas_kernels.norm import rms_norm


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, *, eps: float):
        self.weight = Frozen(jnp.ones(size))
        self.eps = eps

    def __call__(
        self, x: jax.Array, residual: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The norm of `x + residual`, and that sum; both `[..., size]`."""
        return rms_norm(x, self.weight.get_value(), eps=self.eps, residual=residual)
