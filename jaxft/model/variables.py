"""The two kinds of variables: frozen ones here, trained ones are `nnx.LoRAParam`."""

from flax import nnx


class Frozen(nnx.Variable):
    """A tensor, or a stored weight, that training never changes."""
