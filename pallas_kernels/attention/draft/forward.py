# ruff: noqa
"""Packed attention on Hopper, forward: two warpgroups of queries and one that copies keys in."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.draft.tiles import (
    LOG2E,
    MASKED,
    ROWS,
    WARPGROUPS,
    ring,
    wash,
)


def forward(q, k, v, starts, begins, *, scale, softcap, keys=128, stages=2, staged=False):
    """Output `[N, Hq, D]` and log2 of the softmax's denominator `[Hq, N]`.

    starts: int32 `[N]`, never falling: the first token that each token sees; it sees all from
    there to itself.
    """
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    tile = ROWS * WARPGROUPS
    dtype = q.dtype

    def body(
        q_ref,
        k_ref,
        v_ref,
        starts_ref,
        begins_ref,
        out_ref,
        lse_ref,
        scratch,
        ready,
        consumed,
        washed,
    ):
        q_smem, k_smem, v_smem, lse_smem, p_smem = scratch
        q_ready, k_ready, v_ready = ready
        k_consumed, v_consumed, turn = consumed
        # the longest tiles first
        number = pl.num_programs(0) - 1 - lax.axis_index("tile")
        head = lax.axis_index("head")
        me = lax.axis_index("warpgroup")
        first = number * tile
        low = lax.div(lax.min(starts_ref[first], first), keys)
        high = pl.cdiv(first + tile, keys)

        def next_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(me < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = first + me * ROWS
            rows = pl.ds(pl.multiple_of(mine, ROWS), ROWS)
            my_q, my_lse = q_smem.at[me], lse_smem.at[me]
            plgpu.copy_gmem_to_smem(q_ref.at[rows, head], my_q, q_ready.at[me])
            start = plgpu.load(
                starts_ref.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
            )
            # blocks before `seen` may begin too early for some row; those from `diagonal` on may
            # end after one
            seen = lax.min(lax.max(pl.cdiv(starts_ref[mine + ROWS - 1], keys), low), high)
            diagonal = lax.max(lax.div(mine, keys), seen)
            plgpu.barrier_wait(q_ready.at[me])
            like_row = partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA.reduce(1))
            most = like_row(jnp.full((ROWS,), -jnp.inf, jnp.float32))
            total = like_row(jnp.zeros((ROWS,), jnp.float32))
            out = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
            pl.when(me == 1)(next_turn)

            def step(masked, i, carry):
                out, most, total = carry
                slot = lax.rem(i - low, stages)
                plgpu.barrier_wait(k_ready.at[slot])

                def scores(acc):
                    plgpu.wgmma(acc, my_q, k_smem.at[slot].transpose((1, 0)))
                    next_turn()
                    return acc[...]

                s = pl.run_scoped(scores, plgpu.ACC((ROWS, keys), jnp.float32))
                plgpu.barrier_arrive(k_consumed.at[slot])
                if softcap is None:
                    s = s * (scale * LOG2E)
                else:
                    s = jnp.tanh(s * (scale / softcap)) * (softcap * LOG2E)
                if masked:
                    iota = partial(
                        plgpu.broadcasted_iota,
                        jnp.int32,
                        (ROWS, keys),
                        layout=plgpu.Layout.WGMMA,
                    )
                    row, key = iota(0) + mine, iota(1) + i * keys
                    visible = (key <= row) & (key >= lax.broadcast_in_dim(start, s.shape, [0]))
                    s = jnp.where(visible, s, MASKED)
                higher = jnp.maximum(most, s.max(axis=1))
                shrink = jnp.exp2(most - higher)
                p = jnp.exp2(s - lax.broadcast_in_dim(higher, s.shape, [0]))
                total = total * shrink + p.sum(axis=1)
                out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
                p16 = p.astype(dtype)
                out, total, higher, p16 = lax.optimization_barrier((out, total, higher, p16))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])
                plgpu.barrier_wait(turn)
                if staged:
                    p_smem.at[me][...] = p16
                    plgpu.commit_smem()
                    p16 = p_smem.at[me]

                def values(acc):
                    plgpu.wgmma(acc, p16, v_smem.at[slot])
                    return acc[...]

                if staged:
                    out = out + pl.run_scoped(values, plgpu.ACC((ROWS, width), jnp.float32))
                else:
                    out = pl.run_state(lambda acc: plgpu.wgmma(acc, p16, v_smem.at[slot]))(
                        plgpu.ACC.init(out)
                    )
                plgpu.barrier_arrive(v_consumed.at[slot])
                return out, higher, total

            carry = out, most, total
            carry = lax.fori_loop(low, seen, partial(step, True), carry)
            carry = lax.fori_loop(seen, diagonal, partial(step, False), carry)
            out, most, total = lax.fori_loop(diagonal, high, partial(step, True), carry)
            pl.when(me == 0)(next_turn)
            mine_ids = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), plgpu.Layout.WGMMA.reduce(1))
            real = start <= mine_ids + mine
            out = out / lax.broadcast_in_dim(total, out.shape, [0])
            out = jnp.where(lax.broadcast_in_dim(real, out.shape, [0]), out, 0.0)
            my_q[...] = out.astype(dtype)
            my_lse[...] = jnp.where(real, most + jnp.log2(total), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, out_ref.at[rows, head])
            plgpu.copy_smem_to_gmem(my_lse, lse_ref.at[head, rows])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(me == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, group)

            def copy(ref, smem):
                def run(i, slot, full):
                    where = (pl.ds(pl.multiple_of(i * keys, keys), keys), kv_head)
                    plgpu.copy_gmem_to_smem(ref.at[where], smem.at[slot], full)

                return run

            def mixed(i):
                last = lax.max(i * keys + keys, first + tile) - 1
                return begins_ref[last] > lax.min(i * keys, first)

            def clean(slot):
                wash(v_smem.at[slot], k_smem.at[slot])

            ring(low, high, stages, (
                (copy(k_ref, k_smem), k_ready, k_consumed),
                (copy(v_ref, v_smem), v_ready, v_consumed),
            ), (mixed, clean, washed))  # fmt: skip

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kv = plgpu.SMEM((stages, keys, width), dtype, transforms=tiled)
    p = plgpu.SMEM((WARPGROUPS, ROWS, keys), dtype, transforms=tiled) if staged else None
    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((heads, tokens), jnp.float32),
        ),
        scratch_types=[
            (
                plgpu.SMEM((WARPGROUPS, ROWS, width), dtype, transforms=tiled),
                kv,
                kv,
                plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
                p,
            ),
            (
                plgpu.Barrier(num_barriers=WARPGROUPS),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
            ),
            (
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
                plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
                plgpu.Barrier(num_arrivals=WARPGROUPS),
            ),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(tokens // tile, heads),
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, starts, begins)
    return out, lse
