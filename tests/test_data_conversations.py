"""ShareGPT conversations: the same chats in other words, and what cannot be told."""

import json

import pytest
from data_fixtures import CHATML, TWO_TURNS, pairs_of, rows, tiny_tokenizer

from jaxft.data.chat import encode
from jaxft.errors import UserError

NAMES = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
TOOLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
)
CALL = {"name": "w", "arguments": {"city": "Z\u00fcrich"}}


def said(messages: list[dict]) -> list[dict]:
    return [{"from": NAMES[m["role"]], "value": m["content"]} for m in messages]


def encoded(*fields: dict, template: str = CHATML) -> list:
    return pairs_of(encode(rows(*fields), tiny_tokenizer(template)))


def test_the_same_ids_as_messages():
    wanted = encoded({"messages": TWO_TURNS}, {"messages": TWO_TURNS[1:3]})
    assert encoded(*({"conversations": said(c)} for c in (TWO_TURNS, TWO_TURNS[1:3]))) == wanted
    assert encoded(*({"conversations": c} for c in (TWO_TURNS, TWO_TURNS[1:3]))) == wanted
    text = [{"conversations": json.dumps(said(c))} for c in (TWO_TURNS, TWO_TURNS[1:3])]
    assert encoded(*text) == wanted
    odd = [{**turn, "from": turn["from"].upper(), "weight": None} for turn in said(TWO_TURNS)]
    assert encoded({"conversations": odd})[0] == wanted[0]
    # Control: who speaks is read from `from`.
    swapped = [{**turn, "from": "human"} for turn in said(TWO_TURNS)[:-1]] + said(TWO_TURNS)[-1:]
    assert encoded({"conversations": swapped})[0] != wanted[0]


def test_flags_of_turns():
    chat = said(TWO_TURNS)
    marked = [{**turn, "train": False} if i == 2 else turn for i, turn in enumerate(chat)]
    (ids, labels), (same, fewer) = encoded({"conversations": chat}, {"conversations": marked})
    assert ids == same
    assert 0 < sum(fewer) < sum(labels)


@pytest.mark.parametrize("value", [json.dumps(CALL), json.dumps([CALL]), CALL])
def test_tool_calls(value):
    chat = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "007"},
        {"from": "gpt", "value": "sun"},
    ]
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "007"},
        {"role": "assistant", "content": "sun"},
    ]
    wanted = encoded({"messages": messages}, template=TOOLS)
    assert encoded({"conversations": chat}, template=TOOLS) == wanted
    ids = wanted[0][0]
    text = tiny_tokenizer(TOOLS).decode(ids)
    assert '"arguments": {"city": "Z\u00fcrich"}' in text  # control: the call is rendered, once


GOOD = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([GOOD[0], {"from": "gpt", "value": None}], "message 2 (assistant): content must be text"),
        ([GOOD[0], {"from": "gpt", "value": " "}], "message 2 (assistant) is empty"),
        ([GOOD[0], {"from": "gpt"}], "message 2 (assistant): content must be text, it is null"),
        ([{"from": "bing", "value": "q"}, GOOD[1]], "message 1 has the unknown role 'bing'"),
        ([{"value": "q"}, GOOD[1]], "message 1 has the unknown role None"),
        ([{"from": 3, "value": "q"}, GOOD[1]], "message 1 has the unknown role 3"),
        ([{**GOOD[0], "role": "user"}, GOOD[1]], "message 1 has both from, value and role"),
        (["q", GOOD[1]], "message 1 must be an object with role and content"),
        (GOOD[:1], "the chat does not end with an assistant turn (user)"),
        ([], "messages must be a list of at least one message"),
        ("[]", "messages must be a list of at least one message"),
        (None, "messages must be a list of at least one message"),
        ("{}", "conversations must be a list of at least one message, or the JSON text of one"),
        ("[{'from': 'human'}]", "it is other text (not JSON: Expecting property name"),
        ('[{"from": "gpt", "value": "\\ud83d"}]', "it is other text (not UTF-8"),
        ([GOOD[0], {"from": "function_call", "value": "w(1)"}, GOOD[1]], "must be JSON with name"),
        ([GOOD[0], {"from": "function_call", "value": '{"name": "w"}'}], "message 2 (function_ca"),
        ([GOOD[0], {"from": "function_call", "value": []}], "must be JSON with name and argumen"),
        ([GOOD[0], {"from": "function_call", "value": {**CALL, "id": 3}}], "nothing else"),
        ([GOOD[0], {"from": "function_call", "value": None}], "must be JSON with name"),
    ],
)
def test_bad_turns_name_the_row(turns, reason):
    with pytest.raises(UserError) as caught:
        encoded({"conversations": GOOD}, {"conversations": turns})
    message = str(caught.value)
    assert message.startswith("train.jsonl:2: ")
    assert reason in message
    assert len(message.splitlines()) == 1
    assert len(encoded({"conversations": GOOD}, {"conversations": GOOD})) == 2  # control
