"""Cross-entropy over the output head without an array of [tokens, vocabulary]."""

from pallas_kernels.cross_entropy.api import cross_entropy

__all__ = ["cross_entropy"]
