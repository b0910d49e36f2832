"""The chunked loss of a head in Triton against torch's own, in float64."""

import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import cross_entropy as module
from triton_ref.kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_definition,
)
from triton_ref.kernels.launch import interpreted

DEVICE = "cpu" if interpreted() else "cuda"
ROWS, WIDTH, VOCABULARY = 21, 24, 101
CHUNKS = {"of 1": 1, "of 7": 7, "of 64": 64, "all": 8192}


def inputs(dtype=torch.float32, rows=ROWS, width=WIDTH, vocabulary=VOCABULARY, seed: int = 0):
    """hidden, head, targets with some -1, the first and the last entry, and a cotangent."""
    random = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(n, width, generator=random) for n in (rows, vocabulary))
    targets = torch.randint(0, vocabulary, (rows,), generator=random)
    targets[2::5] = -1
    targets[:2] = torch.tensor([0, vocabulary - 1])
    d_nll = torch.randn(rows, generator=random)
    return [hidden.to(DEVICE, dtype), head.to(DEVICE, dtype), targets.to(DEVICE), d_nll.to(DEVICE)]


def run(function, x, dtype=None, **how):
    """The loss of each row, and the gradients of hidden and head."""
    leaves = [each.detach().to(dtype or each.dtype).requires_grad_() for each in x[:2]]
    nll = function(*leaves, x[2], **how)
    return [nll.detach(), *torch.autograd.grad(nll, leaves, x[3].to(nll.dtype))]


def by_torch(hidden, head, targets, softcap=None):
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.nn.functional.cross_entropy(
        logits, targets.long(), ignore_index=-1, reduction="none"
    )


def furthest(a, b) -> list[float]:
    return [float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_values_and_gradients(chunk, softcap, monkeypatch):
    x = inputs()
    got = run(linear_cross_entropy, x, softcap=softcap, chunk=chunk)
    want = run(by_torch, x, torch.float64, softcap=softcap)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)
    defined = run(linear_cross_entropy_definition, x, torch.float64, softcap=softcap)
    torch.testing.assert_close(defined, want, rtol=0, atol=1e-10)
    assert (got[0][x[2] < 0] == 0).all()
    assert (got[1][x[2] < 0] == 0).all()
    monkeypatch.setattr(module, "needs_int64", lambda *_: True)
    again = run(linear_cross_entropy, x, softcap=softcap, chunk=chunk)
    torch.testing.assert_close(again, got, rtol=0, atol=0)


def test_tiles_of_columns(monkeypatch):
    """A chunk of several tiles and a rest; the sums of a row meet over all of them."""
    monkeypatch.setattr(module, "_COLUMNS", 16)
    x = inputs()
    got = run(linear_cross_entropy, x, softcap=3.0, chunk=40)
    want = run(by_torch, x, torch.float64, softcap=3.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", ["target", "cap", "ignored", "entry"])
def test_faults_are_far_outside(name):
    x = inputs()
    got = run(linear_cross_entropy, x, softcap=3.0, chunk=40)
    wrong, softcap = list(x), 3.0
    if name == "target":
        wrong[2] = torch.where(x[2] > 0, x[2] - 1, x[2])
    elif name == "cap":
        softcap = None
    elif name == "ignored":
        wrong[2] = x[2].clamp(min=0)
    else:  # the last entry of the vocabulary left out
        wrong[1] = x[1].index_fill(0, torch.tensor([VOCABULARY - 1], device=DEVICE), 0)
    assert min(furthest(got, run(by_torch, wrong, torch.float64, softcap=softcap))) > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_half_precision(softcap, dtype):
    """The logits and the loss are those of float64; the gradients have one rounding."""
    x = inputs(dtype)
    got = run(linear_cross_entropy, x, softcap=softcap, chunk=40)
    want = run(by_torch, x, torch.float64, softcap=softcap)
    assert [each.dtype for each in got] == [torch.float32, dtype, dtype]
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    half_step = torch.finfo(dtype).eps / 2
    for ours, true in zip(got[1:], want[1:], strict=True):
        assert ((ours.double() - true).abs() <= 1.01 * half_step * true.abs() + 1e-5).all()

    def with_rounded_logits(hidden, head, targets, softcap):
        logits = (hidden @ head.T).to(dtype).double()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

    rounded = with_rounded_logits(*(each.double() for each in x[:2]), x[2], softcap)
    assert (rounded - want[0]).abs().max() > 1e-4


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits(sign):
    """All of one sign and far from 0, where a rest of a tile must not count as a logit of 0."""
    x = inputs()
    x[0] = sign * x[0].abs() * 100
    x[1] = x[1].abs() + 1
    got = run(linear_cross_entropy, x, chunk=40)
    want = run(by_torch, x, torch.float64)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-2)
    assert all(torch.isfinite(each).all() for each in got)
    logits = x[0] @ x[1].T
    assert logits.abs().min() > 500
    naive = logits.exp().sum(1).log()
    assert not torch.isfinite(naive).any()


def test_entries_that_cannot_be():
    """A whole chunk of logits that are -inf, at the start, in the middle and at the end."""
    x = inputs()
    x[0][:, 0] = 1.0
    wanted = set(x[2].tolist())
    for first in (0, 40, 84):
        free = [i for i in range(first, first + 17) if i not in wanted]
        head = x[1].clone()
        head[:, 0] = 0.0
        head[free, 0] = -torch.inf
        for chunk in (1, 8192):
            nll = linear_cross_entropy(x[0], head, x[2], chunk=chunk)
            want = by_torch(x[0].double(), head.double(), x[2])
            torch.testing.assert_close(nll.double(), want, rtol=1e-5, atol=1e-5)


def test_no_array_of_all_logits_is_kept():
    """What the backward pass keeps: its inputs and two numbers a row."""
    hidden, head, targets, _ = inputs(rows=40, width=4, vocabulary=3000)
    kept: list[int] = []

    def count(tensor):
        kept.append(tensor.numel())
        return tensor

    for function, limit in ((linear_cross_entropy, True), (by_torch, False)):
        kept.clear()
        leaves = [each.clone().requires_grad_() for each in (hidden, head)]
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            function(*leaves, targets)
        assert (sum(kept) <= hidden.numel() + head.numel() + 3 * 40) is limit


def test_one_gradient_alone():
    x = inputs()
    whole = run(linear_cross_entropy, x)
    for learned in (0, 1):
        leaves = [each.clone().requires_grad_(i == learned) for i, each in enumerate(x[:2])]
        nll = linear_cross_entropy(*leaves, x[2])
        (gradient,) = torch.autograd.grad(nll, leaves[learned], x[3])
        assert torch.equal(gradient, whole[1 + learned])


def test_strided_empty_and_int32():
    x = inputs()
    want = run(linear_cross_entropy, x)
    strided = [each.T.contiguous().T for each in x[:2]]
    strided += [torch.stack([each, each], 1)[:, 0] for each in (x[2].int(), x[3])]
    got = run(linear_cross_entropy, strided)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    nll, d_hidden, d_head = run(linear_cross_entropy, [x[0][:0], x[1], x[2][:0], x[3][:0]])
    assert (nll.shape, d_hidden.shape) == ((0,), (0, WIDTH))
    assert torch.equal(d_head, torch.zeros_like(x[1]))
    nothing = run(linear_cross_entropy, [*x[:2], torch.full_like(x[2], -1), x[3]])
    assert all((each == 0).all() for each in nothing)


def test_refusals():
    hidden, head, targets, _ = inputs()
    good = {"hidden": hidden, "head": head, "targets": targets}
    for wrong, message in (
        ({"hidden": hidden.double()}, r"hidden of torch\.float64"),
        ({"head": head.bfloat16()}, r"head of torch\.bfloat16, but hidden of torch\.float32"),
        ({"head": head[:, 1:]}, "do not fit"),
        ({"targets": targets[1:]}, r"must be int32 or int64 \[21\]"),
        ({"targets": targets.float()}, "must be int32 or int64"),
        ({"targets": targets + 1}, "must be from -1 to 100"),
        ({"targets": targets - 1}, "must be from -1 to 100"),
        ({"softcap": 0.0}, "must be positive"),
        ({"chunk": 0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(**good | wrong)


def test_wide_offsets_are_chosen_by_size():
    small, large = (torch.empty(n, 2**17, device="meta") for n in (2**10, 2**15))
    assert [module._settings(x, None)["INT64"] for x in (small, large)] == [False, True]


def test_compiles_for_hopper():
    kernels = []
    settings = module._settings(torch.empty(4, 8192, device="meta"), 30.0)
    for name in ("_forward", "_backward"):
        types = dict.fromkeys(("logits", "largest", "total", "wanted", "d_nll"), "*fp32")
        types |= dict.fromkeys(("rows", "columns", "start"), "i32")
        types |= {"targets": "*i32", "softcap": "fp32"}
        kernels.append((module.__name__, name, types | settings))
    kernels.append((*kernels[0][:2], kernels[0][2] | {"INT64": True}))
    results = compile_for_hopper(kernels)
    assert ["i64" in result["ttir"] for result in results] == [False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype, softcap):
    """A real vocabulary; the peak of memory stays far under one array of all logits."""
    x = inputs(dtype, rows=700, width=512, vocabulary=128_256)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = run(linear_cross_entropy, x, softcap=softcap)
    peak = torch.cuda.max_memory_allocated() - before
    want = run(by_torch, x, torch.float64, softcap=softcap)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    assert errors[0] < 1e-5
    assert max(errors) < (1e-5 if dtype == torch.float32 else 3e-3)
    gradients = sum(each.nbytes for each in got)
    assert peak - gradients < 700 * 128_256 * 4 / 2
