"""Ranges and combinations of options that make no run, told before anything is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from jaxft.errors import UserError
from jaxft.lora_config import check_lora_options

if TYPE_CHECKING:
    from jaxft.config import TrainConfig

# Inclusive lower bounds.
_AT_LEAST: dict[str, float] = {
    "lora_r": 1,
    "max_length": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "seed": 0,
    "logging_steps": 1,
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
}
_ABOVE_ZERO = ("lora_alpha", "num_train_epochs")
_SHARES = ("lora_dropout", "eval_split_ratio")


def check(config: TrainConfig) -> None:
    """UserError, naming option and value, for what cannot be run whatever the model and data."""
    _check_ranges(config)
    _check_combinations(config)


def _check_ranges(config: TrainConfig) -> None:
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:
            continue
        if name in _AT_LEAST and value < _AT_LEAST[name]:
            raise UserError(f"--{name} must be at least {_AT_LEAST[name]:g}, got {value}")
        if name in _ABOVE_ZERO and value <= 0:
            raise UserError(f"--{name} must be above 0, got {value:g}")
        if name in _SHARES and not 0 <= value < 1:
            raise UserError(f"--{name} must be at least 0 and below 1, got {value:g}")
        if value == "" or value == () or (isinstance(value, tuple) and "" in value):
            raise UserError(f"--{name} must not be empty")
        if isinstance(value, int) and value >= 2**31 and name != "seed":
            raise UserError(f"--{name} must be below 2**31, got {value}")
    if config.max_steps != -1 and config.max_steps < 1:
        raise UserError(
            f"--max_steps must be at least 1, or -1 for whole epochs, got {config.max_steps}"
        )
    if config.seed >= 2**32:
        raise UserError(f"--seed must be below 2**32, got {config.seed}")


def _check_combinations(config: TrainConfig) -> None:
    check_lora_options(
        config.lora_target_modules,
        config.layers_to_transform,
        config.rank_pattern or {},
        config.alpha_pattern or {},
    )
    _check_sources(config)
    if config.eval_dataset_name is not None and config.eval_split_ratio > 0:
        raise UserError(
            f"--eval_dataset_name {' '.join(config.eval_dataset_name)} and --eval_split_ratio "
            f"{config.eval_split_ratio:g} both name evaluation data: give one of them"
        )
    if config.eval_steps and config.eval_dataset_name is None and config.eval_split_ratio == 0:
        raise UserError(
            f"--eval_steps {config.eval_steps} has no evaluation data: "
            "add --eval_dataset_name or --eval_split_ratio"
        )
    if config.load_best_model_at_end and config.eval_steps is None:
        raise UserError(
            "--load_best_model_at_end chooses among evaluated updates: add --eval_steps"
        )


def _check_sources(config: TrainConfig) -> None:
    count = len(config.dataset_name)
    _check_count("dataset_config", config.dataset_config or ("",), count)
    _check_count("dataset_train_split", config.dataset_train_split, count)
    if config.eval_dataset_name is not None:
        _check_count("dataset_test_split", config.dataset_test_split, len(config.eval_dataset_name))
    elif config.dataset_test_split != ("test",):
        raise UserError(
            f"--dataset_test_split {' '.join(config.dataset_test_split)} is a split of "
            "--eval_dataset_name: give that too (it may be the training data's name)"
        )
    weights = config.dataset_weights
    if weights is None:
        return
    given = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise UserError(f"--dataset_weights {given}: {len(weights)} for {count} --dataset_name")
    if min(weights) <= 0:
        raise UserError(f"--dataset_weights {given}: each must be above 0")


def _check_count(name: str, values: Sequence[str], count: int) -> None:
    if len(values) not in (1, count):
        raise UserError(
            f"--{name} {' '.join(values)}: {len(values)} for {count} data sets; give one for all "
            "or one for each"
        )
