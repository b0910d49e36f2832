"""Token ids and loss masks of texts and of prompt/completion pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxft.data.examples import Example, make_example
from jaxft.data.layouts import Pair, Text
from jaxft.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PlainEncoder:
    """Encodes texts without a chat template: what the tokenizer puts in front, one EOS behind.

    Raises UserError when the tokenizer has no EOS, since a model tuned without one never stops.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no eos_token, so the end of a row cannot be taught; set it in "
                "tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._eos: int = tokenizer.eos_token_id  # type: ignore
        self._bos: int | None = tokenizer.bos_token_id  # type: ignore
        bare = self._ids(["a"])[0]
        full = self._ids(["a"], add_special_tokens=True)[0]
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        self._front = full[:start]  # usually the BOS or nothing

    def _ids(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        return self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,  # a row past model_max_length is the overflow policy's business
        )["input_ids"]  # type: ignore

    def _begin(self, ids: list[int]) -> list[int]:
        """`ids` with the tokenizer's front, once, also where the text spells it out."""
        ids = self._front + ids
        while self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids = ids[1:]
        return ids

    def _end(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one EOS at the end."""
        while ids and ids[-1] == self._eos:
            ids = ids[:-1]
        return [*ids, self._eos]

    def texts(self, texts: Sequence[Text]) -> list[Example]:
        """Loss on every token but the first of each text, its EOS included."""
        examples = []
        for text, ids in zip(texts, self._ids([t.text for t in texts]), strict=True):
            ids = self._end(self._begin(ids))
            examples.append(make_example(ids, np.ones(len(ids), bool), text.origin))
        return examples

    def pairs(self, pairs: Sequence[Pair]) -> list[Example]:
        """Loss on the completion and its EOS.

        The prompt's ids are those of the prompt alone, as the tuned model will meet them. The
        completion's are its ids in the joined text, unless a token there would reach over the
        boundary: then the completion is tokenised on its own, behind an EOS that is taken off
        again, so that no tokenizer puts its start-of-text space in front of it.
        """
        prompts = self._ids([pair.prompt for pair in pairs])
        joined = self._ids([pair.prompt + pair.completion for pair in pairs])
        examples = []
        for pair, prompt, ids in zip(pairs, prompts, joined, strict=True):
            completion = ids[len(prompt) :]
            if ids[: len(prompt)] != prompt or not completion:
                completion = self._ids([f"{self._tokenizer.eos_token}{pair.completion}"])[0][1:]
            completion = self._end(completion)
            if len(completion) == 1:
                raise UserError(f"{pair.origin}: the completion holds nothing but the end token")
            prompt = self._begin(prompt)
            mask = np.zeros(len(prompt) + len(completion), bool)
            mask[len(prompt) :] = True
            examples.append(make_example([*prompt, *completion], mask, pair.origin))
        return examples
