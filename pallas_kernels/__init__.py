"""GPU kernels as plain JAX functions; every op has an XLA definition that runs anywhere."""
