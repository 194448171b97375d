"""The price of one call: seconds, and everything that explains them, as one pure function of PyTrees.

    seconds = sum over kernels of  launch + per_core * cores + per_task * waves + time of the busiest core

`price` is what the search differentiates; `estimate` (a module of its own) makes a readable Cost of it. All reals of a
call, a tile and a device are arrays of one shape or scalars, so that one call prices a single plan or any number of
them side by side.
"""

from __future__ import annotations

import dataclasses
from functools import partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..hardware import DeviceSpec
from ..relax import ceil_div, floor_div, gate
from ..tile import TileConfig
from ..workload import Shape
from . import round_robin, tiling
from .durations import TimeConstants, Work, measure, miss_share, once, work
from .graph import Kernel, compile_graph, masked
from .pipeline import PERIOD, TRANSIENT, Knobs, Lengths, Step, TaskTimes, at_steps, border, knobs, lengths, plus, task
from .stages import GM_PATHS, StageTable, stage_table
from .tiling import AnyProblem, AnyTile, Blocks, Problem, Traffic

#: How to compile a gradient of `price`, or a price for a few plans only. XLA on CPU copies cheap operations into each
#: of their consumers, and the backward pass of the schedule is nothing but those: without this it is 7 times slower,
#: and compiles 3 times longer. A price of many plans is faster with fusion, but compiles twice as long.
WITHOUT_FUSION = {"xla_disable_hlo_passes": "fusion"}


class Options(NamedTuple):
    """What is fixed at compile time. overlap False: nothing runs beside anything else; waits False: the waits are not
    computed (zeros); transient: see `pipeline.task`; in_pieces: whether K and V come in pieces (some tile.kv_pieces is
    not 1); whole_lookahead: every lookahead is a whole number, whatever the temperature, and nobody asks for a gradient
    with respect to it: half of the work above temperature 0."""

    dtype: str
    masked: bool
    overlap: bool = True
    waits: bool = True
    transient: int = TRANSIENT
    in_pieces: bool = False
    whole_lookahead: bool = False

    @classmethod
    def of(cls, shape: Shape, tile: AnyTile, **more) -> Options:
        """The options for one call and its tile (plain, or many as arrays)."""
        in_pieces = bool(np.any(np.asarray(getattr(tile, "kv_pieces", 1)) != 1))
        return cls(shape.dtype, masked(shape), in_pieces=in_pieces, **more)


class KernelPrice(NamedTuple):
    """One kernel. Times in seconds; busy, wait (compute stages) and bytes by stage: of the busiest core, bytes of the
    whole call; busiest_core: its number; `combine`: what all cores do together once, such as joining the parts of split
    keys at the end. serial: as `core`, with nothing beside anything else. hbm_seconds: what the memory needs for the
    kernel's bytes; loads and stores of a core run side by side, but no core is done before the memory is.

    Of a group of a call with lengths: what all groups share is that of the whole kernel; core, serial, busy and wait
    are those of the core for whose sake the call takes at least `core`; traffic and footprints are the group's."""

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
    busiest_core: Any


class Price(NamedTuple):
    """One call: the total and its kernels, in the order of the graph."""

    seconds: Any
    kernels: tuple[KernelPrice, ...]


def price(t: TimeConstants, p: AnyProblem, tile: AnyTile, d: DeviceSpec, options: Options, temperature=0.0) -> Price:
    """Price a call. Differentiable in `t` (homogeneous of degree 1), in the tile and in the capacities of `d`.

    A MatmulProblem goes with a MatmulTile, a SoftmaxProblem with a SoftmaxTile, else ValueError.

    A call whose examples have lengths of their own is one launch. Assumed: the cores share the tasks of all its groups
    evenly, as far as whole tasks allow: a call takes no less than its examples that are at least as long as those of
    any one group would if they were just as long.

    temperature: a plain 0 = exact; above it counts are relaxed and the discrete knobs are blended.
    """
    p, tile = tiling.lowered(p, tile, d, temperature)
    graph = compile_graph(options.masked, tile.fusion, p.kind)

    def kernels_of(p: Problem):
        return tuple(_price_kernel(kernel, t, p, tile, d, options, temperature) for kernel in graph.kernels)

    if p.others is None:
        kernels = kernels_of(p)
    else:
        kernels = tuple(map(_longest_group, jax.vmap(kernels_of, axis_name=tiling.GROUPS)(p)))
    return Price(sum(k.launch + k.core for k in kernels), kernels)


def _longest_group(groups: KernelPrice) -> KernelPrice:
    """One kernel of a call with lengths, from what each of its groups [groups, ...] says of it: what is said for the
    sake of the one that takes longest (of equals, as where the memory is what takes so long, of the one that works
    most), and the most room that any of them needs."""
    longest = groups.core >= groups.core.max(0)[None]
    which = jnp.argmax(jnp.where(longest, sum(groups.busy.values()), -1.0), 0)[None]

    def chosen(x):
        x = jnp.broadcast_to(x.reshape(*x.shape, *[1] * (groups.core.ndim - x.ndim)), groups.core.shape)
        return jnp.take_along_axis(x, which, 0)[0]

    return jax.tree.map(chosen, groups)._replace(footprints=tiling.largest(groups.footprints))


class Parts(NamedTuple):
    """One kernel, cut and timed: everything that the schedule starts from. corners [4]: one step's work for full rows
    and full columns, full and ragged, ragged and full, ragged and ragged; narrow: the same of the last head, where its
    v_head_dim differs; pieces [4]: see `pipeline.Step`; feet: bytes needed per buffer."""

    table: StageTable
    blocks: Blocks
    traffic: Traffic
    corners: Work
    narrow: Work | None
    pieces: Any
    feet: dict

    def step(self, which) -> Step:
        """The times of one of the corners, or of several."""
        return jax.tree.map(lambda x: x[which], Step(self.corners.seconds, self.pieces))

    def knobs(self, tile: TileConfig, lookahead, sync) -> Knobs:
        return knobs(self.table, tile.buffers, lookahead, sync, self.step(0).pieces)


def parts(
    kernel: Kernel, t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature=0.0
) -> Parts:
    """Cut a call into blocks and time every stage of one of its kernels."""
    table = stage_table(kernel, d.arch)
    table = table if o.overlap else table.serial()
    b = tiling.cut(p, tile, temperature)
    feet = tiling.footprints(p, tile, d, b, kernel.kinds)
    x = tiling.share_of_chip(p, tile, d, b, feet["L1"], kernel.kinds, temperature)

    def corners_of(p: Problem):
        def corner(rows, cols):
            fused = len(kernel.ops) > 1
            block = measure(p, d, rows * tile.heads_packed, cols, b.parts, fused, temperature)
            if not o.in_pieces:
                return work(table, t, p, d, x, block), None
            pieces = ceil_div(cols, b.piece_cols, temperature)
            return work(table, t, p, d, x, block._replace(pieces=pieces)), pieces

        return jax.vmap(corner)(*map(jnp.stack, ((rows, rows, tail_rows, tail_rows), (cols, tail_cols) * 2)))

    rows, tail_rows, cols, tail_cols = jnp.broadcast_arrays(b.rows, b.tail_rows, b.cols, b.tail_cols)
    corners, pieces = corners_of(p)
    narrow = None if p.v_tail is None else corners_of(dataclasses.replace(p, v_head_dim=p.v_tail))[0]
    return Parts(table, b, x, corners, narrow, pieces, feet)


def _price_kernel(kernel: Kernel, t, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature):
    cut = parts(kernel, t, p, tile, d, o, temperature)
    table, b, x, feet = cut.table, cut.blocks, cut.traffic, cut.feet
    core, corners = _core_and_corners(cut, p, tile, t.sync, o, temperature)
    combined, combined_hbm = once(t, p, d, x, b.parts, temperature)
    runs, runs_of_core = _runs(table, _counts(p, b, temperature)), _runs(table, core.counts)
    busy = {name: (runs_of_core[name] * seconds).sum(0) for name, seconds in corners.seconds.items()}
    own = {name: x.stacks * (runs[name] * bytes_).sum(0) for name, bytes_ in corners.bytes.items()}
    moved = {name: tiling.over_groups(p, bytes_) for name, bytes_ in own.items()}
    fills = [moved[s.name] for s in table.stages if s.action in ("gm_l1", "ub_l1")]
    missed = sum(miss_share(s, x) * own[s.name] for s in table.stages if s.action in GM_PATHS)
    hbm_bytes = tiling.over_groups(p, missed)
    busiest, wait = _longer(core.tasks, core.heaviest), core.wait
    joining = sum(combined.seconds.values())

    def floor(makespan):  # what a border saves is that of tasks of mean length: never more than the pipes allow
        pipes = [sum(busy[s.name] for s in table.stages if s.pipe == pipe) for pipe in table.pipes]
        return reduce(jnp.maximum, pipes, makespan) if tile.persistent else makespan

    makespan, serial = floor(busiest.makespan), busiest.serial
    if p.others is not None:
        found = makespan, serial, busy, wait
        mean = floor(core.mean.makespan * x.waves), core.mean.serial * x.waves, busy, wait
        shared = jax.tree.map(lambda s: tiling.over_groups(p, x.tasks / (x.waves * x.active) * s), mean)
        makespan, serial, busy, wait = jax.tree.map(partial(jnp.where, shared[0] > makespan), shared, found)
        serial = jnp.maximum(serial, hbm_bytes * t.hbm)
    return KernelPrice(
        launch=t.launch + t.launch_core * x.active + t.launch_task * x.launched,
        core=jnp.maximum(makespan, hbm_bytes * t.hbm) + joining,
        serial=serial + joining,
        busy=busy,
        wait=wait,
        bytes=moved,
        combine=combined,
        hbm_bytes=hbm_bytes + combined_hbm,
        hbm_seconds=hbm_bytes * t.hbm,
        l1_read_bytes=tiling.over_groups(p, x.stacks * (runs[_STEP] * corners.l1_reads).sum(0)),
        l1_fill_bytes=sum(fills, jnp.zeros_like(x.stacks)),
        footprints=feet,
        traffic=x,
        busiest_core=core.number,
    )


_STEP = "step"


def _counts(p: Problem, b: Blocks, temperature) -> dict:
    """How often steps, starts and ends of tasks run in one head, each 4 numbers: for the corners of `Parts`."""
    one, none = jnp.ones_like(b.steps), jnp.zeros_like(b.steps)
    at_end = jnp.maximum(b.reach_end - 1, 0.0)
    inner = jnp.maximum(b.steps - b.last_steps - at_end, 0.0)
    started = b.steps - b.last_steps - tiling.steps_beyond(p, b, b.parts, temperature)  # parts that have a step
    return {
        "step": (inner, at_end, jnp.maximum(b.last_steps - 1, 0.0), one),
        "task_start": (started, none, jnp.minimum(b.parts, b.last_steps), none),
        "task_end": ((b.q_blocks - 1) * b.parts, none, b.parts, none),
    }


def _runs(table: StageTable, counts: dict) -> dict:
    """[4] how often each stage runs, for the corners of `Parts`; and "step": how often a step does."""
    stacked = {when: jnp.stack(jnp.broadcast_arrays(*values)) for when, values in counts.items()}
    return {s.name: stacked[s.when] for s in table.stages} | {_STEP: stacked["step"]}


class _Core(NamedTuple):
    """The busiest core. number: 0, but with "round_robin"; tasks: all of its tasks added up; heaviest: the longest task
    that there is; mean: the mean task of a head; wait: seconds that each compute stage waits for transfers; counts: as
    `_counts`, of its tasks."""

    number: Any
    tasks: TaskTimes
    heaviest: TaskTimes
    mean: TaskTimes
    wait: dict
    counts: dict


def _core_and_corners(cut: Parts, p: Problem, tile: TileConfig, sync, o: Options, temperature) -> tuple[_Core, Work]:
    """The busiest core, and the corners of the mean head. It does full heads as long as there are any, then those that
    are narrow."""
    if cut.narrow is None:
        return _busiest_core(cut, p, tile, sync, o, temperature), cut.corners
    both = jax.tree.map(lambda *x: jnp.stack(x), cut.corners, cut.narrow)
    cores = jax.vmap(lambda work: _busiest_core(cut._replace(corners=work), p, tile, sync, o, temperature))(both)
    core, last = (jax.tree.map(itemgetter(i), cores) for i in (0, 1))
    x, per_head = cut.traffic, cut.blocks.q_blocks * cut.blocks.parts
    tasks = _mean(core.tasks, last.tasks, gate(1 - (x.stacks - p.batch) * per_head / x.waves))
    share = p.batch / x.stacks
    mean = _mean(core, last, share)
    corners = jax.vmap(lambda one, other: _mean(one, other, share))(cut.corners, cut.narrow)
    return mean._replace(tasks=tasks, heaviest=core.heaviest), corners


class _Tasks(NamedTuple):
    """The tasks of a kernel. every: of 0, 1, .. full steps and full rows; whole: of `whole_steps` steps and full rows,
    ending with the ragged columns; ragged: of `ragged_steps` steps and ragged rows, ending so too."""

    every: Lengths
    whole: TaskTimes
    whole_steps: Any
    ragged: TaskTimes
    ragged_steps: Any

    @property
    def end(self) -> TaskTimes:
        """What the ragged columns change."""
        return plus(self.whole, at_steps(self.every, self.whole_steps), -1.0)

    def heaviest(self, b: Blocks) -> TaskTimes:
        """The longest one that there is."""
        most = jnp.maximum(jnp.ceil(jax.lax.stop_gradient(b.most_steps / b.parts)), 1.0) * gate(b.q_blocks - 1)
        to_the_end = plus(_none(self.whole), self.whole, gate(b.reach_end - 1))
        return _longer(_longer(at_steps(self.every, most), self.ragged), to_the_end)


def _busiest_core(cut: Parts, p: Problem, tile: TileConfig, sync, o: Options, temperature) -> _Core:
    """Schedule the tasks of a head, and deal them out. Between whole lookaheads: the mean of the neighbours."""

    def at(lookahead) -> _Core:
        k = cut.knobs(tile, lookahead, sync)
        tasks = _tasks(cut, k, o, temperature)
        core = _dealt_out(p, cut.blocks, cut.traffic, tasks, tile.core_order, temperature)
        if not (tile.persistent and o.overlap):
            return core
        stream, drained = _in_a_stream(cut, tasks, k, o)
        joined = _dealt_out(p, cut.blocks, cut.traffic, stream, tile.core_order, temperature)
        makespan = jnp.minimum(joined.tasks.makespan + drained, core.tasks.makespan)
        each = jnp.minimum(joined.mean.makespan + drained / cut.traffic.waves, core.mean.makespan)
        wait = {name: jnp.maximum(seconds, 0.0) for name, seconds in joined.wait.items()}
        tasks, mean = (x._replace(makespan=s) for x, s in ((core.tasks, makespan), (core.mean, each)))
        return core._replace(tasks=tasks, mean=mean, wait=wait)

    lookahead = tile.lookahead if o.overlap else 0 * tile.lookahead
    if o.whole_lookahead or (isinstance(temperature, (int, float)) and temperature == 0):
        return at(lookahead)
    low = jax.lax.stop_gradient(jnp.floor(lookahead))
    cores = jax.vmap(at)(jnp.stack([low, low + 1]))
    return jax.tree.map(lambda x: x[0] + (lookahead - low) * (x[1] - x[0]), cores)


def _tasks(cut: Parts, k: Knobs, o: Options, temperature) -> _Tasks:
    b = cut.blocks
    whole_steps, ragged_steps = (
        jnp.maximum(ceil_div(n, b.parts, temperature), 1.0) for n in (b.end_steps, b.last_steps)
    )
    every, whole = lengths(cut.table, cut.step(0), cut.step(1), whole_steps, k, o.transient, o.waits)
    ragged = task(cut.table, cut.step(2), cut.step(3), ragged_steps, k, o.transient, o.waits)
    return _Tasks(every, whole, whole_steps, ragged, ragged_steps)


def _in_a_stream(cut: Parts, tasks: _Tasks, k: Knobs, o: Options) -> tuple[_Tasks, Any]:
    """(the tasks where they are not drained, seconds that the last one of a core drains). Each saves what it would in a
    stream of tasks like itself; those of full steps what the mean one does, but no steps take less than its do."""
    b = cut.blocks
    mean = jnp.maximum(jnp.round(jax.lax.stop_gradient(b.steps / (b.q_blocks * b.parts))), 1.0)
    counts = jnp.stack(jnp.broadcast_arrays(mean, tasks.whole_steps, tasks.ragged_steps))

    def saves(full, tail, steps) -> TaskTimes:
        return border(cut.table, full, tail, steps, k, o.transient, o.waits)

    corners = cut.step(np.array((0, 0, 2))), cut.step(np.array((0, 1, 3)))
    saved = jax.vmap(saves)(*corners, counts)
    usual, at_end, at_last = (jax.tree.map(itemgetter(i), saved) for i in range(3))
    least = (at_steps(tasks.every, mean).makespan - usual.makespan) / mean

    def of_steps(task: TaskTimes, number) -> TaskTimes:
        task = _saving(task, usual, jnp.minimum(number, 1.0))
        return task._replace(makespan=jnp.maximum(task.makespan, jnp.minimum(number, mean) * least))

    times = jax.vmap(of_steps)(tasks.every.times, jnp.arange(float(len(tasks.every.times.makespan))))
    every = tasks.every._replace(times=times)
    stream = tasks._replace(every=every, whole=_saving(tasks.whole, at_end), ragged=_saving(tasks.ragged, at_last))
    drained = jnp.where(b.q_blocks > 1, usual.makespan, at_last.makespan)
    return stream, jnp.where(b.reach_end > 1, at_end.makespan, drained)


def _saving(task: TaskTimes, saved: TaskTimes, share: Any = 1.0) -> TaskTimes:
    wait = {name: jnp.maximum(seconds - share * saved.wait[name], 0.0) for name, seconds in task.wait.items()}
    return TaskTimes(task.makespan - share * saved.makespan, task.serial, wait)


def _dealt_out(p: Problem, b: Blocks, x: Traffic, tasks: _Tasks, core_order: str, temperature) -> _Core:
    """Add up the tasks of the busiest core.

    Whole heads, and of one more head, "balanced": full tasks, or, where tasks differ in length (causal), tasks of mean
    length, since long and short ones are dealt out in pairs; "contiguous": the last ones. "round_robin": module
    `round_robin`, and above temperature 0 tasks of mean length. Busy times and waits are those of tasks of mean size,
    but for "round_robin", where they are those of the core's own.
    """
    every, end, ragged = tasks.every, tasks.end, tasks.ragged
    per_head = b.q_blocks * b.parts
    heads = floor_div(x.waves, per_head, temperature)
    left = jnp.maximum(x.waves - heads * per_head, 0.0)

    def over(first, last, steps) -> TaskTimes:  # q blocks first .. last - 1, without the last one of the head
        return _of_q_blocks(p, b, every, first, last, steps, temperature)

    def steps_before(block):
        return tiling.steps_before(p, b, block, temperature)

    empty = jax.tree.map(itemgetter(0), every.times)
    working = jnp.minimum(b.parts, b.last_steps)
    each = (b.last_steps - tasks.ragged_steps) / jnp.maximum(working - 1, 1.0)  # of the parts without ragged columns
    others = at_steps(every, each)
    last = plus(plus(ragged, others, working - 1), empty, b.parts - working)
    full, full_steps = b.q_blocks - 1, b.steps - b.last_steps
    before = over(0.0 * full, full, full_steps)
    before = plus(before, end, b.reach_end - 1)
    total = plus(before, last)
    mean_task = plus(_none(total), total, 1 / (b.q_blocks * b.parts))
    if core_order == "contiguous":
        blocks = jnp.minimum(left / b.parts, b.q_blocks)
        reaching = jnp.maximum(jnp.minimum(b.reach_end, blocks) - 1, 0.0)
        begin, until = b.q_blocks - jnp.maximum(blocks, 1.0), jnp.minimum(blocks, full)
        inner = plus(over(begin, full, full_steps - steps_before(begin)), end, reaching)
        at_the_end = plus(inner, last, jnp.minimum(blocks, 1.0))
        at_the_start = over(0.0 * until, until, steps_before(until))
        rest = _longer(_longer(at_the_end, at_the_start), plus(_none(total), mean_task, left))
    elif core_order == "round_robin":
        rest = plus(_none(total), mean_task, left)
    else:
        usual = plus(_none(total), before, 1 / jnp.maximum((b.q_blocks - 1) * b.parts, 1.0))
        rest = plus(_none(total), _longer(usual, mean_task), left)
    mean_share = x.waves / per_head
    wait = {name: mean_share * wait for name, wait in total.wait.items()}
    counts = _counts(p, b, temperature)
    share = jax.tree.map(lambda n: mean_share * n, counts)
    core = _Core(0.0 * x.waves, plus(rest, total, heads), tasks.heaviest(b), mean_task, wait, share)
    if core_order != "round_robin":
        return core
    kinds = round_robin.Kinds(every, end, ragged, mean_task)
    number, own, counts = round_robin.busiest(p, b, x, kinds, jax.tree.map(lambda n: n / per_head, counts))
    dealt = _Core(number, own, core.heaviest, mean_task, own.wait, counts)
    if isinstance(temperature, (int, float)) and temperature == 0:
        return dealt
    return jax.tree.map(lambda one, other: jnp.where(temperature <= 0, one, other), dealt, core)


def _of_q_blocks(p: Problem, b: Blocks, every: Lengths, first, last, steps, temperature) -> TaskTimes:
    """All tasks of q blocks first .. last - 1 of full rows, before the last one of the head; they have `steps` steps.

    The time of a task is a line in its steps and what is off it: beyond the transient, nothing in the mean of a period.
    So all that matters is the sum of the steps, and how many q blocks have each of the few first numbers of them. Those
    with the most, and with one less, are nearly all where nothing is masked: these are looked up. Where keys are split,
    q blocks count by ranges of `parts` steps, in which they are taken to be spread evenly.
    """
    transient = len(every.times.makespan) - 1
    most, next_ = b.most_steps, jnp.maximum(b.most_steps - 1, 0.0)

    def fewer(limit):
        return tiling.at_most(p, b, jnp.maximum(limit, 0.0), first, last, temperature)

    others = fewer(most - 1.5) * gate(most - 1)
    many = jnp.maximum(last - first, 0.0) - fewer(most - 0.5)
    some = jnp.maximum(fewer(most - 0.5) - others, 0.0)
    rest = steps - many * most - some * next_

    def count(number):  # (those with at most number * parts steps, mean steps of those with up to `parts` more)
        high = jnp.clip(most - 2, number * b.parts, (number + 1) * b.parts)  # they are spread evenly
        mean = (jnp.minimum(jnp.maximum(number * b.parts + 1, b.least_steps), high) + high) / 2
        return jnp.minimum(fewer(number * b.parts + 0.5), others), mean

    # A loop: fused into what uses them, these counts would be computed again and again.
    numbers = jnp.arange(transient + 1.0)
    below, means = jax.lax.map(count, numbers)
    each, means = jnp.diff(below, axis=0), means[:-1]
    beyond, off = others - below[-1], rest - (each * means).sum(0)
    nudge = jnp.where(beyond > 0, 0.0, off / jnp.maximum(each.sum(0), 1.0))
    share = jax.vmap(lambda number, mean: (mean + nudge) / b.parts - number)(numbers[:-1], means)
    weights = jnp.concatenate([below[:1], each * share]) + jnp.concatenate([each * (1 - share), 0 * below[:1]])

    def total(x, period, one, other):
        slope = period / PERIOD
        line = x[-PERIOD:].mean(0) - slope * (transient - (PERIOD - 1) / 2)
        inside = (weights * x).sum(0) + many * one + some * other
        return b.parts * (inside + beyond * line) + jnp.where(beyond > 0, off, 0.0) * slope

    looked_up = (at_steps(every, steps / b.parts) for steps in (most, next_))
    return jax.tree.map(total, *every, *looked_up)


def _mean(x, y, share):
    """x and y, y with this share."""
    return jax.tree.map(lambda a, b: a + share * (b - a), x, y)


def _none(x: TaskTimes) -> TaskTimes:
    return jax.tree.map(jnp.zeros_like, x)


def _longer(x: TaskTimes, y: TaskTimes) -> TaskTimes:
    return jax.tree.map(jnp.maximum, x, y)
