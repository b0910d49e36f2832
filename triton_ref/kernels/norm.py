"""RMSNorm with an optional residual: the sum that the stream goes on with, and its norm."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.rounding import rounded

Form = Literal["llama", "gemma"]

_TILE = 8192  # numbers of one tile: whole rows
_PROGRAMS = 256  # at most, of the backward: each sums its rows' share of the weight's gradient


def rms_norm_definition(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    form: Form = "llama",
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) `[N, H]` in `x`'s dtype, from the definition.

    h = x + residual, y = h / sqrt(mean(h^2) + eps) * scale, in float32 (float64 for float64).
    The form "llama" rounds the normalised value to `x`'s dtype before it is multiplied, and its
    scale is the weight `[H]`; in "gemma" it is 1 + weight, and nothing is rounded in between.
    """
    h = x if residual is None else x + residual
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = h.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if form == "llama":
        y = normed.to(x.dtype).to(wide) * weight.to(wide)
    else:
        y = normed * (1 + weight.to(wide))
    return y.to(x.dtype), h


@triton.jit
def _forward(
    x,
    residual,
    weight,
    y,
    h,
    inverse,
    rows,
    width,
    eps,
    RESIDUAL: tl.constexpr,
    GEMMA: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    if INT64:
        tile = tile.to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = rounded(value, h.dtype.element_ty)
        tl.store(h + at, total, mask=inside)
        value = total.to(tl.float32)
    mean = tl.sum(value * value, 1) / width
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(inverse + row, factor, mask=row < rows)
    normed = value * factor[:, None]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if GEMMA:
        scale += 1.0
    else:
        normed = rounded(normed, y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, rounded(normed * scale, y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_y,
    d_h,
    h,
    weight,
    inverse,
    d_x,
    d_weight,
    rows,
    width,
    D_H: tl.constexpr,
    D_WEIGHT: tl.constexpr,
    GEMMA: tl.constexpr,
    INT64: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if GEMMA:
        scale += 1.0
    share = tl.zeros([WIDTH], tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        if INT64:
            row = row.to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        factor = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) * factor
        d_out = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
        d_normed = d_out * scale
        mean = tl.sum(d_normed * normed, 1) / width
        gradient = (d_normed - normed * mean[:, None]) * factor
        if D_H:
            gradient += tl.load(d_h + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, rounded(gradient, d_x.dtype.element_ty), mask=inside)
        if D_WEIGHT:
            if not GEMMA:
                normed = rounded(normed, d_y.dtype.element_ty).to(tl.float32)
            share += tl.sum(d_out * normed, 0)
    if D_WEIGHT:
        tl.store(d_weight + program * width + column, share, mask=column < width)


def _settings(x: torch.Tensor, form: Form, **switches: bool) -> dict[str, Any]:
    """Among them the rows of one tile, and its width: a power of 2 with room for a whole row."""
    width = triton.next_power_of_2(x.shape[1])
    return {
        "GEMMA": form == "gemma",
        "INT64": needs_int64(x),
        "ROWS": max(_TILE // width, 1),
        "WIDTH": width,
        "num_warps": 8,
        **switches,
    }


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps: float, form: Form):
        ctx.set_materialize_grads(False)
        rows, width = x.shape
        h = x.view_as(x) if residual is None else torch.empty_like(x)
        y = torch.empty_like(x)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        if x.numel():
            settings = _settings(x, form, RESIDUAL=residual is not None)
            _forward[(triton.cdiv(rows, settings["ROWS"]),)](
                x,
                residual,
                weight,
                y,
                h,
                inverse,
                rows,
                width,
                eps,
                **settings,
            )
        ctx.save_for_backward(x if residual is None else h, weight, inverse)
        ctx.form = form
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_h):  # pyright: ignore[reportIncompatibleMethodOverride]
        h, weight, inverse = ctx.saved_tensors
        for_x, for_residual, for_weight = ctx.needs_input_grad[:3]
        if d_y is None:
            zeros = torch.zeros_like(weight) if for_weight else None
            return d_h if for_x else None, d_h if for_residual else None, zeros, None, None
        rows, width = h.shape
        d_x = torch.empty_like(h)
        d_weight = torch.zeros_like(weight) if for_weight else None
        if h.numel():
            settings = _settings(h, ctx.form, D_H=d_h is not None, D_WEIGHT=for_weight)
            programs = min(triton.cdiv(rows, settings["ROWS"]), _PROGRAMS)
            shares = h.new_empty(programs, width, dtype=torch.float32) if for_weight else None
            _backward[(programs,)](
                d_y.contiguous(),
                None if d_h is None else d_h.contiguous(),
                h,
                weight,
                inverse,
                d_x,
                shares,
                rows,
                width,
                **settings,
            )
            if shares is not None:
                d_weight = shares.sum(0).to(weight.dtype)
        return d_x if for_x else None, d_x if for_residual else None, d_weight, None, None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    form: Form = "llama",
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h) `[N, H]` in `x`'s dtype, as defined above.

    x, residual: float32, bfloat16 or float16 `[N, H]` of one dtype; weight: any of them, `[H]`.
    The gradient of x and of residual has the cotangent of h in it, added before the one rounding.

    Raises:
      ValueError: other dtypes or shapes, an unknown form, or several devices.
    """
    if form not in ("llama", "gemma"):
        raise ValueError(f"rms_norm: form {form!r} is unknown; there are 'llama' and 'gemma'")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"rms_norm: {name} of {tensor.dtype} is not supported")
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"rms_norm: x {list(x.shape)} and weight {list(weight.shape)} do not fit")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"rms_norm: residual {residual.dtype} {list(residual.shape)} must be as x, "
            f"{x.dtype} {list(x.shape)}"
        )
    check_device(*(tensor for tensor in (x, weight, residual) if tensor is not None))
    residual = None if residual is None else residual.contiguous()
    return _RMSNorm.apply(x.contiguous(), residual, weight.contiguous(), eps, form)
