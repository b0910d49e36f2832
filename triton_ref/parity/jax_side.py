"""The JAX path of a comparison: `python -m triton_ref.parity.jax_side WORK DTYPE`."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxft.errors import UserError
from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.formats.peft import load_adapter
from jaxft.lora import adapter_arrays, add_adapters, projections, set_adapter_arrays
from jaxft.loss import sum_of_losses
from jaxft.model.attention import Where
from jaxft.model.decoder import Decoder, document_positions
from jaxft.optim import OptimConfig, make_optimizer, make_schedule
from jaxft.quant import Storage, dense
from jaxft.step import init_state, make_train_step, split
from pallas_kernels.attention import make_plan
from pallas_kernels.cross_entropy import cross_entropy
from triton_ref.names import text_path
from triton_ref.parity.job import BATCHES, Job, in_one_line, result_file
from triton_ref.parity.named import run_named
from triton_ref.parity.tensors import matrix_rows

Arrays = dict[str, np.ndarray]


def run(work: Path, dtype: str) -> Path:
    """Record the first batch's step, then take the optimiser steps; the result's file."""
    job = Job.load(work)
    storage = Storage(job.load_in_4bit, job.nested, jnp.dtype(dtype))
    decoder = load_decoder(open_checkpoint(job.model), storage, max_length=job.max_length)
    config, pairs = load_adapter(Path(job.adapter))
    add_adapters(decoder, config, seed=0)
    set_adapter_arrays(decoder, pairs)
    batches = load_file(work / BATCHES)
    first = {name: jnp.asarray(array[0]) for name, array in batches.items()}
    result = _weights(decoder) | _activations(decoder, first, job) | _gradients(decoder, first)
    result |= _steps(decoder, batches, job)
    path = result_file(work, "jax", dtype)
    save_file({name: np.ascontiguousarray(array) for name, array in result.items()}, path)
    return path


def _weights(decoder: Decoder) -> Arrays:
    found = {}
    for modules, linear in projections(decoder):
        for i, module in enumerate(modules):
            weight = jax.tree.map(lambda x, i=i: x[i], linear.weight.get_value())
            matrix = dense(weight, decoder.compute)
            rows = np.array(matrix_rows(matrix.shape[0]))
            found[f"weight/{text_path(module)}"] = np.asarray(matrix[rows].astype(jnp.float32))
    return found


def _layers(decoder: Decoder) -> Iterator[tuple[nnx.GraphDef, nnx.State, int | None]]:
    """Every layer by itself, in order: structure, tensors and window."""
    for group in decoder.groups:
        parts = [nnx.split(member) for member in group.members]
        for repetition in range(group.size):
            for member, (structure, state) in zip(group.members, parts, strict=True):
                yield structure, jax.tree.map(lambda x, i=repetition: x[i], state), member.window


def _activations(decoder: Decoder, batch: dict[str, jax.Array], job: Job) -> Arrays:
    """Rows of all named activations and of their gradients, layer by layer and back again."""
    segment_ids = batch["segment_ids"]
    places = np.flatnonzero(np.asarray(segment_ids))[np.array(job.tokens)]
    positions = document_positions(segment_ids)
    windows = {window for _, _, window in _layers(decoder)}
    wheres = {w: Where(positions, make_plan(segment_ids, window=w)) for w in windows}

    def rows(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])[places].astype(jnp.float32)

    def layer(structure, state, where, x):
        return nnx.merge(structure, state)(x, where, None, None)[0]

    @partial(jax.jit, static_argnums=0)
    def forward(structure, state, where, x):
        return layer(structure, state, where, x)

    @partial(jax.jit, static_argnums=0)
    def backward(structure, state, where, x, dy):
        named = partial(run_named, partial(layer, structure, state, where))
        shapes = jax.eval_shape(lambda x: named({}, x)[1], x)
        taps = {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
        _, pull, values = jax.vjp(lambda x, taps: named(taps, x), x, taps, has_aux=True)
        dx, gradients = pull(dy)
        return dx, jax.tree.map(rows, values), jax.tree.map(rows, gradients)

    @jax.jit
    def last(x):
        def end(x, tap):
            hidden = decoder.norm(x)[0] + tap
            cap = decoder.config.final_softcap
            losses = cross_entropy(hidden, decoder.head, batch["targets"], softcap=cap)
            return losses.sum(), (hidden, losses)

        zeros = jnp.zeros_like(x)
        (dx, dhidden), (hidden, losses) = jax.grad(end, (0, 1), has_aux=True)(x, zeros)
        found = {
            "value/stream": x,
            "value/hidden": hidden,
            "value/nll": losses,
            "gradient/hidden": dhidden,
            "gradient/stream": dx,
        }
        return dx, jax.tree.map(rows, found) | {"loss": losses.sum()}

    x = decoder.embed(batch["tokens"])
    inputs = []
    for structure, state, window in _layers(decoder):
        inputs.append(x)
        x = forward(structure, state, wheres[window], x)
    dx, found = last(x)
    for n, (structure, state, window) in reversed(list(enumerate(_layers(decoder)))):
        dx, values, gradients = backward(structure, state, wheres[window], inputs.pop(), dx)
        found |= {f"value/model.layers.{n}.{name}": v for name, v in values.items()}
        found |= {f"gradient/model.layers.{n}.{name}": g for name, g in gradients.items()}
    found["loss"] = np.array([found["loss"]], np.float64)
    return {name: np.asarray(array) for name, array in found.items()}


def _gradients(decoder: Decoder, batch: dict[str, jax.Array]) -> Arrays:
    """Gradients of the mean loss with respect to A and B, of the whole compiled model."""
    structure, trained, frozen = split(decoder)

    @jax.jit
    def gradient(trained):
        def loss(trained):
            model = nnx.merge(structure, trained, frozen)
            return sum_of_losses(model, batch["tokens"], batch["segment_ids"], batch["targets"])

        return jax.grad(loss)(trained)

    count = int((np.asarray(batch["targets"]) >= 0).sum())
    pairs = adapter_arrays(nnx.merge(structure, gradient(trained), frozen))
    return {
        f"lora/{text_path(module)}.{part}": array / count
        for module, pair in pairs.items()
        for part, array in zip("AB", pair, strict=True)
    }


def _steps(decoder: Decoder, batches: Arrays, job: Job) -> Arrays:
    structure, trained, frozen = split(decoder)
    optim = OptimConfig(job.learning_rate, "constant", 0, job.weight_decay, job.max_grad_norm)
    optimizer = make_optimizer(optim)
    update = make_train_step(
        structure,
        optimizer,
        make_schedule(optim, max(job.steps, 1)),
        seed=0,
        dropout=False,
        checkpointing="false",
    )
    state, found = init_state(trained, optimizer), []
    for i in range(job.steps):
        batch = {name: array[i : i + 1] for name, array in batches.items()}  # one micro-batch
        state, metrics = update(state, frozen, batch)
        found.append(metrics)
    result = {
        "losses": np.array([m.loss for m in found], np.float64),
        "grad_norms": np.array([m.grad_norm for m in found], np.float64),
    }
    if found:
        trained = adapter_arrays(nnx.merge(structure, state.trained, frozen))
        for module, pair in trained.items():
            for part, array in zip("AB", pair, strict=True):
                result[f"trained/{text_path(module)}.{part}"] = array
    return result


if __name__ == "__main__":
    in_one_line(run, (UserError,), sys.argv[1:])
