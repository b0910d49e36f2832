"""The optimiser of the trained tree, and the learning rate of each update."""

from dataclasses import dataclass

import optax


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule, under transformers' names."""

    learning_rate: float
    lr_scheduler_type: str  # linear, cosine or constant
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float  # 0: gradients are not clipped


def make_schedule(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of update s = 0, 1, ..., `total_steps` - 1.

    The first `warmup_steps` = W updates use (s + 1) / (W + 1) of the peak, so that none is wasted
    at zero. From update W on it is transformers' rule: the peak at update W, then a line or half a
    cosine over the remaining total - W updates, which would reach zero one update after the last;
    or the peak throughout.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_steps = max(1, total_steps - warmup)
    match config.lr_scheduler_type:
        case "constant":
            decay = optax.constant_schedule(peak)
        case "linear":
            decay = optax.linear_schedule(peak, 0.0, decay_steps)
        case "cosine":
            decay = optax.cosine_decay_schedule(peak, decay_steps)
        case other:
            raise ValueError(f"lr_scheduler_type {other!r} is unknown")
    if warmup == 0:
        return decay
    start = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([start, decay], [warmup])


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clipping, Adam and decoupled weight decay; the step multiplies by the learning rate.

    It is given the trained tree alone: what it sees, it decays.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(
        clip if config.max_grad_norm > 0 else optax.identity(),
        optax.scale_by_adam(),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale(-1.0),
    )
