"""The options of `python -m triton_ref.parity`: the trainer's own where it has them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxft import options
from jaxft.config import PROJECTIONS, TrainConfig
from jaxft.errors import UserError
from jaxft.options import option

GROUPS = {
    "model": "The checkpoint that goes through both paths.",
    "lora": "The adapter that both start from.",
    "data": "Rows of real data, packed as the trainer packs them.",
    "comparison": "What is compared, and in which arithmetic.",
}
DESCRIPTION = (
    "Runs the same checkpoint, packed batch and adapter through the JAX path and through the "
    "Triton path, each in a process of its own, and compares activations, losses and gradients. "
    "The exit code is 1 when a bound is exceeded, and the first tensor (float32) or the op "
    "(bfloat16) is named. On a CPU Triton interprets its kernels: keep to tiny models there."
)
_TRAIN = {field.name: field for field in dataclasses.fields(TrainConfig)}


def _shared(name: str, group: str) -> Any:
    """The trainer's option."""
    field = _TRAIN[name]
    about = field.metadata
    return option(field.default, group=group, help=about["help"], metavar=about["metavar"])


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """A comparison. Raises UserError, naming option and value, for what cannot be run."""

    model_name_or_path: str = option(
        group="model",
        metavar="PATH",
        help="Folder with config.json and safetensors files, or the hub id of one.",
    )
    revision: str | None = _shared("revision", "model")
    load_in_4bit: bool = _shared("load_in_4bit", "model")
    use_bnb_nested_quant: bool = _shared("use_bnb_nested_quant", "model")
    adapter: str | None = option(
        None,
        group="lora",
        metavar="PATH",
        help="Folder of a PEFT adapter to start from. none: a random one, A as at the start of a "
        "training run and B small but not zero, so that every gradient says something.",
    )
    lora_r: int = option(16, group="lora", help="Rank of the random adapter.")
    lora_alpha: float = option(
        16.0, group="lora", help="The adapter's output is multiplied by lora_alpha / lora_r."
    )
    lora_target_modules: tuple[str, ...] = option(
        PROJECTIONS, group="lora", help="Projections that the random adapter stands on."
    )
    dataset_name: tuple[str, ...] = _shared("dataset_name", "data")
    dataset_train_split: tuple[str, ...] = _shared("dataset_train_split", "data")
    max_length: int = _shared("max_length", "data")
    overflow: Literal["error", "drop", "truncate"] = _shared("overflow", "data")
    per_device_train_batch_size: int = option(
        1, group="data", help="Packed rows of max_length tokens in a batch."
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        group="comparison",
        help="float32: both paths against each other. bfloat16: both against a float32 run of the "
        "same step, side by side; neither may be much farther from it than the other.",
    )
    steps: int = option(
        0,
        group="comparison",
        help="Optimiser steps to take after the comparison of one step, each on a batch of its "
        "own at a constant learning rate; the two loss curves are compared.",
    )
    learning_rate: float = option(2e-4, group="comparison", help="Of those steps.")
    seed: int = option(
        0, group="comparison", help="Decides the random adapter and the order of the rows."
    )
    report: str | None = option(
        None, group="comparison", metavar="FILE", help="Markdown file for the whole result."
    )

    def __post_init__(self) -> None:
        options.normalise(self)
        if self.steps < 0:
            raise UserError(f"--steps must be at least 0, got {self.steps}")


def parse(argv: Sequence[str]) -> ParityConfig:
    """The comparison described by a command line; UserError in one line, `--help` exits."""
    given = options.read_command_line(
        ParityConfig,
        argv,
        prog="python -m triton_ref.parity",
        description=DESCRIPTION,
        groups=GROUPS,
    )
    own = [name for name in ("lora_r", "lora_alpha", "lora_target_modules") if name in given]
    if "adapter" in given and own:
        raise UserError(f"--{own[0]} is the random adapter's, but --adapter gives one")
    return options.make(ParityConfig, given)
