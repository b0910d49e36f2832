"""Rematerialisation changes what is kept between the passes, and no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import load, save_llama
from model_oracles import add_lora, pack_rows, relative

from jaxft.lora import adapter_arrays
from jaxft.loss import sum_of_losses
from jaxft.model.remat import rematerialise
from jaxft.step import split

pytest.importorskip("torch")

LENGTH, LAYERS, HIDDEN, HEADS = 48, 3, 32, 4
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 64, n).tolist() for n in (20, 3, 15)]
POLICIES = ("layer", "attention", "false")  # by rising memory


@pytest.fixture(scope="module")
def runs(tmp_path_factory, fixtures):
    """For each policy: loss, gradients, bytes kept, and operations of one layer in all passes."""
    folder = tmp_path_factory.mktemp("llama")
    save_llama(fixtures, folder, num_hidden_layers=LAYERS)
    decoder = add_lora(load(folder), dropout=0.2, targets=("v_proj", "down_proj"))
    structure, trained, frozen = split(decoder)
    batch = jax.tree.map(jnp.asarray, pack_rows([DOCUMENTS], LENGTH))

    def run(policy):
        def loss(trained, frozen, key):
            model = nnx.merge(structure, trained, frozen)
            return sum_of_losses(model, **batch, dropout_key=key, checkpointing=policy)

        def between_passes(trained, *rest):
            return jax.vjp(lambda t: loss(t, *rest), trained)[1]

        given = (trained, frozen, jax.random.key(1))
        kept = jax.eval_shape(between_passes, *given)
        compiled = jax.jit(jax.value_and_grad(loss)).lower(*given).compile()
        value, gradients = compiled(*given)
        gradients = adapter_arrays(nnx.merge(structure, gradients, frozen))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
        other_masks = compiled(trained, frozen, jax.random.key(2))[0]
        assert abs(value - other_masks) > 0.1
        return float(value), gradients, size, compiled.cost_analysis()["flops"]

    return {policy: run(policy) for policy in POLICIES}


def test_same_loss_and_gradients(runs):
    """With dropout, whose masks must come out the same when a layer is run again."""
    loss, gradients, *_ = runs["false"]
    for policy in POLICIES:
        assert runs[policy][0] == pytest.approx(loss, rel=1e-6)
        assert relative(runs[policy][1], gradients) < 1e-5
    assert min(np.linalg.norm(g) for pair in gradients.values() for g in pair) > 1e-3


def test_each_keeps_what_its_name_says(runs):
    layer, attention, everything = (runs[policy][2] for policy in POLICIES)
    print("KEPT", layer, attention, everything, [runs[p][3] for p in POLICIES])
    output_and_logsumexp = 4 * LAYERS * LENGTH * (HIDDEN + HEADS)
    assert attention - layer == output_and_logsumexp
    hidden = 4 * LAYERS * LENGTH * HIDDEN
    assert everything > attention + 8 * hidden


def test_each_runs_again_what_it_did_not_keep(runs):
    layer, attention, everything = (runs[policy][3] for policy in POLICIES)
    assert layer > attention > everything


def test_refuses_an_unknown_policy():
    with pytest.raises(ValueError, match="'some' is unknown; known: layer, attention"):
        rematerialise(lambda x: x, "some")
