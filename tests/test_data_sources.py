"""Places and splits: which rows a data set's name, configuration and split expression mean."""

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import datasets
import pytest
from data_fixtures import pairs_of, tiny_tokenizer, write_rows

from jaxft.data import files
from jaxft.data.chat import encode
from jaxft.data.places import find
from jaxft.data.sources import open_sources
from jaxft.errors import UserError

ROOT = Path(__file__).parents[1]
COMMIT = "0" * 40


def texts(name, split: str = "train", config: str | None = None, **options) -> list[str]:
    (source,) = open_sources([str(name)], [split], [config], **options)
    return [row.fields["text"] for row in source.read()]


def fields(*names: str) -> list[dict]:
    return [{"text": name} for name in names]


def complaint(name, split: str = "train", config: str | None = None, **options) -> str:
    with pytest.raises(UserError) as caught:
        texts(name, split, config, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def hub(folder: Path, name: str = "org/set") -> Path:
    """Snapshot of a data set in a hand-made cache of the hub."""
    repository = folder / ("datasets--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_place_gives_the_same_ids(tmp_path, offline):
    rows = [{"prompt": f"q {i}", "completion": f"null {i:03}"} for i in range(5)]
    halves = rows[:3], rows[3:]
    clean = write_rows(tmp_path / "clean.jsonl", rows)
    write_rows(tmp_path / "part" / "a.csv", halves[0])
    write_rows(tmp_path / "part" / "b.csv", halves[1])
    for folder in (tmp_path / "shards", hub(offline)):
        for i in range(2):
            write_rows(folder / "data" / f"train-0000{i}-of-00002.parquet", halves[i])
    for file in list((offline / "datasets--org--set").rglob("*.parquet")):  # as the hub keeps them
        blob = offline / "datasets--org--set" / "blobs" / file.name[:11]
        blob.parent.mkdir(exist_ok=True)
        file.rename(blob)
        file.symlink_to(blob)
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "saved_dict")
    tokenizer = tiny_tokenizer()

    def encoded(name) -> list:
        (source,) = open_sources([str(name)], ["train"])
        return pairs_of(encode(source.read(), tokenizer))

    wanted = encoded(clean)
    assert len(wanted) == 5
    places = ("part", "part/*.csv", "**/?.csv", "shards", "shards/data/*.parquet", "org/set")
    for place in (*places, f"org/set@{COMMIT}", "saved", "saved_dict", tmp_path / "saved"):
        assert encoded(place) == wanted, place
    # Control: the order of the files matters.
    write_rows(tmp_path / "part" / "0.csv", halves[1])
    assert encoded("part/*.csv")[:2] == wanted[3:]


def test_splits_are_those_of_load_dataset(tmp_path):
    """The same folder through `datasets` itself: names of splits, rows, and their order."""
    layouts = {
        "names": ["train.jsonl", "validation.jsonl", "test.jsonl"],
        "words": ["my-train-0.jsonl", "my-train-1.jsonl", "dev.jsonl", "eval.jsonl"],
        "folders": ["train/b.jsonl", "train/a.jsonl", "test/x.jsonl"],
        "shards": [f"data/train-0000{i}-of-00002.jsonl" for i in range(2)]
        + ["data/extra-00000-of-00001.jsonl"],
        "one": ["whatever.jsonl", "deeper/more.jsonl"],
        "odd [1]* name": ["train.jsonl", "test.jsonl"],
    }
    for layout, names in layouts.items():
        folder = tmp_path / layout
        for i, name in enumerate(names):
            write_rows(folder / name, fields(f"{i} a", f"{i} b", f"{i} c"))
        (folder / "notes.rst").write_text("no rows")
        if layout.startswith("odd"):
            assert texts(folder, "test") == ["1 a", "1 b", "1 c"]
            continue
        theirs = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        assert list(find(str(folder)).splits) == list(theirs), layout
        for split in theirs:
            assert texts(folder, split) == theirs[split]["text"][:], (layout, split)


EXPRESSIONS = [
    "train",
    "validation",
    "train+test",
    "train[:10%]",
    "train[10%:]",
    "train[3:7]",
    "train[-4:]",
    "train[:-5%]+test[1:]",
    "train[33%:66%](pct1_dropremainder)",
    "train[5:500]",
    "test+test",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_those_of_datasets(tmp_path, expression, monkeypatch):
    for split, count in (("train", 137), ("test", 5), ("validation", 3)):
        names = (f"{split} {i}" for i in range(count))
        write_rows(tmp_path / "d" / f"{split}.jsonl", fields(*names))
    theirs = datasets.load_dataset(
        str(tmp_path / "d"), split=expression, cache_dir=str(tmp_path / "cache")
    )
    read = []
    real = files.read_rows
    monkeypatch.setattr(
        "jaxft.data.sources.read_rows", lambda path, label: read.append(path) or real(path, label)
    )
    got = texts(tmp_path / "d", expression)
    assert got == theirs["text"][:]
    assert len(read) == len(set(read))  # no file is read twice
    if expression != "train":  # control
        assert got != texts(tmp_path / "d")


def test_a_file_or_a_glob_is_one_split(tmp_path):
    file = write_rows(tmp_path / "held.csv", fields(*"abcd"))
    for name in (file, tmp_path / "*.csv"):
        assert texts(name, "train[:50%]") == ["a", "b"]
        assert texts(name, "test", also="test") == list("abcd")
        assert texts(name, "test[50%:]", also="test") == ["c", "d"]
        assert texts(name, "train[1:2]", also="test") == ["b"]
        assert "is one split, train: it has no 'test'" in complaint(name, "test")
        assert "is one split, test: it has no 'dev'" in complaint(name, "dev", also="test")
    datasets.Dataset.from_list(fields("a")).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved", "test", also="test") == ["a"]


README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/tr*.csv
  - split: test
    path: [main/held.csv]
- config_name: other
  data_dir: other
{default}---
# A data set
"""


def test_configurations(tmp_path):
    folder = tmp_path / "set"
    write_rows(folder / "main" / "tr.csv", fields("main"))
    write_rows(folder / "main" / "held.csv", fields("held"))
    write_rows(folder / "other" / "x.csv", fields("other"))
    (folder / "README.md").write_text(README.format(default=""))
    assert texts(folder, "train", "main") == ["main"]
    assert texts(folder, "test", "main") == ["held"]
    assert texts(folder, "train", "other") == ["other"]
    for config in ("main", "other"):
        theirs = datasets.load_dataset(str(folder), config, cache_dir=str(tmp_path / "cache"))
        assert list(find(str(folder), config).splits) == list(theirs)
    message = complaint(folder)
    assert "has several configurations: name one by --dataset_config, of main, other" in message
    assert "has no configuration 'third'" in complaint(folder, "train", "third")
    (folder / "README.md").write_text(README.format(default="  default: true\n"))
    assert texts(folder) == ["other"]
    (folder / "README.md").write_text(README.format(default="  sep: ;\n"))
    assert "README.md: configuration 'other' sets sep" in complaint(folder, "train", "other")
    (folder / "README.md").write_text("---\nconfigs: 3\n---\n")
    assert "README.md: its configurations cannot be read" in complaint(folder)
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "README.md: its configurations cannot be read" in complaint(folder)
    outside = README.replace("main/tr*.csv", "../x.csv").format(default="")
    (folder / "README.md").write_text(outside)
    write_rows(tmp_path / "x.csv", fields("x"))
    assert "names a file outside" in complaint(folder, "train", "main")
    elsewhere = README.replace("main/tr*.csv", "https://example.org/x.csv").format(default="")
    (folder / "README.md").write_text(elsewhere)
    assert "names files elsewhere" in complaint(folder, "train", "main")
    file = folder / "main" / "tr.csv"
    assert "has no configuration 'main' (--dataset_config)" in complaint(file, "train", "main")
    assert texts(file, "train", "default") == ["main"]


def test_what_is_not_there(tmp_path, offline):
    assert f"no file or folder {tmp_path}/nowhere" in complaint("nowhere")
    assert f"no file or folder {tmp_path}/data/trian.jsonl" in complaint("data/trian.jsonl")
    assert "/no/such/file.csv" in complaint("/no/such/file.csv")
    message = complaint("data/*.csv")
    assert f"the pattern {tmp_path}/data/*.csv matches no file" in message
    message = complaint("some/set")
    assert message.startswith(f"some/set: no local folder {tmp_path}/some/set, and as a hub id: ")
    assert "no complete offline copy" in message
    assert "some/set@v1:" in complaint("some/set@v1")
    assert "no file or folder" in complaint("x" * 5000)
    folder = tmp_path / "x.jsonl"
    folder.mkdir()
    assert f"{folder} holds no data file (it holds: nothing)" in complaint("x.jsonl")
    (folder / "rows.txt").write_text("a")
    assert "holds no data file (it holds: rows.txt); accepted are .jsonl" in complaint("x.jsonl")
    write_rows(folder / "train.csv", fields("a"))
    write_rows(folder / "dev.csv", fields("b"))
    assert texts("x.jsonl", "validation") == ["b"]
    message = complaint("x.jsonl", "test")
    assert "has no split 'test'; its splits: train, validation" in message
    assert "split 'train[:5': " in complaint("x.jsonl", "train[:5")
    assert "train[:10%]" in complaint("x.jsonl", "train[:500%]")
    assert "split 'train[:0]' holds no row" in complaint("x.jsonl", "train[:0]")
    write_rows(folder / "train.jsonl", fields("a"))
    assert "split 'train' has files of several formats (.csv, .jsonl)" in complaint("x.jsonl")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "a.txt").write_text("x")
    assert "a.txt: cannot tell the format by the name" in complaint("g/*")


def test_a_missing_shard_is_noticed(tmp_path, offline):
    for folder in (tmp_path / "local", hub(offline)):
        for i in (0, 2):
            write_rows(folder / "data" / f"train-0000{i}-of-00003.parquet", fields(str(i)))
    for name in ("local", "org/set"):
        message = complaint(name)
        assert "1 of 3 files are missing, the first is train-00001-of-00003.parquet" in message
    assert texts("local/data/*.parquet") == ["0", "2"]
    datasets.Dataset.from_list(fields("a", "b")).save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow: No such file" in complaint("saved")


def test_damaged_saved_folders(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(fields("a")).save_to_disk(folder)
    (folder / "state.json").write_text("{}")
    assert "state.json: does not list the files" in complaint(folder)
    (folder / "state.json").write_text('{"_indices_data_files": [{"filename": "i.arrow"}]}')
    assert "state.json: holds a selection of rows apart" in complaint(folder)
    (folder / "state.json").write_text("{")
    assert "state.json: no valid JSON" in complaint(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "state.json: file does not exist" in complaint(folder)


def test_origins_tell_files_of_one_name_apart(tmp_path, offline):
    for name in ("a", "b"):
        write_rows(tmp_path / name / "train.jsonl", fields(name))
    write_rows(hub(offline) / "data" / "train.csv", fields("h"))
    write_rows(tmp_path / "other.jsonl", fields("o"))

    def origins(*names: str) -> list[str]:
        return [row.origin for source in open_sources(names, ["train"]) for row in source.read()]

    assert origins("a", "other.jsonl") == ["train.jsonl:1", "other.jsonl:1"]
    assert origins("a", "b/train.jsonl") == ["a/train.jsonl:1", "b/train.jsonl:1"]
    assert origins("*/train.jsonl") == ["a/train.jsonl:1", "b/train.jsonl:1"]
    assert origins("org/set") == ["train.csv:2"]
    write_rows(tmp_path / "c" / "train.csv", fields("c"))
    assert origins("org/set", "c") == ["org/set/data/train.csv:2", "c/train.csv:2"]
    assert [source.title for source in open_sources(["a", "*/train.jsonl"], ["train"])] == [
        "train.jsonl",
        "*/train.jsonl",
    ]


def test_an_offline_cache_in_a_process_of_its_own(tmp_path):
    """As a user meets it: HF_HUB_OFFLINE=1, a cache made elsewhere, and torch never imported."""
    pytest.importorskip("torch")
    write_rows(hub(tmp_path / "hub") / "data" / "test-00000-of-00001.parquet", fields("a", "b"))
    code = (
        "import sys\nfrom jaxft.data.sources import open_sources\n"
        "source, = open_sources(['org/set'], ['test[:50%]'])\n"
        "print([row.fields['text'] for row in source.read()], 'torch' in sys.modules)\n"
    )
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    for block in ("", "import sys; sys.modules['torch'] = None\n"):
        command = [sys.executable, "-c", block + code]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.stdout == f"['a'] {bool(block)}\n", done.stderr


def test_what_is_asked_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def snapshot(repo_id: str, **options) -> str:
        asked.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr("jaxft.formats.hub.snapshot_download", snapshot)
    write_rows(tmp_path / "train.csv", fields("a"))
    assert texts("org/set@v1.2") == texts("org/set") == ["a"]
    assert [(name, o["repo_type"], o["revision"]) for name, o in asked] == [
        ("org/set", "dataset", "v1.2"),
        ("org/set", "dataset", None),
    ]
    wanted = asked[0][1]["allow_patterns"]
    for name in ("README.md", "data/train-00000-of-00001.parquet", "x.jsonl.zst", "a/state.json"):
        assert any(fnmatch(name, pattern) for pattern in wanted), name
    for name in ("model.safetensors", "script.py", "image.png"):
        assert not any(fnmatch(name, pattern) for pattern in wanted), name


def test_a_folder_without_datasets_says_what_is_missing(tmp_path, monkeypatch):
    write_rows(tmp_path / "train.jsonl", fields("a", "b"))
    for name in ("datasets", "datasets.data_files"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install datasets" in complaint(tmp_path)
    assert "pip install datasets" in complaint(tmp_path / "train.jsonl", "train[:1]")
    assert texts(tmp_path / "train.jsonl") == ["a", "b"]
