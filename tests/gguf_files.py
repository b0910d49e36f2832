"""A tiny Llama as a GGUF file, written as llama.cpp's converter would."""

from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 320
LAYER_TENSORS = {  # Hugging Face name, GGUF name, shape
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
}
TOP_TENSORS = {
    "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, HIDDEN)),
    "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    "lm_head.weight": ("output.weight", (VOCAB, HIDDEN)),
}
NAMES = TOP_TENSORS | {
    f"model.layers.{i}.{ours}.weight": (f"blk.{i}.{theirs}.weight", shape)
    for i in range(LAYERS)
    for ours, (theirs, shape) in LAYER_TENSORS.items()
}
METADATA = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*sorted(ByteLevel.alphabet()), "ab", "abc", "<s>", "</s>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 258,
    "tokenizer.ggml.eos_token_id": 259,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
}


def hf_tensors(tied: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, (_, shape) in NAMES.items()
        if not (tied and name == "lm_head.weight")
    }


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, row by row: pair i of a head holds rows i and i + head_dim / 2."""
    out = np.empty_like(weight)
    for head in range(heads):
        start = head * HEAD_DIM
        for i in range(HEAD_DIM // 2):
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + HEAD_DIM // 2 + i]
    return out


def write(
    path: Path, tensors, kind=GgmlType.F32, metadata=None, extra=None, blocks=MappingProxyType({})
) -> Path:
    """A file of `tensors` by Hugging Face's names; matrices are stored as `kind`.

    `metadata` changes METADATA (None leaves a key out), `extra` are tensors by GGUF's names.
    `blocks`: types of the tensors whose values are quantised bytes already, `[rows, bytes]`.
    """
    writer = gguf.GGUFWriter(path, (metadata or {}).get("general.architecture", "llama"))
    for key, value in {**METADATA, **(metadata or {})}.items():
        if value is None or key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, value in {**tensors, **(extra or {})}.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = permute(value, HEADS if "q_proj" in name else KV_HEADS)
        stored = kind if value.ndim > 1 else GgmlType.F32
        if name in blocks:
            stored, data = blocks[name], value
        else:
            data = value if stored == GgmlType.F32 else gguf.quants.quantize(value, stored)
        writer.add_tensor(NAMES.get(name, (name,))[0], data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# where the float16 fields of a block lie: its scale, and where there is one its minimum
SCALES = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}


def random_blocks(kind: GgmlType, rows: int, width: int, seed: int, scale=0.01) -> np.ndarray:
    """Random bytes `[rows, bytes]` of a quantised matrix `[rows, width]`.

    Only the float16 fields are drawn: random bits would be infinities among them.
    """
    random = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * width // elements, size), np.uint8)
    for offset in SCALES[kind]:
        field = random.normal(0, scale, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = field.view(np.uint8)
    return blocks.reshape(rows, -1)
