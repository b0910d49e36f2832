"""The JAX path against the Triton path, float32, on tiny models; and faults that must be named."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NF4_FP32, load
from model_oracles import PROJECTIONS, add_lora, pack_rows
from safetensors.numpy import load_file, save_file
from test_model_families import FAMILY_TABLE, save
from tiny import tiny_folder, write_chats

from jaxft.errors import UserError
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from triton_ref.ops import KERNELS, Ops
from triton_ref.parity import __main__ as main
from triton_ref.parity import jax_side, torch_side
from triton_ref.parity.compare import Difference
from triton_ref.parity.job import BATCHES, Job
from triton_ref.parity.tensors import adapted, in_order
from triton_ref.parity.verdict import Verdict, judge_bfloat16, judge_float32

LENGTH, STEPS = 40, 10
# than the table's, for the interpreter's sake: every type of layer is still there
FEWER_LAYERS = {
    "qwen2": {"num_hidden_layers": 2, "max_window_layers": 1},
    "gemma2": {"num_hidden_layers": 2},
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_work(folder: Path, name: str, steps: int, **how) -> Job:
    """Model, adapter and packed batches with documents of one token and a tail of padding.

    No document begins with token 0: its embedding is zero, so every norm passes its gradient on
    times 1 / sqrt(eps), and in a deep model of any framework that overflows.
    """
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1} | FEWER_LAYERS.get(name, {})
    save(folder / "model", FAMILY_TABLE[name], **sizes)
    decoder = add_lora(load(folder / "model", NF4_FP32))
    (folder / "adapter").mkdir()
    config = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False)
    save_adapter(folder / "adapter", config, adapter_arrays(decoder))
    random = np.random.default_rng(0)
    batches = []
    for _ in range(max(steps, 1)):
        rows = [
            [random.integers(1, 64, n).tolist() for n in lengths] for lengths in ((17, 1), (9,))
        ]
        batches.append(pack_rows(rows, LENGTH))
    save_file({k: np.stack([b[k] for b in batches]) for k in batches[0]}, folder / BATCHES)
    given = {
        "model": str(folder / "model"),
        "adapter": str(folder / "adapter"),
        "max_length": LENGTH,
        "load_in_4bit": True,
        "nested": True,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "tokens": tuple(range(27)),
        "layers": len(decoder.config.layers),
        "steps": steps,
    }
    job = Job(**given | how)
    job.save(folder)
    return job


def judge(work: Path, job: Job, ops: Ops, jax_result: Path | None = None) -> Verdict:
    ours = load_file(jax_result or jax_side.run(work, "float32"))
    theirs = load_file(torch_side.run(work, "float32", ops))
    modules = adapted(ours)
    assert len(modules) == 7 * job.layers
    order = list(in_order(job.layers, modules, job.steps))
    others = {"loss", "losses", "grad_norms"}
    assert set(ours) - others == set(theirs) - others == {t.key for t in order}
    return judge_float32(ours, theirs, order)


@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_both_paths_agree(name, tmp_path):
    """Activations, gradients and ten optimiser steps, on NF4 weights."""
    job = make_work(tmp_path, name, STEPS)
    verdict = judge(tmp_path, job, KERNELS)
    assert verdict.faults == []
    assert len(verdict.tables[-1].rows) == STEPS


class TurnedOn(torch.autograd.Function):
    """RoPE whose backward turns by the angle once more instead of back."""

    @staticmethod
    def forward(ctx, q, k, positions, inv_freq):
        ctx.save_for_backward(positions, inv_freq)
        return KERNELS.qk_norm_rope(q.clone(), k.clone(), positions, inv_freq)

    @staticmethod
    def backward(ctx, dq, dk):
        return *KERNELS.qk_norm_rope(dq.clone(), dk.clone(), *ctx.saved_tensors), None, None


def rope_turned_on(q, k, positions, inv_freq, *, attention_factor):
    return TurnedOn.apply(q, k, positions, inv_freq)


def mask_off_by_one(q, k, v, cu_seqlens, max_seqlen, **how):
    """Documents that begin one token late, so that the first belongs to the one before."""
    late = cu_seqlens.clone()
    late[1:-1] += 1
    return KERNELS.attention(q, k, v, late, max_seqlen + 1, **how)


def offset_missing(weight, dtype):
    return KERNELS.dequantize(
        dataclasses.replace(weight, absmax_offset=torch.zeros_like(weight.absmax_offset)), dtype
    )


def residual_left_out(x, weight, *, residual=None, **how):
    """Of the gradient only."""
    if residual is not None:
        residual = residual.detach()
    return KERNELS.rms_norm(x, weight, residual=residual, **how)


def window_too_wide(q, k, v, cu_seqlens, max_seqlen, *, window, **how):
    return KERNELS.attention(q, k, v, cu_seqlens, max_seqlen, window=window + 1, **how)


def gradient_of_gate_too_large(gate, up, activation):
    return KERNELS.glu(gate + 0.1 * (gate - gate.detach()), up, activation)


def targets_late(hidden, head, targets, **how):
    return KERNELS.linear_cross_entropy(hidden, head, targets.roll(1), **how)


FAULTS = {
    "qk_norm_rope": (rope_turned_on, r"gradient at model\.layers\.1\.k \(from qk_norm_rope, back"),
    "attention": (mask_off_by_one, r"the model\.layers\.0\.attention \(from attention\)"),
    "attention, window": (window_too_wide, r"the model\.layers\.0\.attention \(from attention\)"),
    "dequantize": (offset_missing, r"the model\.layers\.0\.self_attn\.q_proj \(from nf4\)"),
    "rms_norm": (residual_left_out, r"gradient at model\.layers\.1\.layer_input \(from norm, back"),
    "glu": (
        gradient_of_gate_too_large,
        r"gradient at model\.layers\.1\.gate \(from glu, backward\)",
    ),
    "linear_cross_entropy": (targets_late, r"the nll \(from cross_entropy\)"),
}


@pytest.fixture(scope="module")
def jax_result(tmp_path_factory):
    """A work folder of Mistral, which has windows, and the JAX path's result."""
    work = tmp_path_factory.mktemp("mistral")
    return work, make_work(work, "mistral", 0), jax_side.run(work, "float32")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_op_is_named(fault, jax_result):
    work, job, result = jax_result
    broken, words = FAULTS[fault]
    ops = dataclasses.replace(KERNELS, **{fault.partition(",")[0]: broken})
    verdict = judge(work, job, ops, result)
    assert re.search(words, verdict.faults[0]), verdict.faults


def test_measures():
    one, other = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 2.5])
    assert Difference.of(one, other) == Difference(0.5, 0.5 / 3, 0.5 / np.sqrt(11.25))
    assert Difference.of(np.zeros(3), np.zeros(3)) == Difference(0, 0, 0)
    assert Difference.of(one, np.zeros(3)).relative == np.inf
    assert np.isnan(Difference.of(one, np.array([1.0, np.nan, 2])).relative)
    with pytest.raises(ValueError, match="shapes"):
        Difference.of(one, np.zeros(4))


def test_what_is_no_number_is_a_fault(jax_result):
    _, job, result = jax_result
    good = load_file(result)
    order = list(in_order(job.layers, ["model.layers.0.mlp.up_proj"]))
    assert judge_float32(good, good, order).faults == []
    key = "gradient/model.layers.1.glu"
    bad = good | {key: np.where(np.arange(good[key].size).reshape(good[key].shape) == 3, np.nan, 1)}
    assert "gradient at model.layers.1.glu" in judge_float32(bad, good, order).faults[0]
    with pytest.raises(ValueError, match=r"the second result has no tensor value/hidden"):
        judge_float32(good, {k: v for k, v in good.items() if k != "value/hidden"}, order)


def test_sides_in_bfloat16_are_measured_from_float32(jax_result):
    """Noise of one size passes; twice the noise in all that an op makes on one side does not."""
    _, job, result = jax_result
    exact = load_file(result)
    order = list(in_order(job.layers, ["model.layers.0.mlp.up_proj"]))
    random = np.random.default_rng(0)

    def noisy(size: float, of: str = "") -> dict[str, np.ndarray]:
        found = {}
        for key, array in exact.items():
            own = size if of in key else 1e-3
            found[key] = array * (1 + own * random.normal(size=array.shape)).astype(np.float32)
        return found

    assert judge_bfloat16(noisy(1e-3), noisy(1e-3), exact, order).faults == []
    for size, ops in ((2e-3, ["glu"]), (1e-2, ["glu", "linear backward"])):
        # the gradient at glu is one of four kinds that linear makes: twice its noise is 1.3 there
        faults = judge_bfloat16(noisy(size, "glu"), noisy(1e-3), exact, order).faults
        assert [fault.partition(":")[0] for fault in faults] == ops
        assert "the JAX path is" in faults[0]
    (fault,) = judge_bfloat16(noisy(1e-3), noisy(2e-3, "lora/"), exact, order).faults
    assert "the Triton path is" in fault
    (*_, fault) = judge_bfloat16(exact, noisy(1e-3), exact, order).faults
    assert "the Triton path is inf times" in fault
    lost = noisy(1e-3)
    lost["value/hidden"][0] = np.nan
    (fault,) = judge_bfloat16(lost, noisy(1e-3), exact, order).faults
    assert fault == "norm: not finite on the JAX side"


LOSSES = np.array([2.0, 1.5, 1.0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": np.array([0.01])}, "the loss differs: relative .*, bound 1e-05"),
        ({"losses": LOSSES * [0, 2e-4, 0]}, "the losses differ from step 2 on: 1.500300 and 1.5"),
        ({"losses": LOSSES * np.nan}, "the losses differ from step 1 on: nan"),
        ({"grad_norms": np.array([0, 0, 1e-3])}, "the gradient norms differ from step 3 on"),
        (
            {"trained/model.layers.0.mlp.up_proj.A": 1e-3},
            r"trained model\S+up_proj.A \(from adamw\)",
        ),
        (None, "every gradient of the adapter is 0"),
    ],
)
def test_each_bound_alone(change, words, jax_result):
    """Of what follows the tensors of one step."""
    order, good = with_steps(jax_result)
    assert judge_float32(good, good, order).faults == []
    if change is None:
        good |= {key: 0 * array for key, array in good.items() if key.startswith("lora/")}
        (fault,) = judge_float32(good, good, order).faults
    else:
        bad = good | {key: good[key] + amount for key, amount in change.items()}
        (fault,) = judge_float32(bad, good, order).faults
    assert re.search(words, fault)


def test_bounds_of_bfloat16_curves(jax_result):
    order, good = with_steps(jax_result)
    for size, words in (
        ([0.0019] * 3, None),
        ([0, 0.0055, 0], None),
        ([0, 0.011, 0], r"losses differ from step 2 on.*bound 0\.01"),
        ([0.0021] * 3, r"differ by 0\.21% on average, bound 0\.2%"),
    ):
        bad = good | {"losses": good["losses"] * (1 + np.array(size))}
        faults = judge_bfloat16(bad, good, good, order).faults
        assert bool(faults) is (words is not None)
        assert words is None or re.search(words, faults[0])


def test_both_far_from_float32_is_a_fault(jax_result):
    order, good = with_steps(jax_result)
    bad = good | {"value/hidden": -good["value/hidden"]}
    (fault,) = judge_bfloat16(bad, bad, good, order).faults
    assert fault == "norm: both are 0.89 from float32, bound 0.5"


def with_steps(jax_result) -> tuple[list, dict[str, np.ndarray]]:
    """A result that took three steps, with one adapter."""
    _, job, result = jax_result
    module = "model.layers.0.mlp.up_proj"
    more = {f"trained/{module}.{part}": np.ones((4, 8)) for part in "AB"}
    more |= {"losses": LOSSES, "grad_norms": np.array([1.0, 1.0, 1.0])}
    return list(in_order(job.layers, [module], 3)), load_file(result) | more


@pytest.mark.parametrize(("faults", "code"), [([], 0), (["the loss differs"], 1)])
def test_exit_code_and_report(faults, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "prepare", lambda *_: None)
    monkeypatch.setattr(main, "_compare", lambda *_: Verdict([], faults))
    given = ["--model_name_or_path", "m", "--dataset_name", "d"]
    report = tmp_path / "report.md"
    assert main.main([*given, "--report", str(report)]) == code
    words = "FAILED: the loss differs" if faults else "passed: both paths agree"
    assert words in capsys.readouterr().out
    assert words in report.read_text()
    with pytest.raises(UserError, match=r"--report /dev/full: No space left"):
        main.main([*given, "--report", "/dev/full"])


def command(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "triton_ref.parity", *args],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command(dtype, tmp_path):
    """From a folder and a file of chats to a verdict and a report."""
    model = tiny_folder(tmp_path / "model")
    rows = write_chats(tmp_path / "rows.jsonl", 12)
    report = tmp_path / "report.md"
    how = ["--max_length", "96", "--steps", "2", "--dtype", dtype, "--lora_r", "4"]
    how += ["--model_name_or_path", str(model), "--dataset_name", str(rows)]
    got = command(*how, "--report", str(report))
    assert (got.returncode, got.stderr) == (0, "")
    assert "passed: both paths agree" in got.stdout
    text = report.read_text()
    assert f"in {dtype}" in text
    assert "| qk_norm_rope backward |" in text
    assert "Losses of 2 optimiser steps" in text


def test_the_command_refuses_in_one_line(tmp_path):
    model = tiny_folder(tmp_path / "model")
    rows = write_chats(tmp_path / "rows.jsonl", 4)
    given = ["--model_name_or_path", str(model), "--dataset_name", str(rows)]
    other = tmp_path / "other"
    other.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    pair = np.zeros((4, 32), np.float32), np.zeros((64, 4), np.float32)
    config = AdapterConfig(4, 6.0, 0.0, ("q_proj",), False, layers_to_transform=(0,))
    save_adapter(other, config, {name: pair})
    for more, words in (
        (["--steps", "-1"], "--steps must be at least 0, got -1"),
        (["--lora_rank", "4"], "--lora_rank"),
        (["--report", str(tmp_path / "no" / "r.md")], "its folder does not exist"),
        (["--report", str(tmp_path)], "is no file name"),
        (["--max_length", "8"], "--max_length"),
        (["--adapter", str(tmp_path), "--lora_r", "4"], "--lora_r is the random adapter's"),
        (["--adapter", str(other)], "q_proj has the shapes [(4, 32), (64, 4)]"),
    ):
        got = command(*given, *more)
        assert got.returncode == 2
        assert got.stderr.startswith("error: ")
        assert words in got.stderr
        assert got.stderr.count("\n") == 1
