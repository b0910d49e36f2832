"""Causal attention inside segments."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.plan import Plan, make_plan

__all__ = ["Plan", "attention", "make_plan"]
