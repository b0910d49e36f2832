"""Options of a command as the fields of a frozen dataclass: one table of names, types and help.

The command line, a YAML file and a Python caller go through the same reading rules. tyro splits
the command line and draws `--help`; it is imported where it is used, so that a config can be made
without it. Every complaint is one line that names the option, or the file and the key.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from jaxft.errors import UserError

# The words that Hugging Face's argument parser takes for a boolean.
WORDS: dict[str, bool] = {
    **{word: True for word in ("true", "yes", "t", "y", "1")},
    **{word: False for word in ("false", "no", "f", "n", "0")},
}


def option(
    default: Any = dataclasses.MISSING,
    *,
    group: str,
    help: str,
    metavar: str | None = None,
    true_means: str | None = None,
) -> Any:
    """A dataclass field with what `--help` says of it; without a default it is required.

    `true_means`: for a choice that has "false" in it, the choice that a boolean true stands for.
    """
    metadata = {"group": group, "help": help, "metavar": metavar, "true_means": true_means}
    return dataclasses.field(default=default, metadata=metadata)


def _required(hint: Any) -> Any:
    """The type of an option without its `| None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def coerce(field: dataclasses.Field, hint: Any, value: Any) -> Any:
    """The value of an option from text, YAML or Python; ValueError with the rest of a sentence."""
    if get_origin(hint) in (Union, types.UnionType):
        if value in (None, ["none"]) or (isinstance(value, str) and value.lower() == "none"):
            return None
        hint = _required(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return _coerce_choice(field, get_args(hint), value)
    if origin is tuple:
        return _coerce_list(get_args(hint)[0], value)
    if origin is Mapping:
        return _coerce_mapping(get_args(hint)[1], value)
    if hint is bool:
        word = WORDS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(word, bool):
            raise ValueError(f"must be true or false, got {value!r}")
        return word
    if hint is str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, got {value!r} (in YAML, put it in quotes)")
        return value
    return _coerce_number(hint, value)


def _coerce_list(kind: type, value: Any) -> tuple:
    items = value if isinstance(value, list | tuple) else (value,)
    if kind is not str:
        return tuple(_coerce_number(kind, item) for item in items)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"must be a list of names, got {value!r}")
    return tuple(items)


def _coerce_mapping(kind: type, value: Any) -> dict[str, Any]:
    """From NAME=VALUE words, or a mapping of a YAML file or of Python."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        pairs = [word.rpartition("=")[::2] for word in value]
    else:
        raise ValueError(f"must be NAME=VALUE words, or a mapping in YAML, got {value!r}")
    given: dict[str, Any] = {}
    for name, number in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError(f"must be NAME=VALUE words, got {value!r}")
        if name in given:
            raise ValueError(f"names {name!r} twice")
        try:
            given[name] = _coerce_number(kind, number)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return given


def _coerce_choice(field: dataclasses.Field, choices: tuple[str, ...], value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool | str) else ""
    true_means = field.metadata["true_means"]
    if true_means and text in WORDS:
        text = true_means if WORDS[text] else "false"
    if text not in choices:
        known = ("true", *choices) if true_means else choices
        raise ValueError(f"must be one of {', '.join(known)}; got {value!r}")
    return text


def _coerce_number(hint: type, value: Any) -> int | float:
    accepted = (str, int) if hint is int else (str, int, float)
    kind = "a whole number" if hint is int else "a number"
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError(f"must be {kind}, got {value!r}")
    try:
        number = hint(value)
    except (ValueError, OverflowError):
        raise ValueError(f"must be {kind}, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"must be finite, got {value!r}")
    return number


def normalise(config: Any) -> None:
    """For `__post_init__`: passes every field through the reading rules, in place; UserError."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        try:
            value = coerce(field, hints[field.name], getattr(config, field.name))
        except ValueError as error:
            raise UserError(f"--{field.name} {error}") from None
        object.__setattr__(config, field.name, value)


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """The names that were probably meant: alike, holding it, or having its letters as initials."""

    def score(candidate: str) -> float:
        initials = "".join(word[0] for word in candidate.split("_"))
        part = len(name) > 1 and (name in candidate or name == initials)
        ratio = difflib.SequenceMatcher(None, name, candidate).ratio()
        return max(ratio, 0.8 if part else 0.0)

    scores = {candidate: score(candidate) for candidate in names}
    enough = max(0.6, max(scores.values()) - 0.05)
    return [candidate for candidate in names if scores[candidate] >= enough][:3]


def _suggest(
    name: str, names: Sequence[str], dashes: str, otherwise: str, hints: Mapping[str, str]
) -> str:
    if name in hints:
        return hints[name]
    guesses = [dashes + guess for guess in nearest(name.lower().replace("-", "_"), names)]
    return f"did you mean {' or '.join(guesses)}?" if guesses else otherwise


def read_command_line(
    cls: type,
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    groups: Mapping[str, str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the user gave on the command line, read, and nothing else; `--help` prints and exits.

    `groups` maps each group of `cls`'s fields to its description, in the order of the help;
    `elsewhere` what is said of other tools' options. Raises UserError for an option that is unknown
    or given twice, a missing value or a value of the wrong kind.
    """
    import tyro

    _check_repeated(argv)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    parts = []
    for group, text in groups.items():
        members = [
            (name, _tyro_annotation(field, hints[name]), None)
            for name, field in fields.items()
            if field.metadata["group"] == group
        ]
        part = dataclasses.make_dataclass(group, members, namespace={"__doc__": text})
        annotation = Annotated[part, tyro.conf.OmitArgPrefixes]
        parts.append((group, annotation, dataclasses.field(default_factory=part)))
    parsed, unknown = tyro.cli(
        dataclasses.make_dataclass("Options", parts),
        args=list(argv),
        prog=prog,
        description=description,
        return_unknown_args=True,
        use_underscores=True,
    )
    if unknown:
        raise UserError(_unknown_option(unknown[0], fields, hints, elsewhere))
    given = {}
    for group in groups:
        for name, tokens in vars(getattr(parsed, group)).items():
            if tokens is None:
                continue
            try:
                value = _value_of_tokens(fields[name], hints[name], tokens)
                given[name] = coerce(fields[name], hints[name], value)
            except ValueError as error:
                raise UserError(f"--{name} {error}") from None
    return given


def _check_repeated(argv: Sequence[str]) -> None:
    """Of an option that stands twice a parser keeps the last and drops what the first one asked."""
    names = [token.split("=")[0].replace("-", "_") for token in argv if token.startswith("--")]
    for name in names:
        if names.count(name) > 1:
            option = f"--{name.lstrip('_')}"
            raise UserError(f"{option} is given twice: write all its values behind one {option}")


def _unknown_option(
    token: str,
    fields: Mapping[str, dataclasses.Field],
    hints: Any,
    elsewhere: Mapping[str, str],
) -> str:
    name = token.split("=")[0]
    bare = name.lstrip("-").replace("-", "_")
    if not name.startswith("-"):
        config = f"; did you mean --config {name}?" if name.endswith((".yaml", ".yml")) else ""
        return f"unexpected argument {name!r}: every value follows its --option{config}"
    if bare.startswith("no_") and hints.get(bare[3:]) is bool:
        return f"unknown option {name}: write --{bare[3:]} false"
    suggestion = _suggest(bare, list(fields), "--", "see --help", elsewhere)
    return f"unknown option {name}: {suggestion}"


def _value_of_tokens(field: dataclasses.Field, hint: Any, tokens: list[str]) -> Any:
    if not tokens and (hint is bool or field.metadata["true_means"]):
        return True
    if not tokens:
        raise ValueError("needs a value")
    if get_origin(_required(hint)) in (tuple, Mapping):
        return tokens
    if len(tokens) > 1:
        for token in tokens:
            if token.startswith(("\u2013", "\u2014")):
                raise ValueError(f"is followed by {token!r}: an option begins with two hyphens, --")
        raise ValueError(f"takes one value, got {' '.join(tokens)!r}")
    return tokens[0]


def _tyro_annotation(field: dataclasses.Field, hint: Any) -> Any:
    """tyro hands over the raw words of an option; None stays where the option was not given."""
    import tyro
    from tyro.constructors import PrimitiveConstructorSpec

    words = PrimitiveConstructorSpec(
        nargs="*",
        metavar=field.metadata["metavar"] or _metavar(field, hint),
        instance_from_str=lambda tokens: tokens,
        is_instance=lambda value: value is None or isinstance(value, list),
        str_from_instance=lambda value: value or [],
    )
    shown = tyro.conf.arg(help=field.metadata["help"], help_behavior_hint=_default(field))
    return Annotated[list[str] | None, words, shown]


def _metavar(field: dataclasses.Field, hint: Any) -> str:
    hint = _required(hint)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return "{" + ",".join(("true", *choices) if field.metadata["true_means"] else choices) + "}"
    if get_origin(hint) is Mapping:
        return "NAME=VALUE ..."
    if get_origin(hint) is tuple:
        return (
            "NAME ..." if get_args(hint)[0] is str else f"{_metavar(field, get_args(hint)[0])} ..."
        )
    return {bool: "[BOOL]", int: "INT", float: "FLOAT", str: "TEXT"}[hint]


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "(required)"
    if isinstance(value, tuple):
        value = " ".join(value)
    elif isinstance(value, float):
        value = f"{value:g}"
    elif value is None or isinstance(value, bool):
        value = str(value).lower()
    return f"(default: {value})"


def read_yaml(
    cls: type, path: str | Path, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The options in a YAML file of `name: value` lines, read by the same rules.

    `elsewhere` is that of `read_command_line`.

    Raises UserError naming file, line and key: unreadable file, unknown or repeated key, a value
    of the wrong kind.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not UTF-8 text ({error.reason})") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: month 13, !!int x
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise UserError(f"{path}: must hold `option: value` lines")
    given: dict[str, Any] = {}
    unknown = [str(node.value) for node, _ in root.value if str(node.value) not in fields]
    for node, _ in root.value:
        key, where = str(node.value), f"{path}:{node.start_mark.line + 1}"
        if key not in fields:
            more = f"; also unknown: {', '.join(unknown[1:])}" if unknown[1:] else ""
            raise UserError(
                f"{where}: unknown key {key!r}: "
                + _suggest(key, list(fields), "", "--help lists the known ones", elsewhere)
                + more
            )
        if key in given:
            raise UserError(f"{where}: key {key!r} is given twice")
        try:
            given[key] = coerce(fields[key], hints[key], values[key])
        except ValueError as error:
            raise UserError(f"{where}: {key} {error}") from None
    return given


def make[T](cls: type[T], given: Mapping[str, Any]) -> T:
    """The config of these options; UserError where those that are required are not among them."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    missing = [
        f"--{field.name}"
        for field in fields
        if field.default is dataclasses.MISSING and field.name not in given
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} required; --help explains all options")
    return cls(**given)


def dump_yaml(config: Any) -> str:
    """The fields of a config as YAML that `read_yaml` reads back to the same values."""
    values = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(config)
        for value in (getattr(config, field.name),)
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
