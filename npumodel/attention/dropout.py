"""Which weights are dropped: a function of key and position, so that every tile and both passes agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from npumodel.attention.call import Dropout, threefry
from npumodel.attention.masks import cut


def kept(dropout: Dropout, start: Sequence[Any], size: Sequence[int], keys_first: bool = False) -> jax.Array:
    """0 for a dropped weight, else 1 / keep, for the tile of `size` at `start`, both along [B, H, G, Sq, Skv].

    The random bits of (b, n, i, j) are those of the head's key folded with i, then with j (a keyed hash of the
    position: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). keys_first: axes [b, h, k, g, q].
    """
    keys = cut(dropout.keys, (*start[:3], 0), (*size[:3], dropout.keys.shape[3]))
    rows, columns = (start[axis] + jnp.arange(size[axis], dtype=jnp.int32) for axis in (3, 4))

    def bits(key, row, column):
        folded = jax.random.fold_in(jax.random.fold_in(threefry(key), row), column)
        return jax.random.key_data(folded)[0]

    tile = jax.vmap(jax.vmap(bits, (None, None, 0)), (None, 0, None))
    flat = jax.vmap(lambda key: tile(key, rows, columns))(keys.reshape(-1, keys.shape[3]))
    keep = cut(dropout.keep, (start[0],), (size[0],)).reshape(-1, 1, 1, 1, 1)
    uniform = (flat.reshape(*keys.shape[:3], *flat.shape[1:]) >> 8).astype(keep.dtype) * 2.0**-24
    weights = jnp.where(uniform < keep, 1 / keep, 0)
    return jnp.moveaxis(weights, -1, 2) if keys_first else weights
