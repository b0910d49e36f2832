"""The feed-forward half of a layer."""

import jax
from flax import nnx

from jaxft.model.config import ModelConfig
from jaxft.model.linear import Linear
from jaxft.quant import Storage
from pallas_kernels.glu import glu


class Mlp(nnx.Module):
    """Gated feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, storage: Storage):
        shapes, bias = config.projections, config.mlp_bias
        self.gate_proj = Linear(shapes["mlp.gate_proj"], storage, bias=bias)
        self.up_proj = Linear(shapes["mlp.up_proj"], storage, bias=bias)
        self.down_proj = Linear(shapes["mlp.down_proj"], storage, bias=bias)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(glu(self.gate_proj(x, key), self.up_proj(x, key)), key)
