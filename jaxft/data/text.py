"""Rows of text files: JSON Lines, JSON, CSV and TSV, each also compressed.

Nothing is guessed: a CSV cell is the text that stands in it, ``null``, ``007`` and dates included.
The text is UTF-8. A byte-order mark, CRLF, blank lines and a missing final newline change nothing.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxft.data.rows import Row, parse_json
from jaxft.errors import UserError

_BOM = b"\xef\xbb\xbf"
# What a file with the wrong name may hold, by its first bytes.
_OTHERS = {
    b"PAR1": "Parquet data; name it .parquet",
    b"ARROW1": "Arrow data; name it .arrow",
    b"\x1f\x8b": "gzip data; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "zstd data; add .zst to its name",
    b"PK\x03\x04": "a zip archive or a spreadsheet; save the rows as CSV",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"%PDF": "a PDF document",
    b"<!DOCTYPE": "a web page; was it the file's own address?",
    b"<!doctype": "a web page; was it the file's own address?",
    b"<html": "a web page; was it the file's own address?",
}
Lines = Iterable[bytes]


def json_lines(lines: Lines, path: Path, label: str) -> list[Row]:
    """Rows of one JSON object a line."""
    rows = []
    # Lines end at "\n" only: U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(lines, start=1):
        if line.strip() in (b"[", b"{") and not rows:
            raise UserError(
                f"{path}:{number}: JSON over several lines, where each line must hold a row; name "
                "the file .json"
            )
        if line.strip():
            rows.append(Row(_object(line.rstrip(), f"{path}:{number}"), f"{label}:{number}"))
    return rows


def json_document(lines: Lines, path: Path, label: str) -> list[Row]:
    """Rows of a JSON list of objects, or of the one list that an object holds.

    A file that turns out to hold one object a line is read as such: many bear this name.
    """
    content = b"".join(lines)
    try:
        value = parse_json(content)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError) and cause.msg == "Extra data":
            return json_lines(io.BytesIO(content), path, label)
        raise UserError(f"{path}{_line(content, cause)}: {error}") from error
    items = _items(value, path)
    for number, item in enumerate(items, start=1):
        _check_object(item, f"{path}:item {number}")
    return [Row(item, f"{label}:item {number}") for number, item in enumerate(items, start=1)]


def _line(content: bytes, error: BaseException | None) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f":{error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        return f":{content.count(b'\n', 0, error.start) + 1}"
    return ""


def _items(value: Any, path: Path) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        if value.keys() & {"messages", "conversations", "prompt", "instruction", "text"}:
            return [value]  # a file of a single row
        lists = [item for item in value.values() if isinstance(item, list)]
        if len(lists) == 1:
            return lists[0]
        found = f"an object with {len(lists)} lists; its keys: {', '.join(value) or 'none'}"
    else:
        found = f"a {type(value).__name__}"
    raise UserError(f"{path}: must be a list of rows or an object that holds one, this is {found}")


def comma_separated(lines: Lines, path: Path, label: str) -> list[Row]:
    """Rows of CSV."""
    return _delimited(lines, path, label, ",")


def tab_separated(lines: Lines, path: Path, label: str) -> list[Row]:
    """Rows of TSV; cells are quoted as in CSV."""
    return _delimited(lines, path, label, "\t")


def _delimited(lines: Lines, path: Path, label: str, delimiter: str) -> list[Row]:
    """Rows of cells under a header line, every cell the text as written, RFC 4180's quotes off."""
    rows: list[Row] = []
    header: list[str] = []
    start = 1  # line where the row begins; quoted cells may hold newlines
    with _cells_of_any_size():
        reader = csv.reader(_decoded(lines, path), delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                number, start = start, reader.line_num + 1
                if not cells or (len(header) != 1 and len(cells) == 1 and not cells[0].strip()):
                    continue
                if not header:
                    header = _header(cells, f"{path}:{number}")
                elif len(cells) != len(header):
                    raise UserError(
                        f"{path}:{number}: {len(cells)} cells where the header has {len(header)} "
                        f"({', '.join(header)}); quote cells that hold the separator or a newline"
                    )
                else:
                    rows.append(Row(dict(zip(header, cells, strict=True)), f"{label}:{number}"))
        except csv.Error as error:
            reason = str(error)
            if "unexpected end of data" in reason:
                reason = "a quoted cell that begins here is not closed"
            elif "new-line character" in reason:
                reason = "a lone carriage return outside of quotes; save with LF or CRLF line ends"
            raise UserError(f"{path}:{start}: {reason}") from error
    return rows


def _header(cells: list[str], place: str) -> list[str]:
    other = next((sign for sign in ";\t|" if len(cells) == 1 and sign in cells[0]), None)
    if other is not None:
        raise UserError(
            f"{place}: the columns are separated by {other!r}; save the file with commas"
            + (", or name it .tsv" if other == "\t" else "")
        )
    names = [cell or "(no name)" for cell in cells]  # pandas leaves its index column without one
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{place}: the header has two columns {twice!r}")
    return names


def _decoded(lines: Lines, path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if b"\0" in line:
            raise UserError(f"{path}:{number}: holds a NUL byte, so this is no text file")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start + 1} of the "
                "line); save it as UTF-8"
            ) from error


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """The csv module knows one limit for the whole process, 128 KiB; it is put back."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    return _check_object(value, place)


def _check_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place}: a row must be a JSON object, this is a {type(value).__name__}")
    return value


Reader = Callable[[Lines, Path, str], list[Row]]
READERS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_document,
    ".csv": comma_separated,
    ".tsv": tab_separated,
}
COMPRESSIONS = (".gz", ".zst")


def read_text(path: Path, label: str, suffix: str, compression: str) -> list[Row]:
    """Rows of a text file of the format `suffix`, compressed by `compression` ("" for not).

    Raises UserError naming file and 1-based line.
    """
    try:
        with _open(path, compression) as stream:
            return READERS[suffix](_lines(stream, path), path, label)
    except EOFError as error:
        raise UserError(f"{path}: the archive is cut off; incomplete download?") from error
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if "Truncated" in reason:
            reason = "the archive is cut off; incomplete download?"
        raise UserError(f"{path}: cannot be read: {reason}") from error


def _open(path: Path, compression: str) -> BinaryIO:
    if compression == ".gz":
        return gzip.open(path)  # type: ignore
    if compression == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))  # type: ignore
    return path.open("rb")


def _lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    first = True
    for line in stream:
        if first:
            for magic, what in _OTHERS.items():
                if line.startswith(magic):
                    raise UserError(f"{path}: holds {what}")
            line, first = line.removeprefix(_BOM), False
        yield line
