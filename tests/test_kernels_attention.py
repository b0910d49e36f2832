"""Packed attention against a dense float64 oracle: values, logsumexp, gradients, what is saved."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, make_plan, reference

torch = pytest.importorskip("torch")

# Documents of each row by their lengths; what is left of the row is padding (segment 0).
DOCUMENTS = ((7, 1, 11, 1, 2, 12), (29,))
LENGTH = 37
DIM = 8
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Case:
    """What one comparison runs with."""

    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    block: int = LENGTH  # queries whose scores exist at a time


CASES = {
    "grouped heads": Case(),
    "equal heads": Case(kv_heads=4),
    "one key head": Case(heads=6, kv_heads=1),
    "blocks of 5": Case(block=5),
    "blocks of 1": Case(heads=2, kv_heads=1, block=1),
    "window of 1": Case(window=1),
    "window of 3, cap": Case(window=3, softcap=2.0),
    "cap, blocks of 8": Case(softcap=1.0, block=8),
}


def segment_ids() -> np.ndarray:
    rows = np.zeros((len(DOCUMENTS), LENGTH), np.int32)
    for row, lengths in zip(rows, DOCUMENTS, strict=True):
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        row[: len(ids)] = ids
    return rows


def may_see(window: int | None, packed: bool = True) -> np.ndarray:
    """Who sees whom, bool [B, T, T], pair by pair from the documents' ends."""
    seen = np.zeros((len(DOCUMENTS), LENGTH, LENGTH), bool)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths if packed else (sum(lengths),):
            for i in range(start, start + length):
                first = start if window is None else max(start, i - window + 1)
                seen[row, i, first : i + 1] = True
            start += length
    return seen


def inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k, v and the cotangents of output and logsumexp; scores reach about ±6."""
    random = np.random.default_rng(seed)
    rows, heads, kv_heads = len(DOCUMENTS), case.heads, case.kv_heads
    shapes = {
        "q": (rows, LENGTH, heads, DIM),
        "k": (rows, LENGTH, kv_heads, DIM),
        "v": (rows, LENGTH, kv_heads, DIM),
        "d_out": (rows, LENGTH, heads, DIM),
        "d_logsumexp": (rows, LENGTH, heads),
    }
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["q"] *= 2
    return arrays


def oracle(case: Case, x: dict[str, np.ndarray], seen: np.ndarray, interleaved: bool = False):
    """Output, logsumexp and gradients of q, k, v in float64, from dense scores."""
    q, k, v = (torch.tensor(x[name], dtype=torch.float64, requires_grad=True) for name in "qkv")
    group = case.heads // case.kv_heads
    own = torch.arange(case.heads)
    own = own % case.kv_heads if interleaved else own // group
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k[:, :, own]) * SCALE
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    mask = torch.tensor(seen)[:, None]
    some = mask.any(-1)
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(~some[..., None], 0.0)
    weights = torch.softmax(scores, -1) * some[..., None]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v[:, :, own])
    logsumexp = torch.logsumexp(scores, -1).transpose(1, 2)
    some = some.expand(-1, case.heads, -1).transpose(1, 2)
    d_out, d_logsumexp = torch.tensor(x["d_out"]), torch.tensor(x["d_logsumexp"])
    ((out * d_out).sum() + (logsumexp * d_logsumexp)[some].sum()).backward()
    logsumexp = logsumexp.masked_fill(~some, -torch.inf)
    return [t.detach().numpy() for t in (out, logsumexp, q.grad, k.grad, v.grad)]


def ours(case: Case, x: dict[str, np.ndarray], segments: np.ndarray, monkeypatch):
    """The same five, from the op."""
    monkeypatch.setattr(
        reference, "SCORE_BYTES", 4 * len(DOCUMENTS) * case.heads * LENGTH * case.block
    )

    def run(q, k, v, d_out, d_logsumexp):
        plan = make_plan(jnp.asarray(segments), window=case.window)
        f = partial(attention, plan=plan, scale=SCALE, softcap=case.softcap, return_logsumexp=True)
        results, back = jax.vjp(f, q, k, v)
        return *results, *back((d_out.astype(q.dtype), d_logsumexp))

    results = jax.jit(run)(*(x[name] for name in ("q", "k", "v", "d_out", "d_logsumexp")))
    return [np.asarray(r) for r in results]


def distance(got: list, want: list) -> float:
    """Largest difference over all results, relative to each result's largest value."""
    differences = []
    for a, b in zip(got, want, strict=True):
        finite = np.isfinite(b)
        assert (np.isfinite(a) == finite).all()
        differences.append(np.abs(a[finite] - b[finite]).max() / np.abs(b[finite]).max())
    return max(differences)


@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name, monkeypatch):
    case = CASES[name]
    x = inputs(case)
    got = ours(case, x, segment_ids(), monkeypatch)
    assert distance(got, oracle(case, x, may_see(case.window))) < 2e-6


def test_wrong_variants_differ(monkeypatch):
    """What the comparison above would catch."""
    case = CASES["window of 3, cap"]
    x = inputs(case)
    got = ours(case, x, segment_ids(), monkeypatch)
    wrong = {
        "documents not told apart": oracle(case, x, may_see(3, packed=False)),
        "window one wider": oracle(case, x, may_see(4)),
        "no window": oracle(case, x, may_see(None)),
        "no cap": oracle(replace(case, softcap=None), x, may_see(3)),
        "query heads interleaved over key heads": oracle(case, x, may_see(3), interleaved=True),
    }
    for what, results in wrong.items():
        assert distance(got, results) > 0.1, what
    cotangent = {**x, "d_logsumexp": np.zeros_like(x["d_logsumexp"])}
    assert distance(got[2:4], oracle(case, cotangent, may_see(3))[2:4]) > 0.1


def test_nothing_at_padding(monkeypatch):
    """Output and gradients are exactly 0 where the segment is 0, also for large cotangents."""
    case = Case(block=5)
    x = inputs(case)
    segments = segment_ids()
    padding = segments == 0
    x["d_out"][padding] = x["q"][padding] = 1e4
    x["k"][padding] = x["v"][padding] = -1e4
    out, logsumexp, *gradients = ours(case, x, segments, monkeypatch)
    assert padding.sum() == 11
    assert (logsumexp[padding] == -np.inf).all()
    for array in (out, *gradients):
        assert (array[padding] == 0).all()
        assert (array[~padding] != 0).any(-1).all()
    # the same positions as a document of their own are not zero
    segments[padding] = 9
    assert (ours(case, x, segments, monkeypatch)[0][padding] != 0).all()


def test_continuing_with_a_cache():
    """Queries that follow keys in a cache: the rows that attention over everything gives."""
    case = Case()
    x = inputs(case)
    done, new, capacity = 20, 4, 31
    whole = make_plan(jnp.ones((2, done + new), jnp.int32), window=6)
    cut = {name: jnp.asarray(x[name][:, : done + new]) for name in "qkv"}
    everything = attention(cut["q"], cut["k"], cut["v"], whole, scale=SCALE)

    positions = jnp.broadcast_to(done + jnp.arange(new), (2, new))
    slots = jnp.broadcast_to(jnp.arange(capacity), (2, capacity))
    unused = ((0, 0), (0, capacity - done - new), (0, 0), (0, 0))
    k, v = (jnp.pad(cut[name], unused, constant_values=50.0) for name in "kv")

    def follow(filled, positions):
        segments = (slots < filled).astype(jnp.int32)
        plan = make_plan(jnp.ones((2, new), jnp.int32), segments, positions, slots, window=6)
        return attention(cut["q"][:, done:], k, v, plan, scale=SCALE)

    np.testing.assert_allclose(follow(done + new, positions), everything[:, done:], atol=1e-6)
    # one position off is seen; unused slots are kept out by position alone too
    assert np.abs(follow(done + new, positions - 1) - everything[:, done:]).max() > 0.1
    np.testing.assert_allclose(follow(capacity, positions), everything[:, done:], atol=1e-6)


def test_bfloat16():
    """16-bit inputs: float32 softmax, results within the rounding of outputs and weights."""
    random = np.random.default_rng(3)
    shape = (1, 64, 2, 64)
    q, k, v = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(3))
    q *= 4  # scores up to about ±16, whose own bf16 rounding would move weights by 6%
    plan = make_plan(jnp.ones((1, 64), jnp.int32))
    f = partial(attention, plan=plan, scale=0.125, return_logsumexp=True)
    (out, logsumexp), back = jax.vjp(f, q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    (exact, exact_logsumexp), exact_back = jax.vjp(f, *wide)
    assert out.dtype == jnp.bfloat16
    assert logsumexp.dtype == jnp.float32
    np.testing.assert_allclose(logsumexp, exact_logsumexp, atol=1e-5)
    step = 2.0**-8  # half an ulp of bf16, relative
    limit = 2 * step * np.abs(exact).max()
    assert np.abs(out.astype(jnp.float32) - exact).max() < limit

    d_logsumexp = jnp.asarray(random.normal(size=logsumexp.shape), jnp.float32)
    gradients = back((jnp.ones_like(out), d_logsumexp))
    exact_gradients = exact_back((jnp.ones_like(exact), d_logsumexp))
    for got, want in zip(gradients, exact_gradients, strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.abs(got.astype(jnp.float32) - want).max() < 4 * step * np.abs(want).max()

    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.bfloat16(0.125)  # rounded to bf16
    scores = jnp.where(np.tril(np.ones((64, 64), bool)), scores, -jnp.inf)
    rounded = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32)), wide[2])
    assert np.abs(rounded - exact).max() > limit


def test_saves_no_scores(monkeypatch):
    """Kept for the backward pass: inputs, plan, output and logsumexp."""
    tokens, heads = 256, 2
    monkeypatch.setattr(reference, "SCORE_BYTES", 4 * heads * tokens * 16)
    x = jnp.ones((1, tokens, heads, DIM))
    plan = make_plan(jnp.ones((1, tokens), jnp.int32))

    def saved(f):
        back = jax.vjp(f, x, x + 1, x + 2)[1]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(back))

    kept = 4 * x.nbytes + 4 * tokens * heads + 4 * 4 * tokens  # q, k, v, out; logsumexp; plan
    assert saved(partial(attention, plan=plan, scale=SCALE)) <= kept

    def dense(q, k, v):
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    assert saved(dense) > 4 * tokens * tokens * heads > 4 * kept


def test_refuses_what_does_not_fit():
    x = jnp.ones((1, 4, 4, DIM))
    plan = make_plan(jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="4 query heads over 3 key heads"):
        attention(x, x[:, :, :3], x[:, :, :3], plan, scale=1.0)
    with pytest.raises(ValueError, match="the plan is for"):
        attention(x, x[:, :3], x[:, :3], plan, scale=1.0)
    with pytest.raises(ValueError, match="shapes do not fit"):
        attention(x, x, x[:, :3], plan, scale=1.0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        make_plan(jnp.ones((1, 4), jnp.int32), window=0)
    with pytest.raises(ValueError, match="'cudnn' is unknown; known: auto, xla"):
        attention(x, x, x, plan, scale=1.0, implementation="cudnn")
