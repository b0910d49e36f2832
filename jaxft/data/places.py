"""Which files a data set's name means: a file, a folder, a glob, or a data set of the hub.

A folder is one that `datasets.save_to_disk` wrote, or is read as `datasets.load_dataset` reads it:
the package decides which files belong to which split, by their names or the configurations in the
folder's README.md. It reads no cell of them.
"""

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxft.data.files import ACCEPTED, PATTERNS, format_of
from jaxft.errors import UserError
from jaxft.formats.files import read_json
from jaxft.formats.hub_names import HUB_ID, advice

TRAIN = "train"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
# Keys of a configuration that say nothing about how its files are read.
_HARMLESS = {"data_files", "data_dir", "default", "description", "version"}


@dataclass(frozen=True)
class Place:
    """Files of each split, in order.

    single: there is one split, which has no name of its own and goes by `TRAIN`. root: what stands
    before the files' own paths, for messages; the hub's name instead of its cache.
    """

    splits: Mapping[str, list[Path]]
    single: bool = False
    root: tuple[Path, str] | None = None

    def label(self, path: Path) -> str:
        """The file's whole name, as the user would say it."""
        if self.root is None:
            return str(path)
        return f"{self.root[1].rstrip('/')}/{path.relative_to(self.root[0]).as_posix()}"


def find(name: str, configuration: str | None = None) -> Place:
    """Files of the data set `name`; UserError, one line, where there are none.

    What exists comes before a glob, and a glob before the hub. `configuration`: one of those that
    a folder or hub data set has; "default" is the one that everything has.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return _folder(path, name, configuration)
    revision = None
    if not os.path.isfile(path):
        repo_id, _, revision = name.partition("@")
        if _is_hub_id(repo_id):
            return _hub(repo_id, revision or None, name, configuration)
    if configuration not in (None, "default"):
        raise UserError(f"{name} has no configuration {configuration!r} (--dataset_config)")
    if os.path.isfile(path):
        return Place({TRAIN: [path]}, single=True)
    if not glob.has_magic(name):
        raise UserError(f"data set {name!r}: no file or folder {path.absolute()}{advice(name)}")
    found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in found if file.is_file()]
    if not files:
        raise UserError(f"data set {name!r}: the pattern {path.absolute()} matches no file")
    return Place({TRAIN: files}, single=True)


def _is_hub_id(name: str) -> bool:
    """Whether a name is one of the hub's; train.jsonl and data/train.csv are files not found."""
    if format_of(Path(name)) is not None:
        return False
    return HUB_ID.fullmatch(name) is not None


def _hub(repo_id: str, revision: str | None, name: str, configuration: str | None) -> Place:
    from jaxft.formats.hub import download

    folder = download(repo_id, revision, "dataset", ["README.md", *PATTERNS])
    return _folder(folder, name, configuration)


def _folder(folder: Path, name: str, configuration: str | None) -> Place:
    folder = folder.resolve()
    saved = _saved(folder)
    if saved is not None:
        if configuration not in (None, "default"):
            raise UserError(f"{name} has no configuration {configuration!r} (--dataset_config)")
        return Place(saved, single=(folder / "state.json").is_file(), root=(folder, name))
    splits = _as_load_dataset(folder, name, configuration)
    for split, files in splits.items():
        formats = sorted({format_of(file)[0] for file in files})  # type: ignore
        if len(formats) > 1:
            raise UserError(
                f"data set {name!r}: split {split!r} has files of several formats "
                f"({', '.join(formats)}), perhaps of the same rows; name those to train on by a "
                "glob such as 'folder/*.jsonl'"
            )
        _check_shards(files, name)
    return Place(splits, root=(folder, name))


def _saved(folder: Path) -> dict[str, list[Path]] | None:
    """Files of a folder that `save_to_disk` wrote; None if it is no such folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise UserError(f"{folder / 'dataset_dict.json'}: lists no splits")
        return {str(split): _shards(folder / str(split)) for split in splits}
    return {TRAIN: _shards(folder)} if (folder / "state.json").is_file() else None


def _shards(folder: Path) -> list[Path]:
    path = folder / "state.json"
    state = read_json(path)
    if state.get("_indices_data_files"):
        raise UserError(f"{path}: holds a selection of rows apart; save the data set once more")
    try:
        return [folder / file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: does not list the files of a saved data set") from error


def _check_shards(files: Iterable[Path], name: str) -> None:
    """UserError where one of the files that name their number is missing."""
    numbers: dict[tuple[str, ...], set[int]] = {}
    for file in files:
        if shard := _SHARD.fullmatch(str(file)):
            before, number, count, behind = shard.groups()
            numbers.setdefault((before, count, behind), set()).add(int(number))
    for (before, count, behind), found in numbers.items():
        missing = sorted(set(range(int(count))) - found)
        if missing:
            file = f"{Path(before).name}-{missing[0]:05}-of-{count}{behind}"
            raise UserError(
                f"data set {name!r}: {len(missing)} of {int(count)} files are missing, the first "
                f"is {file}; incomplete download? Name the files by a glob to do without them"
            )


def _as_load_dataset(folder: Path, name: str, configuration: str | None) -> dict[str, list[Path]]:
    """Files of each split as `datasets.load_dataset(folder, configuration)` finds them."""
    try:
        from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns
    except ImportError:
        raise UserError(
            f"data set {name!r}: a folder needs the package datasets (pip install datasets); or "
            "name its files"
        ) from None
    chosen = _configuration(folder, name, configuration)
    base = folder / str(chosen.get("data_dir") or "")
    escaped = glob.escape(str(base))
    try:
        given = chosen.get("data_files")
        patterns = get_data_patterns(escaped) if given is None else sanitize_patterns(given)
        remote = [each for split in patterns.values() for each in split if "://" in each]
        if remote:
            raise UserError(f"{folder / 'README.md'}: names files elsewhere ({remote[0]})")
        matches = DataFilesDict.from_patterns(patterns, base_path=escaped)
    except (OSError, ValueError) as error:  # no file at all, or not the ones that README.md names
        if not isinstance(error, FileNotFoundError):
            raise UserError(f"data set {name!r}: {' '.join(str(error).split())}") from error
        matches = {}
    splits: dict[str, list[Path]] = {}
    for split, paths in matches.items():
        found = dict.fromkeys(map(os.path.normpath, paths))  # two patterns may match one file
        files = [Path(path) for path in found if format_of(Path(path)) is not None]
        outside = next((file for file in files if not file.is_relative_to(folder)), None)
        if outside is not None:
            raise UserError(f"{folder / 'README.md'}: names a file outside, {outside}")
        if files:
            splits[str(split)] = files
    if not splits:
        held = sorted(file.name for file in base.iterdir())[:4] if base.is_dir() else []
        raise UserError(
            f"data set {name!r}: {base} holds no data file (it holds: "
            f"{', '.join(held) or 'nothing'}); accepted are {ACCEPTED}"
        )
    return splits


def _configuration(folder: Path, name: str, wanted: str | None) -> Mapping[str, Any]:
    """Parameters of the configuration that is meant, from the head of the folder's README.md."""
    readme = folder / "README.md"
    try:
        found = _configurations(readme)
        default = found.get_default_config_name()
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{readme}: its configurations cannot be read ({reason})") from error
    chosen = default if wanted in (None, "default") and wanted not in found else wanted
    if not found and chosen is None:
        return {}
    if chosen not in found:
        problem = f"has no configuration {wanted!r}" if wanted else "has several configurations"
        raise UserError(
            f"data set {name!r} {problem}: name one by --dataset_config, of "
            f"{', '.join(found) or 'default'}"
        )
    unknown = found[chosen].keys() - _HARMLESS
    if unknown:
        raise UserError(
            f"{readme}: configuration {chosen!r} sets {', '.join(sorted(unknown))}, which is not "
            "supported; name the files by a glob"
        )
    return found[chosen]


def _configurations(readme: Path) -> Any:
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData, metadata_load

    head = metadata_load(readme) if readme.is_file() else None
    return MetadataConfigs.from_dataset_card_data(DatasetCardData(**(head or {})))
