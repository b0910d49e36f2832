"""Small pieces that several tests use."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxft.formats.huggingface import HuggingFaceFolder
from jaxft.formats.loading import load_decoder
from jaxft.model.decoder import Decoder
from jaxft.quant import Storage

FP32 = Storage(load_in_4bit=False, nested=False, compute=jnp.float32)
NF4_FP32 = Storage(load_in_4bit=True, nested=True, compute=jnp.float32)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save_llama(fixtures: Any, folder: Path, **over: Any):
    """A tiny sharpened Llama of transformers, saved to a folder; returns the model."""
    import transformers

    model = fixtures.tiny_model(transformers.LlamaForCausalLM, transformers.LlamaConfig, **over)
    model.save_pretrained(folder)
    return model


def load(folder: Path, storage: Storage = FP32) -> Decoder:
    """Our decoder of a checkpoint folder."""
    return load_decoder(HuggingFaceFolder(folder), storage)


def logits(decoder: Decoder, tokens, segment_ids=None):
    """float32 logits of token rows, as one document each unless segments are given."""
    tokens = jnp.asarray(tokens, jnp.int32)
    segments = jnp.ones_like(tokens) if segment_ids is None else jnp.asarray(segment_ids)
    return decoder.logits(decoder(tokens, segments))
