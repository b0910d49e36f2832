"""NF4 in Triton against bitsandbytes, its definition, and a search in numpy."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from triton_hopper import compile_for_hopper

from triton_ref.kernels import nf4
from triton_ref.kernels.launch import interpreted, needs_int64

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STATE = ".quant_state.bitsandbytes__nf4"


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, so that the scales differ."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape[0], 1, generator=random) + 0.1
    return (torch.randn(*shape, generator=random) * sizes).to(DEVICE)


def by_bitsandbytes(w: torch.Tensor, nested: bool):
    functional = pytest.importorskip("bitsandbytes.functional")
    return functional.quantize_4bit(w.cpu(), quant_type="nf4", compress_statistics=nested)


def stored(w: torch.Tensor, nested: bool) -> dict[str, torch.Tensor]:
    """What bitsandbytes puts into a file for the weight "x.weight"."""
    codes, state = by_bitsandbytes(w, nested)
    parts = {f"x.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return parts | {"x.weight": codes}


def test_dynamic_map():
    functional = pytest.importorskip("bitsandbytes.functional")
    book = nf4.dynamic_map()
    assert torch.equal(book, functional.create_dynamic_map())
    assert (book[127], book[255], len(book)) == (0, 1, 256)
    assert torch.equal(nf4.levels(), functional.get_4bit_type("nf4", device="cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [True, False])
def test_dequantises_as_bitsandbytes(nested, dtype):
    """Bit for bit; at widths that are whole blocks, where its CPU path is right."""
    functional = pytest.importorskip("bitsandbytes.functional")
    w = matrix(261, 192)
    parts = stored(w.to(dtype), nested)
    weight = nf4.from_bitsandbytes(parts, "x.weight").to(DEVICE)
    assert (weight.shape, weight.nested) == ((261, 192), nested)
    codes, state = by_bitsandbytes(w.to(dtype), nested)
    theirs = functional.dequantize_4bit(codes, state)
    ours = nf4.dequantize(weight, dtype)
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours.cpu(), theirs)
    assert (ours - w).abs().max() < 0.16 * w.abs().max()  # half of the widest gap, and rounding

    swapped = dataclasses.replace(weight, codes=weight.codes << 4 | weight.codes >> 4)
    assert (nf4.dequantize(swapped, dtype) - w).abs().mean() > 0.3
    if nested:
        no_offset = dataclasses.replace(weight, absmax_offset=torch.zeros((), device=DEVICE))
        assert (nf4.dequantize(no_offset, dtype) - w).abs().mean() > 0.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (67, 250)])
def test_is_its_definition(shape, nested, dtype, monkeypatch):
    weight = nf4.quantize(matrix(*shape), nested=nested)
    want = nf4.dequantize_definition(weight, dtype)
    assert want.shape == shape
    assert torch.equal(nf4.dequantize(weight, dtype), want)
    monkeypatch.setattr(nf4, "needs_int64", lambda *_: True)
    assert torch.equal(nf4.dequantize(weight, dtype), want)


def test_nested_scales_are_rounded_twice():
    """One rounding of product and offset, as by a fused multiply-add, gives other weights."""
    weight = nf4.quantize(matrix(128, 256))
    book, level = nf4.dynamic_map(DEVICE), nf4.levels(DEVICE)
    coarse = weight.absmax_scale.repeat_interleave(256)[: len(weight.absmax)].double()
    exact = book[weight.absmax.long()].double() * coarse
    fused = (exact + weight.absmax_offset.double()).float()
    twice = exact.float() + weight.absmax_offset
    codes = torch.stack((weight.codes >> 4, weight.codes & 15), 1).view(-1, 64).long()
    ours = nf4.dequantize(weight, torch.float32).view(-1, 64)
    assert torch.equal(ours, level[codes] * twice[:, None])
    assert (ours != level[codes] * fused[:, None]).double().mean() > 0.01


@pytest.mark.parametrize("nested", [True, False])
def test_quantises_as_bitsandbytes(nested):
    for dtype in DTYPES:
        w = matrix(96, 320, seed=1).to(dtype)
        codes, state = by_bitsandbytes(w, nested)
        weight = nf4.quantize(w, nested=nested)
        assert torch.equal(weight.codes.cpu(), codes.view(-1))
        if not nested:
            assert torch.equal(weight.absmax.cpu(), state.absmax)
            continue
        # its mean is summed in float32, and it sometimes takes the level next to the nearest
        torch.testing.assert_close(weight.absmax_offset.cpu(), state.offset, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            weight.absmax_scale.cpu(), state.state2.absmax, rtol=1e-5, atol=0
        )
        apart = (weight.absmax.cpu().int() - state.absmax.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).double().mean() < 0.02


def test_takes_the_nearest_levels():
    """Against a search over all levels in float64, with blocks over row ends and a short one."""
    w = matrix(35, 250, seed=2).cpu().numpy().astype(np.float64).reshape(-1)
    w[128:192] = 0
    weight = nf4.quantize(torch.tensor(w.reshape(35, 250), device=DEVICE)).to("cpu")
    blocks = np.pad(w, (0, -len(w) % 64)).reshape(-1, 64)
    absmax = np.abs(blocks).max(1)
    with np.errstate(invalid="ignore"):
        relative = np.nan_to_num(blocks / absmax[:, None])
    book = nf4.levels().double().numpy()
    nearest = np.abs(relative[..., None] - book).argmin(-1).reshape(-1)[: len(w)]
    ours = np.stack((weight.codes >> 4, weight.codes & 15), 1).reshape(-1)
    np.testing.assert_array_equal(ours, nearest)
    assert (weight.codes[64:96] == 0x77).all()

    offset = float(weight.absmax_offset)
    np.testing.assert_allclose(offset, absmax.mean(), rtol=1e-7)
    scale = np.abs(absmax - offset).max()
    assert len(weight.absmax_scale) == 1
    np.testing.assert_allclose(float(weight.absmax_scale[0]), scale, rtol=1e-6)
    distance = np.abs((absmax - offset)[:, None] / scale - nf4.dynamic_map().double().numpy())
    chosen = distance[np.arange(len(absmax)), weight.absmax.numpy()]
    assert (chosen <= distance.min(1) + 1e-7).all()
    next_one = distance[np.arange(len(absmax)), (weight.absmax.numpy() + 1).clip(max=255)]
    assert (next_one > distance.min(1) + 1e-7).mean() > 0.9


def test_halfway_goes_down():
    book = nf4.levels(DEVICE)
    row = torch.ones(64, device=DEVICE)
    row[:15] = (book[:-1] + book[1:]) / 2
    weight = nf4.quantize(row[None], nested=False)
    codes = torch.stack((weight.codes >> 4, weight.codes & 15), 1).view(-1)
    assert codes[:15].tolist() == list(range(15))
    row[:15] = torch.nextafter(row[:15], row.new_tensor(2.0))
    codes = nf4.quantize(row[None], nested=False).codes
    assert torch.stack((codes >> 4, codes & 15), 1).view(-1)[:15].tolist() == list(range(1, 16))


def test_chunks_change_nothing(monkeypatch):
    w = matrix(131, 321)
    whole = nf4.quantize(w)
    monkeypatch.setattr(nf4, "_CHUNK", 256)
    chunked = nf4.quantize(w)
    for name in ("codes", "absmax", "absmax_scale", "absmax_offset"):
        assert torch.equal(getattr(whole, name), getattr(chunked, name))


def test_tiny_magnitudes_and_zeros():
    """The reciprocal of a subnormal scale is infinite; nothing becomes NaN."""
    w = torch.zeros(2, 64, device=DEVICE)
    w[0, :3] = torch.tensor([1e-40, -1e-40, 0.0])
    codes = nf4.quantize(w, nested=False).codes
    assert codes[:2].tolist() == [0xF0, 0x77]
    for nested in (True, False):
        out = nf4.dequantize(
            nf4.quantize(torch.zeros(3, 5, device=DEVICE), nested=nested), DTYPES[0]
        )
        assert torch.equal(out, torch.zeros(3, 5, device=DEVICE))
        empty = nf4.quantize(torch.zeros(0, 64, device=DEVICE), nested=nested)
        assert nf4.dequantize(empty, torch.bfloat16).shape == (0, 64)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_reads_codes_of_any_storage_dtype(storage):
    parts = stored(matrix(16, 128), True)
    want = nf4.from_bitsandbytes(parts, "x.weight")
    parts["x.weight"] = parts["x.weight"].view(-1).view(storage).view(-1, 1)
    assert torch.equal(nf4.from_bitsandbytes(parts, "x.weight").codes, want.codes)


def test_refuses_other_formats():
    parts = stored(matrix(16, 128), True)
    state = json.loads(bytes(parts["x.weight" + STATE].tolist()))

    def read(changes: dict, **state_changes):
        text = json.dumps(state | state_changes).encode()
        packed = {"x.weight" + STATE: torch.tensor(list(text), dtype=torch.uint8)}
        return nf4.from_bitsandbytes(parts | packed | changes, "x.weight")

    assert torch.equal(read({}).codes, parts["x.weight"].view(-1))
    for key in ("quant_map", "nested_quant_map"):
        book = parts[f"x.weight.{key}"].clone()
        book[3] += 1e-3
        with pytest.raises(ValueError, match=rf"^x\.weight: {key} is not the code book"):
            read({f"x.weight.{key}": book})
    for key, value in (("blocksize", 128), ("nested_blocksize", 64), ("quant_type", "fp4")):
        with pytest.raises(ValueError, match=rf"^x\.weight: {key} is {value!r}, only"):
            read({}, **{key: value})
    with pytest.raises(ValueError, match=r"^x\.weight: nf4: codes of \(16, 130\) must be"):
        read({}, shape=[16, 130])
    with pytest.raises(ValueError, match=r"^x\.weight: nested_offset is missing"):
        read({}, nested_offset=None)
    with pytest.raises(ValueError, match=r"^y: bitsandbytes' y\.quant_state\S* is missing"):
        nf4.from_bitsandbytes(parts, "y")
    del parts["x.weight.nested_absmax"]
    with pytest.raises(ValueError, match=r"x\.weight\.nested_absmax is missing"):
        read({})


def test_refuses_wrong_parts():
    weight = nf4.quantize(matrix(4, 64))
    with pytest.raises(ValueError, match=r"absmax of \(4, 64\) must be torch.float32 \[4\]"):
        nf4.NF4(weight.codes, weight.absmax, None, None, weight.shape)
    with pytest.raises(ValueError, match=r"absmax_offset .* not None"):
        dataclasses.replace(weight, absmax_offset=None)
    with pytest.raises(ValueError, match=r"dequantize to torch\.float64"):
        nf4.dequantize(weight, torch.float64)
    for bad in (torch.zeros(64), torch.zeros(2, 64, dtype=torch.int32)):
        with pytest.raises(ValueError, match="a floating matrix is needed"):
            nf4.quantize(bad)
    for value in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="not finite"):
            nf4.quantize(torch.full((1, 64), value))


def test_wide_offsets_are_chosen_by_size():
    small, large = (torch.empty(n, 2**16, device="meta") for n in (2**10, 2**15))
    assert (needs_int64(small), needs_int64(large)) == (False, True)
    weight = nf4.quantize(matrix(2, 64))
    assert [nf4._settings(weight, out)["INT64"] for out in (small, large)] == [False, True]


def test_compiles_for_hopper():
    kernels = []
    weight = {nested: nf4.quantize(matrix(4, 64), nested=nested) for nested in (True, False)}
    for dtype, nested in (("bf16", True), ("fp32", True), ("bf16", False)):
        types = {"codes": "*u8", "levels": "*fp32", "scale_levels": "*fp32", "count": "i32"}
        types |= {"absmax": "*u8" if nested else "*fp32", "out": f"*{dtype}"}
        types |= dict.fromkeys(("absmax_scale", "absmax_offset"), "*fp32" if nested else None)
        settings = nf4._settings(weight[nested], torch.empty(4, 64))
        kernels.append((nf4.__name__, "_dequantize", types | settings))
    kernels.append((*kernels[0][:2], kernels[0][2] | {"INT64": True}))
    kernels.append((*kernels[0][:2], kernels[0][2] | {"enable_fp_fusion": True}))
    bf16, fp32, plain, wide, fused = compile_for_hopper(kernels)
    for result in (bf16, fp32, plain, wide):
        assert "fma" not in result["ptx"]
    assert "fma" in fused["ptx"]
    assert "i64" in wide["ttir"]
    assert "i64" not in bf16["ttir"]
