"""Logits of every kind of Llama against transformers, float32, on tiny sharpened models."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf_files import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB, permute, write
from helpers import FP32, LLAMA3_ROPE, load, logits, save_llama
from model_oracles import edit_config, edit_tensors, largest, open_in_transformers, their_logits

from jaxft.formats.gguf import GgufFile
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.loading import load_decoder
from jaxft.model.families import read_config

pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 60))
ROPE = {**LLAMA3_ROPE, "rope_theta": 500000.0}
# Same weights under a slip in one setting must give other logits.
SEEN = 1e-2


@dataclass(frozen=True)
class Kind:
    """A kind of model: transformers' settings, and a slip that the comparison must see."""

    config: dict[str, Any] = field(default_factory=dict)
    slip: dict[str, Any] = field(default_factory=dict)
    silenced: str = "nothing"  # the slip: these tensors taken for zero


KINDS = {
    "Llama 3.1: llama3 scaling": Kind(
        {"rope_parameters": ROPE},
        slip={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "Llama 3": Kind(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        slip={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "Llama 2: as many key heads": Kind(
        {"num_key_value_heads": 4, "rms_norm_eps": 0.05}, slip={"rms_norm_eps": 1e-6}
    ),
    "linear scaling": Kind(
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        slip={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "tied head": Kind({"tie_word_embeddings": True}, silenced="q_proj.weight"),
    "biases in attention": Kind({"attention_bias": True}, silenced="o_proj.bias"),
    "biases in the feed-forward": Kind({"mlp_bias": True}, silenced="down_proj.bias"),
    "heads of their own size": Kind({"head_dim": 16}, silenced="k_proj.weight"),
}


@pytest.mark.parametrize("name", KINDS)
def test_matches_transformers(name, tmp_path, fixtures):
    kind = KINDS[name]
    model = save_llama(fixtures, tmp_path, **kind.config)
    got = logits(load(tmp_path), TOKENS)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4

    if kind.slip:
        edit_config(tmp_path, kind.slip)
    else:
        edit_tensors(tmp_path, lambda t: [a.fill(0) for n, a in t.items() if kind.silenced in n])
    wrong = open_in_transformers(tmp_path)
    assert largest(got, their_logits(wrong, TOKENS)) > SEEN


@pytest.fixture(scope="module")
def llama31(tmp_path_factory, fixtures) -> Path:
    """Folder of a tiny Llama 3.1, to copy."""
    folder = tmp_path_factory.mktemp("llama31")
    save_llama(fixtures, folder, rope_parameters=ROPE)
    return folder


@pytest.fixture(scope="module")
def llama31_logits(llama31) -> np.ndarray:
    return np.asarray(logits(load(llama31), TOKENS))


@pytest.fixture
def copy(llama31, tmp_path) -> Path:
    return shutil.copytree(llama31, tmp_path / "copy")


def test_spellings_of_rope(copy, llama31_logits):
    """Three spellings of one scaling give one model, in transformers too."""
    older = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()}
    for scaling in (LLAMA3_ROPE, older):
        beside = {"rope_theta": 500000.0, "rope_scaling": scaling}
        edit_config(copy, {"rope_parameters": None, **beside})
        np.testing.assert_array_equal(logits(load(copy), TOKENS), llama31_logits)
    assert largest(llama31_logits, their_logits(open_in_transformers(copy), TOKENS)) < 1e-4
    for lost in ({"rope_theta": None}, {"rope_scaling": None}):
        other = logits(load(edit_config(copy, lost)), TOKENS)
        assert largest(other, llama31_logits) > SEEN


def test_frequencies_of_llama3(llama31):
    """As transformers works them out for heads of 8, theta 500,000 and a context of 32."""
    rope = read_config(HuggingFaceFolder(llama31).config).layers[0].rope
    np.testing.assert_allclose(
        rope.inv_freq, [1.0, 0.00470075, 0.000176777, 6.64787e-06], rtol=2e-6
    )
    assert rope.attention_factor == 1


def test_spellings_of_dtype(copy, llama31_logits):
    """The tensors' own dtype counts, whatever config.json calls it."""
    edit_config(copy, {"dtype": "bfloat16"})
    np.testing.assert_array_equal(logits(load(copy), TOKENS), llama31_logits)

    def narrow(tensors):
        tensors.update({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()})

    edit_tensors(copy, narrow)
    want = their_logits(open_in_transformers(copy), TOKENS)
    assert largest(want, llama31_logits) > 1e-3
    for spelling in (
        {"dtype": "bfloat16", "torch_dtype": None},
        {"dtype": None, "torch_dtype": "bfloat16"},
        {"dtype": None, "torch_dtype": None},
    ):
        decoder = load(edit_config(copy, spelling))
        assert decoder.embed_tokens.weight.get_value().dtype == ml_dtypes.bfloat16
        assert largest(logits(decoder, TOKENS), want) < 1e-4


def test_sharded_folder(llama31, llama31_logits, tmp_path):
    model = open_in_transformers(llama31)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    assert not (tmp_path / "model.safetensors").exists()
    np.testing.assert_array_equal(logits(load(tmp_path), TOKENS), llama31_logits)
    assert largest(llama31_logits, their_logits(model, TOKENS)) < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_gguf(tied, tmp_path, fixtures):
    """The same weights out of a GGUF file, whose query and key rows are in another order."""
    theta = {"rope_type": "default", "rope_theta": 500000.0}
    settings = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
    settings |= {"num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS}
    settings |= {"vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_parameters": theta}
    model = save_llama(fixtures, tmp_path, tie_word_embeddings=tied, gain=3, **settings)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    file = GgufFile(write(tmp_path / "m.gguf", tensors, gguf.GGMLQuantizationType.F32))
    got = logits(load_decoder(file, FP32), TOKENS)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4

    def leave_permuted(stored):
        for name in stored:
            for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
                if projection in name:
                    stored[name] = permute(stored[name], heads)

    edit_tensors(tmp_path, leave_permuted)
    assert largest(got, their_logits(open_in_transformers(tmp_path), TOKENS)) > SEEN
