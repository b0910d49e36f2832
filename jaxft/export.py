"""From a trained model to the files that Hugging Face tools load."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxft.formats.modelcard import write_model_card
from jaxft.formats.peft import AdapterConfig, load_adapter, save_adapter
from jaxft.formats.tokenizers import save_tokenizer
from jaxft.formats.weights import Checkpoint
from jaxft.lora import adapter_arrays, add_adapters, set_adapter_arrays
from jaxft.model.decoder import Decoder


def export_adapter(
    folder: Path,
    decoder: Decoder,
    config: AdapterConfig,
    checkpoint: Checkpoint,
    summary: Mapping[str, Any],
) -> None:
    """Write the adapter, the tokenizer and a model card; the adapter is read back and compared.

    Args:
      folder: where to; made if missing.
      decoder: the model with its trained adapters.
      config: what the adapter's configuration says.
      checkpoint: of the base model, for the tokenizer.
      summary: facts of the run for the card.
    """
    save_tokenizer(folder, checkpoint.tokenizer())
    write_model_card(folder, base_model=config.base_model_name_or_path, summary=summary)
    save_adapter(folder, config, adapter_arrays(decoder))


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
