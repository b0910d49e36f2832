"""Weights that bitsandbytes stored as NF4: which of a folder's tensors they are, and their codes.

Beside the codes of `X.weight` lie tensors named after it: `.absmax`, `.quant_map`, with double
quantisation `.nested_absmax` and `.nested_quant_map`, and as JSON in bytes
`.quant_state.bitsandbytes__nf4`. A weight is NF4 where the last one is there, whatever config.json
says. Layout as bitsandbytes writes it since 0.41, read in its 0.50: the flat row-major matrix, two
codes a byte, the earlier weight in the high nibble, which is that of `pallas_kernels.nf4` too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxft.errors import UserError
from jaxft.formats.files import TensorInfo, check_size, read_bytes
from pallas_kernels.nf4 import (
    BLOCK_SIZE,
    NESTED_BLOCK_SIZE,
    NF4,
    NF4_CODE,
    codes_shape,
    dequantize,
    nested_code,
    num_blocks,
)

_KIND = ".quant_state.bitsandbytes__"
_STATE = _KIND + "nf4"
_PLAIN = {"quant_type": "nf4", "blocksize": BLOCK_SIZE}
_NESTED = {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32"}


@dataclass(frozen=True)
class StoredNF4:
    """A weight in a file as NF4.

    Attributes:
      name: of the weight in the file.
      shape: (out, in).
      offset: added to the nested scales; None where the scales are float32.
      parts: the tensors it consists of, by what follows its name.
    """

    name: str
    shape: tuple[int, int]
    offset: float | None
    parts: Mapping[str, TensorInfo]

    @property
    def nested(self) -> bool:
        """Whether the scales are quantised too."""
        return self.offset is not None

    @property
    def sides(self) -> list[str]:
        """Names of the tensors beside the codes."""
        return [self.name + part for part in self.parts if part]

    def codes(self) -> NF4:
        """The codes and scales, as they are in the file."""
        codes = jnp.asarray(self._read("", math.ceil(math.prod(self.shape) / 2)))
        codes = codes.reshape(codes_shape(self.shape))
        blocks = num_blocks(self.shape)
        if self.offset is None:
            return NF4(codes, self._floats(".absmax", blocks), None, None, self.shape)
        return NF4(
            codes,
            jnp.asarray(self._read(".absmax", blocks)),
            self._floats(".nested_absmax", math.ceil(blocks / NESTED_BLOCK_SIZE)),
            jnp.float32(self.offset),
            self.shape,
        )

    def dense(self) -> np.ndarray:
        """The weights that they stand for, float32 `[out, in]`."""
        return np.asarray(dequantize(self.codes(), jnp.float32))

    def check(self) -> None:
        """UserError where the tensors do not fit each other, or use another code than NF4's."""
        blocks, nested = num_blocks(self.shape), self.nested
        sizes = {
            "": math.ceil(math.prod(self.shape) / 2),
            ".absmax": blocks * (1 if nested else 4),
            ".quant_map": 16 * 4,
        }
        if nested:
            sizes[".nested_absmax"] = math.ceil(blocks / NESTED_BLOCK_SIZE) * 4
            sizes[".nested_quant_map"] = 256 * 4
        for part, size in sizes.items():
            if part not in self.parts:
                raise UserError(
                    f"{self.parts[_STATE].path}: tensor {self.name}{part} is missing, though "
                    f"{self.name}{_STATE} is there; incomplete download?"
                )
            check_size(self.name + part, self.parts[part], size)
        self._compare(".quant_map", np.array(NF4_CODE, np.float32))
        if nested:
            self._compare(".nested_quant_map", nested_code())

    def _compare(self, part: str, code: np.ndarray) -> None:
        """A code must be NF4's; in the last place versions of bitsandbytes round differently.

        The kernels have their own code books, so a weight may move by that last place.
        """
        held = self._read(part, 4 * code.size).view(np.float32)
        if not np.allclose(held, code, rtol=3e-7, atol=0):
            raise UserError(
                f"{self.parts[part].path}: tensor {self.name}{part} is not the code of NF4; "
                "weights that were quantised with another one are not supported"
            )

    def _read(self, part: str, size: int) -> np.ndarray:
        return read_bytes(self.name + part, self.parts[part], size)

    def _floats(self, part: str, count: int):
        return jnp.asarray(self._read(part, 4 * count).view(np.float32))


def find_nf4(tensors: Mapping[str, TensorInfo]) -> dict[str, StoredNF4]:
    """The weights among a folder's tensors that are stored as NF4, by name, checked.

    Raises:
      UserError: a tensor of theirs that is missing, of the wrong size or of another format.
    """
    found = {}
    for name, info in tensors.items():
        weight, kind, suffix = name.partition(_KIND)
        if kind:
            if suffix != "nf4":
                raise UserError(
                    f"{info.path}: tensor {weight} is quantised as {suffix} by bitsandbytes; only "
                    "nf4 is read, give the 16- or 32-bit model"
                )
            found[weight] = _open(weight, tensors)
    for name, info in tensors.items():
        weight = name.removesuffix(".absmax")
        if weight != name and weight not in found:
            raise UserError(
                f"{info.path}: tensor {weight}{_STATE} is missing, though {name} is there; "
                "incomplete download?"
            )
    return found


def _open(name: str, tensors: Mapping[str, TensorInfo]) -> StoredNF4:
    info = tensors[name + _STATE]
    state = _read_state(name + _STATE, info)
    nested = "nested_offset" in state
    parts = ("", ".absmax", ".quant_map", _STATE)
    parts += (".nested_absmax", ".nested_quant_map") if nested else ()
    held = {part: tensors[name + part] for part in parts if name + part in tensors}
    stored = StoredNF4(name, tuple(state["shape"]), state.get("nested_offset"), held)
    stored.check()
    return stored


def _read_state(name: str, info: TensorInfo) -> dict[str, Any]:
    """The JSON of a quant_state. Raises UserError for a format that the kernels do not have."""
    try:
        state = json.loads(read_bytes(name, info, info.size).tobytes())
    except ValueError as error:
        raise UserError(f"{info.path}: tensor {name} holds no JSON ({error})") from None
    if not isinstance(state, dict):
        raise UserError(f"{info.path}: tensor {name} holds {state!r} instead of an object")
    for key, value in (_PLAIN | (_NESTED if "nested_offset" in state else {})).items():
        if state.get(key) != value:
            raise UserError(
                f"{info.path}: tensor {name}: {key} {state.get(key)!r} is not supported, only "
                f"{value!r}"
            )
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    if not (
        isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)
    ):
        raise UserError(f"{info.path}: tensor {name}: shape {shape!r} is not that of a matrix")
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise UserError(f"{info.path}: tensor {name}: nested_offset {offset!r} is no number")
    return state
