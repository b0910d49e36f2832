"""What ports of the families have been reported to get wrong, each with the wrong variant seen."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits
from model_oracles import (
    add_lora,
    edit_config,
    edit_tensors,
    largest,
    loss_and_gradients,
    pack_rows,
    their_logits,
)
from safetensors.numpy import load_file
from test_model_families import FAMILY_TABLE, SEEN, Family, save

from jaxft.errors import UserError
from jaxft.export import MergeConfig, merge
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from jaxft.model.decoder import document_positions
from jaxft.model.families import FAMILIES, read_config

torch = pytest.importorskip("torch")

TOKENS = np.random.default_rng(2).integers(0, 64, (1, 40))


def config_of(folder: Path):
    return read_config(HuggingFaceFolder(folder).config)


GEMMA3 = {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 64, "sliding_window": 4}
LINEAR = {"rope_type": "linear", "factor": 8.0}
OLD = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}
NEW = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {**LINEAR, "rope_theta": 1e6},
    }
}


@pytest.mark.parametrize("spelling", [OLD, NEW], ids=["old", "new"])
def test_gemma3_scales_global_layers_only(tmp_path, spelling):
    model = save(tmp_path, Family("Gemma3", {**GEMMA3, **NEW}, config_class="Gemma3TextConfig"))
    gone = dict.fromkeys((*OLD, *NEW, "layer_types"))
    edit_config(tmp_path, gone | spelling)
    config = config_of(tmp_path)
    assert [layer.window for layer in config.layers] == [4] * 5 + [None]
    local, world = config.layers[0].rope.inv_freq, config.layers[5].rope.inv_freq
    np.testing.assert_allclose(local[:3], [1, 0.3162278, 0.1], rtol=1e-6)
    np.testing.assert_allclose(world[:3], [0.125, 0.02223, 0.003953], rtol=1e-3)
    assert config.attention_scale == 0.125
    got = logits(load(tmp_path), TOKENS)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    everywhere = {
        "rope_parameters": {
            "sliding_attention": {**LINEAR, "rope_theta": 1e4},
            "full_attention": {**LINEAR, "rope_theta": 1e6},
        }
    }
    edit_config(tmp_path, gone | everywhere)
    assert largest(logits(load(tmp_path), TOKENS), got) > SEEN


def test_gemma2_caps_scores_logits_and_loss(tmp_path):
    """Default caps, embeddings times 50 so that they bite, in the loss as well."""
    row = Family("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 64}, embedding_gain=50.0)
    model = save(tmp_path, row)
    decoder = load(tmp_path)
    got = np.asarray(logits(decoder, TOKENS))
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    assert 20 < np.abs(got).max() <= 30
    document = TOKENS[0].tolist()
    with torch.no_grad():
        labels = torch.tensor(document[1:])
        want = torch.nn.functional.cross_entropy(
            model(torch.tensor([document])).logits[0, :-1], labels, reduction="sum"
        ).item()
    loss, _ = loss_and_gradients(add_lora(decoder, targets=("q_proj",)))(
        pack_rows([[document]], 64)
    )
    base, _ = loss_and_gradients(_at_zero(load(tmp_path)))(pack_rows([[document]], 64))
    assert base == pytest.approx(want, rel=1e-5)
    assert abs(loss - want) > SEEN
    edit_config(tmp_path, {"final_logit_softcapping": 1e6})
    uncapped, _ = loss_and_gradients(_at_zero(load(tmp_path)))(pack_rows([[document]], 64))
    assert abs(uncapped - want) > 1


def _at_zero(decoder):
    """With adapters that add nothing."""
    from jaxft.lora import add_adapters
    from jaxft.lora_config import LoraConfig

    add_adapters(decoder, LoraConfig(1, 1.0, 0.0, ("q_proj",), False), 0)
    return decoder


def test_heads_of_their_own_size_and_their_norms(tmp_path):
    """Qwen 3: shapes follow head_dim, and q_norm and k_norm are used and kept."""
    row = Family("Qwen3", {"head_dim": 16})
    model = save(tmp_path / "base", row)
    folder = tmp_path / "base"
    config = config_of(folder)
    shapes = {path.split(".")[1]: shape for path, shape in config.projections.items()}
    assert (shapes["q_proj"], shapes["o_proj"], shapes["k_proj"]) == ((64, 32), (32, 64), (32, 32))
    decoder = add_lora(load(folder))
    arrays = adapter_arrays(decoder)
    a, b = arrays["model.layers.0.self_attn.q_proj"]
    assert (a.shape, b.shape) == ((4, 32), (64, 4))
    a, b = arrays["model.layers.0.self_attn.o_proj"]
    assert (a.shape, b.shape) == ((4, 64), (32, 4))
    got = logits(load(folder), TOKENS)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    names = tuple(shapes)
    adapter = AdapterConfig(4, 6.0, 0.0, names, False, base_model_name_or_path=str(folder))
    save_adapter(tmp_path / "adapter", adapter, arrays)
    merge(MergeConfig(adapter=str(tmp_path / "adapter"), output_dir=str(tmp_path / "merged")))
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "merged"))
    norms = [name for name in before if "q_norm" in name or "k_norm" in name]
    assert len(norms) == 4
    for name in norms:
        assert before[name].tobytes() == after[name].tobytes()
    edit_tensors(folder, lambda t: [t[name].fill(1) for name in norms])
    assert largest(logits(load(folder), TOKENS), got) > SEEN


@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_what_a_class_assumes_where_a_key_is_absent(name):
    """Defaults are transformers' own, for every key that a family reads."""
    import transformers

    row = FAMILY_TABLE[name]
    config_class = getattr(transformers, row.config_class or f"{row.name}Config")
    whole = json.loads(config_class().to_json_string(use_diff=False))
    needed = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    least = {"model_type": whole["model_type"], **{key: whole[key] for key in needed}}
    assert read_config(least) == read_config(whole)
    assert read_config(least | {"rms_norm_eps": 0.5}) != read_config(whole)


@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_a_tensor_left_out_is_named(name, tmp_path):
    """Of every kind that the family has; never one at random."""
    save(tmp_path, FAMILY_TABLE[name])
    names = sorted(load_file(tmp_path / "model.safetensors"))
    kinds = {n.split(".", 3)[-1]: n for n in names if ".layers.1." in n}
    outer = [n for n in names if ".layers." not in n]
    for lost in (*kinds.values(), *outer):
        kept: dict = {}
        edit_tensors(tmp_path, lambda t, n=lost, k=kept: k.update({n: t.pop(n)}))
        with pytest.raises(UserError, match=lost.replace(".", r"\.")):
            load(tmp_path)
        edit_tensors(tmp_path, lambda t, k=kept: t.update(k))
    load(tmp_path)


def test_a_layer_type_of_its_own_is_honoured(tmp_path):
    """`layer_types` decides where it is given, and one that the class lacks is refused."""
    row = Family("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0})
    model = save(tmp_path, row)
    both = ["sliding_attention"] * 2
    assert [layer.window for layer in config_of(tmp_path).layers] == [4, 4]
    got = logits(load(tmp_path), TOKENS)
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    edit_config(tmp_path, {"layer_types": ["full_attention", both[0]]})
    assert [layer.window for layer in config_of(tmp_path).layers] == [None, 4]
    other = logits(load(tmp_path), TOKENS)
    from model_oracles import open_in_transformers

    assert largest(other, their_logits(open_in_transformers(tmp_path), TOKENS)) < 1e-4
    assert largest(other, got) > SEEN
    edit_config(tmp_path, {"layer_types": ["chunked_attention", both[0]]})
    with pytest.raises(UserError, match="'chunked_attention' is not supported"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]},
        {"model_type": "bert"},
        {},
    ],
)
def test_other_families_are_refused_in_one_line(config):
    with pytest.raises(UserError) as caught:
        read_config(config)
    message = str(caught.value)
    assert "\n" not in message
    assert f"model_type {config.get('model_type')!r}" in message
    for name in FAMILIES:
        assert name in message


def test_a_classifier_is_refused():
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}
    with pytest.raises(UserError, match=r"Qwen2ForSequenceClassification.*ForCausalLM"):
        read_config(config)


@pytest.mark.parametrize("name", FAMILY_TABLE)
def test_positions_keep_their_precision_in_bfloat16(name, tmp_path, monkeypatch):
    """The difference to float32 does not grow with the position; with coarse positions it does."""
    from jaxft.quant import Storage

    row = FAMILY_TABLE[name]
    save(tmp_path, row, max_position_embeddings=1024, **_no_window(name))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 600))
    exact = np.asarray(logits(load(tmp_path), tokens))
    half = Storage(load_in_4bit=False, nested=False, compute=jnp.dtype(jnp.bfloat16))

    def growth() -> float:
        errors = np.abs(np.asarray(logits(load(tmp_path, half), tokens)) - exact).mean((0, 2))
        assert errors.min() > 0
        return errors[-100:].mean() / errors[:100].mean()

    fine = growth()
    assert fine < 2
    monkeypatch.setattr(
        "jaxft.model.decoder.document_positions",
        lambda segments: document_positions(segments).astype(jnp.bfloat16).astype(jnp.int32),
    )
    assert growth() > 1.5 * fine


def _no_window(name: str) -> dict:
    """Windows as long as the text, so that far positions matter."""
    return {} if name in ("llama", "qwen3", "gemma") else {"sliding_window": 600}
