"""The attention half of a layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxft.model.config import LayerConfig, ModelConfig
from jaxft.model.linear import Linear
from jaxft.quant import Storage
from pallas_kernels.attention import Plan, attention
from pallas_kernels.qk_norm_rope import qk_norm_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, `[B, capacity, Hkv, D]` each."""

    k: jax.Array
    v: jax.Array

    def write(self, k: jax.Array, v: jax.Array, at: jax.Array) -> "Cache":
        """The cache with `[B, n, Hkv, D]` more entries from index `at` on."""
        return Cache(
            lax.dynamic_update_slice_in_dim(self.k, k, at, axis=1),
            lax.dynamic_update_slice_in_dim(self.v, v, at, axis=1),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Where the tokens stand: made once per batch and shared by all layers."""

    positions: jax.Array  # int32 [B, T], index in the document
    plan: Plan
    cache_index: jax.Array | None = None  # int32 [], where these tokens enter the cache


class Attention(nnx.Module):
    """Multi-head attention with RoPE, inside segments."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, storage: Storage):
        shapes, bias = config.projections, config.attention_bias
        self.head_dim = config.head_dim
        self.rope = layer.rope
        self.q_proj = Linear(shapes["self_attn.q_proj"], storage, bias=bias)
        self.k_proj = Linear(shapes["self_attn.k_proj"], storage, bias=bias)
        self.v_proj = Linear(shapes["self_attn.v_proj"], storage, bias=bias)
        self.o_proj = Linear(shapes["self_attn.o_proj"], storage, bias=bias)

    def __call__(
        self, x: jax.Array, where: Where, cache: Cache | None, key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, T, hidden]` -> `[B, T, hidden]`, and the cache with these tokens in it."""
        q, k, v = (self._heads(p(x, key)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = qk_norm_rope(
            q,
            k,
            where.positions,
            jnp.asarray(self.rope.array()),
            attention_factor=self.rope.attention_factor,
        )
        if cache is not None:
            assert where.cache_index is not None
            cache = cache.write(k, v, where.cache_index)
            k, v = cache.k, cache.v
        out = attention(q, k, v, where.plan, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), key), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
