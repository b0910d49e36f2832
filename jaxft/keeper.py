"""Which of a run's states stay on disk: the newest, those asked for, and the best evaluated one."""

from typing import Any

import jax
import numpy as np

from jaxft.errors import UserError
from jaxft.formats.checkpoint import Checkpoints
from jaxft.report import StepDisplay
from jaxft.step import TrainState


class Keeper:
    """Saves checkpoints, forgets those past the limit, and knows the best.

    Args:
      checkpoints: where states are kept.
      identity: of the run, stored with each.
      losses: eval_loss by update, of the evaluations that lie before this process.
      limit: how many of the newest are kept; None keeps all.
      best: keep the state of the lowest eval_loss too, whatever the limit.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        identity: dict[str, Any],
        losses: dict[int, float],
        *,
        limit: int | None,
        best: bool,
    ):
        self._checkpoints, self._identity = checkpoints, identity
        self._losses, self._limit, self._keep_best = dict(losses), limit, best

    @property
    def best(self) -> int | None:
        """The update with the lowest eval_loss among those whose state is kept; the first such."""
        kept = [step for step in self._checkpoints.steps() if step in self._losses]
        return min(kept, key=self._losses.__getitem__, default=None)

    def save(self, step: int, state: TrainState) -> None:
        """Keep this state.

        Raises:
          UserError: the adapter is not finite, or the disk does not take it.
        """
        _check_finite(state, step)
        self._checkpoints.save(step, state, self._identity)
        if self._limit is not None:
            steps = self._checkpoints.steps()
            wanted = {*steps[-self._limit :], *([self.best] if self._keep_best else [])}
            self._checkpoints.forget(set(steps) - wanted)

    def evaluated(self, step: int, loss: float, state: TrainState) -> None:
        """Take note of an evaluation, and keep the state where it is the best so far."""
        best = self.best
        self._losses[step] = loss
        better = best is None or loss < self._losses[best]
        if self._keep_best and better and step > 0:  # nothing is learned at 0
            self.save(step, state)

    def restore_best(self, state: TrainState, display: StepDisplay) -> TrainState:
        """The best state that is kept, which takes the place of the last one; says which it is."""
        best = self.best
        assert best is not None, "the last update is evaluated and kept"
        display.note(f"the adapter is that of update {best}: eval_loss {self._losses[best]:.4f}")
        return self._checkpoints.restore(best, state)


def _check_finite(state: TrainState, step: int) -> None:
    """A finite gradient may still have made a step out of range; no loss tells of the last one."""
    leaves = jax.tree.leaves(state.trained)
    if not all(np.isfinite(jax.device_get(leaf)).all() for leaf in leaves):
        raise UserError(
            f"update {step}: the adapter is not finite and is not saved: lower --learning_rate"
        )
