"""Several sources, weights and held-out rows, as a run prepares them."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from data_fixtures import tiny_tokenizer, write_rows
from rich.console import Console

from jaxft.config import TrainConfig
from jaxft.errors import UserError
from jaxft.prepare import Data, prepare_data
from jaxft.run_folder import run_identity

MODEL = cast(Any, SimpleNamespace(length_limit=4096, vocab_size=1000))


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """a: 10 chats, b: 8 texts, c: 7 pairs, in three formats."""
    monkeypatch.chdir(tmp_path)
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "hello"}]
    write_rows(tmp_path / "a.jsonl", [{"conversations": chat, "id": str(i)} for i in range(10)])
    write_rows(tmp_path / "b.csv", [{"text": f"text {i}"} for i in range(8)])
    pairs = [{"prompt": f"q {i}", "completion": "hello"} for i in range(7)]
    write_rows(tmp_path / "c" / "train.parquet", pairs)
    write_rows(tmp_path / "c" / "test.parquet", pairs[:2])


def prepared(**over) -> tuple[Data, str]:
    """The data of a run, and what was printed."""
    options: dict[str, Any] = {"max_length": 64, "output_dir": "out", "model_name_or_path": "m"}
    console = Console(quiet=False, width=400, force_terminal=False)
    with console.capture() as capture:
        data = prepare_data(TrainConfig(**(options | over)), MODEL, tiny_tokenizer(), console)
    return data, capture.get()


def counts(data: Data) -> Counter:
    return Counter(example.origin for example in data.train.examples)


def complaint(**over) -> str:
    with pytest.raises(UserError) as caught:
        prepared(**over)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


NAMES = ("a.jsonl", "b.csv", "c")


def test_one_source_is_its_rows():
    data, printed = prepared(dataset_name="b.csv")
    assert counts(data) == {f"b.csv:{i + 2}": 1 for i in range(8)}
    assert list(data.sources) == [("b.csv", 8, 1.0)]
    assert printed == ""


def test_weights_count_rows():
    data, printed = prepared(dataset_name=NAMES, dataset_weights=(1, 0.5, 2.5))
    got = counts(data)
    assert sorted(n for o, n in got.items() if o.startswith("a.jsonl")) == [1] * 10
    assert sorted(n for o, n in got.items() if o.startswith("b.csv")) == [1] * 4
    rest = round(2.5 * 7) - 14
    of_c = sorted(n for o, n in got.items() if o.startswith("train.parquet"))
    assert of_c == [2] * (7 - rest) + [3] * rest
    assert data.statistics.documents == 10 + 4 + 14 + rest
    assert list(data.sources) == [("a.jsonl", 10, 1.0), ("b.csv", 8, 0.5), ("c", 7, 2.5)]
    assert printed == "note: a.jsonl: columns not used: id\n"
    again, _ = prepared(dataset_name=NAMES, dataset_weights=(1, 0.5, 2.5))
    assert counts(again) == got
    assert again.fingerprint == data.fingerprint
    # Controls: the seed chooses the share, and weights and their absence make other data.
    others = {
        tuple(sorted(counts(prepared(dataset_name="b.csv", dataset_weights=(0.5,), seed=s)[0])))
        for s in range(6)
    }
    assert len(others) > 1
    plain, _ = prepared(dataset_name=NAMES)
    assert plain.fingerprint != data.fingerprint
    assert prepared(dataset_name=NAMES, dataset_weights=(1, 1, 1))[0].fingerprint == (
        plain.fingerprint
    )


def test_the_share_is_the_same_in_every_epoch():
    data, _ = prepared(dataset_name="b.csv", dataset_weights=(0.5,), num_train_epochs=3)
    epochs = [Counter(data.train.origins(step)) for step in range(data.train.num_steps)]
    assert len(epochs) == 3
    assert epochs[0] == epochs[1] == epochs[2]


@pytest.mark.parametrize("seed", range(4))
def test_no_held_out_row_is_trained_on(seed):
    """Held out before weights repeat rows; repeating first would put copies on both sides."""
    data, _ = prepared(
        dataset_name=NAMES, dataset_weights=(3, 2, 4), eval_split_ratio=0.3, seed=seed
    )
    assert data.evaluation is not None
    held = Counter(example.origin for example in data.evaluation.examples)
    assert sum(held.values()) == round(0.3 * 25)
    assert set(held.values()) == {1}
    trained = counts(data)
    assert not held.keys() & trained.keys()
    assert len(held) + len(trained) == 25
    weights = {"a": 3, "b": 2, "t": 4}
    assert all(count == weights[origin[0]] for origin, count in trained.items())


def test_evaluation_of_several_sources_and_splits():
    data, _ = prepared(
        dataset_name="c",
        eval_dataset_name=("c", "b.csv"),
        dataset_test_split=("test", "test[:3]"),
    )
    assert data.evaluation is not None
    origins = [example.origin for example in data.evaluation.examples]
    assert origins == ["test.parquet:row 1", "test.parquet:row 2", "b.csv:2", "b.csv:3", "b.csv:4"]
    assert len(data.train.examples) == 7
    slices, _ = prepared(
        dataset_name="b.csv",
        dataset_train_split="train[:75%]",
        eval_dataset_name="b.csv",
        dataset_test_split="train[75%:]",
    )
    assert slices.evaluation is not None
    held = {example.origin for example in slices.evaluation.examples}
    assert held == {"b.csv:8", "b.csv:9"}
    assert not held & counts(slices).keys()
    assert len(counts(slices)) == 6


def test_what_is_trained_on_as_a_whole_is_not_held_out():
    for name in ("b.csv", "./b.csv", "*.csv"):
        message = complaint(dataset_name="b.csv", eval_dataset_name=name)
        assert "b.csv is trained on as a whole" in message
        assert "--dataset_test_split 'train[95%:]'" in message
    over = {"dataset_name": "c", "eval_dataset_name": "c", "dataset_test_split": "train"}
    assert "train.parquet is trained on as a whole" in complaint(**over)


def test_splits_one_for_all_or_one_for_each():
    data, _ = prepared(dataset_name=("c", "b.csv"), dataset_train_split=("test+train", "train[:1]"))
    assert len(data.train.examples) == 9 + 1
    data, _ = prepared(dataset_name=("c", "b.csv"), dataset_train_split="train[:50%]")
    assert len(data.train.examples) == 4 + 4


def test_a_configuration_holds_for_the_same_data_set_only():
    write_rows_of_two_configurations()
    data, _ = prepared(dataset_name="d", dataset_config="one", eval_dataset_name=("d", "b.csv"))
    assert data.evaluation is not None
    assert [e.origin for e in data.train.examples] == ["one.csv:2"]
    assert [e.origin for e in data.evaluation.examples][:2] == ["held.csv:2", "b.csv:2"]
    mixed, _ = prepared(dataset_name=("d", "b.csv"), dataset_config=("one", "default"))
    assert len(mixed.train.examples) == 9
    with_default = Path("d/README.md").read_text().replace("two.csv", "two.csv\n  default: true")
    Path("d/README.md").write_text(with_default)
    data, _ = prepared(dataset_name=("d", "c"), dataset_config="default")
    assert data.train.examples[0].origin == "two.csv:2"
    Path("d/README.md").write_text(with_default.replace("  default: true\n", ""))
    assert "b.csv has no configuration 'one'" in complaint(
        dataset_name=("d", "b.csv"), dataset_config="one"
    )
    assert "has several configurations" in complaint(dataset_name="d")


def write_rows_of_two_configurations() -> None:
    folder = Path("d")
    for name in ("one", "two", "held"):
        write_rows(folder / f"{name}.csv", [{"text": name}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files:\n  - {split: train, path: one.csv}\n"
        "  - {split: test, path: held.csv}\n- config_name: two\n  data_files: two.csv\n---\n"
    )


def test_faults_name_the_source():
    assert "'b.csv': --dataset_weights 0.05 leaves none of its 8 rows" in complaint(
        dataset_name=NAMES, dataset_weights=(1, 0.05, 1)
    )
    assert "no file or folder" in complaint(dataset_name=("a.jsonl", "nowhere.csv"))
    assert "data set 'c' has no split 'dev'" in complaint(
        dataset_name="a.jsonl", eval_dataset_name="c", dataset_test_split="dev"
    )
    write_rows_tiny()
    message = complaint(dataset_name=("tiny.csv", "a.jsonl"), eval_split_ratio=0.9, seed=1)
    assert "'tiny.csv': --eval_split_ratio held out all of its rows" in message


def write_rows_tiny() -> None:
    write_rows(Path("tiny.csv"), [{"text": "x"}])


def test_each_source_has_a_layout_of_its_own():
    data, _ = prepared(dataset_name=NAMES)
    assert len(data.train.examples) == 25
    write_rows_tiny()
    bad = "tiny.csv:2: unknown columns; columns found: question, answer"
    write_rows(Path("tiny.csv"), [{"question": "x", "answer": "y"}])
    assert bad in complaint(dataset_name=("a.jsonl", "tiny.csv"))


def test_names_may_change_between_a_run_and_its_continuation():
    base: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o"}

    def identity(**over) -> dict:
        config = TrainConfig(**(base | {"dataset_name": "d"} | over))
        return run_identity(config, "float32", "model", "rows", 7)

    same = identity()
    assert identity(dataset_name="elsewhere") == same
    assert identity(eval_dataset_name="e", dataset_test_split="dev") == same
    assert identity(dataset_config="main") == same
    assert identity(dataset_weights=(2,)) != same
    assert identity(dataset_train_split="train[:5]") != same
    assert json.loads(json.dumps(same)) == same
