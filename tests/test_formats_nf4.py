"""NF4 tensors in a folder: read to the bit as bitsandbytes stores them, or refused by name."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from nf4_files import STATE, by_bitsandbytes, by_hand, decoded
from safetensors.numpy import save_file

from jaxft.errors import UserError
from jaxft.formats.huggingface import HuggingFaceFolder

Q, K = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk")
PLAIN = "model.layers.1.self_attn.q_proj.weight"


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


SHAPES = {
    "a row of blocks": (6, 64),
    "blocks across rows": (5, 24),
    "a short last block, a half last byte": (3, 43),
    "two nested scales": (130, 128),
    "fewer weights than a block": (2, 3),
}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(tmp_path, shape, nested):
    """By the formula; another order of nibbles, or no offset, are other values."""
    tensors = by_hand(Q, SHAPES[shape], seed=1, nested=nested)
    tensors[PLAIN] = np.ones((4, 4), ml_dtypes.bfloat16)
    checkpoint = HuggingFaceFolder(write(tmp_path, tensors))
    assert checkpoint.names() == {Q, PLAIN}
    assert checkpoint.shape(Q) == SHAPES[shape]
    assert checkpoint.dtype(Q) is None
    got = checkpoint.read(Q)
    assert got.dtype == np.float32
    assert np.abs(got - decoded(tensors, Q)).max() < 1e-6
    assert np.abs(got - decoded(tensors, Q, swapped=True)).max() > 1e-2
    if nested:
        assert np.abs(got - decoded(tensors, Q, offset=0.0)).max() > 1e-2
    # a neighbour in 16 bit, which no list in config.json names
    assert checkpoint.nf4(PLAIN) is None
    assert checkpoint.read(PLAIN).tobytes() == tensors[PLAIN].tobytes()


@pytest.mark.parametrize("nested", [True, False])
def test_codes_are_kept(tmp_path, nested):
    tensors = by_hand(Q, (6, 64), seed=2, nested=nested)
    stored = HuggingFaceFolder(write(tmp_path, tensors)).nf4(Q)
    assert stored is not None
    assert stored.nested == nested
    codes = stored.codes()
    assert codes.shape == (6, 64)
    assert codes.codes.shape == (6, 32)
    for part, array in (
        ("", codes.codes),
        (".absmax", codes.absmax),
        (".nested_absmax", codes.absmax_scale),
    ):
        if array is not None:
            assert np.asarray(array).tobytes() == tensors[Q + part].tobytes()
    assert (codes.absmax_scale is None) == (not nested)
    assert codes.absmax_offset == (np.float32(0.05) if nested else None)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_other_storage_dtypes_are_the_same_bytes(tmp_path, kind):
    """`bnb_4bit_quant_storage` gives the codes another dtype, for sharding."""
    tensors = by_hand(Q, (6, 64), seed=3)
    want = HuggingFaceFolder(write(tmp_path / "a", tensors)).read(Q)
    tensors[Q] = tensors[Q].reshape(-1).view(kind).reshape(-1, 1)
    checkpoint = HuggingFaceFolder(write(tmp_path / "b", tensors))
    assert checkpoint.shape(Q) == (6, 64)
    np.testing.assert_array_equal(checkpoint.read(Q), want)


@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_reads_the_same(tmp_path, nested):
    torch = pytest.importorskip("torch")
    from bitsandbytes.functional import QuantState, dequantize_4bit

    w = np.random.default_rng(0).normal(size=(192, 128)).astype(np.float32)
    tensors = by_bitsandbytes(w, Q, nested)
    sides = {n.removeprefix(Q + "."): torch.tensor(v) for n, v in tensors.items() if n != Q}
    state = QuantState.from_dict(dict(sides), device=torch.device("cpu"))
    want = dequantize_4bit(torch.tensor(tensors[Q]), state).numpy()
    got = HuggingFaceFolder(write(tmp_path, tensors)).read(Q)
    np.testing.assert_array_equal(got, want)
    assert 0.05 < np.abs(got - w).max() < 0.5  # quantised, and this matrix


def test_an_ulp_of_the_nested_code_is_no_other_code(tmp_path):
    """Older versions of bitsandbytes round its levels otherwise."""
    tensors = by_hand(Q, (6, 64), seed=4)
    levels = tensors[Q + ".nested_quant_map"]
    tensors[Q + ".nested_quant_map"] = np.nextafter(levels, np.float32(0))
    got = HuggingFaceFolder(write(tmp_path, tensors)).read(Q)
    assert np.abs(got - decoded(tensors, Q)).max() < 1e-6


# --- faults --------------------------------------------------------------------------------------


def state(**over):
    def change(tensors):
        about = json.loads(tensors[Q + STATE].tobytes()) | over
        kept = {key: value for key, value in about.items() if value != "remove"}
        tensors[Q + STATE] = np.frombuffer(json.dumps(kept).encode(), np.uint8)

    return change


def pop(part):
    return lambda tensors: tensors.pop(Q + part)


def put(part, value):
    return lambda tensors: tensors.update({Q + part: value(tensors[Q + part])})


def as_fp4(tensors):
    pytest.importorskip("torch")
    for name in [name for name in tensors if name.startswith(Q)]:
        del tensors[name]
    tensors |= by_bitsandbytes(np.ones((6, 64), np.float32), Q, kind="fp4")
    return tensors


FP4 = np.float32([0, 0.0052, 0.667, 1, 0.333, 0.5, 0.1667, 0.25] * 2)
FAULTS = {
    "no codes": (pop(""), f"tensor {Q} is missing"),
    "no absmax": (pop(".absmax"), f"tensor {Q}.absmax is missing"),
    "no quant_map": (pop(".quant_map"), f"tensor {Q}.quant_map is missing"),
    "no nested_absmax": (pop(".nested_absmax"), f"tensor {Q}.nested_absmax is missing"),
    "no nested_quant_map": (pop(".nested_quant_map"), f"tensor {Q}.nested_quant_map is missing"),
    "no quant_state": (pop(STATE), f"tensor {Q}{STATE} is missing, though {Q}.absmax is there"),
    "short codes": (put("", lambda x: x[:-1]), f"tensor {Q} has 191 bytes instead of 192"),
    "short absmax": (put(".absmax", lambda x: x[1:]), f"{Q}.absmax has 5 bytes instead of 6"),
    "wide absmax": (
        put(".absmax", lambda x: x.astype(np.float32)),
        f"{Q}.absmax has 24 bytes instead of 6",
    ),
    "no nesting in the state": (
        state(nested_offset="remove"),
        f"{Q}.absmax has 6 bytes instead of 24",
    ),
    "the code of fp4": (put(".quant_map", lambda x: FP4), f"{Q}.quant_map is not the code of NF4"),
    "a code upside down": (
        put(".quant_map", lambda x: x[::-1].copy()),
        f"{Q}.quant_map is not the code",
    ),
    "another nested code": (
        put(".nested_quant_map", lambda x: np.abs(x)),
        f"{Q}.nested_quant_map is not the code of NF4",
    ),
    "a weight in fp4": (as_fp4, f"tensor {Q} is quantised as fp4 by bitsandbytes"),
    "fp4 in the state": (state(quant_type="fp4"), "quant_type 'fp4' is not supported, only 'nf4'"),
    "blocks of 128": (state(blocksize=128), f"{Q}{STATE}: blocksize 128 is not supported, only 64"),
    "nested blocks of 64": (state(nested_blocksize=64), "nested_blocksize 64 is not supported"),
    "half scales": (state(nested_dtype="float16"), "nested_dtype 'float16' is not supported"),
    "no matrix": (state(shape=[6, 8, 8]), f"{Q}{STATE}: shape [6, 8, 8] is not that of a matrix"),
    "another shape": (state(shape=[6, 128]), f"tensor {Q} has 192 bytes instead of 384"),
    "no offset": (state(nested_offset=None), "nested_offset None is no number"),
    "no JSON": (put(STATE, lambda x: x[:-1]), f"tensor {Q}{STATE} holds no JSON"),
    "a list": (put(STATE, lambda x: np.frombuffer(b"[]", np.uint8)), "holds [] instead of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_whole_is_refused_when_opened(tmp_path, fault):
    tensors = by_hand(Q, (6, 64), seed=5) | by_hand(K, (6, 64), seed=6)
    HuggingFaceFolder(write(tmp_path, tensors))  # whole before
    damage, message = FAULTS[fault]
    damage(tensors)
    with pytest.raises(UserError) as caught:
        HuggingFaceFolder(write(tmp_path, tensors))
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


CONFIGS = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "(gptq)"),
    "awq": ({"quant_method": "awq"}, "(awq)"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "(compressed-tensors)"),
    "8 bit": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes with 8 bits"),
    "no object": ("nf4", "(nf4)"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_other_kinds_are_named(tmp_path, kind):
    folder = write(tmp_path, by_hand(Q, (6, 64), seed=7))
    config, named = CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(UserError) as caught:
        HuggingFaceFolder(folder)
    for part in (str(folder / "config.json"), "already quantised", named, "NF4 and fp8"):
        assert part in str(caught.value)
    for accepted in (
        {"load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ):
        (folder / "config.json").write_text(json.dumps({"quantization_config": accepted}))
        assert HuggingFaceFolder(folder).names() == {Q}


def test_codes_without_any_sides_are_named(tmp_path):
    """As a loader leaves them that drops what it does not know."""
    folder = write(tmp_path, {Q: np.zeros((192, 1), np.uint8)})
    with pytest.raises(UserError, match=rf"tensor {Q} is stored as U8"):
        HuggingFaceFolder(folder).dtype(Q)


def test_shards_may_hold_a_weight_apart_from_its_sides(tmp_path):
    tensors = by_hand(Q, (6, 64), seed=8)
    want = HuggingFaceFolder(write(tmp_path / "one", tensors)).read(Q)
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = {files[0]: {Q: tensors[Q]}, files[1]: {n: v for n, v in tensors.items() if n != Q}}
    for file, content in parts.items():
        save_file(content, folder / file)
    save_file({"stray": np.ones(3, np.float32)}, folder / "x.safetensors")
    index = {name: file for file, content in parts.items() for name in content}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    checkpoint = HuggingFaceFolder(folder)
    assert checkpoint.names() == {Q}
    np.testing.assert_array_equal(checkpoint.read(Q), want)
    (folder / files[0]).write_bytes((folder / files[0]).read_bytes()[:-8])
    with pytest.raises(UserError, match=f"{files[0]}: has .* incomplete download"):
        HuggingFaceFolder(folder)
    (folder / files[0]).unlink()
    with pytest.raises(UserError, match=f"{files[0]}: file does not exist; incomplete download"):
        HuggingFaceFolder(folder)


def test_names_of_models_with_a_vision_part(tmp_path):
    """Their files name tensors otherwise than transformers' model."""
    old = "language_model.model.layers.0.self_attn.q_proj.weight"
    tensors = by_hand(old, (6, 64), seed=9)
    checkpoint = HuggingFaceFolder(write(tmp_path, tensors))
    (name,) = checkpoint.names()
    assert name == "model.language_model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.stored_name(name) == old
    assert checkpoint.nf4(name) is not None
    assert np.abs(checkpoint.read(name) - decoded(tensors, old)).max() < 1e-6
