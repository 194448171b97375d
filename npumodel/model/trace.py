"""The timeline of one core: every stage of every step, from the exact schedule."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax

from ..hardware import DeviceSpec
from ..tile import MAX_LOOKAHEAD, TileConfig
from ..workload import AttentionShape
from . import chrome
from .cost import Options, parts
from .durations import AFTER, BEFORE, COMBINE, time_constants
from .estimate import Cost, arguments, estimate, kv_blocks
from .graph import compile_graph
from .pipeline import Slots, play, slots_of
from .stages import Stage, StageTable, stage_table
from .tiling import Problem

#: Slots are rounded up to this times a power of two, so that tasks of similar length share a compilation.
_SLOTS = 64


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of one stage. start, end, dma_wait in seconds from the launch of the call; bytes moved by the core.

    iteration -1: the stage runs once a task. dma_wait: idle time of a compute stage just before `start`, spent on
    transfers; waits_on: the stage that ended last of those it waits for.
    """

    stage: str
    op: str
    pipe: str
    core: int
    task: int
    iteration: int
    start: float
    end: float
    dma_wait: float
    waits_on: str | None
    bytes: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What one core does, task after task, up to `max_events` events; `complete` if that is all of its work. It is
    core 0, but with "round_robin" the busiest core.

    cost: the price of the whole call; shown_seconds: end of the last event.
    """

    cost: Cost
    events: tuple[Event, ...]
    complete: bool

    @property
    def shown_seconds(self) -> float:
        return max((e.end for e in self.events), default=0.0)

    def table(self) -> str:
        """The article's stage table of the whole call (see `Cost.table`)."""
        return self.cost.table()

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> int:
        """Write a Chrome trace for Perfetto, chrome://tracing or MindStudio Insight; returns the slices written.

        Raises OSError if the place cannot be written; a file is never half written.
        """
        return chrome.write(path, [self])

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the events, one a line under a header of Event's field names; times in seconds."""
        names = [field.name for field in dataclasses.fields(Event)]
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows([getattr(event, name) for name in names] for event in self.events)


def timeline(shape: AttentionShape, device: DeviceSpec, tile: TileConfig, *, max_events: int = 20_000) -> Timeline:
    """The first tasks of the core, as many as fit into `max_events` events (at least one task's first steps).

    Raises ValueError for a tile that does not fit, as `estimate` does, and for a call whose examples have lengths of
    their own: what its price says is their sum, and no core's order of tasks.
    """
    if shape.has_lengths:
        raise ValueError(
            f"trace: expected a call without q_lengths and kv_lengths, got {shape.label}; trace the examples of one "
            "length, shape.groups[-1]"
        )
    cost = estimate(shape, device, tile)
    options = Options.of(shape, tile)
    args, events = arguments(shape, tile, device), []
    kernels = compile_graph(options.masked, tile.fusion, shape.kind).kernels
    per_task = float(device.launch_per_task_s)
    clock, complete = 0.0, True
    core, tasks = cost.busiest_core, list(_core_tasks(shape, tile, cost))
    for number, kernel in enumerate(kernels):
        table = stage_table(kernel, device.arch)
        clock += float(device.launch_base_s + device.launch_per_core_s * cost.cores)
        events += (before := _together(cost, BEFORE, -1, clock))
        clock += sum(e.end - e.start for e in before)
        rows = max_events * (number + 1) // len(kernels) - len(events)
        shown = _shown([max(work.steps, 1) for work in tasks], rows // len(table.stages))
        complete &= shown == len(tasks) and max_events // len(table.stages) >= tasks[0].steps
        for first, stream in _streams(tasks[:shown], tile.persistent):
            clock += per_task * len(stream)
            runs = _stream_events(args, options, tile, table, number, stream, max(1, max_events // len(table.stages)))
            events += [_moved(e, core, first + e.task, clock) for e in runs]
            clock += max((e.end for e in runs), default=0.0)
    events += _together(cost, COMBINE + AFTER, len(tasks), clock) if complete else []
    return Timeline(cost, tuple(events), complete)


def _shown(steps: list[int], room: int) -> int:
    """How many tasks have room for all of their steps; the first one has in any case."""
    return 1 + sum(total <= room for total in list(accumulate(steps))[1:])


def _streams(tasks: list[_Work], persistent: bool) -> list[tuple[int, list[_Work]]]:
    """(number of the first task, tasks that are not drained in between)."""
    return [(0, tasks)] if persistent else [(i, [work]) for i, work in enumerate(tasks)]


def _moved(event: Event, core: int, task: int, clock: float) -> Event:
    return dataclasses.replace(event, core=core, task=task, start=event.start + clock, end=event.end + clock)


class _Work(NamedTuple):
    """One task: its steps, whether its rows are the ragged ones, and whether its last kv block is that of the call."""

    steps: Any
    ragged: Any
    to_end: Any


def _core_tasks(shape: AttentionShape, tile: TileConfig, cost: Cost) -> Iterator[_Work]:
    """The tasks of the core. Core 0 starts with a head of its own; where tasks differ in length and are balanced, short
    and long ones take turns."""
    begin, end = kv_blocks(shape, tile)
    blocks, parts, last = len(begin), tile.split_kv, math.ceil(shape.kv_len / min(tile.block_kv, shape.kv_len))
    order = list(range(blocks))
    if shape.causal and tile.core_order == "balanced":
        order = [i for pair in zip(order, reversed(order), strict=True) for i in pair][:blocks]
    numbers = range(math.ceil(cost.tasks / cost.cores))
    if tile.core_order == "round_robin":
        numbers = range(cost.busiest_core, cost.tasks, cost.cores)
    for number in numbers:
        block, part = order[number // parts % blocks], number % parts
        steps = int(end[block] - begin[block] + part) // parts
        yield _Work(steps, block == blocks - 1, part == parts - 1 and end[block] == last)


@partial(jax.jit, static_argnames=("options", "kernel"))
def _played(p: Problem, tile: TileConfig, d: DeviceSpec, slots: Slots, options: Options, kernel: int):
    t = time_constants(d, options.dtype)
    cut = parts(compile_graph(options.masked, tile.fusion, p.kind).kernels[kernel], t, p, tile, d, options)
    corners = cut.step(slice(None))
    _, ends, waits = play(cut.table, corners, slots, cut.knobs(tile, tile.lookahead, t.sync))
    return corners.seconds, cut.corners.bytes, ends, waits


def _together(cost: Cost, stages, task: int, clock: float) -> list[Event]:
    """What all cores do together, of these stages, one after the other."""
    names, events = [name for name, _, _ in stages], []
    for s in cost.stages:
        if s.name in names:
            bytes_ = s.bytes / cost.cores
            end = clock + s.busy
            events.append(Event(s.name, s.op, s.pipe, cost.busiest_core, task, -1, clock, end, 0.0, None, bytes_))
            clock += s.busy
    return events


def _stream_events(args, options: Options, tile: TileConfig, table: StageTable, kernel, stream: list[_Work], most: int):
    """[Event] of tasks that are not drained in between, from the start of the first; of each at most `most` steps."""
    corners = [[2 * w.ragged + (w.to_end and i == w.steps - 1) for i in range(w.steps)] for w in stream]
    plan = [(steps, 2 * work.ragged) for steps, work in zip(corners, stream, strict=True)]
    lookahead, length = int(tile.lookahead), sum(max(w.steps, 1) for w in stream) + MAX_LOOKAHEAD
    size = _SLOTS * 2 ** max(0, math.ceil(math.log2(length / _SLOTS)))
    seconds, moved, ends, waits = jax.device_get(_played(*args, slots_of(plan, lookahead, size), options, kernel))

    def events_of(task: int, first: int) -> Iterator[Event]:
        steps = corners[task]

        def at(values, stage: Stage, step: int) -> float:
            lag = lookahead if stage.group == "back" or stage.when == "task_end" else 0
            return float(values[stage.name][first + step + lag])

        def event(stage: Stage, step: int) -> Event:
            corner = steps[step] if stage.when == "step" else 2 * stream[task].ragged
            end = at(ends, stage, step)
            before = [(at(ends, table.stage(name), step), name) for name in stage.waits] if steps else []
            return Event(
                stage.name,
                stage.op,
                stage.pipe,
                core=0,
                task=task,
                iteration=step if stage.when == "step" else -1,
                start=max(0.0, end - float(seconds[stage.name][corner])),
                end=end,
                dma_wait=at(waits, stage, step) if stage.compute else 0.0,
                waits_on=max(before)[1] if before else None,
                bytes=float(moved[stage.name][corner]),
            )

        if steps:
            yield from (event(stage, 0) for stage in table.when("task_start"))
        yield from (event(stage, step) for step in range(min(len(steps), most)) for stage in table.when("step"))
        if len(steps) <= most:
            yield from (event(stage, max(len(steps) - 1, 0)) for stage in table.when("task_end"))

    starts = accumulate([max(w.steps, 1) for w in stream[:-1]], initial=0)
    return [event for task, first in enumerate(starts) for event in events_of(task, first)]
