"""`python -m triton_ref.parity`: proves that the JAX path and the Triton path agree."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from safetensors.numpy import load_file

from jaxft import cli
from jaxft.errors import UserError
from jaxft.report import make_console, progress_bar
from triton_ref.parity.job import Job, result_file
from triton_ref.parity.options import ParityConfig, parse
from triton_ref.parity.prepare import prepare
from triton_ref.parity.tensors import adapted, in_order
from triton_ref.parity.verdict import Table, Verdict, judge_bfloat16, judge_float32


def main(argv: list[str]) -> int:
    """The command; its exit code is 1 where a bound is exceeded."""
    return run(parse(argv))


def run(config: ParityConfig) -> int:
    """Compare both paths as `config` says, print the tables and keep them if a report is wanted.

    Raises:
      UserError: an input that cannot be used, or a side that failed, in one line.
    """
    console = make_console()
    report = None if config.report is None else _check_report(config.report)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        work = Path(folder)
        job = prepare(config, work, console)
        verdict = _compare(config, job, work, console)
    for table in verdict.tables:
        _print(table, console)
    lines = [f"FAILED: {fault}" for fault in verdict.faults] or ["passed: both paths agree"]
    for line in lines:
        console.print(line, soft_wrap=True)
    if report is not None:
        try:
            report.write_text(_markdown(config, verdict, lines), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--report {report}: {error.strerror}") from None
        console.print(f"report written to {report}", soft_wrap=True)
    return 1 if verdict.faults else 0


def _check_report(name: str) -> Path:
    path = Path(name).expanduser()
    if not name or path.is_dir():
        raise UserError(f"--report {name!r} is no file name")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--report {name}: its folder does not exist")
    return path


def _compare(config: ParityConfig, job: Job, work: Path, console: Console) -> Verdict:
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # the last line says the fault
    if not _has_gpu():
        environment["TRITON_INTERPRET"] = "1"
    runs = [("jax", config.dtype), ("torch", config.dtype)]
    if config.dtype != "float32":
        runs.append(("torch", "float32"))
    results = []
    with progress_bar("running both paths", console) as progress:
        for done, (side, dtype) in enumerate(runs):
            progress(done, len(runs))
            _run_side(side, dtype, work, environment)
            results.append(load_file(result_file(work, side, dtype)))
        progress(len(runs), len(runs))
    order = list(in_order(job.layers, adapted(results[0]), job.steps))
    jax, torch, *exact = results
    if not exact:
        return judge_float32(jax, torch, order)
    return judge_bfloat16(jax, torch, exact[0], order)


def _has_gpu() -> bool:
    """Whether torch can use one; asked in a process of its own."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def _run_side(side: str, dtype: str, work: Path, environment: Mapping[str, str]) -> None:
    """One path in its own process; UserError with the last line of what it said if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", f"triton_ref.parity.{side}_side", str(work), dtype],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if any(line.startswith("Traceback") for line in lines):
            sys.stderr.write(done.stderr)
        raise UserError(f"the {side} side failed in {dtype}: {lines[-1]}")


def _print(table: Table, console: Console) -> None:
    shown = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if i == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _markdown(config: ParityConfig, verdict: Verdict, lines: list[str]) -> str:
    parts = [f"# Parity of {config.model_name_or_path} in {config.dtype}\n"]
    parts += [f"{line}\n" for line in lines]
    for table in verdict.tables:
        parts.append(f"## {table.title}\n")
        parts.append("| " + " | ".join(table.columns) + " |")
        parts.append("|" + " --- |" * len(table.columns))
        parts += ["| " + " | ".join(row) + " |" for row in table.rows]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    cli.run(main)
