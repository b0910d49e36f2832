"""The definition of packed attention in XLA, in blocks of queries.

The scores of one block of queries are all that exists at a time, `[B, Hq, block, Tk]` in float32;
the backward pass makes them again from the saved logsumexp. It runs anywhere and walks every key:
paying only for the documents is the kernels' part.
Inside, heads stand before tokens, so that every product is one matrix product for each key head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.plan import Plan
from pallas_kernels.precision import dot_precision

SCORE_BYTES = 256 * 2**20  # most that one block of scores takes
RESIDUALS = ("attention_out", "attention_logsumexp")  # names for a rematerialisation policy
MASKED = -1e30  # finite, so that a row without keys makes no NaN


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, plan: Plan, scale: float, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Output `[B, Tq, Hq, D]` and logsumexp `[B, Tq, Hq]`; see `api.attention`."""
    keys, values = (x.swapaxes(1, 2) for x in (k, v))

    def block(carry, xs):
        qb, *where = xs
        scores, seen = _scores(qb, keys, plan, where, scale, softcap)
        top = scores.max(-1, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        total = weights.sum(-1, keepdims=True)
        any_seen = total > 0
        weights = weights / jnp.where(any_seen, total, 1.0)
        out = _dot("bkgqt,bktd->bkgqd", weights.astype(v.dtype), values)
        logsumexp = jnp.where(any_seen, top + jnp.log(jnp.where(any_seen, total, 1.0)), -jnp.inf)
        return carry, (out.astype(q.dtype), logsumexp[..., 0])

    _, (out, logsumexp) = lax.scan(block, None, _blocks(q, plan, k))
    return _join(out, q.shape), _join(logsumexp, q.shape[:-1])


def _forward(q, k, v, plan, scale, softcap):
    out, logsumexp = attention(q, k, v, plan, scale, softcap)
    out = checkpoint_name(out, RESIDUALS[0])
    logsumexp = checkpoint_name(logsumexp, RESIDUALS[1])
    return (out, logsumexp), (q, k, v, plan, out, logsumexp)


def _backward(scale, softcap, residuals, cotangents):
    q, k, v, plan, out, logsumexp = residuals
    d_out, d_logsumexp = cotangents
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_logsumexp
    keys, values = (x.swapaxes(1, 2) for x in (k, v))

    def block(carry, xs):
        dk, dv = carry
        qb, *where, d_out_b, logsumexp_b, delta_b = xs
        scores, seen = _scores(qb, keys, plan, where, scale, softcap)
        weights = jnp.where(seen, jnp.exp(scores - logsumexp_b[..., None]), 0.0)
        dv += _dot("bkgqt,bkgqd->bktd", weights.astype(v.dtype), d_out_b)
        d_weights = _dot("bkgqd,bktd->bkgqt", d_out_b, values)
        d_scores = weights * (d_weights - delta_b[..., None])
        if softcap is not None:
            d_scores *= 1.0 - jnp.square(jnp.where(seen, scores, 0.0) / softcap)
        d_scores = (d_scores * scale).astype(q.dtype)
        dk += _dot("bkgqt,bkgqd->bktd", d_scores, qb)
        return (dk, dv), _dot("bkgqt,bktd->bkgqd", d_scores, keys).astype(q.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    xs = (*_blocks(q, plan, k), *(_split(x, q, k) for x in (d_out, logsumexp, delta)))
    (dk, dv), dq = lax.scan(block, (zeros, zeros), xs)
    dk, dv = (x.swapaxes(1, 2) for x in (dk, dv))
    return _join(dq, q.shape), dk.astype(k.dtype), dv.astype(v.dtype), None


attention.defvjp(_forward, _backward)


def _scores(qb, keys, plan, where, scale, softcap):
    """Masked scores `[B, Hkv, G, block, Tk]` of a block of queries, and who sees whom."""
    segments, positions = where
    scores = _dot("bkgqd,bktd->bkgqt", qb, keys) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = positions[:, :, None] - plan.kv_positions[:, None, :]
    seen = (segments[:, :, None] == plan.kv_segments[:, None, :]) & (segments[:, :, None] != 0)
    seen &= distance >= 0
    if plan.window is not None:
        seen &= distance < plan.window
    seen = seen[:, None, None]
    return jnp.where(seen, scores, MASKED), seen


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, precision=dot_precision(a, b), preferred_element_type=jnp.float32
    )


def _block_size(q: jax.Array, k: jax.Array) -> int:
    row = 4 * q.shape[0] * q.shape[2] * k.shape[1]
    return max(1, min(q.shape[1], SCORE_BYTES // row))


def _blocks(q: jax.Array, plan: Plan, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, segments, positions = (_split(x, q, k) for x in (q, plan.q_segments, plan.q_positions))
    return queries, segments, positions


def _split(x: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """`[B, Tq]` -> `[blocks, B, block]`; `[B, Tq, Hq, ...]` -> `[blocks, B, Hkv, G, block, ...]`.

    Padded with zeros, that is with segment 0.
    """
    size = _block_size(q, k)
    blocks = -(-q.shape[1] // size)
    x = jnp.pad(x, [(0, 0), (0, blocks * size - q.shape[1]), *[(0, 0)] * (x.ndim - 2)])
    if x.ndim == 2:
        return jnp.moveaxis(x.reshape(-1, blocks, size), 1, 0)
    heads = k.shape[2], q.shape[2] // k.shape[2]
    x = x.reshape(x.shape[0], blocks, size, *heads, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 4))


def _join(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[blocks, B, Hkv, G, block, ...]` -> `shape`, that is `[B, Tq, Hq, ...]`."""
    rows = jnp.moveaxis(blocks, (0, 4), (1, 2))
    rows = rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], *shape[2:])
    return rows[:, : shape[1]]
