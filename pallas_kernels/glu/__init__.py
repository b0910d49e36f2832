"""Gated linear units: SwiGLU and tanh-GeGLU."""

from pallas_kernels.glu.api import glu

__all__ = ["glu"]
