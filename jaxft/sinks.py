"""Where a run's numbers go: metrics.jsonl, and where asked TensorBoard or Weights & Biases."""

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from jaxft.config import TrainConfig
from jaxft.errors import UserError


class Sink(Protocol):
    """A place that takes numbers by step."""

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record these values."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def read_metrics(path: Path) -> list[tuple[int, str]]:
    """Step and text of every whole line; a last line that a killed run left unended is not one.

    Raises:
      UserError: a line that holds no step, by its number.
    """
    *ended, _ = path.read_bytes().split(b"\n")
    lines = []
    for number, line in enumerate(ended, start=1):
        try:
            lines.append((int(json.loads(line)["step"]), line.decode("utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}:{number} is no line of metrics: mend or remove it ({error!r})"
            ) from error
    return lines


class MetricsFile:
    """metrics.jsonl: one JSON object a line.

    Opening it drops what lies after the update that the run goes on from; all of it at 0.
    """

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists() and step > 0:
            kept = [line for at, line in read_metrics(path) if at <= step]
        temporary = path.with_suffix(".part")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append a line and flush it."""
        print(json.dumps({"step": step, **values}), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in a run's folder, through the tensorboard package alone."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # protobuf makes its classes when it is imported, unseen by a type checker
        self._event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record these values as scalars."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        self._writer.add_event(event)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Weights & Biases."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(dir=str(folder), config=dict(config))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record these values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_report_to(name: str) -> None:
    """UserError where the package that --report_to needs is not installed."""
    if name == "none":
        return
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a bare folder of that name, as wandb leaves one
        raise UserError(f"--report_to {name} needs a package: pip install {name}")


def open_sinks(config: TrainConfig, folder: Path, step: int) -> list[Sink]:
    """metrics.jsonl up to `step`, and what `report_to` names; see `check_report_to`."""
    extra: list[Sink] = []
    if config.report_to == "tensorboard":
        extra = [TensorBoard(folder)]
    elif config.report_to == "wandb":
        extra = [WandB(folder, asdict(config))]
    return [MetricsFile(folder / "metrics.jsonl", step), *extra]
