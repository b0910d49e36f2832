"""Kernel time of every op on a GPU: the JAX path's beside the Triton path's.

    python scripts/bench_ops.py --shape llama-3.1-8b gemma-3-4b

Sizes are those of a real model, the documents' lengths those of a common instruction data set, the
numbers random and bfloat16. What is printed is the sum of the kernels' own durations as CUPTI
reports them, mean of the repetitions, without the gaps between launches: "forward", and "both"
for a forward pass and its gradients with respect to the activations. Each path runs in a process
of its own. The JAX path is given rows with what padding packing left, the Triton path the tokens
alone.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_step import SHAPES, make_rows, rows_of
from rich.table import Table

from jaxft import cli
from jaxft.data.loader import Loader
from jaxft.model.families import read_config
from jaxft.report import make_console, progress_bar

REPEATS = 10


@dataclass(frozen=True)
class Case:
    """Sizes of one model, and one packed batch: what both sides are given."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    window: int | None
    softcap: float | None
    final_softcap: float | None
    activation: str
    qk_norm: bool
    gemma: bool
    batch: dict[str, np.ndarray]  # int32 [rows, max_length]


Times = dict[str, tuple[float, float | None]]  # forward and both, in milliseconds


def make_case(shape: str, tokens: int, max_length: int) -> Case:
    """Of one of the shapes of bench_step.py; the window is that of its first layer."""
    model = read_config(SHAPES[shape])
    loader = Loader(
        make_rows("alpaca", 2 * tokens, max_length, model.vocab_size),
        max_length=max_length,
        packing=True,
        batch_size=rows_of(tokens, max_length),
        num_steps=1,
    )
    layer = model.layers[0]
    return Case(
        hidden=model.hidden_size,
        intermediate=model.intermediate_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocabulary=model.vocab_size,
        window=layer.window,
        softcap=model.attention_softcap,
        final_softcap=model.final_softcap,
        activation=model.activation,
        qk_norm=model.qk_norm,
        gemma=model.norm_offset == 1,
        batch={name: np.asarray(array)[0] for name, array in loader.batch(0).items()},
    )


def time_jax(case: Case) -> Times:
    """Of the ops that the trainer uses."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    from jaxft.model.decoder import document_positions
    from pallas_kernels.attention import attention, make_plan
    from pallas_kernels.cross_entropy import cross_entropy
    from pallas_kernels.glu import glu
    from pallas_kernels.nf4 import dequantize, quantize
    from pallas_kernels.norm import rms_norm
    from pallas_kernels.qk_norm_rope import qk_norm_rope

    segments, targets = (jnp.asarray(case.batch[n]) for n in ("segment_ids", "targets"))
    positions, plan = document_positions(segments), make_plan(segments, window=case.window)
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    def mean(function, *args) -> float:
        # as single launches: a graph of them would be reported as one
        options = {"xla_gpu_enable_command_buffer": ""}
        compiled = jax.jit(function).lower(*args).compile(compiler_options=options)
        milliseconds = profiler.measure(compiled, iterations=REPEATS)(*args)[1]
        assert milliseconds is not None
        return float(np.mean(milliseconds))

    def times(function, *args) -> tuple[float, float]:
        def both(args, cotangent):
            out, pull = jax.vjp(function, *args)
            return out, pull(cotangent)

        shapes = jax.eval_shape(function, *args)
        cotangent = jax.tree.map(lambda s: normal(*s.shape).astype(s.dtype), shapes)
        return mean(function, *args), mean(both, args, cotangent)

    size, width = segments.shape, case.head_dim
    q, k, v = (normal(*size, n, width) for n in (case.heads, case.kv_heads, case.kv_heads))
    frequencies = 1e4 ** -(jnp.arange(0, width, 2) / width)
    q_scale, k_scale = (normal(width) if case.qk_norm else None for _ in range(2))
    offset = float(case.gemma)
    found: Times = {}
    found["attention"] = times(
        lambda q, k, v: attention(q, k, v, plan, scale=width**-0.5, softcap=case.softcap), q, k, v
    )
    found["qk_norm_rope"] = times(
        lambda q, k: qk_norm_rope(
            q, k, positions, frequencies, norm_offset=offset, q_scale=q_scale, k_scale=k_scale
        ),
        q,
        k,
    )
    del q, k, v
    weight = quantize(normal(case.intermediate, case.hidden), nested=True)
    found["nf4"] = mean(lambda w: dequantize(w, jnp.bfloat16), weight), None
    x, residual, scale = normal(*size, case.hidden), normal(*size, case.hidden), normal(case.hidden)
    found["norm"] = times(
        lambda x, r: rms_norm(x, scale, eps=1e-6, offset=offset, residual=r), x, residual
    )
    gate, up = (normal(*size, case.intermediate) for _ in range(2))
    found["glu"] = times(lambda a, b: glu(a, b, activation=case.activation), gate, up)
    head = 0.02 * normal(case.vocabulary, case.hidden)

    def losses(x):
        return cross_entropy(x, head, targets, softcap=case.final_softcap)

    found["cross_entropy"] = times(losses, x)
    return found


def time_triton(case: Case) -> Times:
    """Of the reference kernels."""
    import torch

    from triton_ref.kernels import nf4
    from triton_ref.ops import KERNELS
    from triton_ref.packing import unpad

    parts = (torch.tensor(case.batch[n]) for n in ("tokens", "segment_ids", "targets"))
    packed = unpad(*(part.cuda() for part in parts))
    tokens, width = len(packed.tokens), case.head_dim

    def normal(*shape: int, learned: bool = False) -> Any:
        numbers = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return numbers.requires_grad_(learned)

    def mean(function) -> float:
        function()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(REPEATS):
                function()
            torch.cuda.synchronize()
        return sum(e.self_device_time_total for e in profile.key_averages()) / 1e3 / REPEATS

    def times(function, *args) -> tuple[float, float]:
        results = function(*args)
        results = results if isinstance(results, tuple) else (results,)
        cotangents = [torch.randn_like(result) for result in results]

        def both():
            out = function(*args)
            torch.autograd.grad(out, args, cotangents)

        def forward():
            with torch.no_grad():
                function(*args)

        return mean(forward), mean(both)

    q = normal(tokens, case.heads, width, learned=True)
    k, v = (normal(tokens, case.kv_heads, width, learned=True) for _ in range(2))
    frequencies = 1e4 ** -(torch.arange(0, width, 2, device="cuda") / width)
    q_scale, k_scale = (normal(width) if case.qk_norm else None for _ in range(2))
    documents = (packed.cu_seqlens, packed.max_seqlen)
    how = {"scale": width**-0.5, "window": case.window, "softcap": case.softcap}
    found: Times = {}
    found["attention"] = times(
        lambda q, k, v: KERNELS.attention(q, k, v, *documents, **how), q, k, v
    )
    offset = float(case.gemma)
    found["qk_norm_rope"] = times(
        # views may be overwritten, and are: leaves would be copied first
        lambda q, k: KERNELS.qk_norm_rope(
            q.view_as(q),
            k.view_as(k),
            packed.positions,
            frequencies,
            norm_offset=offset,
            q_scale=q_scale,
            k_scale=k_scale,
        ),
        q,
        k,
    )
    del q, k, v
    weight = nf4.quantize(normal(case.intermediate, case.hidden), nested=True)
    found["nf4"] = mean(lambda: KERNELS.dequantize(weight, torch.bfloat16)), None
    x, residual = (normal(tokens, case.hidden, learned=True) for _ in range(2))
    scale, form = normal(case.hidden), "gemma" if case.gemma else "llama"
    found["norm"] = times(
        lambda x, r: KERNELS.rms_norm(x, scale, eps=1e-6, form=form, residual=r), x, residual
    )
    gate, up = (normal(tokens, case.intermediate, learned=True) for _ in range(2))
    found["glu"] = times(lambda a, b: KERNELS.glu(a, b, case.activation), gate, up)
    head = 0.02 * normal(case.vocabulary, case.hidden)
    found["cross_entropy"] = times(
        lambda x: KERNELS.linear_cross_entropy(x, head, packed.targets, softcap=case.final_softcap),
        x,
    )
    return found


def main(argv: list[str]) -> None:
    """Print a table of all shapes asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-3.1-8b"])
    parser.add_argument("--tokens", type=int, default=8192, help="packed tokens (default 8192)")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--out", type=Path, help="append each result as a line of JSON")
    given = parser.parse_args(argv)
    console = make_console()
    table = Table("shape", "op", "JAX forward", "Triton", "JAX both", "Triton", "Triton / JAX")
    fresh = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool,
        progress_bar("timing", console) as progress,
    ):
        for done, shape in enumerate(given.shape):
            case = make_case(shape, given.tokens, given.max_length)
            sides = []
            for i, side in enumerate((time_jax, time_triton)):
                progress(2 * done + i, 2 * len(given.shape))
                sides.append(pool.submit(side, case).result())
            for op in sides[0]:
                table.add_row(shape, op, *_cells(sides[0][op], sides[1][op]))
                if given.out:
                    with given.out.open("a", encoding="utf-8") as file:
                        line = {
                            "shape": shape,
                            "op": op,
                            "jax": sides[0][op],
                            "triton": sides[1][op],
                        }
                        print(json.dumps(line), file=file)
        progress(2 * len(given.shape), 2 * len(given.shape))
    console.print(table)


def _cells(jax: tuple[float, float | None], triton: tuple[float, float | None]) -> list[str]:
    """In milliseconds; the last is the ratio of the whole."""
    (ours, both), (theirs, their_both) = jax, triton
    cells = [f"{ours:.3f}", f"{theirs:.3f}"]
    if both is None or their_both is None:
        return [*cells, "-", "-", f"{theirs / ours:.2f}"]
    return [*cells, f"{both:.3f}", f"{their_both:.3f}", f"{their_both / both:.2f}"]


if __name__ == "__main__":
    cli.run(main)
