"""What merging refuses, in one line each, and that a failure leaves nothing behind."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from merging import convert, make_adapter, merge, refused, weights
from safetensors.numpy import save_file
from tiny import tiny_folder

from jaxft import cli, export
from jaxft.errors import UserError
from jaxft.formats import sharded
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.peft import load_adapter, save_adapter

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"))


def test_wrong_adapters_and_bases_are_one_line(base, adapter, tmp_path, capsys):
    refused(["--adapter", tmp_path / "no"], tmp_path, capsys, "adapter folder does not exist")
    refused(["--adapter", base], tmp_path, capsys, "adapter_config.json: file does not exist")
    deep = tiny_folder(tmp_path / "deep", num_hidden_layers=3)
    other = make_adapter(deep, tmp_path / "other")
    named = ["--adapter", other, "--model_name_or_path", base]
    refused(named, tmp_path, capsys, "changes model.layers.2", "another model")
    wide = make_adapter(tiny_folder(tmp_path / "wide", intermediate_size=96), tmp_path / "wider")
    named = ["--adapter", wide, "--model_name_or_path", base]
    refused(named, tmp_path, capsys, "down_proj", "(64, 96)", "(64, 128)", "another model")
    for name, hint in (("../gone", "names another"), ("", "names no base model")):
        config, arrays = load_adapter(adapter)
        folder = tmp_path / f"adapter{len(name)}"
        save_adapter(folder, replace(config, base_model_name_or_path=name), arrays)
        refused(["--adapter", folder], tmp_path, capsys, name, "--model_name_or_path", hint)
    tensors = weights(base)
    del tensors["lm_head.weight"]
    headless = convert(base, tmp_path / "headless", "float32")
    save_file(tensors, headless / "model.safetensors")
    named = ["--adapter", adapter, "--model_name_or_path", headless]
    refused(named, tmp_path, capsys, "lm_head.weight is missing")


OPTIONS = {
    "unknown": (["--adaptor", "x"], "did you mean --adapter?"),
    "no adapter": ([], "--adapter is required"),
    "weights": (["--adapter", "x", "--base_weights", "nf5"], "original, nf4"),
    "size": (["--adapter", "x", "--max_shard_size", "big"], "--max_shard_size must be a size"),
    "no size": (["--adapter", "x", "--max_shard_size", "0GB"], "got '0GB'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_one_line(tmp_path, case, capsys):
    argv, named = OPTIONS[case]
    refused(argv, tmp_path, capsys, named)


def test_the_kinds_are_listed(capsys):
    assert export.main([]) == 2
    assert export.main(["--help"]) == 0
    assert capsys.readouterr().out.count("\n  merged ") == 2
    with pytest.raises(SystemExit):
        cli.run(export.main, ["merge"])
    assert capsys.readouterr().err == (
        "error: the first word says what to export (merged), got 'merge'\n"
    )


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "1.5gb": 15 * 10**8, "500 MB": 5 * 10**8, "2GiB": 2**31}
    assert {text: export.parse_size(text) for text in sizes} == sizes


def test_a_folder_in_use_is_left_alone(base, adapter, tmp_path, capsys):
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "mine").write_text("x")
    with pytest.raises(SystemExit):
        cli.run(
            export.main,
            ["merged", "--adapter", str(adapter), "--output_dir", str(tmp_path / "refused")],
        )
    assert "is not empty (it holds mine)" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "refused").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert (merge(adapter, tmp_path / "empty") / "model.safetensors").exists()


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("existed", [False, True])
def test_a_failure_in_the_middle_leaves_nothing(
    adapter, tmp_path, monkeypatch, capsys, fault, existed
):
    output = tmp_path / "merged"
    if existed:
        output.mkdir()
    real = HuggingFaceFolder.read
    seen = []

    def read(self, name):
        seen.append(name)
        if len(seen) == 5:
            assert list(output.rglob("model-00002-*"))  # it is in the middle
            raise fault
        return real(self, name)

    monkeypatch.setattr(HuggingFaceFolder, "read", read)
    argv = ["merged", "--adapter", adapter, "--output_dir", output, "--max_shard_size", "1KB"]
    with pytest.raises(SystemExit) as end:
        cli.run(export.main, [str(word) for word in argv])
    assert end.value.code == (130 if isinstance(fault, KeyboardInterrupt) else 2)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert output.exists() == existed
    assert not list(output.rglob("*"))


def test_a_value_that_a_dtype_cannot_hold_is_refused(base, adapter, tmp_path, capsys):
    model = convert(base, tmp_path / "base", "float32")
    tensors = weights(base)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 7e4
    save_file(tensors, model / "model.safetensors")
    named = ["--adapter", adapter, "--model_name_or_path", model, "--dtype", "float16"]
    refused(named, tmp_path, capsys, "layers.1.mlp.up_proj", "70000", "float16 cannot hold")
    merge(adapter, tmp_path / "merged", model_name_or_path=model, dtype="bfloat16")


def test_a_damaged_result_is_noticed(adapter, tmp_path, monkeypatch):
    real = sharded._write_file

    def forgetful(path, tensors, make, tell):
        real(path, dict(list(tensors.items())[1:]), make, tell)

    monkeypatch.setattr(sharded, "_write_file", forgetful)
    with pytest.raises(RuntimeError, match="read back"):
        merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_command_never_imports_torch(adapter, tmp_path):
    code = (
        "import sys; from jaxft.export import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules, 'jax' in sys.modules)"
    )
    argv = ["merged", "--adapter", adapter, "--output_dir", tmp_path / "merged"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv), "--base_weights", "nf4"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False True"


def test_rope_factors_without_a_spelling_are_refused(tmp_path, capsys):
    from gguf_files import hf_tensors, write

    tensors = hf_tensors()
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    file = write(tmp_path / "base.gguf", tensors, extra={"rope_freqs.weight": factors})
    save_file(tensors, tmp_path / "model.safetensors")  # for the shapes
    adapter = make_adapter(tmp_path, tmp_path / "adapter")
    named = ["--adapter", adapter, "--model_name_or_path", file]
    refused(named, tmp_path, capsys, "RoPE factors have no spelling")
    write(file, tensors)
    merge(adapter, tmp_path / "merged", model_name_or_path=file)


def test_the_revision_of_the_base_is_the_adapters(adapter, tmp_path, capsys, monkeypatch):
    asked = []

    def open_nothing(name, revision):
        asked.append((name, revision))
        raise UserError("offline")

    monkeypatch.setattr(export, "open_checkpoint", open_nothing)
    config, arrays = load_adapter(adapter)
    named = replace(config, base_model_name_or_path="org/base", revision="v2")
    save_adapter(tmp_path / "adapter", named, arrays)
    argv = ["--adapter", tmp_path / "adapter"]
    refused(argv, tmp_path, capsys, "offline (the base that", "adapter_config.json names")
    refused([*argv, "--revision", "v3"], tmp_path, capsys)
    refused([*argv, "--model_name_or_path", "org/other"], tmp_path, capsys)
    assert asked == [("org/base", "v2"), ("org/base", "v3"), ("org/other", None)]
