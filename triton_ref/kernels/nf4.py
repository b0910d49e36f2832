"""NF4 weights by the format of bitsandbytes: quantised in torch, dequantised by a kernel.

Codes of 4 bits and one scale for every 64 weights of the flattened matrix. Of nested scales the
scale less the mean of all scales is itself a code of 8 bits, with one float32 for every 256.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_ref.kernels.launch import check_device, needs_int64
from triton_ref.kernels.rounding import rounded

STATE = ".quant_state.bitsandbytes__nf4"  # behind the name of a weight that is NF4
BLOCK = 64  # weights of one scale
NESTED_BLOCK = 256  # scales of one scale of scales
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

_CHUNK = 2**22  # weights quantised at once: whole blocks of scales, 16 MiB as float32
_TILE = 4096  # weights of one program


@dataclass(frozen=True, eq=False)
class NF4:
    """A matrix `[out, in]` as codes and scales.

    codes: uint8 `[ceil(out * in / 2)]`; the first weight of a byte is its high nibble.
    absmax: one scale for every 64 weights; uint8 codes if nested, else float32.
    absmax_scale: float32 `[ceil(blocks / 256)]` if nested.
    absmax_offset: float32 `[]` if nested.
    shape: (out, in).

    Raises:
      ValueError: parts whose dtype or shape does not fit.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    absmax_scale: torch.Tensor | None
    absmax_offset: torch.Tensor | None
    shape: tuple[int, int]

    def __post_init__(self):
        count = math.prod(self.shape)
        blocks = -(-count // BLOCK)
        want: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        want = {"codes": (torch.uint8, (-(-count // 2),))}
        if self.nested:
            want["absmax"] = (torch.uint8, (blocks,))
            want["absmax_scale"] = (torch.float32, (-(-blocks // NESTED_BLOCK),))
            want["absmax_offset"] = (torch.float32, ())
        else:
            want["absmax"] = (torch.float32, (blocks,))
        for name, (dtype, shape) in want.items():
            part = getattr(self, name)
            if part is None or part.dtype != dtype or part.shape != shape:
                have = None if part is None else f"{part.dtype} {list(part.shape)}"
                raise ValueError(
                    f"nf4: {name} of {self.shape} must be {dtype} {list(shape)}, not {have}"
                )

    @property
    def nested(self) -> bool:
        """Whether the scales are codes themselves."""
        return self.absmax_scale is not None or self.absmax_offset is not None

    def to(self, device: torch.device | str) -> "NF4":
        """The same with its tensors on `device`."""
        scale, offset = self.absmax_scale, self.absmax_offset
        return NF4(
            self.codes.to(device),
            self.absmax.to(device),
            None if scale is None else scale.to(device),
            None if offset is None else offset.to(device),
            self.shape,
        )


def levels(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 `[16]`: what the codes stand for; ascending."""
    return torch.tensor(LEVELS, device=device)


def dynamic_map(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 `[256]`: what the codes of nested scales stand for; ascending.

    Seven decades from 1e-6 to 1, each cut into twice as many equal parts as the one below: the
    middle of every part with either sign, and 0 and 1.
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values.to(device)


def quantize(w: torch.Tensor, *, nested: bool = True) -> NF4:
    """Codes and scales of `w` `[out, in]` of any floating dtype, on its device.

    Each weight times the reciprocal of its block's largest magnitude goes to the nearest level,
    and from halfway to the lower one. A block of zeros has codes of 0.

    Raises:
      ValueError: `w` is no floating matrix, or has a value that is not finite in float32.
    """
    if w.ndim != 2 or not w.is_floating_point():
        raise ValueError(f"nf4: a floating matrix is needed, not {w.dtype} {list(w.shape)}")
    flat, book = w.detach().reshape(-1), levels(w.device)
    codes = torch.empty(-(-w.numel() // 2), dtype=torch.uint8, device=w.device)
    absmax = torch.empty(-(-w.numel() // BLOCK), dtype=torch.float32, device=w.device)
    for start in range(0, w.numel(), _CHUNK):
        indices, scales = _nearest(flat[start : start + _CHUNK].float(), BLOCK, book)
        first = start // BLOCK
        absmax[first : first + len(scales)] = scales
        packed = indices[::2] << 4 | indices[1::2]
        codes[start // 2 : (start + _CHUNK) // 2] = packed[: len(codes) - start // 2]
    if not bool(absmax.isfinite().all()):
        raise ValueError("nf4: the weights have a value that is not finite in float32")
    shape = (w.shape[0], w.shape[1])
    if not nested:
        return NF4(codes, absmax, None, None, shape)
    offset = absmax.double().sum().div(max(len(absmax), 1)).float()
    scale_codes, scales = _nearest(absmax - offset, NESTED_BLOCK, dynamic_map(w.device))
    return NF4(codes, scale_codes[: len(absmax)], scales, offset, shape)


def _nearest(values: torch.Tensor, block: int, book: torch.Tensor):
    """uint8 codes of float32 `values`, padded by zeros to whole blocks, and scales [blocks]."""
    blocks = -(-len(values) // block)
    values = torch.nn.functional.pad(values, (0, blocks * block - len(values)))
    values = values.view(blocks, block)
    scales = values.abs().amax(1)
    relative = torch.where(values == 0, 0, values * (1 / scales)[:, None]).clamp(-1, 1)
    middles = (book[:-1] + book[1:]) / 2
    codes = torch.bucketize(relative, middles, out_int32=True)  # how many of them lie below
    return codes.to(torch.uint8).view(-1), scales


def from_bitsandbytes(tensors: Mapping[str, torch.Tensor], name: str) -> NF4:
    """The weight `name` ("X.weight") of a file by bitsandbytes, from its parts as stored.

    Raises:
      ValueError: a part is missing, or has code books, block sizes or shapes of another format.
    """

    def part(suffix: str) -> torch.Tensor:
        if name + suffix not in tensors:
            raise ValueError(f"{name}: bitsandbytes' {name + suffix} is missing")
        return tensors[name + suffix]

    def expect(what: str, have: object, want: object) -> None:
        if have != want:
            raise ValueError(f"{name}: {what} is {have!r}, only {want!r} is read")

    def expect_book(suffix: str, want: torch.Tensor) -> None:
        book = part(suffix)
        if not torch.equal(book.float().cpu(), want):
            raise ValueError(f"{name}: {suffix[1:]} is not the code book of the format")

    state = json.loads(bytes(part(STATE).cpu().tolist()))
    expect("quant_type", state.get("quant_type"), "nf4")
    expect("blocksize", state.get("blocksize"), BLOCK)
    expect_book(".quant_map", levels())
    scale = offset = None
    if "nested_blocksize" in state or f"{name}.nested_absmax" in tensors:
        expect("nested_blocksize", state.get("nested_blocksize"), NESTED_BLOCK)
        expect_book(".nested_quant_map", dynamic_map())
        if not isinstance(state.get("nested_offset"), float | int):
            raise ValueError(f"{name}: nested_offset is missing")
        scale = part(".nested_absmax")
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=scale.device)
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"{name}: shape {shape!r} is not that of a matrix")
    codes = part("").contiguous().view(torch.uint8).view(-1)
    try:
        return NF4(codes, part(".absmax"), scale, offset, (shape[0], shape[1]))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def dequantize_definition(weight: NF4, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]` in `dtype`, from the definition.

    A nested scale is level * scale, rounded to float32, plus the offset, rounded again; a weight
    is level * scale in float32, rounded to `dtype`.
    """
    device = weight.codes.device
    indices = torch.stack((weight.codes >> 4, weight.codes & 15), 1).view(-1)
    values = levels(device)[indices[: math.prod(weight.shape)].long()]
    scales = weight.absmax
    if weight.absmax_scale is not None and weight.absmax_offset is not None:
        coarse = weight.absmax_scale.repeat_interleave(NESTED_BLOCK)[: len(scales)]
        scales = dynamic_map(device)[scales.long()] * coarse + weight.absmax_offset
    scales = scales.repeat_interleave(BLOCK)[: len(values)]
    return (values * scales).to(dtype).view(weight.shape)


@triton.jit
def _dequantize(
    codes,
    absmax,
    absmax_scale,
    absmax_offset,
    levels,
    scale_levels,
    out,
    count,
    NESTED: tl.constexpr,
    INT64: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    if INT64:
        program = program.to(tl.int64)
    index = program * TILE + tl.arange(0, TILE)
    inside = index < count
    byte = tl.load(codes + index // 2, mask=inside, other=0).to(tl.int32)
    nibble = tl.where(index % 2 == 0, byte >> 4, byte & 15)
    block = index // 64
    if NESTED:
        scale_code = tl.load(absmax + block, mask=inside, other=0).to(tl.int32)
        coarse = tl.load(absmax_scale + block // 256, mask=inside, other=0.0)
        scale = tl.load(scale_levels + scale_code) * coarse + tl.load(absmax_offset)
    else:
        scale = tl.load(absmax + block, mask=inside, other=0.0)
    value = tl.load(levels + nibble) * scale
    tl.store(out + index, rounded(value, out.dtype.element_ty), mask=inside)


def _settings(weight: NF4, out: torch.Tensor) -> dict[str, Any]:
    return {
        "NESTED": weight.nested,
        "INT64": needs_int64(out),
        "TILE": _TILE,
        "num_warps": 8,
        "enable_fp_fusion": False,  # the product of a nested scale is rounded before its offset
    }


def dequantize(weight: NF4, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]` in `dtype` (float32, bfloat16, float16), bit for bit as defined above.

    No gradient goes through it.

    Raises:
      ValueError: another dtype, or parts on several devices.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"nf4: dequantize to {dtype} is not supported")
    parts = [weight.codes, weight.absmax, weight.absmax_scale, weight.absmax_offset]
    check_device(*(part for part in parts if part is not None))
    codes, absmax, scale, offset = (None if part is None else part.contiguous() for part in parts)
    device = weight.codes.device
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    _dequantize[(triton.cdiv(out.numel(), _TILE),)](
        codes,
        absmax,
        scale,
        offset,
        levels(device),
        dynamic_map(device),
        out,
        out.numel(),
        **_settings(weight, out),
    )
    return out
