"""From rows of a known layout to chats, pairs or texts, every cell checked.

==========================  =================================================================
columns                     trained as
==========================  =================================================================
messages                    a chat; loss on the assistant's turns
conversations               the same in ShareGPT's words: from and value
prompt, completion          two texts, joined as they are: no chat template, loss on the
                            completion; or two lists of messages: one chat, loss on the
                            assistant's turns of the completion
instruction, output         with a chat template: a chat of one user turn (the instruction, a
(and input)                 blank line, the input) and one assistant turn, because that is how
                            the tuned model will be asked; without one: a pair whose prompt is
                            written by `instruction_prompt`
text                        one text; loss on all of it
==========================  =================================================================

Other columns, such as an id or a source, are not used (`Layout.unused` lists them); those that
would change what is trained, such as `tools` or `system`, are refused. A cell of messages or
conversations that is text, as in CSV, is read as the JSON list it has to hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxft.data.rows import Row
from jaxft.data.turns import Chat, from_conversation, parse_messages, read_list
from jaxft.errors import UserError

Kind = Literal["messages", "conversations", "prompt-completion", "chat-pair", "instruction", "text"]

# Columns other trainers give a meaning that would change the tokens or the loss.
_MEANINGFUL = frozenset(
    (
        "chat_template_kwargs",
        "chosen",
        "documents",
        "history",
        "images",
        "label",
        "labels",
        "rejected",
        "system",
        "tools",
        "weight",
    )
)


@dataclass(frozen=True)
class Layout:
    """Kind of all rows of a file, and the columns that training does not use."""

    kind: Kind
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion to learn."""

    prompt: str
    completion: str
    origin: str


@dataclass(frozen=True)
class Text:
    """A text to learn as a whole."""

    text: str
    origin: str


Document = Chat | Pair | Text


def accepted(text_field: str = "text") -> str:
    """The layouts in one line, for messages."""
    return (
        "messages | conversations | prompt, completion | instruction, output (input) | "
        f"{text_field}"
    )


def detect(rows: Sequence[Row], text_field: str = "text") -> Layout:
    """Layout of the rows, told from their columns.

    A `text_field` other than "text" is an explicit choice and decides alone. Raises UserError,
    listing the columns found and the accepted layouts, for unknown or ambiguous columns and for
    rows that differ in layout.
    """
    if not rows:
        raise UserError("there is no row to train on")
    kind: Kind | None = None
    unused: set[str] = set()
    for row in rows:
        this = _kind(row, text_field)
        kind = kind or this
        if this != kind:
            raise UserError(
                f"{row.origin}: this row has the layout {this}, {rows[0].origin} has {kind}; "
                f"columns found: {_columns(row)}"
            )
        unused |= row.fields.keys() - _used(kind, text_field)
        for name in sorted(unused & _MEANINGFUL & row.fields.keys()):
            if row.fields[name] not in (None, "", [], {}):
                raise UserError(
                    f"{row.origin}: column {name!r} would change what is trained and is not "
                    f"supported with {kind} rows; remove it"
                )
    assert kind is not None
    return Layout(kind, tuple(sorted(unused)))


def _kind(row: Row, text_field: str) -> Kind:
    columns = row.fields.keys()
    if text_field != "text":
        if text_field in columns:
            return "text"
        raise UserError(
            f"{row.origin}: no column {text_field!r} (--dataset_text_field); "
            f"columns found: {_columns(row)}"
        )
    fits: list[Kind] = []
    if "messages" in columns:
        fits.append("messages")
    if "conversations" in columns:
        fits.append("conversations")
    if columns >= {"prompt", "completion"}:
        lists = isinstance(row.fields["prompt"], list) and isinstance(
            row.fields["completion"], list
        )
        fits.append("chat-pair" if lists else "prompt-completion")
    if columns >= {"instruction", "output"}:
        fits.append("instruction")
    if "text" in columns:
        fits.append("text")
    if len(fits) == 1:
        return fits[0]
    problem = f"columns fit several layouts ({', '.join(fits)})" if fits else "unknown columns"
    remedy = "rename or remove" if fits else "rename or add"
    raise UserError(
        f"{row.origin}: {problem}; columns found: {_columns(row)}; accepted layouts: "
        f"{accepted()}; {remedy} columns"
    )


def _columns(row: Row) -> str:
    return ", ".join(row.fields) or "none"


def _used(kind: Kind, text_field: str) -> frozenset[str]:
    return {
        "messages": frozenset({"messages"}),
        "conversations": frozenset({"conversations"}),
        "prompt-completion": frozenset({"prompt", "completion"}),
        "chat-pair": frozenset({"prompt", "completion"}),
        "instruction": frozenset({"instruction", "input", "output"}),
        "text": frozenset({text_field}),
    }[kind]


def parse(row: Row, layout: Layout, *, text_field: str = "text", as_chat: bool) -> Document:
    """The row as a chat, a pair or a text.

    `as_chat`: an instruction row becomes a chat (the tokenizer has a chat template). Raises
    UserError naming the row for cells of another type and for empty answers.
    """
    fields = row.fields
    if layout.kind in ("messages", "conversations"):
        turns = read_list(fields[layout.kind], layout.kind, row.origin)
        if layout.kind == "conversations":
            turns = from_conversation(turns, row.origin)
        return parse_messages(turns, row.origin)
    if layout.kind == "chat-pair":
        prompt, completion = fields["prompt"], fields["completion"]
        return parse_messages(prompt + completion, row.origin, trained_from=len(prompt))
    if layout.kind == "prompt-completion":
        prompt = _text(row, "prompt")
        return Pair(prompt, _filled(row, "completion"), row.origin)
    if layout.kind == "text":
        return Text(_filled(row, text_field), row.origin)
    instruction, output = _filled(row, "instruction"), _filled(row, "output")
    extra = "" if fields.get("input") is None else _text(row, "input")
    if as_chat:
        question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": output},
        ]
        return parse_messages(turns, row.origin)
    return Pair(instruction_prompt(instruction, extra), output, row.origin)


def instruction_prompt(instruction: str, extra: str = "") -> str:
    """Prompt of an instruction row for a tokenizer that has no chat template."""
    given = f"### Input\n{extra}\n\n" if extra.strip() else ""
    return f"### Task\n{instruction}\n\n{given}### Answer\n"


def _text(row: Row, column: str) -> str:
    value: Any = row.fields[column]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise UserError(f"{row.origin}: column {column!r} must be text, it is {kind}")
    return value


def _filled(row: Row, column: str) -> str:
    value = _text(row, column)
    if not value.strip():
        raise UserError(f"{row.origin}: column {column!r} is empty")
    return value
