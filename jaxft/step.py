"""The training step: one packed batch in, an updated adapter out, in one compiled function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jaxft.loss import count_targets, sum_of_losses

Batch = Mapping[str, Any]  # tokens, segment_ids, targets: int32 [A, B, T], A micro-batches
EvalStep = Callable[[nnx.State, nnx.State, Batch], tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What training changes; a checkpoint for resuming holds exactly this."""

    trained: nnx.State
    optimizer: Any
    step: jax.Array  # int32 [], updates done


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """What one update reports, each a scalar on the device."""

    loss: jax.Array  # mean over the targets of the step; NaN where it has none
    grad_norm: jax.Array  # of the whole step, before clipping
    learning_rate: jax.Array
    target_tokens: jax.Array


def split(decoder: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The model as structure, trained tree and frozen tree."""
    structure, trained, frozen = nnx.split(decoder, nnx.LoRAParam, ...)
    return structure, trained, frozen


def init_state(trained: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(trained, optimizer.init(trained), jnp.zeros((), jnp.int32))


def make_train_step(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    dropout: bool,
    checkpointing: str,
) -> Callable[[TrainState, nnx.State, Batch], tuple[TrainState, StepMetrics]]:
    """The compiled update `(state, frozen, batch) -> (state, metrics)`; the state is donated.

    The gradient is that of the sum of token losses over all micro-batches, divided by the number
    of targets of the whole step. A step without targets, or whose gradient is not finite, changes
    nothing but the count of steps.
    """

    def update(state: TrainState, frozen: nnx.State, batch: Batch):
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)

        def loss(trained, micro, number):
            key = jax.random.fold_in(step_key, number) if dropout else None
            model = nnx.merge(structure, trained, frozen)
            return sum_of_losses(model, **micro, dropout_key=key, checkpointing=checkpointing)

        total, gradient = _accumulate(jax.value_and_grad(loss), state.trained, batch)
        count = count_targets(batch["targets"])
        gradient = jax.tree.map(lambda g: g / jnp.maximum(count, 1), gradient)
        norm = optax.tree.norm(gradient)  # a sum of squares: a dot product could run in TF32
        learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
        updates, moments = optimizer.update(gradient, state.optimizer, state.trained)
        trained = jax.tree.map(lambda p, u: p + learning_rate * u, state.trained, updates)
        usable = jnp.isfinite(norm) & (count > 0)
        trained, moments = jax.tree.map(
            lambda new, old: jnp.where(usable, new, old),
            (trained, moments),
            (state.trained, state.optimizer),
        )
        mean = jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)
        metrics = StepMetrics(mean, norm, learning_rate, count)
        return TrainState(trained, moments, state.step + 1), metrics

    return jax.jit(update, donate_argnums=0)


def make_eval_step(structure: nnx.GraphDef) -> EvalStep:
    """The compiled `(trained, frozen, batch) -> (sum of losses, number of targets)`, no dropout."""

    def evaluate(trained: nnx.State, frozen: nnx.State, batch: Batch):
        model = nnx.merge(structure, trained, frozen)

        def micro_sum(total, micro):
            return total + sum_of_losses(model, **micro), None

        total, _ = lax.scan(micro_sum, jnp.zeros((), jnp.float32), batch)
        return total, count_targets(batch["targets"])

    return jax.jit(evaluate)


def _accumulate(value_and_grad: Callable, trained: nnx.State, batch: Batch):
    """Sum of losses and gradients over the micro-batches, the leading axis of the batch."""
    count = batch["targets"].shape[0]
    if count == 1:
        return value_and_grad(trained, {k: v[0] for k, v in batch.items()}, 0)

    def add(carry, micro_and_number):
        return jax.tree.map(jnp.add, carry, value_and_grad(trained, *micro_and_number)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, trained))
    return lax.scan(add, zeros, (batch, jnp.arange(count)))[0]
