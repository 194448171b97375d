"""Tiles of a matmul or a softmax: what was given, else the cheapest of a small lattice."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.model.cost import Options, price
from npumodel.model.durations import time_constants
from npumodel.model.estimate import arguments
from npumodel.model.tiling import AnyProblem, capacities
from npumodel.search.auto import Resolved
from npumodel.search.space import padded
from npumodel.tile import MatmulTile, SoftmaxTile
from npumodel.workload import MatmulShape, SoftmaxShape

#: Block sizes that are tried, along m, n and k, and slots in L1: 210 tiles.
_MATMUL = ((16, 32, 64, 128, 256), (16, 32, 64, 128, 256, 384, 512), (64, 128, 256), (1, 2))
#: Rows of a step, and columns of a pass: 63 tiles.
_SOFTMAX = ((1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384, 32768))


def resolve(shape: MatmulShape | SoftmaxShape, device: DeviceSpec, tile: Any = "auto") -> Resolved:
    """The tile of one call. tile: a MatmulTile or a SoftmaxTile, the text of one ("128x256x64", "4x4096"), or "auto".

    Raises ValueError for anything else, and for "auto" where no tile of the lattice fits.
    """
    kind = MatmulTile if isinstance(shape, MatmulShape) else SoftmaxTile
    if isinstance(tile, str) and tile == "auto":
        return Resolved(_cheapest(shape, device), "auto: model")
    if isinstance(tile, str):
        tile = kind.parse(tile)
    if not isinstance(tile, kind):
        raise ValueError(f'tile: expected "auto", a {kind.__name__} or the text of one, got {tile!r}')
    return Resolved(tile, "explicit")


def _cheapest(shape: MatmulShape | SoftmaxShape, device: DeviceSpec) -> Any:
    sizes = _MATMUL if isinstance(shape, MatmulShape) else _SOFTMAX
    columns = np.array(list(itertools.product(*sizes)), float).T
    kind: Any = MatmulTile if isinstance(shape, MatmulShape) else SoftmaxTile
    lengths = (shape.m, shape.n, shape.k) if isinstance(shape, MatmulShape) else (shape.rows, shape.cols)
    tops = map(padded, lengths) if isinstance(shape, MatmulShape) else lengths
    columns = [np.minimum(column, top) for column, top in itertools.zip_longest(columns, tops, fillvalue=np.inf)]
    tiles = kind(*columns)
    p, tiles, d = arguments(shape, tiles, device)
    p = jax.tree.map(lambda x: np.broadcast_to(x, columns[0].shape), p)
    seconds, needed = jax.device_get(_prices(p, tiles, d, shape.dtype))
    available = capacities(device)
    fits = [needed[name] <= float(available[name]) for name in needed if name != "L1" or device.overflow != "spill"]
    seconds = np.where(np.all(fits, 0) & np.isfinite(seconds), seconds, np.inf)
    best = int(seconds.argmin())
    if not np.isfinite(seconds[best]):
        raise ValueError(f"tile: no tile of the lattice fits {shape.label} on {device.name or 'this device'}; give one")
    return kind(*(int(column[best]) for column in columns))


@functools.partial(jax.jit, static_argnames="dtype")
def _prices(p: AnyProblem, tiles: Any, d: DeviceSpec, dtype: str):
    """Seconds [n], and bytes needed of each buffer [n], of tiles [n]."""
    priced = price(time_constants(d, dtype), p, tiles, d, Options(dtype, False, waits=False))
    feet = priced.kernels[0].footprints
    return priced.seconds, jax.tree.map(lambda x: jnp.broadcast_to(x, priced.seconds.shape), feet)
