"""Sources of rows: a data set's name, the split and configuration of it, and the rows they mean."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxft.data.files import read_rows
from jaxft.data.places import TRAIN, Place, find
from jaxft.data.rows import Row
from jaxft.data.splits import split_names, take
from jaxft.errors import UserError


@dataclass(frozen=True)
class Source:
    """Rows that are known to be there and not read yet.

    name: as the user gave it. files: those of each split that the expression `split` needs.
    labels: how origins call each file.
    """

    name: str
    split: str
    files: Mapping[str, Sequence[Path]]
    labels: Mapping[Path, str]

    @property
    def title(self) -> str:
        """Name in few letters: the file's own where it is one."""
        files = [file for members in self.files.values() for file in members]
        return files[0].name if len(files) == 1 else self.name

    def whole_files(self) -> set[Path]:
        """Files whose every row is taken; none where the split is an expression."""
        return {file.resolve() for file in self.files.get(self.split, ())}

    def read(self) -> list[Row]:
        """The rows, in order; UserError naming file and row. Each file is read once."""
        rows = {
            split: [row for file in files for row in read_rows(file, self.labels[file])]
            for split, files in self.files.items()
        }
        taken = take(self.split, rows)
        if not taken:
            raise UserError(f"data set {self.name!r}: split {self.split!r} holds no row")
        return taken


def open_sources(
    names: Sequence[str],
    splits: Sequence[str],
    configurations: Sequence[str | None] = (None,),
    *,
    also: str = TRAIN,
) -> list[Source]:
    """The sources of a run.

    Splits and configurations: one for all, or one for each name. `also`: another name of the one
    split that a single file or a glob is. Raises UserError for what is not there; every name is
    looked up before any row is read.
    """
    places = [
        find(name, configuration)
        for name, configuration in zip(names, _each(configurations, len(names)), strict=True)
    ]
    expressions = _each(splits, len(names))
    files = [
        {split: _files(name, split, place, also) for split in split_names(expression)}
        for name, expression, place in zip(names, expressions, places, strict=True)
    ]
    labels = _labels(places, files)
    return [
        Source(name, expression, of_splits, labels)
        for name, expression, of_splits in zip(names, expressions, files, strict=True)
    ]


def _each[T](values: Sequence[T], count: int) -> list[T]:
    if len(values) not in (1, count):
        raise ValueError(f"{len(values)} values for {count} sources")
    return list(values) * (count if len(values) == 1 else 1)


def _files(name: str, split: str, place: Place, also: str) -> Sequence[Path]:
    if place.single and split == also:
        split = TRAIN
    if split in place.splits:
        return place.splits[split]
    if place.single:
        raise UserError(
            f"data set {name!r} is one split, {also}: it has no {split!r}; leave the split at "
            f"{also} or a slice of it"
        )
    raise UserError(
        f"data set {name!r} has no split {split!r}; its splits: {', '.join(place.splits)}"
    )


def _labels(
    places: Sequence[Place], files: Sequence[Mapping[str, Sequence[Path]]]
) -> dict[Path, str]:
    """Short names of all files, whole ones where two files have the same."""
    whole = {
        file: place.label(file)
        for place, of_splits in zip(places, files, strict=True)
        for members in of_splits.values()
        for file in members
    }
    alike = Counter(file.name for file in whole)
    return {file: label if alike[file.name] > 1 else file.name for file, label in whole.items()}
