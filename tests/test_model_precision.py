"""bfloat16 arithmetic is as good far into a document as at its start."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FP32, load, logits, save_llama

from jaxft.model import attention
from jaxft.quant import Storage

pytest.importorskip("torch")

BF16 = Storage(load_in_4bit=False, nested=False, compute=jnp.dtype(jnp.bfloat16))
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 600))


def rotate_by_16_bit_angles(q, k, positions, inv_freq, *, attention_factor):
    """RoPE whose positions and frequencies are cast to the dtype of the model."""
    angles = (positions.astype(q.dtype)[..., None] * inv_freq.astype(q.dtype))[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def one(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return one(q), one(k)


def test_error_does_not_grow_with_position(tmp_path, fixtures, monkeypatch):
    save_llama(fixtures, tmp_path)
    exact = logits(load(tmp_path, FP32), TOKENS)

    def errors():
        """Mean difference to float32 over the first and the last 100 positions."""
        by_position = np.abs(logits(load(tmp_path, BF16), TOKENS) - exact).mean((0, 2))
        return by_position[:100].mean(), by_position[-100:].mean()

    first, last = errors()
    assert 0 < last < 2 * first
    assert first < 2e-2
    monkeypatch.setattr(attention, "qk_norm_rope", rotate_by_16_bit_angles)
    wrong_first, wrong_last = errors()
    assert wrong_last > 2 * wrong_first
    assert wrong_last > 2 * last
    print("ERR", first, last, wrong_first, wrong_last)
