"""GGUF files of every family: the model of the folder that they were made from, bit for bit."""

import shutil
from dataclasses import replace
from pathlib import Path

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
from test_model_families import FAMILY_TABLE, GEMMA3_ROPES, SEEN, TOKENS, save, theta

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile
from jaxft.formats.loading import load_decoder
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from jaxft.model.families import FAMILIES

torch = pytest.importorskip("torch")

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
    "gemma3_text": (FAMILY_TABLE["gemma3_text"], HEAD_SCALE),
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


@pytest.fixture(scope="module", params=ROWS)
def family(request, tmp_path_factory):
    """Name, folder, transformers' model and our logits of a family."""
    row, over = ROWS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = save(folder, replace(row, config=row.config | over), **WIDE)
    return request.param, folder, model, np.asarray(logits(load(folder), TOKENS))


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
    """Equal to the folder's bit for bit, to transformers' to 1e-4; each slip differs."""
    kind, folder, model, want = family
    got = of(convert(folder, tmp_path / "m.gguf"))
    np.testing.assert_array_equal(got, want)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    for name, slip in SLIPS[kind].items():
        wrong = of(convert(folder, tmp_path / "slip.gguf", metadata=slip))
        assert largest(wrong, want) > SEEN, name
    for change in (other_rows, norms_less_one):
        wrong = of(convert(folder, tmp_path / "change.gguf", change=change))
        assert largest(wrong, want) > SEEN, change


def test_transformers_reads_the_same_tensors(family, tmp_path):
    """transformers' own GGUF reader, given the folder's configuration."""
    from transformers import AutoModelForCausalLM

    kind, folder, model, _ = family
    if kind == "gemma":
        pytest.skip("transformers reads no GGUF files of the first Gemma")
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


def test_q8_0_is_its_dequantised_tensors(family, tmp_path):
    _, folder, _, want = family
    path = convert(folder, tmp_path / "m.gguf", GgmlType.Q8_0)

    def round_trip(value: np.ndarray) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(value, GgmlType.Q8_0), GgmlType.Q8_0)

    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_tensors(copy, lambda t: t.update({k: round_trip(v) for k, v in t.items() if v.ndim > 1}))
    got = of(path)
    np.testing.assert_array_equal(got, logits(load(copy), TOKENS))
    assert largest(got, want) > 1e-3  # the rounding shows


def test_adapter_and_merge(family, tmp_path):
    """An adapter on a file: PEFT computes the same on the folder, and the merged folder too."""
    peft = pytest.importorskip("peft")
    from jaxft.export import MergeConfig, merge

    kind, folder, _, want = family
    # Mistral's own window, which converters leave out
    window = {"llama.attention.sliding_window": 8} if kind == "mistral" else {}
    path = convert(folder, tmp_path / "m.gguf", metadata=window)
    decoder = add_lora(load_decoder(GgufFile(path), FP32))
    got = np.asarray(logits(decoder, TOKENS))
    assert largest(got, want) > SEEN
    adapter = tmp_path / "adapter"
    config = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False, base_model_name_or_path=str(path))
    save_adapter(adapter, config, adapter_arrays(decoder))
    if not window:
        model = peft.PeftModel.from_pretrained(open_in_transformers(folder), adapter)
        assert largest(got, their_logits(model, TOKENS)) < 1e-4
    merged = tmp_path / "merged"
    merge(MergeConfig(adapter=str(adapter), output_dir=str(merged)))
    theirs = open_in_transformers(merged)
    assert theirs.config.model_type == kind if kind != "mistral" or window else "llama"
    assert largest(got, their_logits(theirs, TOKENS)) < 1e-4
    assert largest(got, logits(load(merged), TOKENS)) < 1e-4
