"""Blocked attention with an online softmax: the loop that the model prices.

For every query block, over its kv blocks, with s = scale * q k^T + mask:

    m' = max(m, max_k s)      l' = l e^(m - m') + sum_k e^(s - m')      o' = o e^(m - m') + e^(s - m') v

and the output is o / l. FlashAttention-2 (Dao 2023, arXiv 2307.08691); online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867). Axis letters: b batch, h kv head, g query head of its group, q query, k key, d head_dim,
e v_head_dim; a capital is the whole axis and a small one the part in a tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.check import check_attention, check_block
from npumodel.attention.masks import Tile, Visibility, cut, grouped

#: Scores held at once. Several heads go through one step together until a tile has this many.
_TILE_SCORES = 2**20


def blocked_attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    *,
    is_causal: bool = False,
    scale: Any = None,
    block_q: int,
    block_kv: int,
) -> jax.Array:
    """softmax(scale * q k^T + mask) v in tiles of block_q x block_kv: memory O(Sq + Skv), any lengths.

    q [B, N, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv] -> [B, N, Sq, Dv] in q's dtype, where Nkv divides N.
    float32, float16 and bfloat16 are computed in float32 (scores, softmax and sums), float64 in float64.

    attn_mask  bool (True takes part) or floats added to the scaled scores, [1/B, 1/N, 1/Sq, 1/Skv] or [Sq, Skv]
    is_causal  query i sees keys j <= i + Skv - Sq (bottom-right aligned); blocks that no query sees are skipped
    scale      a real number, traced or not; 1 / sqrt(D) by default
    block_q, block_kv  static; they need not divide the lengths and may exceed them

    Odd cases. A query that sees no key gives exactly 0, and so does an empty k. An additive -inf masks the key, but a
    finite value never does: a row of finfo.min on every key is a plain softmax over equal scores, the mean of v.
    NaN and Inf in a key or value reach only the queries that see it; a value of Inf gives Inf there, or NaN where its
    weight is 0. Query blocks and kv blocks at the end reach back rather than over the edge, so nothing is padded.

    Works under jit and vmap. Products of float32 follow jax_default_matmul_precision.
    Not differentiable in reverse (loops with dynamic bounds).
    Raises ValueError as `check.check_attention` does, and for a block size that is no positive integer.
    """
    check_attention(q, k, v, attn_mask, is_causal, scale)
    block_q, block_kv = check_block("block_q", block_q), check_block("block_kv", block_kv)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    shape = (*q.shape[:3], v.shape[3])
    if 0 in (*q.shape, *v.shape):
        return jnp.zeros(shape, q.dtype)
    call = _call(q, k, v, attn_mask, bool(is_causal), scale, block_q, block_kv)
    out = jnp.zeros((*call.q.shape[:4], v.shape[3]), q.dtype)
    return lax.fori_loop(0, call.tasks, partial(_task, call), out).reshape(shape)


class _Call(NamedTuple):
    """q [B, H, G, Q, D], k [B, H, K, D], v [B, H, K, E], the masks, the scale, and the sizes (b, h, q, k) of a tile."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sees: Visibility
    scale: Any
    tile: tuple[int, int, int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tasks along batch, kv heads and query blocks."""
        batch, heads, _, q_len, _ = self.q.shape
        return batch // self.tile[0], heads // self.tile[1], -(-q_len // self.tile[2])

    @property
    def tasks(self) -> int:
        batch, heads, blocks = self.grid
        return batch * heads * blocks


class _State(NamedTuple):
    """The softmax so far: peak and total [b, h, g, q], and the weighted sum of values [b, h, g, q, e]."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array


def _call(q, k, v, attn_mask, causal, scale, block_q, block_kv) -> _Call:
    (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    group = heads // kv_heads
    block_q, block_kv = min(block_q, q_len), min(block_kv, kv_len)
    at_once = _TILE_SCORES // (group * block_q * block_kv)
    some_heads = _divisor(kv_heads, at_once)
    some_batch = _divisor(batch, at_once // some_heads if some_heads == kv_heads else 1)
    scale = jnp.asarray(dim**-0.5 if scale is None else scale, jnp.promote_types(q.dtype, jnp.float32))
    sees = Visibility(grouped(attn_mask, kv_heads), causal, q_len, kv_len)
    grouped_q = q.reshape(batch, kv_heads, group, q_len, dim)
    return _Call(grouped_q, k, v, sees, scale, (some_batch, some_heads, block_q, block_kv))


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most` (1 if there is none)."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def _task(call: _Call, index, out):
    """One query block of a few heads: its loop over kv blocks, written into out [B, H, G, Q, E]."""
    b, h, q, k = call.tile
    at_b, at_h, at_q = jnp.unravel_index(index, call.grid)
    row = jnp.minimum(at_q * q, call.q.shape[3] - q)
    start = (at_b * b, at_h * h, 0, row)
    query = cut(call.q, (*start, 0), (b, h, call.q.shape[2], q, call.q.shape[4]))
    full, count = call.sees.steps(row, q, k)
    state = _loop(0, full, partial(_step, call, start, query, False), _empty(call, query))
    state = _loop(full, count, partial(_step, call, start, query, True), state)
    block = state.values / jnp.where(state.total == 0, 1, state.total)[..., None]
    return lax.dynamic_update_slice(out, block.astype(out.dtype), (*start, 0))


def _loop(first, last, body, state: _State) -> _State:
    """fori_loop, left out where it is known to be empty."""
    if isinstance(first, int) and isinstance(last, int) and first >= last:
        return state
    return lax.fori_loop(first, last, body, state)


def _empty(call: _Call, query) -> _State:
    wide = call.scale.dtype
    rows = query.shape[:4]
    return _State(jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, call.v.shape[3]), wide))


def _step(call: _Call, start, query, masked: bool, j, state: _State) -> _State:
    """One kv block: scores, online softmax, weighted values. Without `masked`, every query sees every key of it."""
    b, h, _, size = call.tile
    wide = call.scale.dtype
    column = jnp.minimum(j * size, call.k.shape[2] - size)
    key, value = (cut(x, (*start[:2], column, 0), (b, h, size, x.shape[3])) for x in (call.k, call.v))
    value = value.astype(wide)

    scores = jnp.einsum("bhgqd,bhkd->bhgqk", query, key, preferred_element_type=wide) * call.scale
    odd = 0
    if masked:
        tile = call.sees.tile((*start, column), scores.shape, j * size)
        scores = tile.apply(scores)
        odd = _odd_seen(value, tile, state.values)
        value = jnp.where(jnp.isfinite(value), value, 0)

    peak = jnp.maximum(state.peak, scores.max(-1))
    shift = jnp.where(peak == -jnp.inf, 0, peak)  # no key seen yet: e^(-inf - 0) = 0
    weights = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(state.peak - shift)
    values = state.values * decay[..., None] + _product(weights, value) + odd
    return _State(peak, state.total * decay + weights.sum(-1), values)


def _odd_seen(value, tile: Tile, like):
    """The NaN and Inf of value [b, h, k, e] that each query is allowed to see, 0 elsewhere: [b, h, g, q, e].

    The product with the weights takes finite values only, since 0 * NaN would leak a masked NaN. This part is rare:
    a loop of 0 or 1 turns skips it, under vmap too, where a cond would compute both sides. The barrier ties the body
    to the turn, or XLA would hoist it out of the loop and always compute it.
    """

    def find(turn, _):
        _, v, masks = lax.optimization_barrier((turn, value, tile))
        marks = jnp.concatenate([v == jnp.inf, v == -jnp.inf, jnp.isnan(v)], axis=-1).astype(v.dtype)
        sees = jnp.broadcast_to(masks.allowed, (*like.shape[:4], v.shape[2])).astype(v.dtype)
        above, below, nan = jnp.split(_product(sees, marks) > 0, 3, axis=-1)
        infinite = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, 0))
        return jnp.where(nan | (above & below), jnp.nan, infinite).astype(like.dtype)

    any_odd = ~jnp.isfinite(value).all()
    return lax.fori_loop(0, any_odd.astype(jnp.int32), find, jnp.zeros_like(like))


def _product(weights, value):
    return jnp.einsum("bhgqk,bhke->bhgqe", weights, value, preferred_element_type=weights.dtype)
