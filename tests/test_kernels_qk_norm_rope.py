"""RoPE and per-head norms against transformers and float64: values, gradients, what is saved."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qk_norm_rope import qk_norm_rope

torch = pytest.importorskip("torch")

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 19, 4, 2, 16


def frequencies(count: int = DIM // 2, theta: float = 500000.0) -> np.ndarray:
    return (theta ** -(np.arange(count) / count)).astype(np.float32)


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"q": (BATCH, TOKENS, HEADS, DIM), "k": (BATCH, TOKENS, KV_HEADS, DIM)}
    shapes |= {f"d_{name}": shape for name, shape in shapes.items()}
    shapes |= {"q_scale": (DIM,), "k_scale": (DIM,)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["positions"] = random.integers(0, 2000, (BATCH, TOKENS)).astype(np.int32)
    return arrays


def complex_oracle(x, scale, positions, inv_freq, factor=1.0, offset=0.0, eps=1e-6):
    """The rotation as a product of complex numbers, in torch float64."""
    if scale is not None:
        x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * (scale + offset)
    half = len(inv_freq)
    angles = torch.tensor(positions[..., None] * inv_freq.astype(np.float64))
    turned = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = turned * torch.polar(torch.full_like(angles, factor), angles)[:, :, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def test_matches_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, inv_freq = inputs(), frequencies()
    angles = torch.tensor(x["positions"])[..., None].float() * torch.tensor(inv_freq)
    table = torch.cat([angles, angles], -1)
    factor = 1.2  # YaRN's attention factor sits in the tables
    for attention_factor in (1.0, factor):
        got = qk_norm_rope(
            x["q"], x["k"], x["positions"], inv_freq, attention_factor=attention_factor
        )
        heads_first = (torch.tensor(x[name]).transpose(1, 2) for name in "qk")
        cos, sin = table.cos() * attention_factor, table.sin() * attention_factor
        want = apply_rotary_pos_emb(*heads_first, cos, sin)
        for ours, theirs in zip(got, want, strict=True):
            theirs = theirs.transpose(1, 2).numpy()
            np.testing.assert_allclose(ours, theirs, atol=2e-6)
            # neighbouring elements as a pair, another convention, is another result
            swapped = theirs.reshape(*theirs.shape[:-1], 2, -1).swapaxes(-1, -2)
            assert np.abs(ours - swapped.reshape(theirs.shape)).max() > 0.1


@pytest.mark.parametrize(
    ("rotary", "normed", "offset"),
    [(8, False, 0.0), (3, False, 0.0), (8, True, 0.0), (5, True, 1.0)],
    ids=["plain", "partial", "normed", "partial, normed, offset"],
)
def test_values_and_gradients(rotary, normed, offset):
    x, inv_freq = inputs(), frequencies(rotary)
    names = ["q", "k", *(["q_scale", "k_scale"] if normed else [])]

    def run(arrays):
        scales = {name: arrays.get(name) for name in ("q_scale", "k_scale")}
        options = {"attention_factor": 1.1, "norm_offset": offset, "eps": 1e-3}
        return qk_norm_rope(arrays["q"], arrays["k"], x["positions"], inv_freq, **scales, **options)

    @jax.jit
    def both(arrays, cotangents):
        results, back = jax.vjp(run, arrays)
        return results, back(cotangents)[0]

    results, gradients = both({name: x[name] for name in names}, (x["d_q"], x["d_k"]))
    for name, result in zip("qk", results, strict=True):
        tensor = torch.tensor(x[name], dtype=torch.float64, requires_grad=True)
        scale = torch.tensor(x[f"{name}_scale"], dtype=torch.float64, requires_grad=True)
        oracle = partial(
            complex_oracle, tensor, positions=x["positions"], inv_freq=inv_freq, eps=1e-3
        )
        want = oracle(scale if normed else None, factor=1.1, offset=offset)
        (want * torch.tensor(x[f"d_{name}"])).sum().backward()
        limit = 5e-4  # float32 angles up to 2000 are known to 1.2e-4
        np.testing.assert_allclose(result, want.detach(), atol=limit)
        np.testing.assert_allclose(gradients[name], tensor.grad, atol=2 * limit)
        if normed:
            np.testing.assert_allclose(gradients[f"{name}_scale"], scale.grad, atol=1e-2)
            assert scale.grad.abs().max() > 1
            bare = oracle(scale, factor=1.1, offset=1 - offset).detach()
            assert np.abs(result - bare.numpy()).max() > 0.1
        if rotary < DIM // 2 and not normed:
            np.testing.assert_array_equal(result[..., 2 * rotary :], x[name][..., 2 * rotary :])


def test_norms_of_models():
    """Scales as Qwen 3 stores them, and as Gemma 3 does (minus one)."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x = inputs()
    still = np.zeros_like(x["positions"])
    for module, offset in ((Qwen3RMSNorm(DIM, 1e-6), 0.0), (Gemma3RMSNorm(DIM, 1e-6), 1.0)):
        scales = {"q_scale": x["q_scale"], "k_scale": x["k_scale"]}
        for dtype, limit in ((jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-7)):
            q, k = (jnp.asarray(x[name], dtype) for name in "qk")
            got = qk_norm_rope(q, k, still, frequencies(), **scales, norm_offset=offset)
            wrong = qk_norm_rope(q, k, still, frequencies(), **scales, norm_offset=1 - offset)
            for name, ours, other in zip("qk", got, wrong, strict=True):
                assert ours.dtype == dtype
                with torch.no_grad():
                    module.weight.copy_(torch.tensor(x[f"{name}_scale"]))
                    stored = {"float32": torch.float32, "bfloat16": torch.bfloat16}
                    given = torch.tensor(x[name]).to(stored[jnp.dtype(dtype).name])
                    theirs = module(given).float().numpy()
                ours, other = (np.asarray(a.astype(jnp.float32)) for a in (ours, other))
                assert (np.abs(ours - theirs) <= limit * np.maximum(np.abs(theirs), 0.1)).all()
                assert np.abs(other - theirs).max() > 0.1


def table(positions: np.ndarray, inv_freq: np.ndarray, dtype=jnp.bfloat16) -> np.ndarray:
    """Cosines and sines [T, 2, D/2] that the op turns by: it is given (1, 0) in every pair."""
    half = len(inv_freq)
    unit = jnp.broadcast_to(
        jnp.repeat(jnp.asarray([1, 0], dtype), half), (1, len(positions), 1, 2 * half)
    )
    turned, _ = jax.jit(qk_norm_rope)(unit, unit, jnp.asarray(positions)[None], inv_freq)
    return np.asarray(turned.astype(jnp.float32)).reshape(len(positions), 2, half)


def exact(positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    angles = positions.astype(np.float64).reshape(len(positions), -1) * inv_freq
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def test_angles_stay_float32():
    """Far positions are told apart, also with 16-bit queries."""
    positions, inv_freq = np.arange(4096, dtype=np.int32), frequencies(32)
    want = exact(positions, inv_freq)
    assert np.abs(table(positions, inv_freq, jnp.float32) - want).max() < 1e-3
    assert np.abs(table(positions, inv_freq) - want).max() < 2.0**-8  # rounded once, at the end
    rounded = jnp.asarray(positions, jnp.bfloat16)[:, None] * jnp.asarray(inv_freq, jnp.bfloat16)
    wrong = exact(np.asarray(rounded, np.float64), np.ones(1))  # the table of bf16 angles
    assert np.abs(wrong - want).max() > 1.9


def test_position_131071():
    positions, inv_freq = np.asarray([0, 131070, 131071], np.int32), frequencies(32)
    got = table(positions, inv_freq, jnp.float32)
    # float32 angles there are multiples of 1/128
    assert np.abs(got - exact(positions, inv_freq)).max() < 1e-2
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(inv_freq)
    np.testing.assert_allclose(got, torch.stack([angles.cos(), angles.sin()], 1), atol=1e-6)
    assert np.abs(got[1] - got[2]).max() > 0.5  # neighbours differ, as they should


def test_saves_inputs_only():
    x, inv_freq = inputs(), frequencies()
    given = [jnp.asarray(x[name]) for name in ("q", "k", "q_scale", "k_scale")]

    def run(q, k, q_scale, k_scale):
        return qk_norm_rope(
            q, k, jnp.asarray(x["positions"]), inv_freq, q_scale=q_scale, k_scale=k_scale
        )

    def saved(f):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(f, *given)[1]))

    small = x["positions"].nbytes + inv_freq.nbytes
    limit = sum(array.nbytes for array in given) + small
    assert saved(run) <= limit

    def plain(q, k, q_scale, k_scale):
        return [y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True)) * s * jnp.cos(y)
                for y, s in ((q, q_scale), (k, k_scale))]  # fmt: skip

    assert saved(plain) > 1.5 * limit


def test_refuses_what_does_not_fit():
    x = inputs()
    with pytest.raises(ValueError, match="9 frequencies for heads of 16 and 16"):
        qk_norm_rope(x["q"], x["k"], x["positions"], frequencies(9))
    with pytest.raises(ValueError, match="'mosaic_gpu' is unknown; known: auto, xla"):
        qk_norm_rope(x["q"], x["k"], x["positions"], frequencies(), implementation="mosaic_gpu")
