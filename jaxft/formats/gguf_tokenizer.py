"""The byte-level BPE tokenizer that a GGUF file's `tokenizer.*` metadata describe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxft.errors import UserError

# token types of the format
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut before BPE, by the name in `tokenizer.ggml.pre`; None for an unknown one."""
    if kind == "smollm":  # every digit by itself, then GPT-2's split
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return None


PRE_TOKENIZERS = ("llama-bpe", "smollm")


def build_tokenizer(
    metadata: Mapping[str, Any], path: Path, *, vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file whose embedding has `vocab_size` rows.

    Raises UserError, naming `path` and the field, for missing fields and for tokenizer kinds other
    than byte-level BPE cut as `PRE_TOKENIZERS` name it.
    """

    def field(key: str) -> Any:
        if key not in metadata:
            raise UserError(f"{path}: metadata {key} is missing")
        return metadata[key]

    model, kind = field("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(kind)
    if model != "gpt2" or pre_tokenizer is None:
        raise UserError(
            f"{path}: tokenizer of kind {model}/{kind} is not supported in GGUF files; supported: "
            + ", ".join(f"gpt2/{name}" for name in PRE_TOKENIZERS)
        )
    tokens: list[str] = field("tokenizer.ggml.tokens")
    types: list[int] = field("tokenizer.ggml.token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens) or len(tokens) > vocab_size:
        raise UserError(
            f"{path}: tokenizer.ggml.tokens ({len(tokens)}, {len(set(tokens))} distinct) does not "
            f"fit token_type ({len(types)}) and the {vocab_size} rows of token_embd.weight"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in field("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise UserError(f"{path}: tokenizer.ggml.merges has {merge!r}, not in the vocabulary")
        merges.append((left, right))
    # Llama 3 takes a word that is in the vocabulary whole, even where no chain of merges makes it.
    bpe = BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )

    special_tokens: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise UserError(
                f"{path}: tokenizer.ggml.{key}_token_id {index} is past the {len(tokens)} tokens"
            )
        if index is not None:
            special_tokens[f"{name}_token"] = tokens[index]
    tokenizer.post_processor = _post_processor(metadata, tokenizer, special_tokens, kind, path)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )


def _post_processor(
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    kind: str,
    path: Path,
) -> processors.PostProcessor:
    """BOS and EOS where the file asks for them; where it says nothing, Llama 3 has a BOS."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe")
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
        if wanted and f"{name}_token" not in special_tokens:
            raise UserError(
                f"{path}: a {name.upper()} is to be added but tokenizer.ggml.{name}_token_id is "
                "missing"
            )
    bos = [special_tokens["bos_token"]] if add_bos else []
    eos = [special_tokens["eos_token"]] if add_eos else []
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1", *(f"{t}:1" for t in eos)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
    )
