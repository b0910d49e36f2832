"""The console: tables and bars on a terminal, plain lines elsewhere, no crash on any encoding."""

import io

import pytest
from rich.console import Console

from jaxft.report import duration, make_console, print_preflight, training_display

SECTIONS = {
    "model": [("checkpoint", "/tmp/ü 名/model.gguf"), ("trained", 1234567)],
    "data": [("rows", "342"), ("note", "[bold] is no markup :smile: " + "x" * 90)],
}


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")


def written(file: io.TextIOWrapper) -> str:
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(file.encoding)


def test_a_pipe_gets_plain_whole_lines():
    file = stream("utf-8")
    print_preflight(SECTIONS, make_console(file))
    assert written(file).splitlines() == [
        "model  checkpoint  /tmp/ü 名/model.gguf",
        "       trained     1234567",
        "data   rows        342",
        "       note        [bold] is no markup :smile: " + "x" * 90,
    ]


def test_a_terminal_gets_a_table_that_fits_and_loses_nothing():
    file = stream("utf-8")
    sections = {"run": [(f"row {i}", "value " * 4) for i in range(20)], **SECTIONS}
    print_preflight(sections, Console(file=file, force_terminal=True, width=80, no_color=True))
    lines = written(file).splitlines()
    assert max(map(len, lines)) < 120  # escape codes included
    assert "".join(lines).count("x") >= 90
    few = stream("utf-8")
    print_preflight(
        {"run": sections["run"]}, Console(file=few, force_terminal=True, width=80, no_color=True)
    )
    assert len(written(few).splitlines()) <= 23


@pytest.mark.parametrize("terminal", [False, True])
def test_an_ascii_output_gets_escapes(terminal):
    file = stream("ascii")
    console = Console(file=file, force_terminal=terminal, width=80)
    print_preflight(SECTIONS, console)
    with training_display(3, console=console) as display:
        display.advance(1)
        display.log(2, loss=1.5, tokens_per_second=1000.0)
        display.note("saved ü")
    text = written(file)
    assert "\\xfc" in text
    assert "loss 1.5000" in text


def test_a_pipe_gets_one_line_for_each_logged_update():
    file = stream("utf-8")
    with training_display(5, start=2, console=make_console(file)) as display:
        display.advance(3)
        display.log(4, loss=0.25, tokens_per_second=12345.6)
        display.note("eval_loss 1.0")
        display.advance(5)
    first, second = written(file).splitlines()
    assert first.startswith("step 4/5  loss 0.2500  12,346 tok/s")
    assert second == "eval_loss 1.0"


def test_duration():
    assert [duration(s) for s in (7.6, 185, 7440, -1)] == ["8s", "3m05s", "2h04m", "0s"]
