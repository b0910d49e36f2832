"""Rows of a file, whatever its format: its name tells which one that is."""

from pathlib import Path

from jaxft.data import columnar, text
from jaxft.data.rows import Row
from jaxft.errors import UserError

ACCEPTED = (
    ", ".join(text.READERS)
    + f" (each also with {' or '.join(text.COMPRESSIONS)} behind it), "
    + ", ".join(columnar.READERS)
)
# Of all files that are read, for fnmatch.
PATTERNS = [
    *(f"*{suffix}{packed}" for suffix in text.READERS for packed in ("", *text.COMPRESSIONS)),
    *(f"*{suffix}" for suffix in columnar.READERS),
]
_LFS_POINTER = b"version https://git-lfs"


def format_of(path: Path) -> tuple[str, str] | None:
    """Format and compression by the file's name, as (".jsonl", ".gz"); None if it is none of ours.

    A file without compression has "" for it.
    """
    last, before = path.suffix.lower(), Path(path.stem).suffix.lower()
    if last in text.COMPRESSIONS and before in text.READERS:
        return before, last
    return (last, "") if last in text.READERS or last in columnar.READERS else None


def read_rows(path: Path, label: str | None = None) -> list[Row]:
    """All rows of a file, in order; their origins begin with `label`, the file's name if None.

    Raises UserError, naming the file and where it can the line, for a file that is missing,
    damaged, without a row or of no known suffix.
    """
    form = format_of(path)
    if form is None:
        raise UserError(f"{path}: cannot tell the format by the name; accepted are {ACCEPTED}")
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise UserError(f"cannot read {path.absolute()}: {error.strerror}") from error
    if head == _LFS_POINTER:
        raise UserError(f"{path}: is a git-lfs pointer; fetch it with 'git lfs pull'")
    rows = []
    if head:
        suffix, compression = form
        if suffix in columnar.READERS:
            rows = columnar.read_columnar(path, label or path.name, suffix)
        else:
            rows = text.read_text(path, label or path.name, suffix, compression)
    if not rows:
        raise UserError(f"{path} holds no row")
    return rows
