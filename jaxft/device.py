"""What the device that JAX runs on can do, and where its compilations are kept."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxft.errors import UserError

_BF16_CAPABILITY = 8.0  # Ampere


def compute_dtype(name: str) -> jnp.dtype:
    """dtype of the arithmetic: `auto` is bfloat16 on a GPU that has it and float32 elsewhere."""
    if name != "auto":
        return jnp.dtype(name)
    device = jax.devices()[0]
    has_bf16 = device.platform == "gpu" and float(device.compute_capability) >= _BF16_CAPABILITY
    return jnp.dtype(jnp.bfloat16 if has_bf16 else jnp.float32)


def check_checkpointing(policy: str) -> None:
    """UserError where this device cannot do what --gradient_checkpointing asks for."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if policy == "offload" and (jax.default_backend() == "cpu" or "pinned_host" not in kinds):
        raise UserError(
            f"--gradient_checkpointing offload needs a GPU; this device is "
            f"{jax.devices()[0].device_kind}: use layer"
        )


def user_cache() -> Path:
    """The user's cache folder for this project; XDG_CACHE_HOME is respected."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxft"


def cache_compilations() -> None:
    """Keep compiled programs in the user's cache, unless JAX was told of another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
