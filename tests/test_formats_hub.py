"""Hub ids are served from huggingface_hub's cache; what is wrong with one is a line."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_files import hf_tensors, write
from tiny import tiny_folder

from jaxft.errors import UserError
from jaxft.formats.open import open_checkpoint

MAIN, OTHER = "1" * 40, "2" * 40
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def cache_model(cache: Path, repo_id: str, folder: Path, commit: str, ref: str | None) -> Path:
    """Put a folder's files into the cache as huggingface_hub does: blobs, links to them, a ref."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(file.read_bytes())
            link = snapshot / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def sharded(folder: Path, seed: int = 0) -> Path:
    """A tiny model in two shards, beside files that a hub model may also hold."""
    from safetensors.numpy import load_file, save_file

    tiny_folder(folder, seed)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({n: v for n, v in tensors.items() if weight_map[n] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Two revisions of a sharded model, one lacking a shard, one of GGUF files, an adapter."""
    root = tmp_path_factory.mktemp("hub")
    cache = root / "cache"
    cache_model(cache, "some/model", sharded(root / "a"), MAIN, "main")
    cache_model(cache, "some/model", sharded(root / "b", seed=1), OTHER, "v2")
    lacking = sharded(root / "c")
    (lacking / SHARDS[1]).unlink()
    cache_model(cache, "some/lacking", lacking, MAIN, "main")
    (root / "d" / "sub").mkdir(parents=True)
    write(root / "d" / "tiny.F32.gguf", hf_tensors())
    write(root / "d" / "sub" / "tiny.F32.gguf", hf_tensors())
    cache_model(cache, "some/model-GGUF", root / "d", MAIN, "main")
    (root / "e").mkdir()
    (root / "e" / "adapter_config.json").write_text("{}")
    cache_model(cache, "some/adapter", root / "e", MAIN, "main")
    (root / "f").mkdir()
    (root / "f" / "config.json").write_text('{"model_type": "llama"}')
    cache_model(cache, "some/unweighted", root / "f", MAIN, "main")
    return cache


@pytest.fixture
def offline(cache, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_model(checkpoint, folder: Path) -> bool:
    other = open_checkpoint(str(folder))
    assert checkpoint.names() == other.names()
    assert checkpoint.config == other.config
    assert checkpoint.tokenizer()("hello").input_ids == other.tokenizer()("hello").input_ids
    return all(np.array_equal(checkpoint.read(n), other.read(n)) for n in other.names())


@pytest.mark.parametrize(
    ("revision", "folder"),
    [(None, "a"), ("main", "a"), (MAIN, "a"), ("v2", "b"), (OTHER, "b")],
)
def test_the_offline_copy_is_read(offline, cache, revision, folder):
    checkpoint = open_checkpoint("some/model", revision)
    assert checkpoint.source == "some/model"
    assert same_model(checkpoint, cache.parent / folder)
    assert not same_model(checkpoint, cache.parent / ("b" if folder == "a" else "a"))


def test_a_local_folder_comes_before_the_hub(offline, cache):
    tiny_folder(Path("some/model"), seed=2)
    checkpoint = open_checkpoint("some/model")
    assert same_model(checkpoint, Path("some/model"))
    assert not same_model(checkpoint, cache.parent / "a")


@pytest.mark.parametrize("name", ["tiny.F32.gguf", "sub/tiny.F32.gguf"])
def test_a_gguf_file_of_a_hub_model(offline, name):
    checkpoint = open_checkpoint(f"some/model-GGUF/{name}", revision="main")
    assert checkpoint.source == f"some/model-GGUF/{name}"
    for tensor, value in hf_tensors().items():
        np.testing.assert_array_equal(checkpoint.read(tensor), value)


def test_a_local_gguf_file_comes_before_the_hub(offline):
    Path("some/model-GGUF").mkdir(parents=True)
    halved = {name: value / 2 for name, value in hf_tensors().items()}
    write(Path("some/model-GGUF/tiny.F32.gguf"), halved)
    read = open_checkpoint("some/model-GGUF/tiny.F32.gguf").read
    np.testing.assert_array_equal(2 * read("lm_head.weight"), hf_tensors()["lm_head.weight"])


MISSING = "the hub cannot be reached and there is no complete offline copy in its cache"
FAULTS = {
    ("typo/x", None): ["typo/x: no local folder {here}/typo/x", MISSING],
    ("some/model", "v3"): ["some/model@v3", "{here}/some/model", MISSING],
    ("some/model", "3" * 40): ["some/model@333", MISSING],
    ("some/lacking", None): ["{cache}", MAIN, SHARDS[1], "does not exist", "incomplete download?"],
    ("some/model-GGUF", None): ["no config.json", "some/model-GGUF/FILE.gguf", "{cache}"],
    ("some/unweighted", None): ["no model*.safetensors", "incomplete", "{cache}"],
    ("some/adapter", None): ["PEFT adapter", "{cache}"],
    ("some/model-GGUF/no.gguf", None): ["no local file {here}/some/model-GGUF/no.gguf", "no such"],
    ("typo/x/no.gguf", None): ["{here}/typo/x", MISSING],
    ("/no/such/dir", None): ["model folder does not exist: /no/such/dir"],
    ("./typo", None): ["model folder does not exist: {here}/typo"],
    ("typo", None): ["model folder does not exist: {here}/typo"],
    ("no/such/dir", None): ["model folder does not exist: {here}/no/such/dir"],
    ("./typo/x.gguf", None): ["GGUF file does not exist: {here}/typo/x.gguf"],
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_cannot_be_opened_is_one_line(offline, cache, fault):
    with pytest.raises(UserError) as caught:
        open_checkpoint(*fault)
    message = str(caught.value)
    assert "\n" not in message
    for part in FAULTS[fault]:
        assert part.format(here=offline, cache=cache) in message


def test_what_the_library_knows_to_be_missing_is_no_copy(offline, cache, tmp_path_factory):
    """After a download it keeps the list of the model's files, and so can tell."""
    root = tmp_path_factory.mktemp("known")
    snapshot = cache_model(cache, "some/known", sharded(root / "a"), MAIN, "main")
    open_checkpoint("some/known")
    entry = {"size": 1, "blob_id": "0" * 40}
    names = [*SHARDS, INDEX, "config.json", "original/consolidated.00.pth", "pytorch_model.bin"]
    library = pytest.importorskip("huggingface_hub._tree_cache")
    entries = {name: library.TreeCacheEntry(**entry) for name in names}
    library.write_tree_cache(str(snapshot.parents[1]), MAIN, entries)
    open_checkpoint("some/known")  # the last two are not asked for
    (snapshot / SHARDS[0]).unlink()
    with pytest.raises(UserError, match="no complete offline copy"):
        open_checkpoint("some/known")


def test_the_environment_decides(cache, tmp_path):
    """As a user has it: a process with HF_HUB_OFFLINE=1 and the cache in HF_HUB_CACHE."""
    code = """
import sys
sys.modules["torch"] = None
from jaxft.errors import UserError
from jaxft.formats.open import open_checkpoint
model = open_checkpoint("some/model", "v2")
print(model.path.name, len(model.names()), len(model.tokenizer()))
print(len(open_checkpoint("some/model-GGUF/tiny.F32.gguf").tokenizer()))
try:
    open_checkpoint("typo/x")
except UserError as error:
    print(error)
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third = run.stdout.splitlines()
    assert first == f"{OTHER} 21 260"
    assert second == "261"
    assert third == f"typo/x: no local folder {tmp_path}/typo/x, and as a hub id: {MISSING}"
