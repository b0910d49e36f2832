"""Token ids that end an answer: those a base model stops at, and those its training added."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft.errors import UserError
from jaxft.formats.files import read_json
from jaxft.formats.weights import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FILE = "generation_config.json"
_EOS = "eos_token_id"


def stop_tokens(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids that end an answer: the generation config's, the config's, the tokenizer's EOS."""
    sources = (checkpoint.generation_config or {}, checkpoint.config)
    stop = {token for source in sources for token in _ids(source)}
    if isinstance(tokenizer.eos_token_id, int):
        stop.add(tokenizer.eos_token_id)
    return frozenset(stop)


def extend_stops(checkpoint: Checkpoint, ends: Iterable[int]) -> tuple[dict[str, Any], list[int]]:
    """The base's generation config with `ends` among its stop ids, and the ids that are new.

    transformers stops at the ids of generation_config.json alone, and at config.json's where that
    file is missing; the tokenizer's EOS is not looked at.
    """
    base = _effective(checkpoint)
    known = _ids(base)
    added = sorted(set(ends) - set(known))
    return base | {_EOS: [*known, *added]}, added


def read_extended(adapter: Path, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The generation config that lies beside an adapter; None where there is none.

    Raises:
      UserError: it takes back something that the base's generation config says.
    """
    path = adapter / FILE
    if not path.is_file():
        return None
    own = read_json(path)
    remedy = f"; remove the file to take the base's ({checkpoint.source})"
    for key, value in (checkpoint.generation_config or {}).items():
        if key != _EOS and own.get(key) != value:
            raise UserError(f"{path}: {key} is {own.get(key)}, the base says {value}{remedy}")
    if lost := sorted(set(_ids(_effective(checkpoint))) - set(_ids(own))):
        raise UserError(f"{path}: {_EOS} lacks {lost[0]}, at which the base stops{remedy}")
    return own


def _effective(checkpoint: Checkpoint) -> dict[str, Any]:
    """What transformers generates with: without a file, the special tokens of config.json."""
    if checkpoint.generation_config is not None:
        return checkpoint.generation_config
    names = ("bos_token_id", _EOS, "pad_token_id")
    found = {name: checkpoint.config.get(name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _ids(source: dict[str, Any]) -> list[int]:
    ids = source.get(_EOS)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
