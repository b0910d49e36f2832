"""Quantised tensors of GGUF files against the format's definition, element by element."""

import itertools
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from gguf_files import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    NAMES,
    SCALES,
    hf_tensors,
    permute,
    random_blocks,
    write,
)

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile
from jaxft.formats.gguf_tensors import TENSOR_TYPES, values


def half(block: bytes, offset: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, offset)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


# The definitions: ggml-common.h of llama.cpp gives the fields, dequantize_row_* in ggml-quants.c
# the arithmetic. Each gives the elements of one block in float64. `low` and `high` take a byte's
# halves; the control swaps them.


def low(byte: int) -> int:
    return byte & 15


def high(byte: int) -> int:
    return byte >> 4


def plain(block: bytes, low, high, five: bool, minimum: bool) -> list[float]:
    """Q4_0, Q4_1, Q5_0, Q5_1: 32 elements; the first 16 are the low halves of 16 bytes."""
    bits = int.from_bytes(block[2 + 2 * minimum :][:4], "little") if five else 0
    quants = block[2 + 2 * minimum + 4 * five :]
    assert len(quants) == 16
    out = []
    for i in range(32):
        q = low(quants[i]) if i < 16 else high(quants[i - 16])
        q += 16 * (bits >> i & 1)
        if minimum:
            out.append(q * half(block, 0) + half(block, 2))
        else:
            out.append((q - (16 if five else 8)) * half(block, 0))
    return out


def q8_0(block: bytes, low, high) -> list[float]:
    return [half(block, 0) * signed(byte) for byte in block[2:]]


def six_bits(scales: bytes, i: int) -> tuple[int, int]:
    """Scale and minimum of the i-th 32 elements of Q4_K and Q5_K, out of 12 bytes."""
    if i < 4:
        return scales[i] & 63, scales[i + 4] & 63
    return (
        scales[i + 4] & 15 | (scales[i - 4] >> 6) << 4,
        scales[i + 4] >> 4 | (scales[i] >> 6) << 4,
    )


def q45_k(block: bytes, low, high, five: bool) -> list[float]:
    """256 elements: 64 at a time, the low halves of 32 bytes and then their high halves."""
    extra = block[16:48] if five else bytes(32)
    quants = block[48:] if five else block[16:]
    assert len(quants) == 128
    out = []
    for i in range(8):
        scale, minimum = six_bits(block[4:16], i)
        for j in range(32):
            byte = quants[32 * (i // 2) + j]
            q = (high if i % 2 else low)(byte) + 16 * (extra[j] >> i & 1)
            out.append(half(block, 0) * scale * q - half(block, 2) * minimum)
    return out


def q6_k(block: bytes, low, high) -> list[float]:
    """256 elements: two halves of 128, each four times 32; the upper two bits lie apart."""
    lows, uppers, scales = block[:128], block[128:192], block[192:208]
    out = []
    for part, quarter, j in itertools.product(range(2), range(4), range(32)):
        byte = lows[64 * part + 32 * (quarter % 2) + j]
        upper = uppers[32 * part + j] >> 2 * quarter & 3
        q = (high if quarter >= 2 else low)(byte) + 16 * upper - 32
        scale = signed(scales[8 * part + 2 * quarter + j // 16])
        out.append(half(block, 208) * scale * q)
    return out


def q2_k(block: bytes, low, high) -> list[float]:
    scales, quants = block[:16], block[16:80]
    out = []
    for part, pair, j in itertools.product(range(2), range(4), range(32)):
        scale = scales[8 * part + 2 * pair + j // 16]
        q = quants[32 * part + j] >> 2 * pair & 3
        out.append(half(block, 80) * low(scale) * q - half(block, 82) * high(scale))
    return out


def q3_k(block: bytes, low, high) -> list[float]:
    """The third bit is a mask: 4 is taken off where it is not set."""
    mask, quants, packed = block[:32], block[32:96], block[96:108]
    out = []
    for part, pair, j in itertools.product(range(2), range(4), range(32)):
        i = 8 * part + 2 * pair + j // 16
        scale = low(packed[i]) if i < 8 else high(packed[i - 8])
        scale += 16 * (packed[8 + i % 4] >> 2 * (i // 4) & 3) - 32
        q = quants[32 * part + j] >> 2 * pair & 3
        q -= 0 if mask[j] >> 4 * part + pair & 1 else 4
        out.append(half(block, 108) * scale * q)
    return out


DEFINITIONS = {
    GgmlType.Q4_0: lambda *args: plain(*args, five=False, minimum=False),
    GgmlType.Q4_1: lambda *args: plain(*args, five=False, minimum=True),
    GgmlType.Q5_0: lambda *args: plain(*args, five=True, minimum=False),
    GgmlType.Q5_1: lambda *args: plain(*args, five=True, minimum=True),
    GgmlType.Q8_0: q8_0,
    GgmlType.Q2_K: q2_k,
    GgmlType.Q3_K: q3_k,
    GgmlType.Q4_K: lambda *args: q45_k(*args, five=False),
    GgmlType.Q5_K: lambda *args: q45_k(*args, five=True),
    GgmlType.Q6_K: q6_k,
}


def define(kind: GgmlType, data: np.ndarray, low=low, high=high) -> np.ndarray:
    """float64 `[rows, width]` of quantised bytes `[rows, bytes]`."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = data.reshape(-1, size)
    rows = [DEFINITIONS[kind](block.tobytes(), low, high) for block in blocks]
    return np.array(rows).reshape(len(data), -1)


def entry(kind: GgmlType, data: np.ndarray) -> SimpleNamespace:
    """What the gguf package says of a tensor."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = np.array([data.shape[1] // size * elements, data.shape[0]])
    return SimpleNamespace(tensor_type=kind, data=data, shape=shape)


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_every_element_is_as_the_format_defines_it(kind):
    assert {*SCALES, GgmlType.F32, GgmlType.F16, GgmlType.BF16} == set(TENSOR_TYPES)
    data = random_blocks(kind, 8, 512, seed=3)
    got, want = values(entry(kind, data)), define(kind, data)
    assert got.shape == want.shape == (8, 512)
    assert got.dtype == np.float32
    size = np.abs(want).max()
    assert np.abs(got - want).max() < 1e-6 * size  # float32's roundings
    if kind != GgmlType.Q8_0:  # which has no halves
        swapped = define(kind, data, low=high, high=low)
        assert np.abs(got - swapped).max() > 0.1 * size
    shifted = define(kind, np.roll(data, 1, axis=1).copy())
    assert not np.allclose(got, shifted, atol=0.1 * size, equal_nan=True)


def test_a_file_of_many_types(tmp_path):
    """Each matrix is stored in a type of its own; rows of query and key are put in order."""
    width, kinds = 256, itertools.cycle(SCALES)
    tensors, blocks, want = hf_tensors(), {}, {}
    for seed, (name, value) in enumerate(tensors.items()):
        if value.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight")):
            if value.ndim == 1 and "norm" in name:
                tensors[name] = np.ones(width, np.float32)
            else:
                tensors[name] = np.ones((width, value.shape[1]), np.float32)
            want[name] = tensors[name]
            continue
        blocks[name] = next(kinds)
        tensors[name] = random_blocks(blocks[name], len(value), width, seed)
        want[name] = define(blocks[name], tensors[name])
    assert set(blocks.values()) == set(SCALES)
    path = tmp_path / "m.gguf"
    sizes = {"llama.embedding_length": width, "llama.attention.key_length": HEAD_DIM}
    sizes["llama.attention.value_length"] = HEAD_DIM
    file = GgufFile(write(path, tensors, metadata=sizes, blocks=blocks))
    assert len({tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}) == 11
    assert file.names() == want.keys()
    for name, value in want.items():
        got = file.read(name)
        assert file.shape(name) == got.shape == value.shape
        assert np.abs(got - value).max() <= 1e-6 * np.abs(value).max(), name
    query = "model.layers.0.self_attn.q_proj.weight"
    stored = permute(want[query], HEADS)
    assert np.abs(file.read(query) - stored).max() > 0.1 * np.abs(stored).max()


@pytest.mark.parametrize("heads", [None, 8])
@pytest.mark.parametrize("kind", [GgmlType.Q4_0, GgmlType.Q6_K], ids=lambda kind: kind.name)
def test_memory_of_one_tensor_is_one_float32_copy(kind, heads):
    data = random_blocks(kind, 2048, 1024, seed=0)
    tensor = entry(kind, data)

    def peak(act) -> float:
        tracemalloc.start()
        size = act().nbytes
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / size

    assert peak(lambda: values(tensor, heads)) < 1.2
    assert peak(lambda: gguf.quants.dequantize(data, kind)) > 1.9  # what a plain call would take


def one_line(path: Path, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)
    for part in (str(path), *parts):
        assert part in str(caught.value)
    assert "incomplete" not in str(caught.value)


def change(path: Path, tensor: str, offset: int, value: int) -> Path:
    """Set a number of a tensor's entry: 0 is its first (fastest) size, 8 the second, 16 the type.

    An entry is the name, the number of sizes (4 bytes), the sizes (8 bytes each), the type (4).
    """
    data = bytearray(path.read_bytes())
    start = data.index(tensor.encode()) + len(tensor) + 4 + offset
    width = 4 if offset == 16 else 8
    data[start : start + width] = value.to_bytes(width, "little")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", [GgmlType.IQ4_XS, GgmlType.TQ1_0, GgmlType.F64, GgmlType.I8, 9999])
def test_another_type_is_refused_when_opened(tmp_path, kind):
    path = write(tmp_path / "m.gguf", hf_tensors())
    GgufFile(path)
    shown = kind.name if isinstance(kind, GgmlType) else "9999"
    change(path, "blk.1.ffn_up.weight", 16, int(kind))
    one_line(path, "tensor blk.1.ffn_up.weight", shown, "Q4_K")


def test_rows_of_no_whole_blocks_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", hf_tensors(), GgmlType.Q4_0)
    GgufFile(path)
    change(path, "blk.1.ffn_down.weight", 0, INNER + 8)
    one_line(path, "tensor blk.1.ffn_down.weight", f"(64, {INNER + 8})", "32", "Q4_0 block")


def test_key_rows_follow_the_number_of_key_heads(tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = hf_tensors()
    data = random_blocks(GgmlType.Q5_0, len(tensors[name]), 64, seed=1)
    path = write(tmp_path / "m.gguf", tensors | {name: data}, blocks={name: GgmlType.Q5_0})
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    raw = define(GgmlType.Q5_0, stored[NAMES[name][0]])
    got = GgufFile(path).read(name)
    np.testing.assert_allclose(permute(got, KV_HEADS), raw, rtol=1e-6, atol=1e-9)
    assert np.abs(got - raw).max() > 0.1 * np.abs(raw).max()
