# ruff: noqa
"""Packed attention on Hopper, backward: one kernel for dQ, one for dK and dV; no atomics."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.draft.tiles import (
    ROWS,
    TILED,
    WARPGROUPS,
    WGMMA,
    add_product,
    column,
    d_scores,
    iotas,
    product,
    ring,
    row,
    scores,
    wash,
    zeros,
)


def backward_q(q, k, v, d_out, lse, delta, starts, begins, *, scale, softcap, keys=64, stages=2,
               staged=False):  # fmt: skip
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    tile, dtype = ROWS * WARPGROUPS, q.dtype
    shape = (ROWS, keys)

    def body(q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, starts_ref, begins_ref, dq_ref, smem, ready, done, washed):  # fmt: skip
        q_smem, d_smem, k_smem, v_smem, staging = smem
        mine_ready, k_ready, v_ready = ready
        k_done, v_done = done
        first = (pl.num_programs(0) - 1 - lax.axis_index("tile")) * tile
        head, me = lax.axis_index("head"), lax.axis_index("warpgroup")
        low = lax.div(starts_ref[first], keys)
        low = lax.min(low, lax.div(first, keys))
        high = pl.cdiv(first + tile, keys)

        @pl.when(me < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = first + me * ROWS
            rows = pl.ds(pl.multiple_of(mine, ROWS), ROWS)
            my_q, my_d = q_smem.at[me], d_smem.at[me]
            plgpu.copy_gmem_to_smem(q_ref.at[rows, head], my_q, mine_ready.at[me])
            plgpu.copy_gmem_to_smem(d_ref.at[rows, head], my_d, mine_ready.at[me])
            load = partial(plgpu.load, layout=WGMMA.reduce(1), optimized=False)
            start = load(starts_ref.at[rows])
            my_lse, my_delta = load(lse_ref.at[head, rows]), load(delta_ref.at[head, rows])
            seen = lax.min(lax.max(pl.cdiv(starts_ref[mine + ROWS - 1], keys), low), high)
            diagonal = lax.max(lax.div(mine, keys), seen)
            plgpu.barrier_wait(mine_ready.at[me])

            def step(masked, i, dq):
                slot = lax.rem(i - low, stages)
                plgpu.barrier_wait(k_ready.at[slot])
                s = product(shape, my_q, k_smem.at[slot].transpose((1, 0)))
                visible = None
                if masked:
                    r, c = iotas(shape)
                    key = c + i * keys
                    visible = (key <= r + mine) & (key >= row(start, shape))
                s, slope = scores(s, visible, scale, softcap)
                p = jnp.exp2(s - row(my_lse, shape))
                plgpu.barrier_wait(v_ready.at[slot])
                dp = product(shape, my_d, v_smem.at[slot].transpose((1, 0)))
                plgpu.barrier_arrive(v_done.at[slot])
                ds = d_scores(p, dp, row(my_delta, shape), slope, visible)
                dq = add_product(
                    dq,
                    ds.astype(dtype),
                    k_smem.at[slot],
                    None if staging is None else staging.at[me],
                )
                plgpu.barrier_arrive(k_done.at[slot])
                return dq

            dq = lax.fori_loop(low, seen, partial(step, True), zeros(ROWS, width))
            dq = lax.fori_loop(seen, diagonal, partial(step, False), dq)
            dq = lax.fori_loop(diagonal, high, partial(step, True), dq)
            my_q[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_q, dq_ref.at[rows, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(me == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")

            def source(i):
                return pl.ds(pl.multiple_of(i * keys, keys), keys), lax.div(head, group)

            def copy(ref, smem):
                return lambda i, slot, full: plgpu.copy_gmem_to_smem(
                    ref.at[source(i)], smem.at[slot], full
                )

            def mixed(i):
                last = lax.max(i * keys + keys, first + tile) - 1
                return begins_ref[last] > lax.min(i * keys, first)

            ring(low, high, stages, (
                (copy(k_ref, k_smem), k_ready, k_done),
                (copy(v_ref, v_smem), v_ready, v_done),
            ), (mixed, lambda slot: wash(k_smem.at[slot]), washed))  # fmt: skip

    mine = plgpu.SMEM((WARPGROUPS, ROWS, width), dtype, transforms=TILED)
    kv = plgpu.SMEM((stages, keys, width), dtype, transforms=TILED)
    p = plgpu.SMEM((WARPGROUPS, ROWS, keys), dtype, transforms=TILED) if staged else None
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            (mine, mine, kv, kv, p),
            (
                plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
            ),
            (plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(tokens // tile, heads),
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, d_out, lse, delta, starts, begins)


def backward_kv(q, k, v, d_out, lse, delta, ends, begins, *, scale, softcap, rows=64, stages=2,
                staged=False):  # fmt: skip
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    tile, dtype = ROWS * WARPGROUPS, q.dtype
    shape = (ROWS, rows)  # keys by queries

    def body(q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, ends_ref, begins_ref, dk_ref, dv_ref,
             smem, ready, done, washed):  # fmt: skip
        k_smem, v_smem, q_smem, d_smem, lse_smem, delta_smem, staging = smem
        mine_ready, q_ready, d_ready = ready
        q_done, d_done = done
        first = lax.axis_index("tile") * tile
        kv_head, me = lax.axis_index("head"), lax.axis_index("warpgroup")
        low = lax.div(first, rows)
        high = pl.cdiv(lax.max(ends_ref[first + tile - 1], first + tile), rows)
        blocks = high - low
        steps = blocks * group

        @pl.when(me < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = first + me * ROWS
            my_rows = pl.ds(pl.multiple_of(mine, ROWS), ROWS)
            my_k, my_v = k_smem.at[me], v_smem.at[me]
            plgpu.copy_gmem_to_smem(k_ref.at[my_rows, kv_head], my_k, mine_ready.at[me])
            plgpu.copy_gmem_to_smem(v_ref.at[my_rows, kv_head], my_v, mine_ready.at[me])
            end = plgpu.load(ends_ref.at[my_rows], layout=WGMMA.reduce(1), optimized=False)
            diagonal = lax.min(lax.div(mine + ROWS - 1 + rows - 1, rows), high)
            inside = lax.min(lax.max(lax.div(ends_ref[mine], rows), diagonal), high)
            plgpu.barrier_wait(mine_ready.at[me])

            def step(masked, member, i, carry):
                dk, dv = carry
                slot = lax.rem(member * blocks + i - low, stages)
                plgpu.barrier_wait(q_ready.at[slot])
                s = product(shape, my_k, q_smem.at[slot].transpose((1, 0)))
                visible = None
                if masked:
                    r, c = iotas(shape)
                    query = c + i * rows
                    visible = (query >= r + mine) & (query < row(end, shape))
                s, slope = scores(s, visible, scale, softcap)
                load = partial(plgpu.load, layout=WGMMA.reduce(0))
                p = jnp.exp2(s - column(load(lse_smem.at[slot]), shape))
                if masked:
                    p = jnp.where(visible, p, 0.0)
                plgpu.barrier_wait(d_ready.at[slot])
                stage = None if staging is None else staging.at[me]
                dv = add_product(dv, p.astype(dtype), d_smem.at[slot], stage)
                dp = product(shape, my_v, d_smem.at[slot].transpose((1, 0)))
                delta = column(load(delta_smem.at[slot]), shape)
                plgpu.barrier_arrive(d_done.at[slot])
                ds = d_scores(p, dp, delta, slope, visible)
                dk = add_product(dk, ds.astype(dtype), q_smem.at[slot], stage)
                plgpu.barrier_arrive(q_done.at[slot])
                return dk, dv

            def member(m, carry):
                carry = lax.fori_loop(low, diagonal, partial(step, True, m), carry)
                carry = lax.fori_loop(diagonal, inside, partial(step, False, m), carry)
                return lax.fori_loop(inside, high, partial(step, True, m), carry)

            dk, dv = lax.fori_loop(0, group, member, (zeros(ROWS, width), zeros(ROWS, width)))
            my_k[...] = (dk * scale).astype(dtype)
            my_v[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_k, dk_ref.at[my_rows, kv_head])
            plgpu.copy_smem_to_gmem(my_v, dv_ref.at[my_rows, kv_head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(me == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")

            def copy(ref, numbers, smem, small):
                def run(n, slot, full):
                    head = kv_head * group + lax.div(n, blocks)
                    at = pl.ds(pl.multiple_of((low + lax.rem(n, blocks)) * rows, rows), rows)
                    plgpu.copy_gmem_to_smem(ref.at[at, head], smem.at[slot], full)
                    plgpu.copy_gmem_to_smem(numbers.at[head, at], small.at[slot], full)

                return run

            def mixed(n):
                i = low + lax.rem(n, blocks)
                last = lax.max(i * rows + rows, first + tile) - 1
                return begins_ref[last] > lax.min(i * rows, first)

            def clean(slot):
                wash(q_smem.at[slot])
                wash(d_smem.at[slot])

            ring(0, steps, stages, (
                (copy(q_ref, lse_ref, q_smem, lse_smem), q_ready, q_done),
                (copy(d_ref, delta_ref, d_smem, delta_smem), d_ready, d_done),
            ), (mixed, clean, washed), copies=2)  # fmt: skip

    mine = plgpu.SMEM((WARPGROUPS, ROWS, width), dtype, transforms=TILED)
    qd = plgpu.SMEM((stages, rows, width), dtype, transforms=TILED)
    small = plgpu.SMEM((stages, rows), jnp.float32)
    p = plgpu.SMEM((WARPGROUPS, ROWS, rows), dtype, transforms=TILED) if staged else None
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=[
            (mine, mine, qd, qd, small, small, p),
            (
                plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            ),
            (plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(tokens // tile, kv_heads),
        grid_names=("tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, d_out, lse, delta, ends, begins)
