"""Packed rows without their padding: one run of tokens and the lengths of its documents."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packed:
    """The documents of a batch one after another, N tokens in all.

    Attributes:
      tokens: int64 `[N]`.
      positions: int32 `[N]`, index of each in its document.
      targets: int64 `[N]`, the token to predict; -1 for none.
      cu_seqlens: int32 `[documents + 1]`, where they begin and end.
      max_seqlen: of the longest.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


def unpad(tokens: torch.Tensor, segment_ids: torch.Tensor, targets: torch.Tensor) -> Packed:
    """Rows `[B, T]` (segment 0: padding; a document is a run of one other number) as one run."""
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(tokens)
    real = segment_ids != 0
    owner = torch.stack([row[real], segment_ids[real]])
    _, lengths = torch.unique_consecutive(owner, dim=1, return_counts=True)
    ends = lengths.cumsum(0)
    index = torch.arange(int(real.sum()), device=tokens.device)
    return Packed(
        tokens=tokens[real].long(),
        positions=(index - (ends - lengths).repeat_interleave(lengths)).int(),
        targets=targets[real].long(),
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).int(),
        max_seqlen=int(lengths.max()) if len(lengths) else 0,
    )
