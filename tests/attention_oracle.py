"""Attention and its gradient in plain NumPy float64, one query at a time: written from the docstring of `Arguments`.

Nothing here is shared with npumodel. A query is taken with the list of the keys that it sees, one bool per key from the
definition; no mask is a range, and nothing is done for speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


def attention(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in the layout of the call. options: as for `blocked_attention`, and keep [B, N, Sq, Skv], the
    factors of the weights under dropout (0 for a dropped one).
    """
    call = _Call(q, k, v, **options)
    out = np.zeros((*call.q.shape[:-1], call.v_dim * (call.q_heads if call.flat else 1)))
    lse = np.full((*call.q.shape[:2], call.q_heads) if call.flat else call.q.shape[:-1], -np.inf)
    for b, n, i in call.queries():
        row = _row(call, b, n, i)
        call.head(out, call.q_heads, b, n)[i] = row.used @ row.values
        call.head(lse, None, b, n)[i] = row.lse
    return out, lse


class Gradient(NamedTuple):
    """By each argument that has one; None where the call has no such argument."""

    q: Any
    k: Any
    v: Any
    attn_mask: Any
    bias: Any
    sinks: Any


def gradient(q, k, v, d_out, d_lse, **options) -> tuple[Gradient, Gradient]:
    """The gradient for the cotangents d_out and d_lse, and the size of what was added up: each sum with |terms|."""
    call = _Call(q, k, v, **options)
    d_out, d_lse = _float64(d_out), _float64(d_lse)
    names = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias, "sinks": call.sinks}
    names["attn_mask"] = None if call.attn_mask is None or call.attn_mask.dtype == bool else call.attn_mask
    sums, sizes = (
        Gradient(**{name: None if x is None else np.zeros(x.shape) for name, x in names.items()}) for _ in "12"
    )
    for b, n, i in call.queries():
        row = _row(call, b, n, i)
        d_o, d_l = call.head(d_out, call.q_heads, b, n)[i], call.head(d_lse, None, b, n)[i]
        terms = _gradient_of_row(row, d_o, d_l, row.values @ d_o)
        bounds = _gradient_of_row(row, d_o, d_l, abs(row.values) @ abs(d_o), bound=True)
        for total, (d_weights, d_scores, d_bent, d_sink) in ((sums, terms), (sizes, bounds)):
            scale, query, keys, d_row = row.scale, row.query, row.keys_of, d_o
            if total is sizes:
                scale, query, keys, d_row = (abs(x) for x in (scale, query, keys, d_row))
            group = n // (call.q_heads // call.kv_heads)
            call.head(total.q, call.q_heads, b, n)[i] += scale * d_bent @ keys
            call.head(total.k, call.kv_heads, b, group)[row.keys] += scale * np.outer(d_bent, query)
            call.head(total.v, call.kv_heads, b, group)[row.keys] += np.outer(d_weights, d_row)
            for added in (total.bias, total.attn_mask):
                for j, d in zip(row.keys, d_scores, strict=True) if added is not None else ():
                    added[_entry(added, b, n, i, j)] += d
            if total.sinks is not None:
                total.sinks[n] += d_sink
    return sums, sizes


def _gradient_of_row(row, d_o, d_l, by_weight, bound=False):
    """By value weights, by scores, by scores before the softcap, by the sink; or bounds: every term with its size."""
    by_weight = by_weight * row.keep
    mean = row.weights @ by_weight
    sign, d_l = (1, abs(d_l)) if bound else (-1, d_l)
    d_scores = row.weights * (by_weight + sign * mean + d_l)
    slope = 1 if bound else row.slope  # where the softcap is flat, its slope is a small difference
    return row.used, d_scores, d_scores * slope, row.sink_weight * (sign * mean + d_l)


class _Row(NamedTuple):
    """One query and the keys that it sees: their places, scores' slope under the softcap, weights, dropout factors."""

    query: np.ndarray
    keys: list[int]
    keys_of: np.ndarray
    values: np.ndarray
    scale: float
    slope: np.ndarray
    weights: np.ndarray
    keep: np.ndarray
    used: np.ndarray
    sink_weight: float
    lse: float


def _row(call: _Call, b: int, n: int, i: int) -> _Row:
    group = n // (call.q_heads // call.kv_heads)
    keys = [j for j in range(call.kv_len) if call.sees(b, n, i, j)]
    query = call.head(call.q, call.q_heads, b, n)[i]
    keys_of, values = (call.head(x, call.kv_heads, b, group)[keys] for x in (call.k, call.v))
    scores, slope = call.scale * (keys_of @ query), np.ones(len(keys))
    if call.softcap is not None:
        bent = np.tanh(scores / call.softcap)
        scores, slope = call.softcap * bent, 1 - bent**2
    for added in (call.bias, call.attn_mask):
        if added is not None and added.dtype != bool:
            scores = scores + np.array([added[_entry(added, b, n, i, j)] for j in keys])
    sink = -np.inf if call.sinks is None or call.is_padding(b, i) else call.sinks[n]
    logits = np.append(scores, sink)
    peak = logits.max()
    if peak == -np.inf:
        weights, lse = np.zeros(len(logits)), -np.inf
    else:
        weights = np.exp(logits - peak)
        lse = peak + np.log(weights.sum())
        weights /= weights.sum()
    keep = np.ones(len(keys)) if call.keep is None else call.keep[b, n, i, keys]
    used = weights[:-1] * keep
    return _Row(query, keys, keys_of, values, call.scale, slope, weights[:-1], keep, used, weights[-1], lse)


def _entry(added: np.ndarray, *place: int) -> tuple[int, ...]:
    """Where [b, n, i, j] is in a mask whose axes may be 1, or that is [Sq, Skv]."""
    return tuple(0 if size == 1 else at for size, at in zip(added.shape, place[-added.ndim :], strict=True))


class _Call:
    def __init__(
        self, q, k, v, attn_mask=None, *, layout="BNSD", q_heads=None, kv_heads=None, scale=None, softcap=None,
        bias=None, is_causal=False, causal_offset=None, window=None, q_lengths=None, kv_lengths=None, cu_q_lengths=None,
        cu_kv_lengths=None, q_segment_ids=None, kv_segment_ids=None, sinks=None, keep=None,
    ):  # fmt: skip
        self.layout, self.flat = layout, layout in ("BSH", "SBH")
        self.q, self.k, self.v = _float64(q), _float64(k), _float64(v)
        heads_axis = {"BNSD": 1, "BSND": 2, "TND": 1}.get(layout)
        self.q_heads = q_heads if self.flat else q.shape[heads_axis]
        self.kv_heads = (kv_heads or q_heads) if self.flat else k.shape[heads_axis]
        self.batch = {"TND": 1, "SBH": q.shape[1]}.get(layout, q.shape[0])
        self.q_len, self.kv_len = (x.shape[{"BNSD": 2, "BSND": 1, "BSH": 1}.get(layout, 0)] for x in (q, k))
        dim, self.v_dim = q.shape[-1], v.shape[-1]
        if self.flat:
            dim, self.v_dim = dim // self.q_heads, self.v_dim // self.kv_heads
        self.scale = 1 / np.sqrt(dim) if scale is None else float(scale)
        self.softcap = None if softcap is None else float(softcap)
        self.bias, self.attn_mask, self.sinks = _added(bias), _added(attn_mask), _added(sinks)
        self.is_causal, self.causal_offset, self.window = is_causal, causal_offset, window
        self.q_lengths, self.kv_lengths = q_lengths, kv_lengths
        self.cu_q, self.cu_kv = cu_q_lengths, cu_q_lengths if cu_kv_lengths is None else cu_kv_lengths
        self.q_ids, self.kv_ids = q_segment_ids, q_segment_ids if kv_segment_ids is None else kv_segment_ids
        self.keep = keep

    def queries(self):
        return np.ndindex(self.batch, self.q_heads, self.q_len)

    def head(self, x, heads, b, n):
        """The part [S, D] (or [S], with heads None: an LSE) of one head of one example: a view."""
        if self.flat:
            x = x[:, b] if self.layout == "SBH" else x[b]
            return x[:, n] if heads is None else x.reshape(len(x), heads, -1)[:, n]
        return {"BNSD": lambda: x[b, n], "BSND": lambda: x[b, :, n], "TND": lambda: x[:, n]}[self.layout]()

    def is_padding(self, b, i) -> bool:
        if self.layout == "TND":
            return self.sequence(self.cu_q, i) is None
        return (self.q_lengths is not None and i >= self.q_lengths[b]) or (
            self.q_ids is not None and self.q_ids[b][i] < 0
        )

    @staticmethod
    def sequence(cu, token):
        return next((s for s in range(len(cu) - 1) if cu[s] <= token < cu[s + 1]), None)

    def sees(self, b, n, i, j) -> bool:
        """Whether query i of head n of example b sees key j."""
        if self.is_padding(b, i):
            return False
        if self.attn_mask is not None:
            entry = self.attn_mask[_entry(self.attn_mask, b, n, i, j)]
            if not entry if self.attn_mask.dtype == bool else entry == -np.inf:
                return False
        if self.bias is not None and self.bias[_entry(self.bias, b, n, i, j)] == -np.inf:
            return False
        if self.q_ids is not None and self.q_ids[b][i] != self.kv_ids[b][j]:
            return False
        which, q_len, kv_len = b, self.q_len, self.kv_len
        if self.layout == "TND":
            which = self.sequence(self.cu_q, i)
            if which != self.sequence(self.cu_kv, j):
                return False
            i, j = i - self.cu_q[which], j - self.cu_kv[which]
            q_len, kv_len = (cu[which + 1] - cu[which] for cu in (self.cu_q, self.cu_kv))
        q_len = q_len if self.q_lengths is None else self.q_lengths[b]
        kv_len = kv_len if self.kv_lengths is None else self.kv_lengths[b]
        if j >= kv_len:
            return False
        offset = kv_len - q_len
        if self.causal_offset is not None:
            offset = self.causal_offset if np.ndim(self.causal_offset) == 0 else self.causal_offset[which]
        place, j = int(i) + int(offset), int(j)
        if self.is_causal and j > place:
            return False
        left, right = self.window or (None, None)
        too_early = left is not None and left >= 0 and j < place - int(left)
        too_late = right is not None and right >= 0 and j > place + int(right)
        return not (too_early or too_late)


def _float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _added(x):
    return None if x is None else np.asarray(x) if np.asarray(x).dtype == bool else _float64(x)
