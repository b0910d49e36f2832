"""Model folders: tensors come back bit for bit, and every damaged folder is one clear line."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxft.errors import UserError
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.open import open_checkpoint

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": random.normal(size=(7, 4)).astype(ml_dtypes.bfloat16),
        "model.norm.weight": random.normal(size=(4,)).astype(np.float16),
        "lm_head.weight": random.normal(size=(7, 4)).astype(np.float32),
    }


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    weight_map = {}
    for shard, (name, value) in zip(SHARDS, tensors().items(), strict=True):
        save_file({name: value}, folder / shard)
        weight_map[name] = shard
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def write_single(folder: Path) -> Path:
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def one_line(folder: Path | str, *parts: str, read: str | None = None) -> None:
    act = (
        (lambda: open_checkpoint(str(folder)))
        if read is None
        else open_checkpoint(str(folder)).read
    )
    with pytest.raises(UserError) as caught:
        act(*([read] if read else []))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_tensors_come_back_bit_for_bit(tmp_path, write):
    folder = write(tmp_path / "ü 名 +1 (a)")
    (folder / "x.safetensors").write_bytes(b"stray, and no safetensors at all")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.source == str(folder)
    assert checkpoint.names() == tensors().keys()
    for name, value in tensors().items():
        got = checkpoint.read(name)
        assert checkpoint.shape(name) == got.shape == value.shape
        assert got.dtype == value.dtype
        assert got.tobytes() == value.tobytes()
    assert checkpoint.generation_config is None


@pytest.mark.parametrize("tied_head", [True, False])
def test_names_say_whether_there_is_a_head(tmp_path, tied_head):
    folder = write_single(tmp_path / "m")
    content = tensors()
    if tied_head:
        del content["lm_head.weight"]
    save_file(content, folder / "model.safetensors")
    assert ("lm_head.weight" in HuggingFaceFolder(folder).names()) != tied_head


SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
SPELLINGS = [
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}, "torch_dtype": "x"},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}, "dtype": "x"},
]


@pytest.mark.parametrize("config", SPELLINGS)
def test_configs_are_handed_over_as_they_are(tmp_path, config):
    folder = write_single(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 9], "temperature": 0.6}')
    checkpoint = HuggingFaceFolder(folder)
    assert checkpoint.config == config
    assert checkpoint.generation_config == {"eos_token_id": [1, 9], "temperature": 0.6}


def test_missing_folder_names_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_line("/no/such/dir", "does not exist", "/no/such/dir")
    one_line("./typo", "does not exist", str(tmp_path / "typo"))
    one_line("typo.gguf", "does not exist", str(tmp_path / "typo.gguf"))


def test_a_revision_is_for_the_hub(tmp_path):
    with pytest.raises(UserError, match="revision"):
        open_checkpoint(str(write_single(tmp_path / "m")), revision="v1")


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, content):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-size])


def only_bin(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def only_adapter(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def unknown_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.self_attn.q_proj.weight"] = SHARDS[1]
    (folder / INDEX).write_text(json.dumps(index))


def twice_unnamed(folder):
    for shard, (name, value) in list(zip(SHARDS, tensors().items(), strict=True))[:2]:
        save_file({name: value, "extra": value}, folder / shard)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HUGE_HEADER = struct.pack("<Q", 1 << 40) + b"{}"

FAULTS = {
    "no config": (remove("config.json"), ["config.json"]),
    "broken config": (write("config.json", '{"model_type": '), ["config.json", "JSON"]),
    "config is a list": (write("config.json", "[]"), ["config.json", "list"]),
    "lfs config": (write("config.json", LFS), ["config.json", "git-lfs"]),
    "only bin": (only_bin, ["pytorch_model.bin", "safetensors"]),
    "only an adapter": (only_adapter, ["PEFT adapter", "base model"]),
    "quantised": (
        write("config.json", '{"quantization_config": {"quant_method": "gptq"}}'),
        ["quantised", "gptq"],
    ),
    "missing shard": (remove(SHARDS[1]), [SHARDS[1], "incomplete download?"]),
    "missing index": (remove(INDEX), [SHARDS[2], INDEX, "incomplete download?"]),
    "shard cut in its data": (cut(SHARDS[1], 4), [SHARDS[1], "incomplete download?"]),
    "shard cut in its header": (cut(SHARDS[1], 50), [SHARDS[1], "incomplete download?"]),
    "empty shard": (write(SHARDS[0], b""), [SHARDS[0], "0 bytes"]),
    "huge header": (write(SHARDS[0], HUGE_HEADER), [SHARDS[0], "cut off"]),
    "header is no JSON": (write(SHARDS[0], struct.pack("<Q", 2) + b"xx"), [SHARDS[0], "header"]),
    "lfs shard": (write(SHARDS[2], LFS), [SHARDS[2], "git-lfs", "git lfs pull"]),
    "index without map": (write(INDEX, "{}"), [INDEX, "weight_map"]),
    "index names no file": (
        write(INDEX, '{"weight_map": {"a": ["b"]}}'),
        [INDEX, "name of a file"],
    ),
    "index names an absent tensor": (
        unknown_tensor,
        [SHARDS[1], "model.layers.9.self_attn.q_proj.weight"],
    ),
    "a tensor twice": (twice_unnamed, ["extra", SHARDS[0], SHARDS[1]]),
    "two sets of weights": (write("model.safetensors", b"x"), ["model.safetensors", "both"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder_is_refused_when_opened(tmp_path, fault):
    folder = write_sharded(tmp_path / "m")
    open_checkpoint(str(folder))  # whole before, so it is the damage that is found
    damage, parts = FAULTS[fault]
    damage(folder)
    one_line(folder, str(folder), *parts)


def test_an_unreadable_dtype_is_named_when_read(tmp_path):
    folder = write_single(tmp_path / "m")
    save_file(
        {"a.weight": np.zeros((2, 2), np.int8), "b.weight": np.zeros(2, ml_dtypes.float8_e4m3fn)},
        folder / "model.safetensors",
    )
    one_line(folder, "a.weight", "I8", "model.safetensors", read="a.weight")
    one_line(folder, "b.weight", "F8_E4M3", read="b.weight")


def test_no_weights_at_all(tmp_path):
    folder = write_single(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    one_line(folder, "no weights", "incomplete download?")


def test_an_unnamed_tensor_of_a_shard_is_kept(tmp_path):
    folder = write_sharded(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    save_file(
        {"model.norm.weight": tensors()["model.norm.weight"], "lm_head.weight": np.ones((7, 4))},
        folder / SHARDS[1],
    )
    (folder / INDEX).write_text(json.dumps(index))
    (folder / SHARDS[2]).unlink()
    assert "lm_head.weight" in HuggingFaceFolder(folder).names()
