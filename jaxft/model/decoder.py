"""One decoder for every model family. Its attributes are named as the tensors of a checkpoint."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxft.model.attention import Cache, Where
from jaxft.model.config import ModelConfig
from jaxft.model.layer import Caches, Group
from jaxft.model.norm import RMSNorm
from jaxft.model.variables import Frozen
from pallas_kernels.attention import make_plan
from pallas_kernels.precision import dot_precision


class Embedding(nnx.Module):
    """A table `[vocab, hidden]`: token embeddings, or an output head."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = Frozen(jnp.zeros((vocab_size, hidden_size)))


class Decoder(nnx.Module):
    """Tokens to hidden states, through groups of scanned layers."""

    def __init__(self, config: ModelConfig, groups: list[Group], compute: jnp.dtype):
        self.config = config
        self.compute = compute
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.groups = nnx.List(groups)
        self.norm = RMSNorm(config.hidden_size, config)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None if tied else Embedding(config.vocab_size, config.hidden_size))

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        checkpointing: str = "false",
    ) -> jax.Array:
        """Hidden states `[B, T, hidden]` of packed rows, after the last norm.

        Args:
          tokens: int32 `[B, T]`, each below the vocabulary's size (the data path checks it).
          segment_ids: int32 `[B, T]`; 0 is padding, documents are 1, 2, 3, ... in order.
          dropout_key: where given, the adapters' dropout is on and draws from it.
          checkpointing: one of `jaxft.model.remat.POLICIES`.
        """
        positions = document_positions(segment_ids)
        wheres = {
            window: Where(positions, make_plan(segment_ids, window=window))
            for window in self._windows
        }
        hidden, _ = self._run(tokens, wheres, None, dropout_key, checkpointing)
        return hidden

    def extend(
        self, tokens: jax.Array, index: jax.Array, caches: list[Caches]
    ) -> tuple[jax.Array, list[Caches]]:
        """Hidden states of one document's next tokens `[B, n]`, and the caches with them in it.

        Args:
          tokens: int32 `[B, n]`.
          index: int32 [], how many tokens the caches hold already; with the new ones at most
            their capacity, which is not checked.
          caches: from `empty_caches`, one for each group.
        """
        batch, count = tokens.shape
        capacity = caches[0][0].k.shape[2]
        positions = jnp.broadcast_to(index + jnp.arange(count), (batch, count))
        slots = jnp.broadcast_to(jnp.arange(capacity), (batch, capacity))
        filled = (slots < index + count).astype(jnp.int32)
        ones = jnp.ones_like(positions)
        wheres = {
            window: Where(positions, make_plan(ones, filled, positions, slots, window), index)
            for window in self._windows
        }
        return self._run(tokens, wheres, caches, None, "false")

    def empty_caches(self, batch: int, capacity: int) -> list[Caches]:
        """Room for the keys and values of `capacity` tokens of each of `batch` documents."""
        config = self.config

        def room(group: Group) -> Caches:
            shape = (group.size, batch, capacity, config.num_kv_heads, config.head_dim)
            return tuple(
                Cache(*(jnp.zeros(shape, self.compute) for _ in "kv")) for _ in group.members
            )

        return [room(group) for group in self.groups]

    @property
    def _windows(self) -> set[int | None]:
        return {member.window for group in self.groups for member in group.members}

    @property
    def head(self) -> jax.Array:
        """The output matrix `[vocab, hidden]`, the embedding's own where they are tied."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight.get_value()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of hidden states `[..., hidden]`; for a few tokens at a time."""
        head = self.head.astype(hidden.dtype)
        logits = jnp.einsum(
            "...h,vh->...v",
            hidden,
            head,
            precision=dot_precision(hidden, head),
            preferred_element_type=jnp.float32,
        )
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What enters the first layer, `[B, T, hidden]`, for tokens `[B, T]`."""
        x = self.embed_tokens.weight.get_value()[tokens].astype(self.compute)
        if self.config.embedding_scale is not None:
            x *= jnp.asarray(self.config.embedding_scale, self.compute)
        return x

    def _run(self, tokens, wheres, caches, dropout_key, checkpointing):
        x = self.embed(tokens)
        filled = []
        for group, cache in zip(self.groups, caches or [None] * len(self.groups), strict=True):
            x, cache = group(x, wheres, cache, dropout_key, checkpointing)
            filled.append(cache)
        hidden, _ = self.norm(x)
        return hidden, filled


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """Index of each token in its document, int32 `[B, T]`, from segment ids `[B, T]`."""
    rows = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = lax.cummax(jnp.where(segment_ids != before, rows, 0), axis=1)
    return rows - starts
