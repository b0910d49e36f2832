"""What the Triton path reads: shards, names of classes with vision, NF4 folders, adapters."""

import json
from pathlib import Path

import pytest
import torch
from nf4_files import quantise_folder
from safetensors.torch import load_file, save_file
from test_model_families import FAMILY_TABLE, save
from test_triton_model import load

from triton_ref.adapter import load_adapter
from triton_ref.checkpoint import Folder
from triton_ref.kernels import nf4
from triton_ref.kernels.launch import check_device
from triton_ref.names import text_path

FILE = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    save(tmp_path, FAMILY_TABLE["llama"])
    return tmp_path


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The file's tensors, which stay what they are when it is written anew."""
    return {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}


def renamed(folder: Path, rename) -> None:
    """The tensors under other names."""
    tensors = stored(folder)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / FILE)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    opened = Folder(folder)
    names = [text_path(name) for name in load_file(folder / FILE)]
    return {name: opened.dense(name).clone() for name in names}


def test_shards(folder):
    want = stored(folder)
    names = sorted(want)
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: want[n] for n in names if places[n] == file}, folder / file)
    (folder / FILE).write_bytes(b"not read: the index says what is")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    opened = Folder(folder)
    assert all(torch.equal(opened.dense(name), want[name]) for name in names)
    assert "model.layers.9.mlp.up_proj.weight" not in opened
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1"):
        Folder(folder)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_names_of_classes_with_vision(prefix, folder):
    """Of transformers before and after 4.52; the head stays or moves with the rest."""
    want = everything(folder)

    def deeper(name: str) -> str:
        if prefix == "language_model.":
            return prefix + name
        return name.replace("model.", prefix, 1)

    renamed(folder, deeper)
    assert Q_PROJ not in load_file(folder / FILE)
    got = everything(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert text_path("model.vision_tower.layers.0") == "model.vision_tower.layers.0"


def test_codes_are_kept_and_so_are_layers_in_more_bits(folder):
    dense = stored(folder)
    quantise_folder(folder, dense=("layers.1.",), plain=("v_proj",))
    opened = Folder(folder)
    codes = stored(folder)
    assert opened.quantized
    decoder = load(folder, {}, load_in_4bit=True)
    for projection in decoder.projections():
        name, weight = f"{projection.path}.weight", projection.weight
        if "layers.1." in name:
            assert isinstance(weight, torch.Tensor)
            assert torch.equal(weight.cpu(), dense[name])
        else:
            assert isinstance(weight, nf4.NF4)
            assert torch.equal(weight.codes.cpu(), codes[name].view(-1))
            assert weight.nested is ("v_proj" not in name)
            error = (projection.dense(torch.float32).cpu() - dense[name]).abs().max()
            assert 0 < error < 0.2 * dense[name].abs().max()


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters(tmp_path):
    """Scales as PEFT has them, by rank, pattern and kind."""
    start = "base_model.model.model.language_model.layers"
    tensors = {}
    for layer, rank in ((0, 4), (1, 2)):
        tensors[f"{start}.{layer}.self_attn.q_proj.lora_A.weight"] = torch.ones(rank, 8)
        tensors[f"{start}.{layer}.self_attn.q_proj.lora_B.weight"] = torch.ones(8, rank)
    pattern = {"layers.1.self_attn.q_proj": 10}
    for rslora, scales in ((False, [6 / 4, 10 / 2]), (True, [6 / 2, 10 / 2**0.5])):
        pairs = load_adapter(adapter(tmp_path, tensors, alpha_pattern=pattern, use_rslora=rslora))
        assert list(pairs) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
        assert [pair.scale for pair in pairs.values()] == pytest.approx(scales)
    alone = dict(list(tensors.items())[:1])
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj has one of lora_A and"):
        load_adapter(adapter(tmp_path, alone))
    with pytest.raises(ValueError, match=r"tensor \S+q_proj\.bias is no LoRA matrix"):
        load_adapter(adapter(tmp_path, {f"{start}.0.self_attn.q_proj.bias": torch.ones(8)}))
    config = {"peft_type": "IA3", "feedforward_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is of type .*IA3, not LORA"):
        load_adapter(tmp_path)


def test_devices():
    here, nowhere = torch.zeros(1), torch.zeros(1, device="meta")
    check_device()
    with pytest.raises(ValueError, match="tensors on several devices: cpu, meta"):
        check_device(here, nowhere)
