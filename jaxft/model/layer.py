"""One layer, and a group of layers scanned as one."""

from collections.abc import Mapping
from functools import partial

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

Wheres = Mapping[int | None, Where]  # by window
Caches = tuple[Cache, ...]  # by member of a group


class Layer(nnx.Module):
    """Attention and feed-forward, each after a norm and added to the stream.

    Gemma 2 and 3 (`post_norms`) normalise what each adds as well; transformers' names shift then.
    Activations bear names, by which they can be kept for the backward pass or looked at.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, storage: Storage):
        size = config.hidden_size
        self.window = layer.window
        self.input_layernorm = RMSNorm(size, config)
        self.self_attn = Attention(config, layer, storage)
        self.post_attention_layernorm = RMSNorm(size, config)
        self.mlp = Mlp(config, storage)
        post = config.post_norms
        self.pre_feedforward_layernorm = nnx.data(RMSNorm(size, config) if post else None)
        self.post_feedforward_layernorm = nnx.data(RMSNorm(size, config) if post else None)

    def __call__(
        self, x: jax.Array, where: Where, cache: Cache | None, key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, T, hidden]` -> `[B, T, hidden]`, and the cache with these tokens in it."""
        x = checkpoint_name(x, LAYER_INPUT)
        normed, _ = self.input_layernorm(x)
        normed = checkpoint_name(normed, "input_norm")
        attended, cache = self.self_attn(normed, where, cache, key)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            normed, x = self.post_attention_layernorm(attended, residual=x)
            return x + self.mlp(checkpoint_name(normed, "mlp_norm"), key), cache
        attended, _ = self.post_attention_layernorm(attended)
        normed, x = self.pre_feedforward_layernorm(attended, residual=x)
        wide = self.mlp(checkpoint_name(normed, "mlp_norm"), key)
        wide, _ = self.post_feedforward_layernorm(wide)
        return x + wide, cache


class Group(nnx.Module):
    """A pattern of layers that repeats: the tensors of its repetitions are stacked and scanned.

    Attributes:
      members: the layers of one period, whose tensors have a leading axis of repetitions.
      first: number of its first layer in the model.
      size: how often the pattern stands.
    """

    def __init__(self, members: list[Layer], first: int, size: int):
        self.members = nnx.List(members)
        self.first = first
        self.size = size

    def numbers(self, member: int) -> range:
        """Numbers in the model of the layers that are stacked in a member."""
        period = len(self.members)
        return range(self.first + member, self.first + period * self.size, period)

    def __call__(
        self,
        x: jax.Array,
        wheres: Wheres,
        caches: Caches | None,
        key: jax.Array | None,
        checkpointing: str,
    ) -> tuple[jax.Array, Caches | None]:
        """All layers in order. The caches' tensors have a leading axis of repetitions too."""
        parts = [nnx.split(member) for member in self.members]
        structures = [structure for structure, _ in parts]

        def one(structure, x, state, number, cache):
            layer = nnx.merge(structure, state)
            layer_key = None if key is None else jax.random.fold_in(key, number)
            return layer(x, wheres[layer.window], cache, layer_key)

        def body(x, repetition):
            states, number, caches = repetition
            filled = []
            for i, structure in enumerate(structures):
                run = rematerialise(partial(one, structure), checkpointing)
                x, cache = run(x, states[i], number + i, None if caches is None else caches[i])
                filled.append(cache)
            return x, None if caches is None else tuple(filled)

        states = tuple(state for _, state in parts)
        numbers = jnp.asarray(self.numbers(0), jnp.int32)
        return lax.scan(body, x, (states, numbers, caches))
