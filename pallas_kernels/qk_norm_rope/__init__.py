"""Rotary position embedding of queries and keys, with an optional norm per head."""

from pallas_kernels.qk_norm_rope.api import qk_norm_rope

__all__ = ["qk_norm_rope"]
