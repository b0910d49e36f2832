"""python -m jaxft.export: from a trained model to the files that Hugging Face tools load."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxft import cli, options
from jaxft.errors import UserError
from jaxft.formats import generation
from jaxft.formats.files import check_new, replacing_files, write_json
from jaxft.formats.merged import Merging, save_merged
from jaxft.formats.modelcard import write_model_card
from jaxft.formats.open import open_checkpoint
from jaxft.formats.peft import CONFIG, AdapterConfig, load_adapter, save_adapter
from jaxft.formats.tokenizers import save_tokenizer
from jaxft.formats.weights import Checkpoint
from jaxft.lora import adapter_arrays, add_adapters, set_adapter_arrays
from jaxft.model.decoder import Decoder
from jaxft.options import option
from jaxft.report import make_console, progress_bar

GROUPS = {
    "input": "An adapter and the model it was trained on.",
    "arithmetic": "Every merged weight is W + scale * B @ A in float32, rounded once.",
    "output": "A model folder for transformers, vLLM and whatever else loads those.",
}
DESCRIPTION = (
    "Adds a LoRA adapter into the weights of its base model and writes a folder that needs neither "
    "PEFT nor jaxft. Tensors without an adapter stay as they are, bit for bit; the tokenizer's "
    "files and the generation config are copied. It needs no GPU, and memory for one tensor."
)


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """A merge. Raises UserError, naming option and value, for what cannot be done."""

    adapter: str = option(
        group="input",
        metavar="PATH",
        help="Folder of a PEFT adapter: the output_dir of a training run, or one that PEFT wrote.",
    )
    model_name_or_path: str | None = option(
        None,
        group="input",
        metavar="PATH",
        help="The base model: a folder, a .gguf file or a Hugging Face hub id. none takes the one "
        "that the adapter names; give it where that was a path of another machine.",
    )
    revision: str | None = option(
        None,
        group="input",
        help="Branch, tag or commit of a base model on the hub.",
    )
    base_weights: Literal["original", "nf4"] = option(
        "original",
        group="arithmetic",
        help="What the adapter is added to. original: the checkpoint's own weights, which is what "
        "PEFT and vLLM add it to. nf4: the weights as training with load_in_4bit saw them, every "
        "projection quantised and dequantised; this gives the logits that were trained. Where the "
        "checkpoint holds NF4 itself, both are its dequantised weights.",
    )
    use_bnb_nested_quant: bool = option(
        True,
        group="arithmetic",
        help="As in the training run. Without effect on original weights.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        group="arithmetic",
        help="Number format of the result. auto keeps that of each tensor of the base, and for "
        "quantised ones takes that of config.json, else bfloat16. Rounding to 16 bits swallows "
        "changes far smaller than the weights; how much of the update is left is printed.",
    )
    output_dir: str = option(
        group="output",
        metavar="PATH",
        help="Folder for the model; new or empty. It is filled when all files are whole.",
    )
    max_shard_size: str = option(
        "5GB",
        group="output",
        metavar="SIZE",
        help="Largest weight file, in MB or GB; a model that is larger is split.",
    )

    def __post_init__(self) -> None:
        """Reads every field by the one set of rules."""
        options.normalise(self)
        parse_size(self.max_shard_size)


def parse_size(text: str) -> int:
    """Bytes of a size as transformers spells it: 500MB, 5GB, 2GiB. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(I?)B", text.strip().upper())
    unit = 0 if match is None else (1024 if match[3] else 1000) ** " KMGT".index(match[2])
    size = 0 if match is None else int(float(match[1]) * unit)
    if size < 1:
        raise UserError(f"--max_shard_size must be a size such as 500MB or 5GB, got {text!r}")
    return size


def main(argv: list[str]) -> int:
    """The command; its first word says what to write."""
    kinds = {"merged": "the base model with the adapter added into its weights, for transformers"}
    usage = "\n".join(
        (
            "usage: python -m jaxft.export KIND [OPTIONS]",
            "",
            *(f"  {kind:8}  {what}" for kind, what in kinds.items()),
            "",
            "python -m jaxft.export KIND --help lists the options.",
        )
    )
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] not in kinds:
        raise UserError(f"the first word says what to export ({', '.join(kinds)}), got {argv[0]!r}")
    return merge(parse(argv[1:]))


def parse(argv: list[str]) -> MergeConfig:
    """The merge described by a command line; UserError in one line, `--help` prints and exits."""
    given = options.read_command_line(
        MergeConfig,
        argv,
        prog="python -m jaxft.export merged",
        description=DESCRIPTION,
        groups=GROUPS,
    )
    return options.make(MergeConfig, given)


def merge(config: MergeConfig) -> int:
    """Write the base model with the adapter in its weights.

    Raises:
      UserError: an input that cannot be used, named in one line.
    """
    console = make_console()
    folder, source = Path(config.output_dir).expanduser(), Path(config.adapter).expanduser()
    check_new(folder)
    adapter, arrays = load_adapter(source)
    checkpoint = _open_base(config, adapter, source)
    how = Merging(
        config.base_weights,
        config.use_bnb_nested_quant,
        config.dtype,
        parse_size(config.max_shard_size),
    )
    with progress_bar("merging tensors", console) as progress:
        result = save_merged(
            folder, checkpoint, adapter, arrays, how=how, adapter=source, progress=progress
        )
    weights = "the NF4 weights" if config.base_weights == "nf4" else "the weights"
    console.print(
        f"merged {result.modules} modules into {weights} of {checkpoint.source}; "
        f"{result.kept:.1%} of the update is left after rounding to {', '.join(result.dtypes)}",
        soft_wrap=True,
    )
    console.print(
        f"model written to {folder}: {result.size / 1e9:.2f} GB in {result.files} "
        f"{'file' if result.files == 1 else 'files'}",
        soft_wrap=True,
    )
    return 0


def _open_base(config: MergeConfig, adapter: AdapterConfig, source: Path) -> Checkpoint:
    """The model of the command line, or the one that the adapter names."""
    if config.model_name_or_path is not None:
        return open_checkpoint(config.model_name_or_path, config.revision)
    name = adapter.base_model_name_or_path
    if not name:
        raise UserError(f"{source / CONFIG} names no base model: give --model_name_or_path")
    try:
        return open_checkpoint(name, config.revision or adapter.revision)
    except UserError as fault:
        raise UserError(
            f"{fault} (the base that {source / CONFIG} names; --model_name_or_path names another)"
        ) from None


def export_adapter(
    folder: Path,
    decoder: Decoder,
    config: AdapterConfig,
    checkpoint: Checkpoint,
    summary: Mapping[str, Any],
    ends: Iterable[int] = (),
) -> str:
    """Write the adapter, the tokenizer and a model card; the adapter is read back and compared.

    A generation config is written where the base model does not stop at what was trained as an end.

    Args:
      folder: where to; made if missing.
      decoder: the model with its trained adapters.
      config: what the adapter's configuration says.
      checkpoint: of the base model, for the tokenizer.
      summary: facts of the run for the card.
      ends: ids of the tokens that were trained as the end of an answer.

    Returns:
      The ends at which the base model does not stop, as text; "" where there are none.
    """
    tokenizer = checkpoint.tokenizer()
    save_tokenizer(folder, tokenizer)
    write_model_card(folder, base_model=config.base_model_name_or_path, summary=summary)
    generates, added = generation.extend_stops(checkpoint, ends)
    if added:
        with replacing_files(folder) as temporary:
            write_json(temporary / generation.FILE, generates)
    save_adapter(folder, config, adapter_arrays(decoder))
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in added)


def import_adapter(folder: Path, decoder: Decoder) -> AdapterConfig:
    """Put the adapter of a folder on a decoder that has none.

    Raises:
      UserError: a file that is no plain LoRA adapter, or one with a matrix that this model has no
        place for.
    """
    config, arrays = load_adapter(folder)
    # what the file holds, however the targets were spelled when it was made
    held = replace(config, target_modules=tuple(arrays), layers_to_transform=None)
    add_adapters(decoder, held, seed=0)
    set_adapter_arrays(decoder, arrays)
    return config


if __name__ == "__main__":
    cli.run(main)
