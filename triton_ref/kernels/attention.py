"""Causal attention inside documents that lie one after another, forward and backward."""

import math
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_ref.kernels.dot import dot
from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.rounding import rounded
from triton_ref.kernels.tanh import tanh


def attention_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`[N, Hq, D]` in q's dtype, from the definition, one document at a time.

    Token i of a document sees token j of it where 0 <= i - j (< window): softmax over the scores
    scale * q_i k_j, or cap * tanh(score / cap) of them. In float32 (float64 for float64). Query
    head h reads key head h // (Hq // Hk). Tokens after the last document give 0.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    repeats = q.shape[1] // k.shape[1]
    ends = cu_seqlens.tolist()
    parts = []
    for start, end in pairwise(ends):
        one_q = q[start:end].to(wide).transpose(0, 1)
        one_k, one_v = (
            x[start:end].to(wide).transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v)
        )
        scores = one_q @ one_k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(end - start, device=q.device)
        apart = i[:, None] - i[None, :]
        seen = (apart >= 0) & (apart < (window or end))
        shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
        parts.append((shares @ one_v).transpose(0, 1))
    parts.append(q.new_zeros(len(q) - ends[-1], *q.shape[1:], dtype=wide))
    return torch.cat(parts).to(q.dtype)


@triton.jit
def _scores(
    q_tile,
    k_tile,
    row,
    key,
    end,
    scale,
    window,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Scores `[rows, keys]` with -inf where a key is not seen, and the slope of the cap."""
    score = dot(q_tile, tl.trans(k_tile)) * scale
    slope = tl.full(score.shape, 1.0, tl.float32)
    if SOFTCAP:
        capped = tanh(score / softcap)
        score = softcap * capped
        slope = 1.0 - capped * capped
    apart = row[:, None] - key[None, :]
    seen = (apart >= 0) & (row < end)[:, None]
    if WINDOW:
        seen &= apart < window
    return tl.where(seen, score, float("-inf")), slope


@triton.jit
def _tile(base, row, end, head, HEADS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
          INT64: tl.constexpr):  # fmt: skip
    """Rows of one head `[rows, COLS]`, zero past the document's end: nothing else is read."""
    column = tl.arange(0, COLS)
    wide = row.to(tl.int64) if INT64 else row
    at = (wide[:, None] * HEADS + head) * D + column[None, :]
    return tl.load(base + at, mask=(row < end)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _put(base, value, row, end, head, HEADS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr,
         INT64: tl.constexpr):  # fmt: skip
    column = tl.arange(0, COLS)
    wide = row.to(tl.int64) if INT64 else row
    at = (wide[:, None] * HEADS + head) * D + column[None, :]
    inside = (row < end)[:, None] & (column < D)[None, :]
    tl.store(base + at, rounded(value, base.dtype.element_ty), mask=inside)


@triton.jit
def _forward(
    q,
    k,
    v,
    out,
    logsumexp,
    cu_seqlens,
    tokens,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    first = start + tl.program_id(0) * ROWS
    if first >= end:
        return
    kv_head = head // (HEADS // KV_HEADS)
    row = first + tl.arange(0, ROWS)
    q_tile = _tile(q, row, end, head, HEADS, D, COLS, INT64)
    if WINDOW:
        start = tl.maximum(start, first - window + 1)
    total = tl.zeros([ROWS, COLS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for at in range(start, tl.minimum(first + ROWS, end), KEYS):
        key = at + tl.arange(0, KEYS)
        k_tile = _tile(k, key, end, kv_head, KV_HEADS, D, COLS, INT64)
        v_tile = _tile(v, key, end, kv_head, KV_HEADS, D, COLS, INT64)
        score, _ = _scores(q_tile, k_tile, row, key, end, scale, window, softcap, WINDOW, SOFTCAP)
        higher = tl.maximum(most, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        shrink = tl.exp(most - level)
        share = tl.exp(score - level[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        share = rounded(share, v_tile.dtype)
        total = total * shrink[:, None] + dot(share, v_tile)
        most = higher
    real = row < end
    weight = tl.where(real, weight, 1.0)
    _put(out, total / weight[:, None], row, end, head, HEADS, D, COLS, INT64)
    level = tl.where(real, most, 0.0)
    tl.store(logsumexp + head * tokens + row, level + tl.log(weight), mask=real)


@triton.jit
def _backward_q(
    q,
    k,
    v,
    d_out,
    d_q,
    logsumexp,
    delta,
    cu_seqlens,
    tokens,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, document = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    first = start + tl.program_id(0) * ROWS
    if first >= end:
        return
    kv_head = head // (HEADS // KV_HEADS)
    row = first + tl.arange(0, ROWS)
    real = row < end
    q_tile = _tile(q, row, end, head, HEADS, D, COLS, INT64)
    d_tile = _tile(d_out, row, end, head, HEADS, D, COLS, INT64)
    level = tl.load(logsumexp + head * tokens + row, mask=real, other=0.0)[:, None]
    mean = tl.load(delta + head * tokens + row, mask=real, other=0.0)[:, None]
    if WINDOW:
        start = tl.maximum(start, first - window + 1)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(start, tl.minimum(first + ROWS, end), KEYS):
        key = at + tl.arange(0, KEYS)
        k_tile = _tile(k, key, end, kv_head, KV_HEADS, D, COLS, INT64)
        v_tile = _tile(v, key, end, kv_head, KV_HEADS, D, COLS, INT64)
        score, slope = _scores(
            q_tile, k_tile, row, key, end, scale, window, softcap, WINDOW, SOFTCAP
        )
        share = tl.exp(score - level)
        d_share = dot(d_tile, tl.trans(v_tile))
        d_score = rounded(share * (d_share - mean) * slope, k_tile.dtype)
        total += dot(d_score, k_tile)
    _put(d_q, total * scale, row, end, head, HEADS, D, COLS, INT64)


@triton.jit
def _backward_kv(
    q,
    k,
    v,
    d_out,
    d_k,
    d_v,
    logsumexp,
    delta,
    cu_seqlens,
    tokens,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head, document = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_seqlens + document), tl.load(cu_seqlens + document + 1)
    first = start + tl.program_id(0) * KEYS
    if first >= end:
        return
    key = first + tl.arange(0, KEYS)
    k_tile = _tile(k, key, end, kv_head, KV_HEADS, D, COLS, INT64)
    v_tile = _tile(v, key, end, kv_head, KV_HEADS, D, COLS, INT64)
    of_k = tl.zeros([KEYS, COLS], tl.float32)
    of_v = tl.zeros([KEYS, COLS], tl.float32)
    last = end
    if WINDOW:
        last = tl.minimum(end, first + KEYS - 1 + window)
    for member in range(HEADS // KV_HEADS):
        head = kv_head * (HEADS // KV_HEADS) + member
        for at in range(first, last, ROWS):
            row = at + tl.arange(0, ROWS)
            real = row < end
            q_tile = _tile(q, row, end, head, HEADS, D, COLS, INT64)
            d_tile = _tile(d_out, row, end, head, HEADS, D, COLS, INT64)
            level = tl.load(logsumexp + head * tokens + row, mask=real, other=0.0)[:, None]
            mean = tl.load(delta + head * tokens + row, mask=real, other=0.0)[:, None]
            score, slope = _scores(
                q_tile, k_tile, row, key, end, scale, window, softcap, WINDOW, SOFTCAP
            )
            share = tl.exp(score - level)
            d_share = dot(d_tile, tl.trans(v_tile))
            d_score = rounded(share * (d_share - mean) * slope, q_tile.dtype)
            share = rounded(share, d_tile.dtype)
            of_v += dot(tl.trans(share), d_tile)
            of_k += dot(tl.trans(d_score), q_tile)
    _put(d_k, of_k * scale, key, end, kv_head, KV_HEADS, D, COLS, INT64)
    _put(d_v, of_v, key, end, kv_head, KV_HEADS, D, COLS, INT64)


def tiles(dtype: torch.dtype, head_dim: int, backward: bool) -> tuple[int, int, int]:
    """Query rows and keys of a tile, and warps: what fits into the shared memory of an H100."""
    if dtype == torch.float32:
        return (32, 32, 4) if head_dim <= 128 else (16, 16, 4)
    if head_dim > 128:
        return (32, 32, 4) if backward else (64, 32, 4)
    return (64, 64, 8 if head_dim == 128 else 4) if backward else (128, 64, 8)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, max_seqlen: int, scale: float, window, softcap):
        out = torch.zeros_like(q)
        logsumexp = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        ctx.how = (max_seqlen, scale, window, softcap)
        grid, settings, numbers = _launch(q, k, cu_seqlens, ctx.how, backward=False)
        if q.numel() and grid[0]:
            _forward[grid](q, k, v, out, logsumexp, cu_seqlens, len(q), *numbers, **settings)
        ctx.save_for_backward(q, k, v, out, logsumexp, cu_seqlens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, logsumexp, cu_seqlens = ctx.saved_tensors
        d_out = d_out.contiguous()
        delta = (out.float() * d_out.float()).sum(-1).T.contiguous()
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grid, settings, numbers = _launch(q, k, cu_seqlens, ctx.how, backward=True)
        if q.numel() and grid[0]:
            rest = (logsumexp, delta, cu_seqlens, len(q), *numbers)
            _backward_q[grid](q, k, v, d_out, d_q, *rest, **settings)
            tiles_of_keys = triton.cdiv(ctx.how[0], settings["KEYS"])
            grid = (tiles_of_keys, k.shape[1], grid[2])
            _backward_kv[grid](q, k, v, d_out, d_k, d_v, *rest, **settings)
        return d_q, d_k, d_v, None, None, None, None, None


def _launch(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, how, *, backward: bool):
    max_seqlen, scale, window, softcap = how
    columns = max(triton.next_power_of_2(q.shape[2]), 16)
    rows, keys, warps = tiles(q.dtype, columns, backward)
    settings: dict[str, Any] = {
        "HEADS": q.shape[1],
        "KV_HEADS": k.shape[1],
        "D": q.shape[2],
        "COLS": columns,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "INT64": needs_int64(q),
        "ROWS": rows,
        "KEYS": keys,
        "num_warps": warps,
        "num_stages": 2,
    }
    grid = (triton.cdiv(max_seqlen, rows), q.shape[1], len(cu_seqlens) - 1)
    return grid, settings, (scale, window or 0, softcap or 0.0)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`[N, Hq, D]` in q's dtype, as defined above; softmax and sums in float32.

    The backward pass has one kernel for q and one for k and v, which adds up the query heads of a
    key head in order: equal inputs give equal bits. No value of another document, or after the
    last one, is ever read into an arithmetic.

    Args:
      q: float32, bfloat16 or float16 `[N, Hq, D]`.
      k, v: `[N, Hk, D]`, Hk a divisor of Hq.
      cu_seqlens: int32 `[documents + 1]`, where documents begin and end, from 0 to at most N.
        Its numbers are not looked at: that would stop the GPU.
      max_seqlen: tokens of the longest, at least.
      scale: factor on the scores.
      window: how many tokens a query sees, itself included; None: all before it.
      softcap: bound of the scores; None: none.

    Raises:
      ValueError: other dtypes or shapes, a window or cap that is not positive, several devices.
    """
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"attention: q of {q.dtype} is not supported")
    if k.dtype != q.dtype or v.dtype != q.dtype or k.shape != v.shape:
        raise ValueError(f"attention: k {k.dtype} {list(k.shape)} and v do not fit q {q.dtype}")
    same = q.ndim == k.ndim == 3 and q.shape[::2] == k.shape[::2]
    if not same or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: q {list(q.shape)} and k {list(k.shape)} do not fit")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError("attention: cu_seqlens must be int32 [documents + 1]")
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"attention: window {window} and softcap {softcap} must be above 0")
    check_device(q, k, v, cu_seqlens)
    if window is not None and window >= max_seqlen:  # int32 has no room for the largest
        window = None
    return _Attention.apply(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens.contiguous(),
        max_seqlen,
        scale,
        window,
        softcap,
    )
