"""Reading single fields of config.json, with one-line faults."""

import math
from collections.abc import Mapping
from typing import Any

from jaxft.errors import UserError


class Fields:
    """The content of a config.json, read field by field; null means that a field is not there."""

    def __init__(self, content: Mapping[str, Any]):
        self.content = content

    def replaced(self, **fields: Any) -> "Fields":
        """The same content with other values for some fields."""
        return Fields({**self.content, **fields})

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self.content

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it is."""
        value = self.content.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.get(name, default)
        if value is None:
            raise UserError(f"config.json lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"config.json: {name} must be a whole number above 0, it is {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} must be true or false, it is {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above 0."""
        return positive(self.get(name, default), name)

    def optional(self, name: str, default: float | None) -> float | None:
        """A finite number above 0, or None where null is written; `default` where nothing is."""
        value = self.content.get(name, default)
        return None if value is None else positive(value, name)

    def choice(self, name: str, default: str, known: Mapping[str, str]) -> str:
        """One of the words in `known`, as the value that stands for it there."""
        value = self.get(name, default)
        if value not in known:
            raise UserError(
                f"config.json: {name} {value!r} is not supported; supported: {', '.join(known)}"
            )
        return known[value]

    def refuse(self, name: str, *harmless: Any) -> None:
        """UserError where the field is set to anything but null, false or what is harmless."""
        value = self.content.get(name)
        if value not in (None, False, *harmless):
            raise UserError(
                f"config.json: {name} {value!r} is not supported for model_type "
                f"{self.content.get('model_type')!r}"
            )


def positive(value: Any, name: str) -> float:
    """A finite number above 0 out of config.json, as it is; UserError for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        raise UserError(f"config.json: {name} must be a number above 0, it is {value!r}")
    return value
