"""Looking into a model while it runs: chosen rows of named tensors and of their gradients."""

import torch


class Silent:
    """Records nothing."""

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class Recorder(Silent):
    """Keeps rows of what passes through it, and of the gradients that come back.

    Attributes:
      rows: int64 `[R]`, the rows (tokens) that are kept.
      values, gradients: float32 `[R, ...]` on the CPU by name; gradients after a backward pass.
    """

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        self.values: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, once its rows are kept."""
        self.values[name] = self._kept(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda g: self.gradients.__setitem__(name, self._kept(g)))
        return tensor

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[self.rows].float().cpu()
