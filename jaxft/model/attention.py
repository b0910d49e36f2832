"""The attention half of a layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxft.model.config import LayerConfig, ModelConfig
from jaxft.model.linear import Linear
from jaxft.model.norm import RMSNorm
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
        shapes, bias = config.projections, config.qkv_bias
        self.head_dim = config.head_dim
        self.rope = layer.rope
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.q_proj = Linear(shapes["self_attn.q_proj"], storage, bias=bias)
        self.k_proj = Linear(shapes["self_attn.k_proj"], storage, bias=bias)
        self.v_proj = Linear(shapes["self_attn.v_proj"], storage, bias=bias)
        self.o_proj = Linear(shapes["self_attn.o_proj"], storage, bias=config.o_bias)
        norms = config.qk_norm
        self.q_norm = nnx.data(RMSNorm(self.head_dim, config) if norms else None)
        self.k_norm = nnx.data(RMSNorm(self.head_dim, config) if norms else None)

    def __call__(
        self, x: jax.Array, where: Where, cache: Cache | None, key: jax.Array | None
    ) -> tuple[jax.Array, Cache | None]:
        """`[B, T, hidden]` -> `[B, T, hidden]`, and the cache with these tokens in it."""
        q, k, v = (
            checkpoint_name(self._heads(project(x, key)), name)
            for name, project in (("q", self.q_proj), ("k", self.k_proj), ("v", self.v_proj))
        )
        norms = {}
        if self.q_norm is not None and self.k_norm is not None:
            norms = {
                "q_scale": self.q_norm.weight.get_value(),
                "k_scale": self.k_norm.weight.get_value(),
                "eps": self.q_norm.eps,
                "norm_offset": self.q_norm.offset,
            }
        q, k = qk_norm_rope(
            q,
            k,
            where.positions,
            jnp.asarray(self.rope.array()),
            attention_factor=self.rope.attention_factor,
            **norms,
        )
        q, k = checkpoint_name(q, "q_rotated"), checkpoint_name(k, "k_rotated")
        if cache is not None:
            assert where.cache_index is not None
            cache = cache.write(k, v, where.cache_index)
            k, v = cache.k, cache.v
        out = attention(q, k, v, where.plan, scale=self.scale, softcap=self.softcap)
        out = checkpoint_name(out, "attention").reshape(*x.shape[:-1], -1)
        return checkpoint_name(self.o_proj(out, key), "o"), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
