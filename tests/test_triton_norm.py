"""RMSNorm in Triton against transformers and torch in float64: both forms, with a residual."""

import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import norm
from triton_ref.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
EPS = 0.05  # large enough to matter beside a mean square of 1
SHAPES = [(1, 1), (37, 70), (5, 1000)]
FORMS = ["llama", "gemma"]


def inputs(shape, dtype=torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(("x", "residual", "d_y", "d_h"), shape) | {"weight": shape[1:]}
    return {
        name: torch.randn(size, generator=random).to(DEVICE, dtype) for name, size in shapes.items()
    }


def run(function, x, form, names, dtype=None):
    """y, h and the gradients of `names`, with cotangents at both results."""
    leaves = {name: x[name].to(dtype or x[name].dtype).requires_grad_() for name in names}
    y, h = function(**leaves, eps=EPS, form=form)
    cotangents = [x["d_y"].to(y.dtype), x["d_h"].to(h.dtype)]
    return (
        y,
        h,
        dict(zip(names, torch.autograd.grad([y, h], leaves.values(), cotangents), strict=True)),
    )


def in_float64(x, form, names):
    """The same from torch in float64, written once more; the gradients are autograd's."""

    def plain(x, weight, eps, form, residual=0.0):
        h = x + residual
        return h / (h.pow(2).mean(1, True) + eps).sqrt() * (weight + (form == "gemma")), h

    return run(plain, x, form, names, torch.float64)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, form, with_residual, monkeypatch):
    x = inputs(shape)
    names = ["x", "weight", *(["residual"] if with_residual else [])]
    y, h, gradients = run(norm.rms_norm, x, form, names)
    want_y, want_h, want = in_float64(x, form, names)
    close = {"rtol": 0, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(y, want_y, **close)
    torch.testing.assert_close(h, want_h, **close)
    for name in names:
        torch.testing.assert_close(gradients[name], want[name], **close)
    defined = run(norm.rms_norm_definition, x, form, names)
    torch.testing.assert_close((y, h, gradients), defined, rtol=0, atol=1e-5)

    monkeypatch.setattr(norm, "needs_int64", lambda *_: True)
    wide = run(norm.rms_norm, x, form, names)
    torch.testing.assert_close(wide, (y, h, gradients), rtol=0, atol=0)
    if shape[0] == 1:
        return
    # the other form, the cotangent of h left out, and a divisor held constant are far outside
    other = next(each for each in FORMS if each != form)
    assert (norm.rms_norm(x["x"], x["weight"], eps=EPS, form=other)[0] - y).abs().max() > 0.5
    assert (gradients["x"] - x["d_h"] - want["x"]).abs().max() > 0.5
    scale = x["weight"] + (form == "gemma")
    frozen = x["d_h"] + x["d_y"] * scale / (h.detach().pow(2).mean(1, True) + EPS).sqrt()
    assert (frozen - want["x"]).abs().max() > 0.01


def their_norms(form, weight):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    classes = {"llama": [LlamaRMSNorm], "gemma": [Gemma2RMSNorm, Gemma3RMSNorm]}[form]
    modules = [each(len(weight), EPS).to(weight.device, weight.dtype) for each in classes]
    for each in modules:
        with torch.no_grad():
            each.weight.copy_(weight)
    return modules


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many 16-bit numbers lie between, of numbers with one sign."""
    assert (a.sign() == b.sign()).all()
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_matches_transformers(form, dtype):
    """In float32 closely. In bfloat16 to the last bit, but for the sum of squares' order.

    That can turn the rounding of a value that lies next to halfway: one step, seldom.
    """
    x = inputs((64, 250), dtype)
    y, _ = norm.rms_norm(x["x"], x["weight"], eps=EPS, form=form)
    for each in their_norms(form, x["weight"]):
        with torch.no_grad():
            theirs = each(x["x"])
        assert theirs.dtype == y.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(y, theirs, rtol=1e-6, atol=1e-6)
            continue
        apart = steps_apart(y, theirs)
        assert apart.max() <= 1
        assert (apart > 0).double().mean() < 1e-3
        # rounded in between where it must not be, or not where it must
        wide = x["x"].float() * (x["x"].float().pow(2).mean(1, True) + EPS).rsqrt()
        if form == "llama":
            wrong = (wide * x["weight"]).bfloat16()
        else:
            wrong = (wide.bfloat16() * (1 + x["weight"].float())).bfloat16()
        assert (wrong != theirs).double().mean() > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_gradients(form, dtype):
    """As near to float64 as one rounding: the cotangent of h is added before it."""
    x = inputs((33, 70), dtype)
    names = ["x", "weight", "residual"]
    y, h, gradients = run(norm.rms_norm, x, form, names)
    assert torch.equal(h, x["x"] + x["residual"])
    assert {each.dtype for each in (y, h, *gradients.values())} == {dtype}
    assert torch.equal(gradients["x"], gradients["residual"])
    # from the rounded sum, which is what the stream has
    exact = in_float64(x | {"x": h.detach()}, form, ["x", "weight"])[2]
    half_step = torch.finfo(dtype).eps / 2
    error = (gradients["x"].double() - exact["x"]).abs()
    assert (error <= 1.01 * half_step * exact["x"].abs() + 1e-5).all()
    alone = (exact["x"] - x["d_h"].double()).to(dtype)  # two roundings, as autograd would add
    error = ((alone + x["d_h"]).double() - exact["x"]).abs()
    assert (error > 1.01 * half_step * exact["x"].abs() + 1e-5).any()
    bound = half_step * (6 if form == "llama" else 1.01)  # llama's has normalised values rounded
    norms = exact["weight"].abs() + exact["weight"].abs().mean()
    assert ((gradients["weight"].double() - exact["weight"]).abs() <= bound * norms).all()


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_share_a_program(form, monkeypatch):
    """The weight's gradient is the same in bits from run to run, and right over several tiles."""
    monkeypatch.setattr(norm, "_TILE", 128)
    monkeypatch.setattr(norm, "_PROGRAMS", 3)
    x = inputs((45, 30))
    names = ["x", "weight", "residual"]
    first = run(norm.rms_norm, x, form, names)
    want = in_float64(x, form, names)
    torch.testing.assert_close(first, want, rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(first, run(norm.rms_norm, x, form, names), rtol=0, atol=0)


def test_one_cotangent_alone():
    x = inputs((6, 20))
    leaves = [x[name].requires_grad_() for name in ("x", "residual", "weight")]
    for result in (0, 1):
        results = norm.rms_norm(leaves[0], leaves[2], eps=EPS, residual=leaves[1])
        plain = norm.rms_norm_definition(leaves[0], leaves[2], eps=EPS, residual=leaves[1])
        ours = torch.autograd.grad(results[result].sum(), leaves, materialize_grads=True)
        theirs = torch.autograd.grad(plain[result].sum(), leaves, materialize_grads=True)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    frozen = norm.rms_norm(leaves[0], leaves[2].detach(), eps=EPS, residual=leaves[1].detach())
    assert len(torch.autograd.grad(frozen[0].sum(), leaves[:1])) == 1


def test_strided_empty_and_mixed():
    x = inputs((12, 20))
    weight, residual = x["weight"], x["residual"]
    strided = norm.rms_norm(x["x"].T.contiguous().T, weight, eps=EPS, residual=residual[:, :])
    whole = norm.rms_norm(x["x"], weight, eps=EPS, residual=residual)
    assert torch.equal(strided[0], whole[0])
    mixed = norm.rms_norm(x["x"].bfloat16(), weight, eps=EPS)
    same = norm.rms_norm_definition(x["x"].bfloat16(), weight, eps=EPS)
    assert mixed[0].dtype == same[0].dtype == torch.bfloat16
    assert steps_apart(mixed[0], same[0]).max() <= 1
    x = inputs((0, 20))
    y, h, gradients = run(norm.rms_norm, x, "llama", ["x", "weight", "residual"])
    assert y.shape == h.shape == (0, 20)
    assert torch.equal(gradients["weight"], torch.zeros(20, device=DEVICE))


def test_refusals():
    x, weight = torch.zeros(3, 8, device=DEVICE), torch.zeros(8, device=DEVICE)
    for wrong, message in (
        ({"form": "qwen"}, "form 'qwen' is unknown"),
        ({"weight": weight[:7]}, r"x \[3, 8\] and weight \[7\] do not fit"),
        ({"x": x[None]}, "do not fit"),
        ({"x": x.double()}, r"x of torch\.float64 is not supported"),
        ({"weight": weight.double()}, r"weight of torch\.float64 is not supported"),
        ({"residual": x[:2]}, r"residual torch\.float32 \[2, 8\] must be as x"),
        ({"residual": x.bfloat16()}, "residual torch.bfloat16 .* must be as x"),
    ):
        with pytest.raises(ValueError, match=message):
            norm.rms_norm(**{"x": x, "weight": weight, "eps": EPS} | wrong)


def test_wide_offsets_are_chosen_by_size():
    small, large = (torch.empty(n, 2**16, device="meta") for n in (2**10, 2**15))
    assert [norm._settings(x, "llama")["INT64"] for x in (small, large)] == [False, True]


def test_compiles_for_hopper():
    kernels = []
    for dtype, form, width in (("bf16", "llama", 4096), ("fp32", "gemma", 2304)):
        x = torch.empty(3, width, device="meta")
        sizes = {"rows": "i32", "width": "i32"}
        every = f"*{dtype}"
        forward = dict.fromkeys(("x", "residual", "weight", "y", "h"), every)
        forward |= sizes | {"inverse": "*fp32", "eps": "fp32"}
        backward = dict.fromkeys(("d_y", "d_h", "h", "weight", "d_x"), every)
        backward |= sizes | {"inverse": "*fp32", "d_weight": "*fp32"}
        settings = norm._settings(x, form, RESIDUAL=True)
        kernels.append((norm.__name__, "_forward", forward | settings))
        settings = norm._settings(x, form, D_H=True, D_WEIGHT=True)
        kernels.append((norm.__name__, "_backward", backward | settings))
    kernels += [(*each[:2], each[2] | {"INT64": True}) for each in kernels[:2]]
    results = compile_for_hopper(kernels)
    wide = ["i64" in result["ttir"] for result in results]
    assert wide == [False] * 4 + [True] * 2
