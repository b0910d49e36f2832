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
from jaxft.lora import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PEFT_VERSION = "0.21.2"  # the release whose format this is
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

Adapters = Mapping[str, tuple[np.ndarray, np.ndarray]]

_READ = frozenset(
    (
        "base_model_name_or_path",
        "bias",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "task_type",
        "use_rslora",
    )
)
# Keys of adapter_config.json that say nothing about what the stored A and B mean. Any other key
# that is set changes the adapter (DoRA, per-module ranks, trained biases, ...) and is refused.
_HARMLESS = frozenset(
    (
        "auto_mapping",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
    )
)
# Other initialisations (pissa, olora, ...) change the base weights when PEFT loads the adapter.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig(LoraConfig):
    """What adapter_config.json says: the adapters' shape and their base, as the user gave it."""

    base_model_name_or_path: str


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
        expected = replace(config, target_modules=tuple(sorted(config.target_modules)))
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
    _refuse_other_kinds(raw, folder / CONFIG)
    header = read_safetensors_header(folder / WEIGHTS)
    halves: dict[str, dict[str, np.ndarray]] = {}
    for key, info in header.items():
        match = _KEY.fullmatch(key)
        if not match:
            raise UserError(
                f"{info.path}: tensor {key} is no LoRA matrix of the form "
                "base_model.model.<module>.lora_A.weight or lora_B.weight"
            )
        rank_axis = 0 if match[2] == "A" else 1
        if len(info.shape) != 2 or info.shape[rank_axis] != raw["r"]:
            raise UserError(f"{info.path}: tensor {key} of shape {info.shape} has not r {raw['r']}")
        value = read_float_tensor(key, info).astype(np.float32, copy=False)
        halves.setdefault(match[1], {})[match[2]] = value
    for path, pair in halves.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise UserError(f"{folder / WEIGHTS}: {path} has no lora_{missing}.weight")
    config = AdapterConfig(
        r=raw["r"],
        lora_alpha=float(raw["lora_alpha"]),
        lora_dropout=float(raw.get("lora_dropout", 0.0)),
        target_modules=_targets(raw.get("target_modules"), halves, folder),
        use_rslora=bool(raw.get("use_rslora", False)),
        base_model_name_or_path=raw.get("base_model_name_or_path") or "",
    )
    return config, {path: (pair["A"], pair["B"]) for path, pair in halves.items()}


def _tensors(adapters: Adapters) -> dict[str, np.ndarray]:
    return {
        f"base_model.model.{path}.lora_{part}.weight": np.ascontiguousarray(value, np.float32)
        for path, pair in sorted(adapters.items())
        for part, value in zip("AB", pair, strict=True)
    }


def _config_dict(config: AdapterConfig) -> dict[str, Any]:
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
        "r": config.r,
        # strict readers want an integer where it is one
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": sorted(config.target_modules),
        "use_rslora": config.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "peft_version": PEFT_VERSION,
    }


def _check_fit(config: AdapterConfig, adapters: Adapters) -> None:
    trained = tuple(sorted({path.rpartition(".")[2] for path in adapters}))
    if not trained or tuple(sorted(config.target_modules)) != trained:
        raise ValueError(f"target_modules {config.target_modules} but adapters of {trained}")
    for path, (a, b) in adapters.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != config.r or b.shape[1] != config.r:
            raise ValueError(f"{path}: A {a.shape} and B {b.shape} do not have rank {config.r}")


def _refuse_other_kinds(raw: Mapping[str, Any], path: Path) -> None:
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type {raw.get('peft_type')} is not supported, only LORA")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise UserError(f"{path}: task_type {raw['task_type']} is not supported, only CAUSAL_LM")
    if raw.get("init_lora_weights", True) not in _INITIALISATIONS:
        raise UserError(
            f"{path}: init_lora_weights {raw['init_lora_weights']} changes the base weights on "
            "loading, which is not supported"
        )
    r, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(r, int) or r < 1:
        raise UserError(f"{path}: r must be a positive integer, not {r!r}")
    if not isinstance(alpha, int | float):
        raise UserError(f"{path}: lora_alpha must be a number, not {alpha!r}")
    for key, value in raw.items():
        known = key in _READ or key in _HARMLESS
        if (not known and value) or (key == "bias" and value != "none"):
            raise UserError(f"{path}: option {key} {value!r} is not supported in an adapter")


def _targets(
    named: list[str] | str | None, modules: Mapping[str, object], folder: Path
) -> tuple[str, ...]:
    """Suffixes of the adapted modules; a list in the config must name them all and no others."""
    if not modules:
        raise UserError(f"{folder / WEIGHTS}: holds no LoRA matrices")
    if not isinstance(named, list):  # a pattern: what it matched is what the file holds
        return tuple(sorted({path.rpartition(".")[2] for path in modules}))
    for target in named:
        if not any(f".{path}".endswith(f".{target}") for path in modules):
            raise UserError(
                f"{folder / WEIGHTS}: target module {target} of {CONFIG} has no tensors"
            )
    for path in modules:
        if not any(f".{path}".endswith(f".{target}") for target in named):
            raise UserError(f"{folder / WEIGHTS}: module {path} is no target module of {CONFIG}")
    return tuple(sorted(named))
