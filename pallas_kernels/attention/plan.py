"""What each query may see, worked out once per batch and window and shared by all layers."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Who attends to whom.

    Query i sees key j where their segments are equal and not 0 and
    `0 <= q_positions[i] - kv_positions[j]`, and `< window` where there is a window.
    """

    q_segments: jax.Array  # int32 [B, Tq], 0 is padding
    kv_segments: jax.Array  # int32 [B, Tk]
    q_positions: jax.Array  # int32 [B, Tq]
    kv_positions: jax.Array  # int32 [B, Tk]
    window: int | None = field(default=None, metadata={"static": True})


def make_plan(
    q_segments: jax.Array,
    kv_segments: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    window: int | None = None,
) -> Plan:
    """Plan of causal attention inside segments.

    Args:
      q_segments: int32 `[B, Tq]`; 0 is padding, documents are 1, 2, 3, ... in order.
      kv_segments: int32 `[B, Tk]`; the queries' own where left out.
      q_positions: int32 `[B, Tq]`; the index in the row where left out. Only differences inside
        a segment matter, so row indices and document positions mean the same.
      kv_positions: int32 `[B, Tk]`; as `q_positions`.
      window: how many keys a query sees, itself included; None for all.

    Raises:
      ValueError: a window below 1, or keys of another length without segments of their own.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if kv_segments is None:
        kv_segments = q_segments
        if kv_positions is None:
            kv_positions = q_positions
    return Plan(
        q_segments,
        kv_segments,
        _rows(q_segments) if q_positions is None else q_positions,
        _rows(kv_segments) if kv_positions is None else kv_positions,
        window,
    )


def _rows(segments: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(segments.shape[-1], dtype=jnp.int32), segments.shape)
