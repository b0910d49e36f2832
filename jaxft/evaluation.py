"""The loss of held-out rows."""

import math

from flax import nnx

from jaxft.data.loader import Loader
from jaxft.errors import UserError
from jaxft.metrics import Recorder
from jaxft.report import StepDisplay
from jaxft.step import EvalStep


class Evaluation:
    """Measures and reports the mean loss over every target of the held-out rows.

    It is the sum of all token losses divided by their number, so it does not depend on batch
    sizes, packing or a last short batch. It changes nothing of the training.
    """

    def __init__(
        self,
        evaluate: EvalStep,
        frozen: nnx.State,
        loader: Loader,
        recorder: Recorder,
        display: StepDisplay,
    ):
        self._evaluate, self._frozen, self._loader = evaluate, frozen, loader
        self._recorder, self._display = recorder, display

    def __call__(self, step: int, trained: nnx.State) -> float:
        """eval_loss after `step` updates, recorded; UserError where it is not finite."""
        total, targets, pending = 0.0, 0, None
        for i in range(self._loader.num_steps):
            self._display.status(f"evaluating {i + 1}/{self._loader.num_steps}")
            result = self._evaluate(trained, self._frozen, self._loader.batch(i))
            if pending is not None:  # read one batch late, so that the device never waits
                total, targets = total + float(pending[0]), targets + int(pending[1])
            pending = result
        assert pending is not None, "a loader has at least one batch"
        loss = (total + float(pending[0])) / (targets + int(pending[1]))
        if not math.isfinite(loss):
            raise UserError(f"update {step}: eval_loss is {loss}: lower --learning_rate")
        self._recorder.write(step, {"eval_loss": loss})
        self._display.note(f"update {step}: eval_loss {loss:.4f}")
        return loss
