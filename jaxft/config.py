"""The configuration of a training run: every option of `python -m jaxft.train`, once.

`parse` reads the command line and an optional `--config run.yaml`; the command line wins. A
`TrainConfig` made in Python passes the same checks. Names follow TRL's SFT command and PEFT's
LoraConfig where those have the option; the defaults are chosen for QLoRA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxft import options
from jaxft.config_checks import check
from jaxft.options import option

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

GROUPS = {
    "model": "The frozen model that is adapted, and how its weights are kept in memory.",
    "lora": "The adapter: two small matrices A [r, in] and B [out, r] beside each projection.",
    "data": "What is learned from. Rows are packed into fixed rows of max_length tokens.",
    "training": "One update averages the loss over all target tokens of its batch rows.",
    "output": "Where results go and how often something is reported or saved.",
}

DESCRIPTION = (
    "Fine-tunes a Llama, Mistral, Qwen or Gemma model with LoRA on 4-bit weights and writes a PEFT "
    "adapter. Every option may also stand in the YAML file of --config, under the same name; the "
    "command line wins. Booleans: --packing, --packing true, --packing false. Where 'none' is a "
    "default, the word none sets it back."
)

# What users of other trainers look for, and what is said of it.
ELSEWHERE = {
    "model": "did you mean --model_name_or_path?",
    "base_model": "did you mean --model_name_or_path?",
    "model_revision": "did you mean --revision?",
    "dataset": "did you mean --dataset_name?",
    "datasets": "did you mean --dataset_name?",
    "train_file": "did you mean --dataset_name?",
    "lr": "did you mean --learning_rate?",
    "r": "did you mean --lora_r?",
    "bf16": "write --dtype bfloat16",
    "fp16": "write --dtype float16",
    "torch_dtype": "did you mean --dtype?",
    "warmup_ratio": "give the number of updates as --warmup_steps",
    "eval_strategy": "evaluation follows --eval_steps alone",
    "save_strategy": "saving follows --save_steps alone",
    "load_in_8bit": "weights are kept in 4 bits, or as the checkpoint has them: --load_in_4bit "
    "true or false",
    "use_peft": "it is not needed, a LoRA adapter is always what is trained",
    "optim": "it is not needed, AdamW is always used",
    "push_to_hub": "it is not offered; upload the output folder with 'hf upload'",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run. Raises UserError, naming option and value, for what cannot be run."""

    model_name_or_path: str = option(
        group="model",
        metavar="PATH",
        help="Folder with config.json and safetensors files, a .gguf file, or a Hugging Face hub "
        "id such as meta-llama/Llama-3.2-1B-Instruct.",
    )
    revision: str | None = option(
        None,
        group="model",
        help="Branch, tag or commit of a hub model. A commit keeps a run repeatable when the "
        "model's page changes. none: its main branch.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        group="model",
        help="Number format of the computation. auto is bfloat16 on a GPU that has it and float32 "
        "on a CPU. Adapters, norms, softmax and all sums stay in float32 whatever is chosen.",
    )
    load_in_4bit: bool = option(
        True,
        group="model",
        help="Keep the frozen projections as NF4 (half a byte a weight). A checkpoint that is NF4 "
        "already (bitsandbytes) keeps its codes, and its layers in more bits as they are. false "
        "keeps the checkpoint's own 16- or 32-bit weights: exacter, for four times the memory; "
        "quantised ones are dequantised.",
    )
    use_bnb_nested_quant: bool = option(
        True,
        group="model",
        help="Quantise the NF4 scales as well: saves about 0.4 bit a weight. Turn off only to "
        "match a base that was quantised without it. A checkpoint that is NF4 already keeps its "
        "scales; where those are nested, false is an error.",
    )

    lora_r: int = option(
        16,
        group="lora",
        help="Rank of the adapter. 8 suffices for style and format; 32 to 64 for new knowledge "
        "or large data. Memory and file size grow in proportion.",
    )
    lora_alpha: float = option(
        16.0,
        group="lora",
        help="The adapter's output is multiplied by lora_alpha / lora_r. Raise it together with "
        "lora_r to keep the factor.",
    )
    lora_dropout: float = option(
        0.0,
        group="lora",
        help="Share of the adapter's inputs that is zeroed in training, at random and anew at "
        "each update. 0.05 to 0.1 may help when little data is seen for several epochs.",
    )
    lora_target_modules: tuple[str, ...] = option(
        PROJECTIONS,
        group="lora",
        help="Projections that get an adapter: their names (q_proj v_proj is the smallest common "
        "choice, all seven learn best), all-linear for every one the model has, or one regular "
        "expression that a whole path such as model.layers.0.self_attn.q_proj must match.",
    )
    layers_to_transform: tuple[int, ...] | None = option(
        None,
        group="lora",
        help="Numbers of the layers that get adapters, counted from 0; none: all of them.",
    )
    rank_pattern: Mapping[str, int] | None = option(
        None,
        group="lora",
        help="Other ranks for some modules, as NAME=RANK. A name is the end of a module's path, or "
        "a regular expression for it: down_proj=32 'layers.[0-3].self_attn.q_proj=4'. The first "
        "that fits counts.",
    )
    alpha_pattern: Mapping[str, float] | None = option(
        None,
        group="lora",
        help="Other values of lora_alpha for some modules, as NAME=ALPHA; read as rank_pattern.",
    )
    use_rslora: bool = option(
        False,
        group="lora",
        help="Scale by lora_alpha / sqrt(lora_r) instead, so that a large rank is not muted. "
        "Worth trying from rank 64 on.",
    )

    dataset_name: tuple[str, ...] = option(
        group="data",
        metavar="PATH ...",
        help="Training data, one source or several: a file (.jsonl, .json, .csv, .tsv, each also "
        "with .gz or .zst behind it; .parquet, .arrow), a folder, a glob in quotes such as "
        "'data/*.jsonl', or a hub data set (org/name, org/name@revision). The columns are "
        "messages, or conversations (ShareGPT), or prompt and completion, or instruction (input) "
        "and output, or text.",
    )
    dataset_config: tuple[str, ...] | None = option(
        None,
        group="data",
        help="Configuration of a data set that has several, one for all sources or one for each; "
        "default is the name for none. It holds in eval_dataset_name for the same names.",
    )
    dataset_train_split: tuple[str, ...] = option(
        ("train",),
        group="data",
        metavar="SPLIT ...",
        help="Split to train on, one for all sources or one for each: train, 'train[:10%]', "
        "'train[100:200]', train+test. A single file or a glob is one split, named train.",
    )
    dataset_test_split: tuple[str, ...] = option(
        ("test",),
        group="data",
        metavar="SPLIT ...",
        help="Split of eval_dataset_name to evaluate on, written in the same way. There a single "
        "file or a glob goes by both names, test and train.",
    )
    dataset_weights: tuple[float, ...] | None = option(
        None,
        group="data",
        help="How often an epoch holds the rows of each source, one number for each: 1 is once "
        "(as without this option), 2 is twice, 0.5 is half of them, at random but the same in "
        "every epoch.",
    )
    dataset_text_field: str = option(
        "text",
        group="data",
        help="Field that holds plain text, for rows that are neither chats nor pairs. Such rows "
        "are learned whole; chats and pairs only in the answers.",
    )
    max_length: int = option(
        2048,
        group="data",
        help="Tokens in a packed row, and the longest document. Memory grows with it; set it to "
        "what your longest useful rows need.",
    )
    packing: bool = option(
        True,
        group="data",
        help="Fill each row of max_length with as many whole documents as fit; they do not see "
        "each other. false lays the documents of each batch end to end without padding; batch "
        "sizes then count documents.",
    )
    overflow: Literal["error", "drop", "truncate"] = option(
        "error",
        group="data",
        help="What happens to a document longer than max_length: stop and name it, leave it out, "
        "or cut its end off. The report before training counts what was dropped or cut.",
    )
    eval_dataset_name: tuple[str, ...] | None = option(
        None,
        group="data",
        metavar="PATH ...",
        help="Held-out data for eval_loss, named like dataset_name. It may be the same data set: "
        "its split is dataset_test_split then.",
    )
    eval_split_ratio: float = option(
        0.0,
        group="data",
        help="Share of the training rows to hold out for eval_loss when there is no "
        "eval_dataset_name; 0.05 is usual. The choice of rows depends on the seed alone, and is "
        "made before dataset_weights repeats any.",
    )

    num_train_epochs: float = option(
        1.0,
        group="training",
        help="Passes over the data; 1.5 ends half-way through the second. One to three are usual.",
    )
    max_steps: int = option(
        -1,
        group="training",
        help="Number of updates. A positive number overrides num_train_epochs, -1 leaves it to it.",
    )
    per_device_train_batch_size: int = option(
        4,
        group="training",
        help="Rows of max_length a GPU works on at once. Lower it first when memory runs out, and "
        "raise gradient_accumulation_steps by the same factor.",
    )
    per_device_eval_batch_size: int = option(
        4,
        group="training",
        help="The same for evaluation. It does not change eval_loss.",
    )
    gradient_accumulation_steps: int = option(
        1,
        group="training",
        help="Batches summed into one update. 1x4, 2x2 and 4x1 of the same rows give the same "
        "update.",
    )
    gradient_checkpointing: Literal["false", "layer", "attention", "offload"] = option(
        "layer",
        group="training",
        true_means="layer",
        help="What is computed again in the backward pass to save memory. layer (= true): all but "
        "each layer's input. attention: as layer, but the attention's result is kept. offload: as "
        "layer, with the inputs parked in host memory. false: nothing, the fastest if it fits.",
    )
    learning_rate: float = option(
        2e-4,
        group="training",
        help="Peak step size of AdamW. 1e-4 to 2e-4 suits LoRA; halve it when the loss jumps.",
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = option(
        "cosine",
        group="training",
        help="How the step size falls after the warm-up: along a cosine or a line to 0, or not.",
    )
    warmup_steps: int = option(
        0,
        group="training",
        help="Updates over which the step size rises to learning_rate. 3 to 5% of all updates "
        "steady a run that starts badly.",
    )
    weight_decay: float = option(
        0.0,
        group="training",
        help="AdamW's decay of the adapter towards 0. The frozen model is never touched.",
    )
    max_grad_norm: float = option(
        1.0,
        group="training",
        help="Longer gradients of a whole update are scaled down to this length; 0 never does.",
    )
    seed: int = option(
        42,
        group="training",
        help="Seed of the order of rows, the adapter's start, dropout and the held-out share. The "
        "same seed gives the same run.",
    )

    output_dir: str = option(
        group="output",
        metavar="PATH",
        help="Folder for the adapter, metrics.jsonl, config.yaml and checkpoints. Made if missing.",
    )
    logging_steps: int = option(
        1,
        group="output",
        help="Updates between two lines of metrics.jsonl.",
    )
    eval_steps: int | None = option(
        None,
        group="output",
        help="Updates between two evaluations. none evaluates before the first update and after "
        "the last alone, when there is evaluation data.",
    )
    save_steps: int | None = option(
        None,
        group="output",
        help="Updates between two checkpoints to resume from. none saves at the end and when the "
        "run is stopped by a signal.",
    )
    save_total_limit: int | None = option(
        None,
        group="output",
        help="Checkpoints that are kept, the newest ones; older ones are deleted. none keeps all. "
        "One holds the adapter and AdamW's state, three times the adapter's size in float32.",
    )
    load_best_model_at_end: bool = option(
        False,
        group="output",
        help="Write the adapter of the update with the lowest eval_loss instead of the last one. "
        "Its checkpoint is kept whatever save_total_limit says. Needs eval_steps.",
    )
    resume_from_checkpoint: str | None = option(
        None,
        group="output",
        metavar="{latest,PATH}",
        help="Go on from a checkpoint of the same run: latest takes the newest whole one in "
        "output_dir, a path takes that one. The run continues as if it had never stopped.",
    )
    report_to: Literal["none", "tensorboard", "wandb"] = option(
        "none",
        group="output",
        help="Send the metrics to TensorBoard or Weights & Biases too; install the extra of that "
        "name first.",
    )
    dry_run: bool = option(
        False,
        group="output",
        help="Check everything, print the report and stop: nothing is trained or written.",
    )

    def __post_init__(self) -> None:
        """Reads every field by the one set of rules, then checks ranges and combinations."""
        options.normalise(self)
        check(self)


@dataclass(frozen=True, kw_only=True)
class _CommandLine(TrainConfig):
    """The options and the one that only the command line has."""

    config: str | None = option(
        None,
        group="config",
        metavar="RUN.YAML",
        help="YAML file with any of the options below as `name: value` lines. The config.yaml in "
        "a finished run's folder repeats that run.",
    )


def parse(argv: Sequence[str]) -> TrainConfig:
    """The run described by a command line (without the program's name) and its `--config` file.

    Raises UserError in one line for anything that is unknown, missing or out of range. `--help`
    prints and leaves through SystemExit(0).
    """
    given = options.read_command_line(
        _CommandLine,
        argv,
        prog="python -m jaxft.train",
        description=DESCRIPTION,
        groups={"config": "A file of options.", **GROUPS},
        elsewhere=ELSEWHERE,
    )
    path = given.pop("config", None)
    given = ({} if path is None else options.read_yaml(TrainConfig, path, ELSEWHERE)) | given
    return options.make(TrainConfig, given)


def from_yaml(path: str | Path) -> TrainConfig:
    """The run described by a YAML file alone; UserError as `parse`."""
    return options.make(TrainConfig, options.read_yaml(TrainConfig, path, ELSEWHERE))


def to_yaml(config: TrainConfig) -> str:
    """All options of a run as YAML text, which `from_yaml` reads back to an equal config."""
    return options.dump_yaml(config)
