"""RMSNorm: the public function and the choice of its implementation."""

import jax

from pallas_kernels.dispatch import choose
from pallas_kernels.norm import reference


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    residual: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`h / sqrt(mean(h²) + eps) * (scale + offset)` over the last axis, h being x plus residual.

    Args:
      x: `[..., H]`.
      scale: `[H]`.
      eps: added to the mean square.
      offset: added to the scale (Gemma stores scales minus one).
      residual: `[..., H]`, added to x first where given.
      implementation: `"auto"` or `"xla"`.

    Returns:
      The normalised tensor and h itself, both in x's dtype; arithmetic in float32.

    Raises:
      ValueError: an implementation that cannot serve the call.
    """
    choose("norm", implementation, capabilities())
    return reference.rms_norm(x, scale, residual, eps, offset)


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}
