"""Rotary positions and head norms in Triton against rotation by complex numbers in float64."""

import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import qk_norm_rope as module
from triton_ref.kernels.launch import interpreted
from triton_ref.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_definition

DEVICE = "cpu" if interpreted() else "cuda"
EPS = 0.05  # large enough to matter beside a mean square of 1
# tokens, query heads, key heads, width, turned
SHAPES = {
    "whole": (37, 4, 2, 16, 16),
    "part": (37, 3, 1, 16, 8),
    "odd": (5, 1, 1, 20, 12),
    "one": (1, 2, 2, 2, 2),
}
NORMS = {"plain": None, "norm": 0.0, "norm plus one": 1.0}
FACTOR = 1.3


def inputs(shape, dtype=torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Everything there is; positions begin anew in the middle, and some are far."""
    random = torch.Generator().manual_seed(seed)
    tokens, heads, kv_heads, width, turned = shape
    x = {}
    for name, count in (("q", heads), ("k", kv_heads), ("d_q", heads), ("d_k", kv_heads)):
        x[name] = torch.randn(tokens, count, width, generator=random).to(DEVICE, dtype)
    for name in ("q_scale", "k_scale"):
        x[name] = torch.randn(width, generator=random).to(DEVICE, dtype)
    half = tokens // 2
    positions = torch.cat([torch.arange(half), 1 + torch.arange(tokens - half)])
    x["positions"] = positions.to(DEVICE, torch.int32)
    x["inv_freq"] = (100.0 ** -(torch.arange(0, turned, 2) / turned)).to(DEVICE)
    return x


def run(function, x, offset, dtype=None, **how):
    """Turned q and k and the gradients of all that is learned."""
    names = ["q", "k"] + ([] if offset is None else ["q_scale", "k_scale"])
    leaves = {n: x[n].detach().to(dtype or x[n].dtype).requires_grad_() for n in names}
    how = {"attention_factor": FACTOR, "eps": EPS, "norm_offset": offset or 0.0} | how
    out = function(**leaves, positions=x["positions"], inv_freq=x["inv_freq"], **how)
    cotangents = [x[n].to(each.dtype) for n, each in zip(("d_q", "d_k"), out, strict=True)]
    return [each.detach() for each in out] + list(
        torch.autograd.grad(out, list(leaves.values()), cotangents)
    )


def by_complex_numbers(
    q, k, positions, inv_freq, attention_factor, eps, norm_offset, q_scale=None, k_scale=None
):
    """Entries i and i + R/2 are one complex number, multiplied by factor * e^(i angle)."""
    angle = positions.double()[:, None, None] * inv_freq.double()
    turn = torch.polar(torch.full_like(angle, attention_factor), angle)
    half, results = len(inv_freq), []
    for x, scale in ((q, q_scale), (k, k_scale)):
        if scale is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (scale + norm_offset)
        z = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        results.append(torch.cat([z.real, z.imag, x[..., 2 * half :]], -1))
    return results


def furthest(a, b) -> list[float]:
    return [float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("offset", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(shape, offset, monkeypatch):
    x = inputs(shape)
    got = run(qk_norm_rope, x, offset)
    want = run(by_complex_numbers, x, offset, torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)
    defined = run(qk_norm_rope_definition, x, offset, torch.float64)
    torch.testing.assert_close(defined, want, rtol=0, atol=1e-10)
    monkeypatch.setattr(module, "needs_int64", lambda *_: True)
    torch.testing.assert_close(run(qk_norm_rope, x, offset), got, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["position", "factor", "direction", "offset", "eps"])
def test_faults_are_far_outside(name):
    x = inputs(SHAPES["whole"])
    got = run(qk_norm_rope, x, 1.0)
    how = {}
    if name == "position":
        x["positions"] = x["positions"] + 1
    elif name == "direction":
        x["positions"] = -x["positions"]
    elif name == "factor":
        how["attention_factor"] = 1.0
    elif name == "offset":
        how["norm_offset"] = 0.0
    else:
        how["eps"] = 1e-6
    wrong = furthest(got, run(by_complex_numbers, x, 1.0, torch.float64, **how))
    # a scale's gradient does not depend on the offset
    assert min(wrong[:4] if name == "offset" else wrong) > 0.01


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_matches_transformers(name):
    """Its norm of heads, its table of angles and its rotation, in float32."""
    from transformers.models.gemma3 import modeling_gemma3 as gemma3
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    modeling, norm_class, offset = {
        "qwen3": (qwen3, qwen3.Qwen3RMSNorm, 0.0),
        "gemma3": (gemma3, gemma3.Gemma3RMSNorm, 1.0),
    }[name]
    x = inputs(SHAPES["whole"])

    def theirs(q, k, positions, inv_freq, q_scale, k_scale, attention_factor, eps, norm_offset):
        angles = positions[:, None].float() * inv_freq
        both = torch.cat([angles, angles], -1)[None]
        cos, sin = both.cos() * attention_factor, both.sin() * attention_factor
        normed = []
        for tensor, scale in ((q, q_scale), (k, k_scale)):
            norm = norm_class(tensor.shape[-1], eps=eps).to(tensor.device)
            del norm.weight
            norm.weight = scale
            normed.append(norm(tensor).transpose(0, 1)[None])
        turned = modeling.apply_rotary_pos_emb(*normed, cos, sin)
        return [each[0].transpose(0, 1) for each in turned]

    want = run(theirs, x, offset)
    got = run(qk_norm_rope, x, offset)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert min(furthest(run(qk_norm_rope, x, 1 - offset), want)[:4]) > 0.01


def test_far_positions():
    """Angles are float32 products, as in transformers; the cosine of a large one is right."""
    x = inputs(SHAPES["whole"])
    x["positions"] += 131_000
    got = run(qk_norm_rope, x, None)
    angles = x["positions"][:, None].float() * x["inv_freq"]
    once = {"inv_freq": angles[7], "positions": torch.ones(1, dtype=torch.int32, device=DEVICE)}
    row = {n: x[n][7:8] for n in ("q", "k", "d_q", "d_k")} | once
    want = run(by_complex_numbers, row, None, torch.float64)
    torch.testing.assert_close(
        [each[7:8] for each in got], want, rtol=1e-5, atol=1e-5, check_dtype=False
    )
    exact = run(by_complex_numbers, x, None, torch.float64)
    assert max(furthest(got, exact)) > 1e-3  # what float32 angles cost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", NORMS.values(), ids=NORMS)
def test_half_precision(offset, dtype):
    """One rounding, of results and of gradients alike."""
    x = inputs(SHAPES["whole"], dtype)
    got = run(qk_norm_rope, x, offset)
    exact = run(by_complex_numbers, x, offset, torch.float64)
    half_step = torch.finfo(dtype).eps / 2
    assert {each.dtype for each in got} == {dtype}
    for ours, true in zip(got, exact, strict=True):
        assert ((ours.double() - true).abs() <= 1.01 * half_step * true.abs() + 1e-5).all()
    if offset is not None:  # the norm's result rounded before it is turned
        normed = run(by_complex_numbers, x | {"inv_freq": 0 * x["inv_freq"]}, offset, torch.float64)
        twice = x | {n: each.to(dtype) for n, each in zip("qk", normed, strict=False)}
        wrong = run(by_complex_numbers, twice, None, torch.float64, attention_factor=1.0)
        error = (wrong[0].to(dtype).double() - exact[0]).abs()
        assert (error > 1.01 * half_step * exact[0].abs() + 1e-5).any()


def test_is_in_place_without_a_norm():
    """As far as autograd allows: it refuses a use of the old values, and leaves stay."""
    x = inputs(SHAPES["whole"])
    where = {"positions": x["positions"], "inv_freq": x["inv_freq"]}
    q, k = x["q"].clone(), x["k"].clone()
    out = qk_norm_rope(q, k, **where)
    assert [each.data_ptr() for each in out] == [q.data_ptr(), k.data_ptr()]
    want = qk_norm_rope_definition(x["q"], x["k"], **where)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)

    leaf = x["q"].clone().requires_grad_()
    for view in (leaf, leaf.view_as(leaf)):
        turned, _ = qk_norm_rope(view, x["k"].clone(), **where)
        assert torch.equal(leaf, x["q"])
        assert turned.data_ptr() != leaf.data_ptr()

    middle = leaf * 1.0
    square = middle.square()  # needs the values that are overwritten
    turned, _ = qk_norm_rope(middle, x["k"].clone(), **where)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square.sum() + turned.sum()).backward()

    scales = {"q_scale": x["q_scale"], "k_scale": x["k_scale"]}
    q = x["q"].clone()
    turned, _ = qk_norm_rope(q, x["k"], **where, **scales)
    assert torch.equal(q, x["q"])
    assert turned.data_ptr() != q.data_ptr()


@pytest.mark.parametrize("offset", NORMS.values(), ids=NORMS)
def test_one_launch_for_both_tensors(offset, monkeypatch):
    launches, kernel = [], module._kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "_kernel", Counted())
    x = inputs(SHAPES["whole"])
    run(qk_norm_rope, x, offset)
    assert launches == [(1, 6), (1, 6)]  # forward and backward: all heads of q and of k


@pytest.mark.parametrize("offset", NORMS.values(), ids=NORMS)
def test_several_tiles(offset, monkeypatch):
    """Of 4 tokens each: a tile's own rows, positions and share of the scales' gradients."""
    monkeypatch.setattr(module, "_TILE", 64)
    x = inputs(SHAPES["whole"])
    got = run(qk_norm_rope, x, offset)
    want = run(by_complex_numbers, x, offset, torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second one of a wider tensor."""
    return torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]


def test_one_tensor_for_both():
    x = inputs((37, 2, 2, 16, 16))
    where = {"positions": x["positions"], "inv_freq": x["inv_freq"]}
    want, _ = qk_norm_rope_definition(x["q"], x["q"], **where)
    q = x["q"].clone()
    for got in qk_norm_rope(q, q, **where):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [None, 0.0])
def test_strided_and_empty(offset):
    x = inputs(SHAPES["whole"])
    want = run(qk_norm_rope, x, offset)
    others = {name: strided(tensor) for name, tensor in x.items()}
    assert not any(tensor.is_contiguous() for tensor in others.values())
    torch.testing.assert_close(run(qk_norm_rope, others, offset), want, rtol=0, atol=0)
    q, k, d_q, d_k, *scales = run(qk_norm_rope, inputs((0, 2, 1, 8, 8)), offset)
    assert [len(each) for each in (q, k, d_q, d_k)] == [0] * 4
    assert all(torch.equal(each, torch.zeros(8, device=DEVICE)) for each in scales)


def test_refusals():
    x = inputs(SHAPES["whole"])
    good = {n: x[n] for n in ("q", "k", "positions", "inv_freq")}
    for wrong, message in (
        ({"q": x["q"].double()}, r"q of torch\.float64"),
        ({"k": x["k"].bfloat16()}, r"k of torch\.bfloat16 are not supported"),
        ({"k": x["k"][1:]}, "do not fit"),
        ({"k": x["k"][..., 1:]}, "do not fit"),
        ({"positions": x["positions"].long()}, r"positions must be int32 \[37\]"),
        ({"positions": x["positions"][1:]}, "positions must be int32"),
        ({"inv_freq": x["inv_freq"].double()}, "inv_freq must be float32"),
        ({"inv_freq": torch.ones(9, device=DEVICE)}, "of 1 to 8 numbers"),
        ({"inv_freq": torch.ones(0, device=DEVICE)}, "of 1 to 8 numbers"),
        ({"q_scale": x["q_scale"]}, "both or not at all"),
        ({"q_scale": x["q_scale"], "k_scale": x["k_scale"][1:]}, r"a scale must be \[16\]"),
        ({"q_scale": x["q_scale"].double(), "k_scale": x["k_scale"]}, "in 16 or 32 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(**good | wrong)


def test_wide_offsets_are_chosen_by_size():
    frequencies = torch.empty(32, device="meta")
    for tokens, wide in ((2**10, False), (2**20, True)):
        q = torch.empty(tokens, 32, 64, device="meta")
        settings = module._settings(q, q[:, :8], frequencies, False, backward=False)
        assert settings["INT64"] is wide


def test_compiles_for_hopper():
    kernels = []
    for name, width, norm in (("bf16", 64, False), ("bf16", 128, True), ("fp32", 256, True)):
        q = torch.empty(4, 8, width, device="meta")
        frequencies = torch.empty(width // 2, device="meta")
        for backward in (False, True):
            types = dict.fromkeys(("q", "k", "out_q", "out_k", "d_q", "d_k"), f"*{name}")
            types |= {"positions": "*i32", "inv_freq": "*fp32", "shares": "*fp32"}
            types |= dict.fromkeys(("q_scale", "k_scale"), f"*{name}" if norm else None)
            types |= {"tokens": "i32"} | dict.fromkeys(("factor", "eps", "offset"), "fp32")
            settings = module._settings(q, q[:, :2], frequencies, norm, backward)
            kernels.append((module.__name__, "_kernel", types | settings))
    kernels.append((*kernels[0][:2], kernels[0][2] | {"INT64": True}))
    results = compile_for_hopper(kernels)
    assert ["i64" in result["ttir"] for result in results] == [False] * 6 + [True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("shape", [(4099, 32, 8, 64, 64), (2050, 8, 4, 256, 256)], ids=str)
def test_on_a_gpu(shape, offset, dtype):
    x = inputs(shape, dtype)
    got = run(qk_norm_rope, x, offset)
    exact = run(by_complex_numbers, x, offset, torch.float64)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
    bound = 1e-4 if dtype == torch.float32 else 3e-3  # angles of some thousands in float32
    assert max(errors) < bound
    shifted = x | {"positions": x["positions"] + 1}
    assert min(furthest(run(qk_norm_rope, shifted, offset), got)[:4]) > 0.1
