"""The loss of a head over its vocabulary, without an array of all logits.

The vocabulary is walked in chunks, in the backward once more. The logits of a chunk are float32:
from 16-bit inputs by a product that accumulates and returns float32 where torch has it (CUDA),
else by a product of the inputs in float32. The gradients' products are of float32 inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.tanh import tanh

_ROWS = 8  # of one tile
_COLUMNS = 1024  # of one tile, at most


def linear_cross_entropy_definition(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    *,
    softcap: float | None = None,
) -> torch.Tensor:
    """float32 (float64 for float64) `[N]`, from the definition.

    z = hidden head^T, with a soft-cap c then c tanh(z / c); logsumexp(z) - z[target], or 0 where
    the target is -1.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ head.to(wide).T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    index = targets.long().clamp(min=0)[:, None]
    nll = torch.logsumexp(logits, 1) - logits.gather(1, index)[:, 0]
    return torch.where(targets >= 0, nll, 0)


@triton.jit
def _forward(
    logits,
    targets,
    largest,
    total,
    wanted,
    rows,
    columns,
    start,
    softcap,
    SOFTCAP: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds a chunk of logits that begins at entry `start` to what is known of every row.

    largest, total, wanted: float32 `[rows]`: the largest logit so far, the sum of
    exp(logit - largest), and the target's logit once it has been met.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    target = tl.load(targets + row, mask=present, other=-1).to(tl.int32) - start
    top = tl.load(largest + row, mask=present, other=0.0)
    mass = tl.load(total + row, mask=present, other=0.0)
    found = tl.load(wanted + row, mask=present, other=0.0)
    base = row
    if INT64:
        base = row.to(tl.int64)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        valid = (column < columns)[None, :]
        at = base[:, None] * columns + column[None, :]
        z = tl.load(logits + at, mask=present[:, None] & valid, other=0.0)
        if SOFTCAP:
            z = softcap * tanh(z / softcap)
        hit = valid & (column[None, :] == target[:, None])
        found += tl.sum(tl.where(hit, z, 0.0), 1)
        z = tl.where(valid, z, -float("inf"))
        new = tl.maximum(top, tl.max(z, 1))
        level = tl.where(new == -float("inf"), 0.0, new)  # nothing but -inf so far
        mass = mass * tl.exp(top - level) + tl.sum(tl.exp(z - level[:, None]), 1)
        top = new
    tl.store(largest + row, top, mask=present)
    tl.store(total + row, mass, mask=present)
    tl.store(wanted + row, found, mask=present)


@triton.jit
def _backward(
    logits,
    targets,
    largest,
    total,
    d_nll,
    rows,
    columns,
    start,
    softcap,
    SOFTCAP: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Puts the gradient of a chunk of logits in their place; 0 in rows without a target."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    target = tl.load(targets + row, mask=present, other=-1).to(tl.int32)
    counts = (target >= 0)[:, None]
    target -= start
    top = tl.load(largest + row, mask=present, other=0.0)
    mass = tl.load(total + row, mask=present, other=1.0)
    d = tl.load(d_nll + row, mask=present, other=0.0)
    base = row
    if INT64:
        base = row.to(tl.int64)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = present[:, None] & (column < columns)[None, :]
        at = base[:, None] * columns + column[None, :]
        z = tl.load(logits + at, mask=inside, other=0.0)
        slope = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
        if SOFTCAP:
            capped = tanh(z / softcap)
            slope = (1.0 - capped) * (1.0 + capped)
            z = softcap * capped
        # beside the row's entries the 0 that was loaded may lie above the largest logit
        share = tl.exp(tl.minimum(z - top[:, None], 0.0)) / mass[:, None]
        share -= tl.where(column[None, :] == target[:, None], 1.0, 0.0)
        gradient = tl.where(counts, share * slope * d[:, None], 0.0)
        tl.store(logits + at, gradient, mask=inside)


def _logits(hidden: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """float32 `[N, chunk]`: hidden times some rows of the head."""
    if hidden.dtype == torch.float32:
        return hidden @ part.T
    if hidden.is_cuda:
        return torch.mm(hidden, part.T, out_dtype=torch.float32)
    return hidden.float() @ part.float().T


def _settings(logits: torch.Tensor, softcap: float | None) -> dict[str, Any]:
    return {
        "SOFTCAP": softcap is not None,
        "INT64": needs_int64(logits),
        "ROWS": _ROWS,
        "COLUMNS": min(triton.next_power_of_2(logits.shape[1]), _COLUMNS),
        "num_warps": 8,
    }


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, targets, softcap: float | None, chunk: int):
        rows, vocabulary = len(hidden), len(head)
        largest = torch.full((rows,), -torch.inf, dtype=torch.float32, device=hidden.device)
        total, wanted = torch.zeros_like(largest), torch.zeros_like(largest)
        for start in range(0, vocabulary if rows else 0, chunk):
            logits = _logits(hidden, head[start : start + chunk])
            _forward[(triton.cdiv(rows, _ROWS),)](
                logits,
                targets,
                largest,
                total,
                wanted,
                rows,
                logits.shape[1],
                start,
                softcap or 0.0,
                **_settings(logits, softcap),
            )
        ctx.save_for_backward(hidden, head, targets, largest, total)
        ctx.softcap, ctx.chunk = softcap, chunk
        return torch.where(targets >= 0, (largest - wanted) + total.log(), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_nll):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, head, targets, largest, total = ctx.saved_tensors
        for_hidden, for_head = ctx.needs_input_grad[:2]
        d_nll, rows = d_nll.contiguous(), len(hidden)
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        d_head = torch.zeros_like(head) if for_head else None
        wide = hidden.float() if for_head else None
        for start in range(0, len(head) if rows else 0, ctx.chunk):
            part = head[start : start + ctx.chunk]
            logits = _logits(hidden, part)
            _backward[(triton.cdiv(rows, _ROWS),)](
                logits,
                targets,
                largest,
                total,
                d_nll,
                rows,
                logits.shape[1],
                start,
                ctx.softcap or 0.0,
                **_settings(logits, ctx.softcap),
            )
            if d_hidden is not None:
                d_hidden.addmm_(logits, part.float())
            if d_head is not None and wide is not None:
                d_head[start : start + ctx.chunk] = logits.T @ wide
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_head, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    *,
    softcap: float | None = None,
    chunk: int = 8192,
) -> torch.Tensor:
    """float32 `[N]`: each row's negative log-likelihood of its target, as defined above.

    hidden `[N, H]`, head `[V, H]`: float32, bfloat16 or float16 of one dtype; targets int32 or
    int64 `[N]`, -1 for none. The largest arrays are float32 `[N, chunk]` and `[chunk, H]`.
    Products of float32 are as exact as torch's settings let them be: TF32 is off by default.

    Raises:
      ValueError: other dtypes or shapes, a target that the vocabulary does not have, a soft-cap
        or chunk that is not positive, or several devices.
    """
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"cross_entropy: hidden of {hidden.dtype} is not supported")
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(
            f"cross_entropy: hidden {list(hidden.shape)} and head {list(head.shape)} do not fit"
        )
    if head.dtype != hidden.dtype:
        raise ValueError(f"cross_entropy: head of {head.dtype}, but hidden of {hidden.dtype}")
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cross_entropy: targets must be int32 or int64 {list(hidden.shape[:1])}, "
            f"not {targets.dtype} {list(targets.shape)}"
        )
    if (softcap is not None and not softcap > 0) or chunk < 1:
        raise ValueError(f"cross_entropy: softcap {softcap} and chunk {chunk} must be positive")
    check_device(hidden, head, targets)
    if bool(((targets < -1) | (targets >= len(head))).any()):
        raise ValueError(f"cross_entropy: targets must be from -1 to {len(head) - 1}")
    return _LinearCrossEntropy.apply(
        hidden.contiguous(), head.contiguous(), targets.contiguous(), softcap, chunk
    )
