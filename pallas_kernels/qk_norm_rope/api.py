"""RoPE on queries and keys: the public function and the choice of its implementation."""

import jax

from pallas_kernels.dispatch import choose
from pallas_kernels.qk_norm_rope import reference


def qk_norm_rope(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    attention_factor: float = 1.0,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys by their positions, after an optional RMSNorm of each head.

    The rotation pairs element i with element i + R/2 of a head, R being twice the number of
    frequencies; elements from R on pass through. Angles are float32 whatever q's dtype.

    Args:
      q: `[B, T, Hq, D]`.
      k: `[B, T, Hkv, D]`.
      positions: int32 `[B, T]`, the index of each token in its document.
      inv_freq: float32 `[R/2]`, radians per position, R <= D.
      attention_factor: factor on cosine and sine (YaRN, longrope).
      q_scale: `[D]`, scale of the RMSNorm of each query head; None for no norm.
      k_scale: `[D]`, as `q_scale` for keys.
      eps: of the norms.
      norm_offset: added to the norms' scales (Gemma's are stored minus one).
      implementation: `"auto"` or `"xla"`.

    Returns:
      q and k in their own dtypes.

    Raises:
      ValueError: more frequencies than pairs, or an implementation that cannot serve the call.
    """
    if 2 * inv_freq.shape[-1] > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"qk_norm_rope: {inv_freq.shape[-1]} frequencies for heads of {q.shape[-1]} "
            f"and {k.shape[-1]}"
        )
    choose("qk_norm_rope", implementation, capabilities())
    return reference.qk_norm_rope(
        q, k, positions, inv_freq, q_scale, k_scale, attention_factor, eps, norm_offset
    )


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}
