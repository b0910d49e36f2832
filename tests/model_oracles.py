"""Tiny models of transformers as oracles, and changes to the folders they are saved in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxft.data.examples import Example
from jaxft.data.loader import Loader
from jaxft.lora import adapter_arrays, add_adapters, projections, set_adapter_arrays
from jaxft.lora_config import LoraConfig
from jaxft.loss import sum_of_losses
from jaxft.model.decoder import Decoder
from jaxft.quant import dense
from jaxft.step import split

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 6.0

Tensors = dict[str, np.ndarray]
Gradients = dict[str, tuple[np.ndarray, np.ndarray]]


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 logits `[B, T, vocab]` of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens))).logits.float().numpy()


def open_in_transformers(folder: Path, dtype: str = "float32") -> Any:
    """transformers' own reading of a folder.

    Its eager attention is the definition: others leave out Gemma 2's cap in some releases.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def edit_config(folder: Path, change: dict[str, Any]) -> Path:
    """Set keys of config.json; a value of None removes the key. Returns the folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Let `change` work on the tensors of model.safetensors. Returns the folder."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def largest(a: Any, b: Any) -> float:
    """Largest difference of two arrays."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def lora_config(
    dropout: float = 0.0, targets: tuple[str, ...] = PROJECTIONS, rslora: bool = False
) -> LoraConfig:
    """Adapters of rank 4 and alpha 6."""
    return LoraConfig(RANK, ALPHA, dropout, targets, rslora)


def add_lora(decoder: Decoder, **over: Any) -> Decoder:
    """Adapters of a `lora_config`, A as they start, B random. Returns the decoder."""
    add_adapters(decoder, lora_config(**over), seed=0)
    random = np.random.default_rng(0)
    arrays = {
        name: (a, 0.3 * random.normal(size=b.shape).astype(np.float32))
        for name, (a, b) in adapter_arrays(decoder).items()
    }
    set_adapter_arrays(decoder, arrays)
    return decoder


def in_peft(model: Any, decoder: Decoder, *, rslora: bool = False) -> Any:
    """transformers' model under PEFT with the decoder's adapters; the model is changed in place."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), use_rslora=rslora
    )
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, pair in adapter_arrays(decoder).items():
            module = model.get_submodule(name)
            for ours, theirs in zip(pair, (module.lora_A, module.lora_B), strict=True):
                theirs["default"].weight.copy_(torch.tensor(ours))
    return wrapped


def their_gradients(model: Any) -> Gradients:
    """Gradients of A and B by module path, after a backward pass."""
    return {
        name: tuple(
            part["default"].weight.grad.numpy().copy() for part in (module.lora_A, module.lora_B)
        )
        for name, module in model.get_base_model().named_modules()
        if hasattr(module, "lora_A")
    }


def peft_loss_and_gradients(model: Any, documents: list[list[int]]) -> tuple[float, Gradients]:
    """Sum of losses and gradients of A and B, every document in a forward pass of its own."""
    import torch

    model.zero_grad()
    total = 0.0
    for document in filter(lambda d: len(d) > 1, documents):
        logits = model(torch.tensor([document])).logits[0, :-1]
        labels = torch.tensor(document[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss.backward()
        total += loss.item()
    return total, their_gradients(model)


def write_dense_weights(model: Any, decoder: Decoder) -> Any:
    """Put the decoder's stored weights, made dense, into transformers' model. Returns the model."""
    import torch

    with torch.no_grad():
        for modules, linear in projections(decoder):
            stacked = np.asarray(dense(linear.weight.get_value(), jnp.float32))
            for name, matrix in zip(modules, stacked, strict=True):
                model.get_submodule(name).weight.copy_(torch.tensor(matrix))
    return model


def pack_rows(rows: list[list[list[int]]], length: int) -> dict[str, np.ndarray]:
    """Micro-batch of these rows of documents, each token supervised: int32 `[B, length]`."""
    micro = []
    for documents in rows:
        examples = [Example(np.asarray(d), np.arange(len(d)) > 0, "") for d in documents]
        order = {"packing": False, "batch_size": len(examples), "shuffle": False}
        batch = Loader(examples, max_length=length, **order).batch(0)
        micro.append({name: array[0, 0, :length] for name, array in batch.items()})
    return {name: np.stack([row[name] for row in micro]) for name in micro[0]}


def loss_and_gradients(decoder: Decoder, checkpointing: str = "false"):
    """Compiled `(micro-batch, dropout key) -> (sum of losses, its gradients by path)`."""
    structure, trained, frozen = split(decoder)

    @jax.jit
    def run(trained, batch, key):
        def loss(trained):
            model = nnx.merge(structure, trained, frozen)
            return sum_of_losses(model, **batch, dropout_key=key, checkpointing=checkpointing)

        return jax.value_and_grad(loss)(trained)

    def call(batch: dict[str, np.ndarray], key: Any = None) -> tuple[float, Gradients]:
        loss, gradients = run(trained, batch, key)
        return float(loss), adapter_arrays(nnx.merge(structure, gradients, frozen))

    return call


def relative(got: Gradients, want: Gradients) -> float:
    """Largest relative difference (of norms) of any tensor, and all names are the same."""
    assert got.keys() == want.keys()
    return max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for name in want
        for a, b in zip(got[name], want[name], strict=True)
    )
