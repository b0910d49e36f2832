"""Everything about a run's data that is known before the model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from jaxft.config import TrainConfig
from jaxft.data.chat import encode
from jaxft.data.examples import (
    Example,
    OverflowReport,
    apply_overflow,
    check_token_ids,
    repeat_examples,
    split_examples,
)
from jaxft.data.layouts import detect
from jaxft.data.loader import Loader
from jaxft.data.report import Statistics, statistics
from jaxft.data.sources import Source, open_sources
from jaxft.errors import UserError
from jaxft.model.config import ModelConfig
from jaxft.report import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Data:
    """Loaders of a run, and what is said of them.

    Attributes:
      train: batches of `[A, B, T]` by step.
      evaluation: every held-out row once; None where nothing is held out.
      held_out: what the length limit did to the held-out rows.
      statistics: of an epoch of training.
      fingerprint: of the training rows in their order, as token ids and masks.
      sources: name, rows and weight of each; an epoch holds rows times weight.
    """

    train: Loader
    evaluation: Loader | None
    held_out: OverflowReport
    statistics: Statistics
    fingerprint: str
    sources: Sequence[tuple[str, int, float]]


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
    limit = model.length_limit
    if limit is not None and config.max_length > limit:
        raise UserError(
            f"--max_length {config.max_length} is more than the model's max_position_embeddings "
            f"{limit}"
        )
    sources = open_sources(
        config.dataset_name, config.dataset_train_split, config.dataset_config or (None,)
    )
    evaluated = _evaluation_sources(config)  # looked up before anything is read
    _check_apart(sources, evaluated)
    groups, overflow = _examples(config, model, tokenizer, sources, console)
    held_out: list[Example] = []
    changed = OverflowReport()
    if config.eval_split_ratio:
        groups, held_out = _hold_out(groups, config)
    elif evaluated:
        others, changed = _examples(config, model, tokenizer, evaluated, console)
        held_out = [example for group in others for example in group]
    weights = config.dataset_weights or (1.0,) * len(sources)
    rows = _weighted(groups, weights, config)
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
    sizes = [(name, len(group)) for name, group in zip(config.dataset_name, groups, strict=True)]
    notes = [(*size, weight) for size, weight in zip(sizes, weights, strict=True)]
    return Data(train, evaluation, changed, numbers, _fingerprint(rows), notes)


def _evaluation_sources(config: TrainConfig) -> list[Source]:
    """Sources of the held-out rows; the training data's configuration where it is the same set."""
    names = config.eval_dataset_name or ()
    given = config.dataset_config or (None,)
    trained = config.dataset_name
    known = dict(zip(trained, given * (len(trained) if len(given) == 1 else 1), strict=True))
    configurations = [known.get(name) for name in names]
    return open_sources(names, config.dataset_test_split, configurations, also="test")


def _check_apart(sources: Sequence[Source], evaluated: Sequence[Source]) -> None:
    """A file is one split whatever it is called: its rows would be trained on and evaluated."""
    trained = {file for source in sources for file in source.whole_files()}
    for source in evaluated:
        shared = sorted(trained & source.whole_files())
        if shared:
            raise UserError(
                f"--eval_dataset_name {source.name}: {shared[0].name} is trained on as a whole, so "
                "no row of it is held out: use --eval_split_ratio, or slices of it such as "
                "--dataset_train_split 'train[:95%]' --dataset_test_split 'train[95%:]'"
            )


def _hold_out(
    groups: Sequence[list[Example]], config: TrainConfig
) -> tuple[list[list[Example]], list[Example]]:
    """The groups without a share of all their examples, and that share."""
    everything = [example for group in groups for example in group]
    kept, held_out = split_examples(everything, config.eval_split_ratio, config.seed)
    trained = set(map(id, kept))
    return [[e for e in group if id(e) in trained] for group in groups], held_out


def _weighted(
    groups: Sequence[Sequence[Example]], weights: Sequence[float], config: TrainConfig
) -> list[Example]:
    """Examples of an epoch: those of every source as often as its weight says."""
    rows: list[Example] = []
    for index, (group, weight) in enumerate(zip(groups, weights, strict=True)):
        name = config.dataset_name[index]
        if not group:
            raise UserError(f"data set {name!r}: --eval_split_ratio held out all of its rows")
        if not round(weight * len(group)):
            raise UserError(
                f"data set {name!r}: --dataset_weights {weight:g} leaves none of its "
                f"{len(group)} rows"
            )
        rows += repeat_examples(group, weight, (config.seed, index))
    return rows


def _examples(
    config: TrainConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    sources: Sequence[Source],
    console: Console,
) -> tuple[list[list[Example]], OverflowReport]:
    """Examples of each source; a source's rows are gone before the next one's are read."""
    groups: list[list[Example]] = []
    total = OverflowReport()
    for source in sources:
        rows = source.read()
        unused = detect(rows, config.dataset_text_field).unused
        if unused:
            text = f"note: {source.title}: columns not used: {', '.join(unused)}"
            console.print(text, soft_wrap=True)
        with progress_bar(f"tokenizing {source.title}", console) as progress:
            field = config.dataset_text_field
            examples = encode(rows, tokenizer, text_field=field, progress=progress)
        check_token_ids(examples, tokenizer, model.vocab_size)
        examples, report = apply_overflow(examples, config.max_length, config.overflow)
        groups.append(examples)
        total += report
        del rows
    return groups, total


def _fingerprint(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.int64(len(example)).tobytes())
        digest.update(example.input_ids.tobytes())
        digest.update(example.supervised.tobytes())
    return digest.hexdigest()
