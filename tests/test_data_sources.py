"""Reading JSONL: what must change nothing, and what must be named."""

import json

import pytest
from data_fixtures import CHATML, tiny_tokenizer

from jaxft.data.chat import encode
from jaxft.data.files import read_rows
from jaxft.errors import UserError

CHATS = [
    {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, **extra},
        ]
    }
    for question, answer, extra in [("a", "b", {}), ("c", "d\u2028e", {"extra": 1}), ("f", "g", {})]
]
CLEAN = [json.dumps(chat, ensure_ascii=False).encode() for chat in CHATS]

VARIANTS = {
    "bom": b"\xef\xbb\xbf" + b"\n".join(CLEAN) + b"\n",
    "crlf": b"\r\n".join(CLEAN) + b"\r\n",
    "blank lines": b"\n\n   \n".join(CLEAN) + b"\n \n\n",
    "no final newline": b"\n".join(CLEAN),
    "all": b"\xef\xbb\xbf" + b"\r\n \r\n".join(CLEAN),
}
# Prints every key of a message, so that a key put in by the reader would show.
ALL_KEYS = CHATML.replace("{{ m.content }}", "{{ m | dictsort }}{{ m.content }}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_dirty_file_gives_the_same_ids(tmp_path, variant):
    clean, dirty = tmp_path / "clean.jsonl", tmp_path / "dirty.jsonl"
    clean.write_bytes(b"\n".join(CLEAN) + b"\n")
    dirty.write_bytes(VARIANTS[variant])
    tokenizer = tiny_tokenizer(ALL_KEYS)
    wanted, got = (encode(read_rows(path), tokenizer) for path in (clean, dirty))
    assert len(got) == 3
    for one, other in zip(wanted, got, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.supervised.tolist() == other.supervised.tolist()
        text = tokenizer.decode(other.input_ids)
        assert "\ufeff" not in text
        assert "\r" not in text
    # Control: the template does print a key that only one message has, and a stray one shows.
    assert "extra" in tokenizer.decode(wanted[1].input_ids)
    assert "extra" not in tokenizer.decode(wanted[0].input_ids)
    with pytest.raises(json.JSONDecodeError):
        json.loads(VARIANTS["bom"].split(b"\n")[0].decode("utf-8"))


def test_origin_counts_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n\n\n{"text": "b"}')
    assert [row.origin for row in read_rows(path)] == ["train.jsonl:1", "train.jsonl:4"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', "not JSON"),
        (b"[1, 2]", "must be a JSON object, this is a list"),
        (b"null", "must be a JSON object"),
        (b'{"text": "\xe9"}', "not UTF-8"),
        (b'{"text": "\\ud83d"}', "not UTF-8"),
        (b'{"text": "a", "id": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"text": ' + b"[" * 200_000, "recursion"),
    ],
)
def test_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=f"bad.jsonl:3: .*{reason}"):
        read_rows(path)


def test_surrogate_pair_is_text(tmp_path):
    path = tmp_path / "good.jsonl"
    path.write_bytes(b'{"text": "\\ud83d\\ude00"}')
    assert read_rows(path)[0].fields == {"text": "\U0001f600"}


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"empty\.jsonl holds no row"):
        read_rows(path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl"):
        read_rows(tmp_path / "none.jsonl")


def test_resolve(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}')
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path), "train") == file
    with pytest.raises(UserError, match=r"has no validation\.jsonl; the folder holds train\.jsonl"):
        resolve(str(tmp_path), "validation")
    with pytest.raises(UserError, match="no split 'test'"):
        resolve(str(file), "test")
    with pytest.raises(UserError, match=r"no file or folder /.*nowhere"):
        resolve("nowhere")
