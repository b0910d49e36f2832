"""RMSNorm, also with the residual addition before it."""

from pallas_kernels.norm.api import rms_norm

__all__ = ["rms_norm"]
