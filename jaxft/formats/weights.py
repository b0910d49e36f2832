"""What a model is built from: the one interface behind folders, hub ids and GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxft.formats.bitsandbytes import StoredNF4


class Checkpoint(Protocol):
    """Configuration, tensors and tokenizer of a pretrained model, read on demand.

    Opening checks files and headers and raises `jaxft.errors.UserError`; tensors are read one at a
    time and nothing is cached, so the host holds one tensor at most beyond what the caller keeps.
    """

    source: str
    """As the user gave it, for messages and for the adapter's `base_model_name_or_path`."""

    config: dict[str, Any]
    """Content in the shape of Hugging Face's config.json."""

    generation_config: dict[str, Any] | None
    """Content of generation_config.json, where there is one."""

    def names(self) -> frozenset[str]:
        """Hugging Face tensor names: `model.layers.0.self_attn.q_proj.weight`, ..."""
        ...

    def stored_name(self, name: str) -> str:
        """The name under which a folder of the same model holds a tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as `read` gives it, from the header alone."""
        ...

    def dtype(self, name: str) -> np.dtype | None:
        """Dtype of a tensor as `read` gives it, from the header alone; None: stored quantised."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in Hugging Face's layout, `[out, in]` for a linear layer.

        The dtype is the stored one of float32, float16 and bfloat16 (ml_dtypes); quantised tensors
        (NF4, fp8, GGUF types) come dequantised, as float32. Raises UserError for any other stored
        type, KeyError for a name that is not in `names()`.
        """
        ...

    def nf4(self, name: str) -> StoredNF4 | None:
        """What a tensor holds where it is stored as NF4, from the headers; its codes on demand."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A fast tokenizer with its chat template, where the checkpoint has one."""
        ...
