"""Generation with a cache of keys and values, to try a base model or a tuned one."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxft.model.decoder import Decoder


def generate(
    decoder: Decoder,
    prompt: list[int],
    *,
    stop: frozenset[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Tokens that follow a prompt, up to and without a stop token.

    Args:
      decoder: the model, with or without adapters.
      prompt: token ids.
      stop: token ids that end the answer.
      max_new_tokens: most tokens to make.
      temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
      seed: of the sampling.
    """
    answer = []
    for token in _stream(decoder, prompt, max_new_tokens, temperature, seed):
        if token in stop:
            break
        answer.append(token)
    return answer


def _stream(
    decoder: Decoder, prompt: list[int], count: int, temperature: float, seed: int
) -> Iterator[int]:
    structure, state = nnx.split(decoder)
    room = 64 * -(-(len(prompt) + count) // 64)  # few different shapes, few compilations
    caches = decoder.empty_caches(1, room)
    key = jax.random.key(seed)
    tokens, filled = jnp.asarray([prompt], jnp.int32), 0
    for i in range(count):
        step_key = jax.random.fold_in(key, i)
        token, caches = _extend(structure, temperature, state, tokens, filled, caches, step_key)
        yield int(token)
        filled += tokens.shape[1]
        tokens = token[None, None]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)  # compiled once for many answers
def _extend(structure, temperature, state, tokens, filled, caches, key):
    """The next token after `tokens`, and the caches with them in it."""
    decoder = nnx.merge(structure, state)
    hidden, caches = decoder.extend(tokens, filled, caches)
    logits = decoder.logits(hidden[0, -1])
    if temperature == 0:
        return jnp.argmax(logits), caches
    return jax.random.categorical(key, logits / temperature), caches
