"""Models whose weights are NF4 already: the codes stay, and so do the layers left in 16 bit."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import FP32, NF4_FP32, load, logits
from model_oracles import (
    PROJECTIONS,
    add_lora,
    edit_config,
    edit_tensors,
    in_peft,
    largest,
    loss_and_gradients,
    open_in_transformers,
    pack_rows,
    peft_loss_and_gradients,
    relative,
    their_logits,
)
from nf4_files import PROJECTION, STATE, by_hand, decoded, dequantised_folder, in_16_bit
from nf4_files import quantise_folder as quantised
from safetensors.numpy import load_file
from test_model_families import FAMILY_TABLE, save
from test_model_heads import BY_DEFAULT
from tiny import tiny_folder, write_chats

from jaxft import train
from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.export import MergeConfig, merge
from jaxft.formats.forms import check_scales
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.loading import HEAD, check_tensors, load_decoder
from jaxft.formats.merged import Merging, save_merged
from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays, projections
from jaxft.loss import sum_of_losses
from jaxft.model.decoder import Decoder
from jaxft.model.families import read_config
from jaxft.preflight import describe_weights
from jaxft.quant import NF4, Dense, Storage, dense
from jaxft.step import split

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes' CPU code wants blocks of 64
BF16 = jnp.dtype(jnp.bfloat16)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
RANDOM = np.random.default_rng(1)
DOCUMENTS = [RANDOM.integers(0, 64, n).tolist() for n in (17, 9, 12, 1, 2)]
# what the makers of mixed checkpoints leave: here a feed-forward, there a projection
KINDS = {"layers.2.mlp.": "bfloat16", "layers.3.self_attn.q_proj": "float16"}
KEPT = [f"model.layers.2.mlp.{kind}_proj" for kind in ("gate", "up", "down")]
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MIXED = {"llama": None, "gemma3_text": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL]}


@pytest.fixture(scope="module", params=MIXED)
def mixed(request, tmp_path_factory) -> tuple[Path, Path]:
    """A folder with NF4 layers, nested and plain, and 16-bit ones; and it in float32."""
    base = tmp_path_factory.mktemp(request.param)
    save(
        base / "nf4",
        FAMILY_TABLE[request.param],
        **WIDE,
        num_hidden_layers=5,
        layer_types=MIXED[request.param],
    )
    head = () if request.param in BY_DEFAULT else (HEAD,)
    in_16_bit(base / "nf4", KINDS)
    folder = quantised(base / "nf4", tuple(KINDS), plain=("layers.4.",), also=head)
    return folder, dequantised_folder(folder, base / "dense")


@pytest.fixture(scope="module")
def ours(mixed) -> Decoder:
    """Our decoder of it, with the codes as they are."""
    return load(mixed[0], NF4_FP32)


def stored(decoder: Decoder) -> dict[str, NF4 | Dense]:
    """The weight of each projection by module path, taken from its stack."""
    return {
        path: jax.tree.map(lambda x, i=i: x[i], linear.weight.get_value())
        for paths, linear in projections(decoder)
        for i, path in enumerate(paths)
    }


def assert_as_in_the_file(decoder: Decoder, folder: Path) -> int:
    """Codes, scales and dense weights of the decoder are the file's; returns how many are NF4."""
    tensors = load_file(folder / "model.safetensors")
    held, count = stored(decoder), 0
    for path, weight in held.items():
        name = f"{path}.weight"
        if name + STATE not in tensors:
            assert isinstance(weight, Dense)
            assert weight.array.dtype == tensors[name].dtype
            assert np.asarray(weight.array).tobytes() == tensors[name].tobytes()
            continue
        count += 1
        assert isinstance(weight, NF4)
        assert np.asarray(weight.codes).tobytes() == tensors[name].tobytes()
        assert np.asarray(weight.absmax).tobytes() == tensors[name + ".absmax"].tobytes()
        assert weight.nested == (name + ".nested_absmax" in tensors)
        if weight.nested:
            scales = np.asarray(weight.absmax_scale)
            assert scales.tobytes() == tensors[name + ".nested_absmax"].tobytes()
            about = json.loads(tensors[name + STATE].tobytes())
            assert weight.absmax_offset == np.float32(about["nested_offset"])
    assert count == sum(
        bool(PROJECTION.fullmatch(n.removesuffix(STATE))) for n in tensors if STATE in n
    )
    assert len(held) == sum(bool(PROJECTION.fullmatch(name)) for name in tensors)
    return count


def test_logits_of_a_mixed_checkpoint(mixed, ours, tmp_path):
    """Against transformers on the weights that bitsandbytes dequantised, float32."""
    folder, dense = mixed
    count = assert_as_in_the_file(ours, folder)
    held = stored(ours)
    assert 0 < count < len(held)
    assert {type(weight) for weight in held.values()} == {NF4, Dense}
    assert {w.nested for w in held.values() if isinstance(w, NF4)} == {True, False}
    model = open_in_transformers(dense)
    want = their_logits(model, TOKENS)
    got = logits(ours, TOKENS)
    assert largest(got, want) < 1e-4
    # without load_in_4bit the same numbers are held in the arithmetic's dtype
    wide = load(folder, FP32)
    assert {type(weight) for weight in stored(wide).values()} == {Dense}
    assert largest(logits(wide, TOKENS), want) < 1e-4
    # controls: a swap of nibbles in one tensor; and quantising all of it again
    path = "model.layers.0.mlp.up_proj"
    swapped = decoded(load_file(folder / "model.safetensors"), f"{path}.weight", swapped=True)
    with torch.no_grad():
        model.get_submodule(path).weight.copy_(torch.tensor(swapped))
    assert largest(got, their_logits(model, TOKENS)) > 1e-2
    with pytest.raises(AssertionError):
        assert_as_in_the_file(load(dense, NF4_FP32), folder)


def test_layers_of_one_storage_are_scanned_together(mixed, ours):
    """Two alike, then one with a bfloat16 feed-forward, one with a float16 query, a plain one."""
    assert [(group.first, group.size) for group in ours.groups] == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_loss_and_gradients_on_a_mixed_checkpoint(mixed):
    """Five documents in one row against PEFT on the dequantised weights, each alone."""
    folder, dense = mixed
    decoder = add_lora(load(folder, NF4_FP32))
    loss, gradients = loss_and_gradients(decoder)(pack_rows([DOCUMENTS], 48))
    their_loss, want = peft_loss_and_gradients(
        in_peft(open_in_transformers(dense), decoder), DOCUMENTS
    )
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert relative(gradients, want) < 1e-4
    run_on = [token for document in DOCUMENTS for token in document]
    other_loss, other = peft_loss_and_gradients(
        in_peft(open_in_transformers(dense), decoder), [run_on]
    )
    assert abs(loss - other_loss) > 1e-1
    assert relative(gradients, other) > 1e-2


def test_what_is_kept_for_the_backward_pass_stays_codes(tmp_path):
    save(tmp_path / "a", FAMILY_TABLE["llama"], **WIDE, num_hidden_layers=4)
    dense = load(tmp_path / "a", FP32)
    folder = quantised(tmp_path / "a")
    batch = pack_rows([DOCUMENTS], 48)

    def kept(decoder: Decoder) -> list[jax.Array]:
        structure, trained, frozen = split(add_lora(decoder))

        def loss(trained):
            return sum_of_losses(nnx.merge(structure, trained, frozen), **batch)

        return jax.tree.leaves(jax.vjp(loss, trained)[1])

    def wide(leaves: list[jax.Array]) -> int:
        """Bytes of stacks of dense projections."""
        shapes = {(4, 64, 64), (4, 32, 64), (4, 128, 64), (4, 64, 128)}
        return sum(x.nbytes for x in leaves if x.shape in shapes and x.dtype != jnp.uint8)

    one = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64  # weights of a layer
    ours = kept(load(folder, NF4_FP32))
    assert wide(ours) == 0
    codes = [x for x in ours if x.dtype == jnp.uint8 and x.ndim == 3]
    assert sum(x.nbytes for x in codes) == 4 * one // 2
    assert wide(kept(dense)) == 4 * 4 * one  # the control


def test_a_model_that_transformers_quantised(tmp_path):
    """From `BitsAndBytesConfig` and `save_pretrained`, in bfloat16, with modules left out."""
    import transformers

    save(tmp_path / "a", FAMILY_TABLE["llama"], **WIDE)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"],
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "nf4")
    folder = tmp_path / "nf4"
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    decoder = load(folder, NF4_FP32)
    assert assert_as_in_the_file(decoder, folder) == 4 + 7
    dense = open_in_transformers(dequantised_folder(folder, tmp_path / "dense"))
    assert largest(logits(decoder, TOKENS), their_logits(dense, TOKENS)) < 1e-4
    exact = their_logits(open_in_transformers(tmp_path / "a"), TOKENS)
    assert largest(logits(decoder, TOKENS), exact) > 1e-1  # the control: before quantisation


def test_a_file_made_by_hand(tmp_path):
    """Layer 0 NF4, layer 1 bfloat16 without a word of it in config.json."""
    folder = tmp_path / "a"
    save(folder, FAMILY_TABLE["llama"], **WIDE, attention_bias=False, mlp_bias=False)
    in_16_bit(folder, {"layers.1.": "bfloat16"})
    dense = shutil.copytree(folder, tmp_path / "dense")
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    made = {}

    def quantise(tensors):
        for seed, name in enumerate(n for n in list(tensors) if "layers.0." in n and "proj" in n):
            made[name] = by_hand(name, tensors.pop(name).shape, seed)
            tensors |= made[name]

    edit_config(edit_tensors(folder, quantise), {"quantization_config": {"load_in_4bit": True}})
    for target, how in ((dense, {}), (wrong, {"offset": 0.0})):
        values = {n: decoded(t, n, **how).astype(np.float32) for n, t in made.items()}
        edit_tensors(target, lambda tensors, values=values: tensors.update(values))
    got = logits(load(folder, NF4_FP32), TOKENS)
    assert largest(got, their_logits(open_in_transformers(dense), TOKENS)) < 1e-4
    assert largest(got, their_logits(open_in_transformers(wrong), TOKENS)) > 1e-2
    assert len(made) == 7


def test_a_merge_is_added_to_what_the_codes_stand_for(mixed, tmp_path):
    """16-bit or 32-bit tensors under a config without quantisation, both `base_weights` alike."""
    folder, dense = mixed
    decoder = add_lora(load(folder, NF4_FP32))
    adapter = tmp_path / "adapter"
    config = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False, base_model_name_or_path=str(folder))
    save_adapter(adapter, config, adapter_arrays(decoder))
    want = np.asarray(logits(decoder, TOKENS))
    peft_model = in_peft(open_in_transformers(dense), decoder)
    assert largest(want, their_logits(peft_model, TOKENS)) < 1e-4
    results = {}
    for how in ("original", "nf4"):
        output = tmp_path / how
        words = {"adapter": str(adapter), "output_dir": str(output), "base_weights": how}
        merge(MergeConfig(**words, dtype="float32"))
        assert "quantization_config" not in json.loads((output / "config.json").read_text())
        results[how] = load_file(output / "model.safetensors")
        assert "NF4 as in the checkpoint, dequantised" in (output / "README.md").read_text()
    before = load_file(dense / "model.safetensors")
    assert results["original"].keys() == results["nf4"].keys() == before.keys()
    for name, value in results["nf4"].items():
        assert value.tobytes() == results["original"][name].tobytes()
        assert (value.tobytes() != before[name].tobytes()) == bool(PROJECTION.fullmatch(name))
    got = their_logits(open_in_transformers(tmp_path / "nf4"), TOKENS)
    assert largest(got, want) < 2e-4
    with peft_model.disable_adapter():
        assert largest(their_logits(peft_model, TOKENS), want) > 1e-2

    # auto: what was NF4 in the dtype of config.json, the rest in its own
    copy = edit_config(shutil.copytree(folder, tmp_path / "copy"), {"dtype": "bfloat16"})
    words |= {"model_name_or_path": str(copy), "output_dir": str(tmp_path / "auto")}
    merge(MergeConfig(**words))
    after, file = load_file(tmp_path / "auto" / "model.safetensors"), HuggingFaceFolder(copy)
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.dtype == (file.dtype(name) or BF16)


def test_16_bit_arithmetic(mixed):
    """All that is not NF4 is held in it; without load_in_4bit the codes' values are, rounded."""
    folder, exact = mixed
    narrow, wide = (
        stored(load(folder, Storage(load_in_4bit=four, nested=True, compute=BF16)))
        for four in (True, False)
    )
    tensors = load_file(exact / "model.safetensors")
    for path, weight in narrow.items():
        want = tensors[f"{path}.weight"].astype(BF16)
        np.testing.assert_array_equal(dense(weight, BF16), want)
        np.testing.assert_array_equal(dense(wide[path], BF16), want)
        if path not in KEPT:
            assert (want != tensors[f"{path}.weight"]).any()
    half = "model.layers.3.self_attn.q_proj"
    for weights, kind in ((narrow, BF16), (wide, jnp.float16)):  # its own is the file's
        held = {p: w.array.dtype for p, w in weights.items() if isinstance(w, Dense)}
        assert held.pop(half) == kind
        assert set(held.values()) == {BF16}


def test_the_report_says_what_was_found(tmp_path):
    save(tmp_path / "a", FAMILY_TABLE["llama"], **WIDE)
    plain = shutil.copytree(tmp_path / "a", tmp_path / "plain")
    folder = quantised(in_16_bit(tmp_path / "a", {"layers.1.mlp": "bfloat16"}), ("layers.1.mlp",))

    def line(folder: Path, **over) -> str:
        checkpoint = HuggingFaceFolder(folder)
        given = {"model_name_or_path": str(folder), "dataset_name": "x.jsonl", "output_dir": "y"}
        config = TrainConfig(**given, **over)
        return describe_weights(config, checkpoint, read_config(checkpoint.config), "float16")

    stored = "NF4 with double quantisation as stored"
    assert line(folder) == f"{stored}, 3 of 14 projections in bfloat16"
    assert line(folder, load_in_4bit=False) == (
        f"{stored}, dequantised to float16, 3 of 14 projections in bfloat16"
    )
    assert line(plain) == "NF4 with double quantisation"
    assert line(plain, load_in_4bit=False) == "as in the checkpoint"
    whole = quantised(shutil.copytree(plain, tmp_path / "whole"), plain=("layers.0.",))
    assert line(whole) == "NF4 with double quantisation for 7 of them as stored"
    unnested = quantised(plain, plain=("layers.",))
    assert line(unnested) == "NF4 as stored"


def test_nested_scales_cannot_be_made_plain(tmp_path):
    """Neither for training nor for a merge; plain ones may be, and are, asked for."""
    folder = tmp_path / "nested"
    save(folder, FAMILY_TABLE["llama"], **WIDE)
    plain = HuggingFaceFolder(
        quantised(shutil.copytree(folder, tmp_path / "plain"), plain=("layers.",))
    )
    nested = HuggingFaceFolder(quantised(folder, plain=("layers.0.",)))
    model = read_config(nested.config)
    check_scales(plain, model, nested=False)
    check_scales(nested, model, nested=True)
    words = r"use_bnb_nested_quant false: .*layers\.1\..* is NF4 with double quantisation"
    with pytest.raises(UserError, match=words):
        check_scales(nested, model, nested=False)
    rows, out = write_chats(tmp_path / "rows.jsonl", 4), tmp_path / "out"
    given = {"model_name_or_path": str(folder), "dataset_name": str(rows), "output_dir": str(out)}
    with pytest.raises(UserError, match=words):
        train.run(TrainConfig(**given, use_bnb_nested_quant=False))
    adapter, how = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False), Merging("nf4", nested=False)
    with pytest.raises(UserError, match=words):
        save_merged(out, nested, adapter, {}, how=how, adapter=tmp_path)
    assert not out.exists()


def test_loading_reads_no_dense_weight(mixed, monkeypatch):
    """Codes go to the device as they are; a table, which has no stored form, is dequantised."""
    checkpoint, read = HuggingFaceFolder(mixed[0]), []
    original = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: (read.append(name), original(name))[1])
    load_decoder(checkpoint, NF4_FP32)
    assert any(PROJECTION.fullmatch(name) for name in read)  # the dense ones
    assert {name for name in read if checkpoint.nf4(name) is not None} <= {HEAD}


def test_what_is_left_out_or_over_is_named(tmp_path):
    """A weight with all its sides, and a side that the weight has no use for."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = quantised(tiny_folder(tmp_path / "a"), plain=("up_proj",))
    check_tensors(HuggingFaceFolder(folder))
    extra = shutil.copytree(folder, tmp_path / "extra")
    edit_tensors(extra, lambda t: t.update({f"{name}.nested_absmax": np.ones(1, np.float32)}))
    with pytest.raises(
        UserError, match=rf"tensor {name}\.nested_absmax has no place in this model"
    ):
        check_tensors(HuggingFaceFolder(extra))
    edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith(name)])
    with pytest.raises(UserError, match=rf"{folder}: tensor {name} is missing"):
        check_tensors(HuggingFaceFolder(folder))


def test_a_run(tmp_path, capsys):
    """From such a folder to an adapter on it; the report and the card say what it stands on."""
    folder = quantised(tiny_folder(tmp_path / "model"), ("layers.0.mlp.down_proj",))
    config = TrainConfig(
        model_name_or_path=str(folder),
        dataset_name=str(write_chats(tmp_path / "chats.jsonl", 8)),
        output_dir=str(tmp_path / "run"),
        max_length=64,
        max_steps=2,
        lora_r=2,
    )
    assert train.run(config) == 0
    found = "NF4 with double quantisation as stored, 1 of 14 projections in float32"
    assert found in " ".join(capsys.readouterr().out.split())
    assert f"| base weights | {found} |" in (tmp_path / "run" / "README.md").read_text()
    merge(MergeConfig(adapter=str(tmp_path / "run"), output_dir=str(tmp_path / "merged")))
    after, before = (load_file(f / "model.safetensors") for f in (tmp_path / "merged", folder))
    assert after.keys() == {name for name in before if ".weight." not in name}
