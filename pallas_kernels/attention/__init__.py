"""Causal attention inside segments."""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.plan import Plan, make_plan
from pallas_kernels.attention.reference import RESIDUALS

__all__ = ["RESIDUALS", "Plan", "attention", "make_plan"]
