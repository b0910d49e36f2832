"""Model folders of every family as GGUF files, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*SPECIAL, *LETTERS, "ab"],
    "tokenizer.ggml.scores": [0.0] * 4 + [-float(i) for i in range(len(LETTERS) + 1)],
    "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(LETTERS) + 1),
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_space_prefix": False,
}
Change = Callable[[str, np.ndarray], np.ndarray]


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the architecture for the content of a transformers 5 config.json."""
    kind = config["model_type"]
    rope = config["rope_parameters"]
    plain_rope = rope.get("full_attention", rope)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if config.get("head_dim") is not None:
        values |= {f"attention.{part}_length": config["head_dim"] for part in ("key", "value")}
    if kind not in ("gemma", "gemma2"):
        values["rope.freq_base"] = plain_rope["rope_theta"]
        if plain_rope["rope_type"] in ("linear", "yarn"):
            values["rope.scaling.type"] = plain_rope["rope_type"]
            values["rope.scaling.factor"] = plain_rope["factor"]
        if plain_rope["rope_type"] == "yarn":
            original = plain_rope["original_max_position_embeddings"]
            values["rope.scaling.original_context_length"] = original
            for name in ("beta_fast", "beta_slow"):
                values[f"rope.scaling.yarn_{name}"] = plain_rope[name]
    if kind in ("llama", "mistral"):
        values["vocab_size"] = config["vocab_size"]
        heads = config["hidden_size"] // config["num_attention_heads"]
        values["rope.dimension_count"] = config.get("head_dim") or heads
    if kind in ("gemma2", "gemma3_text"):
        values["attention.sliding_window"] = config["sliding_window"]
    if kind == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[name] = config[name]
    if kind == "gemma3_text":
        values["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    prefix = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]]
    return {f"{prefix}.{name}": value for name, value in values.items()}


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k matrix or bias in pairs that lie side by side: LlamaModel.permute."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def converted(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """A tensor as the converter changes it, float32."""
    value = value.astype(np.float32)
    if config["model_type"] in ("llama", "mistral") and ".self_attn." in name:
        if ".q_proj." in name:
            return permuted(value, config["num_attention_heads"])
        if ".k_proj." in name:
            return permuted(value, config["num_key_value_heads"])
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return value + np.float32(1)
    return value


def convert(
    folder: Path,
    path: Path,
    kind: GgmlType = GgmlType.F32,
    metadata: dict[str, Any] | None = None,
    change: Change = lambda name, value: value,
    without: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The file of a folder's model; matrices are stored as `kind`.

    `metadata` changes what is written (None leaves a key out), `change` the converted tensors by
    their names in the folder; `without` and `extra` leave tensors out and add some, by their names
    in the file.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add: dict[type, Callable] = {bool: writer.add_bool, int: writer.add_uint32}
    add |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in {**metadata_of(config), **TOKENIZER, **(metadata or {})}.items():
        if value is not None:
            add[type(value)](key, value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, value in load_file(folder / "model.safetensors").items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None or place in without:
            continue
        value = change(name, converted(name, value, config))
        stored = kind if value.ndim > 1 else GgmlType.F32
        writer.add_tensor(place, gguf.quants.quantize(value, stored), raw_dtype=stored)
    for place, value in (extra or {}).items():
        writer.add_tensor(place, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
