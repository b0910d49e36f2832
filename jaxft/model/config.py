"""What a decoder looks like: a reading of Hugging Face's config.json."""

from dataclasses import dataclass
from typing import Any

from jaxft.errors import UserError
from jaxft.model.rope import Rope, read_rope

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
        """Shape (out, in) of each projection of a layer, by its own name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
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
    heads = _key(config, "num_attention_heads")
    head_dim = config.get("head_dim") or _key(config, "hidden_size") // heads
    layer = LayerConfig(read_rope(config, head_dim))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_key(config, "vocab_size"),
        hidden_size=_key(config, "hidden_size"),
        intermediate_size=_key(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        layers=(layer,) * _key(config, "num_hidden_layers"),
    )


def _key(config: dict[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise UserError(f"config.json lacks {name!r}")
    return config[name]
