"""What a decoder looks like: a reading of Hugging Face's config.json."""

from dataclasses import dataclass
from typing import Any

from jaxft.errors import UserError
from jaxft.model.rope import Rope, positive, read_rope

FAMILIES = ("llama",)


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer; neighbours that are equal are scanned together."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder, under transformers' names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    layers: tuple[LayerConfig, ...]

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Shape (out, in) of each projection of a layer, by its path in the layer."""
        hidden, wide = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }


def read_config(config: dict[str, Any]) -> ModelConfig:
    """The decoder that the content of a config.json describes.

    Raises:
      UserError: a model type, activation or RoPE scaling that is not supported, or a missing key.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"config.json: hidden_act {activation!r} is not supported; supported: silu")
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    head_dim = _size(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UserError(f"config.json: a head of {head_dim} elements has no pairs to rotate")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    layer = LayerConfig(read_rope(config, head_dim))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        max_position_embeddings=_size(config, "max_position_embeddings", 2048),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        layers=(layer,) * _size(config, "num_hidden_layers"),
    )


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of at least 1; null means that the key is not there."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"config.json lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {name} must be a whole number above 0, it is {value!r}")
    return value


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise UserError(f"config.json: {name} must be true or false, it is {value!r}")
    return bool(value)
