"""What the tests of merging share: random adapters, converted bases, the command itself."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxft import cli, export
from jaxft.formats.peft import AdapterConfig, save_adapter

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
TARGETS = ("q_proj", "v_proj", "down_proj")
SCALE = 0.75  # of `make_adapter`


def make_adapter(base: Path, folder: Path, size=0.1, rslora=False, ranks=None, alphas=None) -> Path:
    """A random adapter of rank 4 and scale 0.75, or 1.5 with rank stabilisation."""
    random = np.random.default_rng(3)
    config = AdapterConfig(
        r=4,
        lora_alpha=3.0,
        lora_dropout=0.0,
        target_modules=TARGETS,
        use_rslora=rslora,
        rank_pattern=ranks or {},
        alpha_pattern=alphas or {},
        base_model_name_or_path=str(base),
    )

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, size, shape).astype(np.float32)

    arrays = {}
    for name, value in weights(base).items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in TARGETS:
            rank = config.rank_of(path)
            arrays[path] = normal(rank, value.shape[1]), normal(value.shape[0], rank)
    save_adapter(folder, config, arrays)
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def convert(base: Path, folder: Path, kind: str, **config) -> Path:
    """A copy of a model folder with its tensors in another dtype and more in its config.json."""
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {name: value.astype(DTYPES[kind]) for name, value in weights(base).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", **config)
    return folder


def edit(path: Path, **values) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | values), encoding="utf-8")


def merge(adapter: Path, output: Path, **over) -> Path:
    words = {"adapter": adapter, "output_dir": output} | over
    argv = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    assert export.main(["merged", *argv]) == 0
    return output


def refused(argv: list, folder: Path, capsys, *named: str) -> str:
    """The command ends with code 2 and one line, and leaves nothing."""
    output = folder / "refused"
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.run(export.main, ["merged", *map(str, argv), "--output_dir", str(output)])
    assert end.value.code == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    for part in named:
        assert part in error
    assert not output.exists()
    return error
