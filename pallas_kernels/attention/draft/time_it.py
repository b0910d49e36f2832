# ruff: noqa
import functools, math, numpy as np, jax, jax.numpy as jnp, sys, time
from jax.experimental.mosaic.gpu import profiler
from pallas_kernels.attention.draft.forward import forward
from pallas_kernels.attention.draft.backward import backward_q, backward_kv

H, K, N = 32, 8, 8192


def case(lens, D, W=None):
    n = sum(lens)
    first = np.cumsum([0] + lens[:-1])
    st = np.repeat(first, lens)
    en = np.repeat(first + lens, lens)
    be = st
    if W:
        st = np.maximum(st, np.arange(n) - W + 1)
        en = np.minimum(en, np.arange(n) + W)
    ks = jax.random.split(jax.random.key(0), 4)
    bf = jnp.bfloat16
    q, do = (jax.random.normal(x, (n, H, D), bf) for x in ks[:2])
    k, v = (jax.random.normal(x, (n, K, D), bf) for x in ks[2:])
    return q, k, v, do, *(jnp.asarray(x, jnp.int32) for x in (st, en, be))


def ms(f, *a):
    c = jax.jit(f).lower(*a).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    r = profiler.measure(c, iterations=5)(*a)[1]
    return float(np.median(r))


for D in (128, 64, 256):
    for name, lens in (
        ("one", [N]),
        ("16x512", [512] * 16),
        ("64x128", [128] * 64),
        ("mixed", [1, 4000, 37, 1000, 513, 2, 2639]),
    ):
        q, k, v, do, st, en, be = case(lens, D)
        how = dict(scale=D**-0.5, softcap=None)
        fw = functools.partial(forward, keys=64 if D == 256 else 128, **how)
        s = dict(stages=1) if D == 256 else {}
        try:
            out, lse = jax.jit(fw)(q, k, v, st, be)
            delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1).T
            bq = functools.partial(backward_q, **how, **s)
            bk = functools.partial(backward_kv, **how, **s)
            got = [
                out,
                jax.jit(bq)(q, k, v, do, lse, delta, st, be),
                *jax.jit(bk)(q, k, v, do, lse, delta, en, be),
            ]
            err = "-"
            if name == "mixed":
                f = lambda x: x.astype(jnp.float32)

                def ref(q, k, v):
                    s = (
                        jnp.einsum(
                            "ihd,jhd->hij",
                            q,
                            jnp.repeat(k, q.shape[1] // k.shape[1], 1),
                            precision="highest",
                        )
                        * D**-0.5
                    )
                    i = jnp.arange(len(q))
                    vis = (i[None] <= i[:, None]) & (i[None] >= st[:, None])
                    return jnp.einsum(
                        "hij,jhd->ihd",
                        jax.nn.softmax(jnp.where(vis, s, -1e30), -1),
                        jnp.repeat(v, q.shape[1] // k.shape[1], 1),
                        precision="highest",
                    )

                o, pull = jax.vjp(ref, f(q[:, :4]), f(k[:, :1]), f(v[:, :1]))
                want = [o, *pull(f(do[:, :4]))]
                part = [got[0][:, :4], got[1][:, :4], got[2][:, :1], got[3][:, :1]]
                err = " ".join(
                    f"{float(jnp.linalg.norm(f(a) - b) / jnp.linalg.norm(b)):.1e}"
                    for a, b in zip(part, want)
                )
            print(
                f"D={D} {name:7s} fwd {ms(fw, q, k, v, st, be):.3f} dq {ms(bq, q, k, v, do, lse, delta, st, be):.3f} dkv {ms(bk, q, k, v, do, lse, delta, en, be):.3f} err {err}",
                flush=True,
            )
        except Exception as e:
            print(D, name, type(e).__name__, str(e)[:600], flush=True)
