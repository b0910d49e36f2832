"""What every launch has to know: where it runs, and how wide its offsets must be."""

import torch
from triton import knobs


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 before it is imported)."""
    return bool(knobs.runtime.interpret)


def check_device(*tensors: torch.Tensor) -> None:
    """All tensors are on one device, on which kernels can run.

    Raises:
      ValueError: several devices, or CPU tensors without Triton's interpreter.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    if devices and devices.pop().type != "cuda" and not interpreted():
        raise ValueError("Triton runs on a CPU in its interpreter only: set TRITON_INTERPRET=1")


def needs_int64(*tensors: torch.Tensor) -> bool:
    """Whether an offset into a tensor, or a masked one just past it, can be 2^31 or more."""
    return any(tensor.numel() > 2**31 - 2**24 for tensor in tensors)
