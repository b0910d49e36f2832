"""Rows of JSON Lines files, each with the file and line it came from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft.errors import UserError

DEFAULT_SPLIT = "train"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One line of a file: its JSON object and its origin, such as ``train.jsonl:12``."""

    fields: dict[str, Any]
    origin: str


def resolve(dataset_name: str, split: str = DEFAULT_SPLIT) -> Path:
    """File that a data set's name and split mean.

    `dataset_name` is a JSONL file (it has one split, "train") or a folder that holds
    ``<split>.jsonl``. Raises UserError when there is no such file.
    """
    path = Path(dataset_name).expanduser()
    if path.is_file():
        if split != DEFAULT_SPLIT:
            raise UserError(
                f"{path} is one file and has no split {split!r}: leave the split at "
                f"{DEFAULT_SPLIT!r} or give a folder that holds {split}.jsonl"
            )
        return path
    if not path.is_dir():
        raise UserError(f"data set {dataset_name!r}: no file or folder {path.absolute()}")
    file = path / f"{split}.jsonl"
    if not file.is_file():
        found = ", ".join(sorted(p.name for p in path.glob("*.jsonl"))) or "no .jsonl file"
        raise UserError(f"data set {dataset_name!r} has no {file.name}; the folder holds {found}")
    return file


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL file, in order.

    The text is UTF-8. A byte-order mark, CRLF, blank lines and a missing final newline change
    nothing. Raises UserError, naming file and 1-based line, for a line that is not a JSON object,
    and naming the file when it is missing or holds no row.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path.absolute()}: {error.strerror}") from error
    rows = []
    # Lines end at "\n" only: U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            rows.append(Row(_object(line, f"{path}:{number}"), f"{path.name}:{number}"))
    if not rows:
        raise UserError(f"{path} holds no row")
    return rows


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
        if b"\\u" in line:  # an escaped half of a surrogate pair is no text a tokenizer can read
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason})") from error  # type: ignore
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise UserError(f"{place}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{place}: a row must be a JSON object, this is a {type(value).__name__}")
    return value
