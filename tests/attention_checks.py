"""What the attention tests share: inputs in every layout, and blocked attention compared with the oracle.

The scores of `inputs` have standard deviation `peak`: a softmax close to a choice and not close to a mean, so that one
that is left out or taken over the wrong keys is seen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np

from npumodel.attention import blocked_attention

DIFFERENTIABLE = oracle.Gradient._fields
STATIC = ("layout", "q_heads", "kv_heads", "is_causal", "p_dtype")
#: Blocked attention compiled once for many numbers: eager, each of its operations would be.
jitted = jax.jit(blocked_attention, static_argnames=(*STATIC, "return_lse", "block_q", "block_kv"))


def shape_in(layout, b, n, s, d):
    shapes = {"BNSD": (b, n, s, d), "BSND": (b, s, n, d), "BSH": (b, s, n * d), "SBH": (s, b, n * d), "TND": (s, n, d)}
    return shapes[layout]


def inputs(b=1, n=1, kv=None, sq=8, skv=None, d=8, dv=None, dtype="float32", peak=6.0, seed=0, layout="BNSD") -> Any:
    rng = np.random.default_rng(seed)
    kv, skv, dv = kv or n, skv or sq, dv or d
    sizes = (n, sq, d), (kv, skv, d), (kv, skv, dv)
    q, k, v = (rng.normal(size=shape_in(layout, b, *size)) for size in sizes)
    return jnp.asarray(peak * q, dtype), jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def mask_of(kind, shape, seed=1):
    """About a third masked, and the first query (or all) of the last head without any key where the shape has one."""
    keep = np.random.default_rng(seed).random(shape) > 0.35
    if len(shape) == 4:
        keep[-1, -1, 0, :] &= shape[2] == 1
    if kind == "bool":
        return jnp.asarray(keep)
    bias = np.random.default_rng(seed + 1).normal(size=shape)
    return jnp.asarray(np.where(keep, bias, -np.inf), kind)


def results(q, k, v, *, blocks=(4, 3), cotangents: Any = None, **options):
    """(out, lse), the cotangents, and the gradients by everything that has one: all jitted, numbers traced."""
    attention = options.pop("attention", blocked_attention)
    diff = {"q": q, "k": k, "v": v}
    diff |= {name: options[name] for name in DIFFERENTIABLE[3:] if options.get(name) is not None}
    if "attn_mask" in diff and diff["attn_mask"].dtype == bool:
        del diff["attn_mask"]
    static = {name: options[name] for name in STATIC if name in options}
    if attention is blocked_attention:
        static |= {"block_q": blocks[0], "block_kv": blocks[1]}
    rest = {name: x for name, x in options.items() if name not in static and name not in diff and x is not None}
    rest = {name: x if name in ("window", "dropout_key") else jnp.asarray(x) for name, x in rest.items()}
    if cotangents is None:
        cotangents = cotangents_of(q, k, v, **options)
    (out, lse), gradients = _run(attention, tuple(static.items()), diff, rest, cotangents)
    empty = dict.fromkeys(DIFFERENTIABLE)
    return (out, lse), cotangents, oracle.Gradient(**(empty | gradients))


@partial(jax.jit, static_argnums=(0, 1))
def _run(attention, static, diff, rest, cotangents):
    result, pull = jax.vjp(lambda diff: attention(**diff, **rest, **dict(static), return_lse=True), diff)
    return result, pull(cotangents)[0]


def cotangents_of(q, k, v, layout="BNSD", q_heads=None, kv_heads=None, **options):
    """Of the output and the LSE."""
    rng, heads = np.random.default_rng(2), q_heads
    dv = v.shape[-1] if heads is None else v.shape[-1] // (kv_heads or heads) * heads
    d_out = jnp.asarray(rng.normal(size=(*q.shape[:-1], dv)), q.dtype)
    lse = q.shape[:-1] if layout not in ("BSH", "SBH") else (*q.shape[:-1], heads)
    return d_out, jnp.asarray(rng.normal(size=lse), jnp.promote_types(q.dtype, jnp.float32))


def check(q, k, v, *, blocks=(4, 3), keep=None, slack=1.0, **options):
    """Output, LSE and every gradient of blocked attention are those of the oracle, up to rounding."""
    (out, lse), cotangents, gradients = results(q, k, v, blocks=blocks, **options)
    plain = {name: x for name, x in options.items() if name in _ORACLE}
    want, want_lse = oracle.attention(q, k, v, keep=keep, **plain)
    wants, sizes = oracle.gradient(q, k, v, *cotangents, keep=keep, **plain)
    logit, weight = rounding(q, k, v, **options)
    assert out.dtype == q.dtype and lse.dtype == cotangents[1].dtype
    grow = 1 if keep is None else np.max(keep)
    small = [float(jnp.finfo(options.get("p_dtype") or v.dtype).smallest_subnormal) * x.size for x in (k, q)]  # weights
    assert_within(out, want, slack * grow * largest(v) * (logit + weight + small[0]), "output")
    assert_within(lse, want_lse, slack * logit, "lse")
    for name, got, want, size in zip(DIFFERENTIABLE, gradients, wants, sizes, strict=True):
        assert (got is None) == (want is None), f"gradient by {name}"
        if got is not None:
            more = largest(cotangents[0]) * small[1] if name == "v" else 0
            assert_within(got, want, slack * size * (logit + weight) + more, f"gradient by {name}")


_ORACLE = oracle._Call.__init__.__kwdefaults__.keys() | {"attn_mask"}


def rounding(q, k, v, layout="BNSD", q_heads=None, kv_heads=None, scale=None, p_dtype=None, **options):
    """Of a weight, relative: e^(s (1 + eps)) is off by |s| eps, for the largest score there may be, in the wide dtype,
    eps growing with the root of the terms of a product; and what follows from 16-bit inputs: the rounding of the
    weights, and of the output that the gradient starts from.
    """
    heads = (q_heads or 1), (kv_heads or q_heads or 1)
    dim = q.shape[-1] // heads[0]
    scale = dim**-0.5 if scale is None else abs(float(scale))
    q_norm, k_norm = (_norm(x.reshape(*x.shape[:-1], n, -1)) for x, n in zip((q, k), heads, strict=True))
    added = sum(largest(options[x]) for x in ("bias", "attn_mask", "sinks") if options.get(x) is not None)
    eps = [float(jnp.finfo(x).eps) for x in (jnp.promote_types(q.dtype, "float32"), p_dtype or v.dtype, q.dtype)]
    score = scale * q_norm * k_norm * (1 + dim**0.5 / 4)
    return (score + added + 8) * eps[0], max(eps[1], eps[2]) if max(eps) > eps[0] else 0.0


def _norm(x):
    return np.sqrt((np.nan_to_num(np.asarray(x).astype(np.float64)) ** 2).sum(-1)).max(initial=0)


def largest(x):
    x = np.asarray(x).astype(np.float64)
    return abs(np.where(np.isfinite(x), x, 0)).max(initial=0)


def assert_within(got, want, bound, what=""):
    """|got - want| <= bound plus one rounding of got's dtype; infinities must be the same."""
    info = jnp.finfo(got.dtype)
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=what)
    bound = np.broadcast_to(bound, want.shape)[finite] + abs(want[finite]) * float(info.eps)
    error = abs(got[finite] - want[finite])
    bad = ~(error <= bound + float(info.smallest_subnormal))
    assert not bad.any(), (
        f"{what}: {bad.sum()} of {bad.size} off, the worst by {np.max(error[bad])}, "
        f"{np.max(error[bad] / bound[bad].clip(1e-300))} times what rounding explains; "
        f"got {got[finite][bad][:4]}, want {want[finite][bad][:4]}"
    )


def assert_same(got, want):
    """The same bits."""
    jax.tree.map(np.testing.assert_array_equal, got, want)
