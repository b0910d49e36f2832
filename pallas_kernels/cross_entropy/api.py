"""Cross-entropy over the output head: public function, checks and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import reference
from pallas_kernels.dispatch import choose


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    softcap: float | None = None,
    implementation: str = "auto",
    chunk_size: int | None = None,
) -> jax.Array:
    """Loss of each token: -log softmax(cap(hidden head^T))[target], without a [tokens, V] array.

    Tokens without a target cost nothing beyond the chunk they share with others; their loss and
    gradients are exactly 0, whatever their hidden state holds. Differentiable with respect to
    `hidden` and `head`, once, for any cotangent per token. While the head is not differentiated,
    the forward pass makes the gradient of `hidden` (of its size and dtype: the only residual) and
    the backward pass rescales it; a primal call makes none. A differentiated head costs a second
    pass over the logits, and a [V, H] gradient summed in float32.

    Args:
      hidden: [B, T, H] (any leading axes), float. Matrix products run in this dtype with float32
        sums (float32 without TF32); all else is float32. In float16, probabilities below 6e-8 do
        not reach the gradient.
      head: [V, H], float; cast to the dtype of `hidden` where they differ.
      targets: int32 [B, T]: the id that each token must predict; negative means none. An id of
        V or more makes the token's loss and gradients NaN.
      softcap: replaces a logit x by softcap * tanh(x / softcap).
      implementation: "auto" or "xla".
      chunk_size: tokens whose logits exist at a time; default: an eighth of them, at least 256
        and at most 1024, fewer (down to 128) where their logits would pass 512 MiB.

    Returns:
      Negative log-likelihoods in nats, float32 [B, T].

    Raises:
      ValueError: shapes or dtypes that do not fit, softcap or chunk_size not above 0, or an
        implementation that is unknown or cannot serve the call.
    """
    _check(hidden, head, targets, softcap, chunk_size)
    choose("cross_entropy", implementation, capabilities())
    tokens = targets.size
    if tokens == 0:
        return jnp.zeros(targets.shape, jnp.float32)
    chunk = chunk_size or reference.default_chunk_size(tokens, head.shape[0])
    nll = reference.cross_entropy(
        hidden.reshape(tokens, -1),
        head,
        jnp.asarray(targets).reshape(tokens),
        None if softcap is None else float(softcap),
        min(chunk, tokens),
    )
    return nll.reshape(targets.shape)


def capabilities() -> dict[str, str | None]:
    """Implementations in order of preference, with the reason where one cannot serve."""
    return {"xla": None}


def _check(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    softcap: float | None,
    chunk_size: int | None,
) -> None:
    shapes = f"hidden {hidden.shape}, head {head.shape}, targets {targets.shape}"
    if head.ndim != 2 or hidden.shape[-1:] != head.shape[1:] or hidden.shape[:-1] != targets.shape:
        raise ValueError(f"cross_entropy: expected [B, T, H], [V, H] and [B, T], got {shapes}")
    if not (
        jnp.issubdtype(hidden.dtype, jnp.floating) and jnp.issubdtype(head.dtype, jnp.floating)
    ):
        raise ValueError(f"cross_entropy: expected floats, got {hidden.dtype} and {head.dtype}")
    if targets.dtype != jnp.int32:
        raise ValueError(f"cross_entropy: targets must be int32, got {targets.dtype}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"cross_entropy: softcap must be above 0, got {softcap}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"cross_entropy: chunk_size must be above 0, got {chunk_size}")
