"""Rows of Parquet and Arrow files, a batch at a time.

A column of structs has every key in every row. A key that is null there is one that was not there
in the messages, so it leaves; columns stay.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxft.data.rows import Row, parse_json
from jaxft.errors import UserError

_BATCH = 1000  # rows of Parquet in memory beside those already read
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
Convert = Callable[[Any], Any] | None


def parquet(path: Path, label: str) -> list[Row]:
    """Rows of a Parquet file."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return _rows(file.schema_arrow, file.iter_batches(batch_size=_BATCH), path, label)


def arrow(path: Path, label: str) -> list[Row]:
    """Rows of an Arrow IPC file or stream; `save_to_disk` of datasets writes streams."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            return _rows(file.schema, batches, path, label)
        # A stream that is cut between two batches reads as a shorter one.
        source.seek(max(0, source.size() - len(_END_OF_STREAM)))
        if source.read() != _END_OF_STREAM:
            raise UserError(
                f"{path}: is no Arrow file, or is cut off: it does not end as one; incomplete copy?"
            )
        source.seek(0)
        stream = pyarrow.ipc.open_stream(source)
        return _rows(stream.schema, stream, path, label)


READERS: dict[str, Callable[[Path, str], list[Row]]] = {".parquet": parquet, ".arrow": arrow}


def read_columnar(path: Path, label: str, suffix: str) -> list[Row]:
    """Rows of a file of the format `suffix`; origins count rows from 1. Raises UserError."""
    import pyarrow

    try:
        return READERS[suffix](path, label)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        kind = suffix.removeprefix(".").capitalize()
        raise UserError(f"{path}: cannot be read as {kind}: {reason}") from error


def _rows(schema: Any, batches: Iterable[Any], path: Path, label: str) -> list[Row]:
    names = schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: has two columns {twice!r}")
    converts = [_convert(kind) for kind in schema.types]
    rows: list[Row] = []
    for batch in batches:
        batch.validate(full=True)
        columns = []
        for column, convert in zip(batch.columns, converts, strict=True):
            values = column.to_pylist()
            columns.append(values if convert is None else [convert(value) for value in values])
        for values in zip(*columns, strict=True):
            fields = dict(zip(names, values, strict=True))
            rows.append(Row(fields, f"{label}:row {len(rows) + 1}"))
    return rows


def _convert(kind: Any) -> Convert:
    """What brings Python values of an Arrow type to those of JSON; None where they are already."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else parse_json(value)
    if types.is_struct(kind):
        fields = {field.name: _convert(field.type) for field in kind}
        return lambda value: None if value is None else _present(value, fields)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = _convert(kind.value_type)
        if item is not None:
            return lambda value: None if value is None else [item(each) for each in value]
    return None


def _present(value: dict[str, Any], fields: dict[str, Convert]) -> dict[str, Any]:
    return {
        name: item if convert is None else convert(item)
        for name, convert in fields.items()
        if (item := value[name]) is not None
    }
