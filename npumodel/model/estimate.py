"""One call on one device, priced for people: what it costs, where the time goes, and whether the tile fits at all."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import units
from ..hardware import DeviceSpec
from ..hardware.spec import COUNTS, OVERFLOWS
from ..tile import MatmulTile, SoftmaxTile, TileConfig
from ..workload import AttentionShape, MatmulShape, Shape, SoftmaxShape
from . import tiling
from .cost import WITHOUT_FUSION, KernelPrice, Options, Price, price
from .durations import AFTER, BEFORE, COMBINE, TimeConstants, time_constants
from .graph import OTHER_TITLES, STAGE_TITLES, compile_graph, graph_of, masked
from .stages import GM_PATHS, StageTable, stage_table
from .tiling import AnyProblem, AnyTile


@partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _priced(p: AnyProblem, tile: AnyTile, d: DeviceSpec, options: Options) -> Price:
    return price(time_constants(d, options.dtype), p, tile, d, options)


class Slopes(NamedTuple):
    """The gradient of a price, each part times what it is the gradient of.

    breakdown     seconds by time constant
    elasticities  d log seconds / d log number, as a DeviceSpec: of all that a number of the device enters, time
                  constants and counts. Exact counts are constant, so that numbers which only enter those have 0
    """

    breakdown: TimeConstants
    elasticities: DeviceSpec


@partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _differentiated(p: AnyProblem, tile: AnyTile, d: DeviceSpec, options: Options) -> Slopes:
    t, through_constants = jax.vjp(lambda d: time_constants(d, options.dtype), d)
    seconds, (by_t, by_d) = jax.value_and_grad(lambda t, d: price(t, p, tile, d, options).seconds, (0, 1))(t, d)
    (more,) = through_constants(by_t)
    elasticities = jax.tree.map(lambda x, one, other: x * (one + other) / seconds, d, by_d, more)
    return Slopes(jax.tree.map(jnp.multiply, t, by_t), elasticities)


def slopes(shape: Shape, device: DeviceSpec, tile: AnyTile, *, overlap: bool = True) -> Slopes:
    """The gradient of one price. Compiles it at the first use. Raises as `arguments`."""
    options = Options.of(shape, tile, overlap=overlap, waits=False)
    return jax.device_get(_differentiated(*arguments(shape, tile, device), options))


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
class OpCost:
    """One graph op on the busiest core: seconds that its unit computes, and waits for transfers."""

    op: str
    title: str
    unit: str
    busy: float
    dma_wait: float


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes that a tile needs in one buffer of a core, or the call in HBM, and bytes that there are."""

    buffer: str
    needed: float
    available: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call costs on one device, all in SI units.

    shape, tile    what was asked: an AttentionShape and a TileConfig, or a MatmulShape or SoftmaxShape and its tile
    seconds        total, launches included
    stages         in program order; busy and dma_wait of the busiest core, its tasks being of mean size. Of examples of
                   several lengths it has its share of each; or, where that takes longer, of the longer ones only
    traffic        bytes of the whole call per data path ("gm_l1", ...) and "hbm"
    l1_hit_rate    share of the bytes that the matrix unit's loads read from L1 without a new transfer into L1; 1 where
                   it reads nothing
    l2_hit_rate    share of the bytes asked from global memory that L2 serves
    launches, launch_seconds
    breakdown      seconds by time constant (see `durations.TimeConstants`), by gradient, when asked for
    lower_bound    busiest pipe or HBM, and launches; upper_bound: everything in a row
    bound          the busiest pipe, or "HBM" where the memory takes longer for the bytes of all cores, or "launch" if
                   launches take longer than both
    hbm_seconds    what the memory takes for the bytes of all cores at its full rate
    footprints     per buffer, the largest over the kernels; "HBM": tensors and workspace
    busiest_core   number of the core that works longest, of the longest kernel
    """

    shape: Any
    device: str
    tile: Any
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
    hbm_seconds: float
    footprints: tuple[Footprint, ...]
    tasks: int
    steps: int
    cores: int
    graph: str
    chip: DeviceSpec = dataclasses.field(repr=False, compare=False)
    overlap: bool = True
    busiest_core: int = 0

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds by time constant: constant * d seconds / d constant. They add up to `seconds`, since the time is
        homogeneous of degree 1 in the constants (Euler). Compiles the gradient at the first use."""
        return {name: float(v) for name, v in self.slopes.breakdown._asdict().items() if v}

    @property
    def elasticities(self) -> dict[str, float]:
        """d log seconds / d log number by number of the device (`DeviceSpec.numbers`), with this tile: -0.8 is 0.8 %
        less time for 1 % more. Numbers of cores and of vector units are left out: counts have steps, and no slope."""
        found = self.slopes.elasticities.numbers
        return {name: float(v) for name, v in found.items() if v is not None and v and name not in COUNTS}

    @cached_property
    def slopes(self) -> Slopes:
        """What `breakdown` and `elasticities` come from."""
        return slopes(self.shape, self.chip, self.tile, overlap=self.overlap)

    @property
    def too_large(self) -> str | None:
        """A sentence if the tensors of the call do not fit into the HBM, so that this is a price of what cannot run."""
        return too_large(self.shape, self.chip)

    @property
    def launch_share(self) -> float:
        return self.launch_seconds / self.seconds

    def by_op(self, field: str) -> dict[str, float]:
        """Seconds of "busy" or "dma_wait" of compute stages per graph op."""
        ops: dict[str, float] = {}
        for s in self.stages:
            if s.pipe in _COMPUTE_PIPES:
                ops[s.op] = ops.get(s.op, 0.0) + getattr(s, field)
        return ops

    @property
    def rows(self) -> tuple[OpCost, ...]:
        """The ops of the call in the article's order."""
        busy, waits = self.by_op("busy"), self.by_op("dma_wait")
        return tuple(OpCost(op, *_TITLES[op], busy[op], waits[op]) for op in sorted(busy, key=list(_TITLES).index))

    def table(self) -> str:
        """The article's stage table, one row an op: "[Softmax    ] vector_core: 0.56ms | dma_wait: 0.04ms"."""
        width = max(len(title) for _, title, _ in STAGE_TITLES)
        times = [(units.milliseconds(row.busy), units.milliseconds(row.dma_wait)) for row in self.rows]
        return "\n".join(
            f"[{row.title:<{width}}] {row.unit}: {busy} | dma_wait: {wait}"
            for row, (busy, wait) in zip(self.rows, times, strict=True)
        )


_COMPUTE_PIPES = ("CUBE", "VECTOR")
_FIRST, *_LATER = STAGE_TITLES
#: Op -> (title, unit), in order. The mask is an op of its own only in an unfused call.
_TITLES = {op: (title, unit) for op, title, unit in (_FIRST, *OTHER_TITLES, *_LATER)}


def estimate(shape: Shape, device: DeviceSpec, tile: AnyTile, *, overlap: bool = True) -> Cost:
    """Price one call with an explicit tile: a TileConfig, for a MatmulShape a MatmulTile, for a SoftmaxShape a
    SoftmaxTile.

    overlap False prices the same work with no transfer beside any computation.
    A call whose tensors alone are larger than the HBM has no plan that fits; it is priced all the same, as a question
    of what if, and `Cost.too_large` says so. A plan whose workspace is what does not fit is refused.
    Examples with lengths of their own are one launch: see `cost.price`. Their padding takes room in HBM and no time.

    Raises ValueError when no example has both queries and keys, when a buffer is too small for the tile (buffer, bytes
    needed, bytes available), or when the device has no such dtype.
    """
    problems = illegal(shape, device, tile)
    if problems:
        raise ValueError(f"tile {tile.label} does not fit on {device.name or 'this device'}: " + "; ".join(problems))
    options = Options.of(shape, tile, overlap=overlap)
    return _cost(shape, device, tile, options, jax.device_get(_priced(*arguments(shape, tile, device), options)))


def arguments(shape: Shape, tile: AnyTile, device: DeviceSpec) -> Any:
    """(Problem, tile, device) as arrays of the default real type, so that calls share one compilation."""
    time_constants(device, shape.dtype)  # an unknown dtype is refused before anything is compiled
    chip = device.anonymous().replace(overflow=OVERFLOWS[0])  # judged by `illegal`, of no interest to the price
    return jax.tree.map(_real, (tiling.problem_of(shape), tile, chip))


def _real(x):
    return x if isinstance(x, jax.Array) else np.asarray(x, jnp.result_type(float))


@partial(jax.jit, static_argnames="masked")
def _footprints(p: AnyProblem, tile: AnyTile, d: DeviceSpec, masked: bool):
    p, tile = tiling.lowered(p, tile, d)
    graph = compile_graph(masked, tile.fusion, p.kind)
    return tiling.footprints_of_call(p, tile, d, tuple(kernel.kinds for kernel in graph.kernels))


def footprints(shape: Shape, device: DeviceSpec, tile: AnyTile) -> tuple[Footprint, ...]:
    """Bytes needed and available of every buffer, the largest over the kernels of the call."""
    needed = _footprints(*arguments(shape, tile, device), masked=masked(shape))
    available = tiling.capacities(device)
    return tuple(Footprint(name, float(n), float(available[name])) for name, n in needed.items())


def misfits(shape: AttentionShape, device: DeviceSpec, tile: TileConfig) -> list[str]:
    """What `illegal` says, and what the search does not try: pieces of K and V that are no whole fractals of keys."""
    if tile.kv_pieces != 1 and tile.block_kv % (tiling.FRACTAL * tile.kv_pieces):
        whole = f"pieces of whole fractals of {tiling.FRACTAL} keys"
        return [f"kv_pieces: expected {whole}, got {tile.block_kv} keys in {tile.kv_pieces} pieces"]
    return illegal(shape, device, tile)


def illegal(shape: Shape, device: DeviceSpec, tile: AnyTile) -> list[str]:
    """One sentence for every buffer that is too small, naming it, the bytes needed and the bytes available, for heads
    that do not divide, and for an order that examples of several lengths do not have. HBM: only where the tensors of
    the call would fit without this plan's workspace. Backward: one for every knob that it does not have; the buffers
    then go unchecked.

    Where the device lets L1 overflow ("spill"), a full L1 costs time and is no error.
    """
    problems = _knobs_without_backward(tile) if isinstance(shape, AttentionShape) and shape.backward else []
    if problems:
        return problems
    feet = footprints(shape, device, tile)
    tolerated = {"L1"} if device.overflow == "spill" else set()
    tolerated |= {"HBM"} if too_large(shape, device) else set()
    problems = [
        f"{f.buffer} needs {f.needed:,.0f} bytes, there are {f.available:,.0f}"
        for f in feet
        if not f.fits and f.buffer not in tolerated
    ]
    if not isinstance(shape, AttentionShape) or not isinstance(tile, TileConfig):
        return problems
    group = shape.q_heads // shape.kv_heads
    if group % tile.heads_packed:
        problems.append(f"heads_packed: expected a divisor of q_heads / kv_heads = {group}, got {tile.heads_packed}")
    if tile.core_order == "round_robin" and len(shape.groups) > 1:
        orders = "'balanced' or 'contiguous' for examples of several lengths"
        problems.append(f"core_order: expected {orders}, got 'round_robin'")
    return problems


def too_large(shape: Shape, device: DeviceSpec) -> str | None:
    """A sentence if the tensors of a call do not fit into the HBM (then no plan does), with the bytes needed and those
    there are; else None."""
    needed, available = shape.tensor_bytes, device.hbm_bytes
    if needed <= available:
        return None
    return (
        f"HBM needs {needed:,} bytes for the tensors of the call, there are {float(available):,.0f}; "
        "the price is that of a chip with so much"
    )


def _knobs_without_backward(tile: AnyTile) -> list[str]:
    wanted = {"fusion": "fused", "heads_packed": 1, "split_kv": 1, "kv_pieces": 1, "persistent": False}
    found = {name: getattr(tile, name, value) for name, value in wanted.items()}
    return [
        f"{name}: expected {value!r} for the backward pass, got {found[name]!r}"
        for name, value in wanted.items()
        if found[name] != value
    ]


def _cost(shape, device: DeviceSpec, tile, options: Options, result: Price) -> Cost:
    graph = graph_of(shape, getattr(tile, "fusion", "fused"))
    tables = [stage_table(kernel, device.arch) for kernel in graph.kernels]
    pairs = list(zip(tables, result.kernels, strict=True))
    stages = tuple(stage for table, k in pairs for stage in (*_stages(table, k), *_combine_stages(device, tile, k)))
    actions = {s.name: s.action for table in tables for s in table.stages}
    actions |= {name: path for name, _, path in (*COMBINE, *BEFORE, *AFTER)}
    traffic: dict[str, float] = {}
    for stage in stages:
        if actions[stage.name] not in ("matmul", "vector"):
            traffic[actions[stage.name]] = traffic.get(actions[stage.name], 0.0) + stage.bytes
    asked = sum(total for path, total in traffic.items() if path in GM_PATHS)
    traffic["hbm"] = float(sum(k.hbm_bytes for k in result.kernels))
    pipes = [_pipe_seconds(table, k) for table, k in pairs]
    combined = float(sum(sum(k.combine.seconds.values()) for k in result.kernels))
    launch = float(sum(k.launch for k in result.kernels))
    reads, fills = (float(sum(getattr(k, name) for k in result.kernels)) for name in ("l1_read_bytes", "l1_fill_bytes"))
    memory = [float(k.hbm_seconds) for k in result.kernels]
    together: dict[str, float] = {"HBM": sum(memory)}
    for stage in stages:
        together[stage.pipe] = together.get(stage.pipe, 0.0) + stage.busy
    tasks, steps = tasks_and_steps(shape, tile, device)
    return Cost(
        shape=shape,
        device=device.name,
        tile=tile,
        seconds=float(result.seconds),
        stages=stages,
        traffic=traffic,
        l1_hit_rate=max(0.0, 1 - fills / reads) if reads else 1.0,
        l2_hit_rate=1 - traffic["hbm"] / asked,
        launches=graph.launches,
        launch_seconds=launch,
        lower_bound=launch + combined + sum(max(*pipe.values(), hbm) for pipe, hbm in zip(pipes, memory, strict=True)),
        upper_bound=launch + float(sum(k.serial for k in result.kernels)),
        bound=max(together, key=together.__getitem__) if max(together.values()) > launch else "launch",
        hbm_seconds=sum(memory),
        footprints=tuple(
            Footprint(name, max(float(k.footprints[name]) for k in result.kernels), float(bytes_))
            for name, bytes_ in tiling.capacities(device).items()
        ),
        tasks=tasks,
        steps=steps,
        cores=round(float(result.kernels[0].traffic.active)),
        graph=str(graph),
        chip=device,
        overlap=options.overlap,
        busiest_core=round(float(max(result.kernels, key=lambda k: k.core).busiest_core)),
    )


def _stages(table: StageTable, k: KernelPrice) -> list[StageCost]:
    return [
        StageCost(s.name, s.op, s.pipe, float(k.busy[s.name]), float(k.wait.get(s.name, 0.0)), float(k.bytes[s.name]))
        for s in table.stages
    ]


def _combine_stages(device: DeviceSpec, tile: AnyTile, k: KernelPrice) -> list[StageCost]:
    """What all cores do together once: joining the parts of split keys, if they are split, or what comes before and
    after the tasks of a backward pass. Nothing runs beside it."""
    backward = "delta" in k.combine.seconds
    if not backward and (not isinstance(tile, TileConfig) or tile.split_kv == 1):
        return []
    chosen, op = (BEFORE + AFTER, "softmax_grad") if backward else (COMBINE, "softmax")
    pipes = [pipe if pipe == "VECTOR" or device.arch == "coupled" else f"{pipe}.V" for _, pipe, _ in chosen]
    return [
        StageCost(name, op, pipe, float(k.combine.seconds[name]), 0.0, float(k.combine.bytes[name]))
        for (name, _, _), pipe in zip(chosen, pipes, strict=True)
    ]


def tasks_and_steps(shape: Shape, tile: AnyTile, device: DeviceSpec | None = None) -> tuple[int, int]:
    """(tasks, steps of all tasks) of the whole call, counted in integers: exact for any size. device: for a softmax,
    whose rows all cores share."""
    if isinstance(shape, MatmulShape) and isinstance(tile, MatmulTile):
        tasks = shape.batch * -(-shape.m // tile.block_m) * -(-shape.n // tile.block_n)
        return tasks, tasks * -(-shape.k // tile.block_k)
    if isinstance(shape, SoftmaxShape) and isinstance(tile, SoftmaxTile) and device is not None:
        each = -(-shape.rows // min(int(device.cube_cores), shape.rows))
        whole, rest = divmod(shape.rows, each)
        return whole + (rest > 0), whole * -(-each // tile.block_rows) + -(-rest // tile.block_rows)
    assert isinstance(shape, AttentionShape) and isinstance(tile, TileConfig)  # `lowered` has refused the rest
    tasks = steps = 0
    for group in shape.groups:
        begin, end = kv_blocks(group, tile)
        stacks = group.batch * group.q_heads // tile.heads_packed
        tasks, steps = tasks + stacks * len(begin) * tile.split_kv, steps + stacks * int((end - begin).sum())
    return tasks, steps


def kv_blocks(shape: AttentionShape, tile: TileConfig) -> tuple[np.ndarray, np.ndarray]:
    """First kv block, and the one after the last, of each q block of a head: two times [q_blocks]. The kv blocks lie on
    one grid from key 0; those between are the ones of which some query of the q block sees a key.

    Raises ValueError for a shape with lengths."""
    rows, cols = min(tile.block_q, shape.q_len), min(tile.block_kv, shape.kv_len)
    low, high = shape.band
    first = np.arange(0, shape.q_len, rows, dtype=np.int64)
    last = np.minimum(first + rows, shape.q_len) - 1
    begin, end = np.clip(first + low, 0, shape.kv_len) // cols, -(-np.clip(last + high + 1, 0, shape.kv_len) // cols)
    return np.minimum(begin, end), end


def _pipe_seconds(table: StageTable, k: KernelPrice) -> dict[str, float]:
    return {pipe: sum(float(k.busy[s.name]) for s in table.stages if s.pipe == pipe) for pipe in table.pipes}
