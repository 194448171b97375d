"""Attention as it is written on paper: the specification that the blocked code is tested against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.arguments import Arguments
from npumodel.attention.call import Call, empty, finished, prepared
from npumodel.attention.dropout import kept
from npumodel.attention.tiles import below, scored, with_odd


def reference_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **options) -> Any:
    """softmax(scale * q k^T + masks) v, with every score in memory: O(Sq * Skv), differentiable both ways.

    Arguments, results and errors are those of `attend.blocked_attention`, without its blocks; the weights are not
    rounded (p_dtype has no effect).
    """
    arguments = Arguments(q, k, v, attn_mask, **options)
    arguments.check()
    size = arguments.sizes
    if size.empty:
        return empty(arguments, size)
    return finished(*_attend(prepared(arguments, size)), arguments, size)


def _attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """The output [B, H, G, Sq, E] and the LSE [B, H, G, Sq], both in the wide dtype."""
    (q, k, v, _, _, sinks), context, wide = call.inputs, call.context, call.wide
    origin, full = (0,) * 5, (*q.shape[:4], k.shape[2])
    tile = call.sees.tile(origin, full, 0)
    scores, _ = scored(call, 0, full[0], _products(q, k.astype(wide)))
    allowed = jnp.broadcast_to(tile.allowed, full)
    scores = tile.apply(scores)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[..., None, None], (*full[:4], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights, lse = _softmax(scores)
    weights = jnp.where(allowed, weights[..., : full[4]], 0)
    if context.dropout is not None:
        weights = weights * kept(context.dropout, origin, full)
    v = v.astype(wide)
    out = _average(weights, _finite(v))
    return out + lax.stop_gradient(with_odd(_average, out, weights, v, allowed) - out), lse


@jax.custom_jvp
def _finite(x: jax.Array) -> jax.Array:
    """x with 0 for NaN and Inf, but with the gradient of x."""
    return jnp.where(jnp.isfinite(x), x, 0)


_finite.defjvp(lambda primals, tangents: (_finite(*primals), *tangents))


def _products(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k^T, in whose gradients a NaN or Inf of q or k reaches only what it takes part in."""

    def product(q, k):
        return jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision=lax.Precision.HIGHEST)

    q_fine, k_fine = jnp.isfinite(q).all(-1, keepdims=True), jnp.isfinite(k).all(-1, keepdims=True)
    fine = q_fine & jnp.moveaxis(k_fine, -2, -1)[:, :, None]
    finite = product(jnp.where(q_fine, q, 0), jnp.where(k_fine, k, 0))
    return jnp.where(fine, finite, lax.stop_gradient(product(q, k)))


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis, and its log sum exp; a row of only -inf gives 0 and -inf."""
    peak = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    shift = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(_below(scores, shift))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, shift + jnp.log(safe))
    return weights / safe, lse[..., 0]


#: Of `below`, the gradient by the scores: at the peak too, where the minimum has two equals.
_below = jax.custom_jvp(below)
_below.defjvp(lambda primals, tangents: (_below(*primals), tangents[0]))


def _average(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhgqk,bhke->bhgqe", weights, v, precision=lax.Precision.HIGHEST)
