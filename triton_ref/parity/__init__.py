"""The same step through the JAX path and the Triton path, each in its own process, compared."""
