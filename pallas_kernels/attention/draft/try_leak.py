# ruff: noqa
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels.attention.draft.forward import forward
from pallas_kernels.attention.draft.backward import backward_q, backward_kv

N, H, K, D = 384, 2, 1, 64
lens = [1, 100, 37, 200]
pad = N - sum(lens)
first = np.cumsum([0] + lens[:-1])
starts = np.repeat(first, lens)
ends = np.repeat(first + lens, lens)
begins = starts
tail = np.arange(N - pad, N)
starts = np.concatenate([starts, tail + 1]).astype(np.int32)
ends = np.concatenate([ends, tail]).astype(np.int32)
begins = np.concatenate([begins, tail]).astype(np.int32)
ks = jax.random.split(jax.random.key(0), 4)
bf = jnp.bfloat16
q, do = (jax.random.normal(x, (N, H, D), bf) for x in ks[:2])
k, v = (jax.random.normal(x, (N, K, D), bf) for x in ks[2:])


def run(q, k, v, do):
    how = dict(scale=D**-0.5, softcap=None, staged=True)
    st, en, be = (jnp.asarray(x) for x in (starts, ends, begins))
    out, lse = forward(q, k, v, st, be, keys=128, **how)
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1).T
    return (
        out,
        backward_q(q, k, v, do, lse, delta, st, be, **how),
        *backward_kv(q, k, v, do, lse, delta, en, be, **how),
    )


with plgpu.force_gpu_interpret_mode():
    f = jax.jit(run)
    clean = [np.asarray(x.astype(jnp.float32)) for x in f(q, k, v, do)]
    doc = slice(101, 138)
    bad = lambda x: x.at[doc].set(jnp.nan)
    dirty = [np.asarray(x.astype(jnp.float32)) for x in f(q, bad(k), bad(v), do)]
    dirty2 = [np.asarray(x.astype(jnp.float32)) for x in f(bad(q), bad(k), bad(v), bad(do))]
    badv = [np.asarray(x.astype(jnp.float32)) for x in f(q, k, v.at[120].set(jnp.nan), do)]
others = np.ones(N, bool)
others[doc] = False
for n, a, b, c, d in zip(("out", "dq", "dk", "dv"), clean, dirty, dirty2, badv):
    print(
        n,
        "tail zero",
        (a[-pad:] == 0).all(),
        "bit-equal",
        (a[others] == b[others]).all(),
        (a[others] == c[others]).all(),
        "nan inside",
        np.isnan(b[doc]).all(),
        "one bad v: rows nan",
        np.isnan(d[doc]).any((1, 2)).sum(),
        np.isnan(d[others]).sum(),
    )
