"""One model from every source: a folder, the hub's cache and GGUF files give the same logits."""

import itertools
import shutil
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from gguf_files import HEADS, KV_HEADS, SCALES, permute, random_blocks, write
from helpers import FP32, logits
from model_oracles import edit_tensors, largest, open_in_transformers, their_logits
from safetensors.numpy import load_file, save_file
from test_formats_hub import MAIN, cache_model
from tiny import tiny_folder

from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 320}  # whole blocks of 256
METADATA = {"llama.embedding_length": 256, "llama.feed_forward_length": 256}
METADATA |= {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
TOKENS = np.random.default_rng(0).integers(0, 320, (2, 40))
SEEN = 1e-2  # what a wrong model would differ by at least


def of(model: str) -> np.ndarray:
    return np.asarray(logits(load_decoder(open_checkpoint(model), FP32), TOKENS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def of_folder(folder) -> np.ndarray:
    return of(str(folder))


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_folder_hub_and_gguf_are_one_model(folder, of_folder, tmp_path, monkeypatch):
    cache_model(tmp_path / "cache", "some/model", folder, MAIN, "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    np.testing.assert_array_equal(of("some/model"), of_folder)
    tensors = load_file(folder / "model.safetensors")
    path = write(tmp_path / "m.gguf", tensors, metadata=METADATA)
    np.testing.assert_array_equal(of(str(path)), of_folder)
    assert np.isfinite(of_folder).all()

    def permuted_twice(name, value):
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        return permute(value, heads) if heads else value

    wrong = {name: permuted_twice(name, value) for name, value in tensors.items()}
    path = write(tmp_path / "wrong.gguf", wrong, metadata=METADATA)
    assert largest(of(str(path)), of_folder) > SEEN


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_files(copy, of_folder, tmp_path, dtype):
    pytest.importorskip("torch")
    edit_tensors(copy, lambda t: t.update({k: v.astype(dtype) for k, v in t.items()}))
    got = of(str(copy))
    assert largest(got, their_logits(open_in_transformers(copy), TOKENS)) < 1e-4
    assert largest(got, of_folder) > (1e-2 if dtype != np.float16 else 1e-3)
    if dtype == np.float16:  # norms stay float32 in GGUF files
        tensors = load_file(copy / "model.safetensors")
        tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
        path = write(tmp_path / "m.gguf", tensors, GgmlType.F16, METADATA)
        np.testing.assert_array_equal(of(str(path)), got)


def test_float32_against_transformers(folder, of_folder):
    pytest.importorskip("torch")
    assert largest(of_folder, their_logits(open_in_transformers(folder), TOKENS)) < 1e-4


def in_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo `permute`, row by row."""
    place = permute(np.arange(len(weight))[:, None], heads)[:, 0]
    out = np.empty_like(weight)
    out[place] = weight
    return out


def dequantised(path: Path, folder: Path) -> Path:
    """The folder with the matrices of a GGUF file, as the gguf package dequantises them."""
    from gguf_files import NAMES

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for name in load_file(folder / "model.safetensors"):
        tensor = stored[NAMES[name][0]]
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            value = in_order(value, HEADS if "q_proj" in name else KV_HEADS)
        tensors[name] = np.ascontiguousarray(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_files_are_their_dequantised_tensors(copy, of_folder, tmp_path, kind):
    tensors = load_file(copy / "model.safetensors")
    path = write(tmp_path / "m.gguf", tensors, GgmlType[kind], METADATA)
    got = of(str(path))
    np.testing.assert_array_equal(got, of(str(dequantised(path, copy))))
    # the rounding to 8 or 4 bits shows, and no more than that
    error = largest(got, of_folder) / np.abs(of_folder).max()
    assert (1e-3 if kind == "Q8_0" else 1e-2) < error < (0.1 if kind == "Q8_0" else 1)


def test_a_mixed_file_is_its_dequantised_tensors(copy, tmp_path):
    tensors, blocks = load_file(copy / "model.safetensors"), {}
    types = itertools.cycle(SCALES)
    for seed, (name, value) in enumerate(sorted(tensors.items())):
        if value.ndim == 2 and value.shape[1] % 256 == 0:
            blocks[name] = next(types)
            scale = 1e-4 if blocks[name].name.endswith("K") else 1e-2
            tensors[name] = random_blocks(blocks[name], *value.shape, seed, scale)
    assert set(blocks.values()) == set(SCALES)
    path = write(tmp_path / "m.gguf", tensors, GgmlType.Q5_0, METADATA, blocks=blocks)
    got = of(str(path))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, of(str(dequantised(path, copy))))
