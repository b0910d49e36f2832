"""LoRA adapters in a decoder: how they start, how they are put in and taken out."""

import math
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft.errors import UserError
from jaxft.lora_config import LoraConfig, adapted_modules
from jaxft.model.decoder import Decoder
from jaxft.model.linear import Linear
from jaxft.model.variables import Frozen
from jaxft.quant import Adapter


class Lora(nnx.Module):
    """The adapters of one projection in a group of layers; the leading axis is layers.

    All have the largest rank of the group: in a layer of a smaller one, or of none, the further
    rows of A and columns of B are zero. They stay zero, since each is the other's gradient.
    """

    def __init__(
        self,
        a: jax.Array,
        b: jax.Array,
        scale: jax.Array,
        ranks: tuple[int, ...],
        dropout: float,
        salt: int,
    ):
        self.lora_A = nnx.LoRAParam(a)
        self.lora_B = nnx.LoRAParam(b)
        self.scale = Frozen(scale)
        self.ranks = ranks  # of each layer; 0 where it has no adapter
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
      UserError: a target, pattern or layer that the model does not have.
    """
    rank_of = adapted_modules(config, decoder.config)
    root = jax.random.key(seed)
    layer_of = decoder.config.module_paths
    for modules, linear in projections(decoder):
        ranks = tuple(rank_of.get(module, 0) for module in modules)
        rank = max(ranks)
        if rank == 0:
            continue
        salt = zlib.crc32(modules[0].rpartition(".")[2].encode())
        key = jax.random.fold_in(jax.random.fold_in(root, salt), layer_of[modules[0]][0])
        bound = 1 / math.sqrt(linear.in_features)
        a_shape = (len(modules), rank, linear.in_features)
        a = jax.random.uniform(key, a_shape, jnp.float32, -bound, bound)
        if min(ranks) < rank:
            used = jnp.arange(rank) < jnp.array(ranks)[:, None]
            a = jnp.where(used[..., None], a, 0)
        b = jnp.zeros((len(modules), linear.out_features, rank), jnp.float32)
        scales = [config.scale_of(m) if r else 0.0 for m, r in zip(modules, ranks, strict=True)]
        scale = jnp.array(scales, jnp.float32)
        linear.adapter = Lora(a, b, scale, ranks, config.lora_dropout, salt)


def adapter_arrays(decoder: Decoder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each adapted module of the model, by its path in transformers, with float32 A and B."""
    arrays = {}
    for modules, linear in projections(decoder):
        lora = linear.adapter
        if lora is None:
            continue
        a, b = (np.asarray(x.get_value()) for x in (lora.lora_A, lora.lora_B))
        for i, (module, rank) in enumerate(zip(modules, lora.ranks, strict=True)):
            if rank:
                arrays[module] = (a[i, :rank], b[i, :, :rank])
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
    for modules, linear in projections(decoder):
        lora = linear.adapter
        if lora is None:
            continue
        a, b = (np.zeros(x.shape, np.float32) for x in (lora.lora_A, lora.lora_B))
        for i, (module, rank) in enumerate(zip(modules, lora.ranks, strict=True)):
            if rank:
                a[i, :rank], b[i, :, :rank] = arrays[module]
        lora.lora_A.set_value(jnp.asarray(a))
        lora.lora_B.set_value(jnp.asarray(b))


def projections(decoder: Decoder) -> Iterator[tuple[list[str], Linear]]:
    """Every stacked projection with its paths in the model, one for each layer of the stack."""
    for group in decoder.groups:
        for member, layer in enumerate(group.members):
            for path, module in nnx.iter_modules(layer):
                if isinstance(module, Linear):
                    end = ".".join(map(str, path))
                    numbers = group.numbers(member)
                    yield [f"{decoder.config.layer_path(n)}.{end}" for n in numbers], module


def _natural(path: str) -> list:
    return [int(part) if part.isdigit() else part for part in path.split(".")]
