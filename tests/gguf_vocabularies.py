"""Tokenizers of transformers over trained vocabularies, and the GGUF metadata written of them."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GemmaTokenizer
from transformers.convert_slow_tokenizer import LlamaConverter, TikTokenConverter, bytes_to_unicode
from transformers.tokenization_utils_base import generate_merges
from varied_texts import varied_texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TOOLS = ("<tool_call>", "</tool_call>")  # tokens of their own, but no special ones
LLAMA3_SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass
class Case:
    """A reference and the metadata that a converter writes for it."""

    reference: Tokenizer
    metadata: dict[str, Any]


def field(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def train(model: models.BPE, pre_tokenizer: Any, normalizer: Any = None, alphabet=()) -> dict:
    """Vocabulary and merges learned from other varied texts."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=5000, show_progress=False, initial_alphabet=list(alphabet)
    )
    tokenizer.train_from_iterator(varied_texts(6000, seed=1), trainer)
    vocab = tokenizer.get_vocab()
    assert len(vocab) > 3000
    return {"tokens": sorted(vocab, key=vocab.get), "merges": as_json(tokenizer)["merges"]}


def as_json(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())["model"]


def byte_level(kind: str, trained: dict, reference: Tokenizer) -> Case:
    """The special tokens lie behind the trained ones, padding of the table behind both."""
    tokens = [*trained["tokens"], *SPECIAL, *TOOLS]
    padded = [*tokens, "[PAD0]", "[PAD1]"]
    types = [NORMAL] * len(trained["tokens"]) + [CONTROL] * 4 + [USER_DEFINED] * 2 + [UNUSED] * 2
    merges = [" ".join(merge) for merge in as_json(reference)["merges"]]
    first = len(trained["tokens"])
    ids = {"bos_token_id": first, "eos_token_id": first + 3, "padding_token_id": first + 1}
    assert [reference.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    vocabulary = field(model="gpt2", pre=kind, tokens=padded, token_type=types, merges=merges)
    return Case(reference, vocabulary | field(**ids))


def of_class(kind: str, cls: Any) -> Case:
    """Of a class of transformers that builds a byte-level tokenizer of vocabulary and merges."""
    # learned from longer pieces than Qwen 2 cuts, so that cutting digits otherwise would show
    split = LLAMA3_SPLIT if kind == "qwen2" else cls().backend_tokenizer.pre_tokenizer
    trained = train(models.BPE(), split, alphabet=ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(trained["tokens"])}
    tokenizer = cls(
        vocab=vocab | {token: len(vocab) + i for i, token in enumerate(SPECIAL)},
        merges=[tuple(merge) for merge in trained["merges"]],
        **dict.fromkeys(("unk_token", "bos_token"), "<s>"),
        **dict.fromkeys(("eos_token", "pad_token"), "<|im_end|>"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOLS])
    return byte_level(kind, trained, tokenizer.backend_tokenizer)


def llama3() -> Case:
    trained = train(models.BPE(), LLAMA3_SPLIT, alphabet=ByteLevel.alphabet())
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    ranks = {bytes(byte_of[c] for c in token): i for i, token in enumerate(trained["tokens"])}

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    reference = Converter("ranks", extra_special_tokens=list(SPECIAL)).converted()
    reference.add_tokens([AddedToken(token, normalized=False) for token in TOOLS])
    return byte_level("llama-bpe", trained, reference)


def pieces_of(first: list[tuple[str, int, float]], normalizer: Any) -> list[tuple[str, int, float]]:
    """A SentencePiece vocabulary: `first`, bytes, then what was learned, best first.

    Each piece is a text, a type and a score. Characters come last, as SentencePiece has them.
    """
    split = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
    trained = train(models.BPE(), split, normalizer)
    learned = [left + right for left, right in trained["merges"]]
    learned += [token for token in trained["tokens"] if len(token) == 1]
    taken = {text for text, _, _ in first}
    # the tab by itself is a byte, as in Llama 2 and Gemma 1
    learned = [t for t in dict.fromkeys(learned) if t not in taken and "\t" not in t]
    return [
        *first,
        *((text, BYTE, 0.0) for text in BYTES),
        *((text, NORMAL, -1.0 - i) for i, text in enumerate(learned)),
    ]


def piece_fields(pieces: list[tuple[str, int, float]]) -> dict[str, Any]:
    """User-defined pieces get plain spaces and, like special ones, a score of -1000."""
    tokens, types, scores = zip(*pieces, strict=True)
    own = [kind in (CONTROL, USER_DEFINED) for kind in types]
    return field(
        model="llama",
        pre="default",
        tokens=[
            text.replace("▁", " ") if kind == USER_DEFINED else text
            for text, kind in zip(tokens, types, strict=True)
        ],
        token_type=list(types),
        scores=[-1000.0 if mine else score for mine, score in zip(own, scores, strict=True)],
    )


def gemma() -> Case:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    runs = [c * n for c, most in (("\n", 8), ("▁", 31), ("\t", 8)) for n in range(1, most + 1)]
    runs = [run for run in runs if run not in ("▁", "\t")]
    own = [*runs, "<table>", "</table>", *TOOLS]
    first = [(text, UNKNOWN if text == "<unk>" else CONTROL, 0.0) for text in specials]
    first += [(text, USER_DEFINED, 0.0) for text in own]
    pieces = pieces_of(first, normalizers.Replace(" ", "▁"))
    # transformers has the tab in the place of its byte: GemmaConverter.vocab
    names = ["\t" if text == "<0x09>" else text for text, _, _ in pieces]
    vocab = {name: i for i, name in enumerate(names)}
    scores = {name: score for name, (_, _, score) in zip(names, pieces, strict=True)}
    tokenizer = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores))
    reference = tokenizer.backend_tokenizer
    reference.add_special_tokens([AddedToken(t, normalized=False) for t in specials])
    reference.add_tokens([AddedToken(text, normalized=False) for text in own])
    ids = {"bos_token_id": 2, "eos_token_id": 1, "padding_token_id": 0, "unknown_token_id": 3}
    flags = {"add_space_prefix": False, "add_bos_token": True}
    return Case(reference, piece_fields(pieces) | field(**ids, **flags))


def llama2() -> Case:
    first = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    pieces = pieces_of(first, normalizers.Replace(" ", "▁"))
    # Llama 2's runs of spaces in the order of their ids, all of one score
    lengths = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)
    runs = [("▁" * n, NORMAL, -1e9) for n in lengths]
    names = {text for text, _, _ in runs}
    pieces = [*pieces[:259], *runs, *(piece for piece in pieces[259:] if piece[0] not in names)]
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    ranked = sorted(pieces, key=lambda piece: -piece[2])
    merges = generate_merges(vocab, None)
    place = {text: i for i, (text, _, _) in enumerate(ranked)}
    merges.sort(key=lambda merge: place["".join(merge)])
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    reference = Tokenizer(model)
    converter: Any = SimpleNamespace(original_tokenizer=SimpleNamespace(legacy=True))
    reference.normalizer = LlamaConverter.normalizer(converter, None)
    reference.decoder = LlamaConverter.decoder(converter, "▁", True)
    reference.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Case(reference, piece_fields(pieces) | field(**ids))
