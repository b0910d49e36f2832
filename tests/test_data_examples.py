"""Checks and choices on encoded documents: ids past the table, overflow, held-out share."""

from collections import Counter

import numpy as np
import pytest
from data_fixtures import documents, rows, tiny_tokenizer

from jaxft.data.chat import encode
from jaxft.data.examples import (
    Example,
    apply_overflow,
    check_token_ids,
    repeat_examples,
    split_examples,
)
from jaxft.data.loader import Loader
from jaxft.data.report import statistics
from jaxft.errors import UserError


def test_token_id_past_the_table():
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    good, bad = encode(rows({"text": "hello"}, {"text": "hello <new>"}), tokenizer)
    with pytest.raises(
        UserError, match=rf"train\.jsonl:2: token '<new>' has id {size}, .*{size} r"
    ):
        check_token_ids([good, bad], tokenizer, size)
    check_token_ids([good, bad], tokenizer, size + 1)
    check_token_ids([good], tokenizer, size)


def answer(prompt: int, total: int, origin: str) -> Example:
    return Example(np.arange(total, dtype=np.int32), np.arange(total) >= prompt, origin)


LONG = [
    answer(4, 104, "x"),  # a long answer
    answer(60, 63, "y"),  # a prompt that alone is too long
    answer(28, 32, "z"),  # fits exactly
    answer(2, 5, "short"),
]


def test_overflow_is_an_error_by_default():
    with pytest.raises(UserError, match=r"2 of 4 rows .*max_length 32 .*first x with 104.*drop"):
        apply_overflow(LONG, 32)
    assert apply_overflow(LONG, 104)[0] == LONG


def test_overflow_drop():
    kept, report = apply_overflow(LONG, 32, "drop")
    assert [example.origin for example in kept] == ["z", "short"]
    assert kept[0] is LONG[2]
    assert (report.dropped, report.truncated, report.emptied) == (2, 0, 0)


def test_overflow_truncate():
    kept, report = apply_overflow(LONG, 32, "truncate")
    assert [(example.origin, len(example)) for example in kept] == [
        ("x", 32),
        ("z", 32),
        ("short", 5),
    ]
    assert (report.dropped, report.truncated, report.emptied) == (0, 1, 1)
    assert kept[0].input_ids.tolist() == list(range(32))  # nothing put in at the end
    assert kept[0].supervised.tolist() == LONG[0].supervised[:32].tolist()
    assert kept[1].supervised[-1]
    assert all(example.supervised.any() for example in kept)
    assert not LONG[1].supervised[:32].any()  # control: cut, it would be trained on nothing


def test_overflow_may_leave_nothing():
    with pytest.raises(UserError, match="no row is left"):
        apply_overflow(LONG, 3, "drop")


def test_huge_text_does_not_stall():
    tokenizer = tiny_tokenizer()
    example = encode(rows({"text": "hello world " * 100_000}), tokenizer)[0]
    kept, _ = apply_overflow([example], 32, "truncate")
    assert len(kept[0]) == 32


def test_split():
    examples = documents(*[3] * 10)
    train, held = split_examples(examples, 0.25, seed=1)
    assert len(held) == 2
    origins = [example.origin for example in train + held]
    assert sorted(origins) == sorted(example.origin for example in examples)
    again = split_examples(examples, 0.25, seed=1)[1]
    assert [e.origin for e in again] == [e.origin for e in held]
    others = {tuple(e.origin for e in split_examples(examples, 0.25, s)[1]) for s in range(9)}
    assert len(others) > 1  # control: the seed matters
    assert len(split_examples(examples, 0.001, seed=1)[1]) == 1
    with pytest.raises(UserError, match="leaves none"):
        split_examples(examples[:1], 0.5, seed=1)
    for ratio in (0.0, 1.0, -1, 2):
        with pytest.raises(UserError, match="between 0 and 1"):
            split_examples(examples, ratio, seed=1)


def test_repeat():
    examples = documents(*[3] * 10)
    for weight, copies, rest in ((1, 1, 0), (2, 2, 0), (0.5, 0, 5), (2.25, 2, 2), (0.3, 0, 3)):
        got = repeat_examples(examples, weight, 7)
        assert len(got) == copies * 10 + rest
        counts = Counter(example.origin for example in got)
        assert (
            sorted(counts.values())
            == sorted([copies + 1] * rest + [copies] * (10 - rest))[-len(counts) :]
        )
        assert repeat_examples(examples, weight, 7) == got
    # Control: another seed or source takes another half.
    halves = {tuple(e.origin for e in repeat_examples(examples, 0.5, (7, i))) for i in range(5)}
    assert len(halves) > 1
    assert repeat_examples(examples, 0.04, 7) == []


def test_statistics():
    tokenizer = tiny_tokenizer()
    pairs = [{"prompt": "hello", "completion": " world" * n} for n in (1, 2, 40)]
    examples, overflow = apply_overflow(encode(rows(*pairs), tokenizer), 20, "truncate")
    loader = Loader(examples, max_length=20, packing=True, batch_size=1, accumulation_steps=2)
    numbers = statistics(loader, tokenizer, overflow)
    assert (numbers.documents, numbers.truncated, numbers.dropped) == (3, 1, 0)
    assert numbers.tokens == 4 + 5 + 20
    assert numbers.supervised == 2 + 3 + 18
    assert numbers.supervised_share == pytest.approx(23 / 29)
    assert (numbers.rows_per_epoch, numbers.steps_per_epoch) == (2, 1)
    assert numbers.packing_efficiency == pytest.approx(29 / 40)
    assert (numbers.longest, numbers.longest_origin) == (20, "train.jsonl:3")
    # The cut row ends in the middle of its answer, and the report shows it.
    assert dict(numbers.endings) == {"</s>": pytest.approx(2 / 3), " world": pytest.approx(1 / 3)}
