"""Where the assistant's turns stand in a rendered chat, in characters and in tokens.

Text of a message is never searched for: it may occur anywhere. A turn starts where the chat up to
it, rendered with the generation prompt, ends, so it is what the model has to write when it is
served with this template. It ends where the chat rendered with it ends, less white space behind
the turn end token. Templates with ``{% generation %}`` blocks say both themselves; only a turn
end token that stands directly behind a block is added, for without it the model never stops.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxft.data.turns import Chat
from jaxft.errors import UserError

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Render(Protocol):
    """Text of messages under the template."""

    def __call__(  # noqa: D102
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str: ...


@dataclass(frozen=True)
class Span:
    """Characters start..end of the text.

    `closed_by`: look for the turn end token behind `end` and take it in, up to this character.
    `must_close`: it is an error when there is none.
    """

    start: int
    end: int
    closed_by: int = 0
    must_close: bool = False


def has_markers(template: str) -> bool:
    """Whether the template has ``{% generation %}`` blocks."""
    return _MARKER.search(template) is not None


def of_turns(text: str, chat: Chat, render: Render) -> list[Span]:
    """Spans of the turns to learn, found by rendering the chat up to each of them."""
    found = []
    for index in _trained(chat):
        before = render(chat.messages[:index], add_generation_prompt=True)
        if not text.startswith(before):
            raise UserError(
                f"{chat.origin}: message {index + 1}: the chat template renders the messages "
                "before it differently when others follow, so the answer cannot be told from "
                "the rest; use a template with {% generation %} blocks or prompt/completion rows"
            )
        end = _turn_end(text, chat, index, render)
        if end is None:
            end = _content_end(text, chat, index, render)
            found.append(Span(len(before), end, len(text), must_close=True))
        else:
            found.append(Span(len(before), end))
    return found


def of_markers(marked: list[tuple[int, int]], text: str, chat: Chat, render: Render) -> list[Span]:
    """Spans of the template's ``{% generation %}`` blocks whose turns are to be learned."""
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(marked) != len(turns):
        raise UserError(
            f"{chat.origin}: the template marks {len(marked)} {{% generation %}} blocks for "
            f"{len(turns)} assistant turns"
        )
    found = []
    for index, (start, end) in zip(turns, marked, strict=True):
        if chat.trained[index]:
            limit = _turn_end(text, chat, index, render)
            found.append(Span(start, end, limit or 0))
    return found


def _trained(chat: Chat) -> list[int]:
    return [index for index, trained in enumerate(chat.trained) if trained]


def _turn_end(text: str, chat: Chat, index: int, render: Render) -> int | None:
    """Where message `index` ends; None when it is rendered differently once others follow."""
    if index + 1 == len(chat.messages):
        return len(text)
    through = render(chat.messages[: index + 1])
    return len(through) if text.startswith(through) else None


def _content_end(text: str, chat: Chat, index: int, render: Render) -> int:
    """Where the content of message `index` ends: what follows stays when the content changes.

    For templates that render an answer differently once it is history: Qwen 3 shows the
    reasoning of the last answer only.
    """
    message = chat.messages[index]
    stand_in = "1" if message["content"].rstrip().endswith("0") else "0"
    changed = list(chat.messages)
    changed[index] = {**message, "content": stand_in}
    pairs = zip(reversed(text), reversed(render(changed)), strict=False)
    same = next((same for same, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        raise UserError(
            f"{chat.origin}: message {index + 1}: the chat template leaves this answer out; mark "
            'it with "train": false'
        )
    return len(text) - same


class Tokens:
    """Tokens of a text by the characters they cover.

    offsets: int64 [n, 2], start and end of each token, white space not trimmed. added: bool [n],
    the token is of the added vocabulary, where templates have their markers.
    """

    def __init__(self, text: str, offsets: np.ndarray, added: np.ndarray, origin: str):
        self._text = text
        self._starts, self._ends = offsets[:, 0], offsets[:, 1]
        self._added = added
        self._origin = origin

    def mark(self, mask: np.ndarray, span: Span) -> None:
        """Set `mask` at the tokens of a span.

        White space behind a closing added token stays out. A token that begins before the span
        is in it when only white space stands outside, out of it when only white space stands
        inside, and cannot be decided otherwise: UserError. So is one that reaches past the end.
        """
        first = int(np.searchsorted(self._ends, span.start, side="right"))
        stop = int(np.searchsorted(self._starts, span.end, side="left"))
        last = self._closed(first, stop, span)
        if last > first and self._starts[first] < span.start:
            if not self._blank(int(self._starts[first]), span.start):
                self._refuse(first)
            first += self._blank(span.start, int(self._ends[first]))
        if last > first and self._ends[last - 1] > max(span.end, span.closed_by):
            self._refuse(last - 1)
        mask[first:last] = True

    def _closed(self, first: int, stop: int, span: Span) -> int:
        """End in tokens of a span whose characters end before token `stop`."""
        follows = stop < len(self._ends) and bool(self._added[stop])
        if follows and self._ends[stop] <= span.closed_by:
            return stop + 1
        if span.must_close:
            raise UserError(f"{self._origin}: the chat template puts no turn end after an answer")
        last = stop
        while last > first and self._blank(int(self._starts[last - 1]), int(self._ends[last - 1])):
            last -= 1
        return last if last > first and self._added[last - 1] else stop

    def _blank(self, start: int, end: int) -> bool:
        piece = self._text[start:end]
        return not piece or piece.isspace()

    def _refuse(self, token: int) -> None:
        piece = self._text[self._starts[token] : self._ends[token]]
        raise UserError(
            f"{self._origin}: the token {piece!r} reaches over the edge of an answer, so whether "
            "to train it cannot be decided"
        )
