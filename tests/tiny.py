"""A tiny Llama folder made without torch: sharpened random weights, a byte tokenizer, ChatML."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIAL)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, four special tokens, one BOS ahead of plain text."""
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_folder(folder: Path, seed: int = 0, **over: object) -> Path:
    """A model folder with float32 weights large enough for a wrong model to show."""
    random = np.random.default_rng(seed)
    config = CONFIG | over
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(0, 0.12, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": 1 + matrix(hidden),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = 1 + matrix(hidden)
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """A file of short chats of unequal length."""
    random = np.random.default_rng(seed)
    words = ["sea", "lamp", "storm", "gull", "rope", "tide", "fog", "bell"]

    def text(most: int) -> str:
        return " ".join(random.choice(words, random.integers(1, most)))

    rows = [
        {
            "messages": [
                {"role": "user", "content": text(4)},
                {"role": "assistant", "content": text(8)},
            ]
        }
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
