"""What a run shows on the console: the report before it starts and its progress.

On a terminal a table and a bar (rich); into a file or a pipe plain lines, the same content.
Characters that the output's encoding lacks are written as escapes, so a path with an umlaut
never stops a run under LC_ALL=C.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that has left ends the output, not the run: its results are in its folder."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # also for what Python flushes at its end
        os.close(nowhere)


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (stdout) that adds no markup or colours of its own to our text."""
    return _Console(file=file or sys.stdout, highlight=False, markup=False, emoji=False)


def print_preflight(
    sections: Mapping[str, Sequence[tuple[str, object]]], console: Console | None = None
) -> None:
    """Prints what a run will do, as `{section: [(name, value), ...]}`, in the order given.

    A terminal of 80x24 shows up to 20 short rows at once; a long value is folded, never cut.
    """
    console = console or make_console()
    rows = [
        ("" if i else section, name, _writable(str(value), console))
        for section, members in sections.items()
        for i, (name, value) in enumerate(members)
    ]
    if not console.is_terminal:
        left = max((len(section) for section, _, _ in rows), default=0)
        middle = max((len(name) for _, name, _ in rows), default=0)
        for section, name, value in rows:
            _line(f"{section:{left}}  {name:{middle}}  {value}", console)
        return
    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(style="bold")
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


class StepDisplay:
    """Where a training loop reports to: `advance` at every update, `log` at the logged ones."""

    def __init__(self, total: int, console: Console, progress: Progress | None) -> None:
        self._total = total
        self._console = console
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=total, status="")
        self._first: tuple[int, float] | None = None  # of this process, its compilation past

    def advance(self, step: int) -> None:
        """Takes note that `step` updates are finished; prints nothing where there is no bar."""
        if self._first is None:
            self._first = (step, time.monotonic())
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def log(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Shows a logged update: beside the bar, or as one plain line."""
        self.advance(step)
        status = f"loss {loss:.4f}  {tokens_per_second:,.0f} tok/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, status=status)
        else:
            _line(f"step {step}/{self._total}  {status}{self._time_left(step)}", self._console)

    def _time_left(self, step: int) -> str:
        if self._first is None or step == self._first[0]:
            return ""
        pace = (time.monotonic() - self._first[1]) / (step - self._first[0])
        return f"  {duration(pace * (self._total - step))} left"

    def status(self, text: str) -> None:
        """Shows beside the bar what is going on; nothing where there is no bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, status=text)

    def note(self, text: str) -> None:
        """One line that stays, above the bar: an evaluation, a checkpoint, a warning."""
        _line(text, self._console)


@contextmanager
def training_display(
    total: int, start: int = 0, console: Console | None = None
) -> Iterator[StepDisplay]:
    """A display for updates `start` (finished ones) to `total`; a bar only on a terminal."""
    console = console or make_console()
    if not console.is_terminal:
        yield StepDisplay(total, console, None)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        display = StepDisplay(total, console, progress)
        progress.update(progress.task_ids[0], completed=start)
        yield display


@contextmanager
def progress_bar(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar with time left for `what`, moved by calling it with (done, total).

    Without a terminal it is one plain line at the end, where that took a second or more.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
    )
    began = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
    seconds = time.monotonic() - began
    if seconds >= 1 and not console.is_terminal:
        _line(f"{what}: {duration(seconds)}", console)


def duration(seconds: float) -> str:
    """Seconds as people read them: 8s, 3m05s, 2h04m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _writable(text: str, console: Console) -> str:
    encoding = console.encoding
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _line(text: str, console: Console) -> None:
    console.print(Text(_writable(text, console)), soft_wrap=True)
