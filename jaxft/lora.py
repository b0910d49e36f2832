"""LoRA adapters: which projections get one, how they start, and how they are scaled."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft.errors import UserError
from jaxft.model.decoder import Decoder
from jaxft.model.layer import Group
from jaxft.model.linear import Linear
from jaxft.model.variables import Frozen
from jaxft.quant import Adapter


@dataclass(frozen=True)
class LoraConfig:
    """The adapters' shape, under PEFT's names. `target_modules` are projections' own names."""

    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...]
    use_rslora: bool

    @property
    def scale(self) -> float:
        """Factor on `B @ A`: alpha / r, or alpha / sqrt(r) with rank stabilisation."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class Lora(nnx.Module):
    """The adapters of one projection in a group of layers; the leading axis is layers."""

    def __init__(self, a: jax.Array, b: jax.Array, scale: jax.Array, dropout: float, salt: int):
        self.lora_A = nnx.LoRAParam(a)
        self.lora_B = nnx.LoRAParam(b)
        self.scale = Frozen(scale)
        self.dropout = dropout
        self.salt = salt  # tells this projection's dropout masks from its neighbours'

    def value(self) -> Adapter:
        """The arrays, as the linear layer takes them."""
        return Adapter(
            self.lora_A.get_value(), self.lora_B.get_value(), self.scale.get_value(), self.dropout
        )


def add_adapters(decoder: Decoder, config: LoraConfig, seed: int) -> None:
    """Put an adapter on every targeted projection: A uniform in ±1/sqrt(in) as PEFT does, B zero.

    Raises:
      UserError: a target that the model does not have.
    """
    found = {name for name, _, _ in _projections(decoder)}
    for target in config.target_modules:
        if target not in found:
            raise UserError(
                f"lora_target_modules: the model has no projection {target!r}; "
                f"it has {', '.join(sorted(found))}"
            )
    root = jax.random.key(seed)
    for name, group, linear in _projections(decoder):
        if name not in config.target_modules:
            continue
        salt = zlib.crc32(name.encode())
        key = jax.random.fold_in(jax.random.fold_in(root, salt), group.first)
        bound = 1 / math.sqrt(linear.in_features)
        a_shape = (group.size, config.r, linear.in_features)
        a = jax.random.uniform(key, a_shape, jnp.float32, -bound, bound)
        b = jnp.zeros((group.size, linear.out_features, config.r), jnp.float32)
        scale = jnp.full(group.size, config.scale, jnp.float32)
        linear.adapter = Lora(a, b, scale, config.lora_dropout, salt)


def adapter_arrays(decoder: Decoder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each adapted module of the model, by its path in transformers, with float32 A and B."""
    arrays = {}
    for path, group, linear in _paths(decoder):
        if linear.adapter is None:
            continue
        a, b = (np.asarray(x.get_value()) for x in (linear.adapter.lora_A, linear.adapter.lora_B))
        for i in range(group.size):
            arrays[f"model.layers.{group.first + i}.{path}"] = (a[i], b[i])
    return dict(sorted(arrays.items(), key=lambda item: _natural(item[0])))


def set_adapter_arrays(decoder: Decoder, arrays: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Fill the model's adapters, which `add_adapters` made, with these A and B.

    Raises:
      UserError: an adapter without a place in the model, a place without one, or another shape.
    """
    own = adapter_arrays(decoder)
    for name in sorted(own.keys() ^ arrays.keys()):
        where = "the adapter" if name in arrays else "the model's adapters"
        raise UserError(f"{name} is only in {where}")
    for name, pair in own.items():
        if [x.shape for x in pair] != [x.shape for x in arrays[name]]:
            raise UserError(f"{name}: the adapter's shapes {[x.shape for x in arrays[name]]}")
    for path, group, linear in _paths(decoder):
        if linear.adapter is None:
            continue
        names = [f"model.layers.{group.first + i}.{path}" for i in range(group.size)]
        for i, variable in enumerate((linear.adapter.lora_A, linear.adapter.lora_B)):
            variable.set_value(jnp.stack([jnp.asarray(arrays[n][i], jnp.float32) for n in names]))


def _paths(decoder: Decoder) -> Iterator[tuple[str, Group, Linear]]:
    """Every projection with its path inside a layer ("self_attn.q_proj") and its group."""
    for group in decoder.groups:
        for path, module in nnx.iter_modules(group.layers):
            if isinstance(module, Linear):
                yield ".".join(map(str, path)), group, module


def _projections(decoder: Decoder) -> Iterator[tuple[str, Group, Linear]]:
    """Every projection with its own name ("q_proj") and its group."""
    for path, group, module in _paths(decoder):
        yield path.rpartition(".")[2], group, module


def _natural(path: str) -> list:
    return [int(part) if part.isdigit() else part for part in path.split(".")]
