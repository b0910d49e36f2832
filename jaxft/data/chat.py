"""From rows to examples: layouts are told apart, chats rendered, answers marked as labels.

A chat's ids are those of ``tokenizer.apply_chat_template(messages, tokenize=True)``: the template
alone decides about BOS. Labels are the assistant's turns, content and turn end, found as
`jaxft.data.spans` describes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import batched
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jinja2 import TemplateError

from jaxft.data import spans
from jaxft.data.examples import Example, make_example
from jaxft.data.layouts import Document, Pair, Text, detect, parse
from jaxft.data.plain import PlainEncoder
from jaxft.data.rows import Row
from jaxft.data.turns import Chat
from jaxft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_BATCH = 1000  # rows a tokenizer call


def encode(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerFast,
    *,
    text_field: str = "text",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Example]:
    """Token ids and loss mask of every row, in order; `progress` is told (done, total).

    Raises UserError naming the row for anything that cannot be trained as it stands.
    """
    layout = detect(rows, text_field)
    templated = bool(tokenizer.chat_template)
    documents = [parse(row, layout, text_field=text_field, as_chat=templated) for row in rows]
    encoder = _encoder(documents[0], tokenizer)
    examples: list[Example] = []
    for batch in batched(documents, _BATCH):
        examples += encoder(list(batch))
        progress(len(examples), len(documents))
    return examples


def _encoder(first: Document, tokenizer: PreTrainedTokenizerFast) -> Callable[[Any], list[Example]]:
    if isinstance(first, Text):
        return PlainEncoder(tokenizer).texts
    if isinstance(first, Pair):
        return PlainEncoder(tokenizer).pairs
    if not tokenizer.chat_template:
        raise UserError(
            f"{first.origin}: rows of messages need a chat template and the tokenizer has none; "
            "use prompt/completion or text rows, or a model with a chat template"
        )
    return ChatEncoder(tokenizer).encode


class ChatEncoder:
    """Renders chats through the tokenizer's template and marks the assistant's turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        # Not among the documented entries of transformers, but the one place that tells where
        # {% generation %} blocks begin and end in the text.
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_template = cast(Any, render_jinja_template)
        self._tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._marked = spans.has_markers(self._template)
        # By token id; a vocabulary may have holes, so its size is not its highest id plus one.
        self._added = np.zeros(max(tokenizer.get_vocab().values()) + 1, bool)
        self._added[list(tokenizer.get_added_vocab().values())] = True
        # A post-processor may trim spaces off the offsets (Llama 3 does), which hides whether a
        # token reaches over a boundary. It has no say in the ids when no special tokens are added.
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.post_processor = None  # type: ignore
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    def encode(self, chats: Sequence[Chat]) -> list[Example]:
        """Examples of the chats; the tokenizer is called once."""
        rendered = [self._rendered(chat) for chat in chats]
        encodings = self._backend.encode_batch([text for text, _ in rendered], False, False)
        examples = []
        for chat, (text, found), encoding in zip(chats, rendered, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            tokens = spans.Tokens(text, offsets, self._added[ids], chat.origin)
            mask = np.zeros(len(ids), bool)
            for span in found:
                tokens.mark(mask, span)
            examples.append(make_example(ids, mask, chat.origin))
        return examples

    def _rendered(self, chat: Chat) -> tuple[str, list[spans.Span]]:
        def render(messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
            return self._render(chat, messages, add_generation_prompt)[0]

        text, marked = self._render(chat, chat.messages)
        if self._marked:
            return text, spans.of_markers(marked, text, chat, render)
        return text, spans.of_turns(text, chat, render)

    def _render(
        self, chat: Chat, messages: list[dict[str, Any]], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, marked = self._render_template(
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UserError(
                f"{chat.origin}: the chat template refuses the roles {chat.roles}: {error}"
            ) from error
        return texts[0], marked[0] if marked else []
