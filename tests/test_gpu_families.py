"""bfloat16 on the GPU: every family is as near to float32 as transformers is in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits
from model_oracles import add_lora, loss_and_gradients, pack_rows
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
TOKENS = np.random.default_rng(0).integers(0, 1024, (4, 384))


def differences(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Mean and largest difference."""
    found = np.abs(a.astype(np.float64) - b)
    return float(found.mean()), float(found.max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_bfloat16_is_as_near_as_transformers(name, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    row = FAMILY_TABLE[name]
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim" or name != "qwen2"}
    model = save(tmp_path, row, gain=2.0, **sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def theirs(dtype: str) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval().to(device)
        with torch.no_grad():
            return model(torch.tensor(TOKENS, device=device)).logits.float().cpu().numpy()

    exact, rounded = theirs("float32"), theirs("bfloat16")
    storage = Storage(load_in_4bit=False, nested=False, compute=jnp.dtype(jnp.bfloat16))
    ours = np.asarray(logits(load(tmp_path, storage), TOKENS))
    figures = {
        "ours - fp32": differences(ours, exact),
        "transformers - fp32": differences(rounded, exact),
        "ours - transformers": differences(ours, rounded),
    }
    with capsys.disabled():
        shown = ", ".join(f"{k}: mean {m:.2e} max {x:.2e}" for k, (m, x) in figures.items())
        print(f"\n{name}: logits up to {np.abs(exact).max():.1f}; {shown}")
    assert figures["ours - fp32"][0] <= 1.02 * figures["transformers - fp32"][0]
    assert figures["ours - fp32"][1] <= 1.5 * figures["transformers - fp32"][1]
    assert figures["ours - fp32"][0] > 0  # it did run in bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_the_step_in_bfloat16(name, tmp_path):
    """Loss and LoRA gradients on NF4 weights, packed: near to those of float32 arithmetic."""
    row = FAMILY_TABLE[name]
    depth = min(6, row.config.get("num_hidden_layers", 2))  # roundings add up from layer to layer
    save(tmp_path, row, gain=2.0, num_hidden_layers=depth)
    batch = pack_rows([DOCUMENTS], 64)
    found = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        storage = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype(dtype))
        found[dtype] = loss_and_gradients(add_lora(load(tmp_path, storage)))(batch)
    (exact, gradients), (loss, rounded) = found.values()
    assert loss == pytest.approx(exact, rel=2e-2)
    assert loss != exact
    flat, wrong = (
        np.concatenate([x.ravel() for pair in g.values() for x in pair])
        for g in (gradients, rounded)
    )
    error = np.linalg.norm(wrong - flat) / np.linalg.norm(flat)
    assert 0 < error < 0.05  # a dozen roundings of 1/256 in a row, of either sign
    assert np.linalg.norm(np.roll(wrong, 1) - flat) > np.linalg.norm(flat)  # the control
