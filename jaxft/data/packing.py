"""Best-fit-decreasing bin packing, exact, in time that does not grow with the number of bins."""

import numpy as np

_WORD = 1024  # bits of a Python integer that are searched at once


class _Occupied:
    """Set of integers that finds its smallest member at or above a bound in O(1) words."""

    def __init__(self, size: int):
        self._words = [0] * (size // _WORD + 1)
        self._any = 0  # bit w: word w is not 0

    def add(self, value: int) -> None:
        word, bit = divmod(value, _WORD)
        self._words[word] |= 1 << bit
        self._any |= 1 << word

    def remove(self, value: int) -> None:
        word, bit = divmod(value, _WORD)
        self._words[word] &= ~(1 << bit)
        if not self._words[word]:
            self._any &= ~(1 << word)

    def at_least(self, bound: int) -> int | None:
        word, bit = divmod(bound, _WORD)
        if rest := self._words[word] >> bit:
            return bound + _lowest(rest)
        if not (rest := self._any >> (word + 1)):
            return None
        word += 1 + _lowest(rest)
        return word * _WORD + _lowest(self._words[word])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Bins of at most `capacity` tokens by best-fit-decreasing: int64 indices into `lengths`.

    Documents are placed from the longest to the shortest, those of equal length in the order of
    the input, each into the open bin with the least room that still suffices (of several, the one
    touched last), else into a new bin. Shuffled input gives other bins, but always as many: the
    number depends on the lengths alone. Raises ValueError for a length outside 1..capacity.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.size == 0:
        return []
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths must lie in 1..{capacity}: {lengths.min()}..{lengths.max()}")
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bin_of, bins = _assign(values[::-1].tolist(), counts[::-1].tolist(), capacity)
    by_bin = order[np.argsort(bin_of, kind="stable")]
    ends = np.cumsum(np.bincount(bin_of, minlength=bins)).tolist()
    return [by_bin[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _assign(values: list[int], counts: list[int], capacity: int) -> tuple[np.ndarray, int]:
    """Bin of each document, documents sorted by falling length, and the number of bins.

    Documents of equal length are placed together. Into a bin with room r go r // length of them
    in a row, since after the first the same bin has become the tightest that fits.
    """
    stacks: dict[int, list[int]] = {}  # room left -> bins, the last touched at the end
    occupied = _Occupied(capacity)
    bin_of = np.empty(sum(counts), np.int64)
    placed = bins = 0
    for length, count in zip(values, counts, strict=True):
        while count:
            room = occupied.at_least(length)
            each = (capacity if room is None else room) // length
            needed = (count + each - 1) // each
            if room is None:
                room = capacity
                some = list(range(bins, bins + needed))
                bins += needed
            else:
                stack = stacks[room]
                some = stack[-needed:][::-1]
                del stack[len(stack) - len(some) :]
                if not stack:
                    occupied.remove(room)
            taken = min(count, each * len(some))
            bin_of[placed : placed + taken] = np.repeat(some, each)[:taken]
            placed, count = placed + taken, count - taken
            in_last = taken - each * (len(some) - 1)
            if in_last != each:
                _push(stacks, occupied, room - length * in_last, [some.pop()])
            _push(stacks, occupied, room - length * each, some)
    return bin_of, bins


def _push(stacks: dict[int, list[int]], occupied: _Occupied, room: int, bins: list[int]) -> None:
    if bins and room:
        stacks.setdefault(room, []).extend(bins)
        occupied.add(room)
