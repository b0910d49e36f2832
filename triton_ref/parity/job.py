"""What the sides are told, and the folder through which they are: files only, no shared memory."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BATCHES, JOB = "batches.safetensors", "job.json"


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes:
      model: folder of the checkpoint.
      adapter: folder of the adapter, the user's own where there is one.
      max_length: longest document.
      load_in_4bit, nested: how projections are kept.
      learning_rate, weight_decay, max_grad_norm: of the optimiser steps, at a constant rate.
      tokens: which of the first batch's tokens are recorded, counted without padding.
      layers: how many the model has.
      steps: optimiser steps; the batches are as many, or one where it is 0.
    """

    model: str
    adapter: str
    max_length: int
    load_in_4bit: bool
    nested: bool
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    tokens: tuple[int, ...]
    layers: int
    steps: int

    def save(self, work: Path) -> None:
        """Write it to the folder."""
        (work / JOB).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, work: Path) -> "Job":
        """Read it from the folder."""
        given = json.loads((work / JOB).read_text())
        return cls(**given | {"tokens": tuple(given["tokens"])})


def result_file(work: Path, side: str, dtype: str) -> Path:
    """Where a side leaves its result."""
    return work / f"{side}-{dtype}.safetensors"


def in_one_line(
    run: Callable[[Path, str], Path], mistakes: tuple[type[Exception], ...], argv: list[str]
) -> None:
    """A side as a process: a mistake of the user's is one line on stderr and exit code 1.

    Every other exception is a fault of the program and keeps its traceback.
    """
    try:
        run(Path(argv[0]), argv[1])
    except mistakes as error:
        sys.exit(" ".join(str(error).split()))
