"""Two results of the same step, tensor by tensor, against stated bounds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from triton_ref.parity.tensors import Tensor

Arrays = Mapping[str, np.ndarray]

# float32, path against path: differences relative to the tensor's own size (norms)
TENSOR_BOUND = 1e-4
LOSS_BOUND = 1e-5
CURVE_BOUND = 1e-4  # of losses and of gradient norms
# bfloat16: distance to float32 of one path over that of the other; the loss curves
RATIO_BOUND = 1.5
FAR = 0.5  # from float32, relative: too far for either, whatever the other is
CURVE_BOUND_16 = 0.01
MEAN_BOUND_16 = 0.002


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from another.

    Attributes:
      largest, mean: of the absolute differences of the elements.
      relative: norm of the difference over the norm of the other.
    """

    largest: float
    mean: float
    relative: float

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray) -> "Difference":
        """ValueError for shapes that differ. Not finite where an element is not."""
        if one.shape != other.shape:
            raise ValueError(f"shapes {one.shape} and {other.shape}")
        found = np.abs(one.astype(np.float64) - other)
        size = float(np.linalg.norm(other.astype(np.float64)))
        norm = float(np.linalg.norm(found))
        relative = 0.0 if norm == 0 else norm / size if size else math.inf
        return cls(
            float(found.max(initial=0)), float(found.mean()) if found.size else 0.0, relative
        )


@dataclass(frozen=True)
class Row:
    """A line of the table of ops: everything that one op makes in one direction.

    Attributes:
      op: its name, with "backward" where it is that.
      tensors: how many were compared.
      difference: the largest of each measure.
      root_mean_square: of the relative differences.
    """

    op: str
    tensors: int
    difference: Difference
    root_mean_square: float


def differences(one: Arrays, other: Arrays, order: Iterable[Tensor]) -> dict[Tensor, Difference]:
    """The difference of every tensor, in the order in which a step makes them.

    Raises:
      ValueError: a tensor that a result lacks, or has in another shape.
    """
    found = {}
    for tensor in order:
        for name, arrays in (("first", one), ("second", other)):
            if tensor.key not in arrays:
                raise ValueError(f"the {name} result has no tensor {tensor.key}")
        try:
            found[tensor] = Difference.of(one[tensor.key], other[tensor.key])
        except ValueError as error:
            raise ValueError(f"{tensor.key}: {error}") from None
    return found


def first_beyond(found: Mapping[Tensor, Difference], bound: float) -> Tensor | None:
    """The first tensor whose relative difference is above the bound, or is no number."""
    return next((t for t, d in found.items() if not d.relative <= bound), None)


def by_op(found: Mapping[Tensor, Difference]) -> list[Row]:
    """The table of ops, in the order of their first tensors."""
    groups: dict[str, list[Difference]] = {}
    for tensor, difference in found.items():
        name = tensor.op + (" backward" if tensor.backward and tensor.op != "lora" else "")
        groups.setdefault(name, []).append(difference)
    return [_row(name, members) for name, members in groups.items()]


def by_layer(found: Mapping[Tensor, Difference]) -> list[tuple[int, Row, Row]]:
    """Of each layer: its activations, and the gradients that arrive at them."""
    layers: dict[int, tuple[list[Difference], list[Difference]]] = {}
    for tensor, difference in found.items():
        if tensor.layer is not None and tensor.op not in ("nf4", "lora"):
            layers.setdefault(tensor.layer, ([], []))[tensor.backward].append(difference)
    return [
        (number, _row("forward", values), _row("backward", gradients))
        for number, (values, gradients) in sorted(layers.items())
    ]


def _row(name: str, members: list[Difference]) -> Row:
    worst = Difference(
        *(
            float(np.max([getattr(d, name) for d in members]))
            for name in ("largest", "mean", "relative")
        )
    )
    squares = [d.relative**2 for d in members]
    return Row(name, len(members), worst, math.sqrt(sum(squares) / len(squares)))


def relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Difference of each number, relative to the other's size; infinite where only that is 0."""
    apart = np.abs(one - other)
    size = np.where(apart == 0, 1.0, np.abs(other))
    with np.errstate(divide="ignore"):
        return apart / size
