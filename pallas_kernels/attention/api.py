"""Attention: the public function and the choice of its implementation."""

from typing import Literal, overload

import jax

from pallas_kernels.attention import reference
from pallas_kernels.attention.plan import Plan
from pallas_kernels.dispatch import choose


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    return_logsumexp: Literal[False] = False,
    implementation: str = "auto",
) -> jax.Array: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    return_logsumexp: Literal[True],
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]: ...
def attention(q, k, v, plan, *, scale, softcap=None, return_logsumexp=False, implementation="auto"):
    """Causal attention inside segments, softmax in float32.

    Args:
      q: `[B, Tq, Hq, D]`.
      k: `[B, Tk, Hkv, D]`; Hkv divides Hq, query head h reads key head `h // (Hq // Hkv)`.
      v: `[B, Tk, Hkv, D]`.
      plan: from `make_plan`.
      scale: factor on the scores, usually `D ** -0.5`.
      softcap: `cap * tanh(score / cap)` after the scale, where given.
      return_logsumexp: also return the float32 `[B, Tq, Hq]` log of the softmax's denominator
        (-inf where a query sees nothing).
      implementation: `"auto"` or `"xla"`.

    Returns:
      `[B, Tq, Hq, D]` in q's dtype; exactly 0, with zero gradients, where a query sees nothing.

    Raises:
      ValueError: shapes that do not fit, or an implementation that cannot serve the call.
    """
    _check(q, k, v, plan)
    choose("attention", implementation, capabilities())
    out, logsumexp = reference.attention(q, k, v, plan, scale, softcap)
    return (out, logsumexp) if return_logsumexp else out


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}


def _check(q: jax.Array, k: jax.Array, v: jax.Array, plan: Plan) -> None:
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention: shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} query heads over {k.shape[2]} key heads")
    if plan.q_segments.shape != q.shape[:2] or plan.kv_segments.shape != k.shape[:2]:
        raise ValueError(
            f"attention: the plan is for {plan.q_segments.shape} queries and "
            f"{plan.kv_segments.shape} keys, not {q.shape[:2]} and {k.shape[:2]}"
        )
