"""What a model's config.json says, as transformers' configuration classes read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
)
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True)
class Layer:
    """What differs between layers.

    Attributes:
      window: how many tokens back a query sees, itself included; None: all.
      inv_freq: float32 `[rotated / 2]`, RoPE's angles per position.
      attention_factor: on cos and sin.
    """

    window: int | None
    inv_freq: torch.Tensor
    attention_factor: float


@dataclass(frozen=True)
class Config:
    """A decoder of one of the `FAMILIES`.

    Attributes:
      layers: one entry for each.
      head_dim: numbers of one head.
      scale: factor on the scores.
      attention_softcap, final_softcap: of scores and logits; None: none.
      embedding_scale: factor on the embeddings, rounded to the arithmetic's dtype.
      activation: of the gated feed-forward.
      norm_form: "llama", or "gemma" for scales stored minus one.
      eps: of the norms.
      qk_norm: queries and keys are normalised by head.
      post_norms: what attention and feed-forward add is normalised.
    """

    layers: tuple[Layer, ...]
    head_dim: int
    scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_scale: float | None
    activation: str
    norm_form: str
    eps: float
    qk_norm: bool
    post_norms: bool


def read_config(folder: Path, max_length: int) -> Config:
    """The decoder of a Hugging Face folder, whose text part it is where it has a vision part.

    Args:
      folder: holds config.json.
      max_length: longest document, for the kinds of RoPE that depend on it.

    Raises:
      ValueError: a model type or an activation that is not supported.
    """
    text = AutoConfig.from_pretrained(folder).get_text_config()
    kind = text.model_type
    if kind not in FAMILIES:
        raise ValueError(f"{folder}: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    gemma = kind.startswith("gemma")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Config(
        layers=tuple(_layers(text, head_dim, max_length)),
        head_dim=head_dim,
        scale=(getattr(text, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        attention_softcap=getattr(text, "attn_logit_softcapping", None),
        final_softcap=getattr(text, "final_logit_softcapping", None),
        embedding_scale=text.hidden_size**0.5 if gemma else None,
        activation=_activation(text, folder),
        norm_form="gemma" if gemma else "llama",
        eps=text.rms_norm_eps,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        post_norms=kind in ("gemma2", "gemma3_text"),
    )


def _activation(text: Any, folder: Path) -> str:
    name = getattr(text, "hidden_activation", None) or text.hidden_act
    if text.model_type == "gemma" and name == "gelu":  # what its first files say for the tanh form
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        raise ValueError(f"{folder}: activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layers(text: Any, head_dim: int, max_length: int):
    window = getattr(text, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    types = getattr(text, "layer_types", None) or [everywhere] * text.num_hidden_layers
    ropes = {kind: _rope(text, kind, head_dim, max_length) for kind in sorted(set(types))}
    for kind in types:
        yield Layer(window if kind == "sliding_attention" else None, *ropes[kind])


def _rope(text: Any, kind: str, head_dim: int, max_length: int) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of a type of layer."""
    rope, by_type = text.rope_parameters, {}
    if kind in rope:
        rope, by_type = rope[kind], {"layer_type": kind}
    if rope["rope_type"] == "default":
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / rope["rope_theta"] ** powers, 1.0
    if rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"rope_type {rope['rope_type']!r} is not one of {known}")
    make = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    inv_freq, factor = make(text, torch.device("cpu"), seq_len=max_length, **by_type)
    return inv_freq.float(), float(factor)
