"""The text part of a Gemma 3 with vision: names, adapters and merging beside the other parts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import load, logits
from model_oracles import add_lora, edit_config, largest, their_logits
from safetensors.numpy import load_file
from test_model_families import FAMILY_TABLE, SEEN, TOKENS

from jaxft.errors import UserError
from jaxft.export import MergeConfig, import_adapter, merge
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from jaxft.lora_config import adapted_modules, exact_targets, read_targets
from jaxft.model.families import read_config

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PREFIX = "model.language_model.layers."


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tiny_torch import SMALL

    text = SMALL | FAMILY_TABLE["gemma3_text"].config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(6) if parameter.ndim > 1 else parameter.add_(0.1)
            assert torch.isfinite(parameter).all(), name
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    return folder


def open_all(folder: Path):
    """transformers' whole model: what its tools load for such a folder."""
    auto = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    assert type(auto).__name__ == "Gemma3ForConditionalGeneration"
    return auto


def test_logits(folder, tmp_path):
    got = logits(load(folder), TOKENS)
    assert largest(got, their_logits(open_all(folder), TOKENS)) < 1e-4
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(wrong, {"text_config": {**text, "query_pre_attn_scalar": 16}})
    assert largest(logits(load(wrong), TOKENS), got) > SEEN


def test_the_other_spelling_of_names(folder, tmp_path):
    """Files name tensors by an older structure or by today's; both are the same model."""
    from safetensors.numpy import save_file

    stored = load_file(folder / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in stored)
    today = {}
    for name, value in stored.items():
        for old, new in (
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ):
            if name.startswith(old):
                today[new + name.removeprefix(old)] = value
    assert len(today) == len(stored)
    other = shutil.copytree(folder, tmp_path / "other")
    save_file(today, other / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(logits(load(other), TOKENS), logits(load(folder), TOKENS))
    assert HuggingFaceFolder(other).names() == HuggingFaceFolder(folder).names()


def test_a_text_tensor_left_out_is_named(folder, tmp_path):
    from model_oracles import edit_tensors

    broken = shutil.copytree(folder, tmp_path / "broken")
    name = "language_model.model.layers.3.mlp.up_proj.weight"
    edit_tensors(broken, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=r"model\.language_model\.layers\.3\.mlp\.up_proj"):
        load(broken)
    extra = shutil.copytree(folder, tmp_path / "extra")
    edit_tensors(extra, lambda tensors: tensors.update({"audio.weight": np.ones(3, np.float32)}))
    with pytest.raises(UserError, match=r"audio\.weight has no place"):
        load(extra)


def adapter(folder: Path, target: Path):
    """Our decoder with random adapters, saved as an adapter."""
    model = read_config(HuggingFaceFolder(folder).config)
    names = read_targets(("q_proj", "v_proj", "down_proj"), model)
    config = AdapterConfig(4, 6.0, 0.0, names, False, base_model_name_or_path=str(folder))
    config = exact_targets(config, model)
    decoder = add_lora(load(folder), targets=config.target_modules)
    save_adapter(target, config, adapter_arrays(decoder))
    return decoder, config, model


def test_adapters_stay_out_of_the_vision_part(folder, tmp_path):
    """PEFT finds every key and no other, and has adapters in the text part alone."""
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    decoder, config, model = adapter(folder, tmp_path)
    assert all(path.startswith(PREFIX) for path in adapter_arrays(decoder))
    theirs = peft.PeftModel.from_pretrained(open_all(folder), tmp_path)
    weights = load_peft_weights(str(tmp_path), device="cpu")
    result = set_peft_model_state_dict(theirs, weights)
    assert result.unexpected_keys == []
    assert [key for key in result.missing_keys if "lora_" in key] == []
    adapted = [n for n, m in theirs.base_model.model.named_modules() if hasattr(m, "lora_A")]
    assert sorted(adapted) == sorted(adapted_modules(config, model))
    got = logits(decoder, TOKENS)
    assert largest(got, their_logits(theirs, TOKENS)) < 1e-4
    with theirs.disable_adapter():
        assert largest(got, their_logits(theirs, TOKENS)) > SEEN
    again = load(folder)
    import_adapter(tmp_path, again)
    np.testing.assert_array_equal(logits(again, TOKENS), got)
    # the control: bare names are the vision part's too
    bare = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrong = peft.get_peft_model(open_all(folder), bare).base_model.model
    assert any("vision" in n for n, m in wrong.named_modules() if hasattr(m, "lora_A"))


def test_merged_keeps_the_other_parts(folder, tmp_path):
    decoder, config, _ = adapter(folder, tmp_path / "adapter")
    merge(MergeConfig(adapter=str(tmp_path / "adapter"), output_dir=str(tmp_path / "merged")))
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    targets = {
        f"language_model.model.{path.removeprefix('model.language_model.')}.weight"
        for path in config.target_modules
    }
    assert changed == targets
    got = logits(decoder, TOKENS)
    assert largest(got, their_logits(open_all(tmp_path / "merged"), TOKENS)) < 1e-4
    assert largest(got, logits(load(tmp_path / "merged"), TOKENS)) < 1e-4
