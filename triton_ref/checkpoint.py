"""The tensors of a Hugging Face folder, one at a time, by the names of its text model."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from triton_ref.kernels.nf4 import NF4, STATE, from_bitsandbytes
from triton_ref.names import text_path


class Folder:
    """Safetensors files of a model, plain or NF4 by bitsandbytes."""

    def __init__(self, path: Path):
        """Opens the files that the index names, else model.safetensors.

        Raises:
          FileNotFoundError: a file that is not there.
        """
        index = path / "model.safetensors.index.json"
        if index.exists():
            places = json.loads(index.read_text())["weight_map"]
            files = {f: safe_open(path / f, framework="pt") for f in sorted(set(places.values()))}
            found = {key: files[place] for key, place in places.items()}
        else:
            file = safe_open(path / "model.safetensors", framework="pt")
            found = dict.fromkeys(file.keys(), file)
        self._files = {text_path(key): (file, key) for key, file in found.items()}

    @property
    def quantized(self) -> bool:
        """Whether it holds NF4 codes."""
        return any(name.endswith(STATE) for name in self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def dense(self, name: str) -> torch.Tensor:
        """A tensor as stored, on the CPU.

        Raises:
          KeyError: the folder does not have it.
        """
        file, key = self._files[name]
        return file.get_tensor(key)

    def matrix(self, name: str) -> torch.Tensor | NF4:
        """A projection's weight: its codes where it is quantised, else the tensor."""
        if name + STATE not in self._files:
            return self.dense(name)
        parts = [key for key in self._files if key == name or key.startswith(f"{name}.")]
        return from_bitsandbytes({key: self.dense(key) for key in parts}, name)
