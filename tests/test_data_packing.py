"""Best-fit-decreasing, against a naive search over all bins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.data.packing import pack


def naive(lengths, capacity):
    """Best-fit-decreasing by linear search; of equally tight bins the one touched last."""
    bins, room, touched = [], [], []
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for clock, index in enumerate(order):
        fits = [b for b in range(len(bins)) if room[b] >= lengths[index]]
        if fits:
            best = min(fits, key=lambda b: (room[b], -touched[b]))
        else:
            best = len(bins)
            bins.append([])
            room.append(capacity)
            touched.append(0)
        bins[best].append(index)
        room[best] -= lengths[index]
        touched[best] = clock
    return bins


cases = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


@settings(max_examples=300, deadline=None)
@given(cases, st.randoms(use_true_random=False))
def test_equals_the_naive_search(case, random):
    lengths, capacity = case
    bins = [bin.tolist() for bin in pack(np.array(lengths, np.int64), capacity)]
    assert sorted(map(sorted, bins)) == sorted(map(sorted, naive(lengths, capacity)))
    assert sorted(index for bin in bins for index in bin) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in bin) <= capacity for bin in bins)
    shuffled = random.sample(lengths, len(lengths))
    assert len(pack(np.array(shuffled, np.int64), capacity)) == len(bins)


@pytest.mark.parametrize("capacity", [1000, 1024, 1025, 5000, 40_000])
def test_large_capacities(capacity):
    """Rooms beyond one search word."""
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 400)
    bins = [sorted(bin.tolist()) for bin in pack(lengths, capacity)]
    assert sorted(bins) == sorted(map(sorted, naive(lengths.tolist(), capacity)))


def test_best_fit_is_not_first_fit():
    # 14 leaves 6, 9 + 8 leave 3: the 3 goes where it fits tightest, not where it fits first.
    bins = pack(np.array([14, 9, 8, 3]), 20)
    assert sorted(sorted(bin.tolist()) for bin in bins) == [[0], [1, 2, 3]]


def test_deterministic_and_follows_the_input_order():
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    order = np.random.default_rng(1).permutation(200)

    def sets(bins):
        return {frozenset(bin.tolist()) for bin in bins}

    first = sets(pack(lengths, 64))
    assert first == sets(pack(lengths, 64))
    shuffled = {frozenset(order[bin].tolist()) for bin in pack(lengths[order], 64)}
    assert len(first & shuffled) < len(first) / 2


def test_empty_and_impossible():
    assert pack(np.array([], np.int64), 8) == []
    for lengths in ([9], [0], [3, -1]):
        with pytest.raises(ValueError, match=r"lengths must lie in 1\.\.8"):
            pack(np.array(lengths), 8)
