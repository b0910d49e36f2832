"""Merging an adapter: one rounding of the right sum, the base's dtypes and files, or nothing."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from merging import (
    DTYPES,
    SCALE,
    TARGETS,
    convert,
    edit,
    make_adapter,
    merge,
    refused,
    weights,
)
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny import tiny_folder, tiny_tokenizer, write_chats

from jaxft import export, train
from jaxft.config import TrainConfig
from jaxft.formats.merged import plain_config, through_nf4
from jaxft.formats.peft import load_adapter

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # of the mantissa
TOKENS = np.random.default_rng(0).integers(4, 250, (2, 40))
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"))


def exact_sums(base: Path, adapter: Path, scale: float = SCALE) -> dict[str, np.ndarray]:
    """W + scale * B @ A in float64, of the adapted tensors."""
    tensors = weights(base)
    return {
        f"{path}.weight": tensors[f"{path}.weight"].astype(np.float64)
        + scale * (b.astype(np.float64) @ a.astype(np.float64))
        for path, (a, b) in load_adapter(adapter)[1].items()
    }


def misrounded(got: np.ndarray, exact: np.ndarray, bits: int) -> float:
    """Share of the values that are further off than half of the last place (and float32 noise)."""
    half = 2.0 ** (np.floor(np.log2(np.abs(exact))) - bits)
    return float(np.mean(np.abs(got.astype(np.float64) - exact) > half + 1e-7))


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_sizes_and_one_rounding(base, tmp_path, dtype, key):
    model = convert(base, tmp_path / "base", dtype, **{key: dtype})
    adapter = make_adapter(model, tmp_path / "adapter")
    output = merge(adapter, tmp_path / "merged", max_shard_size="100KB")

    before, after = weights(model), weights(output)
    assert after.keys() == before.keys()
    sums = exact_sums(model, adapter)
    assert len(sums) == 6
    for name, value in after.items():
        assert value.dtype == DTYPES[dtype]
        if name not in sums:
            assert value.tobytes() == before[name].tobytes()
            continue
        assert misrounded(value, sums[name], BITS[dtype]) == 0
        assert value.tobytes() != before[name].tobytes()
        # controls: another scale, and an update that is rounded before it is added
        assert misrounded(before[name], sums[name], BITS[dtype]) > 0.5
        update = (sums[name] - before[name].astype(np.float64)).astype(DTYPES[dtype])
        if dtype != "float32":
            assert misrounded(before[name] + update, sums[name], BITS[dtype]) > 0.01

    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert config == json.loads((model / "config.json").read_text(encoding="utf-8"))
    assert config[key] == dtype
    files = sorted(output.glob("*.safetensors"))
    assert len(files) >= 2
    size, whole = (sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (output, model))
    assert abs(size / whole - 1) < 0.01
    index = json.loads((output / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in before.values())
    assert index["weight_map"].keys() == before.keys()
    for file in files:
        assert file.name.endswith(f"-of-{len(files):05}.safetensors")
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            held = {name for name, shard in index["weight_map"].items() if shard == file.name}
            assert set(opened.keys()) == held
        assert file.stat().st_size < 100_000 or len(held) == 1


@pytest.mark.parametrize("rslora", [False, True])
def test_transformers_and_peft_give_the_same_logits(base, tmp_path, rslora):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    adapter = make_adapter(base, tmp_path / "adapter", rslora=rslora)
    output = merge(adapter, tmp_path / "merged")
    with_adapter = peft.PeftModel.from_pretrained(theirs(base), adapter)
    expected = torch_logits(with_adapter)
    got = torch_logits(theirs(output))
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    peft_merged = with_adapter.merge_and_unload()
    assert np.abs(got - torch_logits(peft_merged)).max() < 1e-5 * np.abs(expected).max()
    scale = 3 / math.sqrt(4) if rslora else SCALE
    for name, exact in exact_sums(base, adapter, scale).items():
        assert np.abs(weights(output)[name] - exact).max() < 1e-6
    # control: the scale of the other rule is another model
    edit(adapter / "adapter_config.json", use_rslora=not rslora)
    wrong = torch_logits(theirs(merge(adapter, tmp_path / "wrong")))
    assert np.abs(wrong - expected).max() > 1e-2 * np.abs(expected).max()
    assert torch.isfinite(torch.tensor(got)).all()


def theirs(folder: Path):
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.float()


def torch_logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def test_an_adapter_that_peft_wrote(base, tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=r".*layers\.1\..*(k_proj|up_proj)",
        task_type="CAUSAL_LM",
    )
    tuned = peft.get_peft_model(theirs(base), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    tuned.save_pretrained(tmp_path / "adapter")
    output = merge(tmp_path / "adapter", tmp_path / "merged", model_name_or_path=base)
    expected = torch_logits(tuned)
    assert np.abs(torch_logits(theirs(output)) - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(torch_logits(theirs(base)) - expected).max() > 1e-2
    changed = {n for n, value in weights(output).items() if (value != weights(base)[n]).any()}
    modules = ("self_attn.k_proj", "mlp.up_proj")
    assert changed == {f"model.layers.1.{module}.weight" for module in modules}


def test_ranks_and_scales_of_modules(base, tmp_path):
    """rank_pattern and alpha_pattern, which PEFT reads too."""
    peft = pytest.importorskip("peft")
    pattern = {"q_proj": 8}
    adapter = make_adapter(base, tmp_path / "adapter", ranks=pattern, alphas={"down_proj": 9.0})
    output = merge(adapter, tmp_path / "merged")
    expected = torch_logits(peft.PeftModel.from_pretrained(theirs(base), adapter))
    assert np.abs(torch_logits(theirs(output)) - expected).max() < 1e-5 * np.abs(expected).max()
    scales = {"q_proj": 3 / 8, "v_proj": SCALE, "down_proj": 9 / 4}
    for kind, scale in scales.items():
        name = f"model.layers.1.{'mlp' if 'down' in kind else 'self_attn'}.{kind}.weight"
        exact = exact_sums(base, adapter, scale)[name]
        assert np.abs(weights(output)[name] - exact).max() < 1e-6
        assert np.abs(weights(output)[name] - exact_sums(base, adapter, 1.0)[name]).max() > 1e-3
    assert "| rank | 4, 8 |" in (output / "README.md").read_text(encoding="utf-8")


def test_a_small_update_survives_and_would_not_in_4_bits(base, tmp_path, capsys):
    adapter = make_adapter(base, tmp_path / "adapter", size=0.03)
    after, before = weights(merge(adapter, tmp_path / "merged")), weights(base)
    for name, exact in exact_sums(base, adapter).items():
        update = exact - before[name]
        assert np.sqrt(np.mean(update**2)) < 0.02 * before[name].std()
        recovered = after[name].astype(np.float64) - before[name]
        assert np.linalg.norm(recovered - update) < 0.01 * np.linalg.norm(update)
        # control: the merge quantised again, against the base quantised
        again = through_nf4(after[name], True) - through_nf4(before[name], True)
        assert np.linalg.norm(again - update) > 0.5 * np.linalg.norm(update)
    assert "; 100.0% of the update is left after rounding to float32" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "low", "high"), [(0.03, 0.98, 1.02), (0.003, 0.0, 0.4)])
def test_what_rounding_swallows_is_told(base, tmp_path, capsys, size, low, high):
    """16-bit weights stay where they are under an update of less than half their last place."""
    model = convert(base, tmp_path / "base", "bfloat16")
    adapter = make_adapter(model, tmp_path / "adapter", size)
    before, after = weights(model), weights(merge(adapter, tmp_path / "merged"))
    dots = np.zeros(2)
    for name, exact in exact_sums(model, adapter).items():
        update = exact - before[name].astype(float)
        moved = after[name].astype(float) - before[name].astype(float)
        dots += (moved * update).sum(), (update * update).sum()
    share = dots[0] / dots[1]
    assert low < share < high
    told = f"{share:.1%} of the update is left after rounding to bfloat16"
    assert told in capsys.readouterr().out
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert f"| update left after rounding | {share:.1%} |" in card
    # float32 on the same base keeps it
    merge(adapter, tmp_path / "wide", dtype="float32")
    assert "; 100.0% of the update" in capsys.readouterr().out


def test_nf4_weights_give_the_logits_that_were_trained(base, adapter, tmp_path):
    from helpers import FP32, NF4_FP32, load, logits

    output = merge(adapter, tmp_path / "merged", base_weights="nf4")
    trained = load(base, NF4_FP32)
    export.import_adapter(adapter, trained)
    expected = np.asarray(logits(trained, TOKENS))
    got = np.asarray(logits(load(output, FP32), TOKENS))
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    original = merge(adapter, tmp_path / "original")
    other = np.asarray(logits(load(original, FP32), TOKENS))
    assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max()
    plain = merge(adapter, tmp_path / "plain", base_weights="nf4", use_bnb_nested_quant="false")
    assert (weights(plain)[Q] != weights(output)[Q]).any()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert weights(output)[name].tobytes() == weights(base)[name].tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gguf_base(tmp_path, kind):
    from gguf import GGMLQuantizationType
    from gguf_files import hf_tensors, write
    from helpers import FP32, logits

    from jaxft.formats.gguf import GgufFile
    from jaxft.formats.loading import load_decoder

    tensors = {n: 0.1 * value if value.ndim > 1 else value for n, value in hf_tensors().items()}
    file = write(tmp_path / "base.gguf", tensors, GGMLQuantizationType[kind])
    save_file(tensors, tmp_path / "model.safetensors")  # for the shapes
    adapter = make_adapter(tmp_path, tmp_path / "adapter")
    output = merge(adapter, tmp_path / "merged", model_name_or_path=file)

    expected_dtype = {"F32": "float32", "F16": "float16", "Q8_0": "bfloat16"}[kind]
    after = weights(output)
    assert after[Q].dtype == DTYPES[expected_dtype]
    assert after["model.norm.weight"].dtype == np.float32  # as llama.cpp stores them
    assert json.loads((output / "config.json").read_text())["dtype"] == expected_dtype
    base = GgufFile(file)
    for name in base.names():
        if name.split(".")[-2] not in TARGETS:
            rounded = base.read(name).astype(after[name].dtype)
            assert after[name].tobytes() == rounded.tobytes()
    decoder = load_decoder(base, FP32)
    export.import_adapter(adapter, decoder)
    expected = np.asarray(logits(decoder, TOKENS))
    pytest.importorskip("torch")
    difference = np.abs(torch_logits(theirs(output)) - expected).max() / np.abs(expected).max()
    assert difference < {"F32": 1e-5, "F16": 5e-3, "Q8_0": 5e-2}[kind]
    if kind == "F32":
        plain = np.asarray(logits(load_decoder(base, FP32), TOKENS))
        assert np.abs(plain - expected).max() > 1e-2 * np.abs(expected).max()
    from transformers import AutoTokenizer

    text = "<s>abc <tool>12"
    assert AutoTokenizer.from_pretrained(output).encode(text) == base.tokenizer().encode(text)


def test_a_head_of_its_own_beside_a_tied_config(base, adapter, tmp_path):
    """Two different tensors under a config that ties them: both stay, and the config says so."""
    model = convert(base, tmp_path / "base", "float32", tie_word_embeddings=True)
    output = merge(adapter, tmp_path / "merged", model_name_or_path=model)
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= weights(output).keys()

    tensors = weights(base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, model / "model.safetensors")
    same = merge(adapter, tmp_path / "same", model_name_or_path=model)
    assert json.loads((same / "config.json").read_text())["tie_word_embeddings"] is True


def test_what_said_how_weights_were_quantised_is_left_out():
    raw = {"a": 1, "torch_dtype": "float16", "quantization_config": {"quant_method": "x"}}
    assert plain_config(raw, "bfloat16") == {"a": 1, "torch_dtype": "bfloat16"}
    assert plain_config({"a": 1}, "float32") == {"a": 1, "dtype": "float32"}
    assert "quantization_config" in raw


# --- files -------------------------------------------------------------------------------------


def test_the_folder_is_the_bases_with_a_card(base, adapter, tmp_path):
    model = convert(base, tmp_path / "base", "float32")
    (model / "generation_config.json").write_text('{"eos_token_id":  [1, 9], "temperature": 0.6}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (model / "LICENSE.txt").write_text("as is")
    (model / "pytorch_model.bin").write_text("no")
    output = merge(adapter, tmp_path / "a" / "merged", model_name_or_path=model)
    files = {str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt"}
    copied |= {"generation_config.json", "additional_chat_templates/tools.jinja"}
    assert files == copied | {"README.md", "config.json", "model.safetensors"}
    for name in copied:
        assert (output / name).read_bytes() == (model / name).read_bytes()
    card = (output / "README.md").read_text(encoding="utf-8")
    assert f"# merged\n\n`{model}` with the LoRA adapter `{adapter}` merged" in card
    assert "library_name: transformers" in card
    modes = {oct(p.stat().st_mode & 0o777) for p in output.rglob("*") if p.is_file()}
    assert len(modes) == 1


def trained(base: Path, chats: Path, output: Path) -> Path:
    config = TrainConfig(
        model_name_or_path=str(base),
        dataset_name=str(chats),
        output_dir=str(output),
        max_length=128,
        per_device_train_batch_size=1,
        max_steps=1,
        lora_r=2,
    )
    assert train.run(config) == 0
    return output


def stops(folder: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id


END = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")


def test_the_end_that_was_trained_is_a_stop_id(base, tmp_path, capsys):
    """A base that stops at its own end of text alone, tuned on a template with another end."""
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    run = trained(base, chats, tmp_path / "run")
    said = capsys.readouterr().out
    assert f"note: answers end in <|im_end|> ({END}), where the base does not stop" in said
    output = merge(run, tmp_path / "merged")
    assert stops(base) == 1  # the control
    assert stops(output) == [1, END]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (base / name).read_bytes()
    # what lies beside the adapter must not take back what the base says
    model = convert(base, tmp_path / "base", "float32")
    edit(model / "generation_config.json", eos_token_id=1, temperature=0.6)
    refused(["--adapter", run, "--model_name_or_path", model], tmp_path, capsys, "temperature")
    edit(model / "generation_config.json", eos_token_id=[1, 77], temperature=None)
    refused(["--adapter", run, "--model_name_or_path", model], tmp_path, capsys, "lacks 77")


def test_a_base_that_stops_there_keeps_its_file(base, tmp_path, capsys):
    model = convert(base, tmp_path / "base", "float32")
    text = f'{{"eos_token_id": [1,   {END}], "temperature": 0.6, "do_sample": true}}'
    (model / "generation_config.json").write_text(text)
    run = trained(model, write_chats(tmp_path / "chats.jsonl", 4), tmp_path / "run")
    assert "does not stop" not in capsys.readouterr().out
    assert not (run / "generation_config.json").exists()
    output = merge(run, tmp_path / "merged")
    assert (output / "generation_config.json").read_text() == text
    assert stops(output) == [1, END]


def test_a_cut_answer_adds_no_stop_id(tmp_path):
    """A row that is cut at a special token inside its answer does not make it an end."""
    from jaxft.data.examples import apply_overflow, make_example
    from jaxft.data.loader import Loader
    from jaxft.data.report import statistics

    rows = [[5, 6, END], [5, 6, 7, 2, 9, END], [5, 6, 7, 8, 1]]
    examples = [make_example(row, np.ones(len(row)), "row") for row in rows]
    ends = {}
    for length, overflow in ((4, "truncate"), (6, "error")):
        kept, report = apply_overflow(examples, length, overflow)
        loader = Loader(kept, max_length=length, packing=True, batch_size=1)
        ends[overflow] = statistics(loader, tiny_tokenizer(), report).ends
    assert ends == {"truncate": (END,), "error": (1, END)}
