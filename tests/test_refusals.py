"""Refusals that spare a user a wrong guess: what is there is said, and what to do about it."""

from pathlib import Path

import pytest
from test_train import config
from tiny import tiny_folder, write_chats

from jaxft import train
from jaxft.data.files import read_rows
from jaxft.data.turns import parse_messages
from jaxft.errors import UserError
from jaxft.formats.hub_names import advice

FILES = {
    "semicolons.csv": ("prompt;completion\na;b\n", ["separated by ';'", "with commas"]),
    "tabs.csv": ("prompt\tcompletion\na\tb\n", ["separated by", ".tsv"]),
    "pretty.jsonl": ('[\n  {"text": "a"}\n]\n', ["several lines", ".json"]),
    "page.jsonl": ("<!DOCTYPE html><html></html>\n", ["a web page"]),
    "doc.jsonl": ("%PDF-1.7\n", ["a PDF document"]),
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_really_holds(name, tmp_path):
    content, parts = FILES[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path / name)
    for part in [name, *parts]:
        assert part in str(caught.value)
    good = tmp_path / "good.csv"
    good.write_text("prompt,completion\na;b,c\n", encoding="utf-8")
    assert [row.fields for row in read_rows(good)] == [{"prompt": "a;b", "completion": "c"}]


def test_sharegpt_under_the_name_messages():
    with pytest.raises(UserError, match=r"row:1: message 1 has from and value.*conversations"):
        parse_messages([{"from": "human", "value": "a"}], "row:1")


def test_names_of_the_hub():
    assert "org/name" in advice("gpt2")
    assert "give the id alone: a/b" in advice("https://huggingface.co/a/b/tree/main")
    assert "give the id alone: a/b" in advice("https://huggingface.co/datasets/a/b")
    assert advice("a/b") == advice("./gpt2") == advice("rows.jsonl") == ""


def test_files_of_somebody_else_are_not_replaced(tmp_path):
    model, chats = tiny_folder(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl", 12)
    output = tmp_path / "mine"
    output.mkdir()
    readme: Path = output / "README.md"
    readme.write_text("mine", encoding="utf-8")
    run = config(model, chats, output, max_steps=1, eval_steps=None)
    with pytest.raises(UserError, match=r"holds a README\.md that is not of a run"):
        train.run(run)
    assert readme.read_text(encoding="utf-8") == "mine"
    assert list(output.iterdir()) == [readme]
    readme.unlink()
    (output / "notes.txt").write_text("mine", encoding="utf-8")  # nothing of a run's
    assert train.run(run) == 0
    assert (output / "notes.txt").read_text(encoding="utf-8") == "mine"
