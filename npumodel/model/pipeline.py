"""The schedule: when every stage of every step runs, as a max-plus recurrence over a stage table.

    x_i(n) = d_i + max( x_waits(n),  x_previous_on_pipe,  x_who_frees_my_buffer(n - depth) )

Pipes are in-order queues. Slot s of the program holds the front stages of step s and the back stages of step
s - lookahead, so that with lookahead 1 the matrix unit computes Q K(s) before it turns to P V(s-1). The tasks of a core
follow each other drained, or as one stream of slots, in which a task begins while the one before it still lags.

All times are arrays of one shape (a single plan, or any number of candidates side by side): the stages of a slot are
written out one after the other as elementwise maxima and sums. Two readings share that slot:
  `play`  every slot, as long as the tasks (exact; makes the trace)
  `lengths`, `task`   a transient, then the period times the rest: O(1) in the sequence length

The gradient is that of the critical path; where two terms of a maximum are equal, of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property, reduce
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..relax import gate, tent
from ..tile import MAX_BUFFERS, MAX_LOOKAHEAD
from .stages import Stage, StageTable

#: After the transient the state repeats with this period: the least common multiple of the buffer depths 1..4.
PERIOD = 12
#: Slots that `lengths` and `task` run one by one. Pipelines have settled after 24; the last PERIOD of them measure the
#: period.
TRANSIENT = 24 + PERIOD


class Step(NamedTuple):
    """What one step takes: seconds of every stage by name (of those that run once a task too), and the pieces in which
    K and V come (None: whole)."""

    seconds: dict
    pieces: Any = None


class Knobs(NamedTuple):
    """What the schedule takes from the tile and the device: lookahead steps (a whole number, traced or not), which past
    step frees the slot of each buffer, and which one lagging stages look at (a plain number, or a weight for each: 1
    for one of them, and between whole numbers of slots two of them share it), hand-over latency (s).

    slots: of buffers whose slots hold pieces, how many there are; ahead: how many pieces before the end of the step
    named by `depths` the slot is free.
    """

    lookahead: Any
    depths: dict
    lag: tuple
    sync: Any
    slots: dict
    ahead: dict


class TaskTimes(NamedTuple):
    """What one task costs: makespan (s), what it would be with one stage after the other and every hand-over paid, and
    per compute stage the seconds that it waited for transfers (without `waits`: nothing)."""

    makespan: Any
    serial: Any
    wait: dict


def plus(x: TaskTimes, y: TaskTimes, times: Any = 1.0) -> TaskTimes:
    """x and y, y so many times."""
    return jax.tree.map(lambda a, b: a + times * b, x, y)


def knobs(table: StageTable, buffers, lookahead, sync, pieces=None) -> Knobs:
    """Resolve the depth rules of `table` for one tile. pieces: of K and V in a full step (None: they come whole)."""
    buffers = jnp.clip(buffers, 1, MAX_BUFFERS)
    rule: dict[str | int, Any] = {"buffers": _weights(buffers, MAX_BUFFERS), "lookahead": 1}  # a lagging stage frees it
    lag = tuple(tent(lookahead - ago) for ago in range(MAX_LOOKAHEAD + 1))
    depths, slots, ahead = {name: rule.get(depth, depth) for name, depth in table.depths}, {}, {}
    split = {s.buffer for s in table.stages if table.in_pieces(s)}
    for name, depth in table.depths:
        if pieces is not None and name in split:
            slots[name], most = (buffers, MAX_BUFFERS) if depth == "buffers" else (depth, depth)
            steps = jnp.ceil(jax.lax.stop_gradient(slots[name] / pieces))
            depths[name] = _weights(steps, int(most))
            ahead[name] = jnp.maximum(pieces - 1 - (pieces * steps - slots[name]), 0.0)
    return Knobs(lookahead, depths, lag, sync, slots, ahead)


def _weights(depth, most: int) -> tuple:
    """The weight of each of the last `most` slots, for the one `depth` slots ago."""
    return tuple(tent(depth - ago) for ago in range(1, most + 1))


class State(NamedTuple):
    """Where a task is: when each pipe is free, when the stages that somebody looks back at last ended, and when they
    ended 1, 2, .. slots ago."""

    pipes: dict
    ends: dict
    past: dict


@dataclasses.dataclass(frozen=True)
class Wiring:
    """What each stage of a table looks at, and one run of it."""

    table: StageTable
    waits: bool

    @cached_property
    def front(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.table.when("step") if s.group == "front")

    @cached_property
    def back(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.table.when("step") if s.group == "back")

    @cached_property
    def history(self) -> dict[str, int]:
        """Slots ago that somebody looks at the end of a stage, at most."""
        depths: dict[str, Any] = dict(self.table.depths)
        found: dict[str, int] = {}
        for stage in self.table.when("step"):
            for name in self._lagging(stage):
                found[name] = max(found.get(name, 0), MAX_LOOKAHEAD)
            if stage.buffer:
                name, rule = stage.freed_by or "", depths[stage.buffer]
                self._check_order(stage, rule)
                most = {"buffers": MAX_BUFFERS, "lookahead": 1}[rule] if isinstance(rule, str) else rule
                found[name] = max(found.get(name, 0), most)
        return found

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Stages whose last end is looked at after their slot."""
        return tuple(dict.fromkeys([*self.history, *(n for s in self.table.when("task_end") for n in s.waits)]))

    def _lagging(self, stage: Stage) -> tuple[str, ...]:
        """Front stages that a back stage waits for: it finds them `lookahead` slots ago."""
        if stage.group != "back":
            return ()
        names = dict.fromkeys(stage.waits + (self.table.upstream(stage) if self.waits else ()))
        return tuple(n for n in names if self.table.stage(n).when == "step" and self.table.stage(n).group == "front")

    def _check_order(self, stage: Stage, rule: str | int):
        """A front stage whose buffer a back stage frees has lookahead + 1 slots; all others have not."""
        ahead = stage.group == "front" and self.table.stage(stage.freed_by or "").group == "back"
        if ahead != (rule == "lookahead"):
            raise ValueError(f"{stage.name}: expected lookahead + 1 slots where a back stage frees it, got {rule}")

    def begin(self, full: Step, loads: Any = 1.0) -> State:
        """The state before the first slot: buffers are free, the pipes that load first are busy until they have.
        loads 0: a task without any step, which loads nothing."""
        zero = sum(jnp.zeros_like(x) for x in full.seconds.values())
        pipes = dict.fromkeys(self.table.pipes, zero)
        for stage in self.table.when("task_start"):
            pipes[stage.pipe] = pipes[stage.pipe] + full.seconds[stage.name] * loads
        past = {name: (zero,) * most for name, most in self.history.items()}
        return State(pipes, dict.fromkeys(self.kept, zero), past)

    def turn(self, state: State) -> State:
        """The state at the start of a slot: the past grows older."""
        past = {name: (state.ends[name], *ends[:-1]) for name, ends in state.past.items()}
        return state._replace(past=past)

    def run(self, stages: Iterable[Stage], state: State, step: Step, k: Knobs, on: Any = True):
        """Run stages one after the other. on False: they leave the state as it is.

        Returns (state, seconds that each compute stage waited for transfers, end of each stage).
        """
        pipes, ends, waited, ended, firsts = dict(state.pipes), dict(state.ends), {}, {}, {}
        for stage in stages:
            now = state._replace(pipes=pipes, ends=ends)
            start = self._start(stage, now, k, step)
            if step.pieces is not None and stage.streams:
                start, firsts[stage.name] = self._streamed(stage, start, firsts, now, step, k)
            end = start + step.seconds[stage.name]
            if self.waits and stage.compute:
                wait = jnp.maximum(start - self._unhindered(stage, now, step, k), 0.0)
                waited[stage.name] = _if(on, wait, 0.0 * start)
            pipes[stage.pipe] = _if(on, end, pipes[stage.pipe])
            for pipe, until in self._held(stage, firsts, step, k):
                pipes[pipe] = _if(on, _later(pipes[pipe], until), pipes[pipe])
            ends[stage.name] = _if(on, end, ends[stage.name]) if stage.name in ends else end
            ended[stage.name] = end
        return State(pipes, {name: ends[name] for name in self.kept}, state.past), waited, ended

    def _start(self, stage: Stage, now: State, k: Knobs, step: Step):
        """When a stage starts, as far as those are concerned that it does not work beside, piece by piece."""
        streams = stage.streams if step.pieces is not None else ()
        times = [now.pipes[stage.pipe]] + [end for name, end in self._fed(stage, now, k) if name not in streams]
        return reduce(_later, times + self._freed(stage, now, step, k, ("first",) if streams else ("first", "last")))

    def _fed(self, stage: Stage, now: State, k: Knobs) -> list:
        """(name, end) of the stages that a stage waits for, hand-over included. Those of the start of a task only keep
        their pipe."""
        names = [n for n in stage.waits if stage.when == "task_end" or self.table.stage(n).when == "step"]
        return [(n, self._end(stage, n, now, k) + (k.sync if stage.sync else 0.0)) for n in names]

    def _streamed(self, stage: Stage, start, firsts: dict, now: State, step: Step, k: Knobs):
        """When a stage starts that works on pieces as they come, if all but the sources of them allows `start`: so late
        that it never stops before its last piece; and when it has done its first one. firsts: when stages that stream
        themselves have.

        Its first piece comes after that of every source; sources that share a pipe take turns, piece by piece. Its last
        piece comes after their last one; with one slot both wait for each other all the time, so all of it does. And of
        P pieces P - slots find no slot before this stage has started: they come beside all of its own pieces but two
        (with one slot: beside none).
        """
        own, refill, beside, turns = step.seconds[stage.name], 0.0, 1.0, {}
        lasts = self._freed(stage, now, step, k, ("last",)) if stage.buffer in k.ahead else []
        rest = 1 - 1 / step.pieces
        for source in (s for s in self.table.stages if s.name in stage.streams):
            other, slots = step.seconds[source.name], k.slots[source.buffer or ""]
            end = self._end(stage, source.name, now, k) + (k.sync if stage.sync else 0.0)
            turns[source.pipe] = turns.get(source.pipe, 0.0) + other
            first = firsts.get(source.name, end - rest * turns[source.pipe])
            ready = [x + other / step.pieces for name, x in self._fed(source, now, k) if name not in source.streams]
            start = reduce(_later, ready, _later(start, first))
            lasts.append(end - gate(slots - 1) * rest * own)
            refill = refill + jnp.maximum(1 - slots / step.pieces, 0.0) * other
            beside = beside * gate(slots - 1)
        first = start + own / step.pieces
        start = start + jnp.maximum(refill - beside * jnp.maximum(1 - 2 / step.pieces, 0.0) * own, 0.0)
        return reduce(_later, lasts, start), first

    def _held(self, stage: Stage, firsts: dict, step: Step, k: Knobs) -> list:
        """(pipe, until when) for pipes whose last pieces had to wait until this stage had freed slots."""
        if step.pieces is None:
            return []
        found = []
        for source in map(self.table.stage, stage.streams):
            other, own, slots = step.seconds[source.name], step.seconds[stage.name], k.slots[source.buffer or ""]
            until = firsts[stage.name] + ((step.pieces - slots - 1) * own + other) / step.pieces
            found.append((source.pipe, jnp.where(slots < step.pieces, until, 0.0 * until)))
        return found

    def _unhindered(self, stage: Stage, now: State, step: Step, k: Knobs):
        """The start if transfers took no time: the pipe, the computations that feed the stage, and those that free its
        buffer."""
        times = [now.pipes[stage.pipe]] + [self._end(stage, name, now, k) for name in self.table.upstream(stage)]
        freed_by = stage.buffer and self.table.stage(stage.freed_by or "")
        return reduce(_later, times + (self._freed(stage, now, step, k) if freed_by and freed_by.compute else []))

    def _end(self, stage: Stage, name: str, now: State, k: Knobs):
        if name not in self._lagging(stage):
            return now.ends[name]
        return _ago(k.lag, (now.ends[name], *now.past[name][:MAX_LOOKAHEAD]))

    def _freed(self, stage: Stage, now: State, step: Step, k: Knobs, pieces=("first", "last")) -> list:
        """When the slot taken `depth` steps ago was freed: a back stage frees it `lookahead` program slots later.
        pieces: for which of its pieces, each as the start of a stage that does not stop in between."""
        if not stage.buffer:
            return []
        name, freed_by = stage.buffer, stage.freed_by or ""
        freed = _ago(k.depths[name], now.past[freed_by])
        if step.pieces is None or name not in k.ahead:
            return [freed]
        own = step.seconds[stage.name]
        pace = {"first": _later(step.seconds[freed_by], own), "last": own}
        return [freed - k.ahead[name] / step.pieces * pace[which] for which in pieces]

    def slot(self, state: State, step, full: Step, k: Knobs, last: Step | None = None):
        """The slot whose front stages work on step number `step`. last: times of that step, if it is the last one.

        Returns (state, seconds waited by stage).
        """
        state, waited, _ = self.run(self.front, self.turn(state), last or full, k)
        times = _either(k.lookahead == 0, last, full, self.back) if last else full
        state, more, _ = self.run(self.back, state, times, k, step >= k.lookahead)
        return state, _added(waited, more)

    def drain(self, state: State, step, full: Step, last: Step | None, k: Knobs) -> TaskTimes:
        """From the end of the slot of the last step (number `step`; -1: there is none) to the end of the task: the back
        stages that still lag, then what comes once. last: times of that step, if not `full`."""
        total: dict = {}
        for ahead in range(1, MAX_LOOKAHEAD + 1):
            on = (ahead <= k.lookahead) & (step + ahead >= k.lookahead)
            times = _either(k.lookahead == ahead, last, full, self.back) if last else full
            state, waited, _ = self.run(self.back, self.turn(state), times, k, on)
            total = _added(total, waited)
        return self.finish(state, full, k, total)

    def finish(self, state: State, full: Step, k: Knobs, waited: dict) -> TaskTimes:
        """Run what comes once at the end of a task. waited: seconds by stage before."""
        state, more, _ = self.run(self.table.when("task_end"), state, full, k)
        return TaskTimes(self.makespan(state), None, _added(waited, more))

    def in_a_row(self, step: Step, k: Knobs, when: str):
        """Seconds of all stages of one kind, one after the other, hand-overs included."""
        zero = 0.0 * sum(step.seconds.values())
        return sum((step.seconds[s.name] + k.sync * s.sync for s in self.table.when(when)), zero)

    def serial(self, steps, full: Step, last: Step, k: Knobs):
        """Seconds of a task with nothing overlapped; 0 steps: without its loads."""
        some = jnp.minimum(steps, 1.0)
        step, end = self.in_a_row(full, k, "step"), self.in_a_row(last, k, "step")
        once = some * self.in_a_row(full, k, "task_start") + self.in_a_row(full, k, "task_end")
        return once + jnp.maximum(steps - 1, 0.0) * step + some * end

    def makespan(self, state: State):
        return reduce(_later, state.pipes.values())


def _later(one, other):
    """The maximum. Its gradient goes to one of the two: a fraction of the code of jnp.maximum's, which splits ties."""
    return jnp.where(other > one, other, one)


def _if(on, new, old):
    return new if on is True else jnp.where(on, new, old)


def _ago(which, ends: tuple):
    """One of the past ends: number `which` (1 = the last), or their mean by weights."""
    if isinstance(which, int):
        return ends[which - 1]
    return sum(weight * end for weight, end in zip(which, ends, strict=False))


def _either(condition, one: Step, other: Step, stages: Iterable[Stage]) -> Step:
    names = [s.name for s in stages]
    both = [Step({n: x.seconds[n] for n in names}, x.pieces) for x in (one, other)]
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), *both)


def _added(one: dict, other: dict) -> dict:
    return one | {name: one[name] + value if name in one else value for name, value in other.items()}


class Lengths(NamedTuple):
    """Tasks of full steps. times [transient + 1, ...]: of 0, 1, .. `transient` steps; period: what PERIOD more steps
    take, beyond those."""

    times: TaskTimes
    period: TaskTimes


def lengths(
    table: StageTable, full: Step, tail: Step, steps, k: Knobs, transient: int, waits: bool
) -> tuple[Lengths, TaskTimes]:
    """(tasks of any number of full steps, times of `task`), out of one run.

    Tasks beyond the transient grow as they do up to `steps` steps, if that is beyond it, else as over the last period:
    what ends a task late may not be what is slow in the long run.
    """
    wiring = Wiring(table, waits)

    def drained(state, step):
        return wiring.drain(state, step, full, None, k)

    found, waited, times = _transient(wiring, full, steps, k, transient, drained)
    before = jax.tree.map(lambda x: jnp.cumsum(x, 0), waited)
    times = times._replace(wait=_added(before, times.wait))
    serial = jax.vmap(lambda steps: wiring.serial(steps, full, full, k))(jnp.arange(transient + 1.0))
    empty = wiring.finish(wiring.begin(full, 0.0), full, k, {})
    empty = empty._replace(wait={name: empty.wait.get(name, 0.0 * empty.makespan) for name in times.wait})
    times = jax.tree.map(lambda none, some: jnp.concatenate([none[None], some]), empty, times)
    every = Lengths(times._replace(serial=serial), jax.tree.map(lambda x: x[-1] - x[-1 - PERIOD], times))
    every = every._replace(period=every.period._replace(serial=serial[-1] - serial[-1 - PERIOD]))
    periods, _ = _periods(steps, transient)
    far = _last_step(wiring, found, waited, full, full, steps, k)
    near = at_steps(every._replace(period=jax.tree.map(jnp.zeros_like, every.period)), steps)
    many = jnp.maximum(periods, 1.0)
    period = jax.tree.map(lambda x, f, n: jnp.where(periods > 0, (f - n) / many, x), every.period, far, near)
    return every._replace(period=period), _last_step(wiring, found, waited, full, tail, steps, k)


def task(table: StageTable, full: Step, tail: Step, steps, k: Knobs, transient: int, waits: bool) -> TaskTimes:
    """Times of a task of `steps` steps (a real, >= 1) whose last step takes `tail`, in O(transient).

    transient: a multiple of PERIOD. Exact for whole steps up to `transient`; beyond, the state of the same phase, each
    of its times moved by as many periods as its own last one (pipes that do not hold each other up drift apart).
    """
    wiring = Wiring(table, waits)
    found, waited, _ = _transient(wiring, full, steps, k, transient)
    return _last_step(wiring, found, waited, full, tail, steps, k)


def _periods(steps, transient: int) -> tuple[Any, Any]:
    """(whole periods beyond the transient, the step that is the last one without them) of a task."""
    periods = jax.lax.stop_gradient(jnp.maximum(jnp.ceil((steps - transient) / PERIOD), 0.0))
    return periods, steps - periods * PERIOD - 1


def _transient(wiring: Wiring, full: Step, steps, k: Knobs, transient: int, drained=lambda state, step: None):
    """Run `transient` slots.

    Returns (state before the last step of a task of `steps` steps, seconds waited in each slot [transient], drained
    (state, step) after each).
    """
    periods, place = _periods(steps, transient)
    numbers = jnp.arange(float(transient))
    shares = tent(place[None] - numbers.reshape(-1, *[1] * jnp.ndim(place)))

    def body(carry, now):
        (state, found), (step, share) = carry, now
        found = jax.tree.map(lambda total, x: total + share * x, found, state)
        state, waited = wiring.slot(state, step, full, k)
        return (state, found), (waited, drained(state, step))

    def period(carry, now):
        carry, done = jax.lax.scan(body, carry, now)
        return carry, (carry[0], done)

    begin = wiring.begin(full)
    nothing = jax.tree.map(lambda x: 0.0 * (x + steps), begin)
    by_period = jax.tree.map(lambda x: x.reshape(-1, PERIOD, *x.shape[1:]), (numbers, shares))
    (_, found), (ends, done) = jax.lax.scan(period, (begin, nothing), by_period)
    found = jax.tree.map(lambda x, end: x + periods * (end[-1] - end[-2]), found, ends)
    return found, *jax.tree.map(lambda x: x.reshape(transient, *x.shape[2:]), done)


def _last_step(wiring: Wiring, found: State, waited: dict, full: Step, tail: Step, steps, k: Knobs) -> TaskTimes:
    """Times of a task, from what `_transient` found."""
    step = jnp.maximum(jnp.ceil(jax.lax.stop_gradient(steps)), 1.0) - 1
    state, more = wiring.slot(found, step, full, k, tail)
    times = wiring.drain(state, step, full, tail, k)
    serial = wiring.serial(steps, full, tail, k)

    def before(x):
        periods, place = _periods(steps, len(x))
        column = jnp.arange(float(len(x))).reshape(-1, *[1] * jnp.ndim(place))
        return (jnp.clip(place[None] - column, 0.0, 1.0) * x).sum(0) + periods * x[-PERIOD:].sum(0)

    wait = _added(_added({name: before(x) for name, x in waited.items()}, more), times.wait)
    return TaskTimes(times.makespan, serial, wait)


class _Stream(NamedTuple):
    """Tasks one after the other without draining. released: when the last task, and the one before it, had finished
    with what they load once (it has two slots)."""

    state: State
    released: tuple


def _stream_slot(wiring: Wiring, stream: _Stream, k: Knobs, front: Step, back: Step, on):
    """One slot of a stream. on: (a front step, the first of its task, the last of its task, a back step, whether a task
    ends behind it), each whether there is one.

    Returns (stream, seconds waited by stage, end of each stage).
    """
    some, first, last, more, end = on
    state, released, ended = wiring.turn(stream.state), stream.released, {}
    for stage in wiring.table.when("task_start"):
        done = _later(state.pipes[stage.pipe], released[1]) + front.seconds[stage.name]
        pipes = state.pipes | {stage.pipe: _if(some & first, done, state.pipes[stage.pipe])}
        state, ended = state._replace(pipes=pipes), ended | {stage.name: done}
    state, waited, fronts = wiring.run(wiring.front, state, front, k, some)
    users = [s.freed_by for s in wiring.table.when("task_start") if s.freed_by]
    used = reduce(_later, [fronts[name] for name in users], 0.0 * released[0])
    released = tuple(_if(some & last, new, old) for new, old in zip((used, released[0]), released, strict=True))
    state, also, backs = wiring.run(wiring.back, state, back, k, more)
    state, once, ends = wiring.run(wiring.table.when("task_end"), state, back, k, end)
    return _Stream(state, released), _added(_added(waited, also), once), ended | fronts | backs | ends


def _empty_stream(wiring: Wiring, step: Step) -> _Stream:
    state = wiring.begin(step, 0.0)
    return _Stream(state, (next(iter(state.pipes.values())),) * 2)


def border(table: StageTable, full: Step, tail: Step, steps, k: Knobs, transient: int, waits: bool) -> TaskTimes:
    """What each border between two tasks of `steps` steps (rounded), the last of which takes `tail`, saves where tasks
    are not drained: times of such a task less those of one more of them in a long stream."""
    wiring = Wiring(table, waits)
    steps = jnp.maximum(jnp.round(jax.lax.stop_gradient(steps)), 1.0)
    steps = steps - PERIOD * jnp.maximum(jnp.ceil((steps - transient) / PERIOD), 0.0)
    lag = jax.lax.stop_gradient(k.lookahead)
    slots = 2 * transient + MAX_LOOKAHEAD
    tasks = jnp.maximum(jnp.floor(transient / steps), 1.0)  # counted over the last so many
    last = jnp.floor((slots - lag) / steps) * steps - 1 + lag
    before = last - tasks * steps

    def body(carry, slot):
        stream, found = carry
        place, done = jnp.mod(slot, steps), jnp.mod(slot - lag, steps)
        behind = slot >= lag
        front, back = (_either(at == steps - 1, tail, full, table.stages) for at in (place, done))
        on = (True, place == 0, place == steps - 1, behind, behind & (done == steps - 1))
        stream, waited, _ = _stream_slot(wiring, stream, k, front, back, on)
        counted = jnp.where(slot == last, 1.0, 0.0) - jnp.where(slot == before, 1.0, 0.0)
        within = jnp.where((slot > before) & (slot <= last), 1.0, 0.0)
        makespan = found.makespan + counted * wiring.makespan(stream.state)
        wait = {name: found.wait[name] + within * x for name, x in waited.items()}
        return (stream, TaskTimes(makespan, 0.0 * makespan, wait)), None

    alone = task(table, full, tail, steps, k, transient, waits)
    begin = _empty_stream(wiring, full)
    none = 0.0 * alone.makespan
    found = TaskTimes(none, none, dict.fromkeys(alone.wait, none))
    begin = jax.tree.map(lambda x: x + none, begin)
    (_, found), _ = jax.lax.scan(body, (begin, found), jnp.arange(float(slots)))
    saved = jnp.maximum(alone.makespan - found.makespan / tasks, 0.0)
    wait = {name: seconds - found.wait[name] / tasks for name, seconds in alone.wait.items()}
    return TaskTimes(saved, none, wait)


def at_steps(every: Lengths, steps) -> TaskTimes:
    """A task of `steps` full steps (a real, >= 0); beyond the transient, the same phase plus whole periods. Between
    whole steps the mean of the neighbours."""
    last = every.times.makespan.shape[0] - 1
    periods, place = _periods(steps, last)
    place = place + 1
    low = jnp.clip(jnp.floor(jax.lax.stop_gradient(place)), 0, last - 1)

    def entry(x, period):
        row = low.astype(int)[None]
        below, above = (jnp.take_along_axis(x, row + i, 0)[0] for i in (0, 1))
        return below + (place - low) * (above - below) + periods * period

    return jax.tree.map(entry, *every)


class Slots(NamedTuple):
    """What a core does in each slot [slots]: see `slots_of`. Of the front step and of the back step: which of the
    corners it takes, and whether there is one; whether the front step is the first or last of its task; whether a task
    ends behind the back step."""

    front: Any
    some: Any
    first: Any
    last: Any
    back: Any
    more: Any
    end: Any


def slots_of(tasks: Iterable[tuple[list[int], int]], lookahead: int, size: int) -> Slots:
    """Tasks in one stream of `size` slots. Each task: the corner of each of its steps, and the one that its end takes
    (a task without steps has an end too)."""
    front, back = np.zeros((4, size), int), np.zeros((3, size), int)
    slot = 0
    for steps, end in tasks:
        for i, corner in enumerate(steps or [end]):
            some, last = i < len(steps), i == max(len(steps) - 1, 0)
            front[:, slot] = corner, some, some and i == 0, some and last
            back[:, slot + lookahead] = corner, some, last
            slot += 1
    some, first, last, more, end = (x.astype(bool) for x in (*front[1:], *back[1:]))
    return Slots(front[0], some, first, last, back[0], more, end)


def play(table: StageTable, corners: Step, slots: Slots, k: Knobs):
    """Every slot of a stream of tasks, one by one. corners: as `Step`, with a leading axis.

    Returns (makespan, ends, waits): per stage of the table, what it did in each slot [slots] (end time, seconds waited
    for transfers). A back stage, and what ends a task, is in the slot `lookahead` behind that of its step.
    """
    wiring = Wiring(table, True)

    def body(stream, now: Slots):
        front, back = (jax.tree.map(itemgetter(which), corners) for which in (now.front, now.back))
        on = (now.some, now.first, now.last, now.more, now.end)
        stream, waited, ended = _stream_slot(wiring, stream, k, front, back, on)
        return stream, (ended, waited)

    begin = _empty_stream(wiring, jax.tree.map(itemgetter(0), corners))
    stream, (ends, waits) = jax.lax.scan(body, begin, slots)
    return wiring.makespan(stream.state), ends, waits
