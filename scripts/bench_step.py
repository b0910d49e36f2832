"""Speed and memory of a whole training step on random weights of a real model's shape.

    python scripts/bench_step.py --shape llama-3.2-1b
    python scripts/bench_step.py --shape llama-3.1-8b --gradient_checkpointing layer attention

A step is what training does: a packed batch in, an updated adapter out. Rows have the lengths of a
common instruction data set ("alpaca": short, log-normal), or are full; every token but the first
of a document is a target. What is printed is the median of the later two thirds of the steps, with
the losses' finiteness and the gradient norm checked. Compilation is timed apart.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jaxft import cli
from jaxft.config import PROJECTIONS
from jaxft.data.examples import Example
from jaxft.data.loader import Loader
from jaxft.device import compute_dtype
from jaxft.errors import UserError
from jaxft.formats.loading import load_decoder, tensor_shapes
from jaxft.lora import add_adapters
from jaxft.lora_config import LoraConfig
from jaxft.metrics import peak_flops, peak_memory_bytes, step_flops
from jaxft.model.families import read_config
from jaxft.optim import OptimConfig, make_optimizer, make_schedule
from jaxft.quant import Storage
from jaxft.report import make_console, progress_bar
from jaxft.step import init_state, make_train_step, split

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
    },
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": LLAMA3_ROPE | {"factor": 8.0},
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "gemma-3-4b": {  # its text part
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131072,
    },
}


class RandomCheckpoint:
    """A checkpoint of random bfloat16 weights, made on the device as they are read."""

    def __init__(self, shape: str):
        self.source = shape
        self.config = SHAPES[shape]
        self.generation_config: dict[str, Any] | None = None
        model = read_config(self.config)
        self._shapes, self._norm = tensor_shapes(model), 1 - model.norm_offset

    def names(self) -> frozenset[str]:
        """Every tensor of the model."""
        return frozenset(self._shapes)

    def stored_name(self, name: str) -> str:
        """The name itself."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        """bfloat16."""
        return np.dtype(jnp.bfloat16)

    def nf4(self, name: str) -> None:
        """None: it is quantised when it is loaded."""

    def read(self, name: str) -> Any:
        """Normal numbers of a trained model's size; norms scale by 1."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return jnp.full(shape, self._norm, jnp.bfloat16)
        key = jax.random.key(zlib.crc32(name.encode()))
        return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)

    def tokenizer(self) -> Any:
        """There is none: rows are made of token ids."""
        raise NotImplementedError


def make_rows(mix: str, tokens: int, length: int, vocabulary: int) -> list[Example]:
    """Documents of at least `tokens` tokens in all, whose lengths follow the mix."""
    random = np.random.default_rng(0)
    rows, total = [], 0
    while total < tokens:
        count = length
        if mix == "alpaca":
            count = int(np.clip(np.exp(random.normal(4.6, 0.75)), 16, length))
        ids = random.integers(10, vocabulary, count).astype(np.int32)
        rows.append(Example(ids, np.arange(count) > 0, "random"))
        total += count
    return rows


def rows_of(tokens: int, length: int) -> int:
    """How many rows of a length hold so many tokens; UserError where they do not fill them."""
    if tokens < length or tokens % length:
        raise UserError(f"--tokens {tokens} is no multiple of --max_length {length}")
    return tokens // length


@dataclasses.dataclass(frozen=True)
class Result:
    """One line of the table, and of the --out file."""

    shape: str
    mix: str
    checkpointing: str
    dtype: str
    tokens_per_second: float
    step_time_s: float
    compile_time_s: float
    peak_memory_gib: float
    mfu: float | None
    loss: float
    grad_norm: float
    device: str
    jax: str


def bench(given: argparse.Namespace, shape: str, mix: str, checkpointing: str) -> Result:
    """Time steps of one configuration; UserError where a loss or gradient is not usable."""
    dtype = compute_dtype(given.dtype)
    checkpoint = RandomCheckpoint(shape)
    rows = rows_of(given.tokens, given.max_length)
    with progress_bar(f"making {shape}", make_console()) as progress:
        decoder = load_decoder(checkpoint, Storage(given.load_in_4bit, True, dtype), progress)
    add_adapters(decoder, LoraConfig(16, 16.0, 0.0, PROJECTIONS, False), seed=0)
    config = decoder.config
    loader = Loader(
        make_rows(mix, 2 * given.tokens * given.steps, given.max_length, config.vocab_size),
        max_length=given.max_length,
        packing=True,
        batch_size=rows,
        num_steps=given.steps,
    )
    optim = OptimConfig(2e-4, "constant", 0, 0.0, 1.0)
    optimizer = make_optimizer(optim)
    structure, trained, frozen = split(decoder)
    del decoder
    state = init_state(trained, optimizer)
    step = make_train_step(
        structure,
        optimizer,
        make_schedule(optim, given.steps),
        seed=0,
        dropout=False,
        checkpointing=checkpointing,
    )
    began = time.perf_counter()
    compiled = step.lower(state, frozen, loader.batch(0)).compile()
    compile_time = time.perf_counter() - began
    seconds, tokens, flops = [], [], []
    for i in range(given.steps):
        batch = loader.batch(i)
        began = time.perf_counter()
        state, metrics = compiled(state, frozen, batch)
        metrics = jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
        tokens.append(int(np.count_nonzero(batch["segment_ids"])))
        flops.append(step_flops(config, tokens[-1], int(metrics.target_tokens)))
        loss, norm = float(metrics.loss), float(metrics.grad_norm)
        if not (np.isfinite([loss, norm]).all() and norm > 0):
            raise UserError(f"{shape}: step {i} has loss {loss} and gradient norm {norm}")
    if given.profile:
        with jax.profiler.trace(str(given.profile)):
            jax.block_until_ready(compiled(state, frozen, loader.batch(0)))
    later = slice(given.steps // 3, None)
    median = float(np.median(seconds[later]))
    peak = peak_flops()
    return Result(
        shape=shape,
        mix=mix,
        checkpointing=checkpointing,
        dtype=dtype.name,
        tokens_per_second=float(np.mean(tokens[later])) / median,
        step_time_s=median,
        compile_time_s=compile_time,
        peak_memory_gib=peak_memory_bytes() / 2**30,
        mfu=float(np.mean(flops[later])) / median / peak if peak else None,
        loss=loss,
        grad_norm=norm,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
    )


def main(argv: list[str]) -> None:
    """Print a table of all configurations asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-3.2-1b"])
    parser.add_argument("--mix", nargs="+", choices=("alpaca", "full"), default=["alpaca"])
    parser.add_argument("--gradient_checkpointing", nargs="+", default=["layer"])
    parser.add_argument("--dtype", default="auto", help="as in jaxft.train (default auto)")
    parser.add_argument("--tokens", type=int, default=8192, help="packed tokens a step")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=12, help="steps timed (default 12)")
    parser.add_argument("--load_in_16bit", dest="load_in_4bit", action="store_false")
    parser.add_argument("--out", type=Path, help="append each result as a line of JSON")
    parser.add_argument("--profile", type=Path, help="folder for a trace of one more step")
    given = parser.parse_args(argv)
    table = Table("shape", "mix", "checkpointing", "tok/s", "step ms", "compile s", "GiB", "MFU")
    runs = itertools.product(given.shape, given.mix, given.gradient_checkpointing)
    # A process for each run: a device's peak memory is counted for the whole process.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        for run in runs:
            result = pool.submit(bench, given, *run).result()
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    print(json.dumps(dataclasses.asdict(result)), file=file)
            table.add_row(*run, *_cells(result))
    make_console().print(table)


def _cells(result: Result) -> list[str]:
    return [
        f"{result.tokens_per_second:,.0f}",
        f"{result.step_time_s * 1e3:,.0f}",
        f"{result.compile_time_s:.1f}",
        f"{result.peak_memory_gib:.2f}",
        "-" if result.mfu is None else f"{result.mfu:.1%}",
    ]


if __name__ == "__main__":
    cli.run(main)
