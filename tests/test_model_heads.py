"""Output heads of every family: tied or not by config.json, there or not in the file."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import load, logits
from model_oracles import edit_config, edit_tensors, largest, open_in_transformers, their_logits
from safetensors.numpy import load_file
from test_model_families import FAMILY_TABLE, save

from jaxft.errors import UserError
from jaxft.formats.loading import HEAD

pytest.importorskip("torch")

TABLE = "model.embed_tokens.weight"
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20))
BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")  # their classes tie the head


@pytest.fixture(scope="module", params=FAMILY_TABLE)
def tied(request, tmp_path_factory) -> tuple[str, Path, np.ndarray]:
    """Family, folder and logits of a tied model of two layers, without a head."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    sizes |= {"layer_types": None} if "layer_types" in FAMILY_TABLE[request.param].config else {}
    save(folder, FAMILY_TABLE[request.param], **sizes)
    assert HEAD not in load_file(folder / "model.safetensors")
    decoder = load(folder)
    assert decoder.lm_head is None
    return request.param, folder, np.asarray(logits(decoder, TOKENS))


def put_head(folder: Path, target: Path, same: bool) -> Path:
    """A copy with a head in its file: the table, or the table upside down."""
    shutil.copytree(folder, target)
    step = 1 if same else -1
    return edit_tensors(target, lambda t: t.update({HEAD: t[TABLE][::step].copy()}))


def test_tied(tied, tmp_path):
    """One matrix; also where the file repeats it."""
    _, folder, got = tied
    assert largest(got, their_logits(open_in_transformers(folder), TOKENS)) < 1e-4
    again = load(put_head(folder, tmp_path / "same", same=True))
    assert again.lm_head is None
    np.testing.assert_array_equal(logits(again, TOKENS), got)


def test_tied_with_a_head_of_its_own(tied, tmp_path):
    """The file's head is used, as transformers does."""
    _, folder, of_table = tied
    other = put_head(folder, tmp_path / "other", same=False)
    decoder = load(other)
    assert decoder.lm_head is not None
    got = logits(decoder, TOKENS)
    assert largest(got, their_logits(open_in_transformers(other), TOKENS)) < 1e-4
    assert largest(got, of_table) > 1


def test_untied(tied, tmp_path):
    _, folder, of_table = tied
    untied = put_head(folder, tmp_path / "untied", same=False)
    edit_config(untied, {"tie_word_embeddings": False})
    decoder = load(untied)
    assert decoder.lm_head is not None
    got = logits(decoder, TOKENS)
    assert largest(got, their_logits(open_in_transformers(untied), TOKENS)) < 1e-4
    assert largest(got, of_table) > 1
    edit_tensors(untied, lambda t: t.pop(HEAD))
    with pytest.raises(UserError, match=rf"{untied}: tensor {HEAD} is missing"):
        load(untied)


def test_the_default_where_config_json_says_nothing(tied, tmp_path):
    """Gemma's classes tie the head then, the others do not."""
    family, folder, got = tied
    silent = edit_config(shutil.copytree(folder, tmp_path / "a"), {"tie_word_embeddings": None})
    if family in BY_DEFAULT:
        decoder = load(silent)
        assert decoder.lm_head is None
        np.testing.assert_array_equal(logits(decoder, TOKENS), got)
        assert largest(got, their_logits(open_in_transformers(silent), TOKENS)) < 1e-4
        return
    with pytest.raises(UserError, match=rf"tensor {HEAD} is missing"):
        load(silent)


def test_a_padded_vocabulary(tied, tmp_path):
    """Rows that no token has are part of the model; another number than config.json's is not."""
    _, folder, of_table = tied
    padded = shutil.copytree(folder, tmp_path / "padded")
    rows = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    edit_tensors(padded, lambda t: t.update({TABLE: np.concatenate([t[TABLE], rows])}))
    with pytest.raises(
        UserError, match=rf"{TABLE} has shape \(80, 32\), config.json .* \(64, 32\)"
    ):
        load(padded)
    decoder = load(edit_config(padded, {"vocab_size": 80}))
    got = logits(decoder, TOKENS)
    assert got.shape == (2, 20, 80)
    assert largest(got, their_logits(open_in_transformers(padded), TOKENS)) < 1e-4
    assert largest(got[..., :64], of_table) < 1e-5
