"""The gradient of blocked attention: the forward's tasks and kv blocks again, with the weights recomputed.

With the peak m and total l of each query's softmax, p = e^(s - m), the output's cotangent dO, g = dO / l, and
delta = (sum_e dO o - dLSE) / l (Dao 2023, section 3.2, there with the LSE, m + log l; apart they lose no digits where
scores are large):

    dV += p^T g      dP = g v^T      dS = p (dP - delta)      dbias += dS      dQ += dS k      dK += dS^T q

and at the end dscale = sum dQ q, and dQ and dK times the scale.

A softcap multiplies dS by 1 - tanh^2 after dbias; dropout multiplies p in dV, and dP. Tiles are [b, h, k, g, q], keys
first, and dQ is summed as [.., d, .., q]: so no product contracts the first axis of a large left side, which XLA does
at half speed on CPU (float32, 8 x 4096 x 64, interleaved: queries first 1.3 times the time of keys first, and dQ as
[.., q, d] 1.2 times that of [.., d, q]). What a query block adds to dK and dV goes straight into the whole arrays, so
nothing is stored per block. Axis letters as in `forward`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.call import Call, Inputs
from npumodel.attention.dropout import kept
from npumodel.attention.forward import Result, finite, first_softmax, rounded
from npumodel.attention.masks import add_at
from npumodel.attention.tiles import Grid, Plan, below, grid, like, scored, seen_product, visit

#: Scores beyond this, where a rounding of float32 changes weights by 1e-4: see `_softmax`.
LARGE = 2.0**10


class Cotangents(NamedTuple):
    """Of the output, [B, H, G, Sq, E], and of the LSE, [B, H, G, Sq]."""

    out: jax.Array
    lse: jax.Array


class Sums(NamedTuple):
    """Gradients so far, in the wide dtype: of keys and values whole, of the biases that want one (else None)."""

    k: jax.Array
    v: jax.Array
    added: tuple[jax.Array | None, ...]


class Rows(NamedTuple):
    """What a task knows about its queries, all 0 where a query sees no key or belongs to the task before.

    query [b, h, g, q, d], d_out (g above) [b, h, g, q, e]; delta and peak [b, h, 1, g, q], the peak +inf there: p = 0.
    """

    query: jax.Array
    d_out: jax.Array
    delta: jax.Array
    peak: jax.Array


def backward(plan: Plan, call: Call, result: Result, cotangents: Cotangents, wanted: tuple[bool, ...]) -> Inputs:
    """The gradients, each in its argument's dtype. wanted: which of the biases need one (the others get None)."""
    inputs = call.inputs
    zeros = [like(0, x.shape, inputs.q) for x in (inputs.q, inputs.k, inputs.v)]
    added = tuple(
        like(0, x.shape, inputs.q) if want else None for x, want in zip(inputs.added, wanted, strict=True)
    )
    delta = _delta(call, result, cotangents)
    g = grid(call, plan)
    task = partial(_task, g, plan, result, cotangents.out, delta)
    d_q, sums = lax.fori_loop(0, g.tasks, task, (zeros[0], Sums(zeros[1], zeros[2], added)))
    scale = inputs.scale.reshape(-1, 1, 1, 1)
    return Inputs(
        scale[..., None] * d_q,
        (scale * sums.k).astype(inputs.k.dtype),
        sums.v.astype(inputs.v.dtype),
        _summed(jnp.where(d_q == 0, 0, d_q * inputs.q).sum((1, 2, 3, 4)), inputs.scale),
        tuple(None if d is None else d.astype(x.dtype) for d, x in zip(sums.added, inputs.added, strict=True)),
        None if inputs.sinks is None else _of_sinks(inputs.sinks, result, delta),
    )


def _delta(call: Call, result: Result, cotangents: Cotangents) -> jax.Array:
    """delta times l, [B, H, G, Sq]: 0 where a query sees no key, whatever its cotangent holds."""
    out, d_out = (x.astype(call.wide) for x in (result.out, cotangents.out))
    delta = jnp.where(out == 0, 0, d_out * out).sum(-1) - cotangents.lse
    return jnp.where(result.total == 0, 0, delta)


def _of_sinks(sinks: jax.Array, result: Result, delta: jax.Array) -> jax.Array:
    """A sink has a weight, e^(sink - m), but no value: dsink = sum over batch and queries of weight * -delta."""
    logits = sinks[..., None]
    weight = jnp.where(logits == -jnp.inf, 0, jnp.exp(logits - jnp.where(result.total == 0, 0, result.peak)))
    delta = jnp.where(weight == 0, 0, delta / jnp.where(result.total == 0, 1, result.total))
    each = -(weight * delta).sum(-1)
    return _summed(each, sinks)


def _summed(each: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of x [1/B, ...] from that of every example."""
    return each if x.shape[0] == each.shape[0] else each.sum(0, keepdims=True)


def _task(g: Grid, plan: Plan, result: Result, d_out: jax.Array, delta: jax.Array, index: Any, carry: Any) -> Any:
    start, fresh = g.start(index)
    rows = _rows(g, start, fresh, result, d_out, delta)
    zero = jnp.zeros_like(jnp.moveaxis(rows.query, -1, 2))
    d_query, sums = visit(g.steps(start), partial(step, g, plan, start, rows), (zero, carry[1]))
    return add_at(carry[0], jnp.moveaxis(d_query, 2, -1), (*start, 0)), sums


def _rows(g: Grid, start: Any, fresh: Any, result: Result, d_out: jax.Array, delta: jax.Array) -> Rows:
    query, d_out, delta = (g.rows(x, start) for x in (g.call.inputs.q, d_out, delta))
    peak, total = _softmax(g, start, query, result)
    live = (total != 0) & (start[3] + jnp.arange(g.q, dtype=jnp.int32) >= fresh).reshape(1, 1, 1, -1)
    query = jnp.where(live[..., None], query, 0)
    d_out = jnp.where(live[..., None], d_out, 0).astype(g.call.wide) / jnp.where(live, total, 1)[..., None]
    delta = jnp.where(live, delta / jnp.where(live, total, 1), 0)
    peak = jnp.where(live, peak, jnp.inf)
    return Rows(query, d_out, delta[:, :, None], peak[:, :, None])


def _softmax(g: Grid, start: Any, query: jax.Array, result: Result) -> tuple[jax.Array, jax.Array]:
    """Peak and total of the task's queries: those of the forward pass, or where scores are `LARGE` of the scores as
    this pass has them, which costs one product more. A loop of 0 or 1 turns skips it, as in `seen_product`.
    """
    peak, total = g.rows(result.peak, start), g.rows(result.total, start)

    def again(turn, _):
        _, rows = lax.optimization_barrier((turn, query))
        return visit(g.steps(start), partial(_online, g, start, rows), first_softmax(g, start, rows))

    large = (jnp.isfinite(peak) & (abs(peak) > LARGE)).any()
    return lax.fori_loop(0, large.astype(jnp.int32), again, (peak, total))


def _online(g: Grid, start: Any, query: jax.Array, masked: bool, j: Any, state: Any) -> Any:
    """One kv block of `_softmax`."""
    scores, _, _ = _scores(g, start, query, g.keys(start, j)[0], masked, j)
    peak = jnp.maximum(state[0], scores.max(2))
    shift = finite(peak)
    return peak, state[1] * jnp.exp(state[0] - shift) + jnp.exp(below(scores, shift[:, :, None])).sum(2)


def _scores(g: Grid, start: Any, query: jax.Array, key: jax.Array, masked: bool, j: Any) -> Any:
    """The scores of block j, keys first, with -inf where masked; the slope of their softcap; True where allowed."""
    products = jnp.einsum("bhkd,bhgqd->bhkgq", key, query, preferred_element_type=g.call.wide)
    scores, slope = scored(g.call, start[0], g.b, products)
    if not masked:
        return scores, slope, None
    tile = g.masks(start, j, keys_first=True)
    return tile.apply(scores), slope, tile.allowed


def step(g: Grid, plan: Plan, start: Any, rows: Rows, masked: bool, j: Any, state: Any) -> Any:
    """One kv block: adds to the gradient of the task's queries, of the block's keys and values, of its biases."""
    d_query, sums = state
    key, value = g.keys(start, j)
    scores, slope, allowed = _scores(g, start, rows.query, key, masked, j)
    d_weights = jnp.einsum("bhke,bhgqe->bhkgq", value, rows.d_out, preferred_element_type=g.call.wide)
    weights = jnp.exp(below(scores, rows.peak))
    used = weights
    if g.call.context.dropout is not None:
        keep = kept(g.call.context.dropout, (*start, g.column(j)), g.size, keys_first=True)
        used, d_weights = weights * keep, d_weights * keep
    d_scores = weights * (d_weights - rows.delta)
    if allowed is not None:  # weights of 0 do not hide a NaN
        used, d_scores = (jnp.where(allowed, x, 0) for x in (used, d_scores))

    at = (start[0], start[1], g.column(j), 0)
    at_scores = (*start, g.column(j))
    added = tuple(
        None if x is None else add_at(x, jnp.moveaxis(d_scores, 2, -1), at_scores) for x in sums.added
    )
    d_scores = d_scores * slope
    d_value = seen_product(_of_keys, rounded(used, plan.p_dtype), rows.d_out, allowed)
    d_key = seen_product(_of_keys, d_scores, rows.query, allowed, exact=False)
    d_query = d_query + seen_product(_of_queries, d_scores, key, allowed, exact=False)
    return d_query, Sums(add_at(sums.k, d_key, at), add_at(sums.v, d_value, at), added)


def _of_keys(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("bhkgq,bhgqd->bhkd", weights, x, preferred_element_type=weights.dtype)


def _of_queries(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("bhkd,bhkgq->bhdgq", x, weights, preferred_element_type=weights.dtype)
