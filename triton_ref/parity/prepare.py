"""The inputs that both sides share: packed batches of real rows, and an adapter to start from.

They are the trainer's own, so that what is compared is what training does.
"""

from pathlib import Path

import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from jaxft.config import TrainConfig
from jaxft.data.loader import Batch
from jaxft.errors import UserError
from jaxft.formats.forms import check_scales
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.loading import check_tensors
from jaxft.formats.open import open_checkpoint
from jaxft.formats.peft import AdapterConfig, load_adapter, save_adapter
from jaxft.lora_config import adapted_modules, read_targets
from jaxft.model.config import ModelConfig
from jaxft.model.families import read_config
from jaxft.prepare import prepare_data
from triton_ref.parity.job import BATCHES, Job
from triton_ref.parity.options import ParityConfig
from triton_ref.parity.tensors import TOKENS, spread

WEIGHT_DECAY = 0.01  # of the optimiser steps, so that it is compared too
B_SIZE = 0.02  # standard deviation of B; with PEFT's zeros half of the gradients would be zero


def prepare(config: ParityConfig, work: Path, console: Console) -> Job:
    """Write batches, adapter and job to the folder.

    Raises:
      UserError: an input that cannot be used, named in one line.
    """
    train = TrainConfig(
        model_name_or_path=config.model_name_or_path,
        revision=config.revision,
        dataset_name=config.dataset_name,
        dataset_train_split=config.dataset_train_split,
        output_dir=str(work),
        max_length=config.max_length,
        overflow=config.overflow,
        per_device_train_batch_size=config.per_device_train_batch_size,
        max_steps=max(config.steps, 1),
        learning_rate=config.learning_rate,
        load_in_4bit=config.load_in_4bit,
        use_bnb_nested_quant=config.use_bnb_nested_quant,
        lora_r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_target_modules=config.lora_target_modules,
        seed=config.seed,
    )
    checkpoint = open_checkpoint(config.model_name_or_path, config.revision)
    if not isinstance(checkpoint, HuggingFaceFolder):
        raise UserError(
            f"--model_name_or_path {config.model_name_or_path}: the Triton path reads Hugging Face "
            "folders only; `python -m jaxft.export merged` makes one of other files"
        )
    model = read_config(checkpoint.config, config.max_length)
    check_tensors(checkpoint)
    if config.load_in_4bit:
        check_scales(checkpoint, model, config.use_bnb_nested_quant)
    _refuse_float8(checkpoint)
    adapter = _check_adapter(config.adapter, model) if config.adapter else work / "adapter"
    if not config.adapter:
        _write_adapter(config, model, adapter)
    loader = prepare_data(train, model, checkpoint.tokenizer(), console).train
    batches = [loader.batch(step) for step in range(max(config.steps, 1))]
    save_file(
        {
            name: np.stack([batch[name][0] for batch in batches])
            for name in ("tokens", "segment_ids", "targets")
        },
        work / BATCHES,
    )
    job = Job(
        model=str(checkpoint.path),
        adapter=str(adapter),
        max_length=config.max_length,
        load_in_4bit=config.load_in_4bit,
        nested=config.use_bnb_nested_quant,
        learning_rate=config.learning_rate,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=train.max_grad_norm,
        tokens=_chosen_tokens(batches[0]),
        layers=len(model.layers),
        steps=config.steps,
    )
    job.save(work)
    return job


def _chosen_tokens(batch: Batch) -> tuple[int, ...]:
    """Which of a batch's tokens are recorded: half of them spread evenly, half among targets."""
    targets = np.flatnonzero(batch["targets"][batch["segment_ids"] > 0] >= 0)
    count = int((batch["segment_ids"] > 0).sum())
    found = {int(targets[i]) for i in spread(len(targets), TOKENS // 2)}
    return tuple(sorted(found | set(spread(count, TOKENS // 2))))


def _refuse_float8(checkpoint: HuggingFaceFolder) -> None:
    for name in sorted(checkpoint.names()):
        dtype = checkpoint.dtype(name)
        if dtype is not None and dtype.name.startswith("float8"):
            raise UserError(
                f"{checkpoint.source}: {name} is {dtype.name}, which the Triton path does not read"
            )


def _check_adapter(path: str, model: ModelConfig) -> Path:
    """The user's own folder, which both sides read."""
    folder = Path(path).expanduser().absolute()
    adapter, pairs = load_adapter(folder)
    modules = adapted_modules(adapter, model)
    for module in sorted(modules.keys() ^ pairs.keys()):
        where = "it has no tensors" if module in modules else "its config does not name it"
        raise UserError(f"--adapter {path}: {module}: {where}")
    for module, rank in modules.items():
        rows, columns = model.projections[".".join(module.split(".")[-2:])]
        shapes = [x.shape for x in pairs[module]]
        if shapes != [(rank, columns), (rows, rank)]:
            raise UserError(f"--adapter {path}: {module} has the shapes {shapes}, not the model's")
    return folder


def _write_adapter(config: ParityConfig, model: ModelConfig, folder: Path) -> None:
    """A random one: A as PEFT draws it, B small and not zero."""
    targets = read_targets(config.lora_target_modules, model)
    adapter = AdapterConfig(config.lora_r, config.lora_alpha, 0.0, targets, False)
    random, pairs = np.random.default_rng(config.seed), {}
    for module, rank in adapted_modules(adapter, model).items():
        rows, columns = model.projections[".".join(module.split(".")[-2:])]
        a = random.uniform(-1, 1, (rank, columns)) / np.sqrt(columns)
        b = B_SIZE * random.normal(size=(rows, rank))
        pairs[module] = (a.astype(np.float32), b.astype(np.float32))
    folder.mkdir()
    save_adapter(folder, adapter, pairs)
