# ruff: noqa
import sys, time, math
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels.attention.draft.forward import forward
from pallas_kernels.attention.draft.backward import backward_q, backward_kv

N, H, K, D = 384, 2, 1, int(sys.argv[2]) if len(sys.argv) > 2 else 64
lens = [1, 100, 37, 200]
lens.append(N - sum(lens))
first = np.cumsum([0] + lens[:-1])
starts = np.repeat(first, lens).astype(np.int32)
ends = np.repeat(first + lens, lens).astype(np.int32)
begins = starts
W = int(sys.argv[3]) if len(sys.argv) > 3 else 0
cap = float(sys.argv[4]) if len(sys.argv) > 4 else None
if W:
    starts = np.maximum(starts, np.arange(N) - W + 1).astype(np.int32)
    ends = np.minimum(ends, np.arange(N) + W).astype(np.int32)
keys = jax.random.split(jax.random.key(0), 4)
bf = jnp.bfloat16
q = jax.random.normal(keys[0], (N, H, D), bf)
k = jax.random.normal(keys[1], (N, K, D), bf)
v = jax.random.normal(keys[2], (N, K, D), bf)
do = jax.random.normal(keys[3], (N, H, D), bf)
scale = D**-0.5


def ref(q, k, v):
    s = jnp.einsum("ihd,jd->hij", q, k[:, 0], precision="highest") * scale
    if cap:
        s = cap * jnp.tanh(s / cap)
    i = np.arange(N)
    vis = (i[None, :] <= i[:, None]) & (i[None, :] >= starts[:, None])
    p = jax.nn.softmax(jnp.where(vis, s, -1e30), -1)
    return jnp.einsum("hij,jd->ihd", p, v[:, 0], precision="highest")


def run(staged, q, k, v, do):
    how = dict(scale=scale, softcap=cap, staged=staged)
    st, en, be = (jnp.asarray(x) for x in (starts, ends, begins))
    out, lse = forward(q, k, v, st, be, keys=64 if D == 256 else 128, **how)
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1).T
    small = dict(stages=1) if D == 256 else {}
    return (
        out,
        backward_q(q, k, v, do, lse, delta, st, be, **how, **small),
        *backward_kv(q, k, v, do, lse, delta, en, be, **how, **small),
    )


if sys.argv[1] == "lower":
    t = time.time()
    jax.jit(lambda *a: run(False, *a)).trace(q, k, v, do).lower(lowering_platforms=("cuda",))
    print("lowered", D, time.time() - t)
else:
    with plgpu.force_gpu_interpret_mode():
        t = time.time()
        got = jax.jit(lambda *a: run(True, *a))(q, k, v, do)
        jax.block_until_ready(got)
        print(time.time() - t)
    f = lambda x: x.astype(jnp.float32)
    out, pull = jax.vjp(ref, f(q), f(k), f(v))
    want = [out, *pull(f(do))]
    for n, a, b in zip(("out", "dq", "dk", "dv"), got, want):
        print(n, float(jnp.linalg.norm(f(a) - b) / jnp.linalg.norm(b)))
