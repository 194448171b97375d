"""The price of one call: seconds, and everything that explains them, as one pure function of PyTrees.

    seconds = sum over kernels of  launch + per_core * cores + per_task * waves + time of the busiest core

`price` is what the search differentiates; `estimate` (a module of its own) makes a readable Cost of it. All reals of a
call, a tile and a device are arrays of one shape or scalars, so that one call prices a single plan or any number of
them side by side.
"""

from __future__ import annotations

import dataclasses
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..hardware import DeviceSpec
from ..relax import ceil_div, floor_div, gate
from ..tile import TileConfig
from . import tiling
from .durations import TimeConstants, Work, measure, miss_share, once, work
from .graph import Kernel, compile_graph
from .pipeline import TRANSIENT, TaskTimes, at_steps, knobs, lengths, task
from .stages import GM_PATHS, StageTable, stage_table
from .tiling import AnyProblem, AnyTile, Blocks, Problem, Traffic

#: How to compile a gradient of `price`. XLA on CPU copies cheap operations into each of their consumers, and the
#: backward pass of the schedule is nothing but those: without this it is 7 times slower, and compiles 3 times longer.
GRADIENT_OPTIONS = {"xla_disable_hlo_passes": "fusion"}


class Options(NamedTuple):
    """What is fixed at compile time. overlap False: nothing runs beside anything else; waits False: the waits are not
    computed (zeros); transient: see `pipeline.fast`."""

    dtype: str
    masked: bool
    overlap: bool = True
    waits: bool = True
    transient: int = TRANSIENT


class KernelPrice(NamedTuple):
    """One kernel. Times in seconds; busy, wait (compute stages) and bytes by stage: of the busiest core, bytes of the
    whole call; `combine`: what all cores do together once, such as joining the parts of split keys at the end. serial:
    as `core`, with nothing beside anything else. hbm_seconds: what the memory needs for the kernel's bytes; loads and
    stores of a core run side by side, but no core is done before the memory is."""

    launch: Any
    core: Any
    serial: Any
    busy: dict
    wait: dict
    bytes: dict
    combine: Work
    hbm_bytes: Any
    hbm_seconds: Any
    l1_read_bytes: Any
    l1_fill_bytes: Any
    footprints: dict
    traffic: Traffic


class Price(NamedTuple):
    """One call: the total and its kernels, in the order of the graph."""

    seconds: Any
    kernels: tuple[KernelPrice, ...]


def price(t: TimeConstants, p: AnyProblem, tile: AnyTile, d: DeviceSpec, options: Options, temperature=0.0) -> Price:
    """Price a call. Differentiable in `t` (homogeneous of degree 1), in the tile and in the capacities of `d`.

    A MatmulProblem goes with a MatmulTile, a SoftmaxProblem with a SoftmaxTile, else ValueError.

    temperature: a plain 0 = exact; above it counts are relaxed and the discrete knobs are blended.
    """
    p, tile = tiling.lowered(p, tile, d, temperature)
    graph = compile_graph(options.masked, tile.fusion, p.kind)
    kernels = tuple(_price_kernel(kernel, t, p, tile, d, options, temperature) for kernel in graph.kernels)
    return Price(sum(k.launch + k.core for k in kernels), kernels)


class Parts(NamedTuple):
    """One kernel, cut and timed: everything that the schedule starts from. corners [4]: one step's work for full rows
    and full columns, full and ragged, ragged and full, ragged and ragged; narrow: the same of the last head, where its
    v_head_dim differs; feet: bytes needed per buffer."""

    table: StageTable
    blocks: Blocks
    traffic: Traffic
    corners: Work
    narrow: Work | None
    feet: dict


def parts(
    kernel: Kernel, t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature=0.0
) -> Parts:
    """Cut a call into blocks and time every stage of one of its kernels."""
    table = stage_table(kernel, d.arch)
    table = table if o.overlap else table.serial()
    b = tiling.cut(p, tile, temperature)
    feet = tiling.footprints(p, tile, d, b, kernel.kinds)
    x = tiling.share_of_chip(p, tile, d, b, feet["L1"], kernel.kinds, temperature)

    def corners_of(p: Problem) -> Work:
        def corner(rows, cols) -> Work:
            fused = len(kernel.ops) > 1
            return work(table, t, p, d, x, measure(p, d, rows * tile.heads_packed, cols, b.parts, fused, temperature))

        return jax.vmap(corner)(*map(jnp.stack, ((rows, rows, tail_rows, tail_rows), (cols, tail_cols) * 2)))

    rows, tail_rows, cols, tail_cols = jnp.broadcast_arrays(b.rows, b.tail_rows, b.cols, b.tail_cols)
    narrow = None if p.v_tail is None else corners_of(dataclasses.replace(p, v_head_dim=p.v_tail))
    return Parts(table, b, x, corners_of(p), narrow, feet)


def _price_kernel(kernel: Kernel, t, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature):
    table, b, x, corners, narrow, feet = parts(kernel, t, p, tile, d, o, temperature)
    per_head = b.q_blocks * b.parts
    heads = floor_div(x.waves, per_head, temperature)  # that the busiest core works through
    left = jnp.maximum(x.waves - heads * per_head, 0.0)
    if narrow is None:
        head = _head_times(table, corners.seconds, b, left, tile, t.sync, o, temperature)
        whole, heaviest = _plus(head.rest, head.total, heads), head.heaviest
    else:
        both = jax.tree.map(lambda *x: jnp.stack(x), corners.seconds, narrow.seconds)
        heads_of = jax.vmap(lambda seconds: _head_times(table, seconds, b, left, tile, t.sync, o, temperature))(both)
        head, last = (jax.tree.map(itemgetter(i), heads_of) for i in (0, 1))
        whole, heaviest = _full_first(head, last, heads, x.stacks - p.batch), head.heaviest
        share = p.batch / x.stacks  # of the heads that are last ones
        head = _mean(head, last, share)
        corners = jax.vmap(lambda one, other: _mean(one, other, share))(corners, narrow)
    combined, combined_hbm = once(t, p, d, x, b.parts, temperature)
    per_core = x.waves / per_head
    runs = _runs(table, b)
    busy = {name: per_core * (runs[name] * seconds).sum(0) for name, seconds in corners.seconds.items()}
    moved = {name: x.stacks * (runs[name] * bytes_).sum(0) for name, bytes_ in corners.bytes.items()}
    fills = [moved[s.name] for s in table.stages if s.action in ("gm_l1", "ub_l1")]
    hbm_bytes = sum(miss_share(s, x) * moved[s.name] for s in table.stages if s.action in GM_PATHS)
    busiest = _longer(whole, heaviest)
    joining = sum(combined.seconds.values())
    return KernelPrice(
        launch=t.launch + t.launch_core * x.active + t.launch_task * x.waves,
        core=jnp.maximum(busiest.makespan, hbm_bytes * t.hbm) + joining,
        serial=busiest.serial + joining,
        busy=busy,
        wait={name: per_core * wait for name, wait in head.total.wait.items()},
        bytes=moved,
        combine=combined,
        hbm_bytes=hbm_bytes + combined_hbm,
        hbm_seconds=hbm_bytes * t.hbm,
        l1_read_bytes=x.stacks * (runs[_STEP] * corners.l1_reads).sum(0),
        l1_fill_bytes=sum(fills, jnp.zeros_like(x.stacks)),
        footprints=feet,
        traffic=x,
    )


_STEP = "step"


def _runs(table: StageTable, b: Blocks) -> dict:
    """[4] how often each stage runs in one head, for the corners of `Parts`; and "step": how often a step does."""
    one, none = jnp.ones_like(b.steps), jnp.zeros_like(b.steps)
    at_end = jnp.maximum(b.reach_end - 1, 0.0)
    inner = jnp.maximum(b.steps - b.last_steps - at_end, 0.0)

    def more(steps, weight):  # parts beyond the first that have a step
        return weight * (jnp.minimum(b.parts, steps) - gate(steps))

    started = b.started - 1 + jax.vmap(more)(b.sample_steps, tiling.sample_weights(b, 0.0, b.q_blocks)).sum(0)
    counts = {
        "step": (inner, at_end, jnp.maximum(b.last_steps - 1, 0.0), one),
        "task_start": (started, none, jnp.minimum(b.parts, b.last_steps), none),
        "task_end": ((b.q_blocks - 1) * b.parts, none, b.parts, none),
    }
    stacked = {when: jnp.stack(jnp.broadcast_arrays(*values, one)[:4]) for when, values in counts.items()}
    return {s.name: stacked[s.when] for s in table.stages} | {_STEP: stacked["step"]}


class _Head(NamedTuple):
    """The tasks of a head. total: all of them added up; rest: those that the busiest core does beyond whole heads;
    heaviest: the longest one."""

    total: TaskTimes
    rest: TaskTimes
    heaviest: TaskTimes


def _head_times(table: StageTable, seconds, b: Blocks, left, tile: TileConfig, sync, o: Options, temperature) -> _Head:
    """Schedule the tasks of a head, and `left` of them. Between whole lookaheads: the mean of the neighbours."""

    def at(lookahead) -> _Head:
        k = knobs(table, tile.buffers, lookahead, sync)
        steps = [jnp.maximum(ceil_div(n, b.parts, temperature), 1.0) for n in (b.end_steps, b.last_steps)]

        def run(full, tail, steps) -> TaskTimes:
            return task(table, full, tail, steps, k, o.transient, o.waits)

        every = lengths(table, {n: x[0] for n, x in seconds.items()}, k, o.transient, o.waits)
        full, tail = ({n: x[i::2] for n, x in seconds.items()} for i in (0, 1))
        both = jax.vmap(run)(full, tail, jnp.stack(jnp.broadcast_arrays(*steps)))
        whole, ragged = (jax.tree.map(itemgetter(i), both) for i in (0, 1))
        end = _plus(whole, at_steps(every, steps[0]), -1.0)
        return _tasks_of_a_head(b, left, every, whole, end, ragged, steps[1], tile.core_order)

    lookahead = tile.lookahead if o.overlap else 0 * tile.lookahead
    if isinstance(temperature, (int, float)) and temperature == 0:
        return at(lookahead)
    low = jax.lax.stop_gradient(jnp.floor(lookahead))
    heads = jax.vmap(at)(jnp.stack([low, low + 1]))
    return jax.tree.map(lambda x: x[0] + (lookahead - low) * (x[1] - x[0]), heads)


def _tasks_of_a_head(
    b: Blocks, left, every: TaskTimes, whole: TaskTimes, end: TaskTimes, ragged: TaskTimes, steps, core_order: str
) -> _Head:
    """Add up the tasks of a head. every: tasks of 0, 1, .. full steps; whole: a task of full rows that ends with the
    ragged columns; end: what those change; ragged: the task of `steps` steps and ragged rows that ends with them.

    left: tasks of one more head that the busiest core does. "balanced": full ones, or, where tasks differ in length
    (causal), tasks of mean length, since long and short ones are dealt out in pairs; "contiguous": the last ones.
    """

    def of(steps) -> TaskTimes:  # all tasks of one q block of full rows that sees `steps` kv blocks
        return jax.tree.map(lambda x: b.parts * x, at_steps(every, steps / b.parts))

    def over(first, last) -> TaskTimes:  # q blocks first .. last - 1, without the last one of the head
        weights = tiling.sample_weights(b, first, last)
        some = jax.tree.map(lambda x: (weights * x).sum(0), sampled)
        return _plus(some, empty, b.parts * jnp.maximum(jnp.minimum(last, b.empty) - first, 0.0))

    empty, sampled = jax.tree.map(itemgetter(0), every), jax.vmap(of)(b.sample_steps)
    working = jnp.minimum(b.parts, b.last_steps)
    others = at_steps(every, (b.last_steps - steps) / jnp.maximum(working - 1, 1.0))  # parts without the ragged columns
    last = _plus(_plus(ragged, others, working - 1), empty, b.parts - working)
    seen = (tiling.sample_weights(b, 0.0, b.q_blocks) * b.sample_steps).sum(0)
    mean = jax.lax.stop_gradient(jnp.floor(seen / jnp.maximum(b.started - 1, 1.0) / b.parts))
    growth = _plus(at_steps(every, mean + 1), at_steps(every, mean), -1.0)  # of a task by one step
    before = _plus(over(0.0, b.q_blocks - 1), growth, b.steps - b.last_steps - seen)
    before = _plus(before, end, b.reach_end - 1)
    total = _plus(before, last)
    mean_task = _plus(_none(total), total, 1 / (b.q_blocks * b.parts))
    if core_order == "contiguous":
        blocks = jnp.minimum(left / b.parts, b.q_blocks)
        reaching = jnp.maximum(jnp.minimum(b.reach_end, blocks) - 1, 0.0)
        inner = _plus(over(b.q_blocks - blocks, b.q_blocks - 1), end, reaching)
        at_the_end = _plus(inner, last, jnp.minimum(blocks, 1.0))
        at_the_start = over(0.0, jnp.minimum(blocks, b.q_blocks - 1))
        rest = _longer(_longer(at_the_end, at_the_start), _plus(_none(total), mean_task, left))
    else:
        usual = _plus(_none(total), before, 1 / jnp.maximum((b.q_blocks - 1) * b.parts, 1.0))
        rest = _plus(_none(total), _longer(usual, mean_task), left)
    most = jnp.maximum(jnp.ceil(jax.lax.stop_gradient(b.most_steps / b.parts)), 1.0) * gate(b.q_blocks - 1)
    to_the_end = _plus(_none(whole), whole, gate(b.reach_end - 1))
    heaviest = _longer(_longer(at_steps(every, most), ragged), to_the_end)
    return _Head(total, rest, heaviest)


def _full_first(full: _Head, last: _Head, heads, count) -> TaskTimes:
    """`heads` whole heads and the rest of one, by a core that does full heads as long as there are any (`count`)."""
    mine = jnp.minimum(heads, count)
    rest = _mean(last.rest, full.rest, gate(count - heads))
    return _plus(_plus(rest, full.total, mine), last.total, heads - mine)


def _mean(x, y, share):
    """x and y, y with this share."""
    return jax.tree.map(lambda a, b: a + share * (b - a), x, y)


def _plus(x: TaskTimes, y: TaskTimes, times: Any = 1.0) -> TaskTimes:
    return jax.tree.map(lambda a, b: a + times * b, x, y)


def _none(x: TaskTimes) -> TaskTimes:
    return jax.tree.map(jnp.zeros_like, x)


def _longer(x: TaskTimes, y: TaskTimes) -> TaskTimes:
    return jax.tree.map(jnp.maximum, x, y)
