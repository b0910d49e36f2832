"""A LoRA adapter as PEFT stores it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file

from triton_ref.names import text_path

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Pair:
    """The adapter of one projection: `x A^T B^T` times scale is added.

    Attributes:
      a: float32 `[r, in]`.
      b: float32 `[out, r]`.
      scale: the factor.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def load_adapter(folder: Path) -> dict[str, Pair]:
    """Pairs by module path in the text model, such as `model.layers.0.mlp.up_proj`.

    Raises:
      ValueError: no LoRA adapter, a tensor that is no A or B, or one without its partner.
    """
    config = LoraConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder}: the adapter is of type {config.peft_type}, not LORA")
    tensors = load_file(folder / "adapter_model.safetensors")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, part = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B"):
            raise ValueError(f"{folder}: tensor {key} is no LoRA matrix")
        parts.setdefault(module, {})[part] = tensor.float()
    pairs = {}
    for module, pair in parts.items():
        if len(pair) < 2:
            raise ValueError(f"{folder}: {module} has one of lora_A and lora_B only")
        rank = pair["lora_A"].shape[0]
        alphas = config.alpha_pattern or {}
        alpha = alphas.get(get_pattern_key(list(alphas), module), config.lora_alpha)
        scale = alpha / (rank**0.5 if config.use_rslora else rank)
        pairs[text_path(module)] = Pair(pair["lora_A"], pair["lora_B"], scale)
    return pairs
