"""A Hugging Face model folder: config.json, safetensors (one file or shards), tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxft.errors import UserError
from jaxft.formats.bitsandbytes import StoredNF4, find_nf4
from jaxft.formats.files import (
    TensorInfo,
    float_dtype,
    read_float_tensor,
    read_json,
    read_safetensors_header,
)
from jaxft.formats.fp8 import StoredFP8, find_fp8
from jaxft.formats.hub_names import advice
from jaxft.formats.tokenizers import folder_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HuggingFaceFolder:
    """`Checkpoint` of a model folder. Opening it reads and checks every header, no weight.

    Weights that bitsandbytes stored as NF4 and fp8 weights with scales are one tensor each, whose
    scales are no tensors of their own.

    Raises UserError, naming file and tensor, for a folder that is missing, incomplete or damaged,
    that holds only an adapter or only pickled weights, or whose weights are quantised otherwise.
    """

    def __init__(self, path: Path | str, source: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.source = str(path) if source is None else source
        if not self.path.is_dir():
            raise UserError(f"model folder does not exist: {self.path}{advice(self.source)}")
        self.config = _read_config(self.path)
        generation = self.path / "generation_config.json"
        self.generation_config: dict[str, Any] | None = (
            read_json(generation) if generation.is_file() else None
        )
        self._tensors = _locate(self.path)
        self._quantised: dict[str, StoredNF4 | StoredFP8] = {
            **find_nf4(self._tensors),
            **find_fp8(self._tensors, self.config.get("quantization_config")),
        }
        for stored in self._quantised.values():
            for side in stored.sides:
                del self._tensors[side]
        self._stored = {_module_name(name): name for name in self._tensors}

    def names(self) -> frozenset[str]:
        """Names of all tensors, as transformers' model has them."""
        return frozenset(self._stored)

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the folder's files."""
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, of a quantised tensor that of the weights it stands for."""
        stored = self._stored[name]
        return (self._quantised.get(stored) or self._tensors[stored]).shape

    def dtype(self, name: str) -> np.dtype | None:
        """Stored dtype from the header, None for NF4 and fp8."""
        stored = self._stored[name]
        return None if stored in self._quantised else float_dtype(stored, self._tensors[stored])

    def read(self, name: str) -> np.ndarray:
        """One tensor, memory-mapped and copied; NF4 and fp8 as the float32 they stand for."""
        stored = self._stored[name]
        if stored in self._quantised:
            return self._quantised[stored].dense()
        return read_float_tensor(stored, self._tensors[stored])

    def nf4(self, name: str) -> StoredNF4 | None:
        """What a tensor holds where it is stored as NF4."""
        stored = self._quantised.get(self._stored[name])
        return stored if isinstance(stored, StoredNF4) else None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of tokenizer.json with the folder's special tokens and chat template."""
        return folder_tokenizer(self.path)


# Files of models with a vision part name tensors by an older structure of those models.
_RENAMED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def _module_name(stored: str) -> str:
    """A tensor's name in transformers' model, from the one in the files."""
    for old, new in _RENAMED:
        if stored.startswith(old):
            return new + stored.removeprefix(old)
    return stored


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder}: holds a PEFT adapter, not a model; give the base model it belongs to "
                "(base_model_name_or_path in its adapter_config.json)"
            )
        raise UserError(f"{folder}: has no config.json, so it is not a model folder")
    config = read_json(path)
    quantization = config.get("quantization_config")
    if quantization and not _is_known(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method == "bitsandbytes":
            method = "bitsandbytes with 8 bits"
        raise UserError(
            f"{path}: the weights are already quantised ({method or quantization}); of quantised "
            "ones only bitsandbytes NF4 and fp8 with scales are read, give the 16- or 32-bit model"
        )
    return config


def _is_known(quantization: Any) -> bool:
    """Whether weights of this kind may be read; which are quantised, the tensors tell."""
    if not isinstance(quantization, dict):
        return False
    # bitsandbytes' first configurations do not name it
    method = quantization.get("quant_method", "bitsandbytes")
    return method == "fp8" or (method == "bitsandbytes" and bool(quantization.get("load_in_4bit")))


def _locate(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's weight files; files beside them are ignored."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return _locate_sharded(index)
    if single.is_file():
        return read_safetensors_header(single)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    if any(name.endswith(".safetensors") for name in others):
        raise UserError(
            f"{folder}: has {others[-1]} but neither {SINGLE} nor {INDEX}; incomplete download?"
        )
    if others:
        raise UserError(
            f"{folder}: holds only {others[0]}; pickled weights are not read, "
            f"save the model as safetensors (save_pretrained in transformers does)"
        )
    raise UserError(f"{folder}: has no weights ({SINGLE} or {INDEX}); incomplete download?")


def _locate_sharded(index: Path) -> dict[str, TensorInfo]:
    """The union of the shards named by the index; where a tensor is twice, the index decides."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index}: weight_map must give the name of a file for each tensor")
    shards = sorted(set(weight_map.values()))
    if (index.parent / SINGLE).is_file() and SINGLE not in shards:
        raise UserError(
            f"{index.parent}: holds both {SINGLE} and {INDEX}, which does not name it; remove one"
        )
    headers = {shard: read_safetensors_header(index.parent / shard) for shard in shards}
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise UserError(
                f"{index.parent / shard}: tensor {name} is missing, though {INDEX} places it there"
            )
        tensors[name] = headers[shard][name]
    for shard in shards:
        for name, info in headers[shard].items():
            if name not in weight_map and tensors.setdefault(name, info) is not info:
                raise UserError(
                    f"{index.parent}: tensor {name} is in {tensors[name].path.name} and in {shard} "
                    f"and {INDEX} does not say which counts"
                )
    return tensors
