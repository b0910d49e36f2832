"""Texts, pairs and instructions: one BOS, one EOS, an exact boundary."""

import pytest
from data_fixtures import CHATML, labels, rows, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxft.data.chat import encode
from jaxft.errors import UserError

BOS, EOS = 0, 1


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(["hello world world"] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def ids_of(tokenizer, *fields):
    return [example.input_ids.tolist() for example in encode(rows(*fields), tokenizer)]


def test_text_has_one_bos_and_one_eos():
    tokenizer = tiny_tokenizer()
    wanted = [*tokenizer("hello world")["input_ids"], EOS]
    spelled = ("hello world", "<s>hello world", "hello world</s>", "<s>hello world</s></s>")
    assert ids_of(tokenizer, *({"text": text} for text in spelled)) == [wanted] * 4
    assert wanted.count(BOS) == wanted.count(EOS) == 1
    assert tokenizer("<s>hello world")["input_ids"][:2] == [BOS, BOS]  # control
    bare = tiny_tokenizer(add_bos=False)
    assert ids_of(bare, {"text": "hello world"}) == [wanted[1:]]
    assert ids_of(bare, {"text": "<s>hello world"}) == [wanted]


def test_text_is_learned_but_for_its_first_token():
    tokenizer = tiny_tokenizer()
    example = encode(rows({"text": "hello world"}), tokenizer)[0]
    assert example.supervised.tolist() == [False, *[True] * (len(example) - 1)]
    bare = encode(rows({"text": "hello world"}), tiny_tokenizer(add_bos=False))[0]
    assert bare.supervised.sum() == len(bare) - 1 == example.supervised.sum() - 1


@pytest.mark.parametrize("pad", ["<pad>", "</s>", "<s>"])
def test_genuine_end_is_learned_whatever_pads(pad):
    tokenizer = tiny_tokenizer(pad=pad)
    pair = {"prompt": "hello", "completion": " world"}
    for example in encode(rows(pair, {**pair, "completion": " world world</s>"}), tokenizer):
        assert example.input_ids.tolist().count(EOS) == 1
        assert example.input_ids[-1] == EOS
        assert example.supervised[-1]
        assert labels(example, tokenizer) == [
            str(tokenizer.decode(example.input_ids[2:]))  # all but BOS and "hello"
        ]
    naive = [token for token in example.input_ids if token != tokenizer.pad_token_id]
    assert (EOS in naive) == (pad != "</s>")  # control: masking the pad id loses the end


def test_boundary_of_a_pair_is_exact():
    """The prompt's ids are the prompt's alone, also where the joined text would merge over it."""
    tokenizer = tiny_tokenizer()
    for prompt, completion in (("hello", " world"), ("hello ", "world"), ("hel", "lo"), ("", "hi")):
        example = encode(rows({"prompt": prompt, "completion": completion}), tokenizer)[0]
        served = tokenizer(prompt)["input_ids"]
        assert example.input_ids[: len(served)].tolist() == served
        assert example.supervised.tolist().index(True) == len(served)
        assert labels(example, tokenizer) == [completion + "</s>"]
        assert tokenizer.decode(example.input_ids[1:-1]) == prompt + completion
    # Control: the joined text has a token over the boundary of the second pair.
    assert tokenizer("hello world")["input_ids"][:3] != tokenizer("hello ")["input_ids"]


def test_completion_gets_no_space_of_its_own():
    """Tokenizers of the SentencePiece kind put a space in front of a text, not of a completion."""
    tokenizer = metaspace_tokenizer()
    example = encode(rows({"prompt": "hello ", "completion": "world"}), tokenizer)[0]
    tokens = tokenizer.convert_ids_to_tokens(example.input_ids.tolist())
    assert tokens[1:] == ["\u2581hello", "\u2581", "wor", "ld", "</s>"]
    assert example.supervised.tolist().index(True) == 3
    assert tokenizer.tokenize("world") == ["\u2581world"]  # control: on its own it gets one


def test_pair_ignores_the_chat_template():
    pair = {"prompt": "hello", "completion": " world"}
    with_template, without = (ids_of(tiny_tokenizer(t), pair) for t in (CHATML, None))
    assert with_template == without


def test_instruction_is_a_chat_where_there_is_a_template():
    tokenizer = tiny_tokenizer()
    as_chat = {
        "messages": [
            {"role": "user", "content": "hello\n\nworld"},
            {"role": "assistant", "content": "hi"},
        ]
    }
    row = {"instruction": "hello", "input": "world", "output": "hi"}
    assert ids_of(tokenizer, row) == ids_of(tokenizer, as_chat)
    plain = tiny_tokenizer(None)
    with_input, without = encode(rows(row, {**row, "input": ""}), plain)
    assert labels(with_input, plain) == labels(without, plain) == ["hi</s>"]
    assert plain.decode(without.input_ids) == "<s>### Task\nhello\n\n### Answer\nhi</s>"
    assert "### Input\nworld\n\n### Answer" in plain.decode(with_input.input_ids)


def test_missing_null_and_empty_input_are_one():
    row = {"instruction": "q", "output": "a"}
    for tokenizer in (tiny_tokenizer(), tiny_tokenizer(None)):
        first, second, third, other = ids_of(
            tokenizer, row, {**row, "input": None}, {**row, "input": ""}, {**row, "input": "x"}
        )
        assert first == second == third != other


def test_tokenizer_without_end_token():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no eos_token"):
        encode(rows({"text": "hello"}), tokenizer)


def test_end_token_alone_is_no_answer():
    with pytest.raises(UserError, match=r"train\.jsonl:1: the completion holds nothing"):
        encode(rows({"prompt": "hello", "completion": "</s>"}), tiny_tokenizer())
    with pytest.raises(UserError, match=r"train\.jsonl:1: no token"):
        encode(rows({"text": "</s>"}), tiny_tokenizer(add_bos=False))


def test_order_and_batches():
    """More rows than one tokenizer call takes keep their order."""
    tokenizer = tiny_tokenizer()
    texts = [f"hello {n}" for n in range(1003)]
    examples = encode(rows(*({"text": text} for text in texts)), tokenizer)
    decoded = [tokenizer.decode(e.input_ids, skip_special_tokens=True) for e in examples]
    assert decoded == texts
    assert [e.origin for e in examples][-1] == "train.jsonl:1003"
