"""A base model with an adapter merged into its weights, as a folder that transformers loads.

Every merged tensor is W + scale * B @ A in float32, rounded once to the dtype it is stored in.
Tensors are read, merged and written one at a time.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxft.errors import UserError
from jaxft.formats import generation
from jaxft.formats.files import FLOAT_DTYPES, new_folder, write_json
from jaxft.formats.forms import check_scales, stored_codes
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.loading import HEAD, check_tensors, settle_head
from jaxft.formats.modelcard import write_merged_card
from jaxft.formats.peft import AdapterConfig, Adapters
from jaxft.formats.sharded import Progress, Spec, total_bytes, write_tensors
from jaxft.formats.tokenizers import save_tokenizer
from jaxft.formats.weights import Checkpoint
from jaxft.model.config import ModelConfig
from jaxft.model.families import read_config
from jaxft.quant import Storage, dense

# What a model folder has beside its configuration and weights, of any tokenizer.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*chat_template*/*.jinja",
    "chat_template*.*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_DTYPES = {dtype.name: dtype for dtype in FLOAT_DTYPES.values()}


@dataclass(frozen=True)
class Merging:
    """How an adapter is merged.

    Attributes:
      base_weights: add it to the checkpoint's own weights, or to what is left of them after NF4.
        Both are the same for a checkpoint that holds NF4 codes: what these stand for.
      nested: of NF4, the scales are quantised too.
      dtype: of every tensor; auto keeps each one's own, and where those are stored quantised takes
        the one that config.json names, else bfloat16.
      max_shard_size: bytes of a weight file.
    """

    base_weights: Literal["original", "nf4"] = "original"
    nested: bool = True
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_shard_size: int = 5 * 10**9


@dataclass
class Merged:
    """What was written: modules merged, weight files, bytes and dtypes of the tensors.

    `kept` is the share of the updates that is left after rounding: the component of what the
    weights moved by along what they should have. 16-bit weights do not move at all where the
    update is below half of their last place; where the base was not on the 16-bit grid before,
    those roundings average out and the share stays at 1.
    """

    modules: int
    files: int
    size: int
    dtypes: tuple[str, ...]
    kept: float


def save_merged(
    folder: Path,
    checkpoint: Checkpoint,
    config: AdapterConfig,
    adapters: Adapters,
    *,
    how: Merging,
    adapter: Path,
    progress: Progress = lambda done, total: None,
) -> Merged:
    """Write a base model with an adapter in its weights; all checks come before the first byte.

    Args:
      folder: new or empty; after a failure it holds nothing.
      checkpoint: the base model.
      config: of the adapter.
      adapters: A `[r, in]` and B `[out, r]` by module path, as `load_adapter` gives them.
      how: precision and file sizes.
      adapter: the adapter's folder, for its generation config and the model card.
      progress: told after each tensor.

    Raises:
      UserError: a base that is incomplete, an adapter with a matrix that has no place in it, a
        result that the dtype cannot hold, a folder that is not empty, a disk that is full.
    """
    model = read_config(checkpoint.config)
    check_tensors(checkpoint)
    if how.base_weights == "nf4":
        check_scales(checkpoint, model, how.nested)
    _check_rope(checkpoint)
    _check_adapter(checkpoint, adapters)
    stops = generation.read_extended(adapter, checkpoint)
    tensors = _specs(checkpoint, how.dtype)
    raw = _config(checkpoint, model, tensors, how.dtype, adapters)
    with new_folder(folder, last="config.json") as temporary:
        free = shutil.disk_usage(temporary).free
        if free < total_bytes(tensors):
            raise UserError(
                f"{folder}: the model takes {total_bytes(tensors) / 1e9:.2f} GB and the disk has "
                f"{free / 1e9:.2f} GB left"
            )
        codes = stored_codes(checkpoint, model)
        requantise = how.base_weights == "nf4" and not codes
        make = _Maker(checkpoint, config, adapters, tensors, how.nested, requantise, model)
        named = {checkpoint.stored_name(name): name for name in tensors}
        files = write_tensors(
            temporary,
            {stored: tensors[name] for stored, name in named.items()},
            lambda stored: make(named[stored]),
            how.max_shard_size,
            progress,
        )
        write_json(temporary / "config.json", raw)
        _write_tokenizer(temporary, checkpoint)
        _write_generation(temporary, checkpoint, stops)
        result = Merged(
            modules=len(adapters),
            files=files,
            size=total_bytes(tensors),
            dtypes=tuple(sorted({dtype.name for dtype, _ in tensors.values()})),
            kept=make.kept(),
        )
        write_merged_card(
            temporary,
            title=folder.absolute().name,
            base_model=checkpoint.source,
            adapter=str(adapter),
            summary=_summary(
                {len(a) for a, _ in adapters.values()}, _base_weights(how, bool(codes)), result
            ),
        )
        _check_written(temporary, tensors)
    return result


@dataclass
class _Maker:
    """Makes the tensors of the result, and adds up what rounding leaves of the updates."""

    checkpoint: Checkpoint
    config: AdapterConfig
    adapters: Adapters
    tensors: Mapping[str, Spec]
    nested: bool
    requantise: bool  # the projections, as training does
    model: ModelConfig
    products: list[float] = field(default_factory=lambda: [0.0, 0.0])  # errors, updates · updates

    def __call__(self, name: str) -> np.ndarray:
        dtype = self.tensors[name][0]
        path = name.removesuffix(".weight")
        value = self.checkpoint.read(name)
        if self.requantise and _is_projection(path, self.model):
            value = through_nf4(value, self.nested)
        elif path not in self.adapters and value.dtype == dtype:
            return value
        exact = value.astype(np.float32)
        if path not in self.adapters:
            return _rounded(exact, dtype, name)
        a, b = self.adapters[path]
        update = np.float32(self.config.scale_of(path)) * (b @ a)
        exact += update
        result = _rounded(exact, dtype, name)
        self.products[0] += float(np.vdot(result.astype(np.float32) - exact, update))
        self.products[1] += float(np.vdot(update, update))
        return result

    def kept(self) -> float:
        """Share of the updates that is left after rounding; 1 where there were none."""
        errors, updates = self.products
        return 1 + errors / updates if updates else 1.0


def through_nf4(value: np.ndarray, nested: bool) -> np.ndarray:
    """float32 weights `[out, in]` as training on an NF4 base sees them."""
    storage = Storage(load_in_4bit=True, nested=nested, compute=jnp.dtype(jnp.float32))
    return np.array(dense(storage.matrix(jnp.asarray(value)), storage.compute))


def _rounded(exact: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = exact.astype(dtype)
    if not np.isfinite(result).all():
        raise UserError(
            f"tensor {name} has values up to {np.abs(exact).max():g}, which {dtype.name} cannot "
            "hold; choose another --dtype"
        )
    return result


def _is_projection(path: str, model: ModelConfig) -> bool:
    """Whether training on an NF4 base quantises this module's weight."""
    return path in model.module_paths


def _check_rope(checkpoint: Checkpoint) -> None:
    scaling = checkpoint.config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "gguf_factors":
        raise UserError(
            f"{checkpoint.source}: its RoPE factors have no spelling in config.json, so the model "
            "cannot be written as a folder; merge into the Hugging Face folder it was made from"
        )


def _check_adapter(checkpoint: Checkpoint, adapters: Adapters) -> None:
    names = checkpoint.names()
    for path, (a, b) in adapters.items():
        name, shape = f"{path}.weight", (b.shape[0], a.shape[1])
        if name not in names:
            raise UserError(
                f"the adapter changes {path}, which {checkpoint.source} does not have: is it an "
                "adapter of another model?"
            )
        if checkpoint.shape(name) != shape:
            raise UserError(
                f"the adapter's {path} is for a weight {shape}, {checkpoint.source} has "
                f"{checkpoint.shape(name)}: is it an adapter of another model?"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise UserError(f"the adapter's {path} is not finite")


def _specs(checkpoint: Checkpoint, dtype: str) -> dict[str, Spec]:
    """Dtype and shape of every tensor of the result, layer by layer."""
    unquantised = _DTYPES.get(str(_named_dtype(checkpoint.config)), np.dtype(ml_dtypes.bfloat16))
    return {
        name: (
            (checkpoint.dtype(name) or unquantised) if dtype == "auto" else _DTYPES[dtype],
            checkpoint.shape(name),
        )
        for name in sorted(checkpoint.names(), key=_natural)
    }


def _named_dtype(config: Mapping[str, Any]) -> str | None:
    return config.get("dtype") or config.get("torch_dtype")


def _config(
    checkpoint: Checkpoint,
    model: ModelConfig,
    tensors: Mapping[str, Spec],
    dtype: str,
    adapters: Adapters,
) -> dict[str, Any]:
    """The base's config.json, made true for the result."""
    if dtype == "auto":
        sizes = Counter[str]()
        for kind, shape in tensors.values():
            sizes[kind.name] += math.prod(shape)
        dtype = _named_dtype(checkpoint.config) or sizes.most_common(1)[0][0]
    raw = plain_config(checkpoint.config, dtype)
    tied = settle_head(model, checkpoint).tie_word_embeddings
    if model.tie_word_embeddings and (not tied or HEAD.removesuffix(".weight") in adapters):
        raw["tie_word_embeddings"] = False
    return raw


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json without what said how the weights were quantised, and with this dtype.

    The dtype goes under the key that the file uses already: `torch_dtype` up to transformers 4,
    `dtype` since 5; both are read.
    """
    spellings = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    return kept | dict.fromkeys(spellings, dtype)


def _write_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """A folder's own files as they are; otherwise what the checkpoint's tokenizer says."""
    if not isinstance(checkpoint, HuggingFaceFolder):
        save_tokenizer(folder, checkpoint.tokenizer())
        return
    for file in sorted({file for pattern in COPIED for file in checkpoint.path.glob(pattern)}):
        if file.is_file():
            target = folder / file.relative_to(checkpoint.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _write_generation(folder: Path, checkpoint: Checkpoint, own: dict[str, Any] | None) -> None:
    if own is not None and own != checkpoint.generation_config:
        write_json(folder / generation.FILE, own)
    elif isinstance(checkpoint, HuggingFaceFolder) and checkpoint.generation_config is not None:
        shutil.copyfile(checkpoint.path / generation.FILE, folder / generation.FILE)


def _base_weights(how: Merging, stored: bool) -> str:
    """What the adapter was added to, for the model card."""
    if stored:
        return "NF4 as in the checkpoint, dequantised"
    if how.base_weights == "original":
        return "as in the checkpoint"
    return "NF4" + (" with double quantisation" if how.nested else "") + ", dequantised"


def _summary(ranks: set[int], base_weights: str, result: Merged) -> dict[str, object]:
    """Facts of the merge for the model card."""
    return {
        "base weights": base_weights,
        "merged modules": result.modules,
        "rank": ", ".join(map(str, sorted(ranks))),
        "dtype": ", ".join(result.dtypes),
        "update left after rounding": f"{result.kept:.1%}",
    }


def _check_written(folder: Path, tensors: Mapping[str, Spec]) -> None:
    again = HuggingFaceFolder(folder)
    found = {name: (again.dtype(name), again.shape(name)) for name in again.names()}
    if found != dict(tensors):
        raise RuntimeError(f"{folder}: the written model does not read back equal")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers by value: layer 10 comes after layer 9."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D+)(\d*)", name)]
