"""Chats: ids as transformers makes them, labels exactly on the answers and their ends."""

import json

import pytest
from data_fixtures import (
    CHATML,
    CHATML_MARKED,
    CHATML_MARKED_CONTENT,
    CHATML_MARKED_LINE,
    CHATML_SYSTEM,
    INST,
    REASONING,
    STRICT,
    TWO_TURNS,
    chat_rows,
    labels,
    rows,
    tiny_tokenizer,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jaxft.data.chat import encode
from jaxft.errors import UserError

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}
IM = ["world assistant<|im_end|>", "hello<|im_end|>"]
TEMPLATES = {
    "chatml": (CHATML, IM),
    "marked": (CHATML_MARKED, IM),
    "marked, turn end outside": (CHATML_MARKED_CONTENT, IM),
    "marked, newline inside": (CHATML_MARKED_LINE, IM),
    "default system": (CHATML_SYSTEM, IM),
    "inst": (INST, ["world assistant</s>", "hello</s>"]),
    "reasoning": (REASONING, [IM[0], "<think>\n\n</think>\n\n" + IM[1]]),
    "strict": (STRICT, IM),
}


def one(messages, tokenizer):
    return encode(chat_rows(messages), tokenizer)[0]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_labels_of_two_turns(name, trim_offsets):
    template, wanted = TEMPLATES[name]
    messages = TWO_TURNS[1:] if name in ("strict", "default system") else TWO_TURNS
    tokenizer = tiny_tokenizer(template, trim_offsets=trim_offsets)
    example = one(messages, tokenizer)
    assert labels(example, tokenizer) == wanted
    direct = tokenizer.apply_chat_template(messages, tokenize=True)
    assert example.input_ids.tolist() == direct["input_ids"]
    assert len(direct) == 2  # control: in transformers 5 this is the number of keys, not of tokens
    assert len(example) > 20


def test_library_mask_is_no_substitute():
    """Control: without markers transformers marks nothing; with them it agrees with ours."""
    for template, agrees in ((CHATML, False), (CHATML_MARKED, True)):
        tokenizer = tiny_tokenizer(template)
        theirs = tokenizer.apply_chat_template(
            TWO_TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        assert (one(TWO_TURNS, tokenizer).supervised.tolist() == [*map(bool, theirs)]) == agrees
        assert any(theirs) == agrees


def test_one_bos():
    tokenizer = tiny_tokenizer()
    ids = one(TWO_TURNS, tokenizer).input_ids.tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1
    rendered = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert tokenizer(rendered)["input_ids"][:2] == [0, 0]  # control: the obvious way doubles it
    # A template that prints none is served without one, whatever the tokenizer would add.
    bare = tiny_tokenizer(CHATML.removeprefix("{{ bos_token }}"))
    assert 0 not in one(TWO_TURNS, bare).input_ids


def test_key_that_is_null_is_not_there():
    tokenizer = tiny_tokenizer(CHATML.replace("{{ m.content }}", "{{ m | dictsort }}"))
    messages = [{**USER, "name": None}, {**ANSWER, "name": "hello", "tool_calls": None}]
    direct = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    text = tokenizer.decode(direct)
    assert one(messages, tokenizer).input_ids.tolist() == direct
    assert text.count("name") == 1  # control: the template prints what keys there are
    assert "None" not in text


def test_added_token_past_the_number_of_tokens():
    """A vocabulary with a hole: the highest id is not the number of tokens less one."""
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<|end|>": 90}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    example = one([{**USER, "content": "a"}, {**ANSWER, "content": "b"}], tokenizer)
    assert example.input_ids.tolist() == [2, 90, 3, 90]
    assert example.supervised.tolist() == [False, False, True, True]
    assert len(tokenizer) < 90  # control


def test_pad_token_equal_to_end_token():
    tokenizer = tiny_tokenizer(INST, pad="</s>")
    example = one([USER, ANSWER], tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == example.input_ids[-1]
    assert example.supervised[-1]


def test_answer_that_occurs_everywhere():
    """The answer's text is also the system's, the user's and the header's."""
    messages = [
        {"role": "system", "content": "assistant"},
        {"role": "user", "content": "<|im_start|>assistant\nassistant<|im_end|>"},
        {"role": "assistant", "content": "assistant"},
    ]
    tokenizer = tiny_tokenizer()
    example = one(messages, tokenizer)
    assert labels(example, tokenizer) == ["assistant<|im_end|>"]
    assert example.supervised[-2]  # the last one, before the final newline
    assert not example.supervised[-1]


@pytest.mark.parametrize("key", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, INST, REASONING])
def test_message_left_out(template, key):
    tokenizer = tiny_tokenizer(template)
    messages = [dict(message) for message in TWO_TURNS]
    messages[2] |= key
    flagged, plain = one(messages, tokenizer), one(TWO_TURNS, tokenizer)
    assert labels(flagged, tokenizer) == labels(plain, tokenizer)[1:]
    assert flagged.input_ids.tolist() == plain.input_ids.tolist()
    with pytest.raises(UserError, match=r"train\.jsonl:1: message 2: 'weight' must be 0 or 1"):
        one([USER, {**ANSWER, "weight": 0.5}], tokenizer)
    with pytest.raises(UserError, match=r"train\.jsonl:1: no assistant turn"):
        one([USER, {**ANSWER, **key}], tokenizer)


def test_pair_of_message_lists_trains_the_completion():
    tokenizer = tiny_tokenizer()
    pair = rows({"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]})
    example = encode(pair, tokenizer)[0]
    assert labels(example, tokenizer) == IM[1:]
    assert example.input_ids.tolist() == one(TWO_TURNS, tokenizer).input_ids.tolist()


SPACED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GLUED = SPACED.replace("{{ m.role }}: ", "{{ m.role }}").replace("assistant: ", "assistant")


def test_token_over_the_edge():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hello"}]
    corpus = ("user: x\nassistant: hello\nassistanthello\nassistanthello",) * 9
    spaced, glued = (tiny_tokenizer(t, corpus=corpus) for t in (SPACED, GLUED))
    example = one(messages, spaced)
    # The space before the answer is the prompt's, but " hello" is one token: it is learned.
    # No turn end token here: the newline closes the turn and is learned as well.
    assert labels(example, spaced) == [" hello\n"]
    with pytest.raises(UserError, match=r"train\.jsonl:1: the token 'assistanthello' reaches over"):
        one(messages, glued)


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_spaces_over_the_edge(trim_offsets):
    """Offsets trimmed of spaces would place the token of two spaces inside of the answer."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "  hello"}]
    corpus = ("assistant:   hello",) * 9
    tokenizer = tiny_tokenizer(SPACED, corpus=corpus, trim_offsets=trim_offsets)
    example = one(messages, tokenizer)
    assert "  " in [tokenizer.decode([i]) for i in example.input_ids]  # control
    assert labels(example, tokenizer) == [" hello\n"]


@pytest.mark.parametrize("answer", ["hello 0", "0", "1", "10 \n", "01"])
def test_history_rendered_differently(answer):
    """The answer's end is found whatever characters it ends with."""
    messages = [dict(message) for message in TWO_TURNS]
    messages[2]["content"] = answer
    tokenizer = tiny_tokenizer(REASONING)
    assert labels(one(messages, tokenizer), tokenizer)[0] == answer + "<|im_end|>"
    alone = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    full = tokenizer.apply_chat_template(messages, tokenize=False)
    assert not full.startswith(alone)  # control: the chat up to the answer is no prefix


def test_answer_that_begins_with_the_header_newline():
    tokenizer = tiny_tokenizer(corpus=("a\n\n\nb",) * 5)
    example = one([USER, {"role": "assistant", "content": "\n\nhi"}], tokenizer)
    text = [tokenizer.decode([i]) for i in example.input_ids]
    assert "\n\n" in text  # control: the header's newline and the answer's are one token
    assert labels(example, tokenizer) == ["\nhi<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>{%"),
        CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ messages | length }}\n"),
    ],
)
def test_prompt_that_is_no_prefix(template):
    with pytest.raises(UserError, match=r"train\.jsonl:1: message 3: the chat template renders"):
        one(TWO_TURNS, tiny_tokenizer(template))


def test_history_without_turn_end_is_refused():
    template = REASONING.replace(
        "<|im_end|>\n{% endfor",
        "{% if m.role == 'assistant' and loop.last %}</s>{% endif %}!{% endfor",
    )
    with pytest.raises(UserError, match=r"train\.jsonl:1: the chat template puts no turn end"):
        one(TWO_TURNS, tiny_tokenizer(template))


def test_history_left_out_is_refused():
    """A template that shows the last answer only cannot train the others."""
    template = CHATML.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}")
    chat = [USER, ANSWER, {**ANSWER, "content": "hello"}]
    with pytest.raises(UserError, match=r"train\.jsonl:1: message \d"):
        one(chat, tiny_tokenizer(template))
    only = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}",
    )
    with pytest.raises(UserError, match=r"message 3: the chat template leaves this answer out"):
        one(TWO_TURNS, tiny_tokenizer(only))
    kept = [dict(message) for message in TWO_TURNS]
    kept[2]["train"] = False
    tokenizer = tiny_tokenizer(only)
    assert labels(one(kept, tokenizer), tokenizer) == IM[1:]


def test_marked_blocks_must_match_the_turns():
    template = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(UserError, match=r"marks 1 \{% generation %\} blocks for 2 assistant turns"):
        one(TWO_TURNS, tiny_tokenizer(template))


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, USER, ANSWER], "refuses the roles system, user, assistant: System role not"),
        ([USER, USER, ANSWER], "refuses the roles user, user, assistant: .*alternate"),
        ([ANSWER, USER, ANSWER], "refuses the roles assistant, user, assistant"),
        ([USER, ANSWER, USER], r"does not end with an assistant turn \(user, assistant, user\)"),
        ([USER, ANSWER, {"role": "narrator", "content": "x"}], "message 3 has the unknown role 'n"),
        ([USER, {"role": "tool", "content": "x"}, ANSWER], "refuses the roles user, tool, ass"),
        ([{"content": "x"}, ANSWER], "message 1 has the unknown role None"),
    ],
)
def test_strict_template(messages, reason):
    tokenizer = tiny_tokenizer(STRICT)
    good = [USER, ANSWER]
    with pytest.raises(UserError, match=rf"^train\.jsonl:2: .*{reason}") as error:
        encode(chat_rows(good, messages), tokenizer)
    assert "\n" not in str(error.value)
    encode(chat_rows(good), tokenizer)  # control


def test_other_names_of_roles():
    tokenizer = tiny_tokenizer(STRICT)
    spelled = [{**USER, "role": "human"}, {**ANSWER, "role": "gpt"}]
    capital = [{**USER, "role": "User"}, {**ANSWER, "role": "Assistant"}]
    wanted = one([USER, ANSWER], tokenizer).input_ids.tolist()
    assert [e.input_ids.tolist() for e in encode(chat_rows(spelled, capital), tokenizer)] == [
        wanted,
        wanted,
    ]


@pytest.mark.parametrize("content", ["", "  \n", None, 3, [{"type": "text", "text": "a"}]])
def test_answer_that_is_none(content):
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match=r"^train\.jsonl:2: message 2 \(assistant\)"):
        encode(chat_rows([USER, ANSWER], [USER, {**ANSWER, "content": content}]), tokenizer)


@pytest.mark.parametrize("messages", [[], None, "hello", ["hello"]])
def test_messages_that_are_none(messages):
    with pytest.raises(UserError, match=r"^train\.jsonl:1: message"):
        one(messages, tiny_tokenizer())


def test_no_chat_template():
    with pytest.raises(UserError, match=r"train\.jsonl:1: .*need a chat template"):
        one([USER, ANSWER], tiny_tokenizer(None))


def test_tool_call_arguments_are_printed_once():
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}",
    )
    tokenizer = tiny_tokenizer(template)

    def call(arguments):
        function = {"name": "w", "arguments": arguments}
        calls = [{"type": "function", "function": function}]
        return [USER, {"role": "assistant", "content": None, "tool_calls": calls}]

    as_text, as_object = (
        one(call(arguments), tokenizer)
        for arguments in (json.dumps({"city": "Zürich"}), {"city": "Zürich"})
    )
    assert as_text.input_ids.tolist() == as_object.input_ids.tolist()
    assert labels(as_text, tokenizer) == ['{"city": "Zürich"}<|im_end|>']
    with pytest.raises(UserError, match=r"train\.jsonl:1: message 2: tool call arguments"):
        one(call("{city:"), tokenizer)


def test_offsets_survive_multibyte_text():
    tokenizer = tiny_tokenizer()
    answer = "  é😀 \u2028 ü\n\n"
    example = one([{**USER, "content": "😀é"}, {**ANSWER, "content": answer}], tokenizer)
    assert labels(example, tokenizer) == [answer + "<|im_end|>"]
