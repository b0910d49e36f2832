"""The torch decoder of every family against transformers and PEFT, float32, on tiny models."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_oracles import (
    PROJECTIONS,
    Gradients,
    open_in_transformers,
    pack_rows,
    peft_loss_and_gradients,
    relative,
)
from test_model_families import DOCUMENTS, FAMILY_TABLE, RUN_ON, save

from triton_ref.adapter import Pair, load_adapter
from triton_ref.checkpoint import Folder
from triton_ref.config import read_config
from triton_ref.kernels.launch import interpreted
from triton_ref.model import Decoder, load_decoder
from triton_ref.ops import DEFINITIONS, KERNELS, Ops
from triton_ref.packing import unpad

DEVICE = torch.device("cpu" if interpreted() else "cuda")


def load(folder: Path, pairs: dict[str, Pair], ops: Ops = KERNELS, **how) -> Decoder:
    how = {"dtype": torch.float32, "device": DEVICE, "load_in_4bit": False} | how
    return load_decoder(Folder(folder), read_config(folder, 64), pairs, ops=ops, **how)


def their_adapter(folder: Path):
    """transformers' model under PEFT with random A and B."""
    import peft

    torch.manual_seed(0)
    targets = list(PROJECTIONS)
    config = peft.LoraConfig(
        r=4, lora_alpha=6.0, target_modules=targets, alpha_pattern={"q_proj": 3}
    )
    model = peft.get_peft_model(open_in_transformers(folder), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model


def gradients(decoder: Decoder) -> Gradients:
    return {
        name: tuple(p.grad.cpu().numpy() for p in pair) for name, pair in decoder.adapters().items()
    }


def packed(rows: list[list[list[int]]], length: int):
    batch = {n: torch.tensor(array, device=DEVICE) for n, array in pack_rows(rows, length).items()}
    return unpad(batch["tokens"], batch["segment_ids"], batch["targets"])


@pytest.mark.parametrize("ops", [DEFINITIONS, KERNELS], ids=["definitions", "kernels"])
@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_loss_and_gradients(name, ops, tmp_path):
    """Documents packed in two rows with padding, against PEFT that sees each alone."""
    save(tmp_path, FAMILY_TABLE[name])
    model = their_adapter(tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    decoder = load(tmp_path, load_adapter(tmp_path / "adapter"), ops)
    loss = decoder.losses(packed([DOCUMENTS[:3], DOCUMENTS[3:]], 48)).sum()
    loss.backward()
    their_loss, want = peft_loss_and_gradients(model, DOCUMENTS)
    assert loss.item() == pytest.approx(their_loss, rel=1e-5)
    assert relative(gradients(decoder), want) < 1e-4
    run_on, other = peft_loss_and_gradients(model, [RUN_ON])  # the control
    assert abs(loss.item() - run_on) > 1e-1
    assert relative(gradients(decoder), other) > 1e-2


def test_unpad():
    rows = pack_rows([[[5, 6, 7], [8]], [[9], [1, 2]]], 6)
    got = unpad(*(torch.tensor(rows[n]) for n in ("tokens", "segment_ids", "targets")))
    assert got.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert got.positions.tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert got.targets.tolist() == [6, 7, -1, -1, -1, 2, -1]
    assert got.cu_seqlens.tolist() == [0, 3, 4, 5, 7]
    assert got.max_seqlen == 3
    empty = unpad(*(torch.zeros(1, 4, dtype=torch.int32),) * 3)
    assert (len(empty.tokens), empty.cu_seqlens.tolist(), empty.max_seqlen) == (0, [0], 0)


@pytest.mark.parametrize("kind", ["llama3", "linear", "dynamic", "yarn", "longrope"])
def test_rope_is_that_of_transformers(kind, tmp_path):
    """Frequencies as transformers' own module has them once it has seen a text of that length."""
    import transformers

    more = {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
    }.get(kind, {})
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more
    if kind not in ("linear", "dynamic"):
        rope["original_max_position_embeddings"] = 32
    row = FAMILY_TABLE["llama"]
    save(tmp_path, row, rope_parameters=rope, max_position_embeddings=128, head_dim=16)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    length = 256 if kind == "dynamic" else 128
    module(torch.zeros(1, length, 16), torch.arange(length)[None])
    layer = read_config(tmp_path, length).layers[0]
    torch.testing.assert_close(layer.inv_freq, module.inv_freq.float(), rtol=1e-6, atol=0)
    assert layer.attention_factor == pytest.approx(module.attention_scaling)
    plain = 1 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert (layer.inv_freq - plain).abs().max() > 1e-3


def test_what_is_not_there_is_named(tmp_path):
    save(tmp_path, FAMILY_TABLE["llama"])
    pair = Pair(torch.zeros(2, 4), torch.zeros(4, 2), 1.0)
    with pytest.raises(ValueError, match=r"module model\.layers\.9\.mlp\.up_proj is none"):
        load(tmp_path, {"model.layers.9.mlp.up_proj": pair})
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "nowhere")
    other = shutil.copytree(tmp_path, tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"llama"', '"gpt2"'))
    with pytest.raises(ValueError, match="model_type 'gpt2' is not one of llama"):
        read_config(other, 64)


def test_16_bit_is_near(tmp_path):
    """bfloat16: near float32, and not equal to it."""
    save(tmp_path, FAMILY_TABLE["qwen3"], gain=2.0)
    their_adapter(tmp_path).save_pretrained(tmp_path / "adapter")
    pairs = load_adapter(tmp_path / "adapter")
    rows = packed([DOCUMENTS], 48)
    exact, near = (
        load(tmp_path, pairs, dtype=dtype, load_in_4bit=True).losses(rows).detach().cpu().numpy()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 1e-4 < np.abs(exact - near).max() < 0.1
