"""The operations that the model is made of, as one value: kernels, or their definitions."""

from collections.abc import Callable
from dataclasses import dataclass

from triton_ref.kernels import attention, cross_entropy, glu, nf4, norm, qk_norm_rope


@dataclass(frozen=True)
class Ops:
    """Functions with the signatures of `triton_ref.kernels`; any of them can be replaced."""

    qk_norm_rope: Callable
    attention: Callable
    dequantize: Callable
    rms_norm: Callable
    glu: Callable
    linear_cross_entropy: Callable


KERNELS = Ops(
    qk_norm_rope=qk_norm_rope.qk_norm_rope,
    attention=attention.attention,
    dequantize=nf4.dequantize,
    rms_norm=norm.rms_norm,
    glu=glu.glu,
    linear_cross_entropy=cross_entropy.linear_cross_entropy,
)
DEFINITIONS = Ops(
    qk_norm_rope=qk_norm_rope.qk_norm_rope_definition,
    attention=attention.attention_definition,
    dequantize=nf4.dequantize_definition,
    rms_norm=norm.rms_norm_definition,
    glu=glu.glu_definition,
    linear_cross_entropy=cross_entropy.linear_cross_entropy_definition,
)
