"""A GGUF file of a Llama-family model, seen as a Hugging Face checkpoint.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read through the `gguf` package,
memory-mapped; names, layout and RoPE convention are turned into Hugging Face's.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ReaderTensor
from transformers import PreTrainedTokenizerFast

from jaxft.errors import UserError
from jaxft.formats.gguf_tensors import PLAIN, open_reader, values
from jaxft.formats.gguf_tokenizer import build_tokenizer
from jaxft.model.fields import Fields
from jaxft.model.rope import read_rope

ARCHITECTURES = ("llama",)

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Metadata of the architecture that is read below or changes nothing; another key is refused,
# because it may describe a model that this reader would build wrongly (experts, windows, scales).
_KNOWN_KEYS = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scale_linear",
        "tensor_data_layout",
    )
)


class GgufFile:
    """`Checkpoint` of one GGUF file. Opening reads the metadata and checks every tensor's entry.

    Raises UserError for a file that is missing, cut off or split, another architecture, metadata
    or tensors that are missing, and tensors or metadata that are not understood.
    """

    generation_config: dict[str, Any] | None = None

    def __init__(self, path: Path | str, source: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.source = str(path) if source is None else source
        reader = open_reader(self.path)
        self._metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        architecture = self._get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"{self.path}: architecture {architecture} is not supported in GGUF files; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        if self._metadata.get("split.count", 1) > 1:
            raise UserError(
                f"{self.path}: is one part of a split file; join the parts first (gguf-split "
                "--merge of llama.cpp)"
            )
        stored = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = self._map_names(stored)
        self.config = self._build_config(stored.get(_ROPE_FACTORS))
        self._check_complete()

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return frozenset(self._tensors)

    def stored_name(self, name: str) -> str:
        """Hugging Face's name itself."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in Hugging Face's order; GGUF stores the fastest axis first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> np.dtype | None:
        """Stored dtype, None for a quantised type."""
        return PLAIN.get(self._tensors[name].tensor_type)

    def read(self, name: str) -> np.ndarray:
        """One tensor; F32, F16 and BF16 as stored, other types dequantised to float32."""
        heads = None
        if name.endswith("q_proj.weight"):
            heads = self.config["num_attention_heads"]
        elif name.endswith("k_proj.weight"):
            heads = self.config["num_key_value_heads"]
        return values(self._tensors[name], heads)

    def nf4(self, name: str) -> None:
        """None: GGUF has no such type."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that the file's `tokenizer.*` metadata describe."""
        return build_tokenizer(
            self._metadata,
            self.path,
            vocab_size=self.config["vocab_size"],
            max_length=self.config["max_position_embeddings"],
        )

    def _get(self, key: str) -> Any:
        if key not in self._metadata:
            raise UserError(f"{self.path}: metadata {key} is missing")
        return self._metadata[key]

    def _count(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{self.path}: metadata {key} must be a number above 0, it is {value}")
        return value

    def _map_names(self, stored: dict[str, ReaderTensor]) -> dict[str, ReaderTensor]:
        tensors: dict[str, ReaderTensor] = {}
        for name, tensor in stored.items():
            layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
            if name in _NAMES:
                tensors[_NAMES[name]] = tensor
            elif layer and layer[2] in _LAYER_NAMES:
                tensors[f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"] = tensor
            elif name != _ROPE_FACTORS:
                raise UserError(f"{self.path}: tensor {name} has no place in a Llama decoder")
        if "model.embed_tokens.weight" not in tensors:
            raise UserError(f"{self.path}: tensor token_embd.weight is missing")
        return tensors

    def _build_config(self, rope_factors: ReaderTensor | None) -> dict[str, Any]:
        """Hugging Face's config.json for the file's metadata."""
        for key in self._metadata:
            if key.startswith("llama.") and key.removeprefix("llama.") not in _KNOWN_KEYS:
                raise UserError(f"{self.path}: metadata {key} is not understood")
        heads = self._count("llama.attention.head_count")
        hidden = self._count("llama.embedding_length")
        head_dim = self._metadata.get("llama.attention.key_length", hidden // heads)
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if self._metadata.get(key, head_dim) != head_dim:
                raise UserError(
                    f"{self.path}: {key} {self._metadata[key]} differs from the head size "
                    f"{head_dim}, which is not supported"
                )
        vocab_size = self.shape("model.embed_tokens.weight")[0]
        if self._metadata.get("llama.vocab_size", vocab_size) != vocab_size:
            raise UserError(
                f"{self.path}: llama.vocab_size {self._metadata['llama.vocab_size']} differs from "
                f"the {vocab_size} rows of token_embd.weight"
            )
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": self._count("llama.feed_forward_length"),
            "num_hidden_layers": self._count("llama.block_count"),
            "num_attention_heads": heads,
            # the two fallbacks are the format's own: no grouping, and Llama 2's base
            "num_key_value_heads": self._metadata.get("llama.attention.head_count_kv", heads),
            "rope_theta": shortest(self._metadata.get("llama.rope.freq_base", 10000.0)),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": self._count("llama.context_length"),
            "rms_norm_eps": shortest(self._get("llama.attention.layer_norm_rms_epsilon")),
            "rope_scaling": self._rope_scaling(rope_factors, head_dim),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._metadata.get("tokenizer.ggml.padding_token_id"),
        }

    def _rope_scaling(self, factors: ReaderTensor | None, head_dim: int) -> dict[str, Any] | None:
        kind = self._metadata.get("llama.rope.scaling.type", "none")
        linear = self._metadata.get("llama.rope.scale_linear", 1.0)  # the older spelling
        if kind == "linear":
            linear = self._get("llama.rope.scaling.factor")
        elif kind != "none":
            raise UserError(f"{self.path}: RoPE scaling {kind} is not supported in GGUF files")
        if factors is None:
            return None if linear == 1 else {"rope_type": "linear", "factor": shortest(linear)}
        values = np.array(factors.data, np.float32)
        if linear != 1 or values.shape != (head_dim // 2,):
            raise UserError(
                f"{self.path}: {_ROPE_FACTORS} of shape {values.shape} with linear scaling "
                f"{linear} does not fit heads of size {head_dim}"
            )
        theta = self._metadata.get("llama.rope.freq_base", 10000.0)
        return recover_rope_scaling(values, theta)

    def _check_complete(self) -> None:
        wanted = {*_NAMES.values()} - {"lm_head.weight"}
        for layer in range(self.config["num_hidden_layers"]):
            wanted |= {f"model.layers.{layer}.{name}.weight" for name in _LAYER_NAMES.values()}
        if missing := sorted(wanted - self.names()):
            raise UserError(f"{self.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
        if extra := sorted(self.names() - wanted - {"lm_head.weight"}):
            raise UserError(
                f"{self.path}: tensor {extra[0]} lies past the "
                f"{self.config['num_hidden_layers']} layers of llama.block_count"
            )


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
