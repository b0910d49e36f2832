"""bfloat16 on the GPU: every family is as near to float32 as transformers is in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits
from model_oracles import (
    add_lora,
    in_peft,
    loss_and_gradients,
    open_in_transformers,
    pack_rows,
    peft_loss_and_gradients,
    write_dense_weights,
)
from test_model_families import DOCUMENTS, FAMILY_TABLE, save

from jaxft.quant import Storage

torch = pytest.importorskip("torch")

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
}
TOKENS = np.random.default_rng(0).integers(0, 1024, (12, 4, 384))  # twelve batches


def differences(a: list[np.ndarray], b: list[np.ndarray]) -> tuple[float, float]:
    """Mean difference, and the mean over the batches of the largest: one alone is a chance draw."""
    found = [np.abs(x.astype(np.float64) - y) for x, y in zip(a, b, strict=True)]
    return float(np.mean([x.mean() for x in found])), float(np.mean([x.max() for x in found]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_logits_are_as_near_as_transformers(name, tmp_path, capsys):
    row = FAMILY_TABLE[name]
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim" or name != "qwen2"}
    model = save(tmp_path, row, gain=2.0, **sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def by_transformers(dtype: str) -> list[np.ndarray]:
        model = open_in_transformers(tmp_path, dtype).to(device)
        with torch.no_grad():
            return [
                model(torch.tensor(x, device=device)).logits.float().cpu().numpy() for x in TOKENS
            ]

    exact, rounded = by_transformers("float32"), by_transformers("bfloat16")
    storage = Storage(load_in_4bit=False, nested=False, compute=jnp.dtype(jnp.bfloat16))
    decoder = load(tmp_path, storage)
    ours = [np.asarray(logits(decoder, x)) for x in TOKENS]
    figures = {
        "ours - fp32": differences(ours, exact),
        "transformers - fp32": differences(rounded, exact),
        "ours - transformers": differences(ours, rounded),
    }
    with capsys.disabled():
        shown = ", ".join(f"{k}: mean {m:.2e} max {x:.2e}" for k, (m, x) in figures.items())
        print(f"\n{name}: logits up to {max(np.abs(x).max() for x in exact):.1f}; {shown}")
    assert figures["ours - fp32"][0] <= figures["transformers - fp32"][0]
    assert figures["ours - fp32"][1] <= figures["transformers - fp32"][1]
    assert figures["ours - fp32"][0] > 0  # it did run in bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_the_step_is_as_near_as_pefts(name, tmp_path, capsys):
    """LoRA gradients on NF4 weights, packed, against float32, beside PEFT's in bfloat16.

    Both are draws of rounding noise, so ours may be half as far again.
    """
    pytest.importorskip("peft")
    save(tmp_path, FAMILY_TABLE[name], gain=2.0)

    def ours(dtype) -> dict:
        storage = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype(dtype))
        return loss_and_gradients(add_lora(load(tmp_path, storage)))(pack_rows([DOCUMENTS], 64))[1]

    fp32 = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype(jnp.float32))
    decoder = add_lora(load(tmp_path, fp32))
    model = in_peft(write_dense_weights(open_in_transformers(tmp_path), decoder), decoder)
    _, exact = peft_loss_and_gradients(model, DOCUMENTS)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" not in parameter_name:
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, rounded = peft_loss_and_gradients(model, DOCUMENTS)
    figures = {
        "ours in float32": distance(ours(jnp.float32), exact),
        "ours": distance(ours(jnp.bfloat16), exact),
        "PEFT": distance(rounded, exact),
    }
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{k} {v:.2e}" for k, v in figures.items()))
    assert 1e-4 < figures["ours"] <= 1.5 * figures["PEFT"]
    assert figures["ours in float32"] < 1e-4


def distance(one: dict, other: dict) -> float:
    """Length of the difference of two sets of gradients, by that of the second."""
    a, b = (
        np.concatenate([np.ravel(x) for path in sorted(g) for x in g[path]]) for g in (one, other)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
