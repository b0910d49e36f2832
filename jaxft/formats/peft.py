"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Format as PEFT 0.21 reads and writes it; the keys are those of the module that transformers loads,
under `base_model.model.`, without an adapter name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxft.errors import UserError
from jaxft.formats.files import (
    read_float_tensor,
    read_json,
    read_safetensors_header,
    replacing_files,
    write_json,
)
from jaxft.lora_config import LoraConfig, check_pattern

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PEFT_VERSION = "0.21.2"  # the release whose format this is
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

Adapters = Mapping[str, tuple[np.ndarray, np.ndarray]]

_READ = frozenset(
    (
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    )
)
# Keys of adapter_config.json that say nothing about what the stored A and B mean. Any other key
# that is set changes the adapter (DoRA, trained biases, ...) and is refused.
_HARMLESS = frozenset(
    (
        "auto_mapping",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
    )
)
# Other initialisations (pissa, olora, ...) change the base weights when PEFT loads the adapter.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig(LoraConfig):
    """What adapter_config.json says: the adapters' shape and their base, as the user gave it."""

    base_model_name_or_path: str = ""
    revision: str | None = None  # of the base on the hub


def save_adapter(folder: Path, config: AdapterConfig, adapters: Adapters) -> None:
    """Write an adapter into `folder`, read it back and compare every byte before it is in place.

    `adapters` maps a module path (`model.layers.0.self_attn.q_proj`) to A `[r, in]` and B
    `[out, r]`, stored as float32. Raises ValueError if they do not fit `config`, RuntimeError if
    the file does not read back equal; `folder` then stays as it was.
    """
    _check_fit(config, adapters)
    tensors = _tensors(adapters)
    with replacing_files(folder, last=CONFIG) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, _config_dict(config))
        # safetensors makes its file readable by the owner alone
        (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode & 0o777)
        again_config, again = load_adapter(temporary)
        written = _tensors(again)
        equal = written.keys() == tensors.keys() and all(
            value.shape == tensors[key].shape and value.tobytes() == tensors[key].tobytes()
            for key, value in written.items()
        )
        expected = replace(config, target_modules=_sorted(config.target_modules))
        if not equal or again_config != expected:
            raise RuntimeError(f"{folder}: the written adapter does not read back equal")


def load_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Read a plain LoRA adapter: its config and, per module path, A `[r, in]` and B `[out, r]`.

    16-bit tensors come as float32. Raises UserError for anything the two would not express: another
    adapter type, a set option that changes its meaning, a tensor that is no A or B of the rank, a
    half of a pair, a target without tensors.
    """
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise UserError(f"adapter folder does not exist: {folder}")
    raw = read_json(folder / CONFIG)
    config = _read_config(raw, folder / CONFIG)
    header = read_safetensors_header(folder / WEIGHTS)
    halves: dict[str, dict[str, np.ndarray]] = {}
    for key, info in header.items():
        match = _KEY.fullmatch(key)
        if not match:
            raise UserError(
                f"{info.path}: tensor {key} is no LoRA matrix of the form "
                "base_model.model.<module>.lora_A.weight or lora_B.weight"
            )
        rank, rank_axis = config.rank_of(match[1]), 0 if match[2] == "A" else 1
        if len(info.shape) != 2 or info.shape[rank_axis] != rank:
            raise UserError(f"{info.path}: tensor {key} of shape {info.shape} has not r {rank}")
        value = read_float_tensor(key, info).astype(np.float32, copy=False)
        halves.setdefault(match[1], {})[match[2]] = value
    for path, pair in halves.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise UserError(f"{folder / WEIGHTS}: {path} has no lora_{missing}.weight")
    if fault := _misfit(config, halves):
        raise UserError(f"{folder / WEIGHTS}: {fault}")
    return config, {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def _tensors(adapters: Adapters) -> dict[str, np.ndarray]:
    return {
        f"base_model.model.{path}.lora_{part}.weight": np.ascontiguousarray(value, np.float32)
        for path, pair in sorted(adapters.items())
        for part, value in zip("AB", pair, strict=True)
    }


def _config_dict(config: AdapterConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": _number(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "target_modules": _list(_sorted(config.target_modules)),
        "use_rslora": config.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {key: _number(alpha) for key, alpha in config.alpha_pattern.items()},
        "layers_to_transform": _list(config.layers_to_transform),
        "revision": config.revision,
        "modules_to_save": None,
        "peft_version": PEFT_VERSION,
    }


def _number(alpha: float) -> float | int:
    """Strict readers want an integer where it is one."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _list(names: tuple | str | None) -> list | str | None:
    return list(names) if isinstance(names, tuple) else names


def _sorted(targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
    return targets if isinstance(targets, str) else tuple(sorted(targets))


def _check_fit(config: AdapterConfig, adapters: Adapters) -> None:
    if fault := _misfit(config, adapters):
        raise ValueError(fault)
    for path, (a, b) in adapters.items():
        rank = config.rank_of(path)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise ValueError(f"{path}: A {a.shape} and B {b.shape} do not have rank {rank}")


def _read_config(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """The content of an adapter_config.json; UserError for what an `AdapterConfig` cannot say."""
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type {raw.get('peft_type')} is not supported, only LORA")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise UserError(f"{path}: task_type {raw['task_type']} is not supported, only CAUSAL_LM")
    if raw.get("init_lora_weights", True) not in _INITIALISATIONS:
        raise UserError(
            f"{path}: init_lora_weights {raw['init_lora_weights']} changes the base weights on "
            "loading, which is not supported"
        )
    for key, value in raw.items():
        known = key in _READ or key in _HARMLESS
        if (not known and value) or (key == "bias" and value != "none"):
            raise UserError(f"{path}: option {key} {value!r} is not supported in an adapter")
    ranks, alphas = _pattern(raw, "rank_pattern", path), _pattern(raw, "alpha_pattern", path)
    for name, value in {"r": raw.get("r"), **ranks}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{path}: {name} must be a positive integer, not {value!r}")
    for name, value in {"lora_alpha": raw.get("lora_alpha"), **alphas}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{path}: {name} must be a number, not {value!r}")
    targets, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    if not isinstance(targets, str) and not _list_of(str, targets):
        raise UserError(f"{path}: target_modules must be names or a pattern, not {targets!r}")
    if isinstance(layers, int):
        layers = [layers]
    if layers is not None and not _list_of(int, layers):
        raise UserError(f"{path}: layers_to_transform must be numbers, not {layers!r}")
    return AdapterConfig(
        r=raw["r"],
        lora_alpha=float(raw["lora_alpha"]),
        lora_dropout=float(raw.get("lora_dropout", 0.0)),
        target_modules=targets if isinstance(targets, str) else _sorted(tuple(targets or ())),
        use_rslora=bool(raw.get("use_rslora", False)),
        rank_pattern=ranks,
        alpha_pattern={key: float(value) for key, value in alphas.items()},
        layers_to_transform=tuple(layers) if layers else None,
        base_model_name_or_path=raw.get("base_model_name_or_path") or "",
        revision=raw.get("revision"),
    )


def _pattern(raw: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {name} must be an object, not {value!r}")
    for key in value:
        try:
            check_pattern(key)
        except ValueError as error:
            raise UserError(f"{path}: {name}: {error}") from None
    return value


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _misfit(config: AdapterConfig, modules: Mapping[str, object]) -> str:
    """How the targets and the adapted modules differ; "" where they name the same."""
    if not modules:
        return "holds no LoRA matrices"
    targets = config.target_modules
    for name in () if isinstance(targets, str) else targets:
        if not any(f".{path}".endswith(f".{name}") for path in modules):
            return f"target module {name} of {CONFIG} has no tensors"
    for path in modules:
        if not config.targets(path):
            return f"module {path} is no target module of {CONFIG}"
    return ""
