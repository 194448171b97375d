"""The search space of a tile, which of its points are legal and why not, and the exact price of many points at once.

    points = block_q x block_kv x kv_pieces x buffers x lookahead x heads_packed x split_kv x cores
             x fusion x core_order x persistent

Everything that depends on the model is batched: one compiled function per architecture, mask and kind of plan (fusion,
core order, persistent or not, K and V whole or in pieces) serves every device, dtype, shape and tile, because they are
all traced reals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from npumodel.hardware import DeviceSpec
from npumodel.hardware.spec import OPTIONAL
from npumodel.model import tiling
from npumodel.model.cost import Options, price
from npumodel.model.durations import TimeConstants, time_constants
from npumodel.model.estimate import misfits
from npumodel.model.graph import compile_graph
from npumodel.model.tiling import FRACTAL, Problem
from npumodel.tile import ALL_CORES, CORE_ORDERS, FUSIONS, MAX_BUFFERS, MAX_LOOKAHEAD, TileConfig
from npumodel.workload import AttentionShape

#: Knobs that are numbers, and those that choose another program to compile; together the axes of a space.
NUMBERS = ("block_q", "block_kv", "kv_pieces", "buffers", "lookahead", "heads_packed", "split_kv", "cores")
KINDS = ("fusion", "core_order", "persistent")
KNOBS = NUMBERS + KINDS
#: Buffers of a core, and the memory, in the order of the columns of `needs`.
BUFFERS = ("L1", "L0A", "L0B", "L0C", "UB", "HBM")

#: Lattice: every multiple of 16 up to here, then four sizes per octave.
_FINE = 128
_PER_OCTAVE = 4
#: Balanced cuts on the lattice: the sizes that cut a length into 1 .. this many equal blocks.
_PARTS = 8
#: Most parts of split keys, and the fewest keys of one.
MOST_SPLIT, SPLIT_KEYS = 32, 128
#: Pieces of K and V (vendor: 8 of 128 keys).
_PIECES = (1, 2, 4, 8)
#: Shares of a chip's cores, beside all of them and a single one.
_SHARES = (3 / 4, 1 / 2, 1 / 4, 1 / 8)

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
    """All combinations of the knobs' values, every axis in one direction, the plainest value first where there is one.
    Points are numbered lexicographically from 0, in the order of KNOBS."""

    block_q: tuple[int, ...]
    block_kv: tuple[int, ...]
    kv_pieces: tuple[int, ...] = (1,)
    buffers: tuple[int, ...] = tuple(range(1, MAX_BUFFERS + 1))
    lookahead: tuple[int, ...] = tuple(range(MAX_LOOKAHEAD + 1))
    heads_packed: tuple[int, ...] = (1,)
    split_kv: tuple[int, ...] = (1,)
    cores: tuple[int, ...] = (ALL_CORES,)
    fusion: tuple[str, ...] = ("fused",)
    core_order: tuple[str, ...] = ("balanced",)
    persistent: tuple[bool, ...] = (False,)

    @classmethod
    def of(cls, shape: AttentionShape, device: DeviceSpec) -> Space:
        """The space that `tune` searches: all numbers, of a fused kernel, its tasks balanced and drained, K and V
        whole. One-block tiles (at least as large as the longest sequence) are in it."""
        lengths = longest(shape)
        blocks = lattice(lengths[0]), lattice(lengths[1])
        if shape.backward:
            return cls(*blocks)
        group, most = shape.q_heads // shape.kv_heads, min(MOST_SPLIT, lengths[1] // SPLIT_KEYS)
        count = int(device.cube_cores)
        shares = {max(1, math.ceil(count * share)) for share in _SHARES} | {1}
        return cls(
            *blocks,
            heads_packed=tuple(n for n in range(1, group + 1) if group % n == 0),
            split_kv=tuple(2**i for i in range(max(1, most).bit_length())),
            cores=(ALL_CORES, *sorted(shares - {count}, reverse=True)),
        )

    @classmethod
    def full(cls, shape: AttentionShape, device: DeviceSpec) -> Space:
        """Every knob of the model: also K and V in pieces, partly fused and unfused plans, all core orders, persistent
        tasks. A compilation for each kind of plan."""
        here = cls.of(shape, device)
        if shape.backward:
            return dataclasses.replace(here, core_order=CORE_ORDERS)
        kinds: dict[str, Any] = {"fusion": FUSIONS, "core_order": CORE_ORDERS, "persistent": (False, True)}
        return dataclasses.replace(here, kv_pieces=_PIECES, **kinds)

    def restrict(self, **axes: Iterable[Any]) -> Space:
        """The space with only these values along some axes, on the lattice or not: restrict(block_q=[64, 128]).

        Raises ValueError for a knob that is none, an empty axis, a value given twice, and one that no tile can have.
        """
        found: dict[str, tuple] = {}
        for name, values in axes.items():
            if name not in KNOBS:
                raise ValueError(f"space: expected knobs out of {', '.join(KNOBS)}, got {name!r}")
            single = isinstance(values, str) or not isinstance(values, Iterable)
            found[name] = (values,) if single else tuple(np.asarray(list(values)).tolist())
            if not found[name] or len(set(found[name])) != len(found[name]):
                raise ValueError(f"space: expected distinct values of {name}, at least one, got {values!r}")
            for value in found[name]:
                if name in NUMBERS and type(value) is not int:
                    raise ValueError(f"space: expected integers for {name}, got {value!r}")
                TileConfig(**{"block_q": 16, "block_kv": 16, name: value})
        return dataclasses.replace(self, **found)

    @property
    def axes(self) -> tuple[tuple, ...]:
        return tuple(getattr(self, name) for name in KNOBS)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(map(len, self.axes))

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    def enumerate(self, count: int = BATCH) -> Iterator[np.ndarray]:
        """The numbers of all points, ascending, at most `count` at a time."""
        return (np.arange(start, min(start + count, self.size)) for start in range(0, self.size, count))

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """The numbers of `count` random points [count], legal or not; the same for a seed."""
        return np.random.default_rng(seed).integers(0, self.size, count)

    def at(self, points: Any) -> TileConfig:
        """The tiles of these points (numbers [n]), as a TileConfig of arrays [n]. They must be of one kind."""
        places = self.places(points)
        values: dict[str, Any] = {
            name: np.asarray(axis)[places[:, i]] for i, (name, axis) in enumerate(zip(KNOBS, self.axes, strict=True))
        }
        for name in KINDS:
            if len(set(values[name].tolist())) > 1:
                raise ValueError(f"at: expected points of one {name}, got {sorted(set(values[name].tolist()))}")
            values[name] = self.axes[KNOBS.index(name)][places[0, KNOBS.index(name)] if len(places) else 0]
        return TileConfig(**values)

    def by_kind(self, points: Any) -> Iterator[tuple[np.ndarray, TileConfig]]:
        """The points split by kind: (their positions in `points`, their tiles)."""
        points = np.asarray(points, np.int64)
        kinds = points % math.prod(self.dims[len(NUMBERS) :])
        for kind in np.unique(kinds):
            here = np.flatnonzero(kinds == kind)
            yield here, self.at(points[here])

    def tile(self, point: int) -> TileConfig:
        """The plain tile of one point."""
        return plain(self.at([point]), 0)

    def point(self, tile: TileConfig) -> int:
        """The number of a plain tile. Raises ValueError for one that is not on the lattice."""
        places = [axis.index(getattr(tile, name)) for name, axis in zip(KNOBS, self.axes, strict=True)]
        return int(np.ravel_multi_index(places, self.dims))

    def nearest(self, tile: TileConfig) -> int:
        """The number of the point nearest to a tile: of each axis the value nearest in octaves; of a kind of plan that
        is not in the space, the first."""
        places = []
        for name, axis in zip(KNOBS, self.axes, strict=True):
            value = getattr(tile, name)
            if name in KINDS:
                places.append(axis.index(value) if value in axis else 0)
            else:
                places.append(int(abs(np.log2(np.array(axis) + 1.0) - math.log2(value + 1)).argmin()))
        return int(np.ravel_multi_index(places, self.dims))

    def __contains__(self, tile: TileConfig) -> bool:
        return all(getattr(tile, name) in axis for name, axis in zip(KNOBS, self.axes, strict=True))

    def places(self, points: Any) -> np.ndarray:
        """Positions of these points along each axis [n, 11]."""
        return np.stack(np.unravel_index(np.asarray(points, np.int64), self.dims), -1)

    def points(self, places: np.ndarray) -> np.ndarray:
        """The distinct points at these positions [..., 11], ascending; positions outside are left out."""
        places = places.reshape(-1, len(KNOBS))
        inside = ((places >= 0) & (places < np.asarray(self.dims))).all(-1)
        return np.unique(np.ravel_multi_index(places[inside].T, self.dims))

    def why_not(self, shape: AttentionShape, device: DeviceSpec, points: Any) -> list[list[str]]:
        """For each of these points what is wrong with it, in sentences that name the knob or the buffer; empty where it
        is legal."""

        def wrong(point: int) -> list[str]:
            try:
                return misfits(shape, device, self.tile(point))
            except ValueError as error:  # knobs that exclude each other
                return [str(error)]

        return [wrong(point) for point in np.asarray(points, np.int64).tolist()]


def plain(tiles: TileConfig, i: int) -> TileConfig:
    """Tile number i of a TileConfig of arrays, as plain integers."""
    return tiles.replace(**{name: int(getattr(tiles, name)[i]) for name in NUMBERS})


def stacked(tiles: Sequence[TileConfig]) -> TileConfig:
    """Plain tiles of one kind as a TileConfig of arrays [n]. Raises ValueError where they are not."""
    if len({tuple(getattr(tile, name) for name in KINDS) for tile in tiles}) > 1:
        raise ValueError(f"stacked: expected tiles of one kind ({', '.join(KINDS)}), got {[t.label for t in tiles]}")
    columns: dict[str, Any] = {name: np.array([getattr(tile, name) for tile in tiles]) for name in NUMBERS}
    return tiles[0].replace(**columns)


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


def _problems(shapes: Sequence[AttentionShape], which: np.ndarray) -> Problem:
    """The calls of tiles [n] or, with lengths, [groups, n], as reals."""
    stacks = jax.tree.map(lambda *xs: np.stack([_real(x) for x in xs], -1), *map(Problem.of, shapes))
    return jax.tree.map(lambda x: x[..., which], stacks)


def _which(shapes: Sequence[AttentionShape], tiles: TileConfig, which: Any) -> np.ndarray:
    """The number of each tile's shape [n]: as given, else one shape for all, or one per tile."""
    if which is not None:
        return which
    n = _count(tiles)
    return np.zeros(n, int) if len(shapes) == 1 else np.arange(n)


def needs(
    shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec, which: Any = None
) -> np.ndarray:
    """Bytes that each tile [n] needs in each of BUFFERS: [n, 6], the largest over the kernels of the call. HBM: 0 where
    the tensors of the call do not fit, whatever the tile; such a call is priced as if they did.

    shapes: one for all tiles, or one per tile; else which [n]: the number of each tile's. All of them `alike`.
    """
    c = chip(device, shapes[0].dtype)
    run = functools.partial(_needs, c.d, masked=_masked(shapes))
    any_order = tiles.replace(core_order=CORE_ORDERS[0])  # the same program for all
    return _in_batches(run, shapes, any_order, _which(shapes, tiles, which), np.zeros((0, len(BUFFERS))))


def fits(need: np.ndarray, device: DeviceSpec, dtype: str) -> np.ndarray:
    """Whether the bytes needed [n, 6] are there: [n, 6]. L1 always fits where the device lets it spill."""
    return need <= chip(device, dtype).available[None]


def legal(shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec) -> np.ndarray:
    """Whether each tile [n] is possible for its call and fits: [n].

    Raises ValueError when the device does not multiply the dtype.
    """
    fit = fits(needs(shapes, tiles, device), device, shapes[0].dtype).all(-1)
    return np.asarray(fit & possible(shapes, tiles))


def possible(shapes: Sequence[AttentionShape], tiles: TileConfig, which: Any = None) -> np.ndarray:
    """Whether the knobs of each tile [n] go together, and with its call: [n]; see `model.estimate.misfits`."""
    which = _which(shapes, tiles, which)
    group = np.array([shape.q_heads // shape.kv_heads for shape in shapes])[which]
    backward = np.array([shape.backward for shape in shapes])[which]
    plain_plan = (tiles.heads_packed == 1) & (tiles.split_kv == 1) & (tiles.kv_pieces == 1)
    whole = (tiles.split_kv == 1) & (tiles.kv_pieces == 1)
    good = (group % tiles.heads_packed == 0) & (plain_plan | ~backward)
    good &= (tiles.kv_pieces == 1) | (tiles.block_kv % (FRACTAL * tiles.kv_pieces) == 0)
    kind = (tiles.fusion == "fused" and not tiles.persistent) | ~backward
    if tiles.core_order == "round_robin":
        kind = kind & np.array([len(shape.groups) <= 1 for shape in shapes])[which]
    return np.asarray(good & kind & (whole if tiles.fusion != "fused" else True))


def exact_seconds(
    shapes: Sequence[AttentionShape], tiles: TileConfig, device: DeviceSpec, which: Any = None
) -> np.ndarray:
    """Exact price of each tile [n] in seconds: [n]; infinite where the model has no finite answer. shapes, which: as
    `needs`."""
    c, which = chip(device, shapes[0].dtype), _which(shapes, tiles, which)

    def run(p: Problem, part: TileConfig):
        return _seconds(c.t, c.d, p, part, masked=_masked(shapes), in_pieces=bool((part.kv_pieces != 1).any()))

    n = _count(tiles)
    pieces = np.broadcast_to(tiles.kv_pieces, n) != 1
    if not pieces.any() or pieces.all():
        seconds = _in_batches(run, shapes, tiles, which, np.zeros(0))
        return np.where(np.isfinite(seconds), seconds, np.inf)
    seconds = np.empty(n)  # a price does not depend on what else is in the batch, nor on which program that needs
    tiles = jax.tree.map(lambda x: np.broadcast_to(x, n), tiles)
    for some in (np.flatnonzero(pieces), np.flatnonzero(~pieces)):
        seconds[some] = exact_seconds(shapes, jax.tree.map(operator.itemgetter(some), tiles), device, which[some])
    return seconds


def seconds_of(shape: AttentionShape, tiles: Sequence[TileConfig], device: DeviceSpec) -> list[float]:
    """Exact price of plain tiles of any kinds, in seconds; infinite where one is not legal. Each kind in one batch."""
    seconds = np.full(len(tiles), np.inf)
    kinds: dict[Any, list[int]] = {}
    for i, tile in enumerate(tiles):
        kinds.setdefault(tuple(getattr(tile, name) for name in KINDS), []).append(i)
    for places in kinds.values():
        here = np.array(places)[legal([shape], stacked([tiles[i] for i in places]), device)]
        if len(here):
            seconds[here] = exact_seconds([shape], stacked([tiles[i] for i in here.tolist()]), device)
    return seconds.tolist()


def alike(shape: AttentionShape) -> Hashable:
    """The same for calls whose tiles may be priced in one batch, on one device."""
    return (shape.dtype, shape.mask is None, shape.backward, shape if shape.has_lengths else None)


def _masked(shapes: Sequence[AttentionShape]) -> bool:
    return shapes[0].mask is not None


def _count(tiles: TileConfig) -> int:
    return len(tiles.block_q)


def _in_batches(
    run, shapes: Sequence[AttentionShape], tiles: TileConfig, which: np.ndarray, empty: np.ndarray
) -> np.ndarray:
    """run(problems, tiles) over slices of BATCH points for each device; its answers [n, ...] joined."""
    n, out = _count(tiles), [empty]
    problems, tiles = _problems(shapes, which), jax.tree.map(lambda x: np.broadcast_to(x, (n,)), tiles)

    def batch(start: int) -> np.ndarray:
        part = jax.tree.map(operator.itemgetter((..., slice(start, start + size))), (problems, tiles))
        return np.asarray(run(*part), float)[: _count(part[1])]

    size = BATCH * len(jax.local_devices())
    starts = range(0, n, size)
    return np.concatenate([*out, *(_workers().map(batch, starts) if len(starts) > 1 else map(batch, starts))])


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """A compiled function lets go of the interpreter, but its small kernels use one core each."""
    return ThreadPoolExecutor(os.cpu_count(), "npumodel-prices")


def _filled(x) -> np.ndarray:
    """x [..., n] as reals [..., BATCH for each device], the rest a copy of the first."""
    out = np.empty((*x.shape[:-1], BATCH * len(jax.local_devices())), jnp.result_type(float))
    out[...], out[..., : x.shape[-1]] = x[..., :1], x
    return out


def _needs(d: DeviceSpec, p: Problem, tiles: TileConfig, masked: bool):
    with jax.ensure_compile_time_eval():  # the same program inside a trace and outside
        return _needs_jit(d, *jax.tree.map(_filled, (p, tiles)), masked=masked)


def _seconds(t: TimeConstants, d: DeviceSpec, p: Problem, tiles: TileConfig, **static: bool):
    mine = _count(tiles) - BATCH * np.arange(len(jax.local_devices()))  # points of each device
    chunks = np.int32(np.clip(-(-mine // CHUNK), 0, BATCH // CHUNK))
    with jax.ensure_compile_time_eval():
        return _seconds_jit(t, d, *jax.tree.map(_filled, (p, tiles)), chunks, **static)


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


@functools.partial(jax.jit, static_argnames=("masked", "in_pieces"))
def _seconds_jit(
    t: TimeConstants, d: DeviceSpec, p: Problem, tiles: TileConfig, chunks, masked: bool, in_pieces: bool
):
    """Of each device's BATCH points the prices of the first chunks[device] * CHUNK, the rest infinite. A loop, so that
    few points cost little. The points are sharded over all devices of this process, which need nothing of each other.
    """
    options = Options("", masked, waits=False, in_pieces=in_pieces)

    def on_one_device(t: TimeConstants, d: DeviceSpec, p: Problem, tiles: TileConfig, chunks):
        def body(i, out):
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * CHUNK, CHUNK, x.ndim - 1), (p, tiles))
            seconds = price(t, part[0], part[1], d, options).seconds
            return jax.lax.dynamic_update_slice(out, seconds, (i * CHUNK,))

        return jax.lax.fori_loop(0, chunks[0], body, jnp.full(BATCH, jnp.inf))

    devices = jax.local_devices()
    if len(devices) == 1:
        return on_one_device(t, d, p, tiles, chunks)
    mesh = jax.sharding.Mesh(np.array(devices), ("points",))
    specs = jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 1), "points"), (p, tiles, chunks))
    over = {"mesh": mesh, "in_specs": (PartitionSpec(), PartitionSpec(), *specs), "out_specs": PartitionSpec("points")}
    return jax.shard_map(on_one_device, **over, check_vma=False)(t, d, p, tiles, chunks)
