"""Reading JSON and safetensors headers with one-line faults, and replacing files as a whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16, which safetensors' numpy side looks up by name
import numpy as np
from safetensors import safe_open

from jaxft.errors import UserError

_LFS_POINTER = b"version https://git-lfs"
_INCOMPLETE = "incomplete download?"
FLOAT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, its safetensors dtype name (`BF16`), its shape and bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    size: int


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises UserError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if path.read_bytes().startswith(_LFS_POINTER):
            raise UserError(f"{path}: is a git-lfs pointer; fetch it with 'git lfs pull'") from None
        raise UserError(f"{path}: no valid JSON ({error}); {_INCOMPLETE}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file, whose size must be what its header says.

    A memory-mapped file that is shorter than its header could read as zeros, so that is refused
    here. Format: 8 bytes little-endian length, that many bytes of JSON, then the data.
    """
    if not path.is_file():
        raise UserError(f"{path}: file does not exist; {_INCOMPLETE}")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head + file.read(len(_LFS_POINTER) - 8) == _LFS_POINTER:
            raise UserError(f"{path}: is a git-lfs pointer; fetch it with 'git lfs pull'")
        length = int.from_bytes(head, "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path}: safetensors header is cut off at {size} bytes; {_INCOMPLETE}")
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {}
        data = 0
        for name, entry in header.items():
            start, end = map(int, entry["data_offsets"])
            shape = tuple(entry["shape"])
            tensors[name] = TensorInfo(
                path, str(entry["dtype"]), shape, 8 + length + start, end - start
            )
            data = max(data, end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(f"{path}: no valid safetensors header; {_INCOMPLETE}") from None
    if size != 8 + length + data:
        raise UserError(
            f"{path}: has {size} bytes where its header says {8 + length + data}; {_INCOMPLETE}"
        )
    return tensors


def float_dtype(name: str, info: TensorInfo) -> np.dtype:
    """The dtype of a tensor of a safetensors file. Raises UserError where it is no float."""
    if info.dtype not in FLOAT_DTYPES:
        lacks = " without scales" if info.dtype == "F8_E4M3" else ""
        raise UserError(
            f"{info.path}: tensor {name} is stored as {info.dtype}{lacks}; "
            f"only {', '.join(FLOAT_DTYPES)} are read"
        )
    return FLOAT_DTYPES[info.dtype]


def read_float_tensor(name: str, info: TensorInfo) -> np.ndarray:
    """A tensor of a safetensors file in its stored float dtype. Raises UserError for another."""
    float_dtype(name, info)
    with safe_open(info.path, framework="numpy") as file:
        return file.get_tensor(name)


def check_size(name: str, info: TensorInfo, size: int) -> None:
    """UserError unless a tensor takes this many bytes."""
    if info.size != size:
        raise UserError(f"{info.path}: tensor {name} has {info.size} bytes instead of {size}")


def read_bytes(name: str, info: TensorInfo, size: int) -> np.ndarray:
    """The bytes of a tensor whatever its dtype, uint8 `[size]`. UserError where they are others."""
    check_size(name, info, size)
    return np.fromfile(info.path, np.uint8, size, offset=info.start)


@contextmanager
def replacing_files(folder: Path, last: str = "") -> Iterator[Path]:
    """A temporary folder whose files move into `folder` when the block ends without an exception.

    Each file is replaced as a whole; `last` moves last, so it stands for the others being there.
    A failure in the block leaves `folder` as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield temporary
        for file in sorted(temporary.iterdir(), key=lambda file: (file.name == last, file.name)):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new(folder: Path) -> None:
    """UserError unless the folder does not exist or is empty."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output folder {folder} is a file")
    if folder.is_dir() and (held := sorted(file.name for file in folder.iterdir())):
        raise UserError(f"output folder {folder} is not empty (it holds {held[0]}): name a new one")


@contextmanager
def new_folder(folder: Path, last: str) -> Iterator[Path]:
    """As `replacing_files`, into a folder that is new or empty and stays so after a failure.

    Raises:
      UserError: the folder is not empty, or the disk does not take the files.
    """
    check_new(folder)
    existed = folder.is_dir()  # perhaps the mount point of a container, which cannot be renamed
    try:
        with replacing_files(folder, last) as temporary:
            yield temporary
    except BaseException as fault:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(fault, OSError):
            raise UserError(f"{folder} cannot be written: {fault}") from fault
        raise
