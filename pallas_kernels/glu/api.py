"""Gated linear unit: the public function and the choice of its implementation."""

import jax

from pallas_kernels.dispatch import choose
from pallas_kernels.glu import reference


def glu(
    gate: jax.Array, up: jax.Array, *, activation: str = "silu", implementation: str = "auto"
) -> jax.Array:
    """`activation(gate) * up`, elementwise; arithmetic in float32, result in gate's dtype.

    Args:
      gate: `[..., F]`.
      up: `[..., F]`.
      activation: `"silu"` (SwiGLU) or `"gelu_tanh"` (GeGLU).
      implementation: `"auto"` or `"xla"`.

    Raises:
      ValueError: an unknown activation, or an implementation that cannot serve the call.
    """
    if activation not in reference.ACTIVATIONS:
        known = ", ".join(reference.ACTIVATIONS)
        raise ValueError(f"glu: activation {activation!r} is unknown; known: {known}")
    choose("glu", implementation, capabilities())
    return reference.glu(gate, up, activation)


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}
