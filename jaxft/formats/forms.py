"""In which form the device keeps each tensor of a checkpoint, known from the headers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.errors import UserError
from jaxft.formats.bitsandbytes import StoredNF4
from jaxft.formats.weights import Checkpoint
from jaxft.model.config import ModelConfig
from jaxft.quant import Dense, Storage
from pallas_kernels.nf4 import quantize


def stored_codes(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, StoredNF4]:
    """The projections that the checkpoint holds as NF4 already, by module path."""
    found = {path: checkpoint.nf4(f"{path}.weight") for path in model.module_paths}
    return {path: stored for path, stored in found.items() if stored is not None}


def check_scales(checkpoint: Checkpoint, model: ModelConfig, nested: bool) -> None:
    """Stored codes keep their scales: of a base with nested ones, plain ones cannot be had.

    Raises:
      UserError: they are asked for.
    """
    if nested:
        return
    for path, stored in stored_codes(checkpoint, model).items():
        if stored.nested:
            raise UserError(
                f"--use_bnb_nested_quant false: the checkpoint's {path} is NF4 with double "
                "quantisation and keeps it; leave the option out"
            )


@dataclass(frozen=True)
class Forms:
    """A checkpoint's tensors as a `Storage` keeps them.

    With `load_in_4bit` all projections are quantised. But where the checkpoint holds NF4 codes
    already, those are kept to the bit, and what its maker left in more bits stays dense: such a
    checkpoint says itself which layers bear 4 bits. Without `load_in_4bit` what is stored quantised
    is dequantised to the dtype of the arithmetic, to which it would be rounded at use anyway.

    Attributes:
      checkpoint: whose tensors they are.
      storage: what the user chose.
      as_stored: whether the checkpoint's own choice of 4-bit layers stands.
    """

    checkpoint: Checkpoint
    storage: Storage
    as_stored: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: ModelConfig, storage: Storage) -> "Forms":
        """For the projections of this model."""
        return cls(
            checkpoint, storage, storage.load_in_4bit and bool(stored_codes(checkpoint, model))
        )

    def read(self, name: str, matrix: bool) -> Any:
        """A tensor: a `Weight` where it is the matrix of a projection, else an array."""
        stored = self.checkpoint.nf4(name) if matrix and self.as_stored else None
        if stored is not None:
            return stored.codes()
        return self._form(name, matrix)(jnp.asarray(self.checkpoint.read(name)))

    def abstract(self, name: str, matrix: bool) -> Any:
        """The same without values, for `jax.eval_shape`: nothing is read."""
        stored = self.checkpoint.nf4(name) if matrix and self.as_stored else None
        if stored is not None:
            dense = jax.ShapeDtypeStruct(stored.shape, jnp.float32)
            return jax.eval_shape(partial(quantize, nested=stored.nested), dense)
        dtype = self.checkpoint.dtype(name) or np.float32
        dense = jax.ShapeDtypeStruct(self.checkpoint.shape(name), dtype)
        return jax.eval_shape(self._form(name, matrix), dense)

    def _form(self, name: str, matrix: bool) -> Callable[[jax.Array], Any]:
        storage = self.storage
        quantised = self.checkpoint.dtype(name) is None

        def form(array: jax.Array) -> Any:
            if matrix and storage.load_in_4bit and not self.as_stored:
                return storage.matrix(array)
            if quantised and not storage.load_in_4bit:
                array = array.astype(storage.compute)
            array = storage.other(array)
            return Dense(array) if matrix else array

        return form
