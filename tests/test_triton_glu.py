"""Gated linear units in Triton against torch's own activations and float64."""

import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import glu as module
from triton_ref.kernels.glu import glu, glu_definition
from triton_ref.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
ACTIVATIONS = ["silu", "gelu_tanh"]
HALF = [torch.bfloat16, torch.float16]


def torchs(gate, up, activation):
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def inputs(shape, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """gate (a few units wide), up and the cotangent."""
    random = torch.Generator().manual_seed(seed)
    gate, up, d = (torch.randn(shape, generator=random) for _ in range(3))
    return [each.to(DEVICE, dtype) for each in (3 * gate, up, d)]


def run(function, gate, up, d, activation):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up, activation)
    return out.detach(), *torch.autograd.grad(out, [gate, up], d)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (13, 1001)])
def test_values_and_gradients(shape, activation, monkeypatch):
    x = inputs(shape)
    results = run(glu, *x, activation)
    want = run(torchs, *(each.double() for each in x), activation)
    torch.testing.assert_close(results, want, rtol=1e-6, atol=2e-6, check_dtype=False)
    defined = run(glu_definition, *x, activation)
    torch.testing.assert_close(defined, want, rtol=1e-6, atol=2e-6, check_dtype=False)
    monkeypatch.setattr(module, "needs_int64", lambda *_: True)
    torch.testing.assert_close(run(glu, *x, activation), results, rtol=0, atol=0)
    if shape == (1, 1):
        return
    other = next(each for each in ACTIVATIONS if each != activation)
    for wrong in (
        run(torchs, *x, other),
        run(torchs, x[1], x[0], x[2], activation),
        run(torchs, x[0], x[1], -x[2], activation),
    ):
        for result, wrong_result in zip(results[1:], wrong[1:], strict=True):
            assert (result - wrong_result).abs().max() > 0.03
    exact = torch.nn.functional.gelu(x[0]) * x[1]  # the other gelu
    if activation == "gelu_tanh":
        assert (results[0] - exact).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_is_rounded_once(activation, dtype):
    x = inputs((9, 500), dtype)
    results = run(glu, *x, activation)
    want = run(torchs, *(each.double() for each in x), activation)
    twice = run(torchs, *x, activation)  # rounded after the activation and after the product
    info = torch.finfo(dtype)
    for result, exact, rough in zip(results, want, twice, strict=True):
        assert result.dtype == dtype
        bound = 1.01 * info.eps / 2 * exact.abs() + 2e-6
        assert ((result.double() - exact).abs() <= bound).all()
        assert ((rough.double() - exact).abs() > bound).double().mean() > 0.01


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_from_zero(activation):
    """No overflow, no NaN: the activation is x above and 0 below, and its slope 1 and 0."""
    size = torch.tensor([20.0, 90.0, 104.0, 1e4, 1e13, 1e20, 3e38], device=DEVICE)
    gate = torch.stack((size, -size))
    one = torch.ones_like(gate)
    out, d_gate, d_up = run(glu, gate, one, one, activation)
    for each in run(glu, torch.full_like(gate, torch.nan), one, one, activation):
        assert each.isnan().all()
    rest = torch.zeros_like(size)
    torch.testing.assert_close(out, torch.stack((size, rest)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(d_up, torch.stack((size, rest)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(d_gate, torch.stack((one[0], rest)), rtol=1e-6, atol=1e-7)
    naive = gate[1] * torch.exp(gate[1]) / (1 + torch.exp(-gate[1]).reciprocal())
    assert not torch.stack((gate[0].exp() / (1 + gate[0].exp()), naive)).isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_near_zero_and_at_every_bfloat16(activation):
    """All finite gates of 16 bits up to 100, and 0 of either sign."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite() & (gate.abs() <= 100)].to(DEVICE)[None]
    one = torch.ones_like(gate)
    results = run(glu, gate, one, one, activation)
    want = run(torchs, gate.double(), one.double(), one.double(), activation)
    for result, exact in zip(results, want, strict=True):
        error = (result.double() - exact).abs()
        assert (error <= 1.01 * 2**-8 * exact.abs() + 1e-7).all()


def test_strided_and_empty():
    gate, up, d = inputs((12, 20))
    whole = run(glu, gate, up, d, "silu")
    strided = run(glu, gate.T.contiguous().T, up, d.T.contiguous().T, "silu")
    torch.testing.assert_close(strided, whole, rtol=0, atol=0)
    out, d_gate, d_up = run(glu, *inputs((0, 20)), "silu")
    assert out.shape == d_gate.shape == d_up.shape == (0, 20)


def test_saves_its_inputs_alone():
    saved = []
    gate, up, _ = inputs((8, 64), torch.bfloat16)
    gate.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        glu(gate, up, "silu")
    assert {each.data_ptr() for each in saved} == {gate.data_ptr(), up.data_ptr()}


def test_refusals():
    x = torch.zeros(3, 8, device=DEVICE)
    for gate, up, activation, message in (
        (x, x, "gelu", "activation 'gelu' is unknown"),
        (x.double(), x.double(), "silu", r"gate of torch\.float64 is not supported"),
        (x, x[:2], "silu", r"gate torch\.float32 \[3, 8\] and up torch\.float32 \[2, 8\] must be"),
        (x, x.bfloat16(), "silu", "must be matrices of one shape and dtype"),
        (x[0], x[0], "silu", "must be matrices"),
    ):
        with pytest.raises(ValueError, match=message):
            glu(gate, up, activation)


def test_wide_offsets_are_chosen_by_size():
    small, large = (torch.empty(n, 2**16, device="meta") for n in (2**10, 2**15))
    assert [module._settings(gate, True)["INT64"] for gate in (small, large)] == [False, True]


def test_compiles_for_hopper():
    kernels = []
    for dtype, gelu in (("bf16", False), ("fp32", True)):
        settings = module._settings(torch.empty(3, 8, device="meta"), gelu)
        forward = dict.fromkeys(("gate", "up", "out"), f"*{dtype}") | {"count": "i32"}
        kernels.append((module.__name__, "_forward", forward | settings))
        backward = dict.fromkeys(("d_out", "gate", "up", "d_gate", "d_up"), f"*{dtype}")
        kernels.append((module.__name__, "_backward", backward | {"count": "i32"} | settings))
    kernels += [(*each[:2], each[2] | {"INT64": True}) for each in kernels[:2]]
    results = compile_for_hopper(kernels)
    assert ["i64" in result["ttir"] for result in results] == [False] * 4 + [True] * 2
