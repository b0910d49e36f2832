"""A run's folder: whether a run may start in it, and where a resumed one goes on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxft.config import TrainConfig, to_yaml
from jaxft.errors import UserError
from jaxft.formats.checkpoint import Checkpoints

# Options that may differ between a run and its continuation: none of them moves the adapter.
FREE = frozenset(
    (
        "output_dir",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "report_to",
        "resume_from_checkpoint",
        "eval_dataset_name",
        "per_device_eval_batch_size",
        # the same files may lie elsewhere by now; the data's fingerprint tells
        "model_name_or_path",
        "dataset_name",
    )
)
TRACES = ("metrics.jsonl", "checkpoints", "adapter_model.safetensors")


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
    if wish is None:
        if any((output / trace).exists() for trace in TRACES):
            raise UserError(
                f"--output_dir {output} holds a run already: name another folder, or go on with "
                "it by --resume_from_checkpoint latest"
            )
        return Start(0)
    path = output / "checkpoints" if wish == "latest" else Path(wish).absolute().parent
    steps = Checkpoints(path).steps() if path.is_dir() else []
    if wish == "latest":
        if not steps:
            if (output / "metrics.jsonl").exists() and (output / TRACES[2]).exists():
                raise UserError(f"--output_dir {output} holds a finished run without checkpoints")
            return Start(0)
        step = steps[-1]
    else:
        if not Path(wish).name.isdigit() or int(Path(wish).name) not in steps:
            raise UserError(f"--resume_from_checkpoint {wish} is no whole checkpoint")
        step = int(Path(wish).name)
    _check_identity(Checkpoints(path).meta(step), identity, path / str(step))
    return Start(step, path)


def run_identity(config: TrainConfig, fingerprint: str, total_steps: int) -> dict[str, Any]:
    """What must be equal for a run to be the continuation of another, as JSON."""
    options = {name: value for name, value in asdict(config).items() if name not in FREE}
    options["lora_target_modules"] = list(options["lora_target_modules"])
    return {"options": options, "data": fingerprint, "total_steps": total_steps}


def is_evaluated(folder: Path, step: int) -> bool:
    """Whether metrics.jsonl has an eval_loss after `step` updates."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    metrics = [json.loads(line) for line in text.splitlines()]
    return any(line["step"] == step and "eval_loss" in line for line in metrics)


def open_run_folder(config: TrainConfig) -> Path:
    """Make the folder and write config.yaml, the run as it was resolved."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return folder


def _check_identity(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name, value in now["options"].items():
        before = saved["options"].get(name)
        if before != value:
            raise UserError(f"{path} was made with --{name} {before}, this command says {value}")
    if saved["data"] != now["data"]:
        raise UserError(f"{path} was made with other training rows or another tokenizer")
    if saved["total_steps"] != now["total_steps"]:
        raise UserError(
            f"{path} belongs to a run of {saved['total_steps']} updates, not {now['total_steps']}"
        )
