"""GGUF files: a tiny Llama written in every tensor type comes back as the Hugging Face model."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from tokenizers.pre_tokenizers import ByteLevel

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile, recover_rope_scaling
from jaxft.formats.gguf_tensors import unpermute

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


def write(path: Path, tensors, kind=GgmlType.F32, metadata=None, extra=None) -> Path:
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
        data = value if stored == GgmlType.F32 else gguf.quants.quantize(value, stored)
        writer.add_tensor(NAMES.get(name, (name,))[0], data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# A row is quantised by itself, so the permutation commutes with it.
STORED = {
    GgmlType.F32: lambda w: w,
    GgmlType.F16: lambda w: w.astype(np.float16),
    GgmlType.BF16: lambda w: w.astype(ml_dtypes.bfloat16),
    GgmlType.Q8_0: lambda w: round_trip(w, GgmlType.Q8_0),
    GgmlType.Q4_1: lambda w: round_trip(w, GgmlType.Q4_1),
}


def round_trip(weight, kind):
    return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_every_tensor_type_comes_back(tmp_path, kind):
    tensors = hf_tensors()
    file = GgufFile(write(tmp_path / "m.gguf", tensors, kind))
    assert file.names() == tensors.keys()
    for name, value in tensors.items():
        expected = STORED[kind](value) if value.ndim > 1 else value
        got = file.read(name)
        assert file.shape(name) == got.shape == value.shape
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes(), name
        assert type(got) is np.ndarray
        assert np.abs(got.astype(np.float32) - value).max() < 0.5  # of values up to about 4


def test_rows_left_permuted_differ(tmp_path):
    tensors = hf_tensors()
    path = write(tmp_path / "m.gguf", tensors)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(stored["blk.0.attn_q.weight"] - tensors[name]).max() > 1
    assert np.abs(unpermute(tensors[name], HEADS) - tensors[name]).max() > 1
    wrong_heads = unpermute(stored["blk.0.attn_q.weight"], KV_HEADS)
    assert np.abs(wrong_heads - tensors[name]).max() > 1


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_same_model(tmp_path, tied):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    vocab = {"llama.vocab_size": VOCAB}  # transformers would count the tokens
    path = write(tmp_path / "m.gguf", hf_tensors(tied), GgmlType.Q8_0, vocab)
    file = GgufFile(path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype="float32")
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    assert file.names() == parameters.keys()
    for name in file.names():
        np.testing.assert_array_equal(file.read(name), parameters[name], err_msg=name)
    assert file.config["tie_word_embeddings"] == tied
    theirs = model.config.to_dict()
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert file.config[key] == theirs[key]
    for key in ("num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"):
        assert file.config[key] == theirs[key]
    assert file.config["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    assert file.config["rope_theta"] == theirs["rope_parameters"]["rope_theta"] == 500000


def llama3_factors(head_dim, theta, **scaling) -> np.ndarray:
    """Plain over scaled inverse frequencies, from transformers."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters=parameters,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.double().numpy()).astype(np.float32)


PUBLISHED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 32.0), (128, 8.0)])
def test_llama3_scaling_is_recognised(head_dim, factor):
    factors = llama3_factors(head_dim, 500000.0, factor=factor, **PUBLISHED)
    assert np.unique(factors).size > 2  # some lie between the two ends
    expected = {"rope_type": "llama3", "factor": factor, **PUBLISHED}
    assert recover_rope_scaling(factors, 500000.0) == expected
    assert recover_rope_scaling(factors, 10000.0)["rope_type"] == "gguf_factors"


def test_other_factors_are_kept_as_they_are(tmp_path):
    unusual = {**PUBLISHED, "original_max_position_embeddings": 4096}
    factors = llama3_factors(HEAD_DIM, 500000.0, factor=8.0, **unusual)
    path = write(tmp_path / "m.gguf", hf_tensors(), extra={"rope_freqs.weight": factors})
    scaling = GgufFile(path).config["rope_scaling"]
    assert scaling["rope_type"] == "gguf_factors"
    np.testing.assert_array_equal(np.float32(scaling["factors"]), factors)
    known = llama3_factors(HEAD_DIM, 500000.0, factor=8.0, **PUBLISHED)
    path = write(tmp_path / "n.gguf", hf_tensors(), extra={"rope_freqs.weight": known})
    assert GgufFile(path).config["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_freqs.weight" not in GgufFile(path).names()


def test_linear_scaling_is_read(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    file = GgufFile(write(tmp_path / "m.gguf", hf_tensors(), metadata=linear))
    assert file.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


ODD = np.ones((4, 32), np.float32)
FAULTS = {
    "architecture": ({"general.architecture": "gemma2"}, {}, ["architecture gemma2", "llama"]),
    "experts": ({"llama.expert_count": 8}, {}, ["llama.expert_count"]),
    "missing metadata": ({"llama.block_count": None}, {}, ["llama.block_count", "missing"]),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, ["yarn"]),
    "partial rotary": ({"llama.rope.dimension_count": 8}, {}, ["rope.dimension_count", "8"]),
    "vocab size": ({"llama.vocab_size": 999}, {}, ["999", str(VOCAB)]),
    "split file": ({"split.count": 2}, {}, ["split"]),
    "layer count": ({"llama.block_count": 1}, {}, ["model.layers.1.", "block_count"]),
    "absent layer": ({"llama.block_count": 3}, {}, ["model.layers.2.", "missing"]),
    "bias": ({}, {"blk.0.attn_q.bias": ODD[0]}, ["blk.0.attn_q.bias"]),
    "rope factors": ({}, {"rope_freqs.weight": ODD[0]}, ["rope_freqs.weight", "16"]),
}


def one_line(path, *parts, act=GgufFile):
    with pytest.raises(UserError) as caught:
        act(path)
    assert "\n" not in str(caught.value)
    for part in (str(path), *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_understood_is_refused(tmp_path, fault):
    metadata, extra, parts = FAULTS[fault]
    one_line(write(tmp_path / "m.gguf", hf_tensors(), metadata=metadata, extra=extra), *parts)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = hf_tensors()
    del tensors[name]
    shown = "token_embd.weight" if "embed" in name else name
    one_line(write(tmp_path / "m.gguf", tensors), "missing", shown)


def test_another_tensor_type_is_named_when_read(tmp_path):
    path = write(tmp_path / "m.gguf", hf_tensors(), GgmlType.Q5_1)
    name = "model.layers.0.mlp.up_proj.weight"
    GgufFile(path).read("model.norm.weight")
    one_line(path, "blk.0.ffn_up.weight", "Q5_1", act=lambda path: GgufFile(path).read(name))


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 5000, -64])
def test_a_damaged_file_is_refused(tmp_path, keep):
    path = write(tmp_path / "m.gguf", hf_tensors())
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    one_line(path, "incomplete download?")


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n" * 4)
    one_line(path, "no readable GGUF")
    one_line(tmp_path / "absent.gguf", "does not exist")


def tokenizer_of(tmp_path, **metadata):
    changes = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GgufFile(write(tmp_path / "m.gguf", hf_tensors(), metadata=changes)).tokenizer()


def test_llama3_tokenizer(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer("ab").input_ids == [258, 256]
    assert tokenizer("abc").input_ids == [258, 257]  # whole, though no merge makes it
    assert tokenizer.tokenize("abcab 12345") == [*("ab", "c", "ab"), "Ġ", *"12345"]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't 12345\n\nx")
    assert [word for word, _ in words] == ["Don", "'t", "Ġ", "123", "45", "ĊĊ", "x"]
    assert tokenizer.tokenize("<s>a</s><tool>") == ["<s>", "a", "</s>", "<tool>"]
    assert tokenizer.decode([258, 256, 260, 259], skip_special_tokens=True) == "ab<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.pad_token is None
    assert tokenizer.model_max_length == 256
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>ab"


def test_smollm_pre_tokenizer_cuts_out_every_digit(tmp_path):
    tokenizer = tokenizer_of(tmp_path, ggml__pre="smollm")
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't  2024\nx")
    assert [word for word, _ in words] == ["Don", "'t", "ĠĠ", *"2024", "Ċ", "x"]


@pytest.mark.parametrize(
    ("bos", "eos", "kind", "ids"),
    [
        (None, None, "llama-bpe", [258, 256]),
        (None, None, "smollm", [256]),
        (False, None, "llama-bpe", [256]),
        (True, None, "smollm", [258, 256]),
        (True, True, "llama-bpe", [258, 256, 259]),
    ],
)
def test_bos_and_eos_as_the_file_says(tmp_path, bos, eos, kind, ids):
    flags = {"ggml__add_bos_token": bos, "ggml__add_eos_token": eos, "ggml__pre": kind}
    tokenizer = tokenizer_of(tmp_path, **flags)
    assert tokenizer("ab").input_ids == ids
    assert tokenizer("ab", add_special_tokens=False).input_ids == [256]


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"ggml__pre": "gpt-4o"}, ["gpt2/gpt-4o", "gpt2/smollm"]),
        ({"ggml__pre": None}, ["gpt2/default"]),
        ({"ggml__model": "llama"}, ["llama/llama-bpe"]),
        ({"ggml__merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"ggml__merges": ["a b", "a bc"]}, ["tokenizer.ggml.merges", "'a bc'"]),
        ({"ggml__token_type": [1, 1]}, ["token_type", "2"]),
        ({"ggml__eos_token_id": 5000}, ["eos_token_id", "5000"]),
        ({"ggml__bos_token_id": None}, ["bos_token_id", "missing"]),
    ],
)
def test_tokenizer_faults_are_one_line(tmp_path, metadata, parts):
    with pytest.raises(UserError) as caught:
        tokenizer_of(tmp_path, **metadata)
    assert "\n" not in str(caught.value)
    for part in (str(tmp_path / "m.gguf"), *parts):
        assert part in str(caught.value)


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    import os

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "jaxft" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"needs SmolLM2 at {path}; scripts/quickstart.sh puts it there")
    return GgufFile(path)


def test_smollm2_config_and_tensors(smollm2):
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    sizes = [np.prod(smollm2.shape(name)) for name in smollm2.names()]
    assert sum(sizes) == 134_515_008
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.path).tensors}
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.k_proj", "attn_k")):
        tensor = stored[f"blk.7.{theirs}.weight"]
        raw = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = smollm2.read(f"model.layers.7.{ours}.weight")
        if ours == "mlp.down_proj":
            np.testing.assert_array_equal(got, raw)
        else:
            rows = np.arange(192).reshape(3, 2, 32).transpose(0, 2, 1).ravel()
            np.testing.assert_array_equal(got[rows], raw)
            assert np.abs(got - raw).max() > 0.1


def test_smollm2_splits_digits(smollm2):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("$3,500.75") == ["$", *"3,500.75"]
    assert tokenizer.tokenize("on  Monday  2/5") == ["on", "Ġ", "ĠMonday", "ĠĠ", "2", "/", "5"]
    assert tokenizer.tokenize("a ½") == ["a", "Ġ", "Â½"]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert tokenizer("hello").input_ids[0] != 1  # no BOS
    chat = [{"role": "user", "content": "7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n")
    for text in ("2024 In 3,500 ½ \n\n x", "<|im_start|>Zürich<|im_end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2_agrees_with_transformers_without_digits(smollm2, shared):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    ours = smollm2.tokenizer()
    rows = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for row in rows[:300] for text in json.loads(row).values()]
    texts += Path(__file__).read_text(encoding="utf-8").splitlines()
    texts += ["Zürich grüßt 名前 \U0001f600\u200d", "<|im_start|>user\nhi<|im_end|>", "a\t\n \r\n"]
    plain = ["".join(c for c in text if not c.isnumeric()) for text in texts]
    assert len(set(plain)) > 700
    assert [ours(text).input_ids for text in plain] == [theirs(text).input_ids for text in plain]
    # transformers drops the digit splitting, so with digits the two must differ somewhere
    assert [ours(text).input_ids for text in texts] != [theirs(text).input_ids for text in texts]
