"""A run's folder: whether a run may start in it, and where a resumed one goes on."""

import hashlib
import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxft.config import TrainConfig, to_yaml
from jaxft.errors import UserError
from jaxft.formats.checkpoint import Checkpoints
from jaxft.formats.peft import WEIGHTS
from jaxft.formats.weights import Checkpoint
from jaxft.model.config import ModelConfig
from jaxft.sinks import read_metrics

# Options that may differ between a run and its continuation: none of them changes an update.
FREE = frozenset(
    (
        "output_dir",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "report_to",
        "resume_from_checkpoint",
        "load_best_model_at_end",
        "save_total_limit",
        "dry_run",
        "eval_dataset_name",
        "dataset_test_split",
        "per_device_eval_batch_size",
        # the same files may lie elsewhere by now; the data's fingerprint tells
        "model_name_or_path",
        "revision",
        "dataset_name",
        "dataset_config",
    )
)
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
TRACES = (METRICS, CHECKPOINTS, WEIGHTS)
# What a run writes besides: in a folder without traces of a run these are somebody else's.
OTHERS = (
    "README.md",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Start:
    """Where a run begins: after `step` updates, from the checkpoint in `folder` where not 0."""

    step: int
    folder: Path | None = None


def find_start(config: TrainConfig, identity: dict[str, Any]) -> Start:
    """Where this command's run begins; nothing is written.

    Args:
      config: the command.
      identity: from `run_identity`, compared with the checkpoint's.

    Raises:
      UserError: the folder holds a run that the command does not go on with, the checkpoint is
        not whole, or it belongs to a run with other options or data.
    """
    output, wish = Path(config.output_dir), config.resume_from_checkpoint
    if output.exists() and not output.is_dir():
        raise UserError(f"--output_dir {output} is a file")
    _check_writable(output)
    _check_foreign(output)
    if wish is None:
        _check_unused(output)
        return Start(0)
    path = output / CHECKPOINTS if wish == "latest" else Path(wish).absolute().parent
    if not path.is_dir():
        _wanted_step(wish, [], output, path)
        return Start(0)
    with closing(Checkpoints(path)) as checkpoints:
        step = _wanted_step(wish, checkpoints.steps(), output, path)
        if step == 0:
            return Start(0)
        _check_identity(checkpoints.meta(step), identity, path / str(step))
    if (output / METRICS).exists():
        read_metrics(output / METRICS)
    return Start(step, path)


def _wanted_step(wish: str, steps: list[int], output: Path, path: Path) -> int:
    """The step of the checkpoint that --resume_from_checkpoint means; 0 where there is none yet."""
    if wish == "latest":
        if not steps and all((output / name).exists() for name in (METRICS, WEIGHTS)):
            raise UserError(f"--output_dir {output} holds a finished run without checkpoints")
        return steps[-1] if steps else 0
    name = Path(wish).name
    if not name.isdecimal() or int(name) not in steps:
        hint = "; write latest for the newest one" if wish.lower() == "true" else ""
        raise UserError(f"--resume_from_checkpoint {wish} is no whole checkpoint{hint}")
    if path != (output / CHECKPOINTS).absolute():
        _check_unused(output)
    return int(name)


def model_fingerprint(checkpoint: Checkpoint, model: ModelConfig) -> str:
    """Tells a base model from another of the same shape by one of its matrices."""
    name = f"{next(iter(model.module_paths))}.weight"
    return hashlib.sha256(checkpoint.read(name).astype(np.float32).tobytes()).hexdigest()


def run_identity(
    config: TrainConfig, dtype: str, model: str, fingerprint: str, total_steps: int
) -> dict[str, Any]:
    """What must be equal for a run to be the continuation of another, as JSON."""
    options = {name: value for name, value in asdict(config).items() if name not in FREE}
    options = json.loads(json.dumps(options))  # as the checkpoint will give it back
    options["dtype"] = dtype  # as resolved: another device may resolve auto otherwise
    return {"options": options, "model": model, "data": fingerprint, "total_steps": total_steps}


def evaluations(folder: Path) -> dict[int, float]:
    """eval_loss by update, as metrics.jsonl has it."""
    lines = ((step, json.loads(line)) for step, line in read_metrics(folder / METRICS))
    return {step: line["eval_loss"] for step, line in lines if "eval_loss" in line}


def open_run_folder(config: TrainConfig) -> Path:
    """Make the folder and write config.yaml, the run as it was resolved."""
    folder = Path(config.output_dir)
    if config.resume_from_checkpoint is None:
        _check_unused(folder)  # again: another process may have begun in it meanwhile
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written: {error.strerror}") from error
    return folder


def _check_foreign(folder: Path) -> None:
    """UserError where a run would replace files that no run has written."""
    if any((folder / trace).exists() for trace in TRACES):
        return
    for name in OTHERS:
        if (folder / name).exists():
            raise UserError(
                f"--output_dir {folder} holds a {name} that is not of a run and would be replaced: "
                "name another folder"
            )


def _check_unused(folder: Path) -> None:
    if any((folder / trace).exists() for trace in TRACES):
        raise UserError(
            f"--output_dir {folder} holds a run already: name another folder, or go on with it by "
            "--resume_from_checkpoint latest"
        )


def _check_writable(folder: Path) -> None:
    """UserError where the folder, or the nearest one above it that exists, takes no files."""
    try:
        str(folder).encode("utf-8")
    except UnicodeEncodeError:  # bytes of another encoding, kept by Python as lone surrogates
        raise UserError(f"--output_dir {folder} is not UTF-8, which checkpoints need") from None
    there = next(f for f in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(f))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "takes no files" if there.is_dir() else "is no folder"
        raise UserError(f"--output_dir {folder} cannot be made: {there} {reason}")


def _check_identity(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name, value in now["options"].items():
        before = saved["options"].get(name)
        if before != value:
            raise UserError(f"{path} was made with --{name} {before}, this command says {value}")
    if saved.get("model") != now["model"]:
        raise UserError(f"{path} was made with other weights of the base model")
    if saved["data"] != now["data"]:
        raise UserError(f"{path} was made with other training rows or another tokenizer")
    if saved["total_steps"] != now["total_steps"]:
        raise UserError(
            f"{path} belongs to a run of {saved['total_steps']} updates, not {now['total_steps']}"
        )
