"""Packed attention in Triton against float64 with one dense mask, torch and transformers."""

import math

import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import attention as module
from triton_ref.kernels.attention import attention, attention_definition
from triton_ref.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
LENGTHS, TAIL = (1, 70, 17), 3  # over several tiles of keys and of rows; then padding
HOW = {
    "causal": {},
    "window 1": {"window": 1},
    "window 7": {"window": 7},
    "window 40": {"window": 40},
    "soft-cap": {"softcap": 1.5},
    "both": {"window": 7, "softcap": 1.5},
}
SHAPES = {"grouped": (4, 2, 16), "single": (1, 1, 20), "one key head": (3, 1, 64)}


def inputs(shape, dtype=torch.float32, lengths=LENGTHS, tail=TAIL, seed: int = 0):
    """q, k, v and a cotangent of the output, with scores of some size; where documents end."""
    random = torch.Generator().manual_seed(seed)
    heads, kv_heads, width = shape
    tokens = sum(lengths) + tail
    q, d_out = (1.5 * torch.randn(tokens, heads, width, generator=random) for _ in range(2))
    k, v = (1.5 * torch.randn(tokens, kv_heads, width, generator=random) for _ in range(2))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return [x.to(DEVICE, dtype) for x in (q, k, v, d_out)], ends.to(DEVICE, torch.int32)


def run(function, tensors, ends, dtype=None, **how):
    """The output and the gradients of q, k and v."""
    *leaves, d_out = (x.detach().to(dtype or x.dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    longest = int(ends.diff().max()) if len(ends) > 1 else 0
    out = function(*leaves, ends, longest, **{"scale": 0.3} | how)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def mask(ends, tokens: int, window: int | None):
    """bool `[N, N]`: what sees what, from the number of each token's document."""
    token = torch.arange(tokens, device=ends.device)
    document = torch.bucketize(token, ends.long(), right=True)
    apart = token[:, None] - token[None, :]
    seen = (document[:, None] == document[None, :]) & (apart >= 0) & (token < ends[-1])[:, None]
    return seen if window is None else seen & (apart < window)


def dense(q, k, v, ends, _, scale, window=None, softcap=None, repeat=torch.repeat_interleave):
    """The same from the whole matrix of scores, in the inputs' dtype."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (repeat(x, repeats, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    seen = mask(ends, len(q), window)
    weights = torch.where(seen, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("hij,jhd->ihd", weights / torch.where(total > 0, total, 1), v)


def furthest(a, b) -> list[float]:
    return [float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_values_and_gradients(how, shape):
    tensors, ends = inputs(shape)
    got = run(attention, tensors, ends, **how)
    want = run(dense, tensors, ends, torch.float64, **how)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_dtype=False)
    assert all((x[-TAIL:] == 0).all() for x in got)
    defined = run(attention_definition, tensors, ends, torch.float64, **how)
    torch.testing.assert_close(defined, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["document", "window", "cap", "heads", "scale"])
def test_faults_are_far_outside(name):
    """Of the output and of every gradient, so that each of them would show the fault."""
    tensors, ends = inputs(SHAPES["grouped"])
    how = {"window": 7, "softcap": 1.5, "scale": 0.3}
    got = run(attention, tensors, ends, **how)
    function = dense
    if name == "document":  # each begins a token too early
        ends = ends - (ends > 0).int()
    elif name == "window":
        how["window"] = 8
    elif name == "cap":
        how["softcap"] = None
    elif name == "scale":
        how["scale"] = 0.25
    else:

        def tiled(x, repeats, _):
            return x.repeat(1, repeats, 1)

        def function(*args, **how):
            return dense(*args, **how, repeat=tiled)

    assert min(furthest(got, run(function, tensors, ends, torch.float64, **how))) > 0.05


def test_definition_against_torch():
    """torch's own attention, which is given the mask; grouped heads are its own too."""
    tensors, ends = inputs(SHAPES["grouped"])
    whole = int(ends[-1])

    def theirs(q, k, v, ends, _, scale):
        q, k, v = (x[:whole].transpose(0, 1)[None] for x in (q, k, v))
        seen = mask(ends, whole, None)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )
        return torch.nn.functional.pad(out[0].transpose(0, 1), (0, 0, 0, 0, 0, TAIL))

    want = run(theirs, tensors, ends, torch.float64)
    defined = run(attention_definition, tensors, ends, torch.float64)
    torch.testing.assert_close(defined, want, rtol=0, atol=1e-10)
    far = run(attention_definition, tensors, ends, torch.float64, window=20)
    assert min(furthest(far, want)) > 0.05


def test_soft_cap_against_transformers():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    tensors, ends = inputs(SHAPES["grouped"], tail=0)
    shell = torch.nn.Module().eval()
    shell.num_key_value_groups = 2

    def theirs(q, k, v, ends, _, scale, window, softcap):
        hidden = torch.where(mask(ends, len(q), window), 0.0, -math.inf)[None, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return eager_attention_forward(shell, q, k, v, hidden, 0.0, scale, softcap)[0][0]

    how = {"window": 7, "softcap": 1.5}
    want = run(theirs, tensors, ends, **how)
    got = run(attention, tensors, ends, **how)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert min(furthest(run(attention, tensors, ends, window=7), want)) > 0.05


@pytest.mark.parametrize("how", [{}, {"window": 7, "softcap": 1.5}], ids=["causal", "both"])
def test_other_documents_are_never_read(how):
    """What is no number elsewhere, in the other documents and behind the last, stays there."""
    tensors, ends = inputs(SHAPES["grouped"])
    clean = run(attention, tensors, ends, **how)
    start, end = ends[1:3].tolist()
    inside = torch.zeros(len(tensors[0]), dtype=torch.bool, device=DEVICE)
    inside[start:end] = True
    dirty = [x.masked_fill(~inside[:, None, None], torch.nan) for x in tensors]
    for ours, want in zip(run(attention, dirty, ends, **how), clean, strict=True):
        assert torch.equal(ours[inside], want[inside])
        assert torch.isfinite(want[inside]).all()
        assert torch.isnan(ours[:start]).any()  # the control: it did arrive where it belongs
    spread = [x.clone() for x in tensors]
    spread[1][start] = torch.nan
    assert torch.isnan(run(attention, spread, ends)[0][inside]).any()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_tiles_with_nothing_to_see(how, monkeypatch):
    """Tall ones and wide ones: with a window some rows see nothing of their first keys."""
    tensors, ends = inputs(SHAPES["grouped"])
    want = run(dense, tensors, ends, torch.float64, **how)
    for rows, keys in ((64, 16), (16, 64)):
        monkeypatch.setattr(module, "tiles", lambda *_, r=rows, k=keys: (r, k, 4))
        got = run(attention, tensors, ends, **how)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_dtype=False)


def test_windows_of_any_size():
    tensors, ends = inputs(SHAPES["grouped"])
    want = run(attention, tensors, ends)
    for window in (70, 2**31 - 20, 2**31 - 1, 2**40):
        torch.testing.assert_close(
            run(attention, tensors, ends, window=window), want, rtol=0, atol=0
        )
    assert min(furthest(run(attention, tensors, ends, window=60), want)) > 0.001


def test_wide_offsets_and_long_grids_change_nothing(monkeypatch):
    tensors, ends = inputs(SHAPES["grouped"])
    how = {"window": 40, "softcap": 1.5}
    got = run(attention, tensors, ends, **how)
    torch.testing.assert_close(run(attention, tensors, ends, **how), got, rtol=0, atol=0)

    def longer(q, k, v, ends, longest, **how):
        return attention(q, k, v, ends, longest + 100, **how)

    torch.testing.assert_close(run(longer, tensors, ends, **how), got, rtol=0, atol=0)
    monkeypatch.setattr(module, "needs_int64", lambda *_: True)
    torch.testing.assert_close(run(attention, tensors, ends, **how), got, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [{}, {"window": 7, "softcap": 1.5}], ids=["causal", "both"])
def test_half_precision(how, dtype):
    """No further from float64 than the definition, whose only rounding is the last one, by much.

    The kernel rounds the shares of the values to 16 bits for its products.
    """
    tensors, ends = inputs(SHAPES["grouped"], dtype)
    exact = run(dense, tensors, ends, torch.float64, **how)
    got = run(attention, tensors, ends, **how)
    defined = run(attention_definition, tensors, ends, **how)
    assert {x.dtype for x in got} == {dtype}
    for ours, plain, true in zip(got, defined, exact, strict=True):
        error, least = ((x.double() - true).norm() / true.norm() for x in (ours, plain))
        assert least < error < 2.5 * least
    coarse = run(attention, [x.to(torch.float8_e4m3fn).to(dtype) for x in tensors], ends, **how)
    assert (coarse[0].double() - exact[0]).norm() / exact[0].norm() > 5 * least


def test_large_scores():
    """Of either sign: nothing overflows, and the greatest takes it all."""
    tensors, ends = inputs(SHAPES["grouped"])
    for factor in (300.0, -300.0):
        got = run(attention, tensors, ends, scale=factor)
        want = run(attention_definition, tensors, ends, torch.float64, scale=factor)
        torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3, check_dtype=False)
        assert all(torch.isfinite(x).all() for x in got)
        assert (got[0] - run(attention, tensors, ends)[0]).abs().max() > 1


def test_strided_and_empty():
    (q, k, v, d_out), ends = inputs(SHAPES["grouped"])
    whole = attention(q, k, v, ends, 70, scale=0.3)
    want = run(attention, [q, k, v, d_out], ends)
    others = [torch.stack([x, torch.full_like(x, 7)], -1)[..., 0] for x in (q, k, v, d_out, ends)]
    assert not any(x.is_contiguous() for x in others)
    torch.testing.assert_close(run(attention, others[:4], others[4]), want, rtol=0, atol=0)
    repeated = torch.repeat_interleave(ends, 2)  # a document of no token behind each
    assert torch.equal(attention(q, k, v, repeated, 70, scale=0.3), whole)
    for none in (ends[:1], ends[:1].repeat(3)):
        got = run(attention, [q, k, v, d_out], none)
        assert all((x == 0).all() for x in got)
    nothing = [x[:0] for x in (q, k, v, d_out)]
    assert [len(x) for x in run(attention, nothing, ends[:1])] == [0] * 4


def test_refusals():
    (q, k, v, _), ends = inputs(SHAPES["grouped"])
    good = {"q": q, "k": k, "v": v, "cu_seqlens": ends, "max_seqlen": 70, "scale": 1.0}
    for wrong, message in (
        ({"q": q.double()}, r"q of torch\.float64 is not supported"),
        ({"k": k.bfloat16()}, r"k torch\.bfloat16 .* do not fit"),
        ({"v": v[:-1]}, "do not fit"),
        ({"q": q[:, :3]}, r"q \[91, 3, 16\] and k \[91, 2, 16\] do not fit"),
        ({"q": q[0]}, "do not fit"),
        ({"k": k[:, :0], "v": v[:, :0]}, "do not fit"),
        ({"cu_seqlens": ends.long()}, "must be int32"),
        ({"cu_seqlens": ends[:0]}, "must be int32"),
        ({"window": 0}, "window 0 and softcap None must be above 0"),
        ({"softcap": 0.0}, r"softcap 0\.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(**good | wrong)


def test_wide_offsets_are_chosen_by_size():
    ends = torch.zeros(2, dtype=torch.int32, device="meta")
    how = (8, 1.0, None, None)
    for tokens, wide in ((2**10, False), (2**20, True)):
        q = torch.empty(tokens, 32, 64, device="meta")
        assert module._launch(q, q, ends, how, backward=False)[1]["INT64"] is wide


def test_compiles_for_hopper():
    """Within a block's shared memory at every head size; tensor cores in 16 bits."""
    kernels = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for width in (64, 128, 256):
            q = torch.empty(4, 8, width, dtype=dtype, device="meta")
            ends = torch.zeros(2, dtype=torch.int32, device="meta")
            types = dict.fromkeys(("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"), f"*{name}")
            types |= {"logsumexp": "*fp32", "delta": "*fp32", "cu_seqlens": "*i32"}
            types |= {"tokens": "i32", "scale": "fp32", "window": "i32", "softcap": "fp32"}
            for kernel in ("_forward", "_backward_q", "_backward_kv"):
                how = (512, 1.0, 100, 2.0) if kernel == "_forward" else (512, 1.0, None, None)
                backward = kernel != "_forward"
                settings = module._launch(q, q[:, :2], ends, how, backward=backward)[1]
                kernels.append((module.__name__, kernel, types | settings))
    wide = (*kernels[0][:2], kernels[0][2] | {"INT64": True})
    results = compile_for_hopper([*kernels, wide])
    assert all("wgmma" in r["ptx"] or "mma.sync" in r["ptx"] for r in results[:9])
    assert [r["ttir"].count("i64") > 0 for r in (results[0], results[-1])] == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 64), (8, 2, 128), (4, 1, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype, shape):
    """Documents of real lengths, all head sizes, a window over several tiles, a cap that bites."""
    lengths = (1, 700, 1025, 64, 258)
    tensors, ends = inputs(shape, dtype, lengths)
    for how in ({}, {"window": 200, "softcap": 5.0}):
        exact = run(attention_definition, tensors, ends, torch.float64, **how)
        got = run(attention, tensors, ends, **how)
        errors = [
            float((x.double() - y).norm() / y.norm()) for x, y in zip(got, exact, strict=True)
        ]
        bound = 2e-6 if dtype == torch.float32 else 6e-3
        assert max(errors) < bound
        other = run(attention, tensors, ends, **how | {"window": 201 if how else 500})
        assert min(furthest(other, got)) > bound
