"""Encoded documents, and the checks and choices that need their lengths and ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Overflow = Literal["error", "drop", "truncate"]


@dataclass(frozen=True, eq=False)
class Example:
    """One document.

    input_ids: int32 [n]. supervised: bool [n], True where the token is a label, that is, has to
    be predicted from those before it; never True at the first token, which nothing precedes, so
    that its sum is the number of targets. origin: file and line.
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    origin: str

    def __len__(self) -> int:
        return len(self.input_ids)


def make_example(
    input_ids: Sequence[int] | np.ndarray, supervised: np.ndarray, origin: str
) -> Example:
    """Example of token ids and their mask; UserError when no target is left."""
    mask = np.array(supervised, dtype=bool)
    mask[:1] = False
    if not mask.any():
        raise UserError(f"{origin}: no token of this row would be trained")
    return Example(np.asarray(input_ids, np.int32), mask, origin)


def check_token_ids(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> None:
    """UserError when a token id has no row in an embedding table of `vocab_size` rows.

    A gather on an accelerator clamps such an id and trains on another token without a word.
    """
    for example in examples:
        highest = int(example.input_ids.max(initial=0))
        if highest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f"{example.origin}: token {token!r} has id {highest}, but the model's embedding "
                f"table has {vocab_size} rows; use the tokenizer the model came with, or a "
                "checkpoint whose embeddings were resized for the added tokens"
            )


@dataclass(frozen=True)
class OverflowReport:
    """Documents longer than the limit: left out, cut, and left out because a cut left no target."""

    dropped: int = 0
    truncated: int = 0
    emptied: int = 0

    def __add__(self, other: OverflowReport) -> OverflowReport:
        return OverflowReport(
            self.dropped + other.dropped,
            self.truncated + other.truncated,
            self.emptied + other.emptied,
        )


def apply_overflow(
    examples: Sequence[Example], max_length: int, overflow: Overflow = "error"
) -> tuple[list[Example], OverflowReport]:
    """Examples of at most `max_length` tokens, and what was done to the longer ones.

    error: UserError with their number and the first of them. drop: leave them out. truncate: keep
    the first `max_length` tokens, add no end token, leave out what has no target then.
    """
    long = [example for example in examples if len(example) > max_length]
    if long and overflow == "error":
        longest = max(len(example) for example in long)
        raise UserError(
            f"{len(long)} of {len(examples)} rows are longer than --max_length {max_length} "
            f"(first {long[0].origin} with {len(long[0])} tokens, longest {longest}): raise "
            "--max_length or say --overflow drop or --overflow truncate"
        )
    kept, dropped, truncated, emptied = [], 0, 0, 0
    for example in examples:
        if len(example) <= max_length:
            kept.append(example)
        elif overflow == "drop":
            dropped += 1
        elif example.supervised[:max_length].any():
            mask = example.supervised[:max_length]
            kept.append(Example(example.input_ids[:max_length], mask, example.origin))
            truncated += 1
        else:
            emptied += 1
    if not kept:
        raise UserError(f"no row is left to train on: none fits in --max_length {max_length}")
    return kept, OverflowReport(dropped, truncated, emptied)


def split_examples(
    examples: Sequence[Example], ratio: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(training, held out): a random share `ratio` of the examples, at least one, is held out.

    The same examples, ratio and seed give the same split; both parts keep the input's order.
    UserError when the ratio is not between 0 and 1 or no training example would be left.
    """
    if not 0 < ratio < 1:
        raise UserError(f"the held-out share must lie between 0 and 1, not {ratio}")
    count = max(1, round(ratio * len(examples)))
    if count >= len(examples):
        raise UserError(
            f"a held-out share of {ratio} takes {count} of {len(examples)} rows and leaves none "
            "for training"
        )
    held = np.zeros(len(examples), bool)
    held[np.random.default_rng(seed).permutation(len(examples))[:count]] = True
    return (
        [example for example, out in zip(examples, held, strict=True) if not out],
        [example for example, out in zip(examples, held, strict=True) if out],
    )


def repeat_examples(
    examples: Sequence[Example], weight: float, seed: int | Sequence[int]
) -> list[Example]:
    """`weight` times the examples: whole copies and a random share, the same for the same seed.

    0.5 is half of them in their order, 2.5 two copies and a half; a small weight may leave none.
    """
    copies, rest = divmod(round(weight * len(examples)), len(examples))
    chosen = np.sort(np.random.default_rng(seed).permutation(len(examples))[:rest])
    return [*examples] * copies + [examples[index] for index in chosen]
