"""Which keys a query may see, one tile at a time: no mask of the size of the scores is ever built.

Whatever follows from positions (causal, window, lengths, sequences of a TND call) leaves each query one interval of
keys, the `Band`. It tells which blocks no query sees (never touched), which all see in full (no mask), and which are
edges. Axis letters: B batch, H kv head, G query head of its group; a size "1/B" is B, or 1 to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from npumodel.attention.arguments import Arguments
from npumodel.attention.layouts import Sizes


class Band(NamedTuple):
    """Query i of example b sees no key outside of first[b, i] <= j < end[b, i]; int32 [1/B, Sq].

    A query that sees none has first = Skv and end = 0. exact [1/B, Sq]: it sees every key inside; None: all do.
    """

    first: jax.Array
    end: jax.Array
    exact: jax.Array | None = None


class Steps(NamedTuple):
    """The kv blocks of a task: first .. end - 1 are visited, and of them full_first .. full_end - 1 without a mask."""

    first: Any
    full_first: Any
    full_end: Any
    end: Any

    @property
    def edges(self) -> Any:
        """Number of blocks that need a mask."""
        return self.full_first - self.first + self.end - self.full_end

    def edge(self, turn: Any) -> Any:
        """The block of an edge turn, 0 .. edges - 1."""
        before = self.full_first - self.first
        return self.first + turn + jnp.where(turn >= before, self.full_end - self.full_first, 0)


class Visibility(NamedTuple):
    """The masks of one call.

    mask    None or bool, [1/B, 1/H, 1/G, 1/Sq, 1/Skv], True takes part
    added   biases, floats of such shapes; -inf masks
    band    None if every query sees every key of it
    ids     None, or segment ids (of q [1/B, Sq], of k [1/B, Skv]): only equal ones see each other
    """

    mask: jax.Array | None = None
    added: tuple[jax.Array, ...] = ()
    band: Band | None = None
    ids: tuple[jax.Array, jax.Array] | None = None

    def steps(self, row: Sequence[Any], size: Sequence[int], kv_len: int, block_kv: int) -> Steps:
        """What the task at (batch, query) `row` of `size` has to visit."""
        blocks, whole = -(-kv_len // block_kv), kv_len // block_kv
        first, full_first, full_end, end = 0, 0, whole, blocks
        if self.band is not None:
            lows, highs = (cut(x, row, size) for x in self.band[:2])
            first = lows.min() // block_kv
            end = -(-highs.max() // block_kv)
            first = jnp.minimum(first, end)
            full_first = jnp.clip(-(-lows.max() // block_kv), first, end)
            full_end = jnp.clip(jnp.minimum(highs.min() // block_kv, whole), full_first, end)
            if self.band.exact is not None:
                full_end = jnp.where(cut(self.band.exact, row, size).all(), full_end, full_first)
        if self.mask is not None or self.added:
            full_end = full_first = first
        return Steps(first, full_first, full_end, end)

    def tile(self, start: Sequence[Any], size: Sequence[int], fresh: Any, keys_first: bool = False) -> Tile:
        """The part of `size` at the corner `start`, both along [B, H, G, Sq, Skv]. Keys before `fresh` belong to an
        earlier block (the last block reaches back to keep its size). keys_first: axes [b, h, k, g, q], not [.., q, k].
        """

        def turn(x):
            return jnp.moveaxis(x, -1, 2) if keys_first else x

        def of_rows(x):
            return turn(cut(x, (start[0], start[3]), (size[0], size[3]))[:, None, None, :, None])

        keys = turn((start[4] + jnp.arange(size[4], dtype=jnp.int32)).reshape(1, 1, 1, 1, -1))
        allowed = keys >= fresh
        if self.band is not None:
            allowed = allowed & (keys >= of_rows(self.band.first)) & (keys < of_rows(self.band.end))
        if self.ids is not None:
            of_keys = cut(self.ids[1], (start[0], start[4]), (size[0], size[4]))[:, None, None, None, :]
            allowed = allowed & (of_rows(self.ids[0]) == turn(of_keys))
        if self.mask is not None:
            allowed = allowed & turn(cut(self.mask, start, size))
        added = tuple(turn(cut(x, start, size)) for x in self.added)
        for x in added:
            allowed = allowed & (x != -jnp.inf)
        return Tile(allowed, added)


class Tile(NamedTuple):
    """The masks of one tile of scores, each axis whole or 1: True where the key takes part, and what is added."""

    allowed: jax.Array
    added: tuple[jax.Array, ...]

    def apply(self, scores: jax.Array) -> jax.Array:
        """The scores with the biases added, and -inf where the key takes no part."""
        for x in self.added:
            scores = scores + narrow(x, scores.dtype)
        if len(self.added) > 1:  # two finite biases may add up to -inf, which would mask
            scores = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
        return jnp.where(self.allowed, scores, -jnp.inf)


def visibility(a: Arguments, size: Sizes) -> Visibility:
    """The masks of a checked call."""
    arrays = [_grouped(x, size.kv_heads) for x in (a.attn_mask, a.bias) if x is not None]
    bools = [x for x in arrays if x.dtype == bool]
    ids = None
    if a.q_segment_ids is not None:
        q_ids = jnp.asarray(a.q_segment_ids)
        ids = q_ids, q_ids if a.kv_segment_ids is None else jnp.asarray(a.kv_segment_ids)
    added = tuple(x for x in arrays if x.dtype != bool)
    return Visibility(bools[0] if bools else None, added, _band(a, size, ids), ids)


# Bands ---------------------------------------------------------------------------------------------------------------

#: Further than any position; offsets are cut to it, and window sides to twice it, so that sums stay in int32.
_FAR = 2**29


class _Rows(NamedTuple):
    """Of each query, int32 [1/B, Sq]: its place in its sequence; that sequence's lengths, first key and number; and
    whether the query is one, and not padding."""

    place: jax.Array
    q_len: Any
    kv_len: Any
    first_key: Any
    sequence: Any
    real: Any


def padding(a: Arguments, size: Sizes) -> jax.Array | None:
    """True for the queries that are none, [1/B, Sq]; None if all are real."""
    real = _rows(a, size).real
    if a.q_segment_ids is not None:
        real = real & (jnp.asarray(a.q_segment_ids) >= 0)
    return None if real is True else ~real


def _rows(a: Arguments, size: Sizes) -> _Rows:
    place = jnp.arange(size.q_len, dtype=jnp.int32)[None]
    if a.cu_q_lengths is not None:
        starts = _int32(a.cu_q_lengths)
        kv_starts = starts if a.cu_kv_lengths is None else _int32(a.cu_kv_lengths)
        count = starts.shape[0] - 1
        if count == 0:
            return _Rows(place, 0, 0, 0, jnp.zeros_like(place), place < 0)
        sequence = jnp.searchsorted(starts[1:], place, side="right").astype(jnp.int32)
        real = place < starts[-1]
        sequence = jnp.minimum(sequence, count - 1)
        (start, end), (first_key, last_key) = ((x[sequence], x[sequence + 1]) for x in (starts, kv_starts))
        return _Rows(place - start, end - start, last_key - first_key, first_key, sequence, real)
    example = jnp.arange(size.batch, dtype=jnp.int32)[:, None]
    q_len = size.q_len if a.q_lengths is None else jnp.clip(_int32(a.q_lengths), 0, size.q_len)[:, None]
    kv_len = size.kv_len if a.kv_lengths is None else jnp.clip(_int32(a.kv_lengths), 0, size.kv_len)[:, None]
    return _Rows(place, q_len, kv_len, 0, example, True if a.q_lengths is None else place < q_len)


def _band(a: Arguments, size: Sizes, ids: Any) -> Band | None:
    limited = (a.window, a.q_lengths, a.kv_lengths, a.cu_q_lengths, ids)
    if not a.is_causal and all(x is None for x in limited):
        return None
    rows = _rows(a, size)
    if a.causal_offset is None:
        offset = rows.kv_len - rows.q_len
    else:
        offset = jnp.clip(_int32(a.causal_offset), -_FAR, _FAR)
        if offset.ndim:
            offset = offset[rows.sequence] if offset.size else 0
    here = rows.first_key + rows.place + offset
    first, end = rows.first_key, rows.first_key + rows.kv_len
    if a.is_causal:
        end = jnp.minimum(end, here + 1)
    if a.window is not None:
        left, right = (_side(x) for x in a.window)
        first, end = jnp.maximum(first, here - left), jnp.minimum(end, here + right + 1)
    real, exact = rows.real, None
    if ids is not None:
        found, found_end, together = _segments(*ids)
        first, end = jnp.maximum(first, found), jnp.minimum(end, found_end)
        real, exact = real & (ids[0] >= 0), together
    first, end = jnp.maximum(first, 0), jnp.minimum(end, size.kv_len)
    seen = jnp.broadcast_to((first < end) & real, jnp.broadcast_shapes(jnp.shape(first), jnp.shape(end), here.shape))
    exact = None if exact is None else exact | ~seen
    return Band(_where32(seen, first, size.kv_len), _where32(seen, end, 0), exact)


def _segments(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each query of [B, Sq]: its segment's first key, the key after its last, and whether all between are its."""

    def one(of_q, of_kv):
        order = jnp.argsort(of_kv, stable=True).astype(jnp.int32)
        left, right = (jnp.searchsorted(of_kv[order], of_q, side=side) for side in ("left", "right"))
        top = of_kv.shape[0] - 1
        first, last = order[jnp.minimum(left, top)], order[jnp.maximum(right - 1, 0)]
        end = jnp.where(left < right, last + 1, 0)
        return first, end, end - first == right - left

    return jax.vmap(one)(q_ids, kv_ids)


def _side(x: Any) -> Any:
    """One side of a window as a distance."""
    if x is None:
        return 2 * _FAR
    x = _int32(x)
    return jnp.where(x < 0, 2 * _FAR, jnp.minimum(x, 2 * _FAR))


def _where32(condition, x, y):
    return jnp.where(condition, x, y).astype(jnp.int32)


def _int32(x: Any) -> jax.Array:
    """As int32; what is beyond it is clipped (positions never are)."""
    x = np.asarray(x) if not isinstance(x, jax.Array) else x
    if x.dtype.itemsize > 4 or x.dtype == np.uint32:
        x = x.clip(-(2**31), 2**31 - 1) if x.dtype.kind == "i" else x.clip(0, 2**31 - 1)
    return jnp.asarray(x, jnp.int32)


# Arrays --------------------------------------------------------------------------------------------------------------


def _grouped(mask: Any, kv_heads: int) -> jax.Array:
    """The mask [Sq, Skv] or [1/B, 1/N, 1/Sq, 1/Skv] with its heads as [1/H, 1/G]. float64 keeps its finite values
    finite where JAX narrows it to float32.
    """
    if isinstance(mask, np.ndarray) and mask.dtype == np.float64:
        mask = narrow(mask, jax.dtypes.canonicalize_dtype(mask.dtype))
    mask = jnp.asarray(mask)
    batch, heads, *lengths = (1, 1, *mask.shape)[-4:]
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return mask.reshape(batch, *split, *lengths)


def narrow(mask: Any, dtype: Any) -> Any:
    """An additive mask in `dtype`: values below the lowest finite one become that, and only -inf stays -inf."""
    if jnp.finfo(mask.dtype).bits <= jnp.finfo(dtype).bits:
        return mask.astype(dtype)
    array = np if isinstance(mask, np.ndarray) else jnp
    lowest = float(jnp.finfo(dtype).min)
    return array.where(mask == -np.inf, mask, array.maximum(mask, lowest)).astype(dtype)


def cut(x: jax.Array, start: Sequence[Any], size: Sequence[int]) -> jax.Array:
    """x[start : start + size] along every axis; an axis of size 1 is kept whole, to broadcast."""
    whole = [x.shape[axis] == 1 for axis in range(x.ndim)]
    start = [0 if one else at for one, at in zip(whole, start, strict=True)]
    return lax.dynamic_slice(x, corner(start), [1 if one else n for one, n in zip(whole, size, strict=True)])


def put(x: jax.Array, part: jax.Array, start: Sequence[Any]) -> jax.Array:
    """x with `part` at `start`."""
    return lax.dynamic_update_slice(x, part.astype(x.dtype), corner(start))


def add_at(x: jax.Array, part: jax.Array, start: Sequence[Any]) -> jax.Array:
    """x with `part` added at `start`; an axis of x of size 1 takes the sum over that axis of part."""
    shared = tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1 and part.shape[axis] > 1)
    part = part.sum(shared, keepdims=True) if shared else part
    start = [0 if size == 1 else at for at, size in zip(start, x.shape, strict=True)]
    return put(x, lax.dynamic_slice(x, corner(start), part.shape) + part.astype(x.dtype), start)


def corner(start: Sequence[Any]) -> list[jax.Array]:
    """Indices of one dtype, with jax_enable_x64 or without."""
    return [jnp.asarray(at, jnp.int32) for at in start]

