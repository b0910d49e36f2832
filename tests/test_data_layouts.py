"""Telling layouts apart, and refusing cells that cannot be trained."""

import pytest
from data_fixtures import rows, tiny_tokenizer

from jaxft.data.chat import encode
from jaxft.data.layouts import detect
from jaxft.errors import UserError

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
LAYOUTS = {
    "messages": {"messages": MESSAGES},
    "conversations": {"conversations": MESSAGES},
    "prompt-completion": {"prompt": "q", "completion": "a"},
    "chat-pair": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "instruction": {"instruction": "q", "input": "x", "output": "a"},
    "text": {"text": "q a"},
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_detect(kind):
    layout = detect(rows(LAYOUTS[kind], {**LAYOUTS[kind], "id": 3}))
    assert layout.kind == kind
    assert layout.unused == ("id",)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"question": "q", "answer": "a"}, "unknown columns; columns found: question, answer;"),
        ({"conversation": []}, "unknown columns; columns found: conversation"),
        ({"prompt": "q"}, "unknown columns; columns found: prompt"),
        ({}, "unknown columns; columns found: none"),
        ({"text": "t", "messages": MESSAGES}, r"several layouts \(messages, text\); columns found"),
        ({**LAYOUTS["instruction"], "text": "t"}, r"several layouts \(instruction, text\)"),
    ],
)
def test_unknown_and_ambiguous_columns(fields, reason):
    with pytest.raises(UserError, match=rf"^train\.jsonl:1: .*{reason}") as error:
        encode(rows(fields), tiny_tokenizer())
    for column in ("messages", "prompt, completion", "instruction, output", "text"):
        assert column in str(error.value).split("accepted layouts:")[1]


def test_rows_of_two_layouts():
    with pytest.raises(UserError, match=r"^train\.jsonl:2: .*layout text, train\.jsonl:1 has mess"):
        encode(rows(LAYOUTS["messages"], LAYOUTS["text"]), tiny_tokenizer())


def test_text_field_decides():
    fields = {"body": "hello", "messages": MESSAGES, "text": "other"}
    tokenizer = tiny_tokenizer()
    example = encode(rows(fields), tokenizer, text_field="body")[0]
    assert tokenizer.decode(example.input_ids) == "<s>hello</s>"
    with pytest.raises(UserError, match=r"no column 'body' \(--dataset_text_field\)"):
        encode(rows({"text": "hello"}), tokenizer, text_field="body")


def test_columns_that_would_change_the_training():
    with pytest.raises(UserError, match=r"train\.jsonl:1: column 'system' would change"):
        detect(rows({**LAYOUTS["instruction"], "system": "be brief"}))
    assert detect(rows({**LAYOUTS["instruction"], "system": None})).unused == ("system",)


@pytest.mark.parametrize("templated", [True, False])
@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("instruction", {"output": ""}, "'output' is empty"),
        ("instruction", {"output": None}, "'output' must be text, it is null"),
        ("instruction", {"output": "  \n"}, "'output' is empty"),
        ("instruction", {"output": 7}, "'output' must be text, it is int"),
        ("instruction", {"input": ["x"]}, "'input' must be text, it is list"),
        ("instruction", {"instruction": ""}, "'instruction' is empty"),
        ("prompt-completion", {"completion": " "}, "'completion' is empty"),
        ("prompt-completion", {"prompt": None}, "'prompt' must be text, it is null"),
        ("text", {"text": "\t"}, "'text' is empty"),
    ],
)
def test_bad_cell_names_the_row(templated, kind, change, reason):
    tokenizer = tiny_tokenizer() if templated else tiny_tokenizer(None)
    good = LAYOUTS[kind]
    with pytest.raises(UserError, match=rf"^train\.jsonl:2: column {reason}$"):
        encode(rows(good, {**good, **change}), tokenizer)
    assert len(encode(rows(good, good), tokenizer)) == 2  # control


def test_no_rows():
    with pytest.raises(UserError, match="no row"):
        encode([], tiny_tokenizer())
