"""Multiplication with a frozen weight and its adapter: the one place that sees how it is stored."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxft.quant.weight import Weight, dense
from pallas_kernels.precision import dot_precision


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """Low-rank addition to a linear layer: `scale * B @ A @ dropout(x)`."""

    lora_A: jax.Array  # float32 [r, in]
    lora_B: jax.Array  # float32 [out, r]
    scale: jax.Array  # float32 []
    dropout: float = field(default=0.0, metadata={"static": True})


def linear(
    x: jax.Array,
    weight: Weight,
    adapter: Adapter | None = None,
    *,
    compute: jnp.dtype,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`x @ weight.T` plus the adapter's product, in dtype `compute` with float32 accumulation.

    What is saved for the backward pass is x and the stored weight (its codes): the dense weight is
    made once in each pass and never kept. The weight gets no gradient.

    Args:
      x: `[..., in]`.
      weight: logical shape `[out, in]`.
      adapter: low-rank addition, whose float32 masters are cast to `compute` at use.
      compute: dtype of the products.
      dropout_key: where given, a fresh dropout mask is drawn from it for the adapter's input.

    Returns:
      `[..., out]`.
    """
    x = x.astype(compute)
    y = _frozen(x, weight)
    if adapter is None:
        return y
    scale = adapter.scale
    if dropout_key is not None and adapter.dropout > 0:
        keep = 1.0 - adapter.dropout
        x = jnp.where(jax.random.bernoulli(dropout_key, keep, x.shape), x, 0)
        scale = scale / keep  # in float32: x / keep would be rounded to 16 bit
    return y + _trained(_trained(x, adapter.lora_A), scale * adapter.lora_B)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, matrix, precision=dot_precision(x, matrix))


def _transposed_product(dy: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...o,oi->...i", dy, matrix, precision=dot_precision(dy, matrix))


@jax.custom_vjp
def _frozen(x: jax.Array, weight: Weight) -> jax.Array:
    return _product(x, dense(weight, x.dtype))


def _forward(x, weight):
    return _frozen(x, weight), weight


def _backward(weight, dy):
    matrix = dense(weight, dy.dtype)
    return _transposed_product(dy, matrix), None


_frozen.defvjp(_forward, _backward)


@jax.custom_vjp
def _trained(x: jax.Array, master: jax.Array) -> jax.Array:
    """Product with a float32 master, cast to x's dtype; its gradient is summed in float32."""
    return _product(x, master.astype(x.dtype))


def _trained_forward(x, master):
    return _trained(x, master), (x, master)


def _trained_backward(residuals, dy):
    x, master = residuals
    d_master = jnp.einsum(
        "...o,...i->oi",
        dy,
        x,
        precision=dot_precision(dy, x),
        preferred_element_type=jnp.float32,
    )
    return _transposed_product(dy, master.astype(dy.dtype)), d_master


_trained.defvjp(_trained_forward, _trained_backward)
