"""LoRA adapters: how they start and are scaled, against PEFT; names, dropout, the trained tree."""

from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits, save_llama
from model_oracles import (
    PROJECTIONS,
    RANK,
    add_lora,
    in_peft,
    largest,
    lora_config,
    their_logits,
)

from jaxft.errors import UserError
from jaxft.lora import adapter_arrays, add_adapters, set_adapter_arrays
from jaxft.quant import Storage
from jaxft.step import split

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fixtures):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(fixtures, folder)
    return folder


def their_adapters(fixtures, r: int):
    """Freshly made A and B of PEFT, by module path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = fixtures.tiny_model(LlamaForCausalLM, LlamaConfig)
    peft.get_peft_model(model, peft.LoraConfig(r=r, target_modules=list(PROJECTIONS)))
    return {
        name: [part["default"].weight.detach().numpy() for part in (module.lora_A, module.lora_B)]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def sample(arrays) -> np.ndarray:
    """All elements of all A, times the square root of their inputs, sorted."""
    scaled = [a.ravel() * np.sqrt(a.shape[1]) for a, _ in arrays.values()]
    return np.sort(np.concatenate(scaled))


def distribution_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Largest distance of two empirical distribution functions (Kolmogorov-Smirnov)."""
    at = np.concatenate([x, y])
    return float(np.abs(np.searchsorted(x, at) / len(x) - np.searchsorted(y, at) / len(y)).max())


def test_starts_as_peft_does(folder, fixtures):
    decoder = load(folder)
    add_adapters(decoder, replace(lora_config(), r=16), seed=0)
    ours, theirs = adapter_arrays(decoder), their_adapters(fixtures, 16)
    assert {n: [x.shape for x in pair] for n, pair in ours.items()} == {
        n: [x.shape for x in pair] for n, pair in theirs.items()
    }
    assert all((b == 0).all() for _, b in [*ours.values(), *theirs.values()])
    x, y = sample(ours), sample(theirs)
    for values in (x, y):
        assert 0.999 < np.abs(values).max() <= 1 + 1e-6
    limit = 1.95 * np.sqrt(2 / len(x))  # exceeded once in a thousand
    assert distribution_distance(x, y) < limit
    normal = np.sort(np.random.default_rng(0).normal(size=len(x)) * x.std())
    assert distribution_distance(normal, y) > limit


def test_every_a_is_its_own(folder):
    def start(seed):
        decoder = load(folder)
        add_adapters(decoder, lora_config(), seed)
        return {name: a for name, (a, _) in adapter_arrays(decoder).items()}

    first, again, other = start(0), start(0), start(1)
    assert len(first) == 2 * 7
    for name, a in first.items():
        np.testing.assert_array_equal(a, again[name])
        assert largest(a, other[name]) > 0.1
    for one, two in combinations(first.values(), 2):
        assert one.shape != two.shape or largest(one, two) > 0.1


@pytest.mark.parametrize(("r", "alpha"), [(16, 16.0), (4, 0.5), (8, 32.0)])
@pytest.mark.parametrize("rslora", [False, True])
def test_scale_is_pefts(r, alpha, rslora):
    config = replace(lora_config(rslora=rslora), r=r)
    layer = peft.tuners.lora.Linear(
        torch.nn.Linear(4, 4),
        "default",
        config=peft.LoraConfig(r=r, lora_alpha=alpha, use_rslora=rslora),
        r=r,
        lora_alpha=alpha,
    )
    assert replace(config, lora_alpha=alpha).scale_of("q_proj") == layer.scaling["default"]


def test_logits_with_adapters(folder, fixtures):
    from model_oracles import open_in_transformers

    decoder = load(folder)
    base = logits(decoder, TOKENS)
    add_adapters(decoder, lora_config(), seed=0)
    np.testing.assert_array_equal(logits(decoder, TOKENS), base)  # B is 0
    decoder = add_lora(load(folder), dropout=0.5)  # no key, no dropout
    got = logits(decoder, TOKENS)
    theirs = in_peft(open_in_transformers(folder), decoder)
    assert largest(got, their_logits(theirs, TOKENS)) < 1e-4
    assert largest(got, base) > 0.1


def test_only_a_and_b_are_trained(folder):
    """In float32 whatever the arithmetic; all else is in the other tree."""
    storage = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype(jnp.bfloat16))
    _, trained, frozen = split(add_lora(load(folder, storage), targets=("q_proj", "down_proj")))
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(trained))
    assert shapes == sorted([(2, RANK, 32), (2, 32, RANK), (2, RANK, 48), (2, 32, RANK)])
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {
        *map(jnp.dtype, (jnp.uint8, jnp.float32, jnp.bfloat16))
    }


def test_targets(folder):
    decoder = add_lora(load(folder), targets=("v_proj", "up_proj"))
    assert list(adapter_arrays(decoder)) == [
        f"model.layers.{i}.{path}" for i in (0, 1) for path in ("mlp.up_proj", "self_attn.v_proj")
    ]
    with pytest.raises(UserError, match=r"'w_proj' is no projection .*the model has q_proj"):
        add_adapters(load(folder), lora_config(targets=("q_proj", "w_proj")), seed=0)


def test_adapters_from_outside(folder):
    """What is put in comes out; what does not fit is named."""
    decoder = add_lora(load(folder))
    arrays = {
        name: (a + 1, b + np.float32(int(name.split(".")[2])))
        for name, (a, b) in adapter_arrays(decoder).items()
    }
    set_adapter_arrays(decoder, arrays)
    for name, pair in adapter_arrays(decoder).items():
        for got, want in zip(pair, arrays[name], strict=True):
            np.testing.assert_array_equal(got, want)
    name = "model.layers.1.mlp.up_proj"
    lacking = {n: pair for n, pair in arrays.items() if n != name}
    with pytest.raises(UserError, match=f"{name} is only in the model"):
        set_adapter_arrays(decoder, lacking)
    extra = "model.layers.2.mlp.up_proj"
    with pytest.raises(UserError, match=f"{extra} is only in the adapter"):
        set_adapter_arrays(decoder, {**arrays, extra: arrays[name]})
    with pytest.raises(UserError, match=f"{name}: the adapter's shapes"):
        set_adapter_arrays(decoder, {**arrays, name: tuple(x[:-1] for x in arrays[name])})


def test_dropout_masks(folder, monkeypatch):
    """Every projection of every layer draws its own, and another with every key."""
    decoder = add_lora(load(folder), dropout=0.2)
    drawn: list[np.ndarray] = []
    bernoulli = jax.random.bernoulli

    def watched(key, p, shape):
        mask = bernoulli(key, p, shape)
        jax.debug.callback(lambda m: drawn.append(np.asarray(m)), mask)
        return mask

    monkeypatch.setattr(jax.random, "bernoulli", watched)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    run = jax.jit(lambda key: decoder(tokens, jnp.ones_like(tokens), dropout_key=key))
    results = [run(jax.random.key(seed)) for seed in (0, 1)]
    jax.effects_barrier()
    assert largest(*results) > 0.1
    assert len(drawn) == 2 * 2 * len(PROJECTIONS)
    for mask in drawn:
        assert mask.mean() == pytest.approx(0.8, abs=0.05)
        assert (mask[0] != mask[1]).any()
    for one, two in combinations(drawn, 2):
        if one.shape == two.shape:  # independent masks agree in 0.8² + 0.2² of places
            assert np.mean(one == two) == pytest.approx(0.68, abs=0.06)
    drawn.clear()
    run_again = run(jax.random.key(0))
    jax.effects_barrier()
    assert len(drawn) == 2 * len(PROJECTIONS)
    np.testing.assert_array_equal(run_again, results[0])
