"""The schedule: when every stage of every step runs, as a max-plus recurrence over a stage table.

    x_i(n) = d_i + max( x_waits(n),  x_previous_on_pipe,  x_who_frees_my_buffer(n - depth) )

Pipes are in-order queues. Slot s of the program holds the front stages of step s and the back stages of step
s - lookahead, so that with lookahead 1 the matrix unit computes Q K(s) before it turns to P V(s-1).

A stage table is wired once into numbers (`Wiring`: which entries of the state a stage looks at), and one small loop
runs any table, so that compile time does not grow with the number of stages. Two readings share that loop:
  `trajectory`  every slot, as long as the task (exact; makes the trace)
  `fast`        a transient, then the period times the rest: O(1) in the sequence length

Ties in a maximum split the gradient evenly between the tied terms.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..relax import tent
from ..tile import MAX_BUFFERS, MAX_LOOKAHEAD
from .stages import Stage, StageTable

#: After the transient the state repeats with this period: the least common multiple of the buffer depths 1..4.
PERIOD = 12
#: Slots that `fast` runs one by one. Pipelines have settled after 24; the last PERIOD of them measure the period.
TRANSIENT = 24 + PERIOD

#: Minus infinity of the max-plus algebra, in seconds: finite, so that gradients stay finite.
NEVER = -1e9


class Knobs(NamedTuple):
    """What the schedule takes from the tile and the device: lookahead steps, buffer depths, hand-over latency (s).
    Lookahead and depths hold whole numbers (traced or not)."""

    lookahead: Any
    depths: dict
    sync: Any


class TaskTimes(NamedTuple):
    """What one task costs: makespan (s), and per stage the seconds that it waited for transfers [stages], in the order
    of the table (0 for transfers)."""

    makespan: Any
    wait: Any


def knobs(table: StageTable, buffers, lookahead, sync) -> Knobs:
    """Resolve the depth rules of `table` for one tile."""
    rule: dict[str | int, Any] = {"buffers": buffers, "lookahead": lookahead + 1}
    return Knobs(lookahead, {name: rule.get(depth, depth) for name, depth in table.depths}, sync)


@dataclasses.dataclass(frozen=True)
class Wiring:
    """A stage table as numbers. The state is one vector of times: when each pipe is free, when each stage last ended,
    and, for the stages that somebody looks back at, their ends 1, 2, .. HISTORY slots ago."""

    table: StageTable

    HISTORY = max(MAX_BUFFERS, MAX_LOOKAHEAD)

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages of one slot in program order: front, then back."""
        return tuple(sorted(self.table.when("step"), key=lambda s: s.group == "back"))

    @cached_property
    def looked_at(self) -> tuple[str, ...]:
        names = [s.freed_by for s in self.order if s.freed_by] + [n for s in self.order for n in self.lagging(s)]
        return tuple(dict.fromkeys(names))

    def lagging(self, stage: Stage) -> tuple[str, ...]:
        """Front stages that a back stage waits for: it finds them `lookahead` slots ago."""
        if stage.group != "back":
            return ()
        names = dict.fromkeys(stage.waits + self.table.upstream(stage))
        return tuple(n for n in names if self.table.stage(n).when == "step" and self.table.stage(n).group == "front")

    def pipe(self, name: str) -> int:
        return self.table.pipes.index(name)

    def end(self, name: str) -> int:
        return len(self.table.pipes) + [s.name for s in self.table.stages].index(name)

    def places(self, stages: tuple[Stage, ...]) -> np.ndarray:
        """Where these stages stand in the table."""
        return np.array([self.end(s.name) - len(self.table.pipes) for s in stages], int)

    def past(self, name: str, slots_ago: int) -> int:
        """Where the end of a stage `slots_ago` slots before the current one is kept (1 or more)."""
        first = len(self.table.pipes) + len(self.table.stages)
        return first + (slots_ago - 1) * len(self.looked_at) + self.looked_at.index(name)

    @property
    def size(self) -> int:
        return len(self.table.pipes) + len(self.table.stages) + self.HISTORY * len(self.looked_at)

    @cached_property
    def turn(self) -> np.ndarray:
        """The state at the start of a slot, as places of the state before: the past grows older."""
        fixed = list(range(len(self.table.pipes) + len(self.table.stages)))
        newest = [self.end(n) for n in self.looked_at]
        older = [self.past(n, ago) for ago in range(1, self.HISTORY) for n in self.looked_at]
        return np.array(fixed + newest + older)

    def starts(self, stage: Stage, k: Knobs) -> list[tuple[int, Any]]:
        """(place, seconds to add) of all that a stage waits for; NEVER switches a place off."""
        terms = [(self.pipe(stage.pipe), 0.0)]
        for name in stage.waits:
            if stage.when == "task_end" or self.table.stage(name).when == "step":
                terms += self._ends(stage, name, k, k.sync if stage.sync else 0.0)
        return terms + self._freed(stage, k)

    def unhindered(self, stage: Stage, k: Knobs) -> list[tuple[int, Any]]:
        """The same if transfers took no time: the pipe, the computations that feed the stage, and those that free its
        buffer."""
        terms = [(self.pipe(stage.pipe), 0.0)]
        for name in self.table.upstream(stage):
            terms += self._ends(stage, name, k, 0.0)
        freed_by = stage.buffer and self.table.stage(stage.freed_by or "")
        return terms + (self._freed(stage, k) if freed_by and freed_by.compute else [])

    def _ends(self, stage: Stage, name: str, k: Knobs, more) -> list[tuple[int, Any]]:
        if name not in self.lagging(stage):
            return [(self.end(name), more)]
        places = [self.end(name)] + [self.past(name, ago) for ago in range(1, MAX_LOOKAHEAD + 1)]
        return [(place, _only(k.lookahead == i, more)) for i, place in enumerate(places)]

    def _freed(self, stage: Stage, k: Knobs) -> list[tuple[int, Any]]:
        """The buffer slot taken `depth` steps ago: a back stage frees it `lookahead` program slots later."""
        if not stage.buffer:
            return []
        freed_by, depth = stage.freed_by or "", k.depths[stage.buffer]
        if stage.group == "front" and self.table.stage(freed_by).group == "back":
            depth = depth - k.lookahead
        return [(self.past(freed_by, ago), _only(depth == ago, 0.0)) for ago in range(1, MAX_BUFFERS + 1)]


def _only(condition, value):
    return jnp.where(condition, value, NEVER)


class _Rows(NamedTuple):
    """Per stage: places it looks at [stages, most] and seconds to add, the same for `unhindered`, its pipe and end."""

    look: Any
    add: Any
    look_free: Any
    add_free: Any
    pipe: Any
    end: Any


def _rows(wiring: Wiring, stages: tuple[Stage, ...], k: Knobs) -> _Rows:
    def padded(terms):
        most = max(map(len, terms))
        rows = [row + [(0, NEVER)] * (most - len(row)) for row in terms]
        add = [jnp.stack([jnp.asarray(seconds, jnp.result_type(float)) for _, seconds in row]) for row in rows]
        return np.array([[place for place, _ in row] for row in rows]), jnp.stack(add)

    pipes, ends = [wiring.pipe(s.pipe) for s in stages], [wiring.end(s.name) for s in stages]
    starts, free = padded([wiring.starts(s, k) for s in stages]), padded([wiring.unhindered(s, k) for s in stages])
    return _Rows(*starts, *free, np.array(pipes), np.array(ends))


def _run(rows: _Rows, state, durations, on, waits: bool):
    """Run stages one after the other. durations, on [stages]: a stage that is not `on` leaves the state as it is.

    Returns (state, [stages] seconds that each waited for transfers).
    """

    def one(state, row_duration_on):
        row, duration, on = row_duration_on
        start = (state[row.look] + row.add).max()
        waited = jnp.maximum(start - (state[row.look_free] + row.add_free).max(), 0.0) * on if waits else start
        at = jnp.stack([row.pipe, row.end])
        now = jnp.where(on > 0, start + duration, state[at])
        return state.at[at].set(now, unique_indices=True), waited

    return jax.lax.scan(one, state, (rows, durations, on))


class _Machine(NamedTuple):
    """A wired table with its knobs: the rows of a slot in program order, and those of the task's end."""

    wiring: Wiring
    step: _Rows
    end: _Rows | None
    lookahead: Any
    waits: bool

    def begin(self, full, loads: Any = 1.0):
        """The state before the first slot: buffers are free, the pipes that load first are busy until they have.
        loads 0: a task without any step, which loads nothing."""
        state = jnp.zeros(self.wiring.size, full.dtype)
        for stage in self.wiring.table.when("task_start"):
            pipe, end = self.wiring.pipe(stage.pipe), self.wiring.end(stage.name)
            done = state[pipe] + full[end - len(self.wiring.table.pipes)] * loads
            state = state.at[np.array([pipe, end])].set(done)
        return state

    def slot(self, state, slot, steps, full, tail):
        """One slot of a task of `steps` steps: the past grows older, then the stages whose step is in the task run."""
        order = self.wiring.places(self.wiring.order)
        step = jnp.where(np.array([s.group == "back" for s in self.wiring.order]), slot - self.lookahead, slot)
        on = jnp.where((step >= 0) & (step < steps), 1.0, 0.0)
        seconds = jnp.where(step == steps - 1, tail[order], full[order])
        state, waited = _run(self.step, state[self.wiring.turn], seconds, on, self.waits)
        return state, self._spread(self.wiring.order, waited)

    def finish(self, state, full):
        """Run the stages that come once at the end of a task."""
        stages = self.wiring.table.when("task_end")
        if self.end is None:
            return state, self._spread(stages, jnp.zeros(0, state.dtype))
        seconds = full[self.wiring.places(stages)]
        state, waited = _run(self.end, state, seconds, jnp.ones_like(seconds), self.waits)
        return state, self._spread(stages, waited)

    def close(self, state, steps, full, tail) -> TaskTimes:
        """From the state before the slot of the last step (0 steps: before the first) to the end of the task."""

        def body(state, r):
            return self.slot(state, steps - 1 + r, steps, full, tail)

        state, waited = jax.lax.scan(body, state, jnp.arange(MAX_LOOKAHEAD + 1))
        state, more = self.finish(state, full)
        return TaskTimes(self.makespan(state), waited.sum(0) + more)

    def _spread(self, stages, waited):
        """Waits of some stages, at their places in the table; transfers do not count."""
        waited = jnp.where(np.array([s.compute and self.waits for s in stages], bool), waited, 0.0)
        return jnp.zeros(len(self.wiring.table.stages), waited.dtype).at[self.wiring.places(stages)].set(waited)

    def makespan(self, state):
        return state[: len(self.wiring.table.pipes)].max()


def _machine(table: StageTable, k: Knobs, waits: bool) -> _Machine:
    wiring, end = Wiring(table), table.when("task_end")
    return _Machine(wiring, _rows(wiring, wiring.order, k), _rows(wiring, end, k) if end else None, k.lookahead, waits)


def fast(table: StageTable, full, tail, steps, k: Knobs, transient: int, waits: bool):
    """Times of a task of `steps` steps (a real), in O(transient).

    full, tail [stages of the table]: seconds of every stage, for a full block and for the last one. Exact for whole
    steps up to `transient`. Returns (TaskTimes of that task, TaskTimes [transient] of tasks of 1, 2, ... full steps,
    TaskTimes of a task without steps). Without `waits` the waits are zeros.
    """
    machine = _machine(table, k, waits)

    def body(state, slot):
        after, waited = machine.slot(state, slot, transient + 1, full, full)
        return after, (state, waited)

    begin = machine.begin(full)
    _, (states, waited) = jax.lax.scan(body, begin, jnp.arange(transient))
    waited = jnp.cumsum(waited, 0) - waited  # before each slot
    state, before = _fold(steps, transient, (states, waited))
    whole = jnp.maximum(jnp.ceil(jax.lax.stop_gradient(steps)), 1.0)
    lanes = (
        jnp.concatenate([states, state[None], machine.begin(full, 0.0)[None]]),
        jnp.concatenate([jnp.arange(1.0, transient + 1), jnp.stack([whole, 0.0 * whole])]),
        jnp.concatenate([jnp.broadcast_to(full, (transient, *full.shape)), tail[None], full[None]]),
    )
    times = jax.vmap(lambda state, steps, tail: machine.close(state, steps, full, tail))(*lanes)
    times = TaskTimes(times.makespan, times.wait + jnp.concatenate([waited, before[None], 0 * before[None]]))
    lengths, task, empty = (
        jax.tree.map(itemgetter(lane), times) for lane in (slice(transient), transient, transient + 1)
    )
    return task, lengths, empty


def _fold(steps, transient: int, series):
    """The entry of `series` [transient, ...] at slot steps - 1, extended by whole periods beyond the transient."""
    periods = jax.lax.stop_gradient(jnp.maximum(jnp.ceil((steps - transient) / PERIOD), 0.0))
    slots = jnp.arange(transient)
    here, before = (tent(steps - 1 - (periods + i) * PERIOD - slots) for i in (0, 1))

    def fold(x):
        now = jnp.tensordot(here, x, 1)
        return now + periods * (now - jnp.tensordot(before, x, 1))

    return jax.tree.map(fold, series)


def trajectory(table: StageTable, full, tail, steps, k: Knobs, slots: int):
    """Every slot of a task of `steps` steps (a whole number, traced or not), one by one.

    slots: plain integer >= steps + MAX_LOOKAHEAD. Returns (TaskTimes, ends, waits): per stage of the table, what it did
    in each slot [slots] (end time, seconds waited for transfers); a back stage works on step `slot - lookahead`, and
    stages that run once fill all slots with their one value.
    """
    machine = _machine(table, k, True)
    wiring = machine.wiring

    def body(state, slot):
        state, waited = machine.slot(state, slot, steps, full, tail)
        return state, (state, waited)

    begin = machine.begin(full, jnp.where(steps > 0, 1.0, 0.0))
    state, (states, waits) = jax.lax.scan(body, begin, jnp.arange(slots))
    state, more = machine.finish(state, full)
    total = waits.sum(0) + more
    once = {s.name for s in table.stages if s.when != "step"}
    place = {s.name: wiring.end(s.name) for s in table.stages}
    ends = {n: jnp.full(slots, state[i]) if n in once else states[:, i] for n, i in place.items()}
    each = {s.name: jnp.full(slots, total[i]) if s.name in once else waits[:, i] for i, s in enumerate(table.stages)}
    return TaskTimes(machine.makespan(state), total), ends, each
