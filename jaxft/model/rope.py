"""Rotary frequencies: a reading of config.json's RoPE fields, old spelling and new."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxft.errors import UserError

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
      inv_freq: radians per position, one for each pair of a head's elements.
      attention_factor: factor on cosine and sine.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    def array(self) -> np.ndarray:
        """float32 `[head_dim / 2]`."""
        return np.asarray(self.inv_freq, np.float32)


def read_rope(config: dict[str, Any], head_dim: int) -> Rope:
    """Rotary embedding that config.json asks for.

    Both spellings are read: `rope_theta` beside `rope_scaling` (whose kind is `rope_type` or
    `type`), and `rope_parameters` with all of it inside.

    Raises:
      UserError: an unknown kind of scaling, or a field missing from it.
    """
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = config.get(name)
        if not isinstance(part, dict | None):
            raise UserError(f"config.json: {name} must be an object, it is {part!r}")
        fields |= part or {}
    kind = fields.get("rope_type", fields.get("type"))
    if kind is None:
        scaling = sorted(fields.keys() - {"rope_theta"})
        if scaling:
            raise UserError(f"config.json: RoPE scaling with {', '.join(scaling)} but no rope_type")
        kind = "default"
    theta = positive(fields.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta")
    base = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "default":
        scaled = base
    elif kind == "linear":
        scaled = base / _field(fields, "factor", kind)
    elif kind == "llama3":
        scaled = _llama3(base, fields)
    elif kind == "gguf_factors":  # a GGUF file holds the divisors themselves
        scaled = base / np.asarray(_factors(fields, len(base)), np.float64)
    else:
        raise UserError(f"config.json: rope_type {kind!r} is unknown; known: {', '.join(KINDS)}")
    return Rope(tuple(scaled.tolist()))


def _llama3(base: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.

    Source: the formula that transformers documents for rope_type "llama3".
    """
    factor = _field(fields, "factor", "llama3")
    low, high = (_field(fields, f"{end}_freq_factor", "llama3") for end in ("low", "high"))
    context = _field(fields, "original_max_position_embeddings", "llama3")
    if high <= low:
        raise UserError(
            f"config.json: RoPE scaling of type 'llama3': high_freq_factor {high} must be above "
            f"low_freq_factor {low}"
        )
    turns = context * base / (2 * math.pi)  # full turns within the original context
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (ramp + (1 - ramp) / factor)


def _field(fields: dict[str, Any], name: str, kind: str) -> float:
    if name not in fields:
        raise UserError(f"config.json: RoPE scaling of type {kind!r} lacks {name!r}")
    return positive(fields[name], f"{name} of RoPE scaling")


def _factors(fields: dict[str, Any], count: int) -> list[float]:
    values = fields.get("factors")
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"RoPE scaling must have {count} factors, they are {values!r}")
    return [positive(value, "a factor of RoPE scaling") for value in values]


def positive(value: Any, name: str) -> float:
    """A finite number above 0 out of config.json, as it is; UserError for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise UserError(f"config.json: {name} must be a number above 0, it is {value!r}")
    return value
