"""Joining partial results: what ring attention, split-KV decoding and chunked prefill need."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def merge(*parts: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """The attention over all keys, from attention over disjoint sets of them.

    parts  pairs (out, lse) as `flash_attention(..., return_lse=True)` returns them: lse has the shape of out without
           its last axis (in BSH and SBH, out's last axis is split by the heads of lse)

    Returns (out, lse) of the union, out in the dtype of the first part: with w_i = e^(lse_i - lse), out = sum w_i out_i
    and lse = log sum e^lse_i (Dao 2023, arXiv 2307.08691, section 3.1). A part with LSE -inf is empty: it counts
    nothing, whatever its output holds, and empty parts merge to (0, -inf). A sink belongs to one part only.
    Differentiable by outputs and LSEs, in reverse and forward mode.

    Raises ValueError for no part, and for shapes that do not fit together.
    """
    if not parts:
        raise ValueError("merge: expected at least one pair (out, lse), got none")
    for part in parts:
        pair = isinstance(part, tuple | list) and len(part) == 2
        if not pair or not all(isinstance(x, jax.Array | np.ndarray) and _floating(x) for x in part):
            raise ValueError(
                f"merge: expected pairs (out, lse) of floating arrays, got {type(part).__name__}; call merge(*parts), "
                "or merge((out, lse), (out, lse))"
            )
    for out, lse in parts:
        flat = lse.ndim == out.ndim and out.shape[:-1] == lse.shape[:-1] and out.shape[-1] % max(lse.shape[-1], 1) == 0
        if not flat and out.shape[:-1] != lse.shape:
            raise ValueError(
                f"merge: expected an lse of out's shape without its last axis, got out {out.shape}, lse {lse.shape}"
            )
        if (out.shape, lse.shape) != (parts[0][0].shape, parts[0][1].shape):
            raise ValueError(
                f"merge: expected parts of one shape, got out {parts[0][0].shape} and {out.shape}, "
                f"lse {parts[0][1].shape} and {lse.shape}"
            )
    return reduce(_two, parts)


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _two(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    (out, lse), (other, other_lse) = first, second
    peak = jnp.maximum(lse, other_lse)
    shift = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    ours, theirs = (_from_log(x, shift) for x in (lse, other_lse))
    total = ours + theirs
    some = total != 0
    safe = jnp.where(some, total, 1)
    merged = _weighted(out, lse, ours / safe) + _weighted(other, other_lse, theirs / safe)
    return merged.reshape(out.shape).astype(out.dtype), jnp.where(some, shift + jnp.log(safe), -jnp.inf)


def _from_log(lse: Any, shift: jax.Array) -> jax.Array:
    """e^(lse - shift), and 0 with gradient 0 for -inf."""
    some = lse != -jnp.inf
    return jnp.where(some, jnp.exp(jnp.where(some, lse, shift) - shift), 0)


def _weighted(out: Any, lse: Any, weight: Any) -> Any:
    """weight * out by rows [*lse.shape, Dv], and 0 for an empty row."""
    rows = out.reshape(*lse.shape, out.size // max(lse.size, 1)).astype(weight.dtype)
    return jnp.where(lse[..., None] == -jnp.inf, 0, rows) * weight[..., None]
