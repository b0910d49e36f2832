"""Rotary frequencies of every kind and spelling, against transformers' own functions."""

import numpy as np
import pytest

from jaxft.errors import UserError
from jaxft.model.families import read_config
from jaxft.model.fields import Fields
from jaxft.model.rope import KINDS, read_rope

torch = pytest.importorskip("torch")

HEAD, LONGEST = 16, 64
BASE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}
LONG = [1.0 + 0.3 * i for i in range(HEAD // 2)]
SHORT = [1.0 + 0.01 * i for i in range(HEAD // 2)]
# Name: scaling, length of the run (None: what the model was made for).
CASES = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, None),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 2.0}, 40),
    "dynamic, long": ({"rope_type": "dynamic", "factor": 2.0}, 200),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        None,
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, None),
    "yarn, its own attention": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 0.7,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        None,
    ),
    "yarn, mscale": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
        None,
    ),
    "longrope, short": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 32,
        },
        32,
    ),
    "longrope, long": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 3.0,
            "original_max_position_embeddings": 32,
        },
        33,
    ),
}


def theirs(scaling: dict, length: int | None) -> tuple[np.ndarray, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**BASE, rope_parameters={**scaling, "rope_theta": 5e4})
    if scaling["rope_type"] == "default":
        return LlamaRotaryEmbedding(config).inv_freq.numpy(), 1.0
    make = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    inv_freq, attention = make(config, torch.device("cpu"), length)
    return inv_freq.numpy(), attention


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case):
    scaling, length = CASES[case]
    want, attention = theirs(scaling, length)
    config = {**BASE, "rope_parameters": {**scaling, "rope_theta": 5e4}}
    (layer,) = read_config(config, length).layers
    np.testing.assert_allclose(layer.rope.array(), want, rtol=3e-6)
    assert layer.rope.attention_factor == pytest.approx(attention, rel=1e-12)
    older = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    beside = {**BASE, "rope_theta": 5e4, "rope_scaling": older}
    assert read_config(beside, length).layers[0].rope == layer.rope
    if scaling["rope_type"] not in ("default", "dynamic"):  # the control
        plain, _ = theirs({"rope_type": "default"}, None)
        assert np.abs(want / plain - 1).max() > 0.05


def test_every_kind_has_a_case():
    assert {scaling["rope_type"] for scaling, _ in CASES.values()} == set(KINDS)


def test_length_matters_where_it_should():
    """And what was settled is said; a kind that does not depend on it says nothing."""
    for kind, seen in (("dynamic", "200 tokens"), ("longrope", "long_factor")):
        scaling = next(s for s, _ in CASES.values() if s["rope_type"] == kind)
        config = {**BASE, "rope_parameters": scaling}
        short, long = (read_config(config, n) for n in (16, 200))
        assert short.layers[0].rope.inv_freq != long.layers[0].rope.inv_freq
        assert seen in long.layers[0].rope.settled
    assert read_config(config, 200).length_limit == LONGEST
    dynamic = {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    assert read_config(dynamic, 200).length_limit is None
    yarn = {**BASE, "rope_parameters": CASES["yarn"][0]}
    assert read_config(yarn, 16) == read_config(yarn, 64)
    assert read_config(yarn, 16).layers[0].rope.settled == ""


def test_positions_are_exact_far_out():
    """cos and sin in float32 against float64 at the last of 131,072 positions; not so in bf16."""
    import jax.numpy as jnp

    from pallas_kernels.qk_norm_rope import qk_norm_rope

    rope = read_rope(Fields({"rope_theta": 5e5}), 64)
    positions = np.array([[0, 1, 255, 257, 513, 4095, 131071]], np.int32)
    q = np.zeros((1, 7, 1, 64), np.float32)
    q[..., :32] = 1.0  # the rotation of (1, 0) is (cos, sin)
    got, _ = qk_norm_rope(jnp.asarray(q), jnp.asarray(q), jnp.asarray(positions), rope.array())
    angles = positions[0, :, None] * np.asarray(rope.inv_freq, np.float64)
    want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    errors = np.abs(np.asarray(got)[0, :, 0] - want).max(-1)
    assert errors[:6].max() < 1e-3
    assert errors[6] < 1e-2  # the angle itself has 24 bits
    coarse = np.asarray(jnp.asarray(positions[0], jnp.bfloat16).astype(jnp.float32))
    wrong = np.cos(coarse[:, None] * np.asarray(rope.inv_freq))
    assert np.abs(wrong - want[:, :32])[3:].max() > 0.5


@pytest.mark.parametrize(
    ("scaling", "parts"),
    [
        ({"rope_type": "foo", "factor": 2.0}, ["'foo'", *KINDS]),
        ({"factor": 2.0}, ["factor", "no rope_type"]),
        ({"rope_type": "linear"}, ["'linear' lacks 'factor'"]),
        ({"rope_type": "longrope", "short_factor": SHORT[:3], "long_factor": LONG}, ["8 numbers"]),
        ({"rope_type": "longrope", "long_factor": LONG}, ["short_factor", "None"]),
        ({"rope_type": "yarn", "factor": "2"}, ["factor", "'2'"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    ],
)
def test_what_cannot_be_read_is_named(scaling, parts):
    with pytest.raises(UserError) as caught:
        read_config({**BASE, "rope_parameters": scaling})
    for part in parts:
        assert part in str(caught.value)
