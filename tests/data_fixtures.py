"""A tiny tokenizer and chat templates for the tests of jaxft.data."""

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxft.data.examples import Example
from jaxft.data.rows import Row

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The turn end stands outside of the marked block.
CHATML_MARKED_CONTENT = CHATML_MARKED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)
CHATML_MARKED_LINE = CHATML_MARKED.replace(  # the newline behind the turn end is in the block
    "<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}"
).replace("{% endif %}\n{% endfor %}", "\n{% endif %}{% endfor %}")
# Like SmolLM2's: a system turn is put in where there is none.
CHATML_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are helpful.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}{{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
# Like Qwen 3's: the last answer is shown with its (empty) reasoning, earlier ones without.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>")

TWO_TURNS = [
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world assistant"},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "hello"},  # occurs as a user's text too
]


def tiny_tokenizer(
    template: str | None = CHATML,
    *,
    add_bos: bool = True,
    trim_offsets: bool = True,
    pad: str = "<pad>",
    corpus: tuple[str, ...] = ("hello world",) * 5,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with <s> = 0, </s> = 1, <pad> = 2; offsets without spaces, as Llama 3's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>", *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(corpus, trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if add_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


def rows(*fields: dict) -> list[Row]:
    return [Row(f, f"train.jsonl:{n}") for n, f in enumerate(fields, start=1)]


def chat_rows(*chats: list[dict]) -> list[Row]:
    return rows(*({"messages": chat} for chat in chats))


def labels(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Decoded runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.supervised, [0]])))
    return [
        str(tokenizer.decode(example.input_ids[start:end]))
        for start, end in edges.reshape(-1, 2).tolist()
    ]


def documents(*lengths: int, first_id: int = 10) -> list[Example]:
    """Fully supervised documents whose token ids are all different."""
    examples, start = [], first_id
    for number, length in enumerate(lengths):
        supervised = np.arange(length) > 0
        ids = np.arange(start, start + length, dtype=np.int32)
        examples.append(Example(ids, supervised, f"d{number}"))
        start += length
    return examples


def pairs_of(examples: list[Example]) -> list[tuple[list[int], list[bool]]]:
    """Token ids and labels, for comparing."""
    return [(e.input_ids.tolist(), e.supervised.tolist()) for e in examples]


def write_rows(path: Path, fields: list[dict]) -> Path:
    """Rows as a file of the format and compression that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    kind = suffixes[-1]
    if kind in (".parquet", ".arrow"):
        table = pa.Table.from_pylist(fields)
        if kind == ".parquet":
            pq.write_table(table, path, row_group_size=2)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
                out.write_table(table, max_chunksize=2)
        return path
    if kind in (".csv", ".tsv"):
        file = io.StringIO()
        cells = [
            {k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in fields
        ]
        separator = "," if kind == ".csv" else "\t"
        writer = csv.DictWriter(file, list(fields[0]), delimiter=separator, lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
        text = file.getvalue()
    elif kind == ".json":
        text = json.dumps(fields, ensure_ascii=False, indent=1)
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in fields)
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as out:
            out.write(content)
        return path
    path.write_bytes(content)
    return path


AWKWARD = [
    "null",
    "007",
    "NA",
    " 2024-01-02",
    "1e5",
    "TRUE",
    '"quoted, comma"',
    "two\nlines, and\n\na third",
    "a\u2028b\u2029c\x85d",
    "\U0001f600 e\u0301",
    "tab\there",
    "\\n \\u0041",
    "2024-01-02T03:04:05Z",
    "nan",
    "[1, 2]",
    " padded ",
    "3.10",
    "-0",
    "None",
]
