# ruff: noqa
import sys, time, math
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_kernels.attention.draft.forward import forward

N, H, K, D = 384, 2, 1, int(sys.argv[2]) if len(sys.argv) > 2 else 64
lens = [1, 100, 37, 200]
lens.append(N - sum(lens))
starts = np.repeat(np.cumsum([0] + lens[:-1]), lens).astype(np.int32)
begins = starts
W = int(sys.argv[3]) if len(sys.argv) > 3 else None
if W:
    starts = np.maximum(starts, np.arange(N) - W + 1).astype(np.int32)
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (N, H, D), jnp.bfloat16)
k = jax.random.normal(keys[1], (N, K, D), jnp.bfloat16)
v = jax.random.normal(keys[2], (N, K, D), jnp.bfloat16)
scale = D**-0.5
f = lambda staged, *a: forward(
    *a,
    jnp.asarray(starts),
    jnp.asarray(begins),
    scale=scale,
    softcap=None,
    keys=64 if D == 256 else 128,
    stages=2,
    staged=staged,
)
if sys.argv[1] == "lower":
    t = time.time()
    x = jax.jit(lambda *a: f(False, *a)).trace(q, k, v).lower(lowering_platforms=("cuda",))
    print("lowered", time.time() - t)
else:
    with plgpu.force_gpu_interpret_mode():
        t = time.time()
        out, lse = jax.jit(lambda *a: f(True, *a))(q, k, v)
        out.block_until_ready()
        print(time.time() - t)
    f64 = lambda x: np.asarray(x, np.float64)
    s = np.einsum("ihd,jd->hij", f64(q), f64(k)[:, 0]) * scale
    i = np.arange(N)
    vis = (i[None, :] <= i[:, None]) & (i[None, :] >= starts[:, None])
    s = np.where(vis, s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    tot = p.sum(-1, keepdims=True)
    ref = np.einsum("hij,jd->ihd", p / tot, f64(v)[:, 0])
    L = (m + np.log(tot))[..., 0] * math.log2(math.e)
    print(
        "out",
        np.linalg.norm(f64(out) - ref) / np.linalg.norm(ref),
        "lse",
        np.abs(f64(lse) - L).max(),
    )
