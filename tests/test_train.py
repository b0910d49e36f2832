"""The training command: resuming, stopping, exports, and what it says to wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import tiny_folder, write_chats

from jaxft import sinks, train
from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.export import import_adapter
from jaxft.formats.checkpoint import Checkpoints
from jaxft.formats.open import open_checkpoint
from jaxft.lora import adapter_arrays
from jaxft.signals import stop_request

ROOT = Path(__file__).resolve().parents[1]
EXACT = ("step", "loss", "learning_rate", "grad_norm", "target_tokens", "eval_loss")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl", 40)


def config(model: Path, chats: Path, output: Path, **over) -> TrainConfig:
    base = {
        "model_name_or_path": str(model),
        "dataset_name": str(chats),
        "output_dir": str(output),
        "max_length": 128,
        "per_device_train_batch_size": 2,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "warmup_steps": 2,
        "eval_split_ratio": 0.1,
        "eval_steps": 5,
    }
    return TrainConfig(**(base | over))


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without the timings."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [{k: v for k, v in json.loads(line).items() if k in EXACT} for line in text.splitlines()]


def stop_after(step: int, number: signal.Signals, monkeypatch) -> None:
    """Make the run send itself a signal when it has recorded an update."""

    class Stopper:
        def write(self, at: int, values: dict) -> None:
            if at == step and "loss" in values:
                os.kill(os.getpid(), number)

        def close(self) -> None:
            pass

    real = sinks.open_sinks
    monkeypatch.setattr(train, "open_sinks", lambda *args: [*real(*args), Stopper()])


@pytest.fixture(scope="module")
def straight(model, chats, tmp_path_factory) -> Path:
    """A run of 12 updates without a stop."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train.run(config(model, chats, folder)) == 0
    return folder


def test_a_run_learns_and_writes_everything(straight):
    metrics = lines(straight)
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    evaluations = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    assert sorted(evaluations) == [0, 5, 10, 12]
    assert evaluations[12] < evaluations[0]
    written = {path.name for path in straight.iterdir()}
    assert written >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "README.md",
        "metrics.jsonl",
        "config.yaml",
        "checkpoints",
    }


# An update is recorded when the next one is on its way: the second stop falls on an evaluation.
@pytest.mark.parametrize(("step", "number"), [(7, signal.SIGTERM), (9, signal.SIGINT)])
def test_stopped_and_resumed_is_bit_equal(
    model, chats, straight, tmp_path, monkeypatch, step, number
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(step, number, patch)
        assert train.run(config(model, chats, folder)) == 128 + number
    stopped_at = Checkpoints(folder / "checkpoints").steps()[-1]
    assert stopped_at == step + 1
    assert not (folder / "adapter_model.safetensors").exists()
    # what a killed run may have written past its checkpoint
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps({"step": stopped_at + 1, "loss": 99.0}), file=file)

    assert train.run(config(model, chats, folder, resume_from_checkpoint="latest")) == 0
    assert lines(folder) == lines(straight)
    ours, other = (load_file(f / "adapter_model.safetensors") for f in (folder, straight))
    assert ours.keys() == other.keys()
    for name in ours:
        assert ours[name].tobytes() == other[name].tobytes()


def test_another_seed_is_another_run(model, chats, straight, tmp_path):
    """The control of the bit-equal comparison."""
    train.run(config(model, chats, tmp_path / "run", seed=1))
    assert lines(tmp_path / "run") != lines(straight)


def test_resuming_refuses_another_run(model, chats, straight, tmp_path):
    resumed = {"resume_from_checkpoint": str(straight / "checkpoints" / "12")}
    with pytest.raises(UserError, match=r"--learning_rate 0.01, this command says 0.02"):
        train.run(config(model, chats, tmp_path / "a", learning_rate=2e-2, **resumed))
    other = write_chats(tmp_path / "other.jsonl", 40, seed=1)
    with pytest.raises(UserError, match="other training rows"):
        train.run(config(model, other, tmp_path / "a", **resumed))
    with pytest.raises(UserError, match="--max_steps 12, this command says 13"):
        train.run(config(model, chats, tmp_path / "a", max_steps=13, **resumed))
    wrong = str(straight / "checkpoints" / "11")
    with pytest.raises(UserError, match=r"11 is no whole checkpoint"):
        train.run(config(model, chats, tmp_path / "a", resume_from_checkpoint=wrong))
    with pytest.raises(UserError, match="holds a run already"):
        train.run(config(model, chats, straight))
    assert not (tmp_path / "a").exists()


def test_resuming_refuses_other_weights(model, chats, straight, tmp_path):
    other = tiny_folder(tmp_path / "other", seed=1)
    resumed = {"resume_from_checkpoint": str(straight / "checkpoints" / "12")}
    with pytest.raises(UserError, match="other weights of the base model"):
        train.run(config(other, chats, tmp_path / "a", **resumed))


def cut_back(straight: Path, folder: Path) -> Path:
    """A copy of the finished run as a killed one would look; its checkpoint is the last."""
    shutil.copytree(straight, folder)
    (folder / "adapter_model.safetensors").unlink()
    return folder


def test_a_line_that_was_being_written_is_dropped(model, chats, straight, tmp_path):
    folder = cut_back(straight, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "lo')
    assert train.run(config(model, chats, folder, resume_from_checkpoint="latest")) == 0
    assert lines(folder) == lines(straight)


def empty(folder: Path) -> None:
    (folder / "checkpoints" / "20").mkdir()


def cut_tree(folder: Path) -> None:
    file = folder / "checkpoints" / "12" / "tree" / "_METADATA"
    file.write_text(file.read_text()[:100])


def cut_meta(folder: Path) -> None:
    (folder / "checkpoints" / "12" / "meta" / "metadata").write_text('{"opt')


def spoil_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1}\n[1]\n{"step": 2}\n')


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (empty, r"checkpoints/20 is damaged"),
        (cut_tree, r"checkpoints/12 is damaged"),
        (cut_meta, r"checkpoints/12 is damaged"),
        (spoil_metrics, r"metrics.jsonl:2 is no line"),
    ],
)
def test_a_damaged_run_is_named(model, chats, straight, tmp_path, damage, named):
    folder = cut_back(straight, tmp_path / "run")
    damage(folder)
    with pytest.raises(UserError, match=named):
        train.run(config(model, chats, folder, resume_from_checkpoint="latest"))
    assert not (folder / "adapter_model.safetensors").exists()


def test_resuming_an_earlier_step_replaces_what_followed(model, chats, straight, tmp_path):
    folder = tmp_path / "run"
    assert train.run(config(model, chats, folder, save_steps=4)) == 0
    earlier = str(folder / "checkpoints" / "4")
    over = {"resume_from_checkpoint": earlier, "save_steps": 100}
    assert train.run(config(model, chats, folder, **over)) == 0
    assert Checkpoints(folder / "checkpoints").steps() == [4, 12]
    assert lines(folder) == lines(straight)
    with pytest.raises(UserError, match="holds a run already"):
        train.run(config(model, chats, straight, resume_from_checkpoint=earlier))
    with pytest.raises(UserError, match="--dtype float32, this command says bfloat16"):
        train.run(config(model, chats, folder, dtype="bfloat16", resume_from_checkpoint=earlier))


def test_a_final_evaluation_that_is_missing_is_made(model, chats, straight, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run")
    metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(metrics[:-1]) + "\n", encoding="utf-8")
    assert train.run(config(model, chats, folder, resume_from_checkpoint="latest")) == 0
    assert lines(folder) == lines(straight)


def test_a_half_written_checkpoint_is_not_taken(model, chats, tmp_path, straight):
    folder = tmp_path / "run"
    train.run(config(model, chats, folder, save_steps=6))
    last = folder / "checkpoints" / "12"
    last.rename(folder / "checkpoints" / "12.orbax-checkpoint-tmp")  # as a killed save leaves it
    (folder / "adapter_model.safetensors").unlink()
    assert Checkpoints(folder / "checkpoints").steps() == [6]
    assert train.run(config(model, chats, folder, resume_from_checkpoint="latest")) == 0
    assert lines(folder) == lines(straight)


def test_the_adapter_read_back_is_the_trained_one(model, straight):
    from helpers import NF4_FP32

    from jaxft.formats.loading import load_decoder

    decoder = load_decoder(open_checkpoint(str(model)), NF4_FP32)
    import_adapter(straight, decoder)
    state = load_file(straight / "adapter_model.safetensors")
    arrays = adapter_arrays(decoder)
    assert len(arrays) == 14
    for name, (a, b) in arrays.items():
        assert np.array_equal(state[f"base_model.model.{name}.lora_A.weight"], a)
        assert np.array_equal(state[f"base_model.model.{name}.lora_B.weight"], b)
        assert np.abs(b).max() > 0


def test_an_adapter_of_another_model_is_refused(model, straight, tmp_path):
    from helpers import FP32

    from jaxft.formats.loading import load_decoder

    wrong = tmp_path / "wrong"
    wrong.mkdir()
    tensors = load_file(straight / "adapter_model.safetensors")
    renamed = {k.replace("model.layers.", "_orig_mod.layers."): v for k, v in tensors.items()}
    save_file(renamed, wrong / "adapter_model.safetensors")
    (wrong / "adapter_config.json").write_text((straight / "adapter_config.json").read_text())
    decoder = load_decoder(open_checkpoint(str(model)), FP32)
    with pytest.raises(UserError, match="_orig_mod"):
        import_adapter(wrong, decoder)


def test_frozen_tensors_do_not_move(model, chats, tmp_path):
    """Weight decay reaches A and B alone, and so does the optimiser's state."""
    from helpers import NF4_FP32

    from jaxft.formats.loading import load_decoder
    from jaxft.lora import add_adapters
    from jaxft.lora_config import LoraConfig
    from jaxft.optim import OptimConfig, make_optimizer, make_schedule
    from jaxft.step import init_state, make_train_step, split

    decoder = load_decoder(open_checkpoint(str(model)), NF4_FP32)
    add_adapters(decoder, LoraConfig(4, 4.0, 0.0, ("q_proj",), False), 0)
    structure, trained, frozen = split(decoder)
    optim = OptimConfig(1e-2, "constant", 0, 0.1, 1.0)
    state = init_state(trained, make_optimizer(optim))
    before = [np.array(x) for x in jax.tree.leaves(frozen)]
    start = [np.array(x) for x in jax.tree.leaves(trained)]
    step = make_train_step(
        structure,
        make_optimizer(optim),
        make_schedule(optim, 10),
        seed=0,
        dropout=False,
        checkpointing="layer",
    )
    tokens = np.random.default_rng(0).integers(4, 200, (1, 2, 32)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "targets": tokens}
    for _ in range(10):
        state, _ = step(state, frozen, batch)
    after = jax.tree.leaves(frozen)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    moved = jax.tree.leaves(state.trained)
    assert all(not np.array_equal(a, b) for a, b in zip(start, moved, strict=True))
    trained_bytes = sum(x.nbytes for x in start)
    moments = sum(x.nbytes for x in jax.tree.leaves(state.optimizer))
    assert moments <= 2 * trained_bytes + 64


@pytest.mark.parametrize(("rows", "updates"), [(5, 4), (3, 2)])
def test_short_windows_end_each_epoch(model, tmp_path, rows, updates):
    """Equal rows at rate 0: every update has the same loss and gradient, also the short ones."""
    data = tmp_path / "rows.jsonl"
    row = {"prompt": "tide and", "completion": " lamp"}
    data.write_text((json.dumps(row) + "\n") * rows, encoding="utf-8")
    over = {
        "packing": False,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "max_steps": -1,
        "learning_rate": 0,
        "lora_dropout": 0,
        "eval_split_ratio": 0,
        "eval_steps": None,
    }
    assert train.run(config(model, data, tmp_path / "run", **over)) == 0
    metrics = lines(tmp_path / "run")
    assert len(metrics) == updates
    assert {line["target_tokens"] for line in metrics} == {
        6 * min(rows, 4),
        6 * ((rows - 1) % 4 + 1),
    }
    assert max(line["loss"] for line in metrics) - min(line["loss"] for line in metrics) < 1e-6
    norms = [line["grad_norm"] for line in metrics]
    assert max(norms) - min(norms) < 1e-5
    assert min(norms) > 0


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_gives_our_logits(model, chats, tmp_path, rslora):
    """The exported adapter on transformers' model is the model that was trained."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from helpers import FP32, logits
    from transformers import AutoModelForCausalLM

    from jaxft.formats.loading import load_decoder

    folder = tmp_path / "run"
    over = {"use_rslora": rslora, "lora_alpha": 0.5 if rslora else 16.0, "load_in_4bit": False}
    assert train.run(config(model, chats, folder, max_steps=4, **over)) == 0
    decoder = load_decoder(open_checkpoint(str(model)), FP32)
    tokens = np.random.default_rng(0).integers(4, 250, (2, 40))
    plain = logits(decoder, tokens)
    adapter = import_adapter(folder, decoder)
    assert (adapter.use_rslora, adapter.lora_alpha) == (rslora, over["lora_alpha"])
    assert adapter.base_model_name_or_path == str(model)

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder)
    scaling = theirs.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
    assert scaling == pytest.approx(0.25 if rslora else 4.0)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(logits(decoder, tokens) - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 1e-2


def test_held_out_rows_that_are_too_long_are_counted(model, chats, tmp_path, capsys):
    held = tmp_path / "held.jsonl"
    rows = [{"prompt": "a", "completion": "b" * count} for count in (5, 200)]
    held.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    over = {
        "eval_dataset_name": str(held),
        "eval_split_ratio": 0,
        "eval_steps": None,
        "overflow": "drop",
        "max_steps": 1,
    }
    assert train.run(config(model, chats, tmp_path / "run", **over)) == 0
    assert "held out         1, 1 too long, dropped" in capsys.readouterr().out


# --- the command as a user runs it -------------------------------------------------------------


def command(*args: str, flags: tuple[str, ...] = (), path: str = "", code: str | None = None):
    """Run the training command, or `code`, in a process of its own."""
    program = ["-m", "jaxft.train"] if code is None else ["-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), path] if path else [str(ROOT)])}
    return subprocess.run(
        [sys.executable, *flags, *program, *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def arguments(model: Path, chats: Path, output: Path, **over: object) -> list[str]:
    options = {
        "model_name_or_path": model,
        "dataset_name": chats,
        "output_dir": output,
        "max_length": 128,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "lora_r": 4,
    } | over
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


ORACLES = ("torch", "triton", "peft", "bitsandbytes", "accelerate", "functorch")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> str:
    """A folder of links to every installed package but torch and what needs it."""
    folder = tmp_path_factory.mktemp("packages")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith(ORACLES):
                (folder / entry.name).symlink_to(entry)
    return str(folder)


def test_the_trainer_runs_without_torch(model, chats, tmp_path, without_torch):
    missing = command(flags=("-S",), path=without_torch, code="import torch")
    assert "No module named 'torch'" in missing.stderr
    args = arguments(model, chats, tmp_path / "run")
    done = command(*args, flags=("-S",), path=without_torch)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_the_trainer_never_imports_torch(model, chats, tmp_path):
    pytest.importorskip("torch")
    code = (
        "import sys; from jaxft.train import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    )
    done = command(*arguments(model, chats, tmp_path / "run"), code=code)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1]
    assert "'jax'" in loaded
    assert "'torch'" not in loaded
    assert "'peft'" not in loaded


def test_a_signal_from_outside(model, chats, tmp_path):
    """SIGTERM to the process: a checkpoint, exit code 143, and the run goes on from there."""
    folder = tmp_path / "run"
    args = arguments(model, chats, folder, max_steps=4000, num_train_epochs=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxft.train", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "go on with the same command and --resume_from_checkpoint latest" in output
    assert len(Checkpoints(folder / "checkpoints").steps()) == 1


def test_a_reader_that_leaves_does_not_end_the_run(model, chats, tmp_path):
    args = arguments(model, chats, tmp_path / "run", max_steps=30)
    program = [sys.executable, "-m", "jaxft.train", *args]
    with (
        (tmp_path / "errors").open("w+", encoding="utf-8") as errors,
        subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=200) == 0, (tmp_path / "errors").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_paths_of_any_spelling_in_any_locale(model, chats, tmp_path):
    """And what is written is UTF-8."""
    home = tmp_path / "ü 名+1 (a)"
    folder = shutil.copytree(model, home / "mod él")
    data = home / "chät.jsonl"
    text = chats.read_text(encoding="utf-8").replace("sea", "mér 海")
    assert "海" in text
    data.write_text(text, encoding="utf-8")
    yaml = home / "rün.yaml"
    yaml.write_text(f"dataset_name: '{data}'\nmax_steps: 1\n", encoding="utf-8")
    args = ["--model_name_or_path", str(folder), "--output_dir", str(home / "out/"), "--config"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxft.train", *args, str(yaml), "--max_length", "200"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8")
    written = (home / "out" / "config.yaml").read_text(encoding="utf-8")
    assert str(data) in written
    card = json.loads((home / "out" / "adapter_config.json").read_text(encoding="utf-8"))
    assert card["base_model_name_or_path"] == str(folder)


WRONG = {
    "no such model": ({"model_name_or_path": "/no/such/model"}, "/no/such/model"),
    "no such data": ({"dataset_name": "/no/such.jsonl"}, "/no/such.jsonl"),
    "unknown value": ({"dtype": "float8"}, "dtype"),
    "unknown target": ({"lora_target_modules": "query"}, "query"),
    "too long": ({"max_length": 1024}, "--max_length 1024"),
    "rows too long": ({"max_length": 8}, "--max_length 8"),
    "evaluation folder": ({"eval_dataset_name": ROOT / "tests"}, "holds no data file"),
    "offload on a CPU": ({"gradient_checkpointing": "offload"}, "offload"),
    "odd digit": ({"resume_from_checkpoint": "²"}, "² is no whole checkpoint"),
    "steps past int32": ({"warmup_steps": 2**31}, "--warmup_steps"),
    "out of memory": ({"lora_r": 2**30}, "--lora_r"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_one_line(model, chats, tmp_path, case, capsys):
    over, named = WRONG[case]
    if case == "offload on a CPU" and jax.default_backend() != "cpu":
        pytest.skip("the device can offload")
    check_refused(arguments(model, chats, tmp_path / "run", **over), named, tmp_path, capsys)


def test_an_impossible_output_is_one_line(model, chats, tmp_path, capsys):
    args = arguments(model, chats, chats / "run" / "deep")
    check_refused(args, f"{chats} is no folder", tmp_path, capsys)
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    check_refused(arguments(model, chats, link), f"{link} is no folder", tmp_path, capsys)
    latin = os.fsdecode(bytes(tmp_path) + b"/\xfc")
    check_refused(arguments(model, chats, Path(latin)), "is not UTF-8", tmp_path, capsys)


def test_a_run_that_another_process_began_meanwhile_is_left_alone(
    model, chats, tmp_path, monkeypatch
):
    folder = tmp_path / "run"

    def load_slowly(*args):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("theirs")
        return real(*args)

    real = train.load_decoder
    monkeypatch.setattr(train, "load_decoder", load_slowly)
    with pytest.raises(UserError, match="holds a run already"):
        train.run(config(model, chats, folder))
    assert [file.read_text() for file in folder.iterdir()] == ["theirs"]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_request() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_missing_reporter_is_one_line(model, chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    args = arguments(model, chats, tmp_path / "run", report_to="wandb")
    check_refused(args, "pip install wandb", tmp_path, capsys)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_step_out_of_range_is_not_saved(model, chats, tmp_path):
    """The last update's loss is finite, what it made of the adapter is not."""
    over = {"max_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="update 1: the adapter is not finite and is not saved"):
        train.run(config(model, chats, folder, learning_rate=1e39, **over))
    assert not (folder / "adapter_model.safetensors").exists()
    assert Checkpoints(folder / "checkpoints").steps() == []
    with pytest.raises(UserError, match="update 1: eval_loss is nan"):
        train.run(config(model, chats, tmp_path / "other", learning_rate=1e38, **over))
    assert not (tmp_path / "other" / "adapter_model.safetensors").exists()


FILES = {
    "empty": ("", "empty.jsonl"),
    "missing column": ('{"question": "a", "answer": "b"}\n', "question"),
    "broken line": ('{"text": "a b c"}\n{"text": \n', "broken line.jsonl:2"),
    "no answer": ('{"prompt": "a", "completion": ""}\n', "no answer.jsonl:1"),
}


@pytest.mark.parametrize("case", FILES)
def test_wrong_files_are_one_line(model, tmp_path, case, capsys):
    content, named = FILES[case]
    data = tmp_path / f"{case}.jsonl"
    data.write_text(content, encoding="utf-8")
    check_refused(arguments(model, data, tmp_path / "run"), named, tmp_path, capsys)


def test_a_token_past_the_table_is_one_line(chats, tmp_path, capsys):
    small = tiny_folder(tmp_path / "small", vocab_size=100)
    check_refused(arguments(small, chats, tmp_path / "run"), "100 rows", tmp_path, capsys)


def test_an_unreadable_tensor_is_one_line(chats, tmp_path, capsys):
    cut = tiny_folder(tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    check_refused(arguments(cut, chats, tmp_path / "run"), "model.safetensors", tmp_path, capsys)


def check_refused(args: list[str], named: str, tmp_path: Path, capsys) -> None:
    """The command ends with code 2 and one line that names the thing, and writes nothing."""
    from jaxft import cli

    with pytest.raises(SystemExit) as end:
        cli.run(train.main, args)
    assert end.value.code == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
