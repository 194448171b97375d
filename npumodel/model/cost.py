"""The price of one call: seconds, and everything that explains them, as one pure function of PyTrees.

    seconds = sum over kernels of  launch + per_core * cores + per_task * waves + time of the busiest core

`price` is what the search differentiates and vmaps; `estimate` is the door for people.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..hardware import DeviceSpec
from ..hardware.spec import OVERFLOWS
from ..relax import floor_div, gate, tent
from ..tile import TileConfig
from ..workload import AttentionShape
from . import tiling
from .durations import Block, TimeConstants, l0_bytes, measure, miss_share, stage_bytes, stage_seconds, time_constants
from .graph import Kernel, compile_graph
from .pipeline import TRANSIENT, fast, knobs
from .stages import GM_PATHS, StageTable, stage_table
from .tiling import Blocks, Problem, Traffic


class Options(NamedTuple):
    """What is fixed at compile time. overlap False: nothing runs beside anything else; waits False: the waits are not
    computed (zeros); transient: see `pipeline.fast`."""

    dtype: str
    masked: bool
    overlap: bool = True
    waits: bool = True
    transient: int = TRANSIENT


class KernelPrice(NamedTuple):
    """One kernel. Times in seconds; busy, wait and bytes per stage of its table [stages]: of the busiest core, bytes of
    the whole call."""

    launch: Any
    core: Any
    busy: Any
    wait: Any
    bytes: Any
    hbm_bytes: Any
    l1_read_bytes: Any
    l1_fill_bytes: Any
    footprints: dict
    traffic: Traffic
    steps: Any


class Price(NamedTuple):
    """One call: the total and its kernels, in the order of the graph."""

    seconds: Any
    kernels: tuple[KernelPrice, ...]


def price(t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, options: Options, temperature=0.0) -> Price:
    """Price a call. Differentiable in `t` (homogeneous of degree 1), in the tile and in the capacities of `d`.

    temperature: a plain 0 = exact; above it counts are relaxed and the discrete knobs are blended.
    """
    graph = compile_graph(options.masked, tile.fusion)
    kernels = tuple(_price_kernel(kernel, t, p, tile, d, options, temperature) for kernel in graph.kernels)
    return Price(sum(k.launch + k.core for k in kernels), kernels)


class Parts(NamedTuple):
    """One kernel, cut and timed: everything that the schedule starts from. seconds, bytes [stages, 2, 2]: full and
    ragged rows by full and ragged columns; feet: bytes needed per buffer."""

    table: StageTable
    blocks: Blocks
    traffic: Traffic
    corners: Block
    seconds: Any
    bytes: Any
    feet: dict


def parts(
    kernel: Kernel, t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature=0.0
) -> Parts:
    """Cut a call into blocks and time every stage of one of its kernels."""
    table = stage_table(kernel, d.arch)
    table = table if o.overlap else table.serial()
    b = tiling.cut(p, tile, o.transient, temperature)
    feet = tiling.footprints(p, tile, d, b, kernel.kinds)
    work = tiling.workspace_bytes(p, tile, d, b, kernel.kinds)
    x = tiling.share_of_chip(p, d, b, feet["L1"], work, temperature)
    rows, cols = jnp.stack([b.rows, b.tail_rows]), jnp.stack([b.cols, b.tail_cols])
    corners = measure(p, d, rows, cols, len(kernel.ops) > 1, temperature)
    seconds = stage_seconds(table, t, p, d, x, corners)
    return Parts(table, b, x, corners, seconds, stage_bytes(table, p, x, corners), feet)


def _price_kernel(kernel: Kernel, t, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature):
    table, b, x, corners, seconds, moved, feet = parts(kernel, t, p, tile, d, o, temperature)
    head, heaviest = _head_times(table, seconds, b, tile, t.sync, o, temperature)
    per_core = x.waves / b.q_blocks  # heads that the busiest core works through
    calls = p.batch * p.q_heads
    runs = _runs(table, b)
    moved = calls * (runs * moved).sum((1, 2))
    fills = np.array([s.action in ("gm_l1", "ub_l1") for s in table.stages])
    from_gm = jnp.stack([miss_share(s, x) * (s.action in GM_PATHS) * jnp.ones_like(b.rows) for s in table.stages])
    reads = [runs[i] * sum(l0_bytes(s, p, corners)) for i, s in enumerate(table.stages) if s.action == "matmul"]
    return KernelPrice(
        launch=t.launch + t.launch_core * x.active + t.launch_task * x.waves,
        core=jnp.maximum(_core_seconds(b, x, head, temperature), heaviest),
        busy=per_core * (runs * seconds).sum((1, 2)),
        wait=per_core * head.wait,
        bytes=moved,
        hbm_bytes=moved @ from_gm,
        l1_read_bytes=calls * sum(r.sum() for r in reads) if reads else jnp.zeros_like(b.rows),
        l1_fill_bytes=jnp.where(fills, moved, 0.0).sum(),
        footprints=feet,
        traffic=x,
        steps=calls * b.steps,
    )


def _runs(table: StageTable, b: Blocks):
    """[stages, 2, 2] how often each stage runs in one head, for full and ragged rows by full and ragged columns."""
    one, none = jnp.ones_like(b.rows), jnp.zeros_like(b.rows)
    at_end = jnp.maximum(b.reach_end - 1, 0.0)
    inner = jnp.maximum(b.steps - b.kv_blocks - at_end, 0.0)
    started = jnp.maximum(b.q_blocks - b.shorter[0] - 1, 0.0)  # tasks without a single step load nothing
    counts = {
        "step": (inner, at_end, jnp.maximum(b.kv_blocks - 1, 0.0), one),
        "task_start": (started, none, one, none),
        "task_end": (b.q_blocks - 1, none, one, none),
    }
    return jnp.stack([jnp.stack(counts[s.when]).reshape(2, 2) for s in table.stages])


class _Head(NamedTuple):
    """All tasks of a head: their makespans added up, the mean of those before the last, the waits added up."""

    makespan: Any
    usual: Any
    wait: Any


def _core_seconds(b: Blocks, x: Traffic, head: _Head, temperature):
    """The busiest core: whole heads, and of one more head so many tasks as are left: full ones, or, where tasks differ
    in length (causal), tasks of mean length, since long and short ones are dealt out in pairs."""
    heads = floor_div(x.waves, b.q_blocks, temperature)
    task = jnp.maximum(head.usual, head.makespan / b.q_blocks)
    return heads * head.makespan + jnp.maximum(x.waves - heads * b.q_blocks, 0.0) * task


def _head_times(table: StageTable, seconds, b: Blocks, tile: TileConfig, sync, o: Options, temperature):
    """(times of all tasks of a head, seconds of its longest task). Between whole buffers and lookaheads: the mean of
    the neighbours."""

    def at(buffers, lookahead):
        k = knobs(table, buffers, lookahead, sync)
        run = partial(fast, table, steps=b.kv_blocks, k=k, transient=o.transient, waits=o.waits)
        times = jax.vmap(run, 1)(seconds[..., 0], seconds[..., 1])  # [2]: full rows, ragged rows
        (whole, lengths, empty), (ragged, _, _) = (jax.tree.map(itemgetter(i), times) for i in (0, 1))
        early = gate(b.q_blocks - b.reach_end) * tiling.at_length(lengths.makespan, b.kv_blocks - 1)
        heaviest = jnp.maximum(jnp.maximum(early, ragged.makespan), gate(b.reach_end - 1) * whole.makespan)
        total = jax.tree.map(partial(tiling.over_tasks, b), lengths, whole, ragged, empty)
        usual = (total.makespan - ragged.makespan) / jnp.maximum(b.q_blocks - 1, 1.0)
        return _Head(total.makespan, usual, total.wait), heaviest

    lookahead = tile.lookahead if o.overlap else 0 * tile.lookahead
    if isinstance(temperature, (int, float)) and temperature == 0:
        return at(tile.buffers, lookahead)
    low = [jax.lax.stop_gradient(jnp.floor(x)) for x in (tile.buffers, lookahead)]
    share = [x - whole for x, whole in zip((tile.buffers, lookahead), low, strict=True)]
    corners = [(i, j) for i in (0.0, 1.0) for j in (0.0, 1.0)]
    weights = jnp.stack([tent(share[0] - i) * tent(share[1] - j) for i, j in corners])
    values = jax.vmap(lambda c: at(low[0] + c[0], low[1] + c[1]))(jnp.asarray(corners))
    return jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), values)


@partial(jax.jit, static_argnames="options")
def _priced(p: Problem, tile: TileConfig, d: DeviceSpec, options: Options) -> Price:
    return price(time_constants(d, options.dtype), p, tile, d, options)


@partial(jax.jit, static_argnames="options")
def _broken_down(p: Problem, tile: TileConfig, d: DeviceSpec, options: Options) -> TimeConstants:
    """Each time constant times the gradient of the seconds with respect to it."""
    t = time_constants(d, options.dtype)
    gradient = jax.grad(lambda t: price(t, p, tile, d, options).seconds)(t)
    return jax.tree.map(jnp.multiply, t, gradient)


@dataclasses.dataclass(frozen=True)
class StageCost:
    """One stage of the busiest core. busy and dma_wait in seconds; bytes of the whole call."""

    name: str
    op: str
    pipe: str
    busy: float
    dma_wait: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a tile needs in one buffer of a core, and bytes that there are."""

    buffer: str
    needed: float
    available: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call costs on one device, all in SI units.

    seconds        total, launches included
    stages         in program order; busy and dma_wait of the busiest core
    traffic        bytes of the whole call per data path ("gm_l1", ...) and "hbm"
    l1_hit_rate    share of the bytes that the matrix unit's loads read from L1 without a new transfer into L1
    l2_hit_rate    share of the bytes asked from global memory that L2 serves
    launches, launch_seconds
    breakdown      seconds by time constant (see `durations.TimeConstants`), by gradient, when asked for
    lower_bound    busiest pipe and launches; upper_bound: everything in a row
    bound          the busiest pipe
    footprints     per buffer, the largest over the kernels
    """

    shape: AttentionShape
    device: str
    tile: TileConfig
    seconds: float
    stages: tuple[StageCost, ...]
    traffic: dict[str, float]
    l1_hit_rate: float
    l2_hit_rate: float
    launches: int
    launch_seconds: float
    lower_bound: float
    upper_bound: float
    bound: str
    footprints: tuple[Footprint, ...]
    tasks: int
    steps: int
    cores: int
    graph: str
    chip: DeviceSpec = dataclasses.field(repr=False, compare=False)
    overlap: bool = True

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by time constant: constant * d seconds / d constant. They add up to `seconds`, since the time is
        homogeneous of degree 1 in the constants (Euler). Compiles the gradient at the first use."""
        options = Options(self.shape.dtype, self.shape.mask is not None, self.overlap, waits=False)
        found = jax.device_get(_broken_down(*arguments(self.shape, self.tile, self.chip), options))
        return {name: float(v) for name, v in found._asdict().items() if v}

    @property
    def launch_share(self) -> float:
        return self.launch_seconds / self.seconds

    def by_op(self, field: str) -> dict[str, float]:
        """Seconds of "busy" or "dma_wait" of compute stages per graph op: the article's table."""
        ops: dict[str, float] = {}
        for s in self.stages:
            if s.pipe in _COMPUTE_PIPES:
                ops[s.op] = ops.get(s.op, 0.0) + getattr(s, field)
        return ops


_COMPUTE_PIPES = ("CUBE", "VECTOR")


def estimate(shape: AttentionShape, device: DeviceSpec, tile: TileConfig, *, overlap: bool = True) -> Cost:
    """Price one call with an explicit tile.

    overlap False prices the same work with no transfer beside any computation.

    Raises ValueError when a buffer is too small for the tile (buffer, bytes needed, bytes available), or when the
    device has no such dtype.
    """
    problems = illegal(shape, device, tile)
    if problems:
        raise ValueError(f"tile {tile.label} does not fit on {device.name or 'this device'}: " + "; ".join(problems))
    options = Options(shape.dtype, shape.mask is not None, overlap)
    return _cost(shape, device, tile, options, jax.device_get(_priced(*arguments(shape, tile, device), options)))


def arguments(shape: AttentionShape, tile: TileConfig, device: DeviceSpec):
    """(Problem, tile, device) as arrays of the default real type, so that calls share one compilation."""
    time_constants(device, shape.dtype)  # an unknown dtype is refused before anything is compiled
    chip = device.anonymous().replace(overflow=OVERFLOWS[0])  # judged by `illegal`, of no interest to the price
    return jax.tree.map(_real, (Problem.of(shape), tile, chip))


def _real(x):
    return x if isinstance(x, jax.Array) else np.asarray(x, jnp.result_type(float))


@partial(jax.jit, static_argnames="masked")
def _footprints(p: Problem, tile: TileConfig, d: DeviceSpec, masked: bool):
    b = tiling.cut(p, tile, 1)
    graph = compile_graph(masked, tile.fusion)
    feet = [tiling.footprints(p, tile, d, b, kernel.kinds) for kernel in graph.kernels]
    return {name: jnp.stack([f[name] for f in feet]).max(0) for name in feet[0]}


def footprints(shape: AttentionShape, device: DeviceSpec, tile: TileConfig) -> tuple[Footprint, ...]:
    """Bytes needed and available of every buffer, the largest over the kernels of the call."""
    needed = _footprints(*arguments(shape, tile, device), masked=shape.mask is not None)
    available = tiling.capacities(device)
    return tuple(Footprint(name, float(n), float(available[name])) for name, n in needed.items())


def illegal(shape: AttentionShape, device: DeviceSpec, tile: TileConfig) -> list[str]:
    """One sentence for every buffer that is too small, naming it, the bytes needed and the bytes available.

    Where the device lets L1 overflow ("spill"), a full L1 costs time and is no error.
    """
    feet = footprints(shape, device, tile)
    return [
        f"{f.buffer} needs {f.needed:,.0f} bytes, there are {f.available:,.0f}"
        for f in feet
        if not f.fits and not (f.buffer == "L1" and device.overflow == "spill")
    ]


def _cost(shape, device: DeviceSpec, tile, options: Options, result: Price) -> Cost:
    graph = compile_graph(options.masked, tile.fusion)
    tables = [stage_table(kernel, device.arch) for kernel in graph.kernels]
    stages = tuple(
        StageCost(s.name, s.op, s.pipe, float(k.busy[i]), float(k.wait[i]), float(k.bytes[i]))
        for table, k in zip(tables, result.kernels, strict=True)
        for i, s in enumerate(table.stages)
    )
    actions = [s.action for table in tables for s in table.stages]
    traffic: dict[str, float] = {}
    for stage, action in zip(stages, actions, strict=True):
        if action not in ("matmul", "vector"):
            traffic[action] = traffic.get(action, 0.0) + stage.bytes
    asked = sum(total for path, total in traffic.items() if path in GM_PATHS)
    traffic["hbm"] = float(sum(k.hbm_bytes for k in result.kernels))
    pipes = [_pipe_seconds(table, k) for table, k in zip(tables, result.kernels, strict=True)]
    launch = float(sum(k.launch for k in result.kernels))
    reads, fills = (float(sum(getattr(k, name) for k in result.kernels)) for name in ("l1_read_bytes", "l1_fill_bytes"))
    together: dict[str, float] = {}
    for kernel in pipes:
        for pipe, seconds in kernel.items():
            together[pipe] = together.get(pipe, 0.0) + seconds
    return Cost(
        shape=shape,
        device=device.name,
        tile=tile,
        seconds=float(result.seconds),
        stages=stages,
        traffic=traffic,
        l1_hit_rate=max(0.0, 1 - fills / reads),
        l2_hit_rate=1 - traffic["hbm"] / asked,
        launches=graph.launches,
        launch_seconds=launch,
        lower_bound=launch + sum(max(kernel.values()) for kernel in pipes),
        upper_bound=launch + sum(s.busy for s in stages) + _hand_overs(tables, result, device),
        bound=max(together, key=together.__getitem__),
        footprints=tuple(
            Footprint(name, max(float(k.footprints[name]) for k in result.kernels), float(bytes_))
            for name, bytes_ in tiling.capacities(device).items()
        ),
        tasks=round(float(result.kernels[0].traffic.tasks)),
        steps=round(float(result.kernels[0].steps)),
        cores=round(float(result.kernels[0].traffic.active)),
        graph=str(graph),
        chip=device,
        overlap=options.overlap,
    )


def _hand_overs(tables, result: Price, device: DeviceSpec) -> float:
    """Seconds of all hand-overs of the busiest core, one after the other."""
    count = sum(
        sum(s.sync for s in table.stages) * float(k.steps / k.traffic.tasks * k.traffic.waves)
        for table, k in zip(tables, result.kernels, strict=True)
    )
    return count * float(device.sync_cycles / device.cube_hz)


def _pipe_seconds(table: StageTable, k: KernelPrice) -> dict[str, float]:
    return {pipe: sum(float(k.busy[i]) for i, s in enumerate(table.stages) if s.pipe == pipe) for pipe in table.pipes}
