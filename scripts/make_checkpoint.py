"""A Hugging Face folder for tests of a whole run: random weights of a real shape, or a GGUF file's.

    python scripts/make_checkpoint.py --shape llama-3.2-1b --tokenizer model.gguf --output_dir DIR
    python scripts/make_checkpoint.py --model model.gguf --output_dir DIR

Random weights are bfloat16; those of a GGUF file are dequantised and rounded to it.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from bench_step import SHAPES, RandomCheckpoint

from jaxft import cli
from jaxft.formats.files import check_new, new_folder, write_json
from jaxft.formats.open import open_checkpoint
from jaxft.formats.sharded import write_tensors
from jaxft.formats.tokenizers import save_tokenizer
from jaxft.report import make_console, progress_bar

BF16 = np.dtype(jnp.bfloat16)


def main(argv: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    source.add_argument("--model", metavar="PATH", help="weights of a GGUF file")
    parser.add_argument("--tokenizer", metavar="PATH", help="model whose tokenizer is put in")
    parser.add_argument("--output_dir", required=True, metavar="PATH", help="a new folder")
    given = parser.parse_args(argv)
    if given.shape is not None and given.tokenizer is None:
        parser.error("--shape needs --tokenizer")
    checkpoint = RandomCheckpoint(given.shape) if given.shape else open_checkpoint(given.model)
    named = open_checkpoint(given.tokenizer) if given.tokenizer else checkpoint
    output = Path(given.output_dir)
    check_new(output)
    specs = {name: (BF16, checkpoint.shape(name)) for name in sorted(checkpoint.names())}
    with (
        new_folder(output, last="config.json") as folder,
        progress_bar("writing tensors", make_console()) as progress,
    ):
        write_tensors(
            folder,
            specs,
            lambda name: np.asarray(checkpoint.read(name)).astype(BF16),
            5 * 10**9,
            progress,
        )
        write_json(folder / "config.json", checkpoint.config)
        save_tokenizer(folder, named.tokenizer())


if __name__ == "__main__":
    cli.run(main)
