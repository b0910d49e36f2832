"""Which projections get an adapter, of which rank and scale: as PEFT reads the same options."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import load, logits, save_llama
from model_oracles import largest, open_in_transformers, their_logits

from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.export import import_adapter
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.peft import AdapterConfig, load_adapter, save_adapter
from jaxft.lora import adapter_arrays, add_adapters, set_adapter_arrays
from jaxft.lora_config import adapted_modules, count_parameters, read_targets
from jaxft.model.config import read_config

peft = pytest.importorskip("peft")

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20))
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fixtures):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(fixtures, folder, num_hidden_layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return read_config(HuggingFaceFolder(folder).config)


def lora(model, targets, **options) -> AdapterConfig:
    names = read_targets((targets,) if isinstance(targets, str) else targets, model)
    return AdapterConfig(4, 8.0, 0.0, names, options.pop("use_rslora", False), **options)


def randomised(decoder):
    random = np.random.default_rng(3)
    filled = {
        name: (a, (random.normal(size=b.shape) / 4).astype(np.float32))
        for name, (a, b) in adapter_arrays(decoder).items()
    }
    set_adapter_arrays(decoder, filled)
    return decoder


# What is asked of us, and the same for PEFT's LoraConfig.
Q0 = "model.layers.0.self_attn.q_proj"
SELECTIONS = {
    "names": (("q_proj", "down_proj"), {}),
    "one name": ("v_proj", {}),
    "longer names": (("self_attn.o_proj", Q0, "layers.2.mlp.up_proj"), {}),
    "regex": (r".*\.[02]\.self_attn\.(q|v)_proj", {}),
    "regex of the whole": (r"model\.layers\.\d+\.(mlp|self_attn)\.\w+_proj", {}),
    "all-linear": ("all-linear", {}),
    "layers": (("q_proj", "up_proj"), {"layers_to_transform": (0, 2)}),
    "all in a layer": ("all-linear", {"layers_to_transform": (1,)}),
    "ranks": (("q_proj", "up_proj"), {"rank_pattern": {"q_proj": 2, r"layers\.1\..*": 7}}),
    "first wins": ("all-linear", {"rank_pattern": {r"\w+_proj": 3, "q_proj": 2}}),
    "alphas": (("q_proj", "up_proj"), {"alpha_pattern": {r"1\.mlp\.up_proj": 0.5}}),
    "all of it": (
        ("k_proj", "gate_proj"),
        {
            "layers_to_transform": (1, 2),
            "rank_pattern": {"2.self_attn.k_proj": 1},
            "alpha_pattern": {"k_proj": 3.0},
            "use_rslora": True,
        },
    ),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_selection_is_pefts(folder, model, case):
    targets, options = SELECTIONS[case]
    ours = lora(model, targets, **options)
    theirs = open_in_transformers(folder)
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    if not isinstance(targets, str):
        targets = list(targets)
    elif targets == "v_proj" or (targets == "all-linear" and "layers_to_transform" in options):
        targets = list(ours.target_modules)  # to PEFT a string is a regular expression
    peft.get_peft_model(
        theirs,
        peft.LoraConfig(
            r=4, lora_alpha=8.0, target_modules=targets, task_type="CAUSAL_LM", **asked
        ),
    )
    found = {
        name: (module.r["default"], module.scaling["default"])
        for name, module in theirs.named_modules()
        if hasattr(module, "lora_A")
    }
    modules = adapted_modules(ours, model)
    assert {name: (r, ours.scale_of(name)) for name, r in modules.items()} == found
    trained = sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n)
    assert count_parameters(ours, model) == trained
    assert 0 < len(found) <= 7 * LAYERS


@pytest.mark.parametrize("case", ["layers", "ranks", "alphas", "regex", "all of it"])
def test_peft_loads_what_was_selected(folder, model, tmp_path, case):
    """Other ranks and absent layers are padding inside: PEFT computes the same, so do we again."""
    targets, options = SELECTIONS[case]
    config = lora(model, targets, **options)
    decoder = load(folder)
    base = logits(decoder, TOKENS)
    add_adapters(decoder, config, seed=1)
    got = logits(randomised(decoder), TOKENS)
    save_adapter(tmp_path, config, adapter_arrays(decoder))
    theirs = peft.PeftModel.from_pretrained(open_in_transformers(folder), tmp_path)
    assert largest(got, their_logits(theirs, TOKENS)) < 1e-4
    assert largest(got, base) > 0.1
    again = load(folder)
    read = import_adapter(tmp_path, again)
    assert adapted_modules(read, model) == adapted_modules(config, model)
    np.testing.assert_array_equal(logits(again, TOKENS), got)
    flat = replace(config, rank_pattern={}, alpha_pattern={}, layers_to_transform=None)
    if case in ("alphas", "all of it"):  # the control: without the patterns it is another model
        assert any(flat.scale_of(n) != config.scale_of(n) for n in adapted_modules(config, model))


def test_padding_stays_zero(folder, model):
    """Whatever is trained: rows of A and columns of B past a layer's rank, and absent layers."""
    import jax
    import optax

    from jaxft.step import init_state, make_train_step, split

    options = {"layers_to_transform": (0, 2), "rank_pattern": {r"layers\.2\..*": 1}}
    config = lora(model, ("q_proj", "down_proj"), **options)
    decoder = load(folder)
    add_adapters(decoder, config, seed=1)
    structure, trained, frozen = split(randomised(decoder))
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
    optimizer = optax.chain(optimizer, optax.scale(-1.0))
    step = make_train_step(
        structure, optimizer, lambda _: 1e-2, seed=0, dropout=False, checkpointing="layer"
    )
    tokens = TOKENS[None].astype(np.int32)
    batch = {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "targets": np.pad(tokens[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1),
    }
    before = jax.device_get(trained)
    state = init_state(trained, optimizer)
    for _ in range(3):
        state, _ = step(state, frozen, batch)
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.trained)), strict=True
    ):
        moved = old != new
        np.testing.assert_array_equal(moved, old != 0)  # A and B are random: all zeros are padding
        assert 0 < moved.sum() < moved.size


def test_a_control_a_wrong_rank_is_refused(folder, model, tmp_path):
    config = lora(model, ("q_proj",), rank_pattern={r"layers\.1\..*": 2})
    decoder = load(folder)
    add_adapters(decoder, config, seed=1)
    arrays = adapter_arrays(decoder)
    with pytest.raises(ValueError, match="do not have rank 4"):
        save_adapter(tmp_path, replace(config, rank_pattern={}), arrays)
    save_adapter(tmp_path, config, arrays)
    assert load_adapter(tmp_path)[0] == config


FAULTS = {
    "unknown name": (("q_proj", "qproj"), {}, ["'qproj'", "q_proj k_proj"]),
    "the head": (("q_proj", "lm_head"), {}, ["'lm_head'", "no projection"]),
    "matches nothing": (r".*\.query", {}, [r"'.*\\.query'", "matches no module", Q0]),
    "a part of the path": (r"(q|v)_proj", {}, ["matches no module", "a whole path"]),
    "the embedding too": (".*(q_proj|embed_tokens)", {}, ["'model.embed_tokens' too"]),
    "a whole block": (".*self_attn.*", {}, ["'model.layers.0.self_attn' too"]),
    "no such layer": (("q_proj",), {"layers_to_transform": (1, 3)}, ["no layer 3", "0 to 2"]),
    "regex and layers": (".*q_proj", {"layers_to_transform": (1,)}, ["put the layers into"]),
    "not in the layers": (
        ("layers.0.self_attn.q_proj", "v_proj"),
        {"layers_to_transform": (1,)},
        ["'layers.0.self_attn.q_proj'", "none of the layers"],
    ),
    "rank of nothing": (("q_proj",), {"rank_pattern": {"v_proj": 2}}, ["rank_pattern: 'v_proj'"]),
    "alpha of nothing": (("q_proj",), {"alpha_pattern": {"x": 2}}, ["alpha_pattern: 'x' fits no"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fits_nothing_is_refused(model, fault):
    targets, options, parts = FAULTS[fault]
    with pytest.raises(UserError) as caught:
        adapted_modules(lora(model, targets, **options), model)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


OPTION_FAULTS = {
    "no regex": ({"lora_target_modules": "(q_proj"}, ["lora_target_modules", "regular expression"]),
    "two regexes": ({"lora_target_modules": (".*q", ".*v")}, ["'.*q'", "stand alone"]),
    "all and one": ({"lora_target_modules": ("all-linear", "q_proj")}, ["stand alone"]),
    "layer twice": ({"layers_to_transform": (1, 1)}, ["each once", "1 1"]),
    "no layer": ({"layers_to_transform": ()}, ["must not be empty"]),
    "rank 0": ({"rank_pattern": {"q_proj": 0}}, ["q_proj", "at least 1"]),
    "rank half": ({"rank_pattern": {"q_proj": 1.5}}, ["q_proj", "whole number"]),
    "rank of a regex": ({"rank_pattern": {"*": 1}}, ["rank_pattern", "regular expression"]),
    "alpha 0": ({"alpha_pattern": {"q_proj": 0}}, ["q_proj", "above 0"]),
    "no mapping": ({"rank_pattern": "q_proj"}, ["rank_pattern", "NAME=VALUE"]),
    "no value": ({"rank_pattern": ("q_proj",)}, ["rank_pattern", "NAME=VALUE"]),
    "twice": ({"rank_pattern": ("q_proj=1", "q_proj=2")}, ["'q_proj' twice"]),
}


@pytest.mark.parametrize("fault", OPTION_FAULTS)
def test_options_that_make_no_sense(fault):
    given, parts = OPTION_FAULTS[fault]
    with pytest.raises(UserError) as caught:
        TrainConfig(model_name_or_path="m", dataset_name="d", output_dir="o", **given)
    for part in parts:
        assert part in str(caught.value)


def test_options_from_words_and_yaml(tmp_path):
    from jaxft.config import from_yaml, parse, to_yaml

    required = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    words = ["--rank_pattern", "q_proj=8", r"layers\.[0-3]\.(?=mlp).*=4"]
    config = parse([*required, *words, "--layers_to_transform", "0", "2", "--alpha_pattern", "a=1"])
    assert config.rank_pattern == {"q_proj": 8, r"layers\.[0-3]\.(?=mlp).*": 4}
    assert (config.layers_to_transform, config.alpha_pattern) == ((0, 2), {"a": 1.0})
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(path) == config
    assert parse([*required, "--layers_to_transform", "none"]).layers_to_transform is None
