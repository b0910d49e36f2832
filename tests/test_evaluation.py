"""Evaluation through the command: the loss itself, the best update, the limit on checkpoints."""

import io
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_train import config, lines, stop_after
from tiny import tiny_folder, tiny_tokenizer, write_chats

from jaxft import train
from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.export import import_adapter
from jaxft.formats.checkpoint import Checkpoints
from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.formats.peft import load_adapter

LENGTH = 64
TARGETS = (1, 2, 8, 3, 5)  # of each held-out row, its EOS included


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl", 4)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held.jsonl"
    words = ("cut after one", "a", "abcdefg", "ab", "abcd")
    rows = [{"prompt": f"p{i}" * 11, "completion": word} for i, word in enumerate(words)]
    rows[0]["prompt"] = "x" * (LENGTH - 2)  # with the BOS, room for one token more
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in lines(folder) if "eval_loss" in line}


def row_losses(model: Path, adapter: Path, held_out: Path) -> list[np.ndarray]:
    """nll of each target of each row by itself, by transformers and PEFT in float32."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, adapter)
    tokenizer = tiny_tokenizer()
    found = []
    for line in held_out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        ids = [*ids, tokenizer.eos_token_id][:LENGTH]
        with torch.no_grad():
            logits = tuned(torch.tensor([ids])).logits[0].double()
        nll = -torch.log_softmax(logits[:-1], -1)[torch.arange(len(ids) - 1), ids[1:]]
        found.append(nll[len(prompt) - 1 :].numpy())
    return found


def test_loss_is_the_mean_over_all_targets(model, chats, held_out, tmp_path):
    """Whatever the batch size and packing; and the training does not notice the evaluation."""
    given = {
        "eval_dataset_name": str(held_out),
        "eval_split_ratio": 0,
        "load_in_4bit": False,
        "max_length": LENGTH,  # two or three of the held-out rows in a pack, the last batch short
        "overflow": "truncate",
        "max_steps": 3,
        "eval_steps": 2,
    }
    ways = [(size, packing) for size in (1, 2, 5) for packing in (True, False)]
    found = {}
    for size, packing in ways:
        folder = tmp_path / f"{size}-{packing}"
        over = {"per_device_eval_batch_size": size, "packing": packing}
        assert train.run(config(model, chats, folder, **given | over)) == 0
        found[size, packing] = losses(folder)
    reference = found[1, True]
    assert sorted(reference) == [0, 2, 3]
    for way, got in found.items():
        assert got[0] == pytest.approx(reference[0], abs=1e-6), way
    for size in (2, 5):
        for packing in (True, False):  # packing changes the training batches, the size does not
            assert found[size, packing] == pytest.approx(found[1, packing], abs=1e-6)
    each = row_losses(model, tmp_path / "1-True", held_out)
    assert sum(map(len, each)) == sum(TARGETS)
    assert reference[3] == pytest.approx(np.concatenate(each).mean(), abs=2e-6)
    mean_of_means = np.mean([row.mean() for row in each])
    assert abs(reference[3] - mean_of_means) > 1e-2  # the control
    plain = tmp_path / "without"
    assert train.run(config(model, chats, plain, **given | {"eval_steps": None})) == 0
    trained = [line for line in lines(tmp_path / "2-True") if "loss" in line]
    assert trained == [line for line in lines(plain) if "loss" in line]


OVERFIT = {
    "max_length": LENGTH,
    "overflow": "truncate",
    "eval_split_ratio": 0,
    "eval_steps": 1,
    "max_steps": 8,
    "learning_rate": 0.1,
}


def trained_at(folder: Path, step: int):
    """The adapter of a checkpoint, as float32 arrays."""
    checkpoints = Checkpoints(folder / "checkpoints")
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(tree=ocp.args.StandardRestore())
    tree = checkpoints._manager.restore(step, args=args)["tree"]
    return {name: np.asarray(value) for name, value in tree.items() if ".trained" in name}


def adapter_sum(folder: Path) -> float:
    _, arrays = load_adapter(folder)
    return sum(float(np.abs(b).sum(dtype=np.float64)) for _, b in arrays.values())


def checkpoint_sum(folder: Path, step: int) -> float:
    arrays = trained_at(folder, step).items()
    return sum(float(np.abs(x).sum(dtype=np.float64)) for name, x in arrays if "lora_B" in name)


@pytest.fixture(scope="module")
def overfit(model, chats, held_out, tmp_path_factory) -> Path:
    """A run whose held-out loss has its lowest point in the middle; the best adapter is written."""
    folder = tmp_path_factory.mktemp("best") / "run"
    over = {"eval_dataset_name": str(held_out), "load_best_model_at_end": True}
    assert train.run(config(model, chats, folder, **OVERFIT | over, save_total_limit=1)) == 0
    return folder


def test_the_best_adapter_is_written(overfit):
    by_step = losses(overfit)
    best = min(range(1, 9), key=by_step.__getitem__)
    assert best < 8, by_step  # else the case shows nothing
    assert Checkpoints(overfit / "checkpoints").steps() == [best, 8]
    assert adapter_sum(overfit) == pytest.approx(checkpoint_sum(overfit, best), rel=1e-6)
    assert adapter_sum(overfit) != pytest.approx(checkpoint_sum(overfit, 8), rel=1e-3)


def test_the_written_adapter_has_the_loss_it_was_chosen_for(overfit, model, held_out, tmp_path):
    best = min(value for step, value in losses(overfit).items() if step)
    checkpoint = open_checkpoint(str(model))
    from helpers import NF4_FP32

    decoder = load_decoder(checkpoint, NF4_FP32)
    import_adapter(overfit, decoder)
    total, count = 0.0, 0
    tokenizer = tiny_tokenizer()
    import jax.numpy as jnp
    from jax.nn import log_softmax

    for line in held_out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        first = len(tokenizer(row["prompt"])["input_ids"])
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        ids = [*ids, tokenizer.eos_token_id][:LENGTH]
        tokens = jnp.array([ids])
        scores = log_softmax(decoder.logits(decoder(tokens, jnp.ones_like(tokens))))[0]
        for position in range(first - 1, len(ids) - 1):
            total, count = total - float(scores[position, ids[position + 1]]), count + 1
    assert total / count == pytest.approx(best, abs=1e-5)


def test_without_the_option_the_last_is_written(model, chats, held_out, overfit, tmp_path):
    """The control, and the limit without a best one."""
    folder = tmp_path / "run"
    over = {"eval_dataset_name": str(held_out), "save_steps": 2, "save_total_limit": 2}
    assert train.run(config(model, chats, folder, **OVERFIT | over)) == 0
    assert losses(folder) == losses(overfit)
    assert Checkpoints(folder / "checkpoints").steps() == [6, 8]
    assert adapter_sum(folder) == pytest.approx(checkpoint_sum(folder, 8), rel=1e-6)
    assert adapter_sum(folder) != pytest.approx(adapter_sum(overfit), rel=1e-3)


def test_a_resumed_run_knows_the_best_before_it(
    model, chats, held_out, overfit, tmp_path, monkeypatch
):
    by_step = losses(overfit)
    best = min(range(1, 9), key=by_step.__getitem__)
    over = {"eval_dataset_name": str(held_out), "load_best_model_at_end": True}
    options = OVERFIT | over | {"save_total_limit": 1}
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(best + 1, signal.SIGTERM, patch)
        assert train.run(config(model, chats, folder, **options)) == 128 + signal.SIGTERM
    again = config(model, chats, folder, **options, resume_from_checkpoint="latest")
    assert train.run(again) == 0
    assert losses(folder) == by_step
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / name).read_bytes() == (overfit / name).read_bytes()


def test_a_dry_run_writes_nothing(model, chats, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train.run(config(model, chats, folder, dry_run=True)) == 0
    out = capsys.readouterr().out
    assert "dry run: nothing was trained or written" in out
    assert "updates" in out
    assert not folder.exists()
    with pytest.raises(UserError, match="no projection"):  # it checks what a run checks
        train.run(config(model, chats, folder, dry_run=True, lora_target_modules="query"))


def test_the_report_fits_one_screen(model, chats, held_out, tmp_path, monkeypatch):
    """80 columns of 24 rows, with everything that can be in it."""
    file = io.StringIO()
    screen = Console(file=file, force_terminal=True, width=80, no_color=True, highlight=False)
    monkeypatch.setattr(train, "make_console", lambda: screen)
    over = {
        "dataset_name": (str(chats), str(held_out.with_name("more.jsonl"))),
        "dataset_weights": (2.0, 0.5),
        "overflow": "drop",
        "eval_split_ratio": 0.2,
    }
    write_chats(held_out.with_name("more.jsonl"), 9, seed=1)
    assert train.run(config(model, chats, tmp_path / "run", dry_run=True, **over)) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    report = shown[shown.index(" model ") :]
    for name in ("sources", "documents", "held out", "trainable", "updates", "kernels"):
        assert f" {name} " in report
    assert len(report.splitlines()) <= 23
    assert max(map(len, report.splitlines())) <= 80


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"load_best_model_at_end": True, "eval_split_ratio": 0.1}, ["add --eval_steps"]),
        ({"save_total_limit": 0}, ["save_total_limit", "at least 1"]),
        ({"eval_steps": 2}, ["no evaluation data"]),
    ],
)
def test_options_that_lack_another(given, parts):
    with pytest.raises(UserError) as caught:
        TrainConfig(model_name_or_path="m", dataset_name="d", output_dir="o", **given)
    for part in parts:
        assert part in str(caught.value)
