"""Gated linear units: activation(gate) * up, forward and backward, one kernel each."""

import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.rounding import rounded

Activation = Literal["silu", "gelu_tanh"]

_TILE = 4096  # numbers of one program


def glu_definition(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`[N, F]` in `gate`'s dtype, from the definition.

    activation(gate) * up in float32 (float64 for float64) with one rounding, where silu(x) is
    x * sigmoid(x), and gelu_tanh(x) is x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
    """
    x = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation == "silu":
        active = x * torch.sigmoid(x)
    else:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        active = 0.5 * x * (1 + torch.tanh(inner))
    return (active * up.to(x.dtype)).to(gate.dtype)


@triton.jit
def _gate_and_slope(x, GELU: tl.constexpr):
    """s and x * ds/dx of the activation x * s, where s is a sigmoid of x or of a cubic in x.

    (1 + tanh(z)) / 2 is the sigmoid of 2 z. Only powers of e below 1 are taken, and the cubic
    within +-100, past which the sigmoid is 0 or 1 in float32: nothing overflows. NaN stays NaN.
    """
    inner = x
    inner_slope = x  # times x
    if GELU:
        near = tl.clamp(x, -100.0, 100.0, propagate_nan=tl.PropagateNan.ALL)
        cube = near * near * near
        inner = 1.5957691216057308 * (near + 0.044715 * cube)  # 2 * sqrt(2 / pi)
        inner_slope = 1.5957691216057308 * (near + 0.134145 * cube)
    power = tl.exp(-tl.abs(inner))
    above = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + power)
    below = power * above  # the sigmoid of -|inner|
    slope = below * above * inner_slope
    return tl.where(inner >= 0, above, below), slope


@triton.jit
def _forward(gate, up, out, count, GELU: tl.constexpr, INT64: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    if INT64:
        program = program.to(tl.int64)
    index = program * TILE + tl.arange(0, TILE)
    inside = index < count
    x = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    s, _ = _gate_and_slope(x, GELU)
    tl.store(out + index, rounded(x * s * factor, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_out,
    gate,
    up,
    d_gate,
    d_up,
    count,
    GELU: tl.constexpr,
    INT64: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    if INT64:
        program = program.to(tl.int64)
    index = program * TILE + tl.arange(0, TILE)
    inside = index < count
    x = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + index, mask=inside, other=0.0).to(tl.float32)
    s, slope = _gate_and_slope(x, GELU)
    of_gate = rounded(d * factor * (s + slope), d_gate.dtype.element_ty)
    tl.store(d_gate + index, of_gate, mask=inside)
    tl.store(d_up + index, rounded(d * (x * s), d_up.dtype.element_ty), mask=inside)


def _settings(gate: torch.Tensor, gelu: bool) -> dict[str, Any]:
    return {"GELU": gelu, "INT64": needs_int64(gate), "TILE": _TILE, "num_warps": 8}


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, gelu: bool):
        out = torch.empty_like(gate)
        if out.numel():
            _forward[(triton.cdiv(out.numel(), _TILE),)](
                gate,
                up,
                out,
                out.numel(),
                **_settings(out, gelu),
            )
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _backward[(triton.cdiv(gate.numel(), _TILE),)](
                d_out.contiguous(),
                gate,
                up,
                d_gate,
                d_up,
                gate.numel(),
                **_settings(gate, ctx.gelu),
            )
        return d_gate, d_up, None


def glu(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`[N, F]` in `gate`'s dtype, as defined above; the backward recomputes from gate and up.

    gate, up: float32, bfloat16 or float16 `[N, F]` of one dtype.

    Raises:
      ValueError: other dtypes or shapes, an unknown activation, or several devices.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(
            f"glu: activation {activation!r} is unknown; there are 'silu' and 'gelu_tanh'"
        )
    if gate.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"glu: gate of {gate.dtype} is not supported")
    if gate.ndim != 2 or (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"glu: gate {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)} "
            "must be matrices of one shape and dtype"
        )
    check_device(gate, up)
    return _Glu.apply(gate.contiguous(), up.contiguous(), activation == "gelu_tanh")
