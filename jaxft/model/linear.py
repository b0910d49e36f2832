"""A projection: a frozen weight, and room for an adapter."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxft.model.variables import Frozen
from jaxft.quant import Adapter, Storage, linear


class Linear(nnx.Module):
    """`x @ weight.T + bias`, plus the adapter's product where there is one."""

    def __init__(self, shape: tuple[int, int], storage: Storage, *, bias: bool):
        self.out_features, self.in_features = shape
        self.compute = storage.compute
        self.weight = Frozen(storage.matrix(jnp.zeros(shape)))
        self.bias = nnx.data(Frozen(jnp.zeros(self.out_features)) if bias else None)
        self.adapter: Any = nnx.data(None)  # a lora.Lora, once there is one

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """`[..., in]` -> `[..., out]` in the compute dtype; a key draws the dropout mask."""
        adapter: Adapter | None = None
        if self.adapter is not None:
            adapter = self.adapter.value()
            key = None if key is None else jax.random.fold_in(key, self.adapter.salt)
        weight = self.weight.get_value()
        y = linear(x, weight, adapter, compute=self.compute, dropout_key=key)
        if self.bias is not None:
            y += self.bias.get_value().astype(y.dtype)
        return y
