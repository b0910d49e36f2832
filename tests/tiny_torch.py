"""Tiny models of transformers whose weights are large enough for a fault to show."""

from typing import Any

import torch

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def tiny_model(model_class: Any, config_class: Any, seed: int = 0, gain: float = 6.0, **over: Any):
    """A float32 model in evaluation mode with random weights.

    With the usual initialisation attention is almost uniform and hides faults of positions, masks
    and scaling, so matrices are multiplied by `gain`; norms and biases are moved to matter too.
    """
    torch.manual_seed(seed)
    model = model_class(config_class(**(SMALL | over))).eval()
    model.set_attn_implementation("eager")  # the definition; others leave out caps in some releases
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.5)
    return model
