"""Models and data sets of the Hugging Face hub, as folders of its local cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxft.errors import UserError

_NOUNS = {"model": "model", "dataset": "data set"}


def download(
    repo_id: str, revision: str | None, kind: Literal["model", "dataset"], files: Sequence[str]
) -> Path:
    """Folder of the hub's `repo_id` in the local cache, downloaded where it is not there yet.

    `files`: patterns of the files wanted. Raises UserError, one line, where it cannot be had.
    """
    where = f"{repo_id}@{revision}" if revision else repo_id
    try:
        return Path(
            snapshot_download(
                repo_id, repo_type=kind, revision=revision, allow_patterns=list(files)
            )
        )
    except GatedRepoError:
        reason = "access to it must be requested on its page; then log in with 'hf auth login'"
    except RepositoryNotFoundError:
        reason = f"the hub has no such {_NOUNS[kind]}, or it is private ('hf auth login')"
    except RevisionNotFoundError:
        reason = "the hub has no such revision"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and there is no complete offline copy in its cache"
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    raise UserError(
        f"{where}: no local folder {Path(repo_id).absolute()}, and as a hub id: {reason}"
    )
