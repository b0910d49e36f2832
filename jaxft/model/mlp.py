"""The feed-forward half of a layer."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxft.model.config import ModelConfig
from jaxft.model.linear import Linear
from jaxft.quant import Storage
from pallas_kernels.glu import glu


class Mlp(nnx.Module):
    """Gated feed-forward: `down(activation(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, storage: Storage):
        shapes, bias = config.projections, config.mlp_bias
        self.activation = config.activation
        self.gate_proj = Linear(shapes["mlp.gate_proj"], storage, bias=bias)
        self.up_proj = Linear(shapes["mlp.up_proj"], storage, bias=bias)
        self.down_proj = Linear(shapes["mlp.down_proj"], storage, bias=bias)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        gate = checkpoint_name(self.gate_proj(x, key), "gate")
        up = checkpoint_name(self.up_proj(x, key), "up")
        wide = checkpoint_name(glu(gate, up, activation=self.activation), "glu")
        return checkpoint_name(self.down_proj(wide, key), "down")
