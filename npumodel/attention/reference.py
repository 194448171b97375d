"""Attention as it is written on paper: the specification that the blocked code is tested against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.check import check_attention


def reference_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, scale: Any = None
) -> jax.Array:
    """softmax(scale * q k^T + mask) v, with every score in memory: O(Sq * Skv).

    q [B, N, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv] -> [B, N, Sq, Dv] in q's dtype; float32 inside (float64
    for float64). The meaning of every argument and of every odd case is that of `forward.blocked_attention`.

    Raises ValueError as `check.check_attention` does.
    """
    check_attention(q, k, v, attn_mask, is_causal, scale)
    dtype = q.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    group = q.shape[1] // max(k.shape[1], 1)
    q = jnp.asarray(q, wide)
    k, v = (jnp.repeat(jnp.asarray(x, wide), group, axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else jnp.asarray(scale, wide)

    added, allowed = _masks(attn_mask, is_causal, (*q.shape[:3], k.shape[2]), wide)
    scores = jnp.einsum("bnqd,bnkd->bnqk", q, k, precision=lax.Precision.HIGHEST) * scale + added
    scores = jnp.where(allowed, scores, -jnp.inf)
    return _average(_softmax(scores), v, allowed).astype(dtype)


def _masks(attn_mask: Any, is_causal: bool, full: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """What is added to a score, and whether it takes part at all; both [B, N, Sq, Skv]."""
    added, allowed = jnp.zeros(full, dtype), jnp.ones(full, bool)
    if is_causal:
        allowed &= jnp.tril(jnp.ones(full[2:], bool), k=full[3] - full[2])[None, None]
    if attn_mask is None:
        return added, allowed
    mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask
    if mask.dtype == bool:
        return added, allowed & mask
    lowest = jnp.finfo(dtype).min
    floored = mask.clip(min=float(lowest)) if mask.dtype == "float64" else mask
    return added + jnp.asarray(floored, dtype), allowed & (mask != -jnp.inf)


def _softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis; a row of only -inf gives 0."""
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _average(weights: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """weights @ v, where a NaN or Inf in v reaches only the queries that are allowed to see it."""

    def product(a, b):
        return jnp.einsum("bnqk,bnke->bnqe", a.astype(v.dtype), b.astype(v.dtype), precision=lax.Precision.HIGHEST)

    out = product(weights, jnp.where(jnp.isfinite(v), v, 0))
    for value in (jnp.inf, -jnp.inf):
        out += jnp.where(product(allowed, v == value) > 0, value, 0)
    return jnp.where(product(allowed, jnp.isnan(v)) > 0, jnp.nan, out)
