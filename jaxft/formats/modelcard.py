"""The README.md beside an adapter or a merged model: what it is, whence, how to use it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxft.formats.files import replacing_files

_BODY = """\
# {title}

A LoRA adapter for `{base}`, trained with jaxft.

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({load})
model = PeftModel.from_pretrained(base, {title!r})
tokenizer = AutoTokenizer.from_pretrained({title!r})
```
{note}
## Run

| | |
|---|---|
{rows}
"""
_MERGED = """\
# {title}

`{base}` with the LoRA adapter `{adapter}` merged into its weights by jaxft.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({title!r})
tokenizer = AutoTokenizer.from_pretrained({title!r})
```
{note}
## Merge

| | |
|---|---|
{rows}
"""
_LOCAL = "\nThe base model was a local path; put the place where others find it instead.\n"


def write_model_card(folder: Path, *, base_model: str, summary: Mapping[str, Any]) -> None:
    """Write README.md with the front matter the Hugging Face hub reads and `summary` as a table.

    `base_model` stands in the front matter only if it is shaped like a hub id and is no local path,
    because the hub refuses other values; the text names it as it was given.
    """
    folder = Path(folder)
    texts = {"title": folder.absolute().name}
    _write(folder, _BODY, base_model, "peft", ["lora", "jaxft"], texts, summary)


def write_merged_card(
    folder: Path, *, title: str, base_model: str, adapter: str, summary: Mapping[str, Any]
) -> None:
    """The same for a base model that holds an adapter in its weights; `title` is its name."""
    texts = {"title": title, "adapter": adapter}
    _write(folder, _MERGED, base_model, "transformers", ["jaxft"], texts, summary)


def _write(
    folder: Path,
    body: str,
    base_model: str,
    library: str,
    tags: list[str],
    texts: Mapping[str, str],
    summary: Mapping[str, Any],
) -> None:
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", base_model) and not Path(base_model).exists()
    front = {
        **({"base_model": base_model} if is_hub_id else {}),
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    rows = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in summary.items())
    note = "" if is_hub_id else _LOCAL
    load = repr(base_model)
    if base_model.endswith(".gguf"):  # transformers takes its folder or repository, and its name
        place, _, file = base_model.rpartition("/")
        load = f"{place or '.'!r}, gguf_file={file!r}"
    body = body.format(base=base_model, load=load, note=note, rows=rows, **texts)
    with replacing_files(folder) as temporary:
        text = f"---\n{yaml.safe_dump(front, allow_unicode=True, sort_keys=False)}---\n\n{body}"
        (temporary / "README.md").write_text(text, encoding="utf-8")


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
