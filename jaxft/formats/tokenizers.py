"""Fast tokenizers out of a model folder and into a run's folder, without torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jaxft.errors import UserError
from jaxft.formats.files import read_json, replacing_files, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_CONFIG = "tokenizer_config.json"


def tokenizer_class() -> type[PreTrainedTokenizerFast]:
    """transformers' fast tokenizer, imported without its advice to install torch.

    Of transformers only tokenizers and chat templates are used here; "models won't be available"
    is nothing that a user needs to know.
    """

    def needed(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(needed)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(needed)
    return PreTrainedTokenizerFast


def folder_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder: tokenizer.json as it is, plus its config and template.

    The class named in tokenizer_config.json is not looked up: that would import torch, and
    transformers 5 rebuilds some classes (LlamaTokenizer) from the vocabulary alone instead of
    taking the file's own pre-tokenizer. Whether there is a BOS is what the post-processor in
    tokenizer.json says, as in AutoTokenizer, which drops `add_bos_token` where that file exists.
    """
    folder = folder.absolute()  # a relative `a/b` would be looked up on the hub by transformers
    if not (folder / "tokenizer.json").is_file():
        others = ("tokenizer.model", "vocab.json", "tekken.json")
        remedy = "copy it, and tokenizer_config.json, from where the model comes from"
        if any((folder / name).is_file() for name in others):
            remedy = (
                "make one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise UserError(f"{folder}: has no tokenizer.json; {remedy}")
    for name in ("tokenizer.json", _CONFIG, "special_tokens_map.json"):
        if (folder / name).is_file():
            read_json(folder / name)  # one clear line for a damaged or git-lfs file
    try:
        return tokenizer_class().from_pretrained(folder)
    except (LookupError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{folder}: the tokenizer's files cannot be read ({reason})") from error


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the tokenizer beside an adapter, read it back and compare.

    `tokenizer_class` becomes `PreTrainedTokenizerFast`, which transformers 4 and 5 both load as
    the tokenizer.json it was trained with. Raises RuntimeError if it does not read back equal.
    """
    with replacing_files(folder, last=_CONFIG) as temporary:
        tokenizer.save_pretrained(temporary)
        config = read_json(temporary / _CONFIG)
        write_json(temporary / _CONFIG, config | {"tokenizer_class": "PreTrainedTokenizerFast"})
        again = folder_tokenizer(temporary)
        if (
            again.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str()
            or again.chat_template != tokenizer.chat_template
            or again.special_tokens_map != tokenizer.special_tokens_map
        ):
            raise RuntimeError(f"{folder}: the saved tokenizer does not read back equal")
