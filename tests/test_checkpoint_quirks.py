"""What is told of an odd checkpoint, and what of its config survives in a merged model."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import FP32, LLAMA3_ROPE, load, logits
from merging import convert, edit, make_adapter, merge, weights
from model_oracles import edit_tensors, largest, open_in_transformers, their_logits
from tiny import tiny_folder, write_chats

from jaxft import train
from jaxft.config import TrainConfig
from jaxft.formats.loading import HEAD

TOKENS = np.random.default_rng(0).integers(4, 250, (2, 60))
OLDER = {"type" if key == "rope_type" else key: value for key, value in LLAMA3_ROPE.items()}
SPELLINGS = {
    "old": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "older": {"rope_theta": 500000.0, "rope_scaling": OLDER},
    "new": {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}},
}

TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_config_is_told(tmp_path, capsys, same):
    """Where it differs from the table it is used, and a line says so."""
    model = tiny_folder(tmp_path / "model", tie_word_embeddings=True)
    if same:
        edit_tensors(model, lambda t: t.update({HEAD: t[TABLE].copy()}))
    config = TrainConfig(
        model_name_or_path=str(model),
        dataset_name=str(write_chats(tmp_path / "chats.jsonl", 8)),
        output_dir=str(tmp_path / "run"),
        max_length=64,
        max_steps=1,
        lora_r=2,
    )
    assert train.run(config) == 0
    note = "note: config.json ties the head, but the file has another one: it is used"
    assert (note in capsys.readouterr().out) == (not same)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_merged_model_keeps_its_rope(base, adapter, tmp_path, spelling):
    """As the base spells it, which transformers 4 and 5 read; the logits show that it counts."""
    model = convert(base, tmp_path / "model", "float32")
    edit(model / "config.json", **SPELLINGS[spelling])
    path = model / "config.json"
    config = {key: v for key, v in json.loads(path.read_text()).items() if v is not None}
    path.write_text(json.dumps(config))
    output = merge(adapter, tmp_path / "merged", model_name_or_path=model)
    kept = json.loads((output / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        assert kept.get(key) == config.get(key)

    got = np.asarray(logits(load(output, FP32), TOKENS))
    plain = merge(adapter, tmp_path / "plain", model_name_or_path=base)
    assert weights(plain).keys() == weights(output).keys()
    assert largest(logits(load(plain, FP32), TOKENS), got) > 1e-2  # the same without scaling
    pytest.importorskip("torch")
    assert largest(got, their_logits(open_in_transformers(output), TOKENS)) < 1e-4
