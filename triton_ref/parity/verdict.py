"""Whether both paths agree, and the tables that show it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from triton_ref.parity.compare import (
    CURVE_BOUND,
    CURVE_BOUND_16,
    FAR,
    LOSS_BOUND,
    MEAN_BOUND_16,
    RATIO_BOUND,
    TENSOR_BOUND,
    Arrays,
    by_layer,
    by_op,
    differences,
    first_beyond,
    relative,
)
from triton_ref.parity.tensors import Tensor


@dataclass(frozen=True)
class Table:
    """Cells as text, under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Verdict:
    """What was found.

    Attributes:
      tables: to show.
      faults: one sentence for each bound that is exceeded, the earliest tensor first.
    """

    tables: list[Table] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def judge_float32(jax: Arrays, torch: Arrays, order: Sequence[Tensor]) -> Verdict:
    """Path against path: every tensor, the loss and the loss curves."""
    verdict = Verdict()
    found = differences(jax, torch, order)
    if (tensor := first_beyond(found, TENSOR_BOUND)) is not None:
        verdict.faults.append(
            f"the first tensor that differs is the {tensor.title}: relative "
            f"{found[tensor].relative:.1e}, bound {TENSOR_BOUND:.0e}"
        )
    _judge_flow(verdict, jax)
    (loss,) = relative(jax["loss"], torch["loss"])
    if not loss <= LOSS_BOUND:
        verdict.faults.append(f"the loss differs: relative {loss:.1e}, bound {LOSS_BOUND:.0e}")
    columns = ("", "tensors", "largest", "mean", "relative")
    verdict.tables += [
        Table(
            f"By op, JAX against Triton (relative: bound {TENSOR_BOUND:.0e})",
            columns,
            [(r.op, f"{r.tensors}", *_three(r.difference)) for r in by_op(found)],
        ),
        Table(
            "By layer: activations, and the gradients that arrive at them",
            ("layer", "value largest", "mean", "relative", "gradient largest", "mean", "relative"),
            [
                (f"{n}", *_three(values.difference), *_three(gradients.difference))
                for n, values, gradients in by_layer(found)
            ],
        ),
        Table(
            "Loss, as a sum over all targets",
            ("JAX", "Triton", "relative", "bound"),
            [
                (
                    *(f"{side['loss'].item():.6f}" for side in (jax, torch)),
                    f"{loss:.1e}",
                    f"{LOSS_BOUND:.0e}",
                )
            ],
        ),
        Table(
            "Gradients of A and B",
            columns[:1] + columns[2:],
            [(t.key.removeprefix("lora/"), *_three(d)) for t, d in found.items() if t.op == "lora"],
        ),
    ]
    _judge_curve(verdict, jax, torch, CURVE_BOUND, None)
    return verdict


def judge_bfloat16(jax: Arrays, torch: Arrays, exact: Arrays, order: Sequence[Tensor]) -> Verdict:
    """Each path's distance to a float32 run, op by op, and the loss curves against each other."""
    verdict = Verdict()
    ours, theirs = (by_op(differences(side, exact, order)) for side in (jax, torch))
    rows = []
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.root_mean_square, other.root_mean_square
        near, far = sorted((a, b))
        times = 1.0 if near == far else far / near if near else math.inf
        rows.append(
            (
                one.op,
                f"{one.tensors}",
                f"{one.difference.largest:.1e}",
                f"{other.difference.largest:.1e}",
                f"{a:.2e}",
                f"{b:.2e}",
                f"{times:.2f}",
            )
        )
        lost = [name for name, x in (("JAX", a), ("Triton", b)) if not math.isfinite(x)]
        if lost:
            verdict.faults.append(f"{one.op}: not finite on the {' and '.join(lost)} side")
        elif times > RATIO_BOUND:
            verdict.faults.append(
                f"{one.op}: the {'JAX' if a > b else 'Triton'} path is {times:.2f} times as far "
                f"from float32 as the other, bound {RATIO_BOUND}"
            )
        elif far > FAR:
            verdict.faults.append(f"{one.op}: both are {far:.2f} from float32, bound {FAR}")
    verdict.tables.append(
        Table(
            "By op, distance to float32 (relative, root mean square over its tensors; "
            f"the farther over the nearer: bound {RATIO_BOUND})",
            ("", "tensors", "JAX largest", "Triton largest", "JAX", "Triton", "times"),
            rows,
        )
    )
    _judge_flow(verdict, jax)
    verdict.tables.append(
        Table(
            "Loss, as a sum over all targets",
            ("JAX", "Triton", "float32"),
            [[f"{side['loss'].item():.4f}" for side in (jax, torch, exact)]],
        )
    )
    _judge_curve(verdict, jax, torch, CURVE_BOUND_16, MEAN_BOUND_16)
    return verdict


def _judge_flow(verdict: Verdict, result: Arrays) -> None:
    """Gradients that are all 0 agree, and show nothing."""
    if not any(array.any() for key, array in result.items() if key.startswith("lora/")):
        verdict.faults.append("every gradient of the adapter is 0: nothing was compared there")


def _judge_curve(
    verdict: Verdict, jax: Arrays, torch: Arrays, bound: float, mean_bound: float | None
) -> None:
    steps = relative(jax["losses"], torch["losses"])
    if not len(steps):
        return
    _judge_each(verdict, "losses", jax, torch, bound)
    if mean_bound is None:  # in 16 bits their noise is the gradients', judged above
        _judge_each(verdict, "grad_norms", jax, torch, bound)
    elif not steps.mean() <= mean_bound:
        verdict.faults.append(
            f"the losses differ by {steps.mean():.2%} on average, bound {mean_bound:.1%}"
        )
    verdict.tables.append(
        Table(
            f"Losses of {len(steps)} optimiser steps: relative difference largest "
            f"{steps.max():.1e} (bound {bound:g}), mean {steps.mean():.1e}"
            + (f" (bound {mean_bound:g})" if mean_bound is not None else ""),
            ("step", "JAX", "Triton", "relative", "gradient norms", ""),
            [
                (
                    f"{i + 1}",
                    f"{jax['losses'][i]:.6f}",
                    f"{torch['losses'][i]:.6f}",
                    f"{steps[i]:.1e}",
                    f"{jax['grad_norms'][i]:.4f}",
                    f"{torch['grad_norms'][i]:.4f}",
                )
                for i in range(len(steps))
            ],
        )
    )


def _judge_each(verdict: Verdict, name: str, jax: Arrays, torch: Arrays, bound: float) -> None:
    for i, value in enumerate(relative(jax[name], torch[name])):
        if not value <= bound:
            verdict.faults.append(
                f"the {name.replace('grad_', 'gradient ')} differ from step {i + 1} on: "
                f"{jax[name][i]:.6f} and {torch[name][i]:.6f}, relative {value:.1e}, "
                f"bound {bound:g}"
            )
            return


def _three(d) -> tuple[str, str, str]:
    return f"{d.largest:.1e}", f"{d.mean:.1e}", f"{d.relative:.1e}"
