"""The linear layer on a stored weight: values, gradients, dropout, what autodiff keeps of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxft.quant import Adapter, Dense, dense, linear
from jaxft.quant.weight import Weight
from pallas_kernels.nf4 import quantize

OUT, IN, RANK, TOKENS = 96, 128, 4, 10
FORMS = {
    "nf4": partial(quantize, nested=False),
    "nf4, nested": partial(quantize, nested=True),
    "dense": Dense,
}
fp32 = partial(linear, compute=jnp.float32)


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"w": (OUT, IN), "x": (2, TOKENS, IN), "d_y": (2, TOKENS, OUT)}
    shapes |= {"a": (RANK, IN), "b": (OUT, RANK)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def adapter(x: dict[str, np.ndarray], dropout: float = 0.0) -> Adapter:
    return Adapter(jnp.asarray(x["a"]), jnp.asarray(x["b"]), jnp.asarray(0.5), dropout)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form):
    """Against numpy in float64 on the dense weight."""
    x = arrays()
    weight = FORMS[form](jnp.asarray(x["w"]))
    own = np.asarray(dense(weight, jnp.float32), np.float64)
    assert (np.abs(own - x["w"]).max() > 0.05) == (form != "dense")

    @jax.jit
    def both(array, pair):
        y, back = jax.vjp(lambda v, p: fp32(v, weight, p), array, pair)
        return y, *back(x["d_y"])

    y, d_x, d_adapter = both(x["x"], adapter(x))
    v, a, b, d_y = (x[name].astype(np.float64) for name in ("x", "a", "b", "d_y"))
    full = own + 0.5 * b @ a
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)  # values up to 200
    close(y, v @ full.T)
    close(d_x, d_y @ full)
    close(d_adapter.lora_A, 0.5 * np.einsum("bto,or,bti->ri", d_y, b, v), atol=1e-3)
    close(d_adapter.lora_B, 0.5 * np.einsum("bto,bti,ri->or", d_y, v, a), atol=1e-3)
    for wrong in (own, own + b @ a, own.reshape(IN, OUT).T):
        assert np.abs(y - v @ wrong.T).max() > 1
    close(fp32(x["x"], weight), v @ own.T)


def test_bfloat16():
    """Products take 16-bit inputs and sum in float32; the masters stay float32 outside."""
    x = arrays()
    weight = FORMS["nf4"](jnp.asarray(x["w"]))
    pair = adapter(x)
    y, back = jax.vjp(lambda p: linear(x["x"], weight, p, compute=jnp.bfloat16), pair)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(fp32(x["x"], weight, pair))
    error = np.abs(np.asarray(y, np.float32) - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 2e-2
    gradient = back(jnp.asarray(x["d_y"], jnp.bfloat16))[0]
    assert gradient.lora_A.dtype == gradient.lora_B.dtype == jnp.float32


def kept(f, *args) -> list[jax.Array]:
    """What `jax.vjp` keeps between the passes."""
    return jax.tree.leaves(jax.vjp(f, *args)[1])


def size(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_gradients_of_16_bit_products_are_summed_in_float32():
    """A and B: nothing of their gradients is rounded to 16 bit."""
    random = np.random.default_rng(0)
    x, d_y = (jnp.asarray(random.normal(size=(512, n)), jnp.bfloat16) for n in (64, 48))
    weight = Dense(jnp.zeros((48, 64)))
    a = random.normal(size=(4, 64)).astype(np.float32)

    def run(b):
        adapter = Adapter(jnp.asarray(a), b, jnp.float32(1))
        return linear(x, weight, adapter, compute=jnp.bfloat16)

    gradient = jax.vjp(run, jnp.zeros((48, 4), jnp.float32))[1](d_y)[0]
    low = x @ jnp.asarray(a, jnp.bfloat16).T  # what the forward pass keeps, in 16 bit
    exact = np.asarray(d_y, np.float64).T @ np.asarray(low, np.float64)
    assert np.abs(gradient - exact).max() < 1e-5 * np.abs(exact).max()
    rounded = np.asarray(gradient.astype(jnp.bfloat16), np.float64)
    assert np.abs(rounded - exact).max() > 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("form", FORMS)
def test_keeps_the_codes_and_no_dense_weight(form):
    x = arrays()
    weight, pair = FORMS[form](jnp.asarray(x["w"])), adapter(x)
    v = jnp.asarray(x["x"], jnp.bfloat16)
    run = partial(linear, compute=jnp.bfloat16)
    saved = kept(lambda v, p: run(v, weight, p), v, pair)
    # stored weight; x; x A^T; A and scaled B cast for their products, their masters, the scale
    low = 2 * v.size // IN * RANK
    limit = size(weight) + v.nbytes + low + 1.5 * size(pair) + 64
    assert size(saved) <= limit
    if form != "dense":
        assert all(leaf.shape != (OUT, IN) for leaf in saved)
        plain = kept(lambda v: v @ dense(weight, jnp.bfloat16).T, v)
        assert any(leaf.size == OUT * IN for leaf in plain)
        assert size(plain) >= 2 * OUT * IN > 3 * size(weight)


@pytest.mark.parametrize("form", FORMS)
def test_scanned_stack_keeps_no_dense_weight(form):
    """In a scan over layers too, where a kept dense weight would be the whole 16-bit model."""
    layers, width = 24, 256
    random = np.random.default_rng(0)
    w = random.normal(size=(layers, width, width)).astype(np.float32) / 16
    stack: Weight = FORMS[form](jnp.asarray(w, jnp.bfloat16))
    x = jnp.ones((4, width), jnp.bfloat16)

    def through(multiply, x, stack):
        return lax.scan(lambda h, weight: (jnp.tanh(multiply(h, weight)), None), x, stack)[0]

    def gradient(multiply):
        return jax.jit(lambda x, s: jax.vjp(partial(through, multiply), x, s)[1])

    ours = partial(linear, compute=jnp.bfloat16)
    activations = 2 * layers * x.nbytes  # input and tanh of each layer
    saved = gradient(ours)(x, stack)
    assert size(saved) <= size(stack) + activations + 64
    if form == "dense":
        return
    plain = gradient(lambda h, weight: h @ dense(weight, jnp.bfloat16).T)(x, stack)
    assert size(plain) >= 2 * layers * width * width > 3 * size(stack)

    def temporary(multiply):  # of forward and backward in one program
        total = lambda x: through(multiply, x, stack).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(total)).lower(x).compile().memory_analysis().temp_size_in_bytes

    one = 2 * width * width  # seen: 1.4 of it, and 27 where autodiff is left alone
    assert temporary(ours) < 4 * one
    assert temporary(lambda h, weight: h @ dense(weight, jnp.bfloat16).T) > layers * one


def test_dropout():
    x = arrays()
    x["x"] = np.ones((2, TOKENS, IN), np.float32)
    weight, pair = Dense(jnp.zeros((OUT, IN))), adapter(x, dropout=0.25)
    run = jax.jit(lambda key: fp32(jnp.asarray(x["x"]), weight, pair, dropout_key=key))
    keys = jax.random.split(jax.random.key(0), 400)
    without = fp32(x["x"], weight, adapter(x))
    np.testing.assert_array_equal(fp32(x["x"], weight, pair), without)  # no key, no mask
    np.testing.assert_array_equal(run(keys[0]), run(keys[0]))
    assert np.abs(run(keys[0]) - run(keys[1])).max() > 0.1  # fresh for each key
    assert np.abs(run(keys[0])[0, 0] - run(keys[0])[0, 1]).max() > 0.1  # and for each token
    draws = np.stack([run(key) for key in keys]).reshape(-1, OUT)
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - without[0, 0]) < 5 * error).all()  # the expected value is kept
    unscaled = 0.75 * without[0, 0]
    assert (np.abs(draws.mean(0) - unscaled) > 5 * error).any()


def test_dropout_spares_the_frozen_product():
    x = arrays()
    weight = Dense(jnp.asarray(x["w"]))
    silent = Adapter(jnp.asarray(x["a"]), jnp.zeros((OUT, RANK)), jnp.asarray(1.0), 0.5)
    dropped = fp32(x["x"], weight, silent, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(dropped, fp32(x["x"], weight))
    loud = adapter(x, dropout=0.5)
    other = fp32(x["x"], weight, loud, dropout_key=jax.random.key(0))
    assert np.abs(other - fp32(x["x"], weight, loud)).max() > 1
