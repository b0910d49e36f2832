"""Generation with a cache against transformers' own, and sampling against the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits, save_llama
from model_oracles import add_lora, in_peft, largest, open_in_transformers

from jaxft.generate import generate
from jaxft.model.decoder import Decoder

torch = pytest.importorskip("torch")

RANDOM = np.random.default_rng(0)
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fixtures):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(fixtures, folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def decoder(folder) -> Decoder:
    return load(folder)


@pytest.fixture(scope="module")
def model(folder):
    return open_in_transformers(folder)


def theirs(model, prompt: list[int], count: int, stop: int | None = None) -> list[int]:
    """Greedy tokens after the prompt, by transformers."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1, 2, 9, 52, 55])
def test_greedy(length, decoder, model):
    """Prompts up to and past a cache of 64; the last token made never needs a place in it."""
    prompt = RANDOM.integers(0, 64, length).tolist()
    got = generate(decoder, prompt, stop=NEVER, max_new_tokens=12)
    assert got == theirs(model, prompt, 12)
    assert len(set(got)) > 4  # not stuck on one token, which a broken cache would hide
    # a model that saw the last token only would say this
    forgetful = generate(decoder, prompt[-1:], stop=NEVER, max_new_tokens=12)
    assert (forgetful == got) == (length == 1)


def test_stops(decoder, model):
    prompt = [3, 1, 4, 1, 5]
    whole = generate(decoder, prompt, stop=NEVER, max_new_tokens=12)
    stop = whole[5]
    cut = whole[: whole.index(stop)]
    assert generate(decoder, prompt, stop=frozenset({stop, 999}), max_new_tokens=12) == cut
    assert theirs(model, prompt, 12, stop) == [*cut, stop]
    assert generate(decoder, prompt, stop=NEVER, max_new_tokens=3) == whole[:3]
    assert generate(decoder, prompt, stop=frozenset(whole[:1]), max_new_tokens=12) == []


def test_with_adapters(folder, decoder):
    prompt = [9, 8, 7]
    tuned = add_lora(load(folder), dropout=0.5)
    peft_model = in_peft(open_in_transformers(folder), tuned)
    got = generate(tuned, prompt, stop=NEVER, max_new_tokens=12)
    assert got == theirs(peft_model, prompt, 12)
    assert got != generate(decoder, prompt, stop=NEVER, max_new_tokens=12)


def test_sampling(decoder):
    """Frequencies of 400 draws follow the distribution at this temperature, not at another."""
    prompt, temperature = [5, 6, 7], 0.5

    def draw(seed):
        options = {"stop": NEVER, "max_new_tokens": 1, "temperature": temperature, "seed": seed}
        return generate(decoder, prompt, **options)[0]

    draws = np.bincount([draw(seed) for seed in range(400)], minlength=64) / 400
    last = np.asarray(logits(decoder, [prompt])[0, -1])

    def deviation(t):
        """Largest difference of a frequency in standard errors."""
        p = np.asarray(jax.nn.softmax(last / t))
        return (np.abs(draws - p) / np.sqrt(p * (1 - p) / 400)).max()

    assert deviation(temperature) < 5
    assert deviation(1.0) > 8
    assert deviation(0.25) > 8


def test_sampling_is_reproducible(decoder):
    def sample(seed):
        return generate(decoder, [5], stop=NEVER, max_new_tokens=10, temperature=1.5, seed=seed)

    assert sample(0) == sample(0)
    assert len({tuple(sample(seed)) for seed in range(5)}) == 5
    assert len(set(sample(0))) > 2  # every token has a draw of its own


def test_compiles_once_for_prompts_of_one_length(decoder, monkeypatch):
    traced = []
    extend = Decoder.extend

    def counted(self, tokens, *rest):
        traced.append(tokens.shape)
        return extend(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "extend", counted)
    for prompt in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]):
        generate(decoder, prompt, stop=NEVER, max_new_tokens=4, temperature=0.7)
    assert traced == [(1, 6), (1, 1)]


def test_cache_of_exactly_the_tokens(decoder):
    """Tokens in several parts through a full cache are the whole document's hidden states."""
    tokens = jnp.asarray(RANDOM.integers(0, 64, (2, 11)), jnp.int32)
    whole = decoder(tokens, jnp.ones_like(tokens))
    extend = jax.jit(decoder.extend)

    def in_parts(capacity):
        caches, hidden, at = decoder.empty_caches(2, capacity), [], 0
        for count in (6, 1, 1, 1, 1, 1):
            part, caches = extend(tokens[:, at : at + count], jnp.asarray(at), caches)
            hidden.append(part)
            at += count
        return jnp.concatenate(hidden, 1)

    assert largest(in_parts(11), whole) < 1e-5
    too_small = in_parts(10)
    assert largest(too_small[:, :10], whole[:, :10]) < 1e-5
    assert largest(too_small[:, 10], whole[:, 10]) > 1e-2
