"""Triton kernels with hand-written backwards, each beside its definition in plain torch."""
