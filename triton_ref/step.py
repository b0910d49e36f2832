"""The training step: packed rows in, an updated adapter out."""

from dataclasses import dataclass

import torch

from triton_ref.model import Decoder
from triton_ref.packing import Packed


@dataclass(frozen=True)
class Update:
    """What one optimiser step saw: mean loss of its targets, gradient norm before clipping."""

    loss: float
    grad_norm: float


def make_optimizer(
    decoder: Decoder, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over A and B with torch's own betas and epsilon."""
    return torch.optim.AdamW(decoder.parameters(), lr=learning_rate, weight_decay=weight_decay)


def update(
    decoder: Decoder, optimizer: torch.optim.Optimizer, packed: Packed, max_grad_norm: float
) -> Update:
    """One optimiser step; the gradient is that of the mean over the targets, clipped to a norm.

    A `max_grad_norm` of 0 means no clipping.

    Raises:
      ValueError: the step has no target.
    """
    count = int((packed.targets >= 0).sum())
    if count == 0:
        raise ValueError("a step without a target")
    optimizer.zero_grad()
    total = decoder.losses(packed).sum()
    total.backward()
    for parameter in decoder.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    limit = max_grad_norm or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), limit)
    optimizer.step()
    return Update(total.item() / count, float(norm))
