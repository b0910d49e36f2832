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
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = fields.get("rope_type", fields.get("type"))
    if kind is None:
        scaling = sorted(fields.keys() - {"rope_theta"})
        if scaling:
            raise UserError(f"config.json: RoPE scaling with {', '.join(scaling)} but no rope_type")
        kind = "default"
    theta = fields.get("rope_theta", config.get("rope_theta", 10000.0))
    base = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "default":
        scaled = base
    elif kind == "linear":
        scaled = base / _field(fields, "factor", kind)
    elif kind == "llama3":
        scaled = _llama3(base, fields)
    elif kind == "gguf_factors":  # a GGUF file holds the divisors themselves
        scaled = base / np.asarray(_field(fields, "factors", kind), np.float64)
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
    turns = context * base / (2 * math.pi)  # full turns within the original context
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (ramp + (1 - ramp) / factor)


def _field(fields: dict[str, Any], name: str, kind: str) -> Any:
    if name not in fields:
        raise UserError(f"config.json: RoPE scaling of type {kind!r} lacks {name!r}")
    return fields[name]
