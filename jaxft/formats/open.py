"""From what the user calls a model to a checkpoint: a folder, a GGUF file or a hub id."""

import re
from pathlib import Path

from jaxft.errors import UserError
from jaxft.formats.hub import download
from jaxft.formats.hub_names import HUB_ID
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.weights import Checkpoint

# no pickled weights, no second copy of the weights under another name
_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
_HUB_GGUF = re.compile(rf"({HUB_ID.pattern})/(.+\.gguf)", re.ASCII | re.IGNORECASE)


def open_checkpoint(model_name_or_path: str, revision: str | None = None) -> Checkpoint:
    """Open a model by folder, `.gguf` file, hub id (`org/name`) or file on the hub.

    A file on the hub is `org/name/FILE.gguf`. What exists locally comes before the hub; a revision
    is for the hub. Raises UserError, one line, for whatever is missing, unreachable or damaged.
    """
    path = Path(model_name_or_path).expanduser()
    if path.exists() and revision is not None:
        raise UserError(f"a revision ({revision}) is for hub models; {path.absolute()} is local")
    if path.suffix.lower() == ".gguf":
        from jaxft.formats.gguf import GgufFile  # the gguf package is needed here alone

        on_hub = None if path.exists() else _HUB_GGUF.fullmatch(model_name_or_path)
        if on_hub:
            path = _hub_file(on_hub[1], on_hub[2], revision)
        return GgufFile(path, model_name_or_path)
    if path.is_file():
        raise UserError(
            f"{path.absolute()}: is a file; give the model's folder, a .gguf file or a hub id"
        )
    if path.is_dir() or not HUB_ID.fullmatch(model_name_or_path):
        return HuggingFaceFolder(path, model_name_or_path)
    folder = download(model_name_or_path, revision, "model", _HUB_FILES)
    for wanted in ("config.json", "model*.safetensors"):
        if not list(folder.glob(wanted)) and not (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{model_name_or_path}: no {wanted} in {folder}; either the offline copy is "
                "incomplete or the model is stored in another format (of GGUF files name one: "
                f"{model_name_or_path}/FILE.gguf)"
            )
    return HuggingFaceFolder(folder, model_name_or_path)


def _hub_file(repo_id: str, name: str, revision: str | None) -> Path:
    """A file of a hub model in the local cache, downloaded where it is not there yet."""
    path = download(repo_id, revision, "model", [name]) / name
    if not path.is_file():
        local = Path(repo_id, name).absolute()
        raise UserError(
            f"{repo_id}/{name}: no local file {local}, and {repo_id} or its offline copy has no "
            "such file"
        )
    return path
