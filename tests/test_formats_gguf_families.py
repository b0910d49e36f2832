"""GGUF files of every family: the model of the folder that they were made from, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from gguf_families import ARCHITECTURES, convert, permuted
from helpers import FP32, load, logits
from model_oracles import (
    PROJECTIONS,
    add_lora,
    edit_tensors,
    largest,
    open_in_transformers,
    their_logits,
)
from safetensors.numpy import load_file
from test_model_families import FAMILY_TABLE, SEEN, TOKENS, save

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile
from jaxft.formats.loading import load_decoder
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from jaxft.model.families import FAMILIES, read_config

torch = pytest.importorskip("torch")

CONFIG = "config.json"
HEADS, KV_HEADS = 4, 2  # of the tiny models
WIDE = {"intermediate_size": 64}  # whole blocks of 32
HEAD_SCALE = {"query_pre_attn_scalar": 16}  # the head's size, as the loaders have it
EVERY_LAYER_FULL = {"use_sliding_window": False, "num_hidden_layers": 2}
# What the format cannot express is left out of a family's settings.
ROWS = {
    "llama": (FAMILY_TABLE["llama"], {}),
    "mistral": (FAMILY_TABLE["mistral"], {"sliding_window": None}),
    "qwen2": (FAMILY_TABLE["qwen2"], EVERY_LAYER_FULL),
    "qwen3": (FAMILY_TABLE["qwen3"], {}),
    "gemma": (FAMILY_TABLE["gemma"], {}),
    "gemma2": (FAMILY_TABLE["gemma2"], HEAD_SCALE),
    "gemma3_text": (FAMILY_TABLE["gemma3_text"], {**HEAD_SCALE, "num_hidden_layers": 8}),
}
# metadata without which, or with another value of which, the model is another
SLIPS = {
    "llama": {"theta": {"llama.rope.freq_base": 1e4}},
    "mistral": {
        "theta": {"llama.rope.freq_base": 1e4},
        "window": {"llama.attention.sliding_window": 8},
    },
    "qwen2": {"theta": {"qwen2.rope.freq_base": 1e4}},
    "qwen3": {"theta": {"qwen3.rope.freq_base": 1e4}},
    "gemma": {"theta": {"gemma.rope.freq_base": 1e2}},
    "gemma2": {
        "attention cap": {"gemma2.attn_logit_softcapping": 50.0},
        "final cap": {"gemma2.final_logit_softcapping": 30.0},
        "window": {"gemma2.attention.sliding_window": 50},
        "pattern": {"gemma2.attention.sliding_window_pattern": 3},
        "theta": {"gemma2.rope.freq_base": 1e2},
    },
    "gemma3_text": {
        "window": {"gemma3.attention.sliding_window": 50},
        "pattern": {"gemma3.attention.sliding_window_pattern": 3},
        "local theta": {"gemma3.rope.freq_base_swa": 1e2},
        "theta": {"gemma3.rope.freq_base": 1e4},
        "scaling": {"gemma3.rope.scaling.type": "none"},
        "final cap": {"gemma3.final_logit_softcapping": 8.0},
    },
}


def of(path: Path) -> np.ndarray:
    return np.asarray(logits(load_decoder(GgufFile(path), FP32), TOKENS))


def in_transformers(path: Path) -> np.ndarray:
    """Logits of transformers' model with our configuration and our tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    file = GgufFile(path)
    config = AutoConfig.for_model(**file.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = {name: torch.tensor(file.read(name).astype(np.float32)) for name in file.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if file.config["tie_word_embeddings"] else []
    assert (missing, unexpected) == (tied, [])
    return their_logits(model.eval(), TOKENS)


def sharp(kind: str, folder: Path, **over: Any) -> Any:
    """A family's model, saved to a folder."""
    row, left_out = ROWS[kind]
    return save(folder, replace(row, config=row.config | left_out | over), **WIDE)


@pytest.fixture(scope="module", params=ROWS)
def family(request, tmp_path_factory):
    """Name, folder, transformers' model and its logits of a family."""
    folder = tmp_path_factory.mktemp(request.param)
    model = sharp(request.param, folder)
    return request.param, folder, model, their_logits(model, TOKENS)


def test_every_family_has_a_row():
    assert ROWS.keys() | {"gemma3"} == FAMILIES.keys()  # a file holds the text part alone
    assert ROWS.keys() == SLIPS.keys() == ARCHITECTURES.keys()


def other_rows(name: str, value: np.ndarray) -> np.ndarray:
    """q and k with their rows ordered once more."""
    heads = HEADS if ".q_proj." in name else KV_HEADS
    return permuted(value, heads) if ".q_proj." in name or ".k_proj." in name else value


def norms_less_one(name: str, value: np.ndarray) -> np.ndarray:
    return value - 1 if name.endswith("norm.weight") else value


def test_logits(family, tmp_path):
    """Equal to the folder's bit for bit, to transformers' to 1e-4."""
    _, folder, _, want = family
    got = of(convert(folder, tmp_path / "m.gguf"))
    np.testing.assert_array_equal(got, logits(load(folder), TOKENS))
    assert largest(got, want) < 1e-4


def test_slips_show(family, tmp_path):
    """What a file says otherwise makes another model, through transformers as well."""
    kind, folder, _, want = family
    assert largest(in_transformers(convert(folder, tmp_path / "m.gguf")), want) < 1e-5
    for name, slip in SLIPS[kind].items():
        wrong = in_transformers(convert(folder, tmp_path / "slip.gguf", metadata=slip))
        assert largest(wrong, want) > SEEN, name
    for change in (other_rows, norms_less_one):
        wrong = in_transformers(convert(folder, tmp_path / "change.gguf", change=change))
        assert largest(wrong, want) > SEEN, change


def test_transformers_reads_the_same_tensors(family, tmp_path):
    """transformers' own GGUF reader, given the folder's configuration."""
    from transformers import AutoModelForCausalLM

    kind, folder, model, _ = family
    if kind in ("gemma", "mistral"):
        pytest.skip(f"transformers reads no GGUF files of {kind}")
    names = {"general.name": "tiny"}
    path = convert(folder, tmp_path / "m.gguf", metadata=names)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=model.config, dtype="float32"
    )
    parameters = {name: value.detach().numpy() for name, value in theirs.named_parameters()}
    file = GgufFile(path)
    assert file.names() == parameters.keys()
    for name in file.names():
        np.testing.assert_array_equal(file.read(name), parameters[name], err_msg=name)


def test_q8_0(family, tmp_path):
    _, folder, _, want = family
    path = convert(folder, tmp_path / "m.gguf", GgmlType.Q8_0)
    file = GgufFile(path)
    for name, value in load_file(folder / "model.safetensors").items():
        if value.ndim > 1:
            value = gguf.quants.quantize(value, GgmlType.Q8_0)
            value = gguf.quants.dequantize(value, GgmlType.Q8_0)
            np.testing.assert_array_equal(file.read(name), value, err_msg=name)
    got = of(path)
    assert largest(got, in_transformers(path)) < 1e-4
    assert largest(got, want) > 1e-3  # the rounding shows


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text"], indirect=True)
def test_adapter_and_merge(family, tmp_path):
    """An adapter on a file: PEFT computes the same on the folder, and the merged folder too."""
    peft = pytest.importorskip("peft")
    from jaxft.export import MergeConfig, merge

    kind, folder, _, want = family
    path = convert(folder, tmp_path / "m.gguf")
    decoder = add_lora(load_decoder(GgufFile(path), FP32))
    got = np.asarray(logits(decoder, TOKENS))
    assert largest(got, want) > SEEN
    adapter = tmp_path / "adapter"
    config = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False, base_model_name_or_path=str(path))
    save_adapter(adapter, config, adapter_arrays(decoder))
    model = peft.PeftModel.from_pretrained(open_in_transformers(folder), adapter)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    merged = tmp_path / "merged"
    merge(MergeConfig(adapter=str(adapter), output_dir=str(merged)))
    theirs = open_in_transformers(merged)
    # without a window a Mistral is a Llama
    assert theirs.config.model_type == ("llama" if kind == "mistral" else kind)
    assert largest(got, their_logits(theirs, TOKENS)) < 1e-4
    assert largest(got, logits(load(merged), TOKENS)) < 1e-4


WINDOW = {"llama.attention.sliding_window": 8}
PERIODIC = ["sliding_attention", "sliding_attention", "full_attention"] * 2
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 1.0}
YARN = {"rope_parameters": {**YARN, "original_max_position_embeddings": 32}}
# family, its settings, what is written otherwise, and settings of the loaded model that are wrong
ODD = {
    "Mistral with a window": ("mistral", {"sliding_window": 8}, WINDOW, {"sliding_window": 50}),
    "another period": (
        "gemma2",
        {"num_hidden_layers": 6, "layer_types": PERIODIC},
        {"gemma2.attention.sliding_window_pattern": 3},
        {"layer_types": PERIODIC[::-1]},
    ),
    "scaling without a type": (
        "llama",
        LINEAR,
        {"llama.rope.scaling.type": None},
        {"rope_scaling": None},
    ),
    "the older scaling": (
        "llama",
        LINEAR,
        {
            "llama.rope.scaling.type": None,
            "llama.rope.scaling.factor": None,
            "llama.rope.scale_linear": 4.0,
        },
        {"rope_scaling": None},
    ),
    "YaRN": ("qwen3", YARN, {}, {"rope_scaling": None}),
    "no local base": (
        "gemma3_text",
        {},
        {"gemma3.rope.freq_base_swa": None},
        {"rope_local_base_freq": 100.0},
    ),
    "a final cap": (
        "gemma3_text",
        {"final_logit_softcapping": 2.0},
        {"gemma3.final_logit_softcapping": 2.0},
        {"final_logit_softcapping": None},
    ),
    # scores are scaled by hidden_size / heads in the largest models of both families alone
    "Gemma 2 27B": (
        "gemma2",
        {"num_hidden_layers": 46, "query_pre_attn_scalar": 8},
        {},
        {"query_pre_attn_scalar": 16},
    ),
    "Gemma 3 27B": (
        "gemma3_text",
        {"num_hidden_layers": 62, "query_pre_attn_scalar": 8},
        {},
        {"query_pre_attn_scalar": 16},
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_settings(case, tmp_path):
    """What few files say, against transformers' model that was made with it."""
    kind, settings, metadata, slip = ODD[case]
    folder = tmp_path / "folder"
    want = their_logits(sharp(kind, folder, **settings), TOKENS)
    path = convert(folder, tmp_path / "m.gguf", metadata=metadata)
    file = GgufFile(path)
    assert file.config["model_type"] == kind
    assert largest(in_transformers(path), want) < 1e-5
    assert read_config(file.config) == read_config(json.loads((folder / CONFIG).read_text()))
    assert read_config(file.config) != read_config(file.config | slip)


def test_norms_and_their_one(tmp_path):
    """The converter's 1 rounds the last bits of Gemma's norms; the sum with it is the file's."""
    sharp("gemma2", tmp_path)
    path, stored = tmp_path / "m.gguf", load_file(tmp_path / "model.safetensors")
    file = GgufFile(convert(tmp_path, path))
    norms = sorted(name for name in stored if name.endswith("norm.weight"))
    assert len(norms) == 4 * 5 + 1
    got, want = (
        np.concatenate([np.float32(source(name)) for name in norms])
        for source in (file.read, stored.__getitem__)
    )
    assert 0 < largest(got, want) <= 2**-24
    np.testing.assert_array_equal(1 + got, 1 + want)


def test_a_bfloat16_checkpoint(tmp_path):
    """Its norms, float32 in the file, come back exactly."""
    sharp("gemma2", tmp_path)
    bf16 = ml_dtypes.bfloat16
    edit_tensors(tmp_path, lambda t: t.update({k: v.astype(bf16) for k, v in t.items()}))
    file = GgufFile(convert(tmp_path, tmp_path / "m.gguf", GgmlType.BF16))
    for name, value in load_file(tmp_path / "model.safetensors").items():
        got = file.read(name)
        assert got.dtype == file.dtype(name) == (np.float32 if value.ndim == 1 else bf16)
        np.testing.assert_array_equal(got, value)
    assert np.isfinite(of(tmp_path / "m.gguf")).all()


# family, metadata, tensors left out, what the message says
FAULTS = {
    "experts": ("qwen3", {"qwen3.expert_count": 8}, (), "metadata qwen3.expert_count is not un"),
    "pooling": ("qwen2", {"qwen2.pooling_type": 3}, (), "metadata qwen2.pooling_type is not"),
    "window": ("qwen2", {"qwen2.attention.sliding_window": 8}, (), "sliding_window is not under"),
    "bias": ("qwen2", {}, ("blk.1.attn_k.bias",), "tensor blk.1.attn_k.bias (model.layers.1.self"),
    "q norm": ("qwen3", {}, ("blk.0.attn_q_norm.weight",), "blk.0.attn_q_norm.weight (model"),
    "norm": ("gemma2", {}, ("blk.4.post_ffw_norm.weight",), "post_feedforward_layernorm.weight)"),
    "cap": ("gemma2", {"gemma2.attn_logit_softcapping": None}, (), "softcapping is missing"),
    "final cap": ("gemma2", {"gemma2.final_logit_softcapping": None}, (), "softcapping is missing"),
    "no cap": ("gemma2", {"gemma2.attn_logit_softcapping": 0.0}, (), "above 0, it is 0.0"),
    "local": ("gemma3_text", {"gemma3.attention.sliding_window": None}, (), "window is missing"),
    "pattern": (
        "gemma3_text",
        {"gemma3.attention.sliding_window_pattern": [True, False]},
        (),
        "sliding_window_pattern must be a number above 0, it is [True, False]",
    ),
    "attention of YaRN": (
        "llama",
        {"llama.rope.scaling.yarn_attn_factor": 1.5},
        (),
        "yarn_attn_factor is not understood",
    ),
    "heads": ("gemma", {"gemma.attention.head_count_kv": 3}, (), "num_key_value_heads 3"),
    "shape": (
        "gemma",
        {"gemma.feed_forward_length": 32},
        (),
        "(32, 64), the metadata ask for (32, 32)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told(fault, tmp_path):
    kind, metadata, without, message = FAULTS[fault]
    sharp(kind, tmp_path)
    path = convert(tmp_path, tmp_path / "m.gguf", metadata=metadata, without=without)
    with pytest.raises(UserError) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_of_its_own_is_no_part_of_gemma2(tmp_path):
    sharp("gemma2", tmp_path)
    head = {"output.weight": np.ones((64, 32), np.float32)}
    path = convert(tmp_path, tmp_path / "m.gguf", extra=head)
    with pytest.raises(UserError, match=r"tensor output.weight has no place in a gemma2 model"):
        GgufFile(path)
