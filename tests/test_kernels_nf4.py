"""NF4 against bitsandbytes on the CPU and against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import nf4
from pallas_kernels.nf4 import reference

CODE = np.array(nf4.NF4_CODE, np.float32)
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def bnb():
    pytest.importorskip("torch")
    return pytest.importorskip("bitsandbytes").functional


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)


def random_nf4(*shape: int, nested: bool, seed: int = 1) -> nf4.NF4:
    """Any codes and scales, not only those that quantising would give."""
    rng = np.random.default_rng(seed)
    matrix = (shape[-2], shape[-1])
    lead, blocks = shape[:-2], nf4.num_blocks(matrix)
    codes = jnp.asarray(rng.integers(0, 256, (*lead, *nf4.codes_shape(matrix)), np.uint8))
    if not nested:
        absmax = jnp.asarray(rng.uniform(0.01, 0.2, (*lead, blocks)), jnp.float32)
        return nf4.NF4(codes, absmax, None, None, matrix)
    scales = rng.uniform(0.01, 0.2, (*lead, -(-blocks // 256)))
    return nf4.NF4(
        codes,
        jnp.asarray(rng.integers(0, 256, (*lead, blocks), np.uint8)),
        jnp.asarray(scales, jnp.float32),
        jnp.asarray(rng.uniform(0.1, 0.2, lead), jnp.float32),
        matrix,
    )


def numpy_scales(q: nf4.NF4, *, contracted: bool = False) -> np.ndarray:
    if q.absmax_scale is None:
        return np.asarray(q.absmax)
    code = nf4.nested_code()[np.asarray(q.absmax)]
    scale = np.asarray(q.absmax_scale)[np.arange(code.size) // 256]
    if contracted:  # one rounding instead of two: the product of two float32 is exact in float64
        wide = code.astype(np.float64) * scale + float(q.absmax_offset)
        return wide.astype(np.float32)
    return code * scale + np.asarray(q.absmax_offset)


def numpy_dequantize(q: nf4.NF4, scales: np.ndarray) -> np.ndarray:
    codes = np.asarray(q.codes).ravel()
    nibbles = np.stack([codes >> 4, codes & 15], -1).ravel()[: q.shape[0] * q.shape[1]]
    return (CODE[nibbles] * scales[np.arange(nibbles.size) // 64]).reshape(q.shape)


def same_bits(a, b) -> bool:
    return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_nested_code_is_the_stored_map(bnb):
    stored = bnb.create_dynamic_map(signed=True).numpy()
    assert np.array_equal(nf4.nested_code(), stored)
    assert stored[127] == 0
    assert stored[255] == 1
    # Control: the same formula in float64 is another table.
    levels = [
        (0.1 + 0.9 * (k + 0.5) / 2**i) * 10.0 ** (i - 6) for i in range(7) for k in range(2**i)
    ]
    exact = np.sort(np.float32([*levels, *(-np.array(levels)), 0, 1]))
    assert (exact != stored).sum() > 50
    np.testing.assert_allclose(exact, stored, rtol=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(96, 128), (40, 48)])
def test_dequantize_is_bitsandbytes(bnb, shape, nested, dtype):
    import torch

    q = random_nf4(*shape, nested=nested)
    code = torch.from_numpy(CODE)
    state = bnb.QuantState(
        absmax=torch.from_numpy(np.array(q.absmax)),
        shape=torch.Size([shape[0] * shape[1] // 64, 64]),  # its CPU kernel needs a width of 64
        code=code,
        blocksize=64,
        quant_type="nf4",
        dtype=getattr(torch, dtype),
    )
    if nested:
        state.nested = True
        state.offset = torch.tensor(float(q.absmax_offset))
        state.state2 = bnb.QuantState(
            absmax=torch.from_numpy(np.array(q.absmax_scale)),
            code=bnb.create_dynamic_map(signed=True),
            blocksize=256,
            dtype=torch.float32,
        )
    codes = torch.from_numpy(np.array(q.codes).reshape(-1, 1))
    expected = bnb.dequantize_4bit(codes, state).float().numpy().reshape(shape)
    got = jax.jit(lambda q: nf4.dequantize(q, dtype))(q)
    assert got.shape == shape
    assert got.dtype == dtype
    assert same_bits(got, expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(256, 192), (7, 33), (1, 1), (5, 129), (3, 30)])
def test_dequantize_is_numpy(shape, nested):
    q = random_nf4(*shape, nested=nested)
    got = jax.jit(lambda q: nf4.dequantize(q, jnp.float32))(q)
    assert same_bits(got, numpy_dequantize(q, numpy_scales(q)))
    assert same_bits(nf4.dequantize(q, jnp.bfloat16), got.astype(jnp.bfloat16))


def test_nested_scales_round_twice():
    q = random_nf4(512, 256, nested=True)
    got = np.asarray(jax.jit(reference.scales)(q))
    assert np.array_equal(got, numpy_scales(q))
    # Control: contracted to one rounding, as XLA does on its own, it is something else.
    assert (got != numpy_scales(q, contracted=True)).mean() > 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(96, 256), (40, 48)])
def test_quantize_is_bitsandbytes(bnb, shape, nested, dtype):
    import torch

    w = weights(*shape)
    w[0] = 0
    x = torch.from_numpy(w).to(getattr(torch, dtype))
    codes, state = bnb.quantize_4bit(x.reshape(-1, 64), quant_type="nf4", blocksize=64)
    q = nf4.quantize(jnp.asarray(w, dtype), nested=nested)
    codes = codes.numpy().ravel()
    assert q.codes.shape == nf4.codes_shape(shape)
    assert np.array_equal(np.asarray(q.codes).ravel(), codes)
    assert not np.array_equal((codes << 4) | (codes >> 4), codes)  # the nibbles' order is told
    if nested:
        assert q.absmax.dtype == jnp.uint8
        np.testing.assert_allclose(q.absmax_offset, state.absmax.mean().item(), rtol=1e-6)
    else:
        assert np.array_equal(np.asarray(q.absmax), state.absmax.numpy())


def test_nested_quantize(bnb):
    import torch

    absmax = np.random.default_rng(3).uniform(0.05, 0.3, 256 * 40 + 17).astype(np.float32)
    offset = np.float32(absmax.mean())
    codes, scale = (np.asarray(x) for x in jax.jit(reference.nest)(absmax, offset))
    theirs, state = bnb.quantize_blockwise(torch.from_numpy(absmax - offset), blocksize=256)
    theirs = theirs.numpy()
    assert np.array_equal(scale, state.absmax.numpy())

    # Ours is the nearest level, as their GPU code picks it.
    x = (absmax - offset) * (np.float32(1) / scale)[np.arange(absmax.size) // 256]
    table = nf4.nested_code().astype(np.float64)

    def nearest(x):
        return np.abs(np.float64(x)[:, None] - table).argmin(-1)

    assert np.array_equal(codes, nearest(x))
    # Their CPU code first rounds x to a grid of 65,535 steps; nothing else differs.
    grid = np.floor((x + np.float32(1)) * np.float32(65535 / 2) + np.float32(0.5)) / (65535 / 2) - 1
    assert np.array_equal(theirs, nearest(np.float32(grid)))
    assert 0 < (codes != theirs).mean() < 0.01


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (1, 1), (5, 129), (64, 30)])
def test_short_last_block(shape, nested):
    w = weights(*shape)
    q = nf4.quantize(jnp.asarray(w), nested=nested)
    blocks = np.pad(w.ravel(), (0, -w.size % 64)).reshape(-1, 64)
    largest = np.abs(blocks).max(-1)
    x = (blocks * (np.float32(1) / largest)[:, None]).ravel()[: w.size]
    nibbles = np.abs(np.float64(x)[:, None] - CODE).argmin(-1)
    nibbles = np.append(nibbles, 7)[: w.size + w.size % 2]  # half a byte over: the code of 0
    assert np.array_equal(np.asarray(q.codes), nibbles[::2] << 4 | nibbles[1::2])
    # Half the widest gap between codes is 0.152 of the block's scale.
    bound = 0.1525 * np.repeat(largest, 64)[: w.size].reshape(shape) + (0.02 if nested else 0)
    assert (np.abs(np.asarray(nf4.dequantize(q, jnp.float32)) - w) <= bound).all()


@pytest.mark.parametrize("nested", [False, True])
def test_zero_blocks(nested):
    w = weights(8, 128)
    w[2] = 0
    q = nf4.quantize(jnp.asarray(w), nested=nested)
    assert (np.asarray(q.codes)[2] == 0x77).all()
    got = np.asarray(nf4.dequantize(q, jnp.float32))
    assert (got[2] == 0).all()
    assert (got[3] != 0).any()
    zero = nf4.dequantize(nf4.quantize(jnp.zeros((8, 128)), nested=nested), jnp.bfloat16)
    assert (np.asarray(zero) == 0).all()
    if nested:  # so it is the code that makes the 0: the un-nested scale of the block is not 0
        assert numpy_scales(q)[4] != 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_stay_visible(value):
    w = weights(4, 128)
    w[1, 5] = value
    plain, nested = (
        np.asarray(nf4.dequantize(nf4.quantize(jnp.asarray(w), nested=n), jnp.float32))
        for n in (False, True)
    )
    assert not np.isfinite(plain[1, :64]).any()
    assert np.isfinite(plain[0]).all()
    assert not np.isfinite(nested).any()


@pytest.mark.parametrize(("shape", "nested"), [((24, 128), True), ((5, 33), False)])
def test_leading_axes(shape, nested):
    w = jnp.asarray(weights(2, 3, *shape))
    q = nf4.quantize(w, nested=nested)
    assert q.shape == shape
    mapped = jax.vmap(jax.vmap(lambda w: nf4.quantize(w, nested=nested)))(w)
    one = nf4.quantize(w[1, 2], nested=nested)
    assert jax.tree.structure(q) == jax.tree.structure(mapped) == jax.tree.structure(one)
    for ours, vmapped, single in zip(*map(jax.tree.leaves, (q, mapped, one)), strict=True):
        rtol = 0 if ours.dtype == jnp.uint8 else 1e-6  # the mean's order of summing may differ
        np.testing.assert_allclose(ours, vmapped, rtol=rtol)
        np.testing.assert_allclose(ours[1, 2], single, rtol=rtol)
        assert not np.allclose(ours[0, 2], single)
    dense = nf4.dequantize(q, jnp.float32)
    assert dense.shape == w.shape
    np.testing.assert_allclose(dense[1, 2], nf4.dequantize(one, jnp.float32), rtol=1e-5)
    layers = jax.tree.map(lambda x: x[1], q)
    _, scanned = lax.scan(lambda c, layer: (c, nf4.dequantize(layer, jnp.float32)), None, layers)
    assert same_bits(scanned, dense[1])


def test_no_index_array_is_made():
    q = random_nf4(256, 512, nested=False)

    def temporary(f) -> int:
        return jax.jit(f).lower(q).compile().memory_analysis().temp_size_in_bytes

    def with_indices(q):
        nibbles = jnp.stack([q.codes >> 4, q.codes & 15], -1).astype(jnp.int32)
        return jnp.asarray(CODE)[lax.optimization_barrier(nibbles)]

    assert temporary(lambda q: nf4.dequantize(q, jnp.float32)) < q.codes.size / 10
    assert temporary(with_indices) >= q.codes.size * 8


def test_refusals():
    q = random_nf4(8, 128, nested=False)
    with pytest.raises(ValueError, match=r"'triton' is unknown; known: auto, xla"):
        nf4.dequantize(q, jnp.float32, implementation="triton")
    with pytest.raises(ValueError, match="float dtype, got int8"):
        nf4.dequantize(q, jnp.int8)
    with pytest.raises(ValueError, match=r"codes of a \(8, 64\) weight .* uint8\[8, 32\], is"):
        nf4.dequantize(nf4.NF4(q.codes, q.absmax[:8], None, None, (8, 64)), jnp.float32)
    with pytest.raises(ValueError, match=r"absmax_scale .* should be absent|absmax .* uint8"):
        nf4.dequantize(nf4.NF4(q.codes, q.absmax, q.absmax[:1], None, q.shape), jnp.float32)
    for w in (jnp.zeros(64), jnp.zeros((2, 64), jnp.int32), jnp.zeros((0, 64))):
        with pytest.raises(ValueError, match=r"expected floats \[..., out, in\]"):
            nf4.quantize(w, nested=False)
