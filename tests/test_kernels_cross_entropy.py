"""The head's cross-entropy against torch in float64, and what it must not make."""

from collections.abc import Callable, Iterator

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.cross_entropy.reference import LOGITS_BYTES, default_chunk_size

# (vocabulary, softcap, chunk_size) of 3 x 37 tokens: chunks that divide nothing, a single one, the
# default.
CASES = [(7, None, None), (2049, None, 32), (2049, 3.0, 50), (300, 0.5, 4096)]


def inputs(vocabulary: int, shape: tuple[int, int] = (3, 37), hidden_size: int = 16, seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((*shape, hidden_size)).astype(np.float32)
    head = (rng.standard_normal((vocabulary, hidden_size)) / 4).astype(np.float32)
    targets = rng.integers(0, vocabulary, shape).astype(np.int32)
    targets[rng.random(shape) < 0.4] = -1
    weights = rng.standard_normal(shape).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets), jnp.asarray(weights)


def torch_reference(hidden, head, targets, weights, softcap):
    """Losses, d_hidden and d_head of sum(weights * losses), in float64."""
    torch = pytest.importorskip("torch")
    h, w = (torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (hidden, head))
    logits = h @ w.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        torch.tensor(np.array(targets).ravel(), dtype=torch.int64),
        ignore_index=-1,
        reduction="none",
    ).reshape(targets.shape)
    (nll * torch.tensor(np.asarray(weights, np.float64))).sum().backward()
    return nll.detach().numpy(), h.grad.numpy(), w.grad.numpy()


def plain(hidden, head, targets):
    """The whole array of logits, and no mask: what must not happen."""
    logits = jnp.einsum("bth,vh->btv", hidden, head)
    own = jnp.take_along_axis(logits, targets[..., None], -1, mode="clip")[..., 0]
    return jax.nn.logsumexp(logits, -1) - own


def equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def inner_jaxprs(equation) -> Iterator:
    for value in jax.tree.leaves(tuple(equation.params.values())):
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jax.extend.core.Jaxpr):
            yield value


def trace(f: Callable, *args) -> list:
    return list(equations(jax.make_jaxpr(f)(*args).jaxpr))


def matmuls(all_equations: list) -> int:
    return sum(e.primitive.name == "dot_general" for e in all_equations)


def makes(all_equations: list, predicate: Callable) -> bool:
    return any(predicate(v.aval) for e in all_equations for v in e.outvars if hasattr(v, "aval"))


@pytest.mark.parametrize(("vocabulary", "softcap", "chunk"), CASES)
def test_loss_and_gradients(vocabulary, softcap, chunk):
    hidden, head, targets, weights = inputs(vocabulary)
    nll, d_hidden, d_head = torch_reference(hidden, head, targets, weights, softcap)

    def f(hidden, head):
        return cross_entropy(hidden, head, targets, softcap=softcap, chunk_size=chunk)

    got, vjp = jax.vjp(jax.jit(f), hidden, head)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, nll, atol=2e-5)
    np.testing.assert_allclose(f(hidden, head), nll, atol=2e-5)
    for ours, theirs in zip(vjp(weights), (d_hidden, d_head), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
    _, frozen = jax.vjp(lambda h: f(h, head), hidden)
    _, only_head = jax.vjp(lambda w: f(hidden, w), head)
    assert np.abs(frozen(weights)[0] - d_hidden).max() < 1e-5 * np.abs(d_hidden).max()
    assert np.abs(only_head(weights)[0] - d_head).max() < 1e-5 * np.abs(d_head).max()

    # Controls: no cap, an unmasked -1, columns of zeros that pad the vocabulary.
    supervised = np.asarray(targets) >= 0
    if softcap is not None:
        assert np.abs(cross_entropy(hidden, head, targets) - nll).max() > 1e-2
    assert np.abs(plain(hidden, head, targets)[~supervised]).mean() > 0.1
    padding = jnp.zeros((-head.shape[0] % 2048, head.shape[1]))
    padded = cross_entropy(
        hidden, jnp.concatenate([head, padding]), targets, softcap=softcap, chunk_size=chunk
    )
    assert np.abs(padded - nll)[supervised].min() > 0.1


def test_tokens_without_target_are_nothing():
    hidden, head, targets, weights = inputs(300)
    none = np.asarray(targets) < 0
    bad_hidden = jnp.where(none[..., None], jnp.nan, hidden)
    bad_weights = jnp.where(none, jnp.nan, weights)
    targets = jnp.where(none, -100, targets)  # any negative id
    for trained in (False, True):

        def f(hidden, head, trained=trained):
            head = head if trained else lax.stop_gradient(head)
            return cross_entropy(hidden, head, targets, chunk_size=16)

        clean, clean_vjp = jax.vjp(f, hidden, head)
        got, vjp = jax.vjp(f, bad_hidden, head)
        assert np.array_equal(got, clean)
        assert (np.asarray(got)[none] == 0).all()
        d_hidden, d_head = vjp(bad_weights)
        assert (np.asarray(d_hidden)[none] == 0).all()
        assert (np.asarray(d_hidden)[~none] != 0).any(-1).all()
        for ours, theirs in zip((d_hidden, d_head), clean_vjp(weights), strict=True):
            assert np.array_equal(ours, theirs)
        assert (np.asarray(d_head) != 0).any() == trained
    # Control: without the mask the NaN gets through, also when it is multiplied by 0.
    assert np.isnan(np.asarray(plain(bad_hidden, head, targets)) * ~none).any()


def test_no_target_at_all():
    hidden, head, targets, _ = inputs(300)
    f = lambda h, w: cross_entropy(h, w, jnp.full_like(targets, -1)).sum()  # noqa: E731
    loss, gradients = jax.value_and_grad(f, (0, 1))(hidden, head)
    assert loss == 0
    assert all((np.asarray(g) == 0).all() for g in gradients)
    assert cross_entropy(hidden[:0], head, targets[:0]).shape == (0, 37)


def test_an_id_past_the_vocabulary_is_not_a_number():
    hidden, head, targets, _ = inputs(300)
    clean = np.asarray(cross_entropy(hidden, head, targets))
    past = targets.at[1, 3].set(300)
    loss, d_hidden = jax.value_and_grad(
        lambda h: cross_entropy(h, head, past).sum(where=jnp.arange(3)[:, None] == 1)
    )(hidden)
    got = np.array(cross_entropy(hidden, head, past))
    assert np.isnan(loss)
    assert np.isnan(d_hidden[1, 3]).all()
    assert np.isnan(got).sum() == 1
    assert np.isnan(got[1, 3])
    got[1, 3] = clean[1, 3]
    assert np.array_equal(got, clean)
    # Control: a plain look-up clamps the id to a finite, wrong loss.
    assert np.isfinite(plain(hidden, head, past)[1, 3])


def test_what_is_computed():
    hidden, head, targets, _ = inputs(1031)
    tokens, vocabulary = targets.size, head.shape[0]

    def loss(hidden, head):
        return cross_entropy(hidden, head, targets, chunk_size=24).sum()

    frozen = trace(jax.grad(jax.jit(loss)), hidden, head)
    trained = trace(jax.grad(jax.jit(loss), (0, 1)), hidden, head)
    whole = trace(jax.grad(lambda *a: plain(*a, targets).sum(), (0, 1)), hidden, head)

    # Logits alone; and the gradient of hidden; or that of the head, for which they are redone.
    assert matmuls(trace(loss, hidden, head)) == 1
    assert matmuls(frozen) == 2
    assert matmuls(trace(jax.grad(loss, 1), hidden, head)) == 3
    assert matmuls(trained) == 4

    def in_scan(hidden, head):
        def body(total, row):
            nll = cross_entropy(row[None], head, targets[:1], chunk_size=16)
            return total + nll.sum(), None

        return lax.scan(body, 0.0, hidden)[0]

    assert matmuls(trace(jax.grad(in_scan), hidden, head)) == 2

    def logits_of_all(aval) -> bool:
        return vocabulary in aval.shape and aval.size >= tokens * vocabulary

    assert not makes(frozen, logits_of_all)
    assert not makes(trained, logits_of_all)
    assert makes(whole, logits_of_all)

    def head_gradient(aval) -> bool:
        return aval.shape in (head.shape, head.shape[::-1])

    assert not makes(frozen, head_gradient)
    assert makes(trained, head_gradient)


def test_chunks_without_target_are_skipped():
    hidden, head, targets, _ = inputs(1031)
    f = jax.grad(lambda h, w: cross_entropy(h, w, targets, chunk_size=16).sum(), (0, 1))
    everything = trace(f, hidden, head)
    branches = [
        [matmuls(list(equations(branch))) for branch in inner_jaxprs(e)]
        for e in everything
        if e.primitive.name == "cond"
    ]
    assert branches == [[0, 2], [0, 2]]
    assert matmuls(everything) == 4  # none outside


def test_memory():
    hidden, head, targets, _ = inputs(4099, shape=(4, 256))

    def temporary(f: Callable) -> int:
        compiled = jax.jit(jax.grad(f)).lower(hidden).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunk = 64 * 4099 * 4
    ours = temporary(lambda h: cross_entropy(h, head, targets, chunk_size=64).sum())
    whole = temporary(lambda h: plain(h, head, targets).sum())
    assert ours < 3 * chunk
    assert whole > 15 * chunk


def test_bfloat16():
    hidden, head, targets, weights = inputs(2049, hidden_size=64)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    nll, d_hidden, d_head = torch_reference(
        hidden.astype(jnp.float32), head.astype(jnp.float32), targets, weights, None
    )
    got, vjp = jax.vjp(lambda h, w: cross_entropy(h, w, targets, chunk_size=32), hidden, head)
    assert np.abs(got - nll).max() < 2e-5  # products of bfloat16 are exact, sums are float32
    for ours, theirs in zip(vjp(weights), (d_hidden, d_head), strict=True):
        assert ours.dtype == jnp.bfloat16
        assert np.abs(np.float32(ours) - theirs).max() < 0.01 * np.abs(theirs).max()
    # Control: logits rounded to bfloat16.
    supervised = np.asarray(targets) >= 0
    assert np.abs(plain(hidden, head, targets).astype(jnp.float32) - nll)[supervised].max() > 1e-3
    # A float32 head is cast to the dtype of hidden, its gradient is float32.
    master = head.astype(jnp.float32)
    loss, gradient = jax.value_and_grad(lambda w: cross_entropy(hidden, w, targets).sum())(master)
    np.testing.assert_allclose(loss, got.sum(), rtol=1e-6)
    assert gradient.dtype == jnp.float32


def test_float16_head_gradient_of_a_small_weight():
    hidden, head, targets, weights = inputs(300)
    hidden, head, weights = hidden.astype(jnp.float16), head.astype(jnp.float16), weights * 1e-6
    _, _, expected = torch_reference(hidden, head, targets, weights, None)
    master = head.astype(jnp.float32)
    _, vjp = jax.vjp(lambda w: cross_entropy(hidden, w, targets), master)
    error = np.abs(vjp(weights)[0] - expected).max() / np.abs(expected).max()
    assert error < 2e-3
    # Control: weights as small as these do not survive float16.
    small = np.asarray(weights, np.float16).astype(np.float64)
    assert np.abs(small / np.asarray(weights, np.float64) - 1).max() > 0.02


def test_transformations():
    hidden, head, targets, _ = inputs(300)

    def loss(hidden, targets):
        return cross_entropy(hidden, head, targets, chunk_size=16).sum()

    expected = jax.grad(loss)(hidden, targets)
    rows = jax.vmap(jax.grad(loss))(hidden, targets)  # cond becomes select
    rematerialised = jax.grad(jax.jit(jax.checkpoint(loss)))(hidden, targets)
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    np.testing.assert_allclose(rematerialised, expected, atol=1e-6)
    assert np.abs(jax.grad(loss)(hidden, targets[::-1]) - expected).max() > 0.1


@pytest.mark.parametrize("tokens", [1, 100, 512, 2048, 8192, 100_003])
@pytest.mark.parametrize("vocabulary", [7, 49152, 128_256, 151_936, 262_144, 2_000_000])
def test_default_chunk(tokens, vocabulary):
    chunk = default_chunk_size(tokens, vocabulary)
    assert chunk == 128 or chunk * vocabulary * 4 <= LOGITS_BYTES
    assert chunk % 64 == 0
    assert chunk <= 1024
    chunks = -(-tokens // chunk)
    assert chunks * chunk - tokens < 64 * chunks  # an even share each, rounded up to 64
    if tokens >= 1024:
        assert chunks >= 4  # so that skipping can save something


def test_refusals():
    hidden, head, targets, _ = inputs(300)
    for bad in ((hidden, head[:, :8], targets), (hidden, head, targets[:2])):
        with pytest.raises(ValueError, match=r"expected \[B, T, H\], \[V, H\] and \[B, T\], got"):
            cross_entropy(*bad)
    with pytest.raises(ValueError, match="targets must be int32, got float32"):
        cross_entropy(hidden, head, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match="expected floats, got int8"):
        cross_entropy(hidden.astype(jnp.int8), head, targets)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        cross_entropy(hidden, head, targets, softcap=0)
    with pytest.raises(ValueError, match="chunk_size must be above 0"):
        cross_entropy(hidden, head, targets, chunk_size=0)
    with pytest.raises(ValueError, match=r"'liger' is unknown; known: auto, xla"):
        cross_entropy(hidden, head, targets, implementation="liger")
