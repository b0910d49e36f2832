"""RMSNorm against transformers and torch float64: both scales, with and without residual."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm import rms_norm

torch = pytest.importorskip("torch")

SHAPE = (3, 7, 24)
EPS = 0.05  # large enough to matter beside a mean square of 1


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = dict.fromkeys(("x", "residual", "d_normed", "d_h"), SHAPE) | {"scale": SHAPE[-1:]}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_matches_transformers(offset):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = inputs()
    module = (Gemma3RMSNorm if offset else LlamaRMSNorm)(SHAPE[-1], EPS)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(x["scale"]))
        theirs = module(torch.tensor(x["x"])).numpy()
    normed, h = rms_norm(x["x"], x["scale"], eps=EPS, offset=offset)
    np.testing.assert_allclose(normed, theirs, atol=1e-6)
    np.testing.assert_array_equal(h, x["x"])
    for wrong in ({"eps": 1e-6, "offset": offset}, {"eps": EPS, "offset": 1 - offset}):
        assert np.abs(rms_norm(x["x"], x["scale"], **wrong)[0] - theirs).max() > 0.05


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_values_and_gradients(with_residual, offset):
    x = inputs()
    names = ["x", "scale", *(["residual"] if with_residual else [])]

    @jax.jit
    def both(arrays, cotangents):
        results, back = jax.vjp(lambda a: rms_norm(**a, eps=EPS, offset=offset), arrays)
        return results, back(cotangents)[0]

    (normed, h), gradients = both({name: x[name] for name in names}, (x["d_normed"], x["d_h"]))
    tensors = {n: torch.tensor(x[n], dtype=torch.float64, requires_grad=True) for n in names}
    total = tensors["x"] + tensors.get("residual", 0.0)
    scale = tensors["scale"] + offset
    want = total / torch.sqrt((total**2).mean(-1, keepdim=True) + EPS) * scale
    loss = (want * torch.tensor(x["d_normed"])).sum() + (total * torch.tensor(x["d_h"])).sum()
    loss.backward()
    np.testing.assert_allclose(normed, want.detach(), atol=2e-6)
    np.testing.assert_allclose(h, total.detach(), atol=1e-6)
    for name in names:
        np.testing.assert_allclose(gradients[name], tensors[name].grad, atol=1e-5)
    # the gradient has both outputs in it, and the norm's share is not that of a constant divisor
    d_h = x["d_h"]
    assert np.abs(gradients["x"] - d_h).max() > 0.5
    frozen = d_h + x["d_normed"] * normed / h
    assert np.abs(gradients["x"] - frozen).max() > 0.1


def test_bfloat16():
    """The sum is rounded as the stream is; the norm of it is computed in float32, rounded once."""
    x = {name: jnp.asarray(value, jnp.bfloat16) for name, value in inputs().items()}
    x["x"] *= 3
    normed, h = rms_norm(x["x"], x["scale"], eps=EPS, residual=x["residual"])
    assert normed.dtype == h.dtype == jnp.bfloat16
    theirs = [torch.tensor(np.asarray(x[n], np.float32)).bfloat16() for n in ("x", "residual")]
    np.testing.assert_array_equal(h.astype(jnp.float32), sum(theirs).float())
    wide = np.asarray(h, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * np.asarray(x["scale"], float)
    half_ulp = 2.0**-8  # relative
    assert (np.abs(np.asarray(normed, np.float64) - want) <= 1.01 * half_ulp * np.abs(want)).all()
    rounded = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * x["scale"]  # all in bf16
    assert (np.abs(np.asarray(rounded, np.float64) - want) > 2 * half_ulp * np.abs(want)).any()


def test_saves_inputs_only():
    """Of 16-bit inputs, so that the float32 of the arithmetic would be seen."""
    x = {name: jnp.asarray(value, jnp.bfloat16) for name, value in inputs().items()}
    given = (x["x"], x["scale"], x["residual"])

    def saved(f):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, *given)[1]))

    limit = sum(array.nbytes for array in given)
    assert saved(lambda x, scale, residual: rms_norm(x, scale, eps=EPS, residual=residual)) <= limit

    def plain(x, scale, residual):
        h = (x + residual).astype(jnp.float32)
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * scale

    assert saved(plain) > 1.5 * limit


def test_refuses_an_unknown_implementation():
    x = inputs()
    with pytest.raises(ValueError, match="norm: implementation 'triton' is unknown"):
        rms_norm(x["x"], x["scale"], eps=EPS, implementation="triton")
