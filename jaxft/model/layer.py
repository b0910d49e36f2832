"""One layer, and a group of equal layers scanned as one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxft.model.attention import Attention, Cache, Where
from jaxft.model.config import LayerConfig, ModelConfig
from jaxft.model.mlp import Mlp
from jaxft.model.norm import RMSNorm
from jaxft.model.remat import LAYER_INPUT, rematerialise
from jaxft.quant import Storage


class Layer(nnx.Module):
    """Attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, storage: Storage):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, layer, storage)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = Mlp(config, storage)

    def __call__(
        self, x: jax.Array, where: Where, cache: Cache | None, key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, T, hidden]` -> `[B, T, hidden]`, and the cache with these tokens in it."""
        normed, _ = self.input_layernorm(x)
        attended, cache = self.self_attn(normed, where, cache, key)
        normed, x = self.post_attention_layernorm(attended, residual=x)
        return x + self.mlp(normed, key), cache


class Group(nnx.Module):
    """Consecutive layers of equal structure: their tensors are stacked and scanned.

    Attributes:
      layers: a `Layer` whose tensors have a leading axis of layers.
      first: number of its first layer in the model.
      size: how many layers there are.
    """

    def __init__(self, layers: Layer, first: int, size: int):
        self.layers = layers
        self.first = first
        self.size = size

    def __call__(
        self,
        x: jax.Array,
        where: Where,
        cache: Cache | None,
        key: jax.Array | None,
        checkpointing: str,
    ) -> tuple[jax.Array, Cache | None]:
        """All layers in order. The cache's tensors have a leading axis of layers too."""
        structure, stacked = nnx.split(self.layers)

        def body(x, layer_inputs):
            state, number, cache = layer_inputs
            x = checkpoint_name(x, LAYER_INPUT)
            layer = nnx.merge(structure, state)
            layer_key = None if key is None else jax.random.fold_in(key, number)
            return layer(x, where, cache, layer_key)

        numbers = self.first + jnp.arange(self.size)
        return lax.scan(rematerialise(body, checkpointing), x, (stacked, numbers, cache))
