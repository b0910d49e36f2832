"""From config.json to a decoder: one function for each family.

A family is a reading of its configuration; defaults are those of transformers' class, which apply
where a key is absent. To add one: write its function, name it in `FAMILIES`, and add its row to
the table of tests/test_model_families.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxft.errors import UserError
from jaxft.model.config import LayerConfig, ModelConfig
from jaxft.model.fields import Fields
from jaxft.model.rope import Rope, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Gemma's first configurations say "gelu" and mean the approximation, as transformers reads them.
_GELU_OF_GEMMA = _GELU | {"gelu": "gelu_tanh"}


def read_config(config: Mapping[str, Any], max_length: int | None = None) -> ModelConfig:
    """The decoder that the content of a config.json describes.

    Args:
      config: the content.
      max_length: longest document that the model will see, for the kinds of RoPE that depend on
        it; None means the length it was made for.

    Raises:
      UserError: a model type, activation or RoPE scaling that is not supported, or a missing key.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported; supported are dense "
            f"decoders of the types {', '.join(FAMILIES)}"
        )
    _check_architecture(config)
    return FAMILIES[model_type](Fields(config), max_length)


def _check_architecture(config: Mapping[str, Any]) -> None:
    """A classifier or a bare encoder of a known model type has another head, or none."""
    named = config.get("architectures") or []
    kinds = ("ForCausalLM", "ForConditionalGeneration")
    if named and not (isinstance(named, list) and any(str(n).endswith(kinds) for n in named)):
        raise UserError(
            f"config.json: architectures {named!r} of model_type {config.get('model_type')!r} is "
            "not supported; it must be a model for causal language modelling (...ForCausalLM)"
        )


def _llama(fields: Fields, length: int | None) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return _decoder(
        fields,
        _uniform(fields, length),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _mistral(fields: Fields, length: int | None) -> ModelConfig:
    window = _window(fields, 4096)
    return _decoder(fields, _uniform(fields, length, window=window), kv_heads=8)


def _qwen2(fields: Fields, length: int | None) -> ModelConfig:
    return _decoder(fields, _qwen_layers(fields, length), qkv_bias=True, kv_heads=32)


def _qwen3(fields: Fields, length: int | None) -> ModelConfig:
    bias = fields.flag("attention_bias")
    layers = _qwen_layers(fields, length, head_dim=128)
    return _decoder(
        fields, layers, qkv_bias=bias, o_bias=bias, qk_norm=True, kv_heads=32, head_dim=128
    )


def _gemma(fields: Fields, length: int | None) -> ModelConfig:
    layers = _uniform(fields, length, head_dim=256)
    features = _gemma_features(fields, "hidden_act", _GELU_OF_GEMMA)
    return _decoder(fields, layers, kv_heads=16, **features)


def _gemma2(fields: Fields, length: int | None) -> ModelConfig:
    kinds = _kinds(fields, lambda i: FULL if i % 2 else SLIDING)
    rope = read_rope(fields, _head_dim(fields, 256), length)
    return _decoder(
        fields,
        _layers(kinds, {FULL: rope, SLIDING: rope}, _window(fields, 4096)),
        **_gemma_features(fields, "hidden_activation"),
        **_gemma_scores(fields, attention_cap=50.0, final_cap=30.0),
        post_norms=True,
        kv_heads=4,
    )


def _gemma3(fields: Fields, length: int | None) -> ModelConfig:
    period = fields.size("sliding_window_pattern", 6)
    kinds = _kinds(fields, lambda i: SLIDING if (i + 1) % period else FULL)
    return _decoder(
        fields,
        _layers(kinds, _gemma3_ropes(fields, length), _window(fields, 4096)),
        **_gemma_features(fields, "hidden_activation"),
        **_gemma_scores(fields, attention_cap=None, final_cap=None),
        post_norms=True,
        qk_norm=True,
        kv_heads=4,
    )


def _gemma3_with_vision(fields: Fields, length: int | None) -> ModelConfig:
    """The text part of a `Gemma3ForConditionalGeneration`."""
    text = fields.get("text_config", {})
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config must be an object, it is {text!r}")
    # what transformers' text class takes where the file says nothing
    sizes = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    }
    tied = fields.flag("tie_word_embeddings", Fields(text).flag("tie_word_embeddings", True))
    content = {**sizes, **text, "model_type": "gemma3", "tie_word_embeddings": tied}
    return replace(
        _gemma3(Fields(content), length),
        module_prefix="model.language_model",
        left_alone=("model.vision_tower.", "model.multi_modal_projector."),
    )


FAMILIES: dict[str, Callable[[Fields, int | None], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_with_vision,
}


def _decoder(
    fields: Fields,
    layers: Sequence[LayerConfig],
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    tied: bool = False,
    **features: Any,
) -> ModelConfig:
    """What all families share; the defaults of head counts and sizes differ."""
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    size = _head_dim(fields, head_dim)
    absent = kv_heads is not None and not fields.has("num_key_value_heads")
    kv = fields.size("num_key_value_heads", kv_heads if absent else heads)
    if heads % kv:
        raise UserError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv}"
        )
    if "activation" not in features:
        features["activation"] = fields.choice("hidden_act", "silu", _SILU)
    features.setdefault("attention_scale", size**-0.5)
    return ModelConfig(
        model_type=fields.get("model_type"),
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        layers=tuple(layers),
        **features,
    )


def _head_dim(fields: Fields, default: int | None = None) -> int:
    if default is None:
        default = fields.size("hidden_size") // fields.size("num_attention_heads")
    size = fields.size("head_dim", default)
    if size % 2:
        raise UserError(f"config.json: a head of {size} elements has no pairs to rotate")
    return size


def _uniform(
    fields: Fields, length: int | None, *, window: int | None = None, head_dim: int | None = None
) -> list[LayerConfig]:
    """Layers that are all alike."""
    rope = read_rope(fields, _head_dim(fields, head_dim), length)
    kind = FULL if window is None else SLIDING
    kinds = _kinds(fields, lambda _: kind)
    if set(kinds) != {kind}:
        fields.refuse("layer_types")  # transformers' class has no such layers
    return _layers(kinds, {kind: rope}, window)


def _qwen_layers(
    fields: Fields, length: int | None, head_dim: int | None = None
) -> list[LayerConfig]:
    """Full attention below `max_window_layers`, a window above, where windows are used."""
    rope = read_rope(fields, _head_dim(fields, head_dim), length)
    window = _window(fields, 4096) if fields.flag("use_sliding_window") else None
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise UserError(f"config.json: max_window_layers must be a whole number, it is {first!r}")
    kinds = _kinds(fields, lambda i: SLIDING if window is not None and i >= first else FULL)
    return _layers(kinds, {FULL: rope, SLIDING: rope}, window)


def _kinds(fields: Fields, kind_of: Callable[[int], str]) -> list[str]:
    """Kind of each layer: `layer_types` where given, else by the family's rule."""
    count, given = fields.size("num_hidden_layers"), fields.get("layer_types")
    if given is None:
        return [kind_of(i) for i in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise UserError(
            f"config.json: layer_types must name the kind of each of the {count} layers, "
            f"it is {given!r}"
        )
    for kind in given:
        if kind not in (FULL, SLIDING):
            raise UserError(
                f"config.json: a layer of kind {kind!r} is not supported; supported: {FULL}, "
                f"{SLIDING}"
            )
    return given


def _layers(
    kinds: Sequence[str], ropes: Mapping[str, Rope], window: int | None
) -> list[LayerConfig]:
    if SLIDING in kinds and window is None:
        raise UserError(f"config.json: layers of kind {SLIDING} but no sliding_window")
    return [LayerConfig(ropes[kind], window if kind == SLIDING else None) for kind in kinds]


def _window(fields: Fields, default: int) -> int | None:
    """Tokens that a query of a sliding layer sees; None where null is written."""
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return None
    return fields.size("sliding_window", default)


def _gemma_features(
    fields: Fields, activation: str, known: Mapping[str, str] = _GELU
) -> dict[str, Any]:
    fields.refuse("use_bidirectional_attention")
    bias = fields.flag("attention_bias")
    return {
        "head_dim": 256,
        "tied": True,
        "activation": fields.choice(activation, "gelu_pytorch_tanh", known),
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _gemma_scores(
    fields: Fields, *, attention_cap: float | None, final_cap: float | None
) -> dict[str, Any]:
    return {
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping", attention_cap),
        "final_softcap": fields.optional("final_logit_softcapping", final_cap),
    }


def _gemma3_ropes(fields: Fields, length: int | None) -> dict[str, Rope]:
    """Global layers take the scaling and their own base; local ones are never scaled."""
    size = _head_dim(fields, 256)
    nested = fields.get("rope_parameters", {})
    if isinstance(nested, dict) and (FULL in nested or SLIDING in nested):
        by_kind = {kind: nested.get(kind) or {} for kind in (FULL, SLIDING)}
        fields.refuse("rope_scaling")
    else:
        by_kind = {FULL: fields.get("rope_scaling", nested), SLIDING: {}}
    thetas = {
        FULL: fields.get("rope_theta", 1_000_000.0),
        SLIDING: fields.get("rope_local_base_freq", 10_000.0),
    }
    return {
        kind: read_rope(
            fields.replaced(rope_scaling=None, rope_parameters=parameters, rope_theta=thetas[kind]),
            size,
            length,
        )
        for kind, parameters in by_kind.items()
    }
