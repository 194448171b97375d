"""The search space of a tile, which of its points are legal, and the exact price of many points at once.

    candidates = block_q lattice x block_kv lattice x buffers x lookahead

Everything that depends on the model is batched: one compiled function per architecture and mask serves every device,
dtype, shape and tile, because they are all traced reals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.hardware.spec import OPTIONAL
from npumodel.model import tiling
from npumodel.model.cost import Options, price
from npumodel.model.durations import TimeConstants, time_constants
from npumodel.model.graph import compile_graph
from npumodel.model.tiling import FRACTAL, Problem
from npumodel.tile import MAX_BUFFERS, MAX_LOOKAHEAD, TileConfig
from npumodel.workload import AttentionShape

#: The searched knobs, in the order of a point's coordinates.
KNOBS = ("block_q", "block_kv", "buffers", "lookahead")
#: Buffers of a core, and the memory, in the order of the columns of `needs`.
BUFFERS = ("L1", "L0A", "L0B", "L0C", "UB", "HBM")

#: Lattice: every multiple of 16 up to here, then four sizes per octave.
_FINE = 128
_PER_OCTAVE = 4
#: Balanced cuts on the lattice: the sizes that cut a length into 1 .. this many equal blocks.
_PARTS = 8

#: Points that a compiled function takes (the rest is padding), and points that it works on at once.
BATCH = 2048
CHUNK = 512


def padded(length: int) -> int:
    """The length rounded up to whole fractals of 16: the block that holds it all."""
    return FRACTAL * -(-length // FRACTAL)


def lattice(length: int) -> tuple[int, ...]:
    """Block sizes for an axis of `length`, ascending, all multiples of 16, at most `padded(length)`.

    All up to 128; then four per octave (160, 192, 224, 256, 320, ...); the sizes that cut the length into 1..8 equal
    blocks. About 8 + 4 log2(length / 128) + 8 sizes: 31 for 4096, 54 for 131072.
    """
    whole = padded(length)
    sizes = {*range(FRACTAL, min(_FINE, whole) + 1, FRACTAL), *(padded(-(-length // n)) for n in range(1, _PARTS + 1))}
    octave = _FINE
    while octave < whole:
        sizes.update(octave + octave * i // _PER_OCTAVE for i in range(1, _PER_OCTAVE + 1))
        octave *= 2
    return tuple(sorted(size for size in sizes if size <= whole))


@dataclasses.dataclass(frozen=True)
class Space:
    """All combinations of the knobs' values, each ascending. Points are numbered lexicographically from 0."""

    block_q: tuple[int, ...]
    block_kv: tuple[int, ...]
    buffers: tuple[int, ...] = tuple(range(1, MAX_BUFFERS + 1))
    lookahead: tuple[int, ...] = tuple(range(MAX_LOOKAHEAD + 1))

    @classmethod
    def of(cls, shape: AttentionShape) -> Space:
        """The space of one call; one-block tiles (at least as large as the longest sequence) are in it."""
        return cls(*map(lattice, longest(shape)))

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(getattr(self, name) for name in KNOBS)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(map(len, self.axes))

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    def enumerate(self) -> TileConfig:
        """Every point, as a TileConfig of arrays [size]."""
        return self.at(np.arange(self.size))

    def at(self, points: Any) -> TileConfig:
        """The tiles of these points (numbers [n]), as a TileConfig of arrays [n]."""
        places = np.unravel_index(np.asarray(points, int), self.dims)
        values = [np.asarray(axis)[place] for axis, place in zip(self.axes, places, strict=True)]
        columns: dict[str, Any] = dict(zip(KNOBS, values, strict=True))
        return TileConfig(**columns)

    def tile(self, point: int) -> TileConfig:
        """The plain tile of one point."""
        return plain(self.at([point]), 0)

    def point(self, tile: TileConfig) -> int:
        """The number of a plain tile. Raises ValueError for one that is not on the lattice."""
        places = [axis.index(int(getattr(tile, name))) for name, axis in zip(KNOBS, self.axes, strict=True)]
        return int(np.ravel_multi_index(places, self.dims))

    def places(self, points: Any) -> np.ndarray:
        """Positions of these points along each axis [n, 4]."""
        return np.stack(np.unravel_index(np.asarray(points, int), self.dims), -1)

    def points(self, places: np.ndarray) -> np.ndarray:
        """The distinct points at these positions [..., 4], ascending; positions outside are left out."""
        places = places.reshape(-1, len(KNOBS))
        inside = ((places >= 0) & (places < np.asarray(self.dims))).all(-1)
        return np.unique(np.ravel_multi_index(places[inside].T, self.dims))


def plain(tiles: TileConfig, i: int) -> TileConfig:
    """Tile number i of a TileConfig of arrays, as plain integers."""
    values: dict[str, Any] = {name: int(getattr(tiles, name)[i]) for name in KNOBS}
    return TileConfig(**values, fusion=tiles.fusion)


def stacked(tiles: Sequence[TileConfig]) -> TileConfig:
    """Plain tiles as a TileConfig of arrays [n]. The search covers the fused kernel only."""
    columns: dict[str, Any] = {name: np.array([getattr(tile, name) for tile in tiles]) for name in KNOBS}
    return TileConfig(**columns)


def longest(shape: AttentionShape) -> tuple[int, int]:
    """Most queries and most keys of an example."""
    largest = shape.largest
    return largest.q_len, largest.kv_len


def fitted(tile: TileConfig, shape: AttentionShape) -> TileConfig:
    """The same plan with blocks no larger than the longest lengths (padded): what lies beyond would never be used."""
    q, kv = (min(size, padded(n)) for size, n in zip((tile.block_q, tile.block_kv), longest(shape), strict=True))
    return tile.replace(block_q=q, block_kv=kv)


# The model, batched --------------------------------------------------------------------------------------------------


class Chip(NamedTuple):
    """What the compiled functions take from a device and a dtype: seconds per unit of work, sizes, and the bytes of
    each of BUFFERS that a tile may not exceed (infinite for L1 where it may spill)."""

    t: TimeConstants
    d: DeviceSpec
    available: np.ndarray


def chip(device: DeviceSpec, dtype: str) -> Chip:
    """Prepare a device. All devices of one arch get the same tree structure, so that they share compiled functions.

    Raises ValueError when the device does not multiply this dtype.
    """
    key = (id(device), dtype, jnp.result_type(float).name)
    known = _chips.get(key)
    if known is None:
        known = (_chip(device, dtype), device)
        if len(_chips) >= _MANY:
            _chips.clear()
        _chips[key] = known
    return known[0]


#: Prepared devices by identity (a spec is not hashable); each is kept, so that its id stays its own.
_chips: dict[tuple, tuple[Chip, DeviceSpec]] = {}
_MANY = 256


def _chip(device: DeviceSpec, dtype: str) -> Chip:
    t = time_constants(device, dtype)
    missing = {name: 1.0 for name in OPTIONAL if getattr(device, name) is None}
    same = {"name": "", "soc": "", "family": "", "overflow": "strict", "macs_per_cycle": {"float16": 1.0}}
    capacity = tiling.capacities(device)
    available = np.array([float(capacity[name]) for name in BUFFERS])
    if device.overflow == "spill":
        available[BUFFERS.index("L1")] = np.inf
    return Chip(jax.tree.map(_real, t), jax.tree.map(_real, device.replace(**same, **missing)), available)


def _real(x) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float))


def _problems(shapes: Sequence[AttentionShape], count: int) -> Problem:
    """The calls [count] or, with lengths, [groups, count], as reals; a single shape stands for all."""
    known = {shape: Problem.of(shape) for shape in dict.fromkeys(shapes)}
    rows = [known[shape] for shape in shapes]
    stacks = jax.tree.map(lambda *xs: np.stack([_real(x) for x in xs], -1), *rows)
    return jax.tree.map(lambda x: np.broadcast_to(x, (*x.shape[:-1], count)), stacks)


def needs(shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec) -> np.ndarray:
    """Bytes that each tile [n] needs in each of BUFFERS: [n, 6], the largest over the kernels of the call. HBM: 0 where
    the tensors of the call do not fit, whatever the tile; such a call is priced as if they did.

    shapes: one for all tiles, or one per tile; all with a mask or none.
    """
    c = chip(device, shapes[0].dtype)
    run = functools.partial(_needs, c.d, masked=_masked(shapes))
    return _in_batches(run, shapes, tiles, np.zeros((0, len(BUFFERS))))


def fits(need: np.ndarray, device: DeviceSpec, dtype: str) -> np.ndarray:
    """Whether the bytes needed [n, 6] are there: [n, 6]. L1 always fits where the device lets it spill."""
    return need <= chip(device, dtype).available[None]


def rejected(fit: np.ndarray) -> dict[str, int]:
    """How many of the tiles each buffer refuses, for `fits` [n, 6]; a tile may be refused by several."""
    return {name: int(n) for name, n in zip(BUFFERS, (~fit).sum(0), strict=True) if n}


def legal(shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec) -> np.ndarray:
    """Whether each tile [n] fits: [n]. Raises ValueError when the device does not multiply the dtype."""
    return np.asarray(fits(needs(shapes, tiles, device), device, shapes[0].dtype).all(-1))


def exact_seconds(shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec) -> np.ndarray:
    """Exact price of each tile [n] in seconds: [n]; infinite where the model has no finite answer."""
    c = chip(device, shapes[0].dtype)

    def run(p: Problem, part: TileConfig):
        return _seconds(c.t, c.d, p, part, -(-_count(part) // CHUNK), masked=_masked(shapes))

    seconds = _in_batches(run, shapes, tiles, np.zeros(0))
    return np.where(np.isfinite(seconds), seconds, np.inf)


def _masked(shapes: Sequence[AttentionShape]) -> bool:
    return shapes[0].mask is not None


def _count(tiles: TileConfig) -> int:
    return len(tiles.block_q)


def _in_batches(run, shapes: Sequence[AttentionShape], tiles: TileConfig, empty: np.ndarray) -> np.ndarray:
    """run(problems, tiles) over slices of BATCH points; its answers [n, ...] joined."""
    n, out = _count(tiles), [empty]
    problems, tiles = _problems(shapes, n), jax.tree.map(lambda x: np.broadcast_to(x, (n,)), tiles)

    def batch(start: int) -> np.ndarray:
        part = jax.tree.map(operator.itemgetter((..., slice(start, start + BATCH))), (problems, tiles))
        return np.asarray(run(*part), float)[: _count(part[1])]

    starts = range(0, n, BATCH)
    return np.concatenate([*out, *(_workers().map(batch, starts) if len(starts) > 1 else map(batch, starts))])


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """A compiled function lets go of the interpreter, but its small kernels use one core each."""
    return ThreadPoolExecutor(os.cpu_count(), "npumodel-prices")


def _filled(x) -> np.ndarray:
    """x [..., n] as reals [..., BATCH], the rest a copy of the first."""
    out = np.empty((*x.shape[:-1], BATCH), jnp.result_type(float))
    out[...], out[..., : x.shape[-1]] = x[..., :1], x
    return out


def _needs(d: DeviceSpec, p: Problem, tiles: TileConfig, masked: bool):
    return _needs_jit(d, *jax.tree.map(_filled, (p, tiles)), masked=masked)


def _seconds(t: TimeConstants, d: DeviceSpec, p: Problem, tiles: TileConfig, chunks: int, masked: bool):
    return _seconds_jit(t, d, *jax.tree.map(_filled, (p, tiles)), np.int32(chunks), masked=masked)


def footprint(p: Problem, tile: TileConfig, d: DeviceSpec, masked: bool):
    """Bytes that tiles [...] need in each of BUFFERS [6, ...], largest over the kernels of the call (see `needs`)."""
    kernels = compile_graph(masked, tile.fusion, p.kind).kernels
    largest = tiling.footprints_of_call(p, tile, d, tuple(kernel.kinds for kernel in kernels))
    tensors = tiling.tensor_bytes(p) if p.others is None else p.others.tensor_bytes[0]
    largest["HBM"] = jnp.where(tensors > d.hbm_bytes, 0.0, largest["HBM"])
    return jnp.stack([largest[name] for name in BUFFERS])


@functools.partial(jax.jit, static_argnames="masked")
def _needs_jit(d: DeviceSpec, p: Problem, tiles: TileConfig, masked: bool):
    return footprint(p, tiles, d, masked).T


@functools.partial(jax.jit, static_argnames="masked")
def _seconds_jit(t: TimeConstants, d: DeviceSpec, p: Problem, tiles: TileConfig, chunks, masked: bool):
    """Prices of the first `chunks` * CHUNK points, the rest infinite. A loop, so that few points cost little."""

    def one(p: Problem, tiles: TileConfig):
        return price(t, p, tiles, d, Options("", masked, waits=False)).seconds

    def body(i, out):
        part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * CHUNK, CHUNK, x.ndim - 1), (p, tiles))
        return jax.lax.dynamic_update_slice(out, one(*part), (i * CHUNK,))

    return jax.lax.fori_loop(0, chunks, body, jnp.full(BATCH, jnp.inf))
