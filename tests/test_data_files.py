"""Reading files: what must change nothing, what stays text, and what must be named."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_fixtures import AWKWARD, CHATML, pairs_of, tiny_tokenizer, write_rows

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
# Prints every key of a message, so that a key put in by the reader would show.
ALL_KEYS = CHATML.replace("{{ m.content }}", "{{ m | dictsort }}{{ m.content }}")
NAMES = [
    "a.jsonl",
    "a.ndjson",
    "a.JSONL",
    "a.json",
    "a.csv",
    "a.tsv",
    "a.jsonl.gz",
    "a.json.zst",
    "a.csv.gz",
    "a.csv.zst",
    "a.tsv.zst",
    "a.parquet",
    "a.arrow",
]

VARIANTS = {
    "bom": b"\xef\xbb\xbf" + b"\n".join(CLEAN) + b"\n",
    "crlf": b"\r\n".join(CLEAN) + b"\r\n",
    "blank lines": b"\n\n   \n".join(CLEAN) + b"\n \n\n",
    "no final newline": b"\n".join(CLEAN),
    "all": b"\xef\xbb\xbf" + b"\r\n \r\n".join(CLEAN),
}


@pytest.mark.parametrize("name", ["dirty.jsonl", "dirty.json", "dirty.jsonl.gz"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dirty_file_gives_the_same_ids(tmp_path, variant, name):
    clean, dirty = tmp_path / "clean.jsonl", tmp_path / name
    clean.write_bytes(b"\n".join(CLEAN) + b"\n")
    content = VARIANTS[variant]
    dirty.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    tokenizer = tiny_tokenizer(ALL_KEYS)
    wanted, got = (encode(read_rows(path), tokenizer) for path in (clean, dirty))
    assert len(got) == 3
    assert pairs_of(wanted) == pairs_of(got)
    for example in got:
        text = tokenizer.decode(example.input_ids)
        assert "\ufeff" not in text
        assert "\r" not in text
    # Control: the template does print a key that only one message has, and a stray one shows.
    assert "extra" in tokenizer.decode(wanted[1].input_ids)
    assert "extra" not in tokenizer.decode(wanted[0].input_ids)
    with pytest.raises(json.JSONDecodeError):
        json.loads(VARIANTS["bom"].split(b"\n")[0].decode("utf-8"))


ONE = (
    b'\xef\xbb\xbf{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
    b'\n\n   \n{"messages":[{"role":"user","content":"c"},{"role":"assistant","content":"d",'
    b'"extra":1}]}'
)
TWO = b'{"messages":[{"role":"user","content":"e"},{"role":"assistant","content":"f"}]}\r\n'


def test_two_dirty_files_are_three_clean_rows(tmp_path):
    """A BOM, blank lines, no final newline, then CRLF: neither glued nor dropped nor added to."""
    (tmp_path / "one.jsonl").write_bytes(ONE)
    (tmp_path / "two.jsonl").write_bytes(TWO)
    lines = [*ONE.removeprefix(b"\xef\xbb\xbf").split(b"\n\n   \n"), TWO.strip()]
    (tmp_path / "clean.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    tokenizer = tiny_tokenizer(ALL_KEYS)
    rows = read_rows(tmp_path / "one.jsonl") + read_rows(tmp_path / "two.jsonl")
    assert [row.origin for row in rows] == ["one.jsonl:1", "one.jsonl:4", "two.jsonl:1"]
    wanted = pairs_of(encode(read_rows(tmp_path / "clean.jsonl"), tokenizer))
    assert len(wanted) == 3
    assert pairs_of(encode(rows, tokenizer)) == wanted
    # Control: a reader that gives each row the keys of all others changes what is trained.
    padded = [json.loads(line) for line in lines]
    for row in padded:
        row["messages"][1].setdefault("extra", "None")
    write_rows(tmp_path / "padded.jsonl", padded)
    assert pairs_of(encode(read_rows(tmp_path / "padded.jsonl"), tokenizer)) != wanted

    broken = b"\n".join([lines[0], lines[1], b'{"messages": [', lines[2]])
    (tmp_path / "broken.jsonl").write_bytes(broken)
    with pytest.raises(UserError, match=r"broken\.jsonl:3: not JSON: Expecting value, column 15$"):
        read_rows(tmp_path / "broken.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_the_same_through_every_reader(tmp_path, name):
    """Also where the format has no lists (JSON text in a cell) or gives every struct every key."""
    call = {"type": "function", "function": {"name": "w", "arguments": {"city": "Z\u00fcrich"}}}
    chats = [
        *CHATS,
        {
            "messages": [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "007"},
                {"role": "assistant", "content": "null", "weight": 1},
            ]
        },
    ]
    tokenizer = tiny_tokenizer(ALL_KEYS)
    clean = read_rows(write_rows(tmp_path / "clean" / "x.jsonl", chats))
    rows = read_rows(write_rows(tmp_path / name, chats))
    assert pairs_of(encode(rows, tokenizer)) == pairs_of(encode(clean, tokenizer))
    if name.endswith((".parquet", ".arrow")):  # control: the file does hold the other keys
        read = (
            pq.read_table
            if name.endswith("parquet")
            else lambda p: pa.ipc.open_stream(p).read_all()
        )
        raw = read(tmp_path / name).to_pylist()
        assert raw[0]["messages"][0]["extra"] is None
        assert "extra" not in rows[0].fields["messages"][0]


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_text_through_every_reader(tmp_path, name):
    fields = [{"id": str(i), "text": text, "other": ""} for i, text in enumerate(AWKWARD)]
    rows = read_rows(write_rows(tmp_path / name, fields))
    assert [row.fields for row in rows] == fields
    tokenizer = tiny_tokenizer()
    clean = read_rows(write_rows(tmp_path / "clean" / "x.jsonl", fields))
    assert pairs_of(encode(rows, tokenizer)) == pairs_of(encode(clean, tokenizer))


def test_other_csv_readers_do_change_text(tmp_path):
    """Control of the test above: what is kept there is lost where a reader guesses types."""
    import pandas

    numbers = write_rows(tmp_path / "n.csv", [{"text": "007"}, {"text": "1e5"}])
    assert [row.fields["text"] for row in read_rows(numbers)] == ["007", "1e5"]
    assert pandas.read_csv(numbers)["text"].astype(str).tolist() != ["007", "1e5"]
    words = write_rows(tmp_path / "w.csv", [{"text": "null"}, {"text": "NA"}, {"text": "x"}])
    assert [row.fields["text"] for row in read_rows(words)] == ["null", "NA", "x"]
    assert pandas.read_csv(words)["text"].isna().tolist() == [True, True, False]
    datasets = pytest.importorskip("datasets")
    theirs = datasets.Dataset.from_csv(str(numbers), cache_dir=tmp_path / "cache")
    assert theirs["text"][:] != ["007", "1e5"]


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_csv_dirt_changes_nothing(tmp_path, bom, end, separator):
    lines = ["prompt,completion", "", 'a,"x\ny"', "   ", '"",""', "b, c "]
    text = bom + end.join(lines).replace(",", separator)
    path = tmp_path / ("a.csv" if separator == "," else "a.tsv")
    path.write_bytes(text.encode())
    rows = read_rows(path)
    assert [(row.fields, row.origin) for row in rows] == [
        ({"prompt": "a", "completion": "x\ny"}, f"{path.name}:3"),
        ({"prompt": "", "completion": ""}, f"{path.name}:6"),
        ({"prompt": "b", "completion": " c "}, f"{path.name}:7"),
    ]


def test_a_cell_of_five_megabytes(tmp_path):
    before = csv.field_size_limit()
    path = write_rows(tmp_path / "a.csv", [{"text": "x, " * 1_700_000}])
    assert len(read_rows(path)[0].fields["text"]) == 5_100_000
    assert csv.field_size_limit() == before
    with path.open() as file, pytest.raises(csv.Error, match="field limit"):  # control
        list(csv.reader(file))


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"data": [{"text": "a"}, {"text": "b"}], "version": "1"}', ["a", "b"]),
        ('[{"text": "a"}]', ["a"]),
        ('{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    ],
)
def test_shapes_of_json(tmp_path, content, texts):
    path = tmp_path / "a.json"
    path.write_text(content)
    rows = read_rows(path)
    assert [row.fields["text"] for row in rows] == texts
    place = "item 1" if len(content.splitlines()) == 1 else "1"
    assert rows[0].origin == f"a.json:{place}"


def test_a_json_file_of_one_row_is_that_row(tmp_path):
    path = tmp_path / "a.json"
    for row in (CHATS[0], {"text": "a", "pages": [{"text": "b"}]}):
        path.write_text(json.dumps(row, indent=2))
        assert [read.fields for read in read_rows(path)] == [row]


def test_columns_of_json_values(tmp_path):
    """`datasets` writes messages of different keys as Arrow's JSON type."""
    import datasets

    write_rows(tmp_path / "m.jsonl", CHATS)
    table = datasets.Dataset.from_json(str(tmp_path / "m.jsonl"), cache_dir=tmp_path / "cache")
    table.to_parquet(tmp_path / "m.parquet")
    rows = read_rows(tmp_path / "m.parquet")
    assert [row.fields for row in rows] == CHATS
    assert rows[2].origin == "m.parquet:row 3"


def test_arrow_files_and_streams(tmp_path):
    table = pa.Table.from_pylist([{"text": text} for text in AWKWARD])
    path = tmp_path / "f.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=3)
    assert [row.fields["text"] for row in read_rows(path)] == AWKWARD
    assert read_rows(path)[-1].origin == f"f.arrow:row {len(AWKWARD)}"
    dictionary = table.set_column(0, "text", table["text"].dictionary_encode())
    pq.write_table(dictionary, tmp_path / "d.parquet")
    assert [row.fields["text"] for row in read_rows(tmp_path / "d.parquet")] == AWKWARD


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


def cut(name: str, end: int) -> bytes:
    """Content of a good file of that name, cut off."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        fields = [{"text": f"row {i} of many"} for i in range(3000)]
        return write_rows(Path(folder) / name, fields).read_bytes()[:end]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HOSTILE = {
    "empty.jsonl": (b"", "empty.jsonl holds no row"),
    "blank.jsonl": (b"\n \n", "blank.jsonl holds no row"),
    "bom.jsonl": (b"\xef\xbb\xbf", "bom.jsonl holds no row"),
    "empty.csv": (b"", "empty.csv holds no row"),
    "header.csv": (b"text,id\n", "header.csv holds no row"),
    "empty.parquet": (b"", "empty.parquet holds no row"),
    "empty.jsonl.gz": (b"", "empty.jsonl.gz holds no row"),
    "empty.json": (b"[]", "empty.json holds no row"),
    "cut.parquet": (cut("a.parquet", -40), "cut.parquet: cannot be read as Parquet: "),
    "half.parquet": (cut("a.parquet", 2000), "half.parquet: cannot be read as Parquet: "),
    "cut.arrow": (cut("a.arrow", -8), "cut.arrow: is no Arrow file, or is cut off"),
    "half.arrow": (cut("a.arrow", 2000), "half.arrow: is no Arrow file, or is cut off"),
    "cut.jsonl.gz": (cut("a.jsonl.gz", -20), "cut.jsonl.gz: the archive is cut off"),
    "cut.jsonl.zst": (cut("a.jsonl.zst", -20), "cut.jsonl.zst: cannot be read: the archive is cut"),
    "plain.jsonl.gz": (b'{"text": "a"}\n', "plain.jsonl.gz: cannot be read: Not a gzipped file"),
    "plain.csv.zst": (b"text\na\n", "plain.csv.zst: cannot be read: ZSTD"),
    "latin.csv": ("id,text\n1,a\n2,é\n".encode("latin-1"), "latin.csv:3: not UTF-8 text"),
    "latin.json": ('[\n{"text": "é"}]'.encode("latin-1"), "latin.json:2: not UTF-8 text"),
    "wide.csv": ("text\na\n".encode("utf-16"), "wide.csv: holds UTF-16 text; save it as UTF-8"),
    "nul.csv": (b"text\na\0b\n", "nul.csv:2: holds a NUL byte"),
    "more.csv": (b'a,b\n"x\ny",2\n1,2,3\n', "more.csv:4: 3 cells where the header has 2 (a, b)"),
    "fewer.tsv": (b"a\tb\n\n1\n", "fewer.tsv:3: 1 cells where the header has 2"),
    "open.csv": (b'a,b\n1,2\n3,"4\n5,6\n', "open.csv:3: a quoted cell that begins here is not"),
    "quote.csv": (b'a,b\n"1" x,2\n', "quote.csv:2: ',' expected after '\"'"),
    "mac.csv": (b"a,b\r1,2\r", "mac.csv:1: a lone carriage return"),
    "twice.csv": (b"a,b,a\n1,2,3\n", "twice.csv:1: the header has two columns 'a'"),
    "table.csv": (cut("a.parquet", -1), "table.csv: holds Parquet data; name it .parquet"),
    "packed.jsonl": (cut("a.jsonl.gz", -1), "packed.jsonl: holds gzip data; add .gz"),
    "book.csv": (b"PK\x03\x04....", "book.csv: holds a zip archive or a spreadsheet"),
    "rows.parquet": (b'{"text": "a"}\n' * 9, "rows.parquet: cannot be read as Parquet: "),
    "rows.arrow": (b'{"text": "a"}\n' * 9, "rows.arrow: is no Arrow file"),
    "comma.jsonl": (b"text,id\na,1\n", "comma.jsonl:1: not JSON"),
    "pointer.parquet": (LFS, "pointer.parquet: is a git-lfs pointer"),
    "pointer.csv": (LFS, "pointer.csv: is a git-lfs pointer"),
    "two.json": (b'{"a": [1], "b": [2]}', "two.json: must be a list of rows or an object that ho"),
    "text.json": (b'"a"', "text.json: must be a list of rows or an object that holds one, this is"),
    "items.json": (b'[{"text": "a"}, 3]', "items.json:item 2: a row must be a JSON object"),
    "broken.json": (b'[\n{"text": "a"},\n{"text": }]', "broken.json:3: not JSON"),
    "half.json": (b'[{"text": "\\ud83d"}]', "half.json: not UTF-8"),
    "rows.txt": (b"a\n", "rows.txt: cannot tell the format by the name; accepted are .jsonl, "),
    "rows.parquet.gz": (b"a\n", "rows.parquet.gz: cannot tell the format by the name"),
    "rows": (b"a\n", "rows: cannot tell the format by the name"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_one_line(tmp_path, name):
    content, reason = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path / name)
    message = str(caught.value)
    assert f"{tmp_path}/{reason}" in message
    assert len(message.splitlines()) == 1
    assert len(message) < 400


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_that_are_no_text(tmp_path, name):
    import datetime

    fields = [{"text": datetime.date(2024, 1, 2), "blob": b"\xff"}]
    rows = read_rows(write_rows(tmp_path / name, fields))
    with pytest.raises(UserError, match=r"row 1: column 'text' must be text, it is date"):
        encode(rows, tiny_tokenizer())


def test_two_columns_of_one_name(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: has two columns 'text'"):
        read_rows(tmp_path / "a.parquet")


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl"):
        read_rows(tmp_path / "none.jsonl")


def test_every_cut_of_an_archive_is_noticed(tmp_path):
    """Never a silently shorter data set: any prefix is an error or holds no row at all."""
    fields = [{"text": f"row {i}"} for i in range(50)]
    for name in ("a.jsonl.gz", "a.csv.zst", "a.arrow", "a.parquet"):
        whole = write_rows(tmp_path / name, fields).read_bytes()
        assert len(read_rows(tmp_path / name)) == 50
        for end in range(0, len(whole), max(1, len(whole) // 60)):
            (tmp_path / name).write_bytes(whole[:end])
            with pytest.raises(UserError):
                read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst"])
def test_archives_of_several_parts(tmp_path, name):
    """Appended archives, as parallel compressors write them, are one text."""
    whole = b""
    for part in (b"text\na\n", b"b\n"):
        with pa.output_stream(str(tmp_path / name), compression="detect") as out:
            out.write(part)
        whole += (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole)
    assert [row.fields["text"] for row in read_rows(tmp_path / name)] == ["a", "b"]


def test_reading_jsonl_needs_no_other_package(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    path = write_rows(tmp_path / "a.jsonl.gz", [{"text": "a"}])
    code = (
        "import sys\nfor name in ('datasets', 'pyarrow', 'pandas', 'torch', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        "from jaxft.data.sources import open_sources\n"
        f"print(len(open_sources([{str(path)!r}], ['train'])[0].read()))\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
