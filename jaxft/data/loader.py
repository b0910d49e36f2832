"""Batches as a pure function of the examples, the seed and the step number."""

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from jaxft.data.examples import Example
from jaxft.data.packing import pack

_ALIGNMENT = 64  # tokens; kernels work in tiles of this size


class Batch(TypedDict):
    """Micro-batches of one optimiser step, each array int32 [A, B, T].

    A micro-batches of B rows of T tokens. segment_ids: 0 is padding, the documents of a row are
    1, 2, 3, ... in order. targets: the token that a position must predict, -1 where none.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    targets: np.ndarray


class Loader:
    """Exact epochs over examples, resumable at any step.

    packing: rows are best-fit-decreasing packs, T is `max_length`, B is `batch_size`. Otherwise
    the `batch_size` documents of a micro-batch stand in one row without padding between them: B
    is 1 and T the smallest multiple of 64 that holds every micro-batch of the run.

    Each epoch shuffles the documents, packs them, and shuffles the packs, all drawn from (seed,
    epoch); `shuffle=False` keeps the order (for evaluation). An epoch takes
    ceil(rows / (batch_size * accumulation_steps)) steps; its last step is filled up with empty
    rows, so no row is left out and none reaches into the next epoch.

    The run is `num_steps` steps where given, else `num_epochs` epochs (1.5 ends within the
    second). Raises ValueError for examples longer than `max_length` (see `apply_overflow`), and
    for an empty list.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        max_length: int,
        packing: bool,
        batch_size: int,
        accumulation_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: float = 1,
        num_steps: int | None = None,
    ):
        self.examples = examples
        self.lengths = np.array([len(example) for example in examples], np.int64)
        if not len(examples) or self.lengths.max() > max_length:
            raise ValueError(f"examples must be 1 or more and at most {max_length} tokens long")
        self._packing, self._batch_size = packing, batch_size
        self._capacity, self._seed, self._shuffle = max_length, seed, shuffle
        self._cache: tuple[int, list[np.ndarray]] = (-1, [])

        self.rows_per_epoch = len(self._rows(0))
        micro_rows = batch_size if packing else 1
        per_step = accumulation_steps * micro_rows
        self.steps_per_epoch = -(-self.rows_per_epoch // per_step)
        if num_steps is None:
            num_steps = math.ceil(num_epochs * self.steps_per_epoch)
        self.num_steps = num_steps
        self.shape = (accumulation_steps, micro_rows, max_length if packing else self._longest())

    @property
    def packing_efficiency(self) -> float:
        """Share of the positions of an epoch's rows that hold a token."""
        return int(self.lengths.sum()) / (self.rows_per_epoch * self.shape[2])

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0; ValueError past the end of the run."""
        rows = self._rows_of_step(step)
        batch: Batch = {
            "tokens": np.zeros(self.shape, np.int32),
            "segment_ids": np.zeros(self.shape, np.int32),
            "targets": np.full(self.shape, -1, np.int32),
        }
        tokens, segments, targets = (
            batch[name].reshape(-1, self.shape[2]) for name in ("tokens", "segment_ids", "targets")
        )
        for index, row in enumerate(rows):
            start = 0
            for segment, document in enumerate(row.tolist(), start=1):
                example = self.examples[document]
                end = start + len(example)
                tokens[index, start:end] = example.input_ids
                segments[index, start:end] = segment
                # Position t predicts token t + 1; the last of a document predicts nothing.
                labels = np.where(example.supervised, example.input_ids, -1)
                targets[index, start : end - 1] = labels[1:]
                start = end
        return batch

    def origins(self, step: int) -> list[str]:
        """Origins of the documents of a step, row after row."""
        return [self.examples[i].origin for row in self._rows_of_step(step) for i in row.tolist()]

    def _rows_of_step(self, step: int) -> list[np.ndarray]:
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is outside the run's 0..{self.num_steps - 1}")
        epoch, within = divmod(step, self.steps_per_epoch)
        per_step = self.shape[0] * self.shape[1]
        return self._rows(epoch)[within * per_step : (within + 1) * per_step]

    def _rows(self, epoch: int) -> list[np.ndarray]:
        """Rows of an epoch, each the indices of its documents."""
        if self._cache[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            count = len(self.lengths)
            order = rng.permutation(count) if self._shuffle else np.arange(count)
            if self._packing:
                rows = [order[bin] for bin in pack(self.lengths[order], self._capacity)]
                if self._shuffle:
                    rows = [rows[index] for index in rng.permutation(len(rows))]
            else:
                rows = [
                    order[start : start + self._batch_size]
                    for start in range(0, count, self._batch_size)
                ]
            self._cache = (epoch, rows)
        return self._cache[1]

    def _longest(self) -> int:
        epochs = -(-self.num_steps // self.steps_per_epoch) if self._shuffle else 1
        longest = max(
            int(self.lengths[row].sum()) for epoch in range(epochs) for row in self._rows(epoch)
        )
        return -(-longest // _ALIGNMENT) * _ALIGNMENT
