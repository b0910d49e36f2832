"""Gated linear units against transformers' activations and torch float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.glu import glu

torch = pytest.importorskip("torch")

# ours -> the name in a transformers config, and the same in torch float64
ACTIVATIONS = {
    "silu": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "gelu_tanh": (
        "gelu_pytorch_tanh",
        lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    ),
}


def inputs(seed: int = 0) -> list[np.ndarray]:
    """Gate, up and cotangent; the gate reaches far into both tails."""
    random = np.random.default_rng(seed)
    return [(s * random.normal(size=(5, 33))).astype(np.float32) for s in (4, 1, 1)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(name):
    gate, up, d_out = inputs()
    gate[0, :2] = -90, 90

    @jax.jit
    def both(gate, up, d_out):
        out, back = jax.vjp(lambda g, u: glu(g, u, activation=name), gate, up)
        return out, *back(d_out)

    out, d_gate, d_up = both(gate, up, d_out)
    theirs, activation = ACTIVATIONS[name]
    g, u = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (gate, up))
    want = activation(g) * u
    (want * torch.tensor(d_out)).sum().backward()
    np.testing.assert_allclose(out, want.detach(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(d_gate, g.grad, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_up, u.grad, rtol=1e-5, atol=1e-5)

    from transformers.activations import ACT2FN

    in_model = ACT2FN[theirs](torch.tensor(gate)) * torch.tensor(up)
    np.testing.assert_allclose(out, in_model, rtol=1e-5, atol=2e-6)
    other = next(a for a in ACTIVATIONS if a != name)
    assert np.abs(glu(gate, up, activation=other) - out).max() > 0.1
    exact_gelu = torch.nn.functional.gelu(torch.tensor(gate)) * torch.tensor(up)
    assert np.abs(exact_gelu.numpy() - out).max() > 2e-4  # the tanh form is another function


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bfloat16(name):
    """Computed in float32 and rounded once."""
    gate, up, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
    out = glu(gate, up, activation=name)
    assert out.dtype == jnp.bfloat16
    g, u = (torch.tensor(np.asarray(x, np.float64)) for x in (gate, up))
    want = (ACTIVATIONS[name][1](g) * u).numpy()
    error = np.abs(np.asarray(out, np.float64) - want)
    limit = 1.01 * 2.0**-8 * np.abs(want) + 1e-6
    assert (error <= limit).all()
    twice = (glu(gate, jnp.ones_like(gate), activation=name) * up).astype(jnp.float32)
    assert (np.abs(np.asarray(twice, np.float64) - want) > limit).any()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_saves_inputs_only(name):
    gate, up, _ = map(jnp.asarray, inputs())

    def saved(f):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, gate, up)[1]))

    assert saved(lambda g, u: glu(g, u, activation=name)) <= gate.nbytes + up.nbytes
    assert saved(lambda g, u: g * jax.nn.sigmoid(g) * u) > gate.nbytes + up.nbytes


def test_refuses_what_it_does_not_know():
    gate, up, _ = inputs()
    with pytest.raises(ValueError, match="'relu' is unknown; known: silu, gelu_tanh"):
        glu(gate, up, activation="relu")
    with pytest.raises(ValueError, match="glu: implementation 'triton' is unknown"):
        glu(gate, up, implementation="triton")
