"""The loss: a sum over target tokens, normalised once by the targets of the whole step."""

import jax
import jax.numpy as jnp

from jaxft.model.decoder import Decoder
from pallas_kernels.cross_entropy import cross_entropy


def sum_of_losses(
    decoder: Decoder,
    tokens: jax.Array,
    segment_ids: jax.Array,
    targets: jax.Array,
    *,
    dropout_key: jax.Array | None = None,
    checkpointing: str = "false",
) -> jax.Array:
    """float32 []: the negative log-likelihoods of all targets of packed rows, added up.

    Args:
      decoder: the model.
      tokens: int32 `[B, T]`.
      segment_ids: int32 `[B, T]`; 0 is padding.
      targets: int32 `[B, T]`, the token that each position must predict; -1 for none.
      dropout_key: where given, the adapters' dropout draws from it.
      checkpointing: one of `jaxft.model.remat.POLICIES`.
    """
    hidden = decoder(tokens, segment_ids, dropout_key=dropout_key, checkpointing=checkpointing)
    cap = decoder.config.final_softcap
    return cross_entropy(hidden, decoder.head, targets, softcap=cap).sum()


def count_targets(targets: jax.Array) -> jax.Array:
    """int32 []: how many positions have a target."""
    return jnp.sum(targets >= 0, dtype=jnp.int32)
