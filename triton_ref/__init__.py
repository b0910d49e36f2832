"""The training step once more, in torch and Triton: an independent check of the JAX path."""
