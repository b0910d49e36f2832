"""The tokenizer that a GGUF file's `tokenizer.*` metadata describe.

Two kinds exist for Llama, Qwen and Gemma: byte-level BPE with its merges (`gpt2`), and a
SentencePiece vocabulary with scores (`llama`), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from jaxft.errors import UserError
from jaxft.formats.tokenizers import tokenizer_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# token types of the format
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_SPACE = "\u2581"  # SentencePiece's
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

# How Llama 3 cuts text, digits in groups of at most three; Qwen 2 takes each digit by itself.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(
    metadata: Mapping[str, Any], path: Path, *, vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file whose embedding has `vocab_size` rows.

    Raises UserError, naming `path` and the field, for missing fields and for tokenizer kinds other
    than SentencePiece BPE and byte-level BPE cut as `PRE_TOKENIZERS` name it.
    """
    fields = _Fields(metadata, path)
    tokens, types = _tokens(fields, vocab_size)
    special_tokens: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = fields.get(f"{key}_token_id", None)
        if index is not None and not 0 <= index < len(tokens):
            raise fields.fault(f"{key}_token_id", f"is {index}, past the {len(tokens)} tokens")
        if index is not None:
            special_tokens[f"{name}_token"] = tokens[index]

    model, kind = fields["model"], fields.get("pre", "default")
    if model == "llama":
        tokenizer = _sentencepiece(fields, tokens, types, special_tokens.get("unk_token"))
    elif model == "gpt2" and kind in PRE_TOKENIZERS:
        tokenizer = _byte_level(fields, tokens, kind)
    else:
        raise UserError(
            f"{path}: tokenizer of kind {model}/{kind} is not supported in GGUF files; supported: "
            + ", ".join(["llama", *(f"gpt2/{name}" for name in PRE_TOKENIZERS)])
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    # where the file says nothing, Llama 2, Llama 3 and Gemma have a BOS
    has_bos = model == "llama" or kind == "llama-bpe"
    tokenizer.post_processor = _post_processor(fields, tokenizer, special_tokens, has_bos)
    return tokenizer_class()(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


class _Fields:
    """The `tokenizer.ggml.*` metadata of a file."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata, self._path = metadata, path

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise UserError(f"{self._path}: metadata tokenizer.ggml.{key} is missing")
        return value

    def fault(self, key: str, what: str) -> UserError:
        return UserError(f"{self._path}: tokenizer.ggml.{key} {what}")


def _tokens(fields: _Fields, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of the tokens, less the ones that fill up the table at its end."""
    tokens, types = list(fields["tokens"]), list(fields["token_type"])
    if len(types) != len(tokens) or len(tokens) > vocab_size:
        raise fields.fault(
            "tokens",
            f"({len(tokens)}) does not fit token_type ({len(types)}) and the {vocab_size} rows of "
            "token_embd.weight",
        )
    while types and types[-1] == _UNUSED:
        types.pop()
        tokens.pop()
    if fields["model"] == "llama":
        # converters write Gemma's runs of spaces, which are user-defined tokens, as plain spaces
        tokens = [
            _SPACE * len(token) if kind == _USER_DEFINED and not token.strip(" ") else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    if len(set(tokens)) != len(tokens):
        raise fields.fault("tokens", f"({len(tokens)}) has only {len(set(tokens))} distinct ones")
    return tokens, types


def _byte_level(fields: _Fields, tokens: Sequence[str], kind: str) -> Tokenizer:
    """BPE on bytes, with the merges of the file."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in fields["merges"]:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise fields.fault("merges", f"has {merge!r}, not in the vocabulary")
        merges.append((left, right))
    # Llama 3 takes a word that is in the vocabulary whole, even where no chain of merges makes it.
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    """Every digit by itself, then GPT-2's split."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# How text is cut before byte-level BPE, by the name in `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2_split,
    "llama-bpe": lambda: _regex_split(_LLAMA3_SPLIT),
    "qwen2": lambda: _regex_split(_QWEN2_SPLIT),
    "smollm": _smollm_split,
}


def _sentencepiece(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int], unknown: str | None
) -> Tokenizer:
    """BPE on characters, bytes where a character is not in the vocabulary; Llama 2 and Gemma.

    Llama 2 puts a space ahead of the text and of what follows a special token; Gemma does not.
    """
    scores: list[float] = fields["scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(scores) < len(tokens):
        raise fields.fault("scores", f"({len(scores)}) does not fit the {len(tokens)} tokens")
    if unknown is None and not vocab.keys() >= _BYTES:
        raise fields.fault("tokens", "has neither a token for every byte nor an unknown token")
    if {
        "\t\t",
        "<0x09>",
    } <= vocab.keys() and "\t" not in vocab:  # Gemma 1: tabs reach no merge else
        vocab["\t"] = vocab.pop("<0x09>")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(vocab, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1, right=0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order in which merges are tried.

    User-defined tokens come first, long ones before short ones, as SentencePiece has it (converters
    give them a score of -1000); then the others by their score. Where scores are equal, as for
    Llama 2's runs of spaces, ids decide, as in the tokenizer.json of those models.
    """
    ways: list[tuple[tuple[float, int, int, int], str, str]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                if types[i] == _USER_DEFINED:
                    order = (float("-inf"), -len(left), -len(right), i)
                else:
                    order = (-scores[i], i, vocab[left], vocab[right])
                ways.append((order, left, right))
    ways.sort()
    return [(left, right) for _, left, right in ways]


def _post_processor(
    fields: _Fields, tokenizer: Tokenizer, special_tokens: Mapping[str, str], has_bos: bool
) -> processors.PostProcessor:
    """BOS and EOS where the file asks for them; where it says nothing, `has_bos` and no EOS."""
    add = {
        "bos": fields.get("add_bos_token", has_bos),
        "eos": fields.get("add_eos_token", False),
    }
    for name, wanted in add.items():
        if wanted and f"{name}_token" not in special_tokens:
            raise fields.fault(
                f"{name}_token_id", f"is missing, though a {name.upper()} is to be added"
            )
    bos = [special_tokens["bos_token"]] if add["bos"] else []
    eos = [special_tokens["eos_token"]] if add["eos"] else []
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1", *(f"{t}:1" for t in eos)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
    )
