"""RMSNorm as a module."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxft.model.config import ModelConfig
from jaxft.model.variables import Frozen
from pallas_kernels.norm import rms_norm


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, config: ModelConfig):
        self.weight = Frozen(jnp.ones(size))
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset

    def __call__(
        self, x: jax.Array, residual: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The norm of `x + residual`, and that sum; both `[..., size]`."""
        scale = self.weight.get_value()
        return rms_norm(x, scale, eps=self.eps, offset=self.offset, residual=residual)
