"""The timeline of one core: every stage of every step, from the exact schedule."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..hardware import DeviceSpec
from ..tile import MAX_LOOKAHEAD, TileConfig
from ..workload import AttentionShape
from . import chrome
from .cost import Options, parts
from .durations import AFTER, BEFORE, COMBINE, time_constants
from .estimate import Cost, arguments, estimate, kv_blocks
from .graph import compile_graph
from .pipeline import knobs, trajectory
from .stages import Stage, StageTable, stage_table
from .tiling import Problem

#: Slots are rounded up to a multiple of this, so that tasks of similar length share a compilation.
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
    """What core 0 does, task after task, up to `max_events` events; `complete` if that is all of its work.

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
    """The first tasks of core 0, as many as fit into `max_events` events (at least one task's first steps).

    Raises ValueError for a tile that does not fit, as `estimate` does.
    """
    cost = estimate(shape, device, tile)
    options = Options(shape.dtype, shape.mask is not None)
    args, events = arguments(shape, tile, device), []
    kernels = compile_graph(options.masked, tile.fusion, shape.kind).kernels
    per_task = float(device.launch_per_task_s)
    clock, complete = 0.0, True
    tasks = list(_core_tasks(shape, tile, cost))
    for number, kernel in enumerate(kernels):
        table = stage_table(kernel, device.arch)
        clock += float(device.launch_base_s + device.launch_per_core_s * cost.cores)
        events += (before := _together(cost, BEFORE, -1, clock))
        clock += sum(e.end - e.start for e in before)
        for task, work in enumerate(tasks):
            shown = min(work.steps, max(1, max_events // len(table.stages)))
            room = max_events * (number + 1) / len(kernels) - len(events)
            full = task > 0 and shown * len(table.stages) > room
            complete &= shown == work.steps and not full
            if full:
                break
            clock += per_task
            runs = _task_events(args, options, tile, table, number, work, shown)
            events += [dataclasses.replace(e, task=task, start=e.start + clock, end=e.end + clock) for e in runs]
            clock += max((e.end for e in runs), default=0.0)
    events += _together(cost, COMBINE + AFTER, len(tasks), clock) if complete else []
    return Timeline(cost, tuple(events), complete)


class _Work(NamedTuple):
    """One task: its steps, whether its rows are the ragged ones, and whether its last kv block is that of the call."""

    steps: Any
    ragged: Any
    to_end: Any


def _core_tasks(shape: AttentionShape, tile: TileConfig, cost: Cost) -> Iterator[_Work]:
    """The tasks of core 0, which starts with a head of its own. Where tasks differ in length and are balanced, short
    and long ones take turns."""
    begin, end = kv_blocks(shape, tile)
    blocks, parts, last = len(begin), tile.split_kv, math.ceil(shape.kv_len / min(tile.block_kv, shape.kv_len))
    order = list(range(blocks))
    if shape.causal and tile.core_order == "balanced":
        order = [i for pair in zip(order, reversed(order), strict=True) for i in pair][:blocks]
    for task in range(math.ceil(cost.tasks / cost.cores)):
        block, part = order[task // parts % blocks], task % parts
        share, more = divmod(int(end[block] - begin[block]), parts)
        yield _Work(share + (part >= parts - more), block == blocks - 1, part == parts - 1 and end[block] == last)


@partial(jax.jit, static_argnames=("options", "kernel", "slots"))
def _task(p: Problem, tile: TileConfig, d: DeviceSpec, work: _Work, options: Options, kernel: int, slots: int):
    t = time_constants(d, options.dtype)
    cut = parts(compile_graph(options.masked, tile.fusion, p.kind).kernels[kernel], t, p, tile, d, options)
    corner = 2 * work.ragged.astype(int)
    full, tail = ({n: x[corner + i * work.to_end.astype(int)] for n, x in cut.corners.seconds.items()} for i in (0, 1))
    moved = [{n: x[corner + i] for n, x in cut.corners.bytes.items()} for i in (0, 1)]
    k = knobs(cut.table, tile.buffers, tile.lookahead, t.sync)
    _, ends, waits = trajectory(cut.table, full, tail, work.steps, k, slots)
    return full, tail, ends, waits, moved


def _together(cost: Cost, stages, task: int, clock: float) -> list[Event]:
    """What all cores do together, of these stages, one after the other."""
    names, events = [name for name, _, _ in stages], []
    for s in cost.stages:
        if s.name in names:
            bytes_ = s.bytes / cost.cores
            events.append(Event(s.name, s.op, s.pipe, 0, task, -1, clock, clock + s.busy, 0.0, None, bytes_))
            clock += s.busy
    return events


def _task_events(args, options: Options, tile: TileConfig, table: StageTable, kernel, work: _Work, shown):
    """[Event] of the first `shown` steps of one task, from its own start."""
    slots, steps = _SLOTS * math.ceil((work.steps + MAX_LOOKAHEAD) / _SLOTS), work.steps
    arrays = _Work(*(np.asarray(x, float) for x in work))
    full, tail, ends, waits, moved = jax.device_get(_task(*args, arrays, options, kernel, slots))
    lag = {s.name: int(tile.lookahead) if s.group == "back" else 0 for s in table.stages}

    def at(values, stage: Stage, step: int) -> float:
        return float(np.asarray(values[stage.name])[step + lag[stage.name]])

    def event(stage: Stage, step: int) -> Event:
        last = stage.when == "step" and step == steps - 1
        end, seconds = at(ends, stage, step), float((tail if last else full)[stage.name])
        before = [(at(ends, table.stage(name), step), name) for name in stage.waits] if steps else []
        return Event(
            stage.name,
            stage.op,
            stage.pipe,
            core=0,
            task=0,
            iteration=step if stage.when == "step" else -1,
            start=max(0.0, end - seconds),
            end=end,
            dma_wait=at(waits, stage, step) if stage.compute else 0.0,
            waits_on=max(before)[1] if before else None,
            bytes=float(moved[int(last and work.to_end)][stage.name]),
        )

    def once(when: str, step: int) -> list[Event]:
        return [event(stage, step) for stage in table.when(when)]

    middle = [event(stage, step) for step in range(shown) for stage in table.when("step")]
    first = once("task_start", 0) if steps else []
    return first + middle + (once("task_end", max(steps - 1, 0)) if shown == steps else [])
