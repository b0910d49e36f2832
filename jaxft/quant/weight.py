"""The forms in which a frozen matrix is stored, behind one interface."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.nf4 import NF4, dequantize, quantize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """A matrix `[..., out, in]` as it is; leading axes are layers."""

    array: jax.Array


Weight = NF4 | Dense


def dense(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The weight as an array `[..., out, in]` of this dtype."""
    if isinstance(weight, NF4):
        return dequantize(weight, dtype)
    return weight.array.astype(dtype)


@dataclass(frozen=True)
class Storage:
    """How a model's tensors are kept on the device.

    Attributes:
      load_in_4bit: the projections as NF4; else in the checkpoint's own dtype.
      nested: quantise the NF4 scales too (double quantisation).
      compute: dtype of the arithmetic.
    """

    load_in_4bit: bool
    nested: bool
    compute: jnp.dtype

    def matrix(self, array: jax.Array) -> Weight:
        """A projection `[out, in]` as it is stored."""
        if self.load_in_4bit:
            return quantize(array, nested=self.nested)
        return Dense(array)

    def other(self, array: jax.Array) -> jax.Array:
        """An embedding, head, norm or bias: 16 bit where the arithmetic is."""
        if self.load_in_4bit and jnp.dtype(self.compute).itemsize == 2:
            return array.astype(self.compute)
        return array
