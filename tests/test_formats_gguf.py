"""GGUF files: a tiny Llama written in every tensor type comes back as the Hugging Face model."""

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from gguf_files import HEAD_DIM, HEADS, KV_HEADS, VOCAB, hf_tensors, write

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile
from jaxft.formats.gguf_config import recover_rope_scaling
from jaxft.formats.gguf_tensors import row_order

# A row is quantised by itself, so the permutation commutes with it.
STORED = {
    GgmlType.F32: lambda w: w,
    GgmlType.F16: lambda w: w.astype(np.float16),
    GgmlType.BF16: lambda w: w.astype(ml_dtypes.bfloat16),
    GgmlType.Q8_0: lambda w: round_trip(w, GgmlType.Q8_0),
    GgmlType.Q4_0: lambda w: round_trip(w, GgmlType.Q4_0),
    GgmlType.Q4_1: lambda w: round_trip(w, GgmlType.Q4_1),
    GgmlType.Q5_0: lambda w: round_trip(w, GgmlType.Q5_0),
    GgmlType.Q5_1: lambda w: round_trip(w, GgmlType.Q5_1),
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
        assert np.abs(got.astype(np.float32) - value).max() < 0.5  # of values up to about 4 in size


def test_rows_left_permuted_differ(tmp_path):
    tensors = hf_tensors()
    path = write(tmp_path / "m.gguf", tensors)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(stored["blk.0.attn_q.weight"] - tensors[name]).max() > 1
    for heads in (HEADS, KV_HEADS):
        rows = stored["blk.0.attn_q.weight"][row_order(HEADS * HEAD_DIM, heads)]
        assert (np.abs(rows - tensors[name]).max() > 1) == (heads == KV_HEADS)


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
    "architecture": ({"general.architecture": "mamba"}, {}, ["architecture mamba", "llama, qwen2"]),
    "experts": ({"llama.expert_count": 8}, {}, ["llama.expert_count"]),
    "no heads": ({"llama.attention.head_count": 0}, {}, ["head_count", "above 0", "0"]),
    "heads by layer": ({"llama.attention.head_count": [4, 2]}, {}, ["head_count", "[4, 2]"]),
    "missing metadata": ({"llama.block_count": None}, {}, ["llama.block_count", "missing"]),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, {}, ["longrope"]),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, ["rope.scaling.factor", "missing"]),
    "partial rotary": ({"llama.rope.dimension_count": 8}, {}, ["rope.dimension_count", "8"]),
    "vocab size": ({"llama.vocab_size": 999}, {}, ["999", str(VOCAB)]),
    "split file": ({"split.count": 2}, {}, ["split"]),
    "layer count": ({"llama.block_count": 1}, {}, ["blk.1.", "block_count"]),
    "absent layer": ({"llama.block_count": 3}, {}, ["model.layers.2.", "missing"]),
    "bias": ({}, {"blk.0.attn_q.bias": ODD[0]}, ["blk.0.attn_k.bias", "7 in all"]),
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
