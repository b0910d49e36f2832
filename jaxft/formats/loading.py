"""From a checkpoint to a decoder on the device, one tensor at a time."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxft.errors import UserError
from jaxft.formats.forms import Forms
from jaxft.formats.weights import Checkpoint
from jaxft.model.config import ModelConfig
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

    `max_length` is that of `read_config`: the longest text the model will see. NF4 codes of the
    checkpoint are taken as they are, see `Forms`. Layers are scanned together where each of their
    tensors has the same form.

    Every name and shape is checked before a weight is read. Host memory holds one tensor at a
    time; the stacked tensors of a group of layers are filled in place on the device.

    Raises:
      UserError: a tensor that is missing, left over or of another shape, by its name.
    """
    config = settle_head(read_config(checkpoint.config, max_length), checkpoint)
    _check(tensor_shapes(config), config, checkpoint)
    forms = Forms.of(checkpoint, config, storage)
    abstract = nnx.eval_shape(lambda: _blank(config, storage.compute, forms.abstract))
    structure, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    tensors: dict[tuple, Any] = {}
    loaded = 0
    for path in flat:
        if path[0] != "groups":
            tensors[path] = forms.read(_outer_name(config, path), matrix=False)
    for number, group in enumerate(abstract.groups):
        paths = [path for path in flat if path[:2] == ("groups", number)]
        for path in paths:
            tensors[path] = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), flat[path].get_value()
            )
        for i in range(group.size):
            for path in paths:
                matrix = _is_matrix(flat[path].get_value())
                value = forms.read(_layer_name(config, group, i, path), matrix)
                tensors[path] = _set(tensors[path], value, i)
            loaded += len(group.members)
            progress(loaded, len(config.layers))
    filled = {path: variable.replace(tensors[path]) for path, variable in flat.items()}
    return nnx.merge(structure, nnx.from_flat_state(filled))


def check_tensors(checkpoint: Checkpoint) -> None:
    """Whether the checkpoint holds what its model takes, told from its headers.

    Raises:
      UserError: a tensor that is missing, left over or of another shape, by its name.
    """
    config = read_config(checkpoint.config)
    if HEAD in checkpoint.names():  # its shape is checked, be it the table's equal or not
        config = replace(config, tie_word_embeddings=False)
    _check(tensor_shapes(config), config, checkpoint)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this model holds; nothing is made."""
    abstract = nnx.eval_shape(lambda: _blank(config, jnp.dtype(jnp.float32)))
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


def _blank(
    config: ModelConfig, compute: jnp.dtype, form: Callable[[str, bool], Any] | None = None
) -> Decoder:
    """A decoder without values: only its structure, shapes and dtypes are used.

    `form` gives the abstract value of a layer's tensor by its name, and by whether it is a
    projection; without it all are float32.
    """
    dense = Storage(load_in_4bit=False, nested=False, compute=compute)
    structures, states = [], []
    for number, layer in enumerate(config.layers):
        structure, state = nnx.split(Layer(config, layer, dense))
        variables = dict(nnx.to_flat_state(state))
        if form is not None:
            for path, variable in variables.items():
                name = ".".join((config.layer_path(number), *map(str, path)))
                variables[path] = variable.replace(form(name, _is_matrix(variable.get_value())))
        structures.append(structure)
        states.append(variables)

    def stacked(number: int, size: int) -> Layer:
        room = jax.tree.map(
            lambda x: jnp.zeros((size, *x.shape), x.dtype), nnx.from_flat_state(states[number])
        )
        return nnx.merge(structures[number], room)

    kinds = [
        (layer, *(jax.tree.map(_kind, v.get_value()) for v in variables.values()))
        for layer, variables in zip(config.layers, states, strict=True)
    ]
    groups = [
        Group([stacked(number, size) for number in range(first, first + period)], first, size)
        for first, period, size in patterns(kinds)
    ]
    return Decoder(config, groups, compute)


def _kind(x: Any) -> tuple[tuple[int, ...], str]:
    return x.shape, x.dtype.name


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
    """Name and shape of every tensor that a decoder of dense weights takes from a checkpoint."""
    for path, variable in flat.items():
        value = variable.get_value()
        if path[0] != "groups":
            yield _outer_name(decoder.config, path), value.shape
            continue
        group = decoder.groups[path[1]]
        array = value.array if isinstance(value, Dense) else value
        for i in range(group.size):
            yield _layer_name(decoder.config, group, i, path), array.shape[1:]


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
        checkpoint.dtype(name)  # raises for one that cannot be read
    tied = {HEAD} if HEAD not in wanted else set()  # equal to the table: `settle_head` looked
    for name in sorted(names - wanted.keys() - tied):
        if not name.endswith(DERIVED) and not name.startswith(config.left_alone):
            raise UserError(f"{checkpoint.source}: tensor {name} has no place in this model")


def _is_matrix(value: Any) -> bool:
    """Whether a layer's value is that of a projection."""
    return isinstance(value, NF4 | Dense)


@partial(jax.jit, donate_argnums=0)
def _set(stacked: Any, value: Any, i: int) -> Any:
    """The stack with a value at i; TypeError where that has another dtype or shape."""
    return jax.tree.map(
        lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, i, axis=0), stacked, value
    )
