"""The whole path on a small real model: train, export, load back, and compare the answers.

    python scripts/quickstart.py --model ~/.cache/jaxft/SmolLM2-135M-Instruct.Q4_1.gguf

`bash scripts/quickstart.sh` makes the environment, fetches the model and calls this. What it does
is what `python -m jaxft.train` does; the options below are those of its command line.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

from jaxft import cli, train
from jaxft.config import TrainConfig
from jaxft.device import compute_dtype
from jaxft.export import import_adapter
from jaxft.formats.generation import stop_tokens
from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.generate import generate
from jaxft.quant import Storage

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "scripts" / "data"
QUESTION = "How do I sleep better?"


def main(argv: list[str]) -> int:
    """Train, then ask base and tuned model the same question."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file or hub id of a model")
    parser.add_argument("--output_dir", type=Path, help="default: a new folder runs/quickstart*")
    parser.add_argument("--max_steps", type=int, default=40, help="updates (default 40)")
    parser.add_argument("--question", default=QUESTION, help=f"default: {QUESTION}")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    output = given.output_dir or _new_folder(ROOT / "runs" / "quickstart")
    config = TrainConfig(
        model_name_or_path=given.model,
        dataset_name=(str(DATA / "quickstart.jsonl"),),
        eval_dataset_name=(str(DATA / "quickstart_eval.jsonl"),),
        output_dir=str(output),
        max_length=512,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        max_steps=given.max_steps,
        learning_rate=2e-3,
        warmup_steps=4,
        gradient_checkpointing="false",
    )
    code = train.run(config)
    if code:
        return code
    before, after = _eval_losses(output)
    base, tuned = answers(config, given.question)
    print(f"\nloss on held-out rows: {before:.3f} before, {after:.3f} after")
    print(f"question:     {given.question}")
    print(f"base model:   {base}")
    print(f"tuned model:  {tuned}")
    print(f"all of it took {time.perf_counter() - began:.0f} s; the adapter is in {output}")
    return 0


def answers(config: TrainConfig, question: str) -> tuple[str, str]:
    """One sampled answer of the base model, and of the base with the adapter read from disk."""
    checkpoint = open_checkpoint(config.model_name_or_path)
    tokenizer = checkpoint.tokenizer()
    storage = Storage(config.load_in_4bit, config.use_bnb_nested_quant, compute_dtype(config.dtype))
    decoder = load_decoder(checkpoint, storage)
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer() -> str:
        tokens = generate(
            decoder,
            prompt,
            stop=stop_tokens(checkpoint, tokenizer),
            max_new_tokens=48,
            temperature=0.3,
        )
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    base = answer()
    import_adapter(Path(config.output_dir), decoder)
    return base, answer()


def _eval_losses(folder: Path) -> tuple[float, float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line]
    return losses[0], losses[-1]


def _new_folder(path: Path) -> Path:
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


if __name__ == "__main__":
    cli.run(main)
