"""What only a GPU can show: its rounding, its memory kinds, its numbers beside a CPU's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_folder

from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.lora import add_adapters
from jaxft.lora_config import LoraConfig
from jaxft.loss import sum_of_losses
from jaxft.quant import Storage
from jaxft.step import split
from pallas_kernels.nf4 import NF4_CODE, dequantize, nested_code, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]
LORA = LoraConfig(4, 8.0, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), False)


def dense_by_numpy(q, fused: bool = False) -> np.ndarray:
    """The format's definition: two roundings of the scale, one of the weight."""
    codes = np.stack([np.asarray(q.codes) >> 4, np.asarray(q.codes) & 15], -1).reshape(-1)
    scale = np.asarray(q.absmax)
    if q.nested:
        outer = np.repeat(np.asarray(q.absmax_scale), 256)[: scale.size]
        level = np.asarray(nested_code(), np.float32)[scale]
        offset = np.asarray(q.absmax_offset)
        if fused:
            exact = level.astype(np.float64) * outer.astype(np.float64) + np.float64(offset)
            scale = exact.astype(np.float32)
        else:
            scale = (level * outer) + offset
    weights = np.asarray(NF4_CODE, np.float32)[codes] * np.repeat(scale, 64)
    return weights.reshape(q.shape)


@pytest.mark.parametrize("nested", [False, True])
def test_dequantise_has_the_roundings_of_the_format(nested):
    w = np.random.default_rng(0).normal(0, 0.02, (768, 1024)).astype(np.float32)
    q = quantize(jnp.asarray(w), nested=nested)
    ours = np.asarray(jax.jit(lambda q: dequantize(q, jnp.float32))(q))
    assert np.array_equal(ours, dense_by_numpy(q))
    half = np.asarray(dequantize(q, jnp.bfloat16))
    assert np.array_equal(half, dense_by_numpy(q).astype(jnp.bfloat16))
    if nested:
        assert not np.array_equal(ours, dense_by_numpy(q, fused=True))
    assert np.abs(ours - w).max() < 0.02


def decoder_and_rows(folder, storage):
    decoder = load_decoder(open_checkpoint(str(tiny_folder(folder))), storage)
    add_adapters(decoder, LORA, 0)
    random = np.random.default_rng(0)
    tokens = random.integers(4, 250, (2, 64)).astype(np.int32)
    segments = np.repeat([[1] * 30 + [2] * 25 + [0] * 9], 2, axis=0).astype(np.int32)
    targets = np.where(segments > 0, np.roll(tokens, -1, 1), -1).astype(np.int32)
    return decoder, {"tokens": tokens, "segment_ids": segments, "targets": targets}


def loss_and_gradient(decoder, rows, checkpointing):
    structure, trained, frozen = split(decoder)
    leaves, tree = jax.tree.flatten(trained)
    random = np.random.default_rng(1)
    leaves = [x + 0.05 * random.normal(size=x.shape).astype(np.float32) for x in leaves]

    def loss(trained, frozen):
        model = nnx.merge(structure, trained, frozen)
        return sum_of_losses(model, **rows, checkpointing=checkpointing)

    trained = jax.tree.unflatten(tree, leaves)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(trained, frozen).compile()
    value, gradient = compiled(trained, frozen)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(gradient)], compiled


def test_float32_is_float32(tmp_path):
    """No TF32: the GPU's loss and gradients are the CPU's to float32's own precision."""
    storage = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype("float32"))
    value, gradient, _ = loss_and_gradient(*decoder_and_rows(tmp_path, storage), "layer")
    with jax.default_device(jax.devices("cpu")[0]):
        expected, reference, _ = loss_and_gradient(*decoder_and_rows(tmp_path, storage), "layer")
    assert value == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(gradient, reference, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_bfloat16_is_near_and_is_used(tmp_path):
    wide = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype("float32"))
    half = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype("bfloat16"))
    expected, reference, _ = loss_and_gradient(*decoder_and_rows(tmp_path, wide), "layer")
    value, gradient, _ = loss_and_gradient(*decoder_and_rows(tmp_path, half), "layer")
    assert value != expected
    assert value == pytest.approx(expected, rel=1e-2)
    for ours, theirs in zip(gradient, reference, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


def test_policies_agree_and_offload_moves_to_the_host(tmp_path):
    storage = Storage(load_in_4bit=True, nested=True, compute=jnp.dtype("float32"))
    results = {
        policy: loss_and_gradient(*decoder_and_rows(tmp_path, storage), policy)
        for policy in ("false", "layer", "attention", "offload")
    }
    value, gradient, _ = results["false"]
    for other, theirs, _ in results.values():
        assert other == pytest.approx(value, rel=1e-5)
        for a, b in zip(gradient, theirs, strict=True):
            assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()
    host = {p: r[2].memory_analysis().host_temp_size_in_bytes for p, r in results.items()}
    assert host["offload"] >= 2 * 2 * 64 * 64 * 4  # two layers' inputs [2, 64, 64] in float32
    assert host["layer"] == 0
