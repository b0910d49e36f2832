"""Fine-tune language models on NVIDIA GPUs in JAX: LoRA adapters on 4-bit weights."""
