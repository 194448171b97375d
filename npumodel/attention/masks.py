"""Which keys a query may see, one tile at a time: no mask of the size of the scores is ever built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Visibility(NamedTuple):
    """The masks of one call, where H is the number of kv heads and G the query heads that share one.

    mask    None, bool (True takes part) or additive floats, [1/B, 1/H, 1/G, 1/Sq, 1/Skv]
    causal  query i sees keys j <= i + kv_len - q_len (bottom-right aligned)
    """

    mask: jax.Array | None
    causal: bool
    q_len: int
    kv_len: int

    def steps(self, row: Any, block_q: int, block_kv: int) -> tuple[Any, Any]:
        """For the query block that starts at `row`: how many kv blocks, counted from the first, all of its queries
        see in full, and how many some query sees in part. The blocks after these are never touched.
        """
        full, count = self.kv_len // block_kv, -(-self.kv_len // block_kv)
        if self.causal:
            seen = row + 1 + self.kv_len - self.q_len  # keys that the first query sees
            full = jnp.clip(seen // block_kv, 0, full)
            count = jnp.clip((seen + block_q - 1 + block_kv - 1) // block_kv, 0, count)
        return (full if self.mask is None else 0), count

    def tile(self, start: Sequence[Any], size: Sequence[int], fresh: Any) -> Tile:
        """The part of `size` at the corner `start`, both along [B, H, G, Sq, Skv]. Keys before `fresh` belong to an
        earlier block (the last block reaches back to keep its size).
        """
        keys = start[4] + jnp.arange(size[4]).reshape(1, 1, 1, 1, -1)
        band = keys >= fresh
        if self.causal:
            queries = start[3] + jnp.arange(size[3]).reshape(1, 1, 1, -1, 1)
            band &= keys <= queries + self.kv_len - self.q_len
        return Tile(None if self.mask is None else cut(self.mask, start, size), band)


class Tile(NamedTuple):
    """The masks of one tile of scores [b, h, g, q, k], each axis whole or 1: a part of the mask tensor, and bools for
    what follows from positions.
    """

    mask: jax.Array | None
    band: jax.Array

    @property
    def allowed(self) -> jax.Array:
        """True where the key takes part."""
        if self.mask is None:
            return self.band
        return self.band & (self.mask if self.mask.dtype == bool else self.mask != -jnp.inf)

    def apply(self, scores: jax.Array) -> jax.Array:
        """The scores, with an additive mask added, and -inf where the key takes no part."""
        if self.mask is not None and self.mask.dtype != bool:
            scores += narrow(self.mask, scores.dtype)
        return jnp.where(self.allowed, scores, -jnp.inf)


def grouped(mask: Any, kv_heads: int) -> jax.Array | None:
    """The mask [Sq, Skv] or [1/B, 1/N, 1/Sq, 1/Skv] with its heads as [1/H, 1/G]. float64 keeps its finite values
    finite where JAX narrows it to float32.
    """
    if mask is None:
        return None
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
    return lax.dynamic_slice(
        x,
        [0 if one else at for one, at in zip(whole, start, strict=True)],
        [1 if one else n for one, n in zip(whole, size, strict=True)],
    )
