"""Packed documents are what they are alone: logits, loss, gradients, and nothing seen next door."""

import numpy as np
import pytest
from helpers import load, logits, save_llama
from model_oracles import (
    Gradients,
    add_lora,
    largest,
    loss_and_gradients,
    pack_rows,
    relative,
    their_logits,
)

from jaxft.model.decoder import document_positions

pytest.importorskip("torch")

LENGTH = 32
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 64, n).tolist() for n in (7, 5, 11, 1, 2)]
RUN_ON = [token for document in DOCUMENTS for token in document]


@pytest.fixture(scope="module")
def model(tmp_path_factory, fixtures):
    """transformers' model, the decoder without adapters and with them."""
    folder = tmp_path_factory.mktemp("llama")
    theirs = save_llama(fixtures, folder)
    return theirs, load(folder), add_lora(load(folder))


@pytest.fixture(scope="module")
def gradients(model):
    """Compiled loss and gradients."""
    return loss_and_gradients(model[2])


def by_document(row: np.ndarray, segments: np.ndarray) -> list[np.ndarray]:
    return [row[segments == number] for number in range(1, segments.max() + 1)]


def test_logits_of_each_document(model):
    """As transformers gives them for the document alone; the padding holds token 7."""
    theirs, decoder, _ = model
    documents = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    batch = pack_rows([documents], 16)
    batch["tokens"][batch["segment_ids"] == 0] = 7
    got = logits(decoder, batch["tokens"], batch["segment_ids"])[0]
    alone = [their_logits(theirs, [document])[0] for document in documents]
    for ours, want in zip(by_document(got, batch["segment_ids"][0]), alone, strict=True):
        assert largest(ours, want) < 1e-4
    run_on = their_logits(theirs, [[token for document in documents for token in document]])[0]
    assert largest(run_on, np.concatenate(alone)) > 1e-1
    one_segment = logits(decoder, batch["tokens"], batch["segment_ids"] > 0)[0, : len(run_on)]
    assert largest(one_segment, run_on) < 1e-4


def added(results: list[tuple[float, Gradients]]) -> tuple[float, Gradients]:
    """Sums of losses and of gradients."""
    losses, gradients = zip(*results, strict=True)
    names = gradients[0]
    return sum(losses), {n: tuple(sum(g[n][i] for g in gradients) for i in (0, 1)) for n in names}


def test_loss_and_gradients(gradients):
    """Five documents in one row, each in a row of its own, and in a row without padding."""
    loss, packed = gradients(pack_rows([DOCUMENTS], LENGTH))
    each, alone = added([gradients(pack_rows([[document]], LENGTH)) for document in DOCUMENTS])
    tight, without_padding = gradients(pack_rows([DOCUMENTS], sum(map(len, DOCUMENTS))))
    assert each == pytest.approx(loss, rel=1e-5)
    assert tight == pytest.approx(loss, rel=1e-5)
    assert relative(packed, alone) < 1e-4
    assert relative(packed, without_padding) < 1e-4

    run_on, other = gradients(pack_rows([[RUN_ON]], LENGTH))
    assert abs(run_on - loss) > 1
    assert relative(packed, other) > 0.1


def test_nothing_is_seen_next_door(model):
    """Each token changed in turn: other documents and earlier tokens stay, to the bit."""
    _, decoder, _ = model
    batch = pack_rows([DOCUMENTS], LENGTH)
    segments = np.repeat(batch["segment_ids"], LENGTH + 1, axis=0)
    tokens = np.repeat(batch["tokens"], LENGTH + 1, axis=0)
    positions = np.arange(LENGTH)
    tokens[positions, positions] = (tokens[positions, positions] + 17) % 64
    got = np.asarray(logits(decoder, tokens, segments))
    changed = np.abs(got[:-1] - got[-1]).max(-1)  # [token changed, position looked at]
    assert (segments == 0).any()
    own = segments[0][:, None] == segments[0][None, :]
    later = positions[:, None] <= positions[None, :]
    may_change = own & later & (segments[0][:, None] != 0)
    may_change |= np.eye(LENGTH, dtype=bool)  # a token in the padding is seen by itself
    assert (changed[~may_change] == 0).all()
    assert (changed[np.eye(LENGTH, dtype=bool)] > 1e-2).all()
    assert np.mean(changed[may_change] > 1e-4) > 0.95


def test_targets_end_with_the_document(gradients):
    """Documents of 3 and 4 tokens have 5 targets; a row filled to the brim has none at its end."""
    documents = [[21, 22, 23], [31, 32, 33, 34], RANDOM.integers(0, 64, LENGTH - 7).tolist()]
    batch = pack_rows([documents], LENGTH)
    targets = batch["targets"][0]
    assert (batch["segment_ids"] > 0).all()
    assert (targets[:7] >= 0).sum() == 5
    assert targets[-1] == targets[2] == targets[6] == -1
    loss, _ = gradients(batch)
    separate = [gradients(pack_rows([[document]], LENGTH))[0] for document in documents]
    assert loss == pytest.approx(sum(separate), rel=1e-5)
    over_the_edge = targets.copy()
    over_the_edge[2] = 31
    assert abs(gradients({**batch, "targets": over_the_edge[None]})[0] - loss) > 0.1


def test_positions_restart():
    segments = pack_rows([DOCUMENTS, [[1], [2, 3]]], LENGTH)["segment_ids"]
    got = np.asarray(document_positions(segments))
    for row, lengths in ((0, (7, 5, 11, 1, 2)), (1, (1, 2))):
        want = np.concatenate([np.arange(n) for n in lengths])
        np.testing.assert_array_equal(got[row, : len(want)], want)
        assert (want != np.arange(len(want))).any()
