"""The definition of the head's cross-entropy in plain XLA: a scan over chunks of tokens.

Tokens with a target are put first (a stable sort), so that whole chunks without one are skipped.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.precision import dot_precision

LOGITS_BYTES = 2**29  # bound on one chunk of float32 logits


def default_chunk_size(tokens: int, vocabulary: int) -> int:
    """Tokens in a chunk: an eighth of all, so that skipping saves, within 256 and 1024.

    Fewer, down to 128, where the logits would pass LOGITS_BYTES; the last chunk is as full as the
    others, to a multiple of 64.
    """
    most = min(max(LOGITS_BYTES // (4 * vocabulary) // 64 * 64, 128), 1024)
    wanted = min(max(math.ceil(tokens / 8), 256), most)
    even = math.ceil(tokens / math.ceil(tokens / wanted))
    return math.ceil(even / 64) * 64


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, softcap: float | None, chunk: int
) -> jax.Array:
    """Losses float32 [N] of hidden [N, H], head [V, H] and targets int32 [N], `chunk` at a time."""
    nll, _, _ = _losses(hidden, head, targets, softcap, chunk, with_gradient=False)
    return nll


def _forward(hidden: Any, head: Any, targets: Any, softcap: float | None, chunk: int):
    """With symbolic zeros each argument says whether it is differentiated (`perturbed`)."""
    nll, logsumexp, d_hidden = _losses(
        hidden.value, head.value, targets.value, softcap, chunk, with_gradient=hidden.perturbed
    )
    for_head = (hidden.value, head.value, logsumexp) if head.perturbed else None
    return nll, (targets.value, d_hidden, for_head)


def _backward(softcap: float | None, chunk: int, residuals: tuple, cotangent: jax.Array):
    targets, d_hidden, for_head = residuals
    weights = jnp.where(targets >= 0, cotangent, 0)
    d_head = None
    if for_head is not None:
        hidden, head, logsumexp = for_head
        d_head = _head_gradient(hidden, head, logsumexp, targets, weights, softcap, chunk)
    if d_hidden is not None:
        d_hidden = (d_hidden.astype(jnp.float32) * weights[:, None]).astype(d_hidden.dtype)
    return d_hidden, d_head, None


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _losses(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    softcap: float | None,
    chunk: int,
    *,
    with_gradient: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Losses [N], logsumexp [N] and, if asked for, the gradient [N, H] of the sum of the losses."""
    head = head.astype(hidden.dtype)

    def run(rows, target):
        capped, slope = _logits(rows, head, softcap)
        logsumexp = jax.nn.logsumexp(capped, axis=-1)
        # An id past the vocabulary must not become a plausible number.
        logsumexp = jnp.where(target < head.shape[0], logsumexp, jnp.nan)
        own = jnp.take_along_axis(capped, jnp.maximum(target, 0)[:, None], axis=-1, mode="clip")
        nll = jnp.where(target >= 0, logsumexp - own[:, 0], 0)
        if not with_gradient:
            return nll, logsumexp, None
        d_logits = _logits_gradient(capped, slope, logsumexp, target)
        d_rows = _matmul(d_logits.astype(rows.dtype), head, ((1,), (0,)))
        return nll, logsumexp, d_rows.astype(rows.dtype)

    def skip(rows, target):
        zeros = jnp.zeros(target.shape, jnp.float32)
        return zeros, zeros, jnp.zeros_like(rows) if with_gradient else None

    def body(carry, part):
        index, target = part
        rows = _rows(hidden, index, target)
        # Targets are sorted: a chunk whose first token has none holds none.
        return carry, lax.cond(target[0] >= 0, run, skip, rows, target)

    order, inverse = _order(targets)
    parts = _chunks(order, chunk, fill=0), _chunks(targets[order], chunk, fill=-1)
    _, results = lax.scan(body, None, parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[inverse], results)


def _head_gradient(
    hidden: jax.Array,
    head: jax.Array,
    logsumexp: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    softcap: float | None,
    chunk: int,
) -> jax.Array:
    """Gradient [V, H] of sum(weights * losses), in the dtype of `head`; the logits are redone."""
    cast = head.astype(hidden.dtype)
    # Weights like 1 / tokens would push a float16 gradient below its range: take them out first.
    largest = jnp.max(jnp.abs(weights))
    largest = jnp.where(largest == 0, 1, largest)

    def run(total, rows, target, lse, weight):
        capped, slope = _logits(rows, cast, softcap)
        d_logits = _logits_gradient(capped, slope, lse, target) * weight[:, None]
        return total + _matmul(d_logits.astype(rows.dtype), rows, ((0,), (0,)))

    def body(total, part):
        index, target, lse, weight = part
        rows = _rows(hidden, index, target)
        skip = lambda total, *_: total  # noqa: E731
        return lax.cond(target[0] >= 0, run, skip, total, rows, target, lse, weight), None

    order, _ = _order(targets)
    parts = (
        _chunks(order, chunk, fill=0),
        _chunks(targets[order], chunk, fill=-1),
        _chunks(logsumexp[order], chunk, fill=0),
        _chunks((weights / largest)[order], chunk, fill=0),
    )
    total, _ = lax.scan(body, jnp.zeros(head.shape, jnp.float32), parts)
    return (total * largest).astype(head.dtype)


def _logits(
    rows: jax.Array, head: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Logits float32 [chunk, V], capped, and the slope of the cap at each (None without one)."""
    logits = _matmul(rows, head, ((1,), (1,)))
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, 1 - tanh * tanh


def _logits_gradient(
    capped: jax.Array, slope: jax.Array | None, logsumexp: jax.Array, target: jax.Array
) -> jax.Array:
    """(softmax - one-hot) * slope, float32 [chunk, V]; 0 in rows without a target."""
    column = lax.broadcasted_iota(target.dtype, capped.shape, 1)
    one_hot = (column == target[:, None]).astype(jnp.float32)
    gradient = jnp.exp(capped - logsumexp[:, None]) - one_hot
    if slope is not None:
        gradient *= slope
    return jnp.where((target >= 0)[:, None], gradient, 0)


def _matmul(a: jax.Array, b: jax.Array, contract: tuple) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=dot_precision(a, b),
        preferred_element_type=jnp.float32,
    )


def _rows(hidden: jax.Array, index: jax.Array, target: jax.Array) -> jax.Array:
    """The tokens of a chunk [chunk, H]; 0 where there is no target, as NaN * 0 would stay NaN."""
    rows = hidden.at[index].get(mode="promise_in_bounds")
    return jnp.where((target >= 0)[:, None], rows, 0)


def _order(targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices [N] that put tokens with a target first, and the indices [N] that undo it."""
    order = jnp.argsort(targets < 0, stable=True)
    inverse = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    return order, inverse


def _chunks(x: jax.Array, chunk: int, fill: int) -> jax.Array:
    """[N] -> [ceil(N / chunk), chunk]."""
    return jnp.pad(x, (0, -x.size % chunk), constant_values=fill).reshape(-1, chunk)
