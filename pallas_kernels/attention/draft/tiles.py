# ruff: noqa
"""What the three kernels share: tiles, masks, and the ring of blocks that the copying warpgroup fills."""

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # tokens of one warpgroup
WARPGROUPS = 2
TILE = ROWS * WARPGROUPS
LOG2E = math.log2(math.e)
MASKED = -1e30

WGMMA = plgpu.Layout.WGMMA
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def product(shape, a, b):
    """a b in a fresh float32 accumulator."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def add_product(acc, a, b, staging):
    """acc + a b, where a is in registers, or staged in shared memory for the interpreter."""
    if staging is not None:
        staging[...] = a
        plgpu.commit_smem()
        return acc + product(acc.shape, staging, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def row(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def column(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def scores(product, visible, scale, softcap):
    """log2-scaled scores, masked, and the slope of the cap (None without one)."""
    if softcap is None:
        s, slope = product * (scale * LOG2E), None
    else:
        t = jnp.tanh(product * (scale / softcap))
        s, slope = t * (softcap * LOG2E), 1.0 - t * t
    return s if visible is None else jnp.where(visible, s, MASKED), slope


def d_scores(p, dp, delta, slope, visible):
    ds = p * (dp - delta)
    if slope is not None:
        ds = ds * slope
    return ds if visible is None else jnp.where(visible, ds, 0.0)


def iotas(shape):
    iota = partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=WGMMA)
    return iota(0), iota(1)


def ring(low, high, stages, streams, wash=None, copies=1):
    """Fill slots with blocks low to high - 1, each once both warpgroups have left it.

    Args:
      streams: of each, copy(i, slot, barrier), and the barriers of full and of empty slots.
      wash: (mixed(i), clean(slot), barriers): where a block is mixed its copies arrive at a
        barrier of this warpgroup's, which cleans the slot and then passes it on.
    """

    @pl.loop(low, high)
    def _(i):
        slot = lax.rem(i - low, stages)

        def fill(barrier=None):
            for copy, full, empty in streams:

                @pl.when(i - low >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                copy(i, slot, full.at[slot] if barrier is None else barrier)

        if wash is None:
            fill()
            return
        mixed, clean, barrier = wash
        must = mixed(i)

        @pl.when(jnp.logical_not(must))
        def _():
            fill()

        @pl.when(must)
        def _():
            fill(barrier)
            plgpu.barrier_wait(barrier)
            clean(slot)
            plgpu.commit_smem()
            for _, full, _ in streams:
                for _ in range(copies):
                    plgpu.barrier_arrive(full.at[slot])

    @pl.loop(lax.max(low, high - stages), high)
    def _(i):  # the barriers end as they began
        for _, _, empty in streams:
            plgpu.barrier_wait(empty.at[lax.rem(i - low, stages)])


def squares(ref):
    """Rows and columns of a tile in pieces of 64 x 64."""
    rows, columns = ref.shape
    for r in range(0, rows, 64):
        for c in range(0, columns, 64):
            yield r, (pl.ds(r, 64), pl.ds(c, 64))


def wash(ref, poisoned=None):
    """Zero what is no finite number, and make the same rows of `poisoned` NaN."""
    lost = {}
    for r, at in squares(ref):
        x = plgpu.load(ref.at[at], layout=WGMMA)
        wide = x.astype(jnp.float32) * 0.0  # 0, or NaN
        ref[at] = jnp.where(wide == 0.0, x, jnp.zeros_like(x))
        if poisoned is not None:
            total = wide.sum(axis=1)
            lost[r] = lost[r] + total if r in lost else total
    if poisoned is not None:
        for r, at in squares(poisoned):
            x = plgpu.load(poisoned.at[at], layout=WGMMA)
            poisoned[at] = (x.astype(jnp.float32) + row(lost[r], x.shape)).astype(x.dtype)
