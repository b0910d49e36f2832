"""python -m jaxft.train: a model and a file of conversations in, a PEFT adapter out.

`run` reads from top to bottom: data, model, one visible loop, adapter. What can be wrong with the
input is found before the model is loaded.
"""

import time
from contextlib import ExitStack, closing
from pathlib import Path
from signal import Signals

import jax
import numpy as np
from flax import nnx

from jaxft import cli
from jaxft.config import TrainConfig, parse
from jaxft.device import cache_compilations, check_checkpointing, compute_dtype
from jaxft.errors import UserError
from jaxft.evaluation import Evaluation
from jaxft.export import export_adapter
from jaxft.formats.checkpoint import Checkpoints
from jaxft.formats.forms import check_scales
from jaxft.formats.loading import check_tensors, load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.formats.peft import AdapterConfig
from jaxft.keeper import Keeper
from jaxft.lora import add_adapters
from jaxft.lora_config import adapted_modules, exact_targets, read_targets
from jaxft.metrics import Recorder
from jaxft.model.config import ModelConfig
from jaxft.model.decoder import Decoder
from jaxft.model.families import read_config
from jaxft.optim import OptimConfig, make_optimizer, make_schedule
from jaxft.preflight import describe_weights, preflight
from jaxft.prepare import Data, prepare_data
from jaxft.quant import Storage
from jaxft.report import (
    StepDisplay,
    duration,
    make_console,
    print_preflight,
    progress_bar,
    training_display,
)
from jaxft.run_folder import (
    CHECKPOINTS,
    Start,
    evaluations,
    find_start,
    model_fingerprint,
    open_run_folder,
    run_identity,
)
from jaxft.signals import stop_request
from jaxft.sinks import check_report_to, open_sinks
from jaxft.step import init_state, make_eval_step, make_train_step, split


def main(argv: list[str]) -> int:
    """The command; its exit code is 0, or 128 + the signal that stopped the run."""
    config = parse(argv)
    try:
        return run(config)
    except jax.errors.JaxRuntimeError as fault:
        if "RESOURCE_EXHAUSTED" not in str(fault):
            raise
        raise UserError(
            "the device's memory ran out: lower --per_device_train_batch_size, --max_length or "
            f"--lora_r ({str(fault).splitlines()[0]})"
        ) from fault


def run(config: TrainConfig) -> int:
    """Train an adapter as `config` says and write it to its output folder.

    Returns:
      0, or 128 + the number of the signal that stopped the run after saving a checkpoint.

    Raises:
      UserError: an input that cannot be used, named in one line.
    """
    cache_compilations()
    console = make_console()
    check_checkpointing(config.gradient_checkpointing)
    check_report_to(config.report_to)
    checkpoint = open_checkpoint(config.model_name_or_path, config.revision)
    model = read_config(checkpoint.config, config.max_length)
    check_tensors(checkpoint)
    adapter = _adapter_config(config, model)
    adapted_modules(adapter, model)  # a target that does not fit is told before rows are read
    dtype = compute_dtype(config.dtype)
    storage = Storage(config.load_in_4bit, config.use_bnb_nested_quant, dtype)
    if config.load_in_4bit:
        check_scales(checkpoint, model, config.use_bnb_nested_quant)
    data = prepare_data(config, model, checkpoint.tokenizer(), console)
    identity = run_identity(
        config,
        dtype.name,
        model_fingerprint(checkpoint, model),
        data.fingerprint,
        data.train.num_steps,
    )
    start = find_start(config, identity)
    print_preflight(
        preflight(config, checkpoint, adapter, model, data, dtype.name, start.step), console
    )

    if config.dry_run:
        console.print("dry run: nothing was trained or written")
        return 0
    with progress_bar("loading layers", console) as progress:
        decoder = load_decoder(checkpoint, storage, progress, config.max_length)
    if model.tie_word_embeddings and not decoder.config.tie_word_embeddings:
        console.print("note: config.json ties the head, but the file has another one: it is used")
    add_adapters(decoder, adapter, config.seed)
    folder = open_run_folder(config)
    with training_display(data.train.num_steps, start.step, console) as display:
        stopped = train(config, decoder, data, start, identity, folder, display)
    if stopped is not None:
        return 128 + stopped
    ends = data.statistics.ends
    summary = _summary(config, data, describe_weights(config, checkpoint, model, dtype.name))
    stops = export_adapter(folder, decoder, adapter, checkpoint, summary, ends)
    if stops:
        text = f"note: answers end in {stops}, where the base does not stop: the "
        console.print(text + "adapter's generation_config.json adds it", soft_wrap=True)
    console.print(f"adapter written to {folder}", soft_wrap=True)
    return 0


def train(
    config: TrainConfig,
    decoder: Decoder,
    data: Data,
    start: Start,
    identity: dict,
    folder: Path,
    display: StepDisplay,
) -> Signals | None:
    """The loop: every update from `start` on. The decoder's adapters are trained in place.

    Returns:
      The signal that stopped it; None when all updates were done.
    """
    loader, total = data.train, data.train.num_steps
    structure, trained, frozen = split(decoder)
    optim = _optim_config(config)
    optimizer = make_optimizer(optim)
    state = init_state(trained, optimizer)
    if start.folder is not None:
        with closing(Checkpoints(start.folder)) as source:
            state = source.restore(start.step, state)
    update = make_train_step(
        structure,
        optimizer,
        make_schedule(optim, total),
        seed=config.seed,
        dropout=config.lora_dropout > 0,
        checkpointing=config.gradient_checkpointing,
    )

    with ExitStack() as stack:
        checkpoints = stack.enter_context(closing(Checkpoints(folder / CHECKPOINTS)))
        forgotten = [at for at in checkpoints.steps() if at > start.step]
        checkpoints.forget(forgotten)
        if forgotten:
            display.note(f"checkpoints after update {start.step} are removed: {forgotten}")
        sinks = [
            stack.enter_context(closing(sink)) for sink in open_sinks(config, folder, start.step)
        ]
        keeper = Keeper(
            checkpoints,
            identity,
            evaluations(folder),
            limit=config.save_total_limit,
            best=config.load_best_model_at_end,
        )
        recorder = Recorder(sinks, display, decoder.config, total, config.logging_steps)
        evaluate = None
        if data.evaluation is not None:
            evaluate = Evaluation(
                make_eval_step(structure), frozen, data.evaluation, recorder, display
            )
        stop = stack.enter_context(stop_request())
        step = start.step
        if step < total:
            began = time.perf_counter()
            update = update.lower(state, frozen, loader.batch(step)).compile()
            display.note(f"compiled the update in {duration(time.perf_counter() - began)}")
        due = step in (0, total) or _due(step, config.eval_steps)
        if evaluate and due and step not in evaluations(folder):
            keeper.evaluated(step, evaluate(step, state.trained), state)
        recorder.restart_clock()
        stopped = None
        while step < total and stopped is None:
            batch = loader.batch(step)
            state, metrics = update(state, frozen, batch)
            step += 1
            recorder.add(step, metrics, int(np.count_nonzero(batch["segment_ids"])))
            stopped = stop.signal  # read once: it may be set at any moment
            save = stopped is not None or step == total or _due(step, config.save_steps)
            # one that a stop leaves out is made up for by the run that goes on from here
            evaluation = step == total or (stopped is None and _due(step, config.eval_steps))
            if save or evaluation:
                recorder.flush()
            if save:
                keeper.save(step, state)
            if evaluate and evaluation:
                keeper.evaluated(step, evaluate(step, state.trained), state)
            if save or evaluation:
                recorder.restart_clock()
        if step == total and config.load_best_model_at_end:
            state = keeper.restore_best(state, display)
    nnx.update(decoder, state.trained)
    if stopped is not None and step < total:
        display.note(
            f"stopped by {stopped.name} after update {step} of {total}; go on with the same "
            "command and --resume_from_checkpoint latest"
        )
        return stopped
    return None


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _adapter_config(config: TrainConfig, model: ModelConfig) -> AdapterConfig:
    adapter = AdapterConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=read_targets(config.lora_target_modules, model),
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern or {},
        alpha_pattern=config.alpha_pattern or {},
        layers_to_transform=config.layers_to_transform,
        base_model_name_or_path=config.model_name_or_path,
        revision=config.revision,
    )
    return exact_targets(adapter, model)


def _summary(config: TrainConfig, data: Data, weights: str) -> dict[str, object]:
    """Facts of the run for the model card."""
    numbers = data.statistics
    return {
        "data": ", ".join(config.dataset_name),
        "documents": numbers.documents,
        "tokens an epoch": numbers.tokens,
        "updates": data.train.num_steps,
        "learning rate": config.learning_rate,
        "rank": config.lora_r,
        "base weights": weights,
    }


def _optim_config(config: TrainConfig) -> OptimConfig:
    return OptimConfig(
        config.learning_rate,
        config.lr_scheduler_type,
        config.warmup_steps,
        config.weight_decay,
        config.max_grad_norm,
    )


if __name__ == "__main__":
    cli.run(main)
