"""What a run will do, as the report that is printed before it starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jaxft.config import TrainConfig
from jaxft.formats.forms import stored_codes
from jaxft.formats.weights import Checkpoint
from jaxft.lora_config import LoraConfig, adapted_modules, count_parameters
from jaxft.model.config import ModelConfig
from jaxft.prepare import Data
from pallas_kernels.report import picked

Sections = Mapping[str, Sequence[tuple[str, object]]]


def preflight(
    config: TrainConfig,
    checkpoint: Checkpoint,
    adapter: LoraConfig,
    model: ModelConfig,
    data: Data,
    dtype: str,
    start: int,
) -> Sections:
    """What the run will do, for `report.print_preflight`."""
    numbers, loader = data.statistics, data.train
    device = jax.devices()[0]
    sections: dict[str, list[tuple[str, object]]] = {
        "model": [
            ("base", config.model_name_or_path + _where(config)),
            (
                "weights",
                f"{describe_weights(config, checkpoint, model, dtype)}, arithmetic {dtype} on "
                f"{device.device_kind}",
            ),
            ("trainable", _adapter(adapter, model)),
        ],
        "data": [
            ("documents", _documents(numbers.documents, numbers.dropped, numbers.truncated)),
            (
                "tokens an epoch",
                f"{numbers.tokens:,}, {numbers.supervised_share:.1%} supervised",
            ),
            (
                "rows an epoch",
                f"{numbers.rows_per_epoch:,} of {loader.shape[2]:,} tokens, "
                f"{numbers.packing_efficiency:.1%} full",
            ),
            ("longest", f"{numbers.longest:,} tokens ({numbers.longest_origin})"),
            ("answers end in", ", ".join(f"{t!r} {share:.0%}" for t, share in numbers.endings)),
        ],
        "run": [
            (
                "updates",
                f"{loader.num_steps:,} of {loader.shape[0]} x {loader.shape[1]} rows, "
                f"{loader.num_steps / loader.steps_per_epoch:.3g} epochs"
                + (f", from {start:,} on" if start else ""),
            ),
            ("kernels", _kernels()),
            ("output", config.output_dir),
        ],
    }
    settled = sorted({layer.rope.settled for layer in model.layers} - {""})
    if settled:
        sections["model"].append(("positions", "; ".join(settled)))
    if model.left_alone:
        parts = ", ".join(part.rstrip(".") for part in model.left_alone)
        sections["model"].append(("left alone", parts))
    weighted = config.dataset_weights is not None
    parts = [
        f"{name} ({rows:,} x {weight:g})" if weighted else f"{name} ({rows:,})"
        for name, rows, weight in data.sources
    ]
    sections["data"].insert(0, ("sources" if len(parts) > 1 else "source", ", ".join(parts)))
    if data.evaluation:
        sections["data"].append(
            (
                "held out",
                _documents(
                    len(data.evaluation.examples),
                    data.held_out.dropped + data.held_out.emptied,
                    data.held_out.truncated,
                ),
            )
        )
    if notes := _notes(config, loader.num_steps):
        sections["run"].append(("note", "; ".join(notes)))
    return sections


def _notes(config: TrainConfig, updates: int) -> list[str]:
    """What can be meant, but seldom is."""
    notes = []
    if config.warmup_steps >= updates:
        notes.append(f"the rate still rises after {updates} updates (--warmup_steps)")
    if config.eval_steps is not None and config.eval_steps >= updates:
        notes.append("--eval_steps is past the last update: there is no evaluation between")
    if config.learning_rate == 0:
        notes.append("--learning_rate 0 learns nothing")
    return notes


def _where(config: TrainConfig) -> str:
    """Whoever loads the adapter looks for its base under the name given here."""
    local = Path(config.model_name_or_path).expanduser().exists()
    return " (local: others will not find it by this name)" if local else ""


def describe_weights(
    config: TrainConfig, checkpoint: Checkpoint, model: ModelConfig, dtype: str
) -> str:
    """How the projections are kept, and what the checkpoint has of them."""
    double = " with double quantisation"
    names = {path: f"{path}.weight" for path in model.module_paths}
    codes = stored_codes(checkpoint, model)
    if not codes:
        if config.load_in_4bit:
            return "NF4" + (double if config.use_bnb_nested_quant else "")
        quantised = any(checkpoint.dtype(name) is None for name in names.values())
        return "as in the checkpoint" + (f", dequantised to {dtype}" if quantised else "")
    nested = sum(stored.nested for stored in codes.values())
    text = "NF4" + (double if nested else "")
    text += f" for {nested:,} of them" if 0 < nested < len(codes) else ""
    text += " as stored" if config.load_in_4bit else f" as stored, dequantised to {dtype}"
    wide = {
        str(checkpoint.dtype(name) or dtype) for path, name in names.items() if path not in codes
    }
    if wide:
        kinds, count = "/".join(sorted(wide)), len(names) - len(codes)
        text += f", {count:,} of {len(names):,} projections in {kinds}"
    return text


def _adapter(adapter: LoraConfig, model: ModelConfig) -> str:
    ranks = adapted_modules(adapter, model)
    low, high = min(ranks.values()), max(ranks.values())
    rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
    count, all_of_them = len(ranks), len(model.projections) * len(model.layers)
    modules = f"all {count}" if count == all_of_them else f"{count} of {all_of_them}"
    parameters = count_parameters(adapter, model)
    return f"{parameters:,} parameters, {rank} on {modules} projections"


def _kernels() -> str:
    by_name: dict[str, list[str]] = {}
    for op, name in picked().items():
        by_name.setdefault(name, []).append(op)
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in by_name.items())


def _documents(kept: int, dropped: int, truncated: int) -> str:
    counts = ((dropped, "too long, dropped"), (truncated, "cut"))
    changed = [f"{count:,} {what}" for count, what in counts if count]
    return ", ".join([f"{kept:,}", *changed])
