"""What every launch has to know: where it runs, and how wide its offsets must be."""

from functools import cache
from importlib.metadata import version

import torch
from packaging.version import Version
from triton import knobs


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 before it is imported)."""
    return bool(knobs.runtime.interpret)


def check_device(*tensors: torch.Tensor) -> None:
    """All tensors are on one device, on which kernels can run.

    Raises:
      ValueError: several devices, or CPU tensors without an interpreter that works.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    if not devices or devices.pop().type == "cuda":
        return
    if not interpreted():
        raise ValueError("Triton runs on a CPU in its interpreter only: set TRITON_INTERPRET=1")
    if (fault := _fault_of_interpreter()) is not None:
        raise ValueError(fault)


@cache
def _fault_of_interpreter() -> str | None:
    """Why it cannot run a kernel here."""
    ours, numpy = version("triton"), version("numpy")
    if Version(ours) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of Triton {ours} needs NumPy below 2.4, not {numpy}; update Triton"
    return None


def needs_int64(*tensors: torch.Tensor) -> bool:
    """Whether an offset into a tensor, or a masked one just past it, can be 2^31 or more."""
    return any(tensor.numel() > 2**31 - 2**24 for tensor in tensors)
