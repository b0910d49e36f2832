"""Rotary positions on queries and keys, each head normalised first if wanted: one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.rounding import rounded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 4096  # numbers of one program: whole heads of some tokens


def qk_norm_rope_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_factor: float = 1.0,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, Hq, D]` and `[N, Hk, D]` in the inputs' dtype, from the definition.

    Each head x is x / sqrt(mean(x^2) + eps) * (scale + norm_offset) first, where there are scales.
    Then, of the first R = 2 len(inv_freq) entries, those at i and i + R/2 turn by the angle
    position * inv_freq[i] and are multiplied by attention_factor. In float32 (float64 for
    float64) with one rounding at the end.
    """

    def one(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide)
        if scale is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
            y = y * (scale.to(wide) + norm_offset)
        angle = positions.to(wide)[:, None, None] * inv_freq.to(wide)
        cos, sin = angle.cos() * attention_factor, angle.sin() * attention_factor
        half = len(inv_freq)
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, -1).to(x.dtype)

    return one(q, q_scale), one(k, k_scale)


@triton.jit
def _head(
    x,
    y,
    d_y,
    scale,
    share,
    row,
    at,
    cos,
    sin,
    tokens,
    eps,
    offset,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    NORM: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """One head of a tile of tokens, forward into y, or backward from d_y into y."""
    column = tl.arange(0, HALF_TILE)
    real = (row < tokens)[:, None]
    inside = real & (column < HALF)[None, :]
    at_a = at[:, None] + column[None, :]
    at_b = at_a + HALF
    rest = tl.arange(0, REST_TILE)
    in_rest = real & (rest < REST)[None, :]
    at_c = at[:, None] + 2 * HALF + rest[None, :]
    kind = y.dtype.element_ty
    if NORM:
        a = tl.load(x + at_a, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + at_b, mask=inside, other=0.0).to(tl.float32)
        mask = column < HALF
        w_a = (tl.load(scale + column, mask=mask, other=0.0).to(tl.float32) + offset)[None, :]
        w_b = (tl.load(scale + HALF + column, mask=mask, other=0.0).to(tl.float32) + offset)[
            None, :
        ]
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            c = tl.load(x + at_c, mask=in_rest, other=0.0).to(tl.float32)
            w_c = tl.load(scale + 2 * HALF + rest, mask=rest < REST, other=0.0).to(tl.float32)
            w_c = (w_c + offset)[None, :]
            square += tl.sum(c * c, 1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(square / WIDTH + eps))[:, None]
        a *= inverse
        b *= inverse
        if REST > 0:
            c *= inverse
    if BACKWARD:
        d_a = tl.load(d_y + at_a, mask=inside, other=0.0).to(tl.float32)
        d_b = tl.load(d_y + at_b, mask=inside, other=0.0).to(tl.float32)
        back_a = d_a * cos + d_b * sin
        back_b = d_b * cos - d_a * sin
        if REST > 0:
            back_c = tl.load(d_y + at_c, mask=in_rest, other=0.0).to(tl.float32)
        if NORM:
            tl.store(share + column, tl.sum(back_a * a, 0), mask=column < HALF)
            tl.store(share + HALF + column, tl.sum(back_b * b, 0), mask=column < HALF)
            back_a *= w_a
            back_b *= w_b
            mean = tl.sum(back_a * a, 1) + tl.sum(back_b * b, 1)
            if REST > 0:
                tl.store(share + 2 * HALF + rest, tl.sum(back_c * c, 0), mask=rest < REST)  # pyright: ignore[reportOperatorIssue]
                back_c *= w_c  # pyright: ignore[reportOperatorIssue]
                mean += tl.sum(back_c * c, 1)
            mean = (mean / WIDTH)[:, None]
            back_a = inverse * (back_a - a * mean)
            back_b = inverse * (back_b - b * mean)
            if REST > 0:
                back_c = inverse * (back_c - c * mean)
        tl.store(y + at_a, rounded(back_a, kind), mask=inside)
        tl.store(y + at_b, rounded(back_b, kind), mask=inside)
        if REST > 0:
            tl.store(y + at_c, rounded(back_c, kind), mask=in_rest)
    else:
        if NORM:
            a *= w_a  # pyright: ignore[reportOperatorIssue]
            b *= w_b  # pyright: ignore[reportOperatorIssue]
        else:
            a = tl.load(x + at_a, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at_b, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at_a, rounded(a * cos - b * sin, kind), mask=inside)
        tl.store(y + at_b, rounded(b * cos + a * sin, kind), mask=inside)
        if REST > 0:
            if NORM:
                c *= w_c  # pyright: ignore[reportOperatorIssue]
            else:
                c = tl.load(x + at_c, mask=in_rest, other=0.0).to(tl.float32)
            tl.store(y + at_c, rounded(c, kind), mask=in_rest)


@triton.jit
def _kernel(
    q,
    k,
    out_q,
    out_k,
    d_q,
    d_k,
    positions,
    inv_freq,
    q_scale,
    k_scale,
    shares,
    tokens,
    factor,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    NORM: tl.constexpr,
    BACKWARD: tl.constexpr,
    INT64: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    share = shares + (tile * (HEADS + KV_HEADS) + head) * WIDTH
    row = tile * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HALF_TILE)
    frequency = tl.load(inv_freq + column, mask=column < HALF, other=0.0)
    position = tl.load(positions + row, mask=row < tokens, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    wide = row
    if INT64:
        wide = row.to(tl.int64)
    if head < HEADS:
        _head(
            q, out_q, d_q, q_scale, share, row, (wide * HEADS + head) * WIDTH,
            cos, sin, tokens, eps, offset,
            WIDTH, HALF, REST, HALF_TILE, REST_TILE, NORM, BACKWARD,
        )  # fmt: skip
    else:
        _head(
            k, out_k, d_k, k_scale, share, row, (wide * KV_HEADS + head - HEADS) * WIDTH,
            cos, sin, tokens, eps, offset,
            WIDTH, HALF, REST, HALF_TILE, REST_TILE, NORM, BACKWARD,
        )  # fmt: skip


def _settings(
    q: torch.Tensor, k: torch.Tensor, inv_freq: torch.Tensor, norm: bool, backward: bool
) -> dict[str, Any]:
    width, half = q.shape[2], len(inv_freq)
    half_tile = triton.next_power_of_2(half)
    return {
        "HEADS": q.shape[1],
        "KV_HEADS": k.shape[1],
        "WIDTH": width,
        "HALF": half,
        "REST": width - 2 * half,
        "HALF_TILE": half_tile,
        "REST_TILE": triton.next_power_of_2(max(width - 2 * half, 1)),
        "NORM": norm,
        "BACKWARD": backward,
        "INT64": needs_int64(q, k),
        "TOKENS": max(_TILE // (2 * half_tile), 1),
        "num_warps": 4,
    }


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, positions, inv_freq, factor, q_scale, k_scale, eps, offset):
        ctx.numbers = (factor, eps, offset)
        norm = q_scale is not None
        if norm:  # the backward pass normalises its inputs again
            out_q, out_k = torch.empty_like(q), torch.empty_like(k)
            ctx.save_for_backward(positions, inv_freq, q, k, q_scale, k_scale)
        else:
            out_q, out_k = q.view_as(q), k.view_as(k)
            ctx.save_for_backward(positions, inv_freq)
        settings = _settings(q, k, inv_freq, norm, backward=False)
        grid = (triton.cdiv(len(q), settings["TOKENS"]), q.shape[1] + k.shape[1])
        if q.numel():
            _kernel[grid](
                q, k, out_q, out_k, q, k, positions, inv_freq, q_scale, k_scale, q,
                len(q), factor, eps, offset, **settings,
            )  # fmt: skip
        if not norm:
            torch.autograd.graph.increment_version(q)
            torch.autograd.graph.increment_version(k)
        return out_q, out_k

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        d_q, d_k = (gradient.contiguous() for gradient in gradients)
        factor, eps, offset = ctx.numbers
        positions, inv_freq, *kept = ctx.saved_tensors
        q, k, q_scale, k_scale = kept or (d_q, d_k, None, None)
        out_q, out_k = torch.empty_like(d_q), torch.empty_like(d_k)
        settings = _settings(q, k, inv_freq, bool(kept), backward=True)
        tiles, heads = triton.cdiv(len(q), settings["TOKENS"]), q.shape[1] + k.shape[1]
        shares = inv_freq.new_zeros(tiles, heads, q.shape[2]) if kept else d_q
        if q.numel():
            _kernel[(tiles, heads)](
                q, k, out_q, out_k, d_q, d_k, positions, inv_freq, q_scale, k_scale, shares,
                len(q), factor, eps, offset, **settings,
            )  # fmt: skip
        scales: tuple[Any, Any] = (None, None)
        if q_scale is not None and k_scale is not None:
            of_q, of_k = shares[:, : q.shape[1]], shares[:, q.shape[1] :]
            scales = of_q.sum((0, 1)).to(q_scale.dtype), of_k.sum((0, 1)).to(k_scale.dtype)
        return out_q, out_k, None, None, None, *scales, None, None


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    attention_factor: float = 1.0,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, Hq, D]` and `[N, Hk, D]`, as defined above.

    Without scales q and k are overwritten, as long as they are contiguous and no leaves of a
    graph or views of one: the backward pass does not need them, and autograd refuses a use of
    their old values. With scales it normalises them again, so the results are new tensors.

    Args:
      q, k: float32, bfloat16 or float16 of one dtype and N; D of both alike.
      positions: int32 `[N]`.
      inv_freq: float32 `[R / 2]`, R at most D.
      attention_factor: on what is turned.
      q_scale, k_scale: `[D]`, both or neither.
      eps, norm_offset: of the norm.

    Raises:
      ValueError: other dtypes or shapes, one scale without the other, or several devices.
    """
    if q.dtype not in _DTYPES or k.dtype != q.dtype:
        raise ValueError(f"qk_norm_rope: q of {q.dtype} and k of {k.dtype} are not supported")
    if q.ndim != 3 or k.ndim != 3 or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"qk_norm_rope: q {list(q.shape)} and k {list(k.shape)} do not fit")
    if positions.shape != q.shape[:1] or positions.dtype != torch.int32:
        raise ValueError(f"qk_norm_rope: positions must be int32 [{len(q)}]")
    most = q.shape[2] // 2
    if inv_freq.ndim != 1 or inv_freq.dtype != torch.float32 or not 0 < len(inv_freq) <= most:
        raise ValueError(f"qk_norm_rope: inv_freq must be float32 of 1 to {most} numbers")
    if (q_scale is None) != (k_scale is None):
        raise ValueError("qk_norm_rope: q_scale and k_scale are given both or not at all")
    for scale in (q_scale, k_scale):
        if scale is None:
            continue
        if scale.shape != q.shape[2:] or scale.dtype not in _DTYPES:
            raise ValueError(f"qk_norm_rope: a scale must be [{q.shape[2]}] in 16 or 32 bits")
    check_device(*(t for t in (q, k, positions, inv_freq, q_scale, k_scale) if t is not None))
    q, k = _owned(q, q_scale), _owned(k, k_scale)
    if q_scale is None and q.data_ptr() == k.data_ptr():
        k = k.clone()
    return _QKNormRope.apply(
        q,
        k,
        positions.contiguous(),
        inv_freq.contiguous(),
        attention_factor,
        None if q_scale is None else q_scale.contiguous(),
        None if k_scale is None else k_scale.contiguous(),
        eps,
        norm_offset,
    )


def _owned(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A contiguous tensor, which may be overwritten where there is no scale."""
    whole = x if x._base is None else x._base  # of a view, what it looks at
    if scale is None and whole.is_leaf and whole.requires_grad:
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()
