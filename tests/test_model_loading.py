"""Checkpoints that lack something, hold too much or are of unknown kind are refused by name."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import FP32, NF4_FP32, load, logits, save_llama
from model_oracles import edit_config, edit_tensors, largest, open_in_transformers, their_logits

from jaxft.errors import UserError

pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20))
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, fixtures) -> dict[bool, Path]:
    """A tiny tied model and an untied one."""
    made = {tied: tmp_path_factory.mktemp("model") for tied in (True, False)}
    for tied, folder in made.items():
        save_llama(fixtures, folder, tie_word_embeddings=tied)
    return made


@pytest.fixture
def tied(folders, tmp_path) -> Path:
    return shutil.copytree(folders[True], tmp_path / "tied")


@pytest.fixture
def untied(folders, tmp_path) -> Path:
    return shutil.copytree(folders[False], tmp_path / "untied")


def refused(folder: Path, *parts: str, storage=FP32) -> None:
    """Loading raises one line that holds all these parts."""
    with pytest.raises(UserError) as fault:
        load(folder, storage)
    message = str(fault.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_tied_without_a_head(tied):
    decoder = load(tied)
    assert decoder.lm_head is None
    assert largest(logits(decoder, TOKENS), their_logits(open_in_transformers(tied), TOKENS)) < 1e-4


def test_tied_by_config_with_an_equal_head(tied):
    before = logits(load(tied), TOKENS)
    edit_tensors(tied, lambda t: t.update({HEAD: t[TABLE].copy()}))
    decoder = load(tied)
    assert decoder.lm_head is None  # one matrix on the device
    np.testing.assert_array_equal(logits(decoder, TOKENS), before)


def test_tied_by_config_with_a_head_of_its_own(tied):
    """The file's head is used, as transformers 5 does."""
    table = logits(load(tied), TOKENS)
    edit_tensors(tied, lambda t: t.update({HEAD: t[TABLE][::-1].copy()}))
    decoder = load(tied)
    got = logits(decoder, TOKENS)
    assert not decoder.config.tie_word_embeddings
    assert largest(got, their_logits(open_in_transformers(tied), TOKENS)) < 1e-4
    assert largest(got, table) > 1


def test_untied_without_a_head(untied):
    edit_tensors(untied, lambda t: t.pop(HEAD))
    refused(untied, HEAD, "missing", str(untied))


def test_a_missing_tensor_is_named(untied):
    edit_tensors(untied, lambda t: t.pop(QUERY))
    refused(untied, QUERY, "missing")
    refused(untied, QUERY, "missing", storage=NF4_FP32)


def test_a_missing_table_is_named(tied):
    """Also where the head is there, with which it would be compared."""
    edit_tensors(tied, lambda t: t.update({HEAD: t.pop(TABLE)}))
    refused(tied, TABLE, "missing")


def test_a_tensor_left_over_is_named(untied):
    extra = "model.layers.0.self_attn.q_norm.weight"
    edit_tensors(untied, lambda t: t.update({extra: np.ones(8, np.float32)}))
    refused(untied, extra, "no place")


def test_a_layer_left_over_is_named(untied):
    edit_config(untied, {"num_hidden_layers": 1})
    refused(untied, "model.layers.1.", "no place")


def test_biases_that_the_config_does_not_know_are_named(untied):
    bias = QUERY.replace("weight", "bias")
    edit_tensors(untied, lambda t: t.update({bias: np.ones(32, np.float32)}))
    refused(untied, bias, "no place")


def test_stored_frequencies_of_old_converters_are_known(untied):
    before = logits(load(untied), TOKENS)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(untied, lambda t: t.update({name: np.ones(4, np.float32)}))
    np.testing.assert_array_equal(logits(load(untied), TOKENS), before)


def test_another_shape_is_named(untied):
    edit_tensors(untied, lambda t: t.update({QUERY: t[QUERY][:-1].copy()}))
    refused(untied, QUERY, "(31, 32)", "(32, 32)")
    refused(untied, QUERY, "(31, 32)", "(32, 32)", storage=NF4_FP32)


def test_a_smaller_table_is_named(untied):
    edit_config(untied, {"vocab_size": 80})
    refused(untied, TABLE, "(64, 32)", "(80, 32)")


def test_layers_of_two_dtypes(untied):
    """Each is kept as the file has it, in a group of its own."""
    before = logits(load(untied), TOKENS)
    norm = "model.layers.1.input_layernorm.weight"
    for name, kind in ((QUERY, ml_dtypes.bfloat16), (norm, np.float16)):
        edit_tensors(untied, lambda t, n=name, k=kind: t.update({n: t[n].astype(k)}))
    decoder = load(untied)
    first, second = (group.members[0] for group in decoder.groups)
    assert first.self_attn.q_proj.weight.get_value().array.dtype == np.float32
    assert second.self_attn.q_proj.weight.get_value().array.dtype == ml_dtypes.bfloat16
    assert second.input_layernorm.weight.get_value().dtype == np.float16
    got = logits(decoder, TOKENS)
    assert largest(got, their_logits(open_in_transformers(untied), TOKENS)) < 1e-4
    assert largest(got, before) > 1e-3


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"hidden_size": "64"}, ["hidden_size", "whole number", "'64'"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"head_dim": 15}, ["15", "pairs"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3", "multiple"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "[1]"]),
        ({"rope_parameters": {"rope_theta": -4}}, ["rope_theta", "-4"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, ["lacks 'factor'"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ["factor", "0"]),
    ],
)
def test_settings_of_the_wrong_kind_are_named(untied, settings, parts):
    load(untied, NF4_FP32)
    refused(edit_config(untied, settings), "config.json", *parts)


def test_unknown_settings_are_named(untied):
    rope = {"rope_type": "foo", "rope_theta": 10000.0}
    refused(edit_config(untied, {"rope_parameters": rope}), "rope_type 'foo'", "llama3")
    old = {"rope_parameters": None, "rope_scaling": {"type": "foo", "factor": 2.0}}
    refused(edit_config(untied, old), "rope_type 'foo'")
    typeless = {"rope_parameters": None, "rope_scaling": {"factor": 2.0}}
    refused(edit_config(untied, typeless), "factor but no rope_type")
    bare = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    refused(edit_config(untied, bare), "low_freq_factor", "llama3")
    edit_config(untied, {"rope_scaling": None})
    refused(edit_config(untied, {"hidden_act": "relu"}), "hidden_act 'relu'")
    refused(edit_config(untied, {"hidden_act": "silu", "num_attention_heads": None}),
            "num_attention_heads")  # fmt: skip
    refused(edit_config(untied, {"model_type": "mamba"}), "model_type 'mamba'", "llama")
    refused(edit_config(untied, {"model_type": None}), "model_type None")
    with pytest.raises(AssertionError):
        refused(edit_config(untied, {"model_type": "mamba"}), "model_type 'llama'")
