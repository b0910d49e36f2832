"""A GGUF file, seen as a Hugging Face checkpoint.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read through the `gguf` package,
memory-mapped; names, layout, RoPE convention and norms are turned into Hugging Face's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import ReaderTensor

from jaxft.errors import UserError
from jaxft.formats.gguf_config import ROPE_FACTORS, Metadata, build_config
from jaxft.formats.gguf_tensors import PLAIN, open_reader, values
from jaxft.formats.gguf_tokenizer import build_tokenizer
from jaxft.formats.loading import tensor_shapes
from jaxft.model.families import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# llama.cpp rotates neighbouring pairs in this architecture alone, halves in the others.
_PERMUTED = "llama"


class GgufFile:
    """`Checkpoint` of one GGUF file. Opening reads the metadata and checks every tensor's entry.

    Raises UserError for a file that is missing, cut off or split, another architecture, metadata
    or tensors that are missing, and tensors or metadata that are not understood.
    """

    generation_config: dict[str, Any] | None = None

    def __init__(self, path: Path | str, source: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.source = str(path) if source is None else source
        reader = open_reader(self.path)
        self._fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        metadata = Metadata(self._fields, self.path)
        if self._fields.get("split.count", 1) > 1:
            raise UserError(
                f"{self.path}: is one part of a split file; join the parts first (gguf-split "
                "--merge of llama.cpp)"
            )
        stored = {tensor.name: tensor for tensor in reader.tensors}
        self.config = build_config(metadata, self._fields, stored)
        self._permuted = metadata.architecture == _PERMUTED
        try:
            model = read_config(self.config)
        except UserError as fault:
            raise UserError(f"{self.path}: {fault}") from None
        self._norm_offset = model.norm_offset
        self._tensors = self._map_names(stored, metadata, tensor_shapes(model))

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return frozenset(self._tensors)

    def stored_name(self, name: str) -> str:
        """Hugging Face's name itself."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in Hugging Face's order; GGUF stores the fastest axis first."""
        return _shape(self._tensors[name])

    def dtype(self, name: str) -> np.dtype | None:
        """Dtype of `read`, None for a quantised type."""
        if self._is_shifted(name):
            return np.dtype(np.float32)
        return PLAIN.get(self._tensors[name].tensor_type)

    def read(self, name: str) -> np.ndarray:
        """One tensor; F32, F16 and BF16 as stored, other types dequantised to float32.

        Norms whose scale is an offset from 1 in Hugging Face's model (Gemma) come as float32: the
        converter adds the 1 in that type. Taking it away is exact for scales from 0.5 on, and so
        the decoder, which adds it again, has the very scale that the file holds.
        """
        module, _, _ = name.rpartition(".")
        heads = None
        if self._permuted and module.endswith(("q_proj", "k_proj")):
            kind = "attention" if module.endswith("q_proj") else "key_value"
            heads = self.config[f"num_{kind}_heads"]
        value = values(self._tensors[name], heads)
        if self._is_shifted(name):
            return value.astype(np.float32) - np.float32(self._norm_offset)
        return value

    def nf4(self, name: str) -> None:
        """None: GGUF has no such type."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that the file's `tokenizer.*` metadata describe."""
        return build_tokenizer(
            self._fields,
            self.path,
            vocab_size=self.config["vocab_size"],
            max_length=self.config["max_position_embeddings"],
        )

    def _is_shifted(self, name: str) -> bool:
        return self._norm_offset != 0 and name.endswith("norm.weight")

    def _map_names(
        self,
        stored: dict[str, ReaderTensor],
        metadata: Metadata,
        shapes: dict[str, tuple[int, ...]],
    ) -> dict[str, ReaderTensor]:
        """The file's tensors by Hugging Face's names, which must be those of `shapes`."""
        found = {}
        places = _places(metadata.architecture, self.config["num_hidden_layers"], shapes)
        for place, name in places.items():
            if place not in stored:
                missing = len(places.keys() - stored.keys())
                raise UserError(
                    f"{self.path}: tensor {place} ({name}) is missing ({missing} in all)"
                )
            if _shape(stored[place]) != shapes[name]:
                raise UserError(
                    f"{self.path}: tensor {place} has shape {_shape(stored[place])}, the metadata "
                    f"ask for {shapes[name]}"
                )
            found[name] = stored[place]
        known = {ROPE_FACTORS} if self._permuted else set()
        for extra in sorted(stored.keys() - places.keys() - known):
            layer = re.match(r"blk\.(\d+)\.", extra)
            if layer and int(layer[1]) >= self.config["num_hidden_layers"]:
                raise UserError(
                    f"{self.path}: tensor {extra} lies past the "
                    f"{self.config['num_hidden_layers']} layers of {metadata.name('block_count')}"
                )
            raise UserError(
                f"{self.path}: tensor {extra} has no place in a {self.config['model_type']} model"
            )
        return found


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _places(architecture: str, layers: int, names: dict[str, Any]) -> dict[str, str]:
    """Hugging Face's names by GGUF's, as the gguf package pairs them for an architecture."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    paired = gguf.get_tensor_name_map(arch, layers)
    places = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        places[f"{paired.get_name(module)}.{kind}"] = name
    return places
