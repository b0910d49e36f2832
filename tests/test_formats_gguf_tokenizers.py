"""Tokenizers rebuilt from GGUF metadata give the ids of transformers' own, on 2,000 varied texts.

The references are transformers' Qwen2Tokenizer, GPT2Tokenizer and GemmaTokenizer, what its
TikTokenConverter makes of Llama 3's ranks and its LlamaConverter of Llama 2's pieces, and for
SmolLM the expressions of llama.cpp's llama-vocab.cpp. The metadata are what llama.cpp's
convert_hf_to_gguf.py writes for such a vocabulary.
"""

from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from gguf_files import hf_tensors, write
from gguf_vocabularies import (
    NORMAL,
    SPECIAL,
    TOOLS,
    UNUSED,
    Case,
    field,
    gemma,
    llama2,
    llama3,
    of_class,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from varied_texts import varied_texts

from jaxft.errors import UserError
from jaxft.formats.gguf import GgufFile
from jaxft.formats.gguf_tokenizer import build_tokenizer
from jaxft.formats.tokenizers import folder_tokenizer, save_tokenizer

TEXTS = varied_texts(2000, (*SPECIAL, *TOOLS, "<table>", "\t\t\t", "<start_of_turn>"))

CASES = {
    "llama-bpe": llama3,
    "qwen2": partial(of_class, "qwen2", Qwen2Tokenizer),
    "gpt-2": partial(of_class, "gpt-2", GPT2Tokenizer),
    "Gemma": gemma,
    "Llama 2": llama2,
}


@cache
def case(name: str) -> Case:
    return CASES[name]()


def ours(metadata: dict[str, Any]) -> Any:
    size = len(metadata["tokenizer.ggml.tokens"])
    return build_tokenizer(metadata, Path("m.gguf"), vocab_size=size, max_length=10000)


def ids(tokenizer: Tokenizer, texts=TEXTS) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def differing(a: list, b: list) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]


@pytest.mark.parametrize("name", CASES)
def test_ids_and_texts_are_those_of_the_reference(name):
    made = case(name)
    tokenizer = ours(made.metadata).backend_tokenizer
    want = ids(made.reference)
    assert len(TEXTS) == 2000
    assert [TEXTS[i] for i in differing(ids(tokenizer), want)] == []
    for skip in (True, False):
        texts = [
            x.decode_batch(want, skip_special_tokens=skip) for x in (tokenizer, made.reference)
        ]
        assert differing(*texts) == []
    used = {i for row in want for i in row}
    assert len(used) > 1500  # of about 5,000: merges are put to use
    assert tokenizer.get_vocab_size() == made.reference.get_vocab_size()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-bpe", {"pre": "qwen2"}),
        ("llama-bpe", {"pre": "smollm"}),
        ("qwen2", {"pre": "llama-bpe"}),
        ("gpt-2", {"pre": "smollm"}),
        ("Gemma", {"add_space_prefix": True}),
        ("Llama 2", {"add_space_prefix": False}),
    ],
)
def test_another_kind_gives_other_ids(name, change):
    made = case(name)
    wrong = ours(made.metadata | field(**change, add_bos_token=False)).backend_tokenizer
    assert len(differing(ids(wrong), ids(made.reference))) > 50


def smollm_words(text: str) -> list[str]:
    """llama.cpp's two expressions for SmolLM, one after the other."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    parts = [text]
    for pattern in (r"\p{N}", gpt2):
        cut = (regex.split(f"({pattern})", part) for part in parts)
        parts = [piece for pieces in cut for piece in pieces if piece]
    return parts


def test_smollm_is_cut_as_llama_cpp_does():
    metadata = case("gpt-2").metadata | field(pre="smollm")
    tokenizer = ours(metadata).backend_tokenizer
    tokens, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    words = Tokenizer(BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    words.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    texts = varied_texts()
    want = [[i for row in ids(words, smollm_words(text)) for i in row] for text in texts]
    assert [texts[i] for i in differing(ids(tokenizer, texts), want)] == []
    gpt2 = ours(case("gpt-2").metadata).backend_tokenizer
    assert len(differing(ids(gpt2, texts), want)) > 200  # digits in numbers are joined there


def best_pairs(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE: the neighbours of the highest joint score, the leftmost first."""
    tokens, scores = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    vocab = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    text = text.replace(" ", "▁")
    if metadata.get("tokenizer.ggml.add_space_prefix", True) and text:
        text = "▁" + text
    parts = list(text)
    while True:
        joined = [vocab.get(a + b) for a, b in pairwise(parts)]
        ranked = [(-scores[i], place) for place, i in enumerate(joined) if i is not None]
        if not ranked:
            break
        place = min(ranked)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    out = []
    for part in parts:
        out += [vocab[part]] if part in vocab else [vocab[f"<0x{b:02X}>"] for b in part.encode()]
    return out


@pytest.mark.parametrize("name", ["Gemma", "Llama 2"])
def test_merges_follow_the_scores(name):
    metadata = case(name).metadata
    tokenizer = ours(metadata).backend_tokenizer
    own = [t for t, k in zip(*pair(metadata), strict=True) if k != NORMAL and t.strip()]
    # without what is matched as a whole, and without runs of spaces
    parts = {
        part for t in varied_texts(1000, seed=2) for part in regex.split(r"[\n\t]+|[ ▁]{2,}", t)
    }
    texts = sorted(t for t in parts if len(t) < 60 and not any(token in t for token in own))
    assert len(texts) > 1000
    want = [best_pairs(text, metadata) for text in texts]
    assert [texts[i] for i in differing(ids(tokenizer, texts), want)] == []
    reversed_scores = [-score for score in metadata["tokenizer.ggml.scores"]]
    wrong = ours(metadata | field(scores=reversed_scores)).backend_tokenizer
    assert len(differing(ids(wrong, texts), want)) > 200


def pair(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    return metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]


def test_runs_of_tabs_where_the_tab_is_a_byte():
    """Gemma 1's files have runs of tabs as ordinary pieces, and no piece for a single one."""
    metadata = case("Gemma").metadata
    tokens, types = pair(metadata)
    ordinary = [NORMAL if token.strip(" ") == "\t" * len(token) else kind
                for token, kind in zip(tokens, types, strict=True)]  # fmt: skip
    tokenizer = ours(metadata | field(token_type=ordinary)).backend_tokenizer
    want = [tokens.index(token) for token in ("a", "\t\t\t", "a", "<0x09>", "a")]
    assert ids(tokenizer, ["a\t\t\ta\ta"]) == [want]
    assert tokenizer.decode(want) == "a\t\t\ta\ta"


@pytest.mark.parametrize(("name", "first"), [("llama-bpe", 1), ("qwen2", 0), ("Gemma", 1)])
def test_bos_where_the_family_has_one(name, first):
    metadata = case(name).metadata
    metadata = {k: v for k, v in metadata.items() if not k.endswith("add_bos_token")}
    tokenizer = ours(metadata)
    with_special, without = (tokenizer("ab", add_special_tokens=x).input_ids for x in (True, False))
    assert with_special == [tokenizer.bos_token_id] * first + without


def test_padding_of_the_table_is_no_part_of_the_tokenizer():
    metadata = case("qwen2").metadata
    tokens, types = pair(metadata)
    assert types[-2:] == [UNUSED, UNUSED]
    assert len(ours(metadata)) == len(tokens) - 2


@pytest.mark.parametrize("name", ["qwen2", "Gemma", "Llama 2"])
def test_saved_beside_an_adapter_it_gives_the_same_ids(tmp_path, name):
    tokenizer = ours(case(name).metadata)
    save_tokenizer(tmp_path, tokenizer)
    assert ids(folder_tokenizer(tmp_path).backend_tokenizer) == ids(tokenizer.backend_tokenizer)
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(t).input_ids for t in TEXTS[:300]] == [
        tokenizer(t).input_ids for t in TEXTS[:300]
    ]


def test_read_from_a_file(tmp_path):
    made = case("Gemma")
    size = len(made.metadata["tokenizer.ggml.tokens"])
    table = {"model.embed_tokens.weight": np.zeros((size, 64), np.float32)}
    tensors = hf_tensors(tied=True) | table
    path = write(tmp_path / "m.gguf", tensors, metadata=made.metadata)
    tokenizer = GgufFile(path).tokenizer()
    assert ids(tokenizer.backend_tokenizer) == ids(made.reference)
    assert (tokenizer.bos_token, tokenizer.unk_token) == ("<bos>", "<unk>")


def tokenizer_of(tmp_path, **metadata):
    changes = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GgufFile(write(tmp_path / "m.gguf", hf_tensors(), metadata=changes)).tokenizer()


def test_llama3_tokenizer(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer("ab").input_ids == [258, 256]
    assert tokenizer("abc").input_ids == [258, 257]  # whole, though no merge makes it
    assert tokenizer.tokenize("abcab 12345") == [*("ab", "c", "ab"), "Ġ", *"12345"]
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't 12345\n\nx")
    assert [word for word, _ in words] == ["Don", "'t", "Ġ", "123", "45", "ĊĊ", "x"]
    assert tokenizer.tokenize("<s>a</s><tool>") == ["<s>", "a", "</s>", "<tool>"]
    assert tokenizer.decode([258, 256, 260, 259], skip_special_tokens=True) == "ab<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.pad_token is None
    assert tokenizer.model_max_length == 256
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>ab"


def test_smollm_pre_tokenizer_cuts_out_every_digit(tmp_path):
    tokenizer = tokenizer_of(tmp_path, ggml__pre="smollm")
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't  2024\nx")
    assert [word for word, _ in words] == ["Don", "'t", "ĠĠ", *"2024", "Ċ", "x"]


@pytest.mark.parametrize(
    ("bos", "eos", "kind", "ids"),
    [
        (None, None, "llama-bpe", [258, 256]),
        (None, None, "smollm", [256]),
        (False, None, "llama-bpe", [256]),
        (True, None, "smollm", [258, 256]),
        (True, True, "llama-bpe", [258, 256, 259]),
    ],
)
def test_bos_and_eos_as_the_file_says(tmp_path, bos, eos, kind, ids):
    flags = {"ggml__add_bos_token": bos, "ggml__add_eos_token": eos, "ggml__pre": kind}
    tokenizer = tokenizer_of(tmp_path, **flags)
    assert tokenizer("ab").input_ids == ids
    assert tokenizer("ab", add_special_tokens=False).input_ids == [256]


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"ggml__pre": "gpt-4o"}, ["gpt2/gpt-4o", "gpt2/smollm"]),
        ({"ggml__pre": None}, ["gpt2/default"]),
        ({"ggml__model": "bert"}, ["bert/llama-bpe", "llama, gpt2/gpt-2"]),
        ({"ggml__model": "llama"}, ["tokenizer.ggml.scores", "missing"]),
        ({"ggml__model": "llama", "ggml__scores": [0.0]}, ["tokenizer.ggml.scores", "(1)"]),
        ({"ggml__model": "llama", "ggml__scores": [0.0] * 261}, ["token for every byte"]),
        ({"ggml__tokens": ["a", "a"], "ggml__token_type": [1, 1]}, ["tokens", "1 distinct"]),
        ({"ggml__merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"ggml__merges": ["a b", "a bc"]}, ["tokenizer.ggml.merges", "'a bc'"]),
        ({"ggml__token_type": [1, 1]}, ["token_type", "2"]),
        ({"ggml__eos_token_id": 5000}, ["eos_token_id", "5000"]),
        ({"ggml__bos_token_id": None}, ["bos_token_id", "missing", "BOS"]),
    ],
)
def test_tokenizer_faults_are_one_line(tmp_path, metadata, parts):
    with pytest.raises(UserError) as caught:
        tokenizer_of(tmp_path, **metadata)
    assert "\n" not in str(caught.value)
    for part in (str(tmp_path / "m.gguf"), *parts):
        assert part in str(caught.value)
