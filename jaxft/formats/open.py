"""From what the user calls a model to a checkpoint: a folder, a GGUF file or a hub id."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxft.errors import UserError
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
    hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model_name_or_path, re.ASCII)
    if path.is_dir() or not hub_id:
        return HuggingFaceFolder(path, model_name_or_path)
    return HuggingFaceFolder(_download(model_name_or_path, revision), model_name_or_path)


def _download(repo_id: str, revision: str | None) -> str:
    """Folder of the hub model in the local cache, downloaded where it is not there yet."""
    where = f"{repo_id}@{revision}" if revision else repo_id
    try:
        return snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_FILES)
    except GatedRepoError:
        reason = "access to it must be requested on its page; then log in with 'hf auth login'"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private ('hf auth login')"
    except RevisionNotFoundError:
        reason = "the hub has no such revision"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and there is no complete offline copy in its cache"
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    raise UserError(
        f"{where}: no local folder {Path(repo_id).absolute()}, and as a hub id: {reason}"
    )
