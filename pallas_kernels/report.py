"""Which implementation each op runs on this machine, for the header of a run."""

from pallas_kernels.attention import api as attention
from pallas_kernels.cross_entropy import api as cross_entropy
from pallas_kernels.dispatch import choose
from pallas_kernels.glu import api as glu
from pallas_kernels.nf4 import api as nf4
from pallas_kernels.norm import api as norm
from pallas_kernels.qk_norm_rope import api as qk_norm_rope

OPS = {
    "attention": attention,
    "qk_norm_rope": qk_norm_rope,
    "nf4": nf4,
    "norm": norm,
    "glu": glu,
    "cross_entropy": cross_entropy,
}


def picked() -> dict[str, str]:
    """The implementation that "auto" picks for each op."""
    return {name: choose(name, "auto", api.capabilities()) for name, api in OPS.items()}
