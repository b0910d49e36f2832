"""What both sides record of a step: names, in the order of execution, and the op that makes each.

A side's result is one safetensors file:
  `weight/<module>`     rows of the frozen matrix as the arithmetic sees it
  `value/<tensor>`      rows (tokens) of an activation
  `gradient/<tensor>`   the same rows of its gradient
  `lora/<module>.A|B`   the gradient of an adapter's matrix, of the mean loss
  `loss`                float64 `[1]`, the sum over all targets of the first batch
  `losses`, `grad_norms`  float64 `[steps]`, of the optimiser steps
  `trained/<module>.A|B`  the adapter after them, where there are any
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MATRIX_ROWS = 64  # of each frozen matrix
TOKENS = 256  # of a batch, where it has more

# Activations of a layer in order, with the op that makes each, and the op whose backward makes
# the gradient that arrives there.
_LAYER = (
    ("layer_input", "residual", "norm"),
    ("input_norm", "norm", "linear"),
    ("q", "linear", "qk_norm_rope"),
    ("k", "linear", "qk_norm_rope"),
    ("v", "linear", "attention"),
    ("q_rotated", "qk_norm_rope", "attention"),
    ("k_rotated", "qk_norm_rope", "attention"),
    ("attention", "attention", "linear"),
    ("o", "linear", "norm"),
    ("mlp_norm", "norm", "linear"),
    ("gate", "linear", "glu"),
    ("up", "linear", "glu"),
    ("glu", "glu", "linear"),
    ("down", "linear", "residual"),
)
_LAST = (("stream", "residual", "norm"), ("hidden", "norm", "cross_entropy"))
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Tensor:
    """One recorded tensor.

    Attributes:
      key: in the result file.
      op: that makes it, "nf4", "linear" and so on.
      backward: made by that op's backward pass.
      layer: its number; None after the last one.
    """

    key: str
    op: str
    backward: bool
    layer: int | None

    @property
    def title(self) -> str:
        """The tensor and what made it, in words."""
        kind, _, name = self.key.partition("/")
        words = {"gradient": "gradient at ", "lora": "gradient of ", "trained": "trained "}
        what = words.get(kind, "")
        return f"{what}{name} (from {self.op}{', backward' if self.backward else ''})"


def adapted(keys: Iterable[str]) -> list[str]:
    """Paths of the projections whose adapters' gradients are among a result's tensors."""
    found = (key for key in keys if key.startswith("lora/") and key.endswith(".A"))
    return sorted(key.removeprefix("lora/").removesuffix(".A") for key in found)


def in_order(layers: int, modules: list[str], steps: int = 0) -> Iterator[Tensor]:
    """Everything that is compared, in the order in which a step makes it.

    Args:
      layers: how many the model has.
      modules: paths of the adapted projections.
      steps: optimiser steps that were taken.
    """
    for n in range(layers):
        for name in _PROJECTIONS:
            yield Tensor(f"weight/{_path(n, name)}", "nf4", False, n)
    for n in range(layers):
        for name, op, _ in _LAYER:
            made_by = "embedding" if (n, name) == (0, "layer_input") else op
            yield Tensor(f"value/{_at(n, name)}", made_by, False, n)
    for name, op, _ in _LAST:
        yield Tensor(f"value/{name}", op, False, None)
    yield Tensor("value/nll", "cross_entropy", False, None)
    for name, _, op in reversed(_LAST):
        yield Tensor(f"gradient/{name}", op, True, None)
    for n in reversed(range(layers)):
        for name, _, op in reversed(_LAYER):
            yield Tensor(f"gradient/{_at(n, name)}", op, True, n)
    for module in modules:
        for part in "AB":
            yield Tensor(f"lora/{module}.{part}", "lora", True, int(module.split(".")[2]))
    for module in modules if steps else ():
        for part in "AB":
            yield Tensor(f"trained/{module}.{part}", "adamw", False, None)


def _at(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _path(layer: int, projection: str) -> str:
    half = "self_attn" if projection[0] in "qkvo" else "mlp"
    return f"model.layers.{layer}.{half}.{projection}"


def matrix_rows(count: int) -> list[int]:
    """Which rows of a matrix of that many are recorded: spread evenly, first and last included."""
    return spread(count, MATRIX_ROWS)


def spread(count: int, most: int) -> list[int]:
    """At most so many of `range(count)`, evenly, first and last included."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
