"""The training step: packed rows in, an updated adapter out."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from triton_ref.model import Decoder
from triton_ref.packing import Packed


@dataclass(frozen=True)
class Update:
    """What one optimiser step saw: mean loss of its targets, gradient norm before clipping."""

    loss: float
    grad_norm: float


def sum_of_losses(decoder: Decoder, micro_batches: Iterable[Packed]) -> tuple[float, int]:
    """Losses of all targets, and how many; their gradients are added to the adapters'."""
    total, count = 0.0, 0
    for packed in micro_batches:
        loss = decoder.losses(packed).sum()
        loss.backward()
        total += loss.item()
        count += int((packed.targets >= 0).sum())
    return total, count


def make_optimizer(
    decoder: Decoder, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over A and B with torch's own betas and epsilon."""
    return torch.optim.AdamW(decoder.parameters(), lr=learning_rate, weight_decay=weight_decay)


def update(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Packed],
    max_grad_norm: float,
) -> Update:
    """One optimiser step over micro-batches; the gradient is that of the mean over its targets.

    Raises:
      ValueError: the step has no target.
    """
    optimizer.zero_grad()
    total, count = sum_of_losses(decoder, micro_batches)
    if count == 0:
        raise ValueError("a step without a target")
    for parameter in decoder.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    limit = max_grad_norm or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), limit)
    optimizer.step()
    return Update(total / count, float(norm))
