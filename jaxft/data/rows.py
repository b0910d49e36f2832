"""A row, and JSON text that stays what it says."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands: ``train.jsonl:12``, ``part.parquet:row 3``."""

    fields: dict[str, Any]
    origin: str


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text; ValueError with the reason in few words."""
    try:
        read = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(read)
        if "\\u" in read:  # an escaped half of a surrogate pair is no text for a tokenizer
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason}") from error  # type: ignore
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise ValueError(f"not readable as JSON: {error}") from error
    return value
