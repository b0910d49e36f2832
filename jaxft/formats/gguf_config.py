"""What the metadata of a GGUF file say about its model, as the content of a config.json.

Keys and their meaning are those that llama.cpp's converter writes (conversion/*.py) and its loaders
read (src/llama-model.cpp, src/models/*.cpp). What only the loaders know is a constant here. To add
an architecture: write what is its own as a function and name it in `ARCHITECTURES`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ReaderTensor

from jaxft.errors import UserError
from jaxft.model.fields import Fields
from jaxft.model.rope import read_rope

EMBEDDINGS, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

# Said of the text a model was made for, or of how it was made: nothing is computed from them.
_HARMLESS = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout")


class Metadata:
    """The metadata of a file's architecture: `llama.block_count` is `metadata["block_count"]`.

    A key that nothing asks for is not understood: see `check_all_read`.
    """

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._fields = fields
        self._read: set[str] = set()
        if "general.architecture" not in fields:
            raise UserError(f"{path}: metadata general.architecture is missing")
        self.architecture: str = fields["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path}: architecture {self.architecture} is not supported in GGUF files; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    def name(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        self._read.add(self.name(key))
        return self._fields.get(self.name(key), default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; without a default the key must be there."""
        return self._positive(key, default, int)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, float32 in the file; without a default the key must be there."""
        return shortest(self._positive(key, default, int | float))

    def _positive(self, key: str, default: Any, kind: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise UserError(f"{self.path}: metadata {self.name(key)} is missing")
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
            raise UserError(
                f"{self.path}: metadata {self.name(key)} must be a number above 0, it is {value}"
            )
        return value

    def check_all_read(self) -> None:
        """Refuse a key that was not asked for.

        It may describe a model that would be built wrongly without it (experts, windows, scales).
        """
        understood = self._read | {self.name(key) for key in _HARMLESS}
        for key in self._fields:
            if key.startswith(self.name("")) and key not in understood:
                raise UserError(f"{self.path}: metadata {key} is not understood")


def build_config(
    metadata: Metadata, tokenizer: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> dict[str, Any]:
    """Hugging Face's config.json.

    Args:
      metadata: of the architecture.
      tokenizer: the same file's metadata, from which the special tokens are taken.
      tensors: by their names in the file.

    Raises:
      UserError: metadata that are missing, contradict each other or are not understood.
    """
    if EMBEDDINGS not in tensors:
        raise UserError(f"{metadata.path}: tensor {EMBEDDINGS} is missing")
    heads = metadata.count("attention.head_count")
    head_dim = _head_dim(metadata)
    for key, expected, what in (
        ("attention.value_length", head_dim, f"the head size {head_dim}, which is not supported"),
        ("rope.dimension_count", head_dim, f"the head size {head_dim}, which is not supported"),
        ("vocab_size", _rows(tensors), f"the {_rows(tensors)} rows of {EMBEDDINGS}"),
    ):
        if metadata.get(key, expected) != expected:
            raise UserError(
                f"{metadata.path}: {metadata.name(key)} {metadata.get(key)} differs from {what}"
            )
    config = {
        "vocab_size": _rows(tensors),
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        # the fallbacks of these two are the format's own: no grouping, and Llama 2's base
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(metadata, tensors.get(ROPE_FACTORS)),
        "tie_word_embeddings": HEAD not in tensors,
        **{
            f"{ours}_token_id": tokenizer.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
        **ARCHITECTURES[metadata.architecture](metadata, tensors),
    }
    metadata.check_all_read()
    return config


def _head_dim(metadata: Metadata) -> int:
    plain = metadata.count("embedding_length") // metadata.count("attention.head_count")
    return metadata.count("attention.key_length", plain)


def _rows(tensors: Mapping[str, ReaderTensor]) -> int:
    return int(tensors[EMBEDDINGS].shape[-1])  # the fastest axis comes first


def _llama(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Llama, and Mistral, which has the same name here.

    The converter leaves Mistral's window out; without one both compute the same.
    """
    window = metadata.get("attention.sliding_window", 0)
    if window:
        return {**_named("mistral", "Mistral"), "hidden_act": "silu", "sliding_window": window}
    return {
        **_named("llama", "Llama"),
        "hidden_act": "silu",
        "attention_bias": _biased(tensors, "attn"),
        "mlp_bias": _biased(tensors, "ffn"),
    }


def _qwen2(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    return {**_named("qwen2", "Qwen2"), "hidden_act": "silu", "use_sliding_window": False}


def _qwen3(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    return {
        **_named("qwen3", "Qwen3"),
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": _biased(tensors, "attn"),
    }


def _gemma(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    # no head of its own: llama.cpp knows no such tensor here
    return {**_named("gemma", "Gemma"), "hidden_act": _GELU, "tie_word_embeddings": True}


def _gemma2(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    return {
        **_named("gemma2", "Gemma2"),
        "hidden_activation": _GELU,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": _score_scalar(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        # the loader's where the file says nothing; no Gemma 2 has others
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, 2),
    }


def _gemma3(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    return {
        **_named("gemma3_text", "Gemma3"),
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": _score_scalar(metadata, layers_of_27b=62),
        "attn_logit_softcapping": None,
        cap: None if metadata.get(cap) is None else metadata.number(cap),
        "sliding_window": metadata.count("attention.sliding_window"),
        # the loader's where the file says nothing; local layers are never scaled
        "layer_types": _layer_types(metadata, 6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }


ARCHITECTURES: dict[str, Callable[[Metadata, Collection[str]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
_GELU = "gelu_pytorch_tanh"  # ggml's GELU is this approximation


def _named(model_type: str, model_class: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [f"{model_class}ForCausalLM"]}


def _biased(tensors: Collection[str], part: str) -> bool:
    """Whether any projection of attention (`attn`) or feed-forward (`ffn`) has a bias."""
    return any(re.fullmatch(rf"blk\.\d+\.{part}_\w+\.bias", name) for name in tensors)


def _score_scalar(metadata: Metadata, layers_of_27b: int) -> int:
    """`query_pre_attn_scalar`, which no file holds: the loaders know the 27B by its layers."""
    if metadata.count("block_count") == layers_of_27b:
        return metadata.count("embedding_length") // metadata.count("attention.head_count")
    return _head_dim(metadata)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """The last layer of each period sees everything, the others a window."""
    period = metadata.count("attention.sliding_window_pattern", period)
    return [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(metadata.count("block_count"))
    ]


def _rope_scaling(metadata: Metadata, factors: ReaderTensor | None) -> dict[str, Any] | None:
    # the loader's: linear where no type is given, and an older key for the factor
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    scaling: dict[str, Any] | None = None
    if kind == "yarn":
        scaling = _yarn(metadata)
    elif kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise UserError(f"{metadata.path}: RoPE scaling {kind} is not supported in GGUF files")
    if factors is None:
        return scaling
    head_dim, values = _head_dim(metadata), np.array(factors.data, np.float32)
    if scaling is not None or values.shape != (head_dim // 2,):
        raise UserError(
            f"{metadata.path}: {ROPE_FACTORS} of shape {values.shape} with RoPE scaling {kind} "
            f"{factor:g} does not fit heads of size {head_dim}"
        )
    return recover_rope_scaling(values, metadata.number("rope.freq_base", 10000.0))


def _yarn(metadata: Metadata) -> dict[str, Any]:
    # yarn_attn_factor is not read: the converter and the loader take it for different things
    scaling = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
    }
    for ours, theirs in (
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ):
        if metadata.get(theirs) is not None:
            scaling[ours] = metadata.number(theirs)
    return scaling


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def recover_rope_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """`rope_scaling` whose inverse frequencies are the plain ones divided by `factors`.

    Llama 3.1 and 3.2 scale with low 1, high 4 and original length 8192, and a factor of 8 or 32,
    which is the last entry of `factors` `[head_dim / 2]`; where that gives these factors it is
    named `llama3`. Others are kept as a list under `gguf_factors`.
    """
    factor = shortest(factors[-1])
    llama3 = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = (
        read_rope(Fields({"rope_theta": theta, "rope_scaling": scaling}), 2 * len(factors)).array()
        for scaling in (None, llama3)
    )
    if np.allclose(factors, plain / scaled, rtol=1e-5, atol=0):
        return llama3
    return {"rope_type": "gguf_factors", "factors": [shortest(value) for value in factors]}
