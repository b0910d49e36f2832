"""Split expressions as `datasets` reads them: train, train[:10%], train[100:200], train+test."""

import re
from collections.abc import Mapping

from jaxft.data.rows import Row
from jaxft.errors import UserError

_EXAMPLES = "train, train[:10%], train[100:200], train+test"


def split_names(expression: str) -> list[str]:
    """Names of the splits that an expression needs, each once."""
    parts = expression.split("+")
    return list(dict.fromkeys(re.split(r"[\[(]", part)[0].strip() for part in parts))


def take(expression: str, rows: Mapping[str, list[Row]]) -> list[Row]:
    """The rows that an expression means, `rows` being those of every split it names.

    Bounds past the end are those of `datasets`: what is there. Raises UserError for an expression
    that it does not know.
    """
    if expression in rows:
        return rows[expression]
    try:
        from datasets import ReadInstruction
    except ImportError:
        raise UserError(
            f"split {expression!r} needs the package datasets: pip install datasets"
        ) from None
    try:
        instruction = ReadInstruction.from_spec(expression)
        parts = instruction.to_absolute({name: len(members) for name, members in rows.items()})
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"split {expression!r}: {reason}; examples: {_EXAMPLES}") from error
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]
