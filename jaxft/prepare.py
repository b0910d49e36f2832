"""Everything about a run's data that is known before the model is loaded."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from jaxft.config import TrainConfig
from jaxft.data.chat import encode
from jaxft.data.examples import (
    Example,
    OverflowReport,
    apply_overflow,
    check_token_ids,
    split_examples,
)
from jaxft.data.layouts import detect
from jaxft.data.loader import Loader
from jaxft.data.report import Statistics, statistics
from jaxft.data.sources import read_rows, resolve
from jaxft.errors import UserError
from jaxft.lora_config import LoraConfig, adapted_modules, count_parameters
from jaxft.model.config import ModelConfig
from jaxft.report import progress_bar
from pallas_kernels.report import picked

Sections = Mapping[str, Sequence[tuple[str, object]]]


@dataclass(frozen=True)
class Data:
    """Loaders of a run, and what is said of them.

    Attributes:
      train: batches of `[A, B, T]` by step.
      evaluation: every held-out row once; None where nothing is held out.
      held_out: what the length limit did to the held-out rows.
      statistics: of an epoch of training.
      fingerprint: of the training rows in their order, as token ids and masks.
    """

    train: Loader
    evaluation: Loader | None
    held_out: OverflowReport
    statistics: Statistics
    fingerprint: str


def prepare_data(
    config: TrainConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    console: Console,
) -> Data:
    """Read, encode, check and pack the rows that `config` names.

    Raises:
      UserError: a file, row, token or length that cannot be trained on.
    """
    if config.max_length > model.max_position_embeddings:
        raise UserError(
            f"--max_length {config.max_length} is more than the model's "
            f"max_position_embeddings {model.max_position_embeddings}"
        )
    source = resolve(config.dataset_name, config.dataset_train_split)
    rows, overflow = _examples(config, model, tokenizer, source, console)
    held_out: list[Example] = []
    changed = OverflowReport()
    if config.eval_split_ratio:
        rows, held_out = split_examples(rows, config.eval_split_ratio, config.seed)
    elif config.eval_dataset_name:
        if Path(config.eval_dataset_name).expanduser().is_dir():
            raise UserError(
                f"--eval_dataset_name {config.eval_dataset_name} is a folder: name the file in it "
                "that holds the held-out rows"
            )
        held_out, changed = _examples(
            config, model, tokenizer, resolve(config.eval_dataset_name), console
        )
    train = Loader(
        rows,
        max_length=config.max_length,
        packing=config.packing,
        batch_size=config.per_device_train_batch_size,
        accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
        num_epochs=config.num_train_epochs,
        num_steps=None if config.max_steps == -1 else config.max_steps,
    )
    evaluation = None
    if held_out:
        evaluation = Loader(
            held_out,
            max_length=config.max_length,
            packing=config.packing,
            batch_size=config.per_device_eval_batch_size,
            shuffle=False,
        )
    numbers = statistics(train, tokenizer, overflow)
    return Data(train, evaluation, changed, numbers, _fingerprint(rows))


def _examples(
    config: TrainConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    console: Console,
) -> tuple[list[Example], OverflowReport]:
    rows = read_rows(path)
    unused = detect(rows, config.dataset_text_field).unused
    if unused:
        text = f"note: {path.name}: columns not used: {', '.join(unused)}"
        console.print(text, soft_wrap=True)
    with progress_bar(f"tokenizing {path.name}", console) as progress:
        examples = encode(rows, tokenizer, text_field=config.dataset_text_field, progress=progress)
    check_token_ids(examples, tokenizer, model.vocab_size)
    return apply_overflow(examples, config.max_length, config.overflow)


def _fingerprint(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.int64(len(example)).tobytes())
        digest.update(example.input_ids.tobytes())
        digest.update(example.supervised.tobytes())
    return digest.hexdigest()


def preflight(
    config: TrainConfig,
    adapter: LoraConfig,
    model: ModelConfig,
    data: Data,
    dtype: str,
    start: int,
) -> Sections:
    """What the run will do, for `report.print_preflight`."""
    numbers, loader = data.statistics, data.train
    device = jax.devices()[0]
    sections: dict[str, list[tuple[str, object]]] = {
        "model": [
            ("base", config.model_name_or_path + _where(config)),
            ("weights", _weights(config) + f", arithmetic {dtype} on {device.device_kind}"),
            ("trainable", _adapter(adapter, model)),
        ],
        "data": [
            ("documents", _documents(numbers.documents, numbers.dropped, numbers.truncated)),
            (
                "tokens an epoch",
                f"{numbers.tokens:,}, {numbers.supervised_share:.1%} supervised",
            ),
            (
                "rows an epoch",
                f"{numbers.rows_per_epoch:,} of {loader.shape[2]:,} tokens, "
                f"{numbers.packing_efficiency:.1%} full",
            ),
            ("longest", f"{numbers.longest:,} tokens ({numbers.longest_origin})"),
            ("answers end in", ", ".join(f"{t!r} {share:.0%}" for t, share in numbers.endings)),
        ],
        "run": [
            (
                "updates",
                f"{loader.num_steps:,} of {loader.shape[0]} x {loader.shape[1]} rows"
                + (f", from {start:,} on" if start else ""),
            ),
            ("kernels", _kernels()),
            ("output", config.output_dir),
        ],
    }
    if data.evaluation:
        sections["data"].append(
            (
                "held out",
                _documents(
                    len(data.evaluation.examples),
                    data.held_out.dropped + data.held_out.emptied,
                    data.held_out.truncated,
                ),
            )
        )
    return sections


def _where(config: TrainConfig) -> str:
    """Whoever loads the adapter looks for its base under the name given here."""
    local = Path(config.model_name_or_path).expanduser().exists()
    return " (local: others will not find it by this name)" if local else ""


def _weights(config: TrainConfig) -> str:
    if not config.load_in_4bit:
        return "as in the checkpoint"
    return "NF4" + (" with double quantisation" if config.use_bnb_nested_quant else "")


def _adapter(adapter: LoraConfig, model: ModelConfig) -> str:
    ranks = adapted_modules(adapter, model)
    low, high = min(ranks.values()), max(ranks.values())
    rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
    count, all_of_them = len(ranks), len(model.projections) * len(model.layers)
    modules = f"all {count}" if count == all_of_them else f"{count} of {all_of_them}"
    parameters = count_parameters(adapter, model)
    return f"{parameters:,} parameters, {rank} on {modules} projections"


def _kernels() -> str:
    by_name: dict[str, list[str]] = {}
    for op, name in picked().items():
        by_name.setdefault(name, []).append(op)
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in by_name.items())


def _documents(kept: int, dropped: int, truncated: int) -> str:
    counts = ((dropped, "too long, dropped"), (truncated, "cut"))
    changed = [f"{count:,} {what}" for count, what in counts if count]
    return ", ".join([f"{kept:,}", *changed])
