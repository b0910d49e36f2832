"""From a checkpoint to a decoder on the device, one tensor at a time."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft.errors import UserError
from jaxft.formats.weights import Checkpoint
from jaxft.model.config import LayerConfig, ModelConfig
from jaxft.model.decoder import Decoder
from jaxft.model.families import read_config
from jaxft.model.layer import Group, Layer
from jaxft.quant import NF4, Dense, Storage

HEAD = "lm_head.weight"
# Old converters wrote these; the model works its frequencies out from config.json.
DERIVED = ("rotary_emb.inv_freq",)

Progress = Callable[[int, int], None]  # layers loaded, layers in all


def load_decoder(
    checkpoint: Checkpoint,
    storage: Storage,
    progress: Progress = lambda done, total: None,
    max_length: int | None = None,
) -> Decoder:
    """The checkpoint's model, its weights stored as `storage` says.

    `max_length` is that of `read_config`: the longest text the model will see.

    Every name and shape is checked before a weight is read. Host memory holds one tensor at a
    time; the stacked tensors of a group of layers are filled in place on the device.

    Raises:
      UserError: a tensor that is missing, left over or of another shape, by its name.
    """
    config = settle_head(read_config(checkpoint.config, max_length), checkpoint)
    abstract = nnx.eval_shape(lambda: _blank(config, storage))
    structure, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    _check(dict(_wanted(abstract, flat)), config, checkpoint)
    tensors: dict[tuple, Any] = {}
    loaded = 0
    for path in flat:
        if path[0] != "groups":
            name = _outer_name(config, path)
            tensors[path] = storage.other(jnp.asarray(checkpoint.read(name)))
    for number, group in enumerate(abstract.groups):
        paths = [path for path in flat if path[:2] == ("groups", number)]
        for i in range(group.size):
            for path in paths:
                name = _layer_name(config, group, i, path)
                value = _stored(checkpoint.read(name), flat[path].get_value(), storage)
                if i == 0:
                    tensors[path] = _room(value, group.size)
                tensors[path] = _put(tensors[path], value, i, name)
            loaded += len(group.members)
            progress(loaded, len(config.layers))
    filled = {path: variable.replace(tensors[path]) for path, variable in flat.items()}
    return nnx.merge(structure, nnx.from_flat_state(filled))


def check_tensors(checkpoint: Checkpoint) -> None:
    """Whether the checkpoint holds what its model takes, told from its headers.

    Raises:
      UserError: a tensor that is missing, left over or of another shape, by its name.
    """
    config = settle_head(read_config(checkpoint.config), checkpoint)
    _check(tensor_shapes(config), config, checkpoint)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model holds; nothing is made."""
    storage = Storage(load_in_4bit=False, nested=False, compute=jnp.dtype(jnp.float32))
    abstract = nnx.eval_shape(lambda: _blank(config, storage))
    return dict(_wanted(abstract, dict(nnx.to_flat_state(nnx.state(abstract)))))


def settle_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The configuration with the output head that the checkpoint really has.

    A checkpoint whose config ties the head to the embeddings may hold a head all the same. Where
    both are equal they stay tied; where they differ the head is a matrix of its own, as
    transformers 5 reads it.
    """
    table = f"{config.module_prefix}.embed_tokens.weight"
    if not config.tie_word_embeddings or not {HEAD, table} <= checkpoint.names():
        return config
    same = np.array_equal(checkpoint.read(HEAD), checkpoint.read(table))
    return replace(config, tie_word_embeddings=same)


def _blank(config: ModelConfig, storage: Storage) -> Decoder:
    """A decoder without values: only its structure and shapes are used."""

    def stacked(layer: LayerConfig, size: int) -> Layer:
        structure, state = nnx.split(Layer(config, layer, storage))
        return nnx.merge(structure, _room(state, size))

    groups = [
        Group(
            [stacked(layer, size) for layer in config.layers[first : first + period]], first, size
        )
        for first, period, size in patterns(config.layers)
    ]
    return Decoder(config, groups, storage.compute)


def patterns(layers: Sequence[Hashable], longest: int = 8) -> Iterator[tuple[int, int, int]]:
    """Cuts layers into repeating patterns: (number of the first, period, repetitions) of each.

    At each place it takes the period, up to `longest`, whose repetitions cover most layers, so
    that five local layers and a global one, over and over, are one group; the remainder is cut in
    the same way.
    """
    first = 0
    while first < len(layers):
        best, covered = (1, 1), 1
        for period in range(1, longest + 1):
            end = first + period
            while end < len(layers) and layers[end] == layers[end - period]:
                end += 1
            size = (end - first) // period
            if size > 1 and period * size > covered:
                best, covered = (period, size), period * size
        yield first, best[0], best[1]
        first += covered


def _outer_name(config: ModelConfig, path: tuple) -> str:
    """The checkpoint's name of a tensor outside the layers."""
    name = ".".join(path)
    return name if path[0] == "lm_head" else f"{config.module_prefix}.{name}"


def _layer_name(config: ModelConfig, group: Group, i: int, path: tuple) -> str:
    """The checkpoint's name of repetition i of a tensor `("groups", g, "members", member, ...)`."""
    return ".".join((config.layer_path(group.numbers(path[3])[i]), *path[4:]))


def _wanted(decoder: Decoder, flat: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor the decoder takes from a checkpoint."""
    for path, variable in flat.items():
        value = variable.get_value()
        if path[0] != "groups":
            yield _outer_name(decoder.config, path), value.shape
            continue
        group = decoder.groups[path[1]]
        match value:
            case NF4():
                shape = value.shape
            case Dense():
                shape = value.array.shape[1:]
            case _:
                shape = value.shape[1:]
        for i in range(group.size):
            yield _layer_name(decoder.config, group, i, path), shape


def _check(wanted: dict[str, tuple[int, ...]], config: ModelConfig, checkpoint: Checkpoint) -> None:
    names = checkpoint.names()
    for name, shape in wanted.items():
        if name not in names:
            raise UserError(f"{checkpoint.source}: tensor {name} is missing")
        if checkpoint.shape(name) != shape:
            raise UserError(
                f"{checkpoint.source}: tensor {name} has shape {checkpoint.shape(name)}, "
                f"config.json asks for {shape}"
            )
    tied = {HEAD} if HEAD not in wanted else set()  # equal to the table: `settle_head` looked
    for name in sorted(names - wanted.keys() - tied):
        if not name.endswith(DERIVED) and not name.startswith(config.left_alone):
            raise UserError(f"{checkpoint.source}: tensor {name} has no place in this model")


def _stored(array: np.ndarray, kind: Any, storage: Storage) -> Any:
    """A layer's tensor in the form of the abstract value `kind`."""
    matrix = isinstance(kind, NF4 | Dense)
    return (storage.matrix if matrix else storage.other)(jnp.asarray(array))


def _room(value: Any, size: int) -> Any:
    """Zeros for `size` values like this one, stacked."""
    return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), value)


def _put(stacked: Any, value: Any, i: int, name: str) -> Any:
    kinds = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (stacked, value)]
    if kinds[0] != kinds[1]:
        raise UserError(f"tensor {name} is {kinds[1][0]}, its neighbours are {kinds[0][0]}")
    return _set(stacked, value, i)


@partial(jax.jit, donate_argnums=0)
def _set(stacked: Any, value: Any, i: int) -> Any:
    return jax.tree.map(lambda rows, row: rows.at[i].set(row), stacked, value)
