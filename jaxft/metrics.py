"""What each update reports: loss, gradient norm, speed, utilisation and memory."""

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxft.errors import UserError
from jaxft.model.config import ModelConfig
from jaxft.report import StepDisplay
from jaxft.sinks import Sink
from jaxft.step import StepMetrics

# Dense bf16 FLOP/s from the makers' datasheets, by a part of JAX's name of the device.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def step_flops(config: ModelConfig, tokens: int, targets: int) -> float:
    """FLOPs that one LoRA update needs at least, for model FLOPs utilisation (MFU).

    Four for each frozen weight and token, two forward and two for the gradient of the activations,
    the head's for targets only. Attention's own products, the adapter's, and whatever is computed
    again are left out.
    """
    layer = sum(out * into for out, into in config.projections.values())
    head = config.hidden_size * config.vocab_size
    return 4.0 * (len(config.layers) * layer * tokens + head * targets)


def peak_flops() -> float | None:
    """Dense 16-bit peak of the device in FLOP/s; None where it is not known."""
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAK_FLOPS.items() if name in kind), None)


def peak_memory_bytes() -> int:
    """Most device memory that was in use so far; on a CPU, the most the process has held."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class _Pending:
    step: int
    metrics: StepMetrics
    tokens: int


class Recorder:
    """Takes each update's metrics and reads them one update late, so that the device never waits.

    Args:
      sinks: where numbers go.
      display: the console.
      model: for the FLOPs of an update.
      total: updates in the run; the last one is always logged.
      every: updates between two logged ones.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        display: StepDisplay,
        model: ModelConfig,
        total: int,
        every: int,
    ):
        self._sinks, self._display, self._model = sinks, display, model
        self._total, self._every = total, every
        self._pending: _Pending | None = None
        self._clock = time.perf_counter()

    def restart_clock(self) -> None:
        """The time until now belongs to no update: an evaluation, a checkpoint."""
        self._clock = time.perf_counter()

    def add(self, step: int, metrics: StepMetrics, tokens: int) -> None:
        """Note an update that the device may still be working on; report the one before."""
        self.flush()
        self._pending = _Pending(step, metrics, tokens)

    def flush(self) -> None:
        """Wait for the noted update and report it.

        Raises:
          UserError: its loss or gradient is not finite.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = jax.device_get(pending.metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        count = int(values.target_tokens)
        loss, norm = float(values.loss), float(values.grad_norm)
        if count and not (math.isfinite(loss) and math.isfinite(norm)):
            remedy = (
                "nothing was learned yet, so look at the model's weights, --lora_alpha and --dtype"
                if pending.step == 1
                else "the adapter was left as it was before: lower --learning_rate, or use --dtype "
                "bfloat16"
            )
            raise UserError(
                f"update {pending.step}: loss {loss} and gradient norm {norm} are not finite; "
                + remedy
            )
        if not count:
            self._display.note(f"update {pending.step} has no target tokens: nothing was learned")
        if pending.step % self._every and pending.step != self._total:
            self._display.advance(pending.step)
            return
        peak = peak_flops()
        flops = step_flops(self._model, pending.tokens, count)
        line: dict[str, float | None] = {
            "loss": loss if count else None,
            "learning_rate": float(values.learning_rate),
            "grad_norm": norm,
            "target_tokens": count,
            "tokens_per_second": pending.tokens / seconds,
            "step_time_s": seconds,
            "mfu": flops / seconds / peak if peak else None,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self.write(pending.step, line)
        self._display.log(
            pending.step,
            loss=loss,
            tokens_per_second=pending.tokens / seconds,
        )

    def write(self, step: int, line: dict[str, float | None]) -> None:
        """Send numbers of a step to every sink."""
        for sink in self._sinks:
            sink.write(step, line)
