"""Blocked attention with an online softmax: the loop that the model prices.

For every query block, over its kv blocks, with the scores s (see `arguments` for how they arise):

    m' = max(m, max_k s)      l' = l e^(m - m') + sum_k e^(s - m')      o' = o e^(m - m') + e^(s - m') v

and the output is o / l, the LSE m + log l. A sink starts the sums: m = sink, l = 1. FlashAttention-2 (Dao 2023,
arXiv 2307.08691); online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). Axis letters: b batch, h kv head,
g query head of its group, q query, k key, d head_dim, e v_head_dim; a capital is the whole axis and a small one the
part in a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.call import Call
from npumodel.attention.dropout import kept
from npumodel.attention.masks import cut, put
from npumodel.attention.tiles import Grid, Plan, below, grid, like, scored, seen_product, visit


class State(NamedTuple):
    """The softmax so far: peak and total [b, h, g, q], and the weighted sum of values [b, h, g, q, e]."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array


class Result(NamedTuple):
    """The output [B, H, G, Sq, E] in v's dtype, and peak and total of each query's softmax, [B, H, G, Sq]."""

    out: jax.Array
    peak: jax.Array
    total: jax.Array

    @property
    def lse(self) -> jax.Array:
        """log sum exp of the scores; -inf + log 0 where no key is seen."""
        return self.peak + jnp.log(self.total)


def forward(plan: Plan, call: Call) -> Result:
    """Attention in memory O(Sq + Skv)."""
    q, v = call.inputs.q, call.inputs.v
    out = like(0, (*q.shape[:4], v.shape[3]), q).astype(v.dtype)
    rows = like(0, q.shape[:4], q)
    g = grid(call, plan)
    return lax.fori_loop(0, g.tasks, partial(_task, g, plan), Result(out, rows, rows))


def _task(g: Grid, plan: Plan, index: Any, result: Result) -> Result:
    """One query block of a few heads, written into the result."""
    start, _ = g.start(index)
    query = g.rows(g.call.inputs.q, start)
    values = like(0, (*query.shape[:4], g.call.inputs.v.shape[3]), query)
    first = State(*first_softmax(g, start, query), values)
    state = visit(g.steps(start), partial(step, g, plan, start, query), first)
    out = state.values / jnp.where(state.total == 0, 1, state.total)[..., None]
    return Result(
        put(result.out, out, (*start, 0)),
        put(result.peak, state.peak, start),
        put(result.total, state.total, start),
    )


def first_softmax(g: Grid, start: Any, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Peak and total of the task's queries before any key."""
    rows, sinks = query.shape[:4], g.call.inputs.sinks
    if sinks is None:
        return like(-jnp.inf, rows, query), like(0, rows, query)
    at, size = (start[0], start[1], start[2]), (g.b, g.h, g.g)
    peak = like(0, rows, query) + cut(sinks, at, size)[..., None]
    return peak, jnp.exp(peak - finite(peak))  # a sink of -inf is none


def step(g: Grid, plan: Plan, start: Any, query: jax.Array, masked: bool, j: Any, state: State) -> State:
    """One kv block: scores, online softmax, weighted values. Without `masked`, every query sees every key of it."""
    key, value = g.keys(start, j)
    products = jnp.einsum("bhgqd,bhkd->bhgqk", query, key, preferred_element_type=g.call.wide)
    scores, _ = scored(g.call, start[0], g.b, products)
    allowed = None
    if masked:
        tile = g.masks(start, j)
        scores, allowed = tile.apply(scores), tile.allowed

    peak = jnp.maximum(state.peak, scores.max(-1))
    shift = finite(peak)
    weights = jnp.exp(below(scores, shift[..., None]))
    decay = jnp.exp(state.peak - shift)
    total = state.total * decay + weights.sum(-1)
    if g.call.context.dropout is not None:
        weights = weights * kept(g.call.context.dropout, (*start, g.column(j)), g.size)
    weights = rounded(weights, plan.p_dtype)
    values = state.values * decay[..., None] + seen_product(_of_values, weights, value, allowed)
    return State(peak, total, values)


def _of_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.einsum("bhgqk,bhke->bhgqe", weights, value, preferred_element_type=weights.dtype)


def finite(peak: jax.Array) -> jax.Array:
    """0 for -inf, where no key was seen yet: e^(-inf - 0) = 0."""
    return jnp.where(peak == -jnp.inf, 0, peak)


def rounded(weights: jax.Array, dtype: str) -> jax.Array:
    """The weights at the precision of `dtype`, as a matrix unit takes them; summed in their own dtype.

    XLA may leave out a cast to bfloat16 and back, but not reduce_precision, which in turn makes the small numbers of
    float16 (below 6e-5) 0: one of the two is right for each.
    """
    there, here = jnp.finfo(dtype), jnp.finfo(weights.dtype)
    if there.bits >= here.bits:
        return weights
    if there.nexp == here.nexp:
        return lax.reduce_precision(weights, there.nexp, there.nmant)
    return weights.astype(dtype).astype(weights.dtype)
