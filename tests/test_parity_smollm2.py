"""Twenty updates of SmolLM2-135M on NF4 weights, the same through jaxft and through PEFT.

One side is `python -m jaxft.train` as a user runs it: packed rows, micro-batches, recomputation,
and what it leaves in its folder. The other is tests/parity_torch.py. `-s` prints the table.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SHARED
from helpers import NF4_FP32
from safetensors.numpy import load_file

from jaxft import train
from jaxft.config import PROJECTIONS, parse
from jaxft.device import user_cache
from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.lora import adapter_arrays, add_adapters
from jaxft.lora_config import LoraConfig
from jaxft.model.config import read_config
from jaxft.prepare import prepare_data
from jaxft.report import make_console
from pallas_kernels.nf4 import dequantize, quantize

pytest.importorskip("torch")
pytest.importorskip("peft")
import parity_torch as theirs

pytestmark = pytest.mark.slow

MODEL = user_cache() / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHIPPED = Path(__file__).resolve().parents[1] / "scripts" / "data"
STEPS, RANK, ALPHA, SEED = 20, 8, 16.0, 42
OPTIMIZER = {"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.85}
LOSS, GRAD_NORM = 1e-4, 1e-3  # relative; seen: 3e-6 and 1.3e-5


@dataclass(frozen=True)
class Run:
    """What our side trained on, and what it left behind."""

    folder: Path
    updates: list[dict[str, Any]]
    eval_loss: list[float]  # before the first update and after the last
    batches: list[list[list[theirs.Document]]]  # of each update: its rows' documents
    held_out: list[theirs.Document]

    def documents(self, step: int) -> list[theirs.Document]:
        return [document for row in self.batches[step] for document in row]


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


@pytest.fixture(scope="module")
def checkpoint():
    if not MODEL.is_file():
        pytest.skip(f"needs SmolLM2 at {MODEL}; scripts/quickstart.sh puts it there")
    return open_checkpoint(str(MODEL))


def chat(question: str, answer: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def chats(name: str, gsm8k: str, count: int) -> list[dict[str, Any]]:
    """Short rows, the shipped ones, and as many long ones: of GSM8K, else two shipped in one."""
    lines = (SHIPPED / name).read_text(encoding="utf-8").splitlines()[: 3 * count]
    pairs = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
    short, rest = pairs[:count], pairs[count:]
    long = [
        map(" ".join, zip(*two, strict=True)) for two in zip(rest[::2], rest[1::2], strict=True)
    ]
    path = SHARED / "data" / "gsm8k" / gsm8k
    if path.is_file():
        rows = path.read_text(encoding="utf-8").splitlines()[:count]
        long = [(row["question"], row["answer"]) for row in map(json.loads, rows)]
    return [chat(*pair) for pair in (*short, *long)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def ours(checkpoint, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("parity")
    rows = chats("quickstart.jsonl", "train.jsonl", 40)
    held_out = chats("quickstart_eval.jsonl", "test.jsonl", 6)
    options = {
        "model_name_or_path": MODEL,
        "dataset_name": write_rows(folder / "rows.jsonl", rows),
        "eval_dataset_name": write_rows(folder / "held_out.jsonl", held_out),
        "output_dir": folder / "out",
        "dtype": "float32",
        "max_length": 256,
        "overflow": "drop",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "lr_scheduler_type": "cosine",
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "seed": SEED,
        **OPTIMIZER,
    }
    argv = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    assert train.main(argv) == 0
    lines = [
        json.loads(line)
        for line in (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]

    tokenizer = checkpoint.tokenizer()
    data = prepare_data(parse(argv), read_config(checkpoint.config), tokenizer, make_console())
    return Run(
        folder / "out",
        [line for line in lines if "loss" in line],
        [line["eval_loss"] for line in lines if "eval_loss" in line],
        [rows_of_step(data.train, step, rows, tokenizer) for step in range(STEPS)],
        [theirs.chatml_document(rows_of(o, held_out), tokenizer) for o in origins(data.evaluation)],
    )


def rows_of(origin: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return rows[int(origin.rpartition(":")[2]) - 1]


def origins(loader) -> list[str]:
    return [origin for step in range(loader.num_steps) for origin in loader.origins(step)]


def rows_of_step(loader, step, rows, tokenizer) -> list[list[theirs.Document]]:
    """The documents of an update, from the rows they came from, by the row they were packed in."""
    names = iter(loader.origins(step))
    counts = loader.batch(step)["segment_ids"].reshape(-1, loader.shape[2]).max(axis=1)
    return [
        [theirs.chatml_document(rows_of(next(names), rows), tokenizer) for _ in range(count)]
        for count in counts
    ]


@pytest.fixture(scope="module")
def weights(checkpoint) -> dict[str, np.ndarray]:
    """The checkpoint's tensors in float32, projections as NF4 has them."""

    def value(name):
        array = jnp.asarray(checkpoint.read(name), jnp.float32)
        if name.endswith("_proj.weight"):
            array = dequantize(quantize(array, nested=True), jnp.float32)
        return np.array(array)

    return {name: value(name) for name in checkpoint.names()}


@pytest.fixture(scope="module")
def base(checkpoint, weights):
    """transformers' model on those weights, without adapters. Tests leave it as it is."""
    return theirs.llama(checkpoint.config, weights)


@pytest.fixture(scope="module")
def initial(checkpoint) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B before the first update: a function of the seed alone."""
    decoder = load_decoder(checkpoint, NF4_FP32)
    add_adapters(decoder, LoraConfig(RANK, ALPHA, 0.0, PROJECTIONS, False), SEED)
    return adapter_arrays(decoder)


def adapted(base, initial):
    return theirs.with_adapters(
        base, initial, r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS)
    )


@pytest.fixture(scope="module")
def reference(ours, base, initial):
    """PEFT's model after the same updates, and what it saw on the way."""
    model = adapted(base, initial)
    batches = [ours.documents(step) for step in range(STEPS)]
    return model, theirs.train(model, batches, schedule="cosine", **OPTIMIZER)


def test_every_update_agrees(ours, reference):
    _, updates = reference
    assert [line["step"] for line in ours.updates] == list(range(1, STEPS + 1))
    print("\nstep  targets      ours     torch  relative | grad norm: ours  torch  relative")
    for line, update in zip(ours.updates, updates, strict=True):
        loss, norm = (
            relative(line["loss"], update.loss),
            relative(line["grad_norm"], update.grad_norm),
        )
        print(
            f"{line['step']:4} {line['target_tokens']:8} {line['loss']:9.5f} {update.loss:9.5f} "
            f"{loss:9.1e} | {line['grad_norm']:15.4f} {update.grad_norm:6.4f} {norm:9.1e}"
        )
    for step, (line, update) in enumerate(zip(ours.updates, updates, strict=True)):
        assert line["target_tokens"] == sum(d.targets for d in ours.documents(step))
        assert relative(line["loss"], update.loss) < LOSS
        assert relative(line["grad_norm"], update.grad_norm) < GRAD_NORM
        assert relative(line["learning_rate"], update.learning_rate) < 1e-5
    # Clipping was at work, and something was learned.
    assert max(update.grad_norm for update in updates) > OPTIMIZER["max_grad_norm"]
    assert ours.eval_loss[1] < 0.9 * ours.eval_loss[0]


def test_rows_were_packed(ours):
    """What the run must hold for its agreement to mean something."""
    rows = [row for batch in ours.batches for row in batch]
    assert len(rows) == 2 * STEPS
    assert sum(len(row) > 1 for row in rows) > STEPS
    tokens = sum(len(document.ids) for row in rows for document in row)
    assert 0.7 * 512 * STEPS < tokens < 512 * STEPS
    # A second epoch began: some rows came twice.
    seen = [tuple(document.ids.tolist()) for row in rows for document in row]
    assert len(set(seen)) < len(seen)


def test_final_adapters_agree(ours, reference, initial):
    model, _ = reference
    stored = load_file(ours.folder / "adapter_model.safetensors")
    expected = theirs.adapter_weights(model)
    assert stored.keys() == expected.keys()
    start = {
        f"base_model.model.{path}.lora_{part}.weight": array
        for path, pair in initial.items()
        for part, array in zip("AB", pair, strict=True)
    }
    for part in "AB":
        names = [name for name in stored if f"lora_{part}" in name]
        moved, apart = (
            np.concatenate([(expected[n] - other[n]).ravel() for n in names])
            for other in (start, stored)
        )
        share = np.linalg.norm(apart) / np.linalg.norm(moved)
        print(f"\n{part}: distance between the two sides / distance trained: {share:.2e}")
        assert share < 0.01


def test_peft_loads_the_adapter(ours, base):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    before = theirs.mean_loss(base, ours.held_out)
    model = get_peft_model(copy.deepcopy(base), PeftConfig.from_pretrained(ours.folder)).eval()
    result = set_peft_model_state_dict(model, load_peft_weights(str(ours.folder), device="cpu"))
    assert result.unexpected_keys == []
    assert [key for key in result.missing_keys if "lora_" in key] == []
    after = theirs.mean_loss(model, ours.held_out)
    print(f"\nheld out: ours {ours.eval_loss}, PEFT {[before, after]}")
    assert relative(ours.eval_loss[0], before) < LOSS
    assert relative(ours.eval_loss[1], after) < LOSS
    # The control: the adapter at half its strength.
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] /= 2
    assert relative(ours.eval_loss[1], theirs.mean_loss(model, ours.held_out)) > 100 * LOSS


def test_controls(ours, checkpoint, weights, base, initial):
    """Faults that the bounds on the first update must catch."""
    rows, documents = ours.batches[0], ours.documents(0)
    first = ours.updates[0]
    counts = [sum(document.targets for document in row) for row in rows]
    model = adapted(base, initial)
    # Each row's mean, and their mean, instead of one mean over the update.
    by_row = [1 / len(rows) / count for row, count in zip(rows, counts, strict=True) for _ in row]
    mean_of_means, its_norm = theirs.backward(model, documents, by_row)
    slow = theirs.llama({**checkpoint.config, "rope_theta": 10000.0}, weights)
    dense = theirs.llama(checkpoint.config, {n: checkpoint.read(n) for n in weights})
    wrong = {
        "no block mask": sum(
            theirs.concatenated_loss(base, row) * count
            for row, count in zip(rows, counts, strict=True)
        )
        / sum(counts),
        "rope_theta 10000": theirs.mean_loss(slow, documents),
        "mean of means": mean_of_means,
        "weights not quantised": theirs.mean_loss(dense, documents),
    }
    for name, loss in wrong.items():
        print(f"\n{name}: {loss:.5f}, {relative(first['loss'], loss):.2%} off", end="")
    print(f"\nits gradient norm: {relative(first['grad_norm'], its_norm):.2%} off")
    for name, loss in wrong.items():
        assert relative(first["loss"], loss) > 10 * LOSS, name
    assert relative(first["grad_norm"], its_norm) > 2 * GRAD_NORM
