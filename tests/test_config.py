"""Options: names, defaults, reading rules, the YAML file, and one clear line for every fault."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxft import config
from jaxft.config import GROUPS, PROJECTIONS, TrainConfig
from jaxft.errors import UserError
from jaxft.options import nearest

REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--output_dir", "out"]


def parse(*args: str) -> TrainConfig:
    """With what is required, where the arguments do not give it themselves."""
    pairs = zip(REQUIRED[::2], REQUIRED[1::2], strict=True)
    return config.parse([*(w for pair in pairs if pair[0] not in args for w in pair), *args])


def complaint(*args: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_the_documented_ones():
    got = dataclasses.asdict(parse())
    expected = {
        "dtype": "auto",
        "load_in_4bit": True,
        "use_bnb_nested_quant": True,
        "lora_r": 16,
        "lora_alpha": 16.0,
        "lora_dropout": 0.0,
        "lora_target_modules": PROJECTIONS,
        "use_rslora": False,
        "max_length": 2048,
        "packing": True,
        "overflow": "error",
        "num_train_epochs": 1.0,
        "max_steps": -1,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": "layer",
        "resume_from_checkpoint": None,
        "report_to": "none",
    }
    assert {name: got[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        *((word, True) for word in ("true", "True", "yes", "y", "t", "1")),
        *((word, False) for word in ("false", "False", "no", "n", "f", "0")),
    ],
)
@pytest.mark.parametrize("name", ["packing", "load_in_4bit", "use_rslora"])
def test_booleans_read_as_hugging_face_reads_them(name, words, value):
    words = [words] if isinstance(words, str) else words
    # Followed by another option, so that a bare flag may not swallow it.
    got = parse(f"--{name}", *words, "--seed", "7")
    assert getattr(got, name) is value
    assert got.seed == 7


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], "layer"),
        (["true"], "layer"),
        (["True"], "layer"),
        (["false"], "false"),
        (["no"], "false"),
        (["attention"], "attention"),
        (["offload"], "offload"),
    ],
)
def test_gradient_checkpointing_is_a_boolean_or_a_policy(words, value):
    assert parse("--gradient_checkpointing", *words).gradient_checkpointing == value


def test_spellings_of_names_and_values():
    got = parse("--learning-rate=1e-4", "--max_steps", "-1", "--num_train_epochs", "1.5")
    assert (got.learning_rate, got.max_steps, got.num_train_epochs) == (1e-4, -1, 1.5)
    got = parse("--lora_target_modules", "q_proj", "v_proj", "--save_steps", "none")
    assert (got.lora_target_modules, got.save_steps) == (("q_proj", "v_proj"), None)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--learning_rat", "1"], ["unknown option --learning_rat", "--learning_rate"]),
        (["--lr", "1"], ["unknown option --lr", "--learning_rate"]),
        (["--epochs=2"], ["unknown option --epochs", "--num_train_epochs"]),
        (["--zzzzzz", "1"], ["unknown option --zzzzzz", "--help"]),
        (["--no_packing"], ["--no_packing", "--packing false"]),
        (["--dtype", "fp16"], ["--dtype", "'fp16'", "auto, bfloat16, float16, float32"]),
        (["--gradient_checkpointing", "some"], ["'some'", "true, false, layer, attention"]),
        (["--packing", "perhaps"], ["--packing", "'perhaps'", "true or false"]),
        (["--lora_r", "many"], ["--lora_r", "'many'", "whole number"]),
        (["--lora_r", "1.5"], ["--lora_r", "'1.5'", "whole number"]),
        (["--learning_rate", "nan"], ["--learning_rate", "'nan'", "finite"]),
        (["--lora_r"], ["--lora_r needs a value"]),
        (["--lora_r", "8", "9"], ["--lora_r takes one value", "'8 9'"]),
        (["--lora_target_modules", "q_proj", "(k|v)_proj"], ["'(k|v)_proj'", "stand alone"]),
        (["--lora_target_modules", "q_proj", "q_proj"], ["each once", "q_proj q_proj"]),
        (["--output_dir", ""], ["--output_dir must not be empty"]),
        (["--lora_r", "0"], ["--lora_r", "at least 1", "got 0"]),
        (["--lora_alpha", "0"], ["--lora_alpha", "above 0", "got 0"]),
        (["--lora_dropout", "1"], ["--lora_dropout", "below 1", "got 1"]),
        (["--lora_dropout", "-0.1"], ["--lora_dropout", "at least 0", "got -0.1"]),
        (["--learning_rate", "-1e-4"], ["--learning_rate", "at least 0", "-0.0001"]),
        (["--max_length", "1"], ["--max_length", "at least 2", "got 1"]),
        (["--max_steps", "0"], ["--max_steps", "or -1", "got 0"]),
        (["--num_train_epochs", "0"], ["--num_train_epochs", "above 0"]),
        (["--eval_split_ratio", "1.0"], ["--eval_split_ratio", "below 1"]),
        (["--save_steps", "0"], ["--save_steps", "at least 1"]),
        (["--seed", "4294967296"], ["--seed", "below 2**32"]),
        (["--eval_steps", "5"], ["--eval_steps 5", "--eval_dataset_name"]),
        (["--dataset_weights", "1", "2"], ["--dataset_weights 1 2: 2 for 1 --dataset_name"]),
        (["--dataset_weights", "0"], ["--dataset_weights 0: each must be above 0"]),
        (["--dataset_weights", "-1"], ["--dataset_weights -1: each must be above 0"]),
        (["--dataset_weights", "half"], ["--dataset_weights must be a number", "'half'"]),
        (["--dataset_weights", "inf"], ["--dataset_weights must be finite", "'inf'"]),
        (["--dataset_train_split", "a", "b"], ["--dataset_train_split a b: 2 for 1 data sets"]),
        (["--dataset_config", "a", "b"], ["--dataset_config a b: 2 for 1 data sets"]),
        (["--dataset_test_split", "dev"], ["--dataset_test_split dev", "--eval_dataset_name"]),
        (["--dataset_name", ""], ["--dataset_name must not be empty"]),
        (
            ["--eval_dataset_name", "e", "--eval_split_ratio", "0.1"],
            ["--eval_dataset_name e", "--eval_split_ratio 0.1"],
        ),
    ],
)
def test_a_fault_is_one_line_that_names_option_and_value(args, parts):
    message = complaint(*args)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--dataset_name", "a", "--dataset-name", "b"], ["--dataset_name is given twice"]),
        (["--lora_r=4", "--lora_r", "8"], ["--lora_r is given twice", "one --lora_r"]),
        (["--bf16"], ["unknown option --bf16", "--dtype bfloat16"]),
        (["--base_model", "m"], ["--model_name_or_path"]),
        (["--load_in_8bit"], ["--load_in_4bit true or false"]),
        (["--warmup_ratio", "0.1"], ["--warmup_steps", "number of updates"]),
        (["--max_steps", "3", "\u2014seed", "4"], ["--max_steps", "two hyphens"]),
        (["--lora_target_modules", "q_proj,v_proj"], ["q_proj,v_proj", "by spaces, not commas"]),
    ],
)
def test_what_users_of_other_trainers_type(args, parts):
    message = complaint(*args)
    for part in parts:
        assert part in message


def test_all_that_is_missing_is_told_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        config.parse(["--seed", "1"])
    assert str(caught.value).startswith(
        "--model_name_or_path, --dataset_name, --output_dir are required"
    )
    path = write(tmp_path, "base_model: m\nseed: 1\nsequence_len: 5\n")
    with pytest.raises(UserError) as caught:
        config.from_yaml(path)
    for part in (":1:", "'base_model'", "--model_name_or_path", "also unknown: sequence_len"):
        assert part in str(caught.value)


@pytest.mark.parametrize("missing", REQUIRED[::2])
def test_a_required_option_is_asked_for(missing):
    at = REQUIRED.index(missing)
    with pytest.raises(UserError, match=f"{missing} is required"):
        config.parse(REQUIRED[:at] + REQUIRED[at + 2 :])


def test_a_stray_word_is_refused():
    with pytest.raises(UserError, match="'stray'"):
        config.parse(["stray", *REQUIRED])
    with pytest.raises(UserError, match=r"did you mean --config run\.yaml\?"):
        config.parse(["run.yaml", *REQUIRED])


def test_the_command_line_wins_over_yaml(tmp_path):
    path = write(
        tmp_path,
        "model_name_or_path: from yaml\ndataset_name: d\noutput_dir: o\n"
        "learning_rate: 1e-3\npacking: false\ngradient_checkpointing: true\n"
        "lora_target_modules: [q_proj, o_proj]\nsave_steps: null\nlora_r: 4\n",
    )
    got = config.parse(["--config", path, "--lora_r", "8", "--dataset_name", "from line"])
    assert (got.model_name_or_path, got.dataset_name) == ("from yaml", ("from line",))
    assert config.parse(["--config", path]).dataset_name == ("d",)
    assert (got.learning_rate, got.packing, got.lora_r) == (1e-3, False, 8)
    assert (got.gradient_checkpointing, got.lora_target_modules) == ("layer", ("q_proj", "o_proj"))
    # The command line can also give a default back.
    back = config.parse(["--config", path, "--packing", "--lora_r", "16"])
    assert (back.packing, back.lora_r) == (True, 16)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\nlearning_rte: 1\n", [":2:", "'learning_rte'", "learning_rate"]),
        ("lora_r: many\n", [":1:", "lora_r", "whole number", "'many'"]),
        ("lora_r: 1.5\n", [":1:", "lora_r", "whole number", "1.5"]),
        ("lora_r: true\n", [":1:", "lora_r", "whole number", "True"]),
        ("packing: 2\n", [":1:", "packing", "true or false"]),
        ("output_dir: 12\n", [":1:", "output_dir", "text", "quotes"]),
        ("lora_target_modules: {q_proj: 1}\n", [":1:", "list of names"]),
        ("dataset_name: 12\n", [":1:", "dataset_name", "list of names", "12"]),
        ("dataset_weights: {a: 1}\n", [":1:", "dataset_weights must be a number"]),
        ("dataset_weights: [1, true]\n", [":1:", "dataset_weights", "a number", "True"]),
        ("dtype: fp8\n", [":1:", "dtype", "bfloat16", "'fp8'"]),
        ("seed: 1\nseed: 2\n", [":2:", "'seed'", "twice"]),
        ("- seed\n", ["option: value"]),
        ("seed: [1\n", ["not valid YAML"]),
        ("config: other.yaml\n", [":1:", "'config'"]),
        ("seed: 2020-13-45\n", ["not valid YAML", "month"]),
        ("seed: !!int many\n", ["not valid YAML", "'many'"]),
        ("seed: " + "9" * 5000, ["not valid YAML", "digits"]),
    ],
)
def test_a_fault_in_yaml_names_file_line_and_key(tmp_path, text, parts):
    path = write(tmp_path, text)
    message = complaint("--config", path)
    for part in [path, *parts]:
        assert part in message


def test_an_unreadable_yaml_file_is_named(tmp_path):
    assert "absent.yaml: No such file" in complaint("--config", str(tmp_path / "absent.yaml"))
    path = tmp_path / "latin.yaml"
    path.write_bytes("output_dir: ü\n".encode("latin-1"))
    assert "not UTF-8" in complaint("--config", str(path))


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--learning_rate", "1e-05", "--gradient_checkpointing", "false", "--packing", "no"],
        ["--lora_target_modules", "up_proj", "--output_dir", "ü 名: x", "--max_steps", "7"],
        ["--eval_split_ratio", "0.1", "--eval_steps", "3", "--dataset_text_field", "none"],
        ["--dataset_name", "a b", "c", "--dataset_weights", "1", "0.5"],
        ["--dataset_train_split", "train[:10%]", "--dataset_config", "main"],
        ["--eval_dataset_name", "e", "f", "--dataset_test_split", "test", "dev[:3]"],
    ],
)
def test_yaml_round_trip(tmp_path, args):
    before = parse(*args)
    assert config.from_yaml(write(tmp_path, config.to_yaml(before))) == before
    assert before != parse("--seed", "1")


def test_options_of_several_values(tmp_path):
    got = parse("--dataset_name", "a", "b", "--dataset_weights", "1", "0.5", "--seed", "3")
    assert (got.dataset_name, got.dataset_weights, got.seed) == (("a", "b"), (1.0, 0.5), 3)
    assert parse("--dataset_weights", "none").dataset_weights is None
    assert parse("--dataset_weights", "2").dataset_weights == (2.0,)
    assert parse("--eval_dataset_name", "none").eval_dataset_name is None
    path = write(tmp_path, "dataset_name: [a, b]\ndataset_weights: [1, 1e-1]\n")
    given = ["--config", path, *REQUIRED[:2], *REQUIRED[4:]]
    assert config.parse(given).dataset_weights == (1.0, 0.1)
    path = write(tmp_path, "dataset_name: a\ndataset_weights: 2\ndataset_train_split: dev\n")
    got = config.parse(given)
    assert (got.dataset_name, got.dataset_weights) == (("a",), (2.0,))
    assert got.dataset_train_split == ("dev",)


def test_python_callers_meet_the_same_rules():
    made: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}
    wrong: dict[str, Any] = {"lora_r": "many"}
    assert TrainConfig(**made, lora_alpha=8).lora_alpha == 8.0
    with pytest.raises(UserError, match="--lora_r must be a whole number"):
        TrainConfig(**made, **wrong)
    with pytest.raises(UserError, match="--lora_r must be at least 1"):
        TrainConfig(**made, lora_r=0)


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        config.parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flat = " ".join(text.replace("│", " ").split())
    for field in dataclasses.fields(TrainConfig):
        words = " ".join(field.metadata["help"].split())
        assert len(words) > 20, field.name
        assert f"--{field.name} " in flat
        assert words in flat, field.name
    assert {field.metadata["group"] for field in dataclasses.fields(TrainConfig)} == set(GROUPS)
    for group in GROUPS.values():
        assert group in flat


def test_nearest_name():
    names = ["learning_rate", "lora_r", "num_train_epochs"]
    assert nearest("learning_rte", names) == ["learning_rate"]
    assert nearest("qqqq", names) == []


COMMAND = """
import sys
from jaxft.cli import run
from jaxft.config import parse
def main(argv):
    if argv == ["bug"]:
        raise RuntimeError("a fault of the program")
    if argv == ["break"]:
        raise KeyboardInterrupt
    print(parse(argv).output_dir)
run(main)
"""


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", COMMAND, *args],
        cwd=Path(__file__).parents[1],
        env={"PATH": "", "PYTHONCOERCECLOCALE": "0", **env},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def test_a_command_turns_a_user_error_into_one_line_and_code_2():
    got = command(*REQUIRED, "--lora_r", "0")
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr == "error: --lora_r must be at least 1, got 0\n"
    assert command("break").returncode == 130
    bug = command("bug")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr


def test_a_command_survives_a_terminal_without_its_characters():
    got = command(*REQUIRED[:4], "--output_dir", "ü", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (got.returncode, got.stdout, got.stderr) == (0, "\\xfc\n", "")
    starts_over = command(*REQUIRED[:4], "--output_dir", "ü", LC_ALL="C")
    assert (starts_over.returncode, starts_over.stdout, starts_over.stderr) == (0, "ü\n", "")


def test_config_needs_no_tyro_until_it_parses():
    code = (
        "import sys; sys.modules['tyro'] = None; from jaxft.config import TrainConfig; "
        "TrainConfig(model_name_or_path='m', dataset_name='d', output_dir='o')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
