"""Adapters: PEFT loads ours without a missing or unexpected key and computes what we mean."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxft.errors import UserError
from jaxft.formats.modelcard import write_model_card
from jaxft.formats.peft import AdapterConfig, load_adapter, save_adapter

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MLP = ("down_proj", "gate_proj", "up_proj")
SHAPES = {  # [out, in]
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


def adapter(r=4, alpha=8.0, rslora=False, targets=ATTENTION + MLP, base="org/base"):
    random = np.random.default_rng(2)
    adapters = {
        f"model.layers.{layer}.{name}": (
            random.normal(size=(r, n_in)).astype(np.float32) / 8,
            random.normal(size=(n_out, r)).astype(np.float32) / 8,
        )
        for layer in range(2)
        for name, (n_out, n_in) in SHAPES.items()
        if name.split(".")[1] in targets
    }
    names = tuple(sorted(targets))
    config = AdapterConfig(r, alpha, 0.0, names, rslora, base_model_name_or_path=base)
    return config, adapters


def tiny_llama():
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # the default weights are so small that faults hardly show
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits.numpy()


def merged_logits(adapters, scale) -> np.ndarray:
    import torch

    model = tiny_llama()
    with torch.no_grad():
        for path, (a, b) in adapters.items():
            delta = scale * (b.astype(np.float64) @ a.astype(np.float64))
            model.get_submodule(path).weight += torch.from_numpy(delta.astype(np.float32))
    return logits(model)


# r, alpha, rsLoRA, scale by hand
SCALES = [
    (4, 8.0, False, 2.0),
    (16, 16.0, True, 4.0),
    (16, 0.5, False, 0.03125),
    (16, 16.0, False, 1.0),
]


@pytest.mark.parametrize(("r", "alpha", "rslora", "scale"), SCALES)
def test_peft_computes_base_plus_scaled_product(tmp_path, r, alpha, rslora, scale):
    model = tiny_llama()
    from peft import PeftModel

    config, adapters = adapter(r, alpha, rslora)
    assert config.scale_of("model.layers.0.mlp.up_proj") == scale
    save_adapter(tmp_path, config, adapters)
    base = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(model, tmp_path)
    lora = [module for module in loaded.modules() if hasattr(module, "lora_A")]
    assert [module.scaling for module in lora] == [{"default": scale}] * 14
    got = logits(loaded)
    np.testing.assert_allclose(got, merged_logits(adapters, scale), atol=1e-4)
    assert np.abs(got - base).max() > 1e-2
    assert np.abs(got - merged_logits(adapters, 4 * scale)).max() > 1e-2


@pytest.mark.parametrize("targets", [ATTENTION + MLP, ("q_proj", "v_proj")])
def test_peft_finds_every_key_and_no_other(tmp_path, targets):
    model = tiny_llama()
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    save_adapter(tmp_path, *adapter(targets=targets))
    peft_config = LoraConfig.from_pretrained(tmp_path)
    peft_model = get_peft_model(model, peft_config)
    weights = load_peft_weights(str(tmp_path), device="cpu")
    assert weights.keys() == get_peft_model_state_dict(peft_model).keys()
    result = set_peft_model_state_dict(peft_model, weights)
    assert result.unexpected_keys == []
    assert [key for key in result.missing_keys if "lora_" in key] == []
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for key, value in get_peft_model_state_dict(peft_model).items():
        assert stored[key].tobytes() == value.detach().numpy().tobytes()


def test_a_wrong_prefix_is_seen(tmp_path):
    """The control of the two tests above, and our own reader's refusal."""
    model = tiny_llama()
    from peft import PeftModel

    save_adapter(tmp_path, *adapter())
    path = tmp_path / "adapter_model.safetensors"
    wrong = {key.removeprefix("base_model.model."): v for key, v in load_file(path).items()}
    save_file(wrong, path)
    base = logits(model)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        loaded = PeftModel.from_pretrained(model, tmp_path)
    np.testing.assert_array_equal(logits(loaded), base)
    with pytest.raises(UserError, match=r"lora_A\.weight is no LoRA matrix"):
        load_adapter(tmp_path)


def test_files_are_minimal_and_complete(tmp_path):
    config, adapters = adapter(r=16, alpha=0.5, rslora=True, base="./a/ü local")
    config = replace(config, target_modules=tuple(reversed(config.target_modules)))
    save_adapter(tmp_path / "new" / "run", config, adapters)
    folder = tmp_path / "new" / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    raw = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": 16,
        "lora_alpha": 0.5,
        "lora_dropout": 0.0,
        "use_rslora": True,
        "inference_mode": True,
        "base_model_name_or_path": "./a/ü local",
        "target_modules": [*MLP[:2], "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    }
    assert {key: raw[key] for key in expected} == expected
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        a = file.get_tensor("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight")
        b = file.get_tensor("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight")
        assert len(file.keys()) == 28
    assert (a.dtype, a.shape, b.dtype, b.shape) == (np.float32, (16, 48), np.float32, (32, 16))


def test_an_integral_alpha_is_written_as_an_integer(tmp_path):
    save_adapter(tmp_path, *adapter(alpha=16.0))
    assert '"lora_alpha": 16,' in (tmp_path / "adapter_config.json").read_text()
    assert load_adapter(tmp_path)[0].lora_alpha == 16.0


def test_what_is_saved_is_loaded(tmp_path):
    config, adapters = adapter(alpha=0.1, rslora=True)
    transposed = {path: (a.T.copy().T, b.T.copy().T) for path, (a, b) in adapters.items()}
    save_adapter(tmp_path, config, transposed)  # not contiguous
    got_config, got = load_adapter(tmp_path)
    assert got_config == config
    assert got.keys() == adapters.keys()
    for path, (a, b) in adapters.items():
        np.testing.assert_array_equal(got[path][0], a)
        np.testing.assert_array_equal(got[path][1], b)
    assert config.scale_of("model.layers.0.mlp.up_proj") == pytest.approx(0.1 / math.sqrt(4))


def test_peft_files_are_loaded(tmp_path):
    model = tiny_llama()
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM"
    )
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    peft_model.save_pretrained(tmp_path)
    got_config, got = load_adapter(tmp_path)
    assert got_config == AdapterConfig(4, 8.0, 0.0, ("q_proj", "v_proj"), False)
    np.testing.assert_allclose(merged_logits(got, 2.0), logits(peft_model), atol=1e-4)


def test_sixteen_bit_adapters_come_as_float32(tmp_path):
    save_adapter(tmp_path, *adapter())
    path = tmp_path / "adapter_model.safetensors"
    halves = {key: value.astype(ml_dtypes.bfloat16) for key, value in load_file(path).items()}
    save_file(halves, path)
    for a, b in load_adapter(tmp_path)[1].values():
        assert a.dtype == b.dtype == np.float32


@pytest.mark.parametrize("fault", ["rank", "targets", "nothing"])
def test_an_adapter_that_does_not_fit_leaves_no_file(tmp_path, fault):
    config, adapters = adapter()
    if fault == "rank":
        config = replace(config, r=5)
    elif fault == "targets":
        config = replace(config, target_modules=("q_proj",))
    else:
        adapters = {}
    with pytest.raises(ValueError):
        save_adapter(tmp_path, config, adapters)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_adapter(tmp_path, monkeypatch):
    save_adapter(tmp_path, *adapter())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config, adapters = adapter(alpha=3.0)

    def spoiled(tensors, path, metadata):
        key = next(iter(tensors))
        save_file({**tensors, key: tensors[key] + np.float32(1e-7)}, path, metadata=metadata)

    monkeypatch.setattr("jaxft.formats.peft.save_file", spoiled)
    with pytest.raises(RuntimeError, match="read back"):
        save_adapter(tmp_path, config, adapters)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def edit_config(**changes):
    def edit(folder: Path):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_tensors(change):
    def edit(folder: Path):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def add_tensor(name):
    return edit_tensors(lambda tensors: tensors.update({name: np.ones((4, 4), np.float32)}))


Q = "base_model.model.model.layers.0.self_attn.q_proj"
FAULTS = {
    "not lora": (edit_config(peft_type="IA3"), ["peft_type IA3"]),
    "task": (edit_config(task_type="SEQ_CLS"), ["task_type SEQ_CLS"]),
    "dora": (edit_config(use_dora=True), ["use_dora"]),
    "bias": (edit_config(bias="all"), ["bias", "all"]),
    "ranks": (edit_config(rank_pattern={"q_proj": 2}), ["q_proj", "has not r 2"]),
    "rank of a pattern": (edit_config(rank_pattern={"q_proj": 0}), ["q_proj", "positive"]),
    "pattern": (edit_config(alpha_pattern={"(": 2.0}), ["alpha_pattern", "regular expression"]),
    "no patterns": (edit_config(alpha_pattern=["q_proj"]), ["alpha_pattern", "an object"]),
    "alphas": (edit_config(alpha_pattern={"q_proj": None}), ["q_proj", "a number"]),
    "no targets": (edit_config(target_modules=None), ["target_modules", "None"]),
    "layers": (edit_config(layers_to_transform=["1"]), ["layers_to_transform", "'1'"]),
    "regular expression": (edit_config(target_modules=".*q_proj"), ["down_proj", "no target"]),
    "modules": (edit_config(modules_to_save=["lm_head"]), ["modules_to_save", "lm_head"]),
    "future option": (edit_config(use_new_thing=True), ["use_new_thing"]),
    "pissa": (edit_config(init_lora_weights="pissa"), ["init_lora_weights pissa"]),
    "rank": (edit_config(r=8), ["r 8", "lora_"]),
    "no rank": (edit_config(r=None), ["r must be"]),
    "alpha": (edit_config(lora_alpha="x"), ["lora_alpha", "'x'"]),
    "absent target": (edit_config(target_modules=["q_proj", "x_proj"]), ["x_proj"]),
    "unnamed module": (edit_config(target_modules=["q_proj"]), ["no target module"]),
    "base tensor": (add_tensor("lm_head.weight"), ["lm_head.weight"]),
    "magnitude": (add_tensor(f"{Q}.lora_magnitude_vector"), ["lora_magnitude_vector"]),
    "half a pair": (edit_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), ["q_proj", "lora_B"]),
    "empty": (edit_tensors(lambda t: t.clear()), ["no LoRA matrices"]),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), ["adapter_config.json"]),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), ["adapter_model"]),
    "cut": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"),
        ["adapter_model.safetensors", "incomplete"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_stay_unused_is_refused(tmp_path, fault):
    save_adapter(tmp_path, *adapter())
    load_adapter(tmp_path)
    damage, parts = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        load_adapter(tmp_path)
    assert "\n" not in str(caught.value)
    for part in [str(tmp_path), *parts]:
        assert part in str(caught.value)


def test_missing_adapter_folder(tmp_path):
    with pytest.raises(UserError, match="adapter folder does not exist"):
        load_adapter(tmp_path / "absent")


def front_matter(folder: Path) -> dict:
    import yaml

    _, front, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return {**yaml.safe_load(front), "body": body}


def test_model_card_on_a_hub_model(tmp_path):
    summary = {"learning_rate": 2e-4, "note": "a|b\nc ü", "rows": 300}
    write_model_card(tmp_path / "run", base_model="org/base-1", summary=summary)
    card = front_matter(tmp_path / "run")
    assert (card["base_model"], card["library_name"]) == ("org/base-1", "peft")
    assert "lora" in card["tags"]
    assert "| learning_rate | 0.0002 |" in card["body"]
    assert "| note | a\\|b c ü |" in card["body"]
    assert "from_pretrained('org/base-1')" in card["body"]
    assert "local path" not in card["body"]


@pytest.mark.parametrize("base", ["./models/a b", "/data/m", "m.gguf"])
def test_model_card_on_a_local_model(tmp_path, base):
    write_model_card(tmp_path, base_model=base, summary={})
    card = front_matter(tmp_path)
    assert "base_model" not in card
    assert base in card["body"]
    assert "local path" in card["body"]
