"""From what the user calls a model to a checkpoint: a folder, a GGUF file or a hub id."""

from pathlib import Path

from jaxft.errors import UserError
from jaxft.formats.hub import HUB_ID, download
from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.weights import Checkpoint

# no pickled weights, no second copy of the weights under another name
_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]


def open_checkpoint(model_name_or_path: str, revision: str | None = None) -> Checkpoint:
    """Open a model by folder, `.gguf` file or hub id (`org/name`, with an optional revision).

    An existing folder or file comes before the hub. Raises UserError, one line, for whatever is
    missing, unreachable or damaged.
    """
    path = Path(model_name_or_path).expanduser()
    if path.exists() and revision is not None:
        raise UserError(f"a revision ({revision}) is for hub models; {path.absolute()} is local")
    if path.suffix.lower() == ".gguf":
        from jaxft.formats.gguf import GgufFile  # the gguf package is needed here alone

        return GgufFile(path, model_name_or_path)
    if path.is_file():
        raise UserError(
            f"{path.absolute()}: is a file; give the model's folder, a .gguf file or a hub id"
        )
    if path.is_dir() or not HUB_ID.fullmatch(model_name_or_path):
        return HuggingFaceFolder(path, model_name_or_path)
    folder = download(model_name_or_path, revision, "model", _HUB_FILES)
    return HuggingFaceFolder(folder, model_name_or_path)
