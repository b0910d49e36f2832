"""Rotary frequencies: a reading of config.json's RoPE fields, old spelling and new.

Formulas: those that transformers documents for each rope_type. What depends on the length of a
text is settled once, from the longest text that a run allows, so that a document has the same
frequencies alone and in a pack.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxft.errors import UserError
from jaxft.model.fields import Fields, positive


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
      inv_freq: radians per position, one for each pair of a head's elements.
      attention_factor: factor on cosine and sine.
      settled: what was chosen for the run's length, for the report; "" where nothing was.
      grows: it takes texts of any length.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    settled: str = ""
    grows: bool = False

    def array(self) -> np.ndarray:
        """float32 `[head_dim / 2]`."""
        return np.asarray(self.inv_freq, np.float32)


@dataclass(frozen=True)
class _Request:
    """What a kind of RoPE is worked out from."""

    kind: str
    fields: Mapping[str, Any]  # of rope_scaling or rope_parameters
    theta: float
    head_dim: int
    longest: int  # max_position_embeddings
    length: int | None  # longest text of the run

    def base(self, theta: float | None = None) -> np.ndarray:
        """float64 `[head_dim / 2]`: the frequencies before any scaling."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return 1.0 / (self.theta if theta is None else theta) ** exponents

    def number(self, name: str, default: float | None = None) -> float:
        """A field of the scaling above 0."""
        value = self.fields.get(name, default)
        if value is None and default is None:
            raise UserError(f"config.json: RoPE scaling of type {self.kind!r} lacks {name!r}")
        return positive(default if value is None else value, f"{name} of RoPE scaling")

    def factors(self, name: str) -> np.ndarray:
        """A list of divisors, one for each pair of a head's elements."""
        values, count = self.fields.get(name), self.head_dim // 2
        if not isinstance(values, list) or len(values) != count:
            raise UserError(
                f"config.json: {name} of RoPE scaling must be {count} numbers, it is {values!r}"
            )
        return np.array([positive(value, f"{name} of RoPE scaling") for value in values])


def read_rope(fields: Fields, head_dim: int, length: int | None = None) -> Rope:
    """Rotary embedding that config.json asks for.

    Both spellings are read: `rope_theta` beside `rope_scaling` (whose kind is `rope_type` or
    `type`), and `rope_parameters` with all of it inside.

    Args:
      fields: of config.json.
      head_dim: elements of a head.
      length: longest text of the run; None means the length the model was made for.

    Raises:
      UserError: an unknown kind of scaling, or a field missing from it.
    """
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name, {})
        if not isinstance(part, dict):
            raise UserError(f"config.json: {name} must be an object, it is {part!r}")
        scaling |= part
    for place in (scaling, fields.content):
        if place.get("partial_rotary_factor", 1) not in (None, 1):
            raise UserError(
                f"config.json: partial_rotary_factor {place['partial_rotary_factor']!r} is not "
                "supported"
            )
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        others = sorted(scaling.keys() - {"rope_theta", "partial_rotary_factor"})
        if others:
            raise UserError(f"config.json: RoPE scaling with {', '.join(others)} but no rope_type")
        kind = "default"
    if kind not in _KINDS:
        raise UserError(f"config.json: rope_type {kind!r} is unknown; known: {', '.join(KINDS)}")
    if "original_max_position_embeddings" in fields.content:  # beside it, as Phi 3 has it
        scaling["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    theta = positive(scaling.get("rope_theta", fields.get("rope_theta", 10000.0)), "rope_theta")
    longest = fields.size("max_position_embeddings", 2048)
    return _KINDS[kind](_Request(kind, scaling, theta, head_dim, longest, length))


def _default(request: _Request) -> Rope:
    return _rope(request.base())


def _linear(request: _Request) -> Rope:
    return _rope(request.base() / request.number("factor"))


def _gguf_factors(request: _Request) -> Rope:
    """A GGUF file holds the divisors themselves."""
    return _rope(request.base() / request.factors("factors"))


def _llama3(request: _Request) -> Rope:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    base, factor = request.base(), request.number("factor")
    low, high = (request.number(f"{end}_freq_factor") for end in ("low", "high"))
    context = request.number("original_max_position_embeddings")
    if high <= low:
        raise UserError(
            f"config.json: RoPE scaling of type 'llama3': high_freq_factor {high} must be above "
            f"low_freq_factor {low}"
        )
    turns = context * base / (2 * math.pi)  # full turns within the original context
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _rope(base * (ramp + (1 - ramp) / factor))


def _dynamic(request: _Request) -> Rope:
    """The base grows with the length where that is more than the model was made for (NTK)."""
    factor, longest = request.number("factor"), request.longest
    length = max(request.length or longest, longest)
    growth = factor * length / longest - (factor - 1)
    theta = request.theta * growth ** (request.head_dim / (request.head_dim - 2))
    settled = f"dynamic RoPE for {length:,} tokens: base {theta:.6g}"
    return replace(_rope(request.base(theta), settled=settled), grows=True)


def _yarn(request: _Request) -> Rope:
    """Fast pairs kept, slow ones divided by `factor`, a ramp between; softmax sharpened."""
    original = request.number("original_max_position_embeddings", request.longest)
    factor = request.number("factor", request.longest / original)
    attention = request.fields.get("attention_factor")
    if attention is None:
        if request.fields.get("mscale") and request.fields.get("mscale_all_dim"):
            mscale, all_dim = request.number("mscale"), request.number("mscale_all_dim")
            attention = _sharpness(factor, mscale) / _sharpness(factor, all_dim)
        else:
            attention = _sharpness(factor)

    def pair(turns: float) -> float:
        """Index of the pair that makes this many full turns in the original context."""
        ratio = math.log(original / (turns * 2 * math.pi)) / math.log(request.theta)
        return request.head_dim / 2 * ratio

    low, high = pair(request.number("beta_fast", 32)), pair(request.number("beta_slow", 1))
    if request.fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, request.head_dim - 1)
    span = high - low or 0.001
    ramp = np.clip((np.arange(request.head_dim // 2) - low) / span, 0.0, 1.0)
    base = request.base()
    return _rope(base * (1 - ramp) + base / factor * ramp, positive(attention, "attention_factor"))


def _sharpness(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(request: _Request) -> Rope:
    """One list of divisors up to the original length, another above it."""
    original = request.number("original_max_position_embeddings", request.longest)
    long = request.length is not None and request.length > original
    factor = request.number("factor", request.longest / original)
    attention = request.fields.get("attention_factor")
    if attention is None:
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        attention = grown
    name = "long_factor" if long else "short_factor"
    settled = f"longrope with {name}, its original length being {original:,} tokens"
    inv_freq = request.base() / request.factors(name)
    return _rope(inv_freq, positive(attention, "attention_factor"), settled)


def _rope(inv_freq: np.ndarray, attention_factor: float = 1.0, settled: str = "") -> Rope:
    return Rope(tuple(inv_freq.tolist()), attention_factor, settled)


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "gguf_factors": _gguf_factors,
}
KINDS = tuple(kind for kind in _KINDS if kind != "gguf_factors")
