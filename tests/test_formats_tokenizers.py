"""Tokenizers of folders: the ids of AutoTokenizer, without torch; saving them beside an adapter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from jaxft.errors import UserError
from jaxft.formats.tokenizers import folder_tokenizer, save_tokenizer

CORPUS = ["hello world, the cat sat", "don't say 2024 or 3,500.75", "Zürich grüßt 名前"] * 4
TEXTS = [*CORPUS[:3], "", " ", "a  b\n\n c\t", "<s> hello</s>", "x <|end|> y", "\U0001f600 ½"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def train(pre_tokenizer, **model) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = [] if "byte_fallback" in model else pre_tokenizers.ByteLevel.alphabet()
    extra = [f"<0x{i:02X}>" for i in range(256)] if "byte_fallback" in model else []
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400 + len(extra),
            show_progress=False,
            special_tokens=SPECIAL + extra,
            initial_alphabet=alphabet,
        ),
    )
    return tokenizer


def byte_level(folder: Path) -> None:
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def rebuilt(cls, pre_tokenizer, folder: Path, **model) -> None:
    """A tokenizer that transformers builds itself, from a vocabulary and merges."""
    trained = json.loads(train(pre_tokenizer, **model).to_str())["model"]
    tokenizer = cls(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=cls is LlamaTokenizer,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)


def llama(folder: Path) -> None:
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rebuilt(LlamaTokenizer, metaspace, folder, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def qwen2(folder: Path) -> None:
    rebuilt(Qwen2Tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False), folder)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


BUILDERS = {
    "PreTrainedTokenizerFast": byte_level,
    "LlamaTokenizer": llama,
    "Qwen2Tokenizer": qwen2,
}


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("name", BUILDERS)
def test_ids_are_those_of_autotokenizer(tmp_path, name, add_bos):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    BUILDERS[name](tmp_path)
    edit_config(tmp_path, tokenizer_class=name, add_bos_token=add_bos)
    ours, theirs = folder_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert [ours(t).input_ids for t in TEXTS] == [theirs(t).input_ids for t in TEXTS]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours("hello").input_ids[0] == 1) == (name != "Qwen2Tokenizer")  # as tokenizer.json says


def test_both_places_of_a_chat_template_are_read(tmp_path):
    byte_level(tmp_path)
    assert folder_tokenizer(tmp_path).chat_template is None
    edit_config(tmp_path, chat_template=TEMPLATE)
    chat = [{"role": "user", "content": "hi"}]
    render = folder_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False)
    assert render == "<s>user: hi"
    edit_config(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("file " + TEMPLATE)
    render = folder_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False)
    assert render == "file <s>user: hi"


def test_torch_is_never_imported(tmp_path):
    for name, build in BUILDERS.items():
        build(tmp_path / name)
        edit_config(tmp_path / name, tokenizer_class=name, chat_template=TEMPLATE)
    code = """
import sys
if sys.argv[1] == "blocked":
    sys.modules["torch"] = None
from pathlib import Path
from jaxft.formats import modelcard, open, peft
from jaxft.formats.tokenizers import folder_tokenizer, save_tokenizer
for name in ("LlamaTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"):
    tokenizer = folder_tokenizer(Path(sys.argv[2], name))
    save_tokenizer(Path(sys.argv[2], sys.argv[1], name), tokenizer)
    print(tokenizer("hello 2024").input_ids)
    print(tokenizer.apply_chat_template([{"role": "u", "content": "x"}])["input_ids"])
assert sys.argv[1] == "blocked" or "torch" not in sys.modules
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, mode, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
        ).stdout
        for mode in ("blocked", "free")
    ]
    expected = []
    for name in sorted(BUILDERS):
        tokenizer = folder_tokenizer(tmp_path / name)
        expected.append(tokenizer("hello 2024").input_ids)
        expected.append(tokenizer.apply_chat_template([{"role": "u", "content": "x"}])["input_ids"])
    assert runs[0].splitlines() == runs[1].splitlines() == [str(ids) for ids in expected]


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (
            lambda f: (f / "tokenizer.json").unlink(),
            ["no tokenizer.json", "copy it"],
        ),
        (lambda f: (f / "tokenizer.json").write_text("{"), ["tokenizer.json", "JSON"]),
        (lambda f: (f / "tokenizer_config.json").write_text(""), ["tokenizer_config.json"]),
        (lambda f: (f / "tokenizer.json").write_text("{}"), ["cannot be read"]),
        (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": 3}'), ["eos_token"]),
        (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), ["utf-8"]),
    ],
)
def test_faults_are_one_line(tmp_path, damage, parts):
    byte_level(tmp_path)
    folder_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        folder_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    for part in [str(tmp_path), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", BUILDERS)
def test_saved_tokenizer_gives_the_same_ids(tmp_path, name):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    BUILDERS[name](tmp_path / "base")
    edit_config(tmp_path / "base", tokenizer_class=name, chat_template=TEMPLATE)
    tokenizer = folder_tokenizer(tmp_path / "base")
    save_tokenizer(tmp_path / "run", tokenizer)
    saved = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not list((tmp_path / "run").glob(".writing*"))
    again = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert again.chat_template == TEMPLATE
    assert [again(t).input_ids for t in TEXTS] == [tokenizer(t).input_ids for t in TEXTS]
    assert (again("hello").input_ids[0] == 1) == (name != "Qwen2Tokenizer")
