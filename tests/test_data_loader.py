"""Batches: targets at edges, exact epochs, whole last windows, resuming by step."""

from collections import Counter

import numpy as np
import pytest
from data_fixtures import documents, rows, tiny_tokenizer

from jaxft.data.chat import encode
from jaxft.data.examples import Example
from jaxft.data.loader import Loader


def load(examples, **options):
    defaults = {"max_length": 8, "packing": True, "batch_size": 1, "accumulation_steps": 1}
    return Loader(examples, **(defaults | options))


@pytest.mark.parametrize("max_length", [7, 8])
@pytest.mark.parametrize("packing", [True, False])
def test_no_target_from_one_document_to_the_next(max_length, packing):
    """Texts of 3 and 4 tokens: 2 + 3 targets, in a row filled to the brim as well."""
    examples = encode(rows({"text": "ab"}, {"text": "cde"}), tiny_tokenizer(add_bos=False))
    assert [len(e) for e in examples] == [3, 4]
    loader = load(examples, max_length=max_length, packing=packing, batch_size=2, shuffle=False)
    batch = loader.batch(0)
    tokens, segments, targets = (batch[k][0, 0] for k in ("tokens", "segment_ids", "targets"))
    assert (targets >= 0).sum() == 5
    naive = np.where(np.roll(segments, -1) > 0, np.roll(tokens, -1), -1)[:-1]
    assert (naive >= 0).sum() == 6  # control: shifting over the whole row makes one more
    for segment in (1, 2):
        inside = segments == segment
        assert targets[inside][:-1].tolist() == tokens[inside][1:].tolist()
        assert targets[inside][-1] == -1
    assert (targets[segments == 0] == -1).all()
    assert sorted((segments == s).sum() for s in (1, 2)) == [3, 4]


def test_layout_of_a_row():
    examples = documents(4, 3)
    examples[0].supervised[:] = [False, False, True, True]
    batch = load(examples, shuffle=False).batch(0)
    assert batch["tokens"].tolist() == [[[10, 11, 12, 13, 14, 15, 16, 0]]]
    assert batch["segment_ids"].tolist() == [[[1, 1, 1, 1, 2, 2, 2, 0]]]
    assert batch["targets"].tolist() == [[[-1, 12, 13, -1, 15, 16, -1, -1]]]
    assert all(array.dtype == np.int32 for array in batch.values())


def test_one_bos_at_the_start_of_every_document_of_a_pack():
    tokenizer = tiny_tokenizer()
    texts = [{"text": text} for text in ("hello", "<s>hello", "hello world", "<s>world")]
    batch = load(encode(rows(*texts), tokenizer), max_length=40).batch(0)
    tokens, segments = batch["tokens"][0, 0], batch["segment_ids"][0, 0]
    assert segments.max() == 4
    for segment in range(1, 5):
        inside = tokens[segments == segment].tolist()
        assert inside[0] == tokenizer.bos_token_id
        assert inside.count(tokenizer.bos_token_id) == 1
        assert inside[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("count", "updates"), [(5, 2), (3, 1), (4, 1)])
def test_last_window_is_filled_not_dropped_nor_leaked(packing, count, updates):
    """Rows of 8 tokens, accumulation over 4, two epochs."""
    examples = documents(*[8] * count)
    loader = load(examples, packing=packing, accumulation_steps=4, num_epochs=2)
    assert loader.steps_per_epoch == updates
    assert loader.num_steps == 2 * updates
    everything = sorted(example.origin for example in examples)
    for epoch in range(2):
        steps = range(epoch * updates, (epoch + 1) * updates)
        assert sorted(o for step in steps for o in loader.origins(step)) == everything
        last = loader.batch(steps[-1])
        filled = (last["segment_ids"] > 0).any(axis=(1, 2))
        assert filled.tolist() == [n < (count - 1) % 4 + 1 for n in range(4)]
        assert (last["targets"][~filled] == -1).all()
    with pytest.raises(ValueError, match="outside"):
        loader.batch(2 * updates)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 1), (2, 3), (3, 1)])
def test_every_document_once_an_epoch(packing, shuffle, batch_size, accumulation):
    lengths = np.random.default_rng(0).integers(2, 9, 41).tolist()
    examples = documents(*lengths)
    loader = load(
        examples,
        packing=packing,
        shuffle=shuffle,
        batch_size=batch_size,
        accumulation_steps=accumulation,
        num_epochs=3,
    )
    wanted = Counter(token for example in examples for token in example.input_ids.tolist())
    for epoch in range(3):
        seen, targets = Counter(), 0
        for step in range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch):
            batch = loader.batch(step)
            assert all(array.shape == loader.shape for array in batch.values())
            seen.update(batch["tokens"][batch["segment_ids"] > 0].tolist())
            targets += (batch["targets"] >= 0).sum()
        assert seen == wanted
        assert targets == sum(length - 1 for length in lengths)


def test_epochs_differ_and_seeds_differ():
    examples = documents(*np.random.default_rng(0).integers(2, 9, 41).tolist())

    def order(loader, epoch):
        size = loader.steps_per_epoch
        return [tuple(loader.origins(step)) for step in range(epoch * size, (epoch + 1) * size)]

    for packing in (True, False):
        loader = load(examples, packing=packing, batch_size=2, num_epochs=2, seed=1)
        first, second = order(loader, 0), order(loader, 1)
        assert first != second
        assert set(map(frozenset, first)) != set(map(frozenset, second))  # other companions
        assert order(load(examples, packing=packing, batch_size=2, seed=2), 0) != first
        still = load(examples, packing=packing, batch_size=2, shuffle=False, num_epochs=2)
        assert order(still, 0) == order(still, 1)


def test_packs_are_shuffled():
    """Packing starts with the longest documents; training must not do so in every epoch."""
    examples = documents(*range(2, 9), *range(2, 9))
    loader = load(examples, num_epochs=20)
    first = {
        origin for epoch in range(20) for origin in loader.origins(epoch * loader.steps_per_epoch)
    }
    longest = {"d6", "d13"}
    assert not first <= longest


@pytest.mark.parametrize("packing", [True, False])
def test_batch_depends_on_the_step_alone(packing):
    """Resuming: a new loader asked for one late step gives what a straight run gives."""
    examples = documents(*np.random.default_rng(0).integers(2, 9, 23).tolist())
    options = {"packing": packing, "batch_size": 2, "accumulation_steps": 2, "num_epochs": 4}
    straight = load(examples, seed=3, **options)
    batches = [straight.batch(step) for step in range(straight.num_steps)]
    for step in (straight.num_steps - 1, 0, straight.num_steps // 2):
        resumed = load(examples, seed=3, **options).batch(step)
        assert all((resumed[k] == batches[step][k]).all() for k in resumed)
    assert (batches[0]["tokens"] != batches[1]["tokens"]).any()  # control


def test_flattened_rows_are_as_short_as_the_run_allows():
    examples = documents(100, 100, 3, 3, 3, 3)
    options = {"max_length": 100, "packing": False, "batch_size": 2}
    loader = load(examples, num_epochs=40, **options)
    used = [
        (batch["segment_ids"] > 0).sum() for batch in map(loader.batch, range(loader.num_steps))
    ]
    assert max(used) == 200  # in some epoch the two long ones meet
    assert loader.shape == (1, 1, 256)
    alone = load(examples, num_steps=1, shuffle=False, **options)
    assert alone.shape == (1, 1, 256)
    apart = [examples[i] for i in (0, 2, 1, 3, 4, 5)]
    assert load(apart, shuffle=False, **options).shape == (1, 1, 128)


def test_flattened_documents_have_no_padding_between():
    batch = load(documents(5, 3, 4), packing=False, batch_size=3).batch(0)
    segments = batch["segment_ids"][0, 0]
    assert (segments[:12] > 0).all()
    assert (segments[12:] == 0).all()
    assert (np.diff(segments[:12]) >= 0).all()


def test_too_long_or_none():
    with pytest.raises(ValueError, match="at most 8 tokens"):
        load(documents(3, 9))
    with pytest.raises(ValueError, match="1 or more"):
        load([])


def test_document_without_target_is_harmless():
    """A micro-batch without any target is a valid batch: -1 everywhere."""
    example = Example(np.arange(8, dtype=np.int32), np.zeros(8, bool), "d")
    assert (load([example]).batch(0)["targets"] == -1).all()
