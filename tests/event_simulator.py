"""Discrete-event simulation of a task of a tiled attention kernel on one NPU core, or of several in one stream.

The core is a set of in-order pipes (hardware queues).  Every pipe executes its instructions strictly in program
order, one at a time; instructions wait for one another through counted signals and take slots of counted buffers.
The module is the independent judge of analytical models: it shares nothing with them, and it finds the times only by
playing events from a heap in order of time.

Times may be any mutually comparable numbers (int, float, ``fractions.Fraction``); ints and fractions
give exact results.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple


class SimulationError(RuntimeError):
    """The described task cannot be played."""


class DeadlockError(SimulationError):
    """Instructions are left in the queues and none of them can ever start."""


@dataclass(frozen=True)
class Stage:
    """A kind of instruction: one per iteration (``when="step"``), or one per task at its start or its end."""

    name: str
    pipe: str
    waits: tuple[str, ...] = ()
    buffer: str | None = None
    freed_by: str | None = None
    group: str = "front"
    when: str = "step"


class Event(NamedTuple):
    """One executed instruction; ``iteration`` is -1 for the stages at the start and the end of the task."""

    name: str
    iteration: int
    pipe: str
    start: float
    end: float
    task: int = 0


class Task(NamedTuple):
    """Durations of iterations 0..steps-2 and of the start and end stages; of iteration steps-1; how many there are."""

    durations: Mapping[str, float]
    tail_durations: Mapping[str, float]
    steps: int


@dataclass(frozen=True)
class Result:
    """Outcome of a simulation; ``wait`` has the compute stages only."""

    makespan: float
    events: list[Event]
    busy: dict[str, float]
    wait: dict[str, float]


@dataclass(eq=False)
class Instruction:
    """One execution of a stage, and what the simulation records about it."""

    stage: Stage
    iteration: int
    position: int
    duration: float
    sync: float = 0
    deps: list["Instruction"] = field(default_factory=list)
    waiters: list["Instruction"] = field(default_factory=list)
    frees: list["Instruction"] = field(default_factory=list)
    signals: int = 0
    start: float | None = None
    end: float | None = None
    pipe_free_at: float = 0
    slot_from: "Instruction | None" = None
    task: int = 0

    @property
    def label(self) -> str:
        """Name for messages, such as ``load[2]``, or ``load_q`` for a stage of the whole task."""
        return self.stage.name if self.iteration < 0 else f"{self.stage.name}[{self.iteration}]"


class Pipe:
    """In-order hardware queue that executes one instruction at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Instruction] = deque()
        self.running: Instruction | None = None
        self.free_at: float = 0


class BufferPool:
    """Counting semaphore of buffer slots; a slot remembers the instruction that gave it back (None: never used)."""

    def __init__(self, name: str, depth: int) -> None:
        self.name = name
        self.depth = depth
        self.free: deque[Instruction | None] = deque([None] * depth)
        self.holders: list[Instruction] = []

    def take(self, instr: Instruction) -> None:
        """Give the slot that has been free the longest to ``instr``."""
        instr.slot_from = self.free.popleft()
        self.holders.append(instr)

    def give_back(self, holder: Instruction, releaser: Instruction) -> None:
        """Return the slot of ``holder``."""
        if holder not in self.holders:
            raise SimulationError(f"{releaser.label} gives back the slot of buffer {self.name!r} that {holder.label} "
                                  "has not taken yet")
        self.holders.remove(holder)
        self.free.append(releaser)


# --- checks of the input -------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def _check_stage(stage: Stage, by_name: Mapping[str, Stage], depths: Mapping[str, int]) -> None:
    """Check one stage against the others and against the buffer depths."""
    _require(stage.when in ("task_start", "step", "task_end"), f"{stage.name}: unknown when {stage.when!r}")
    _require(stage.when != "step" or stage.group in ("front", "back"), f"{stage.name}: unknown group {stage.group!r}")
    for other in stage.waits:
        _require(other in by_name, f"{stage.name}: waits for the unknown stage {other!r}")
        _require((stage.when, by_name[other].when) != ("task_start", "step"),
                 f"{stage.name}: a task_start stage cannot wait for the step stage {other!r}")
    _require(stage.buffer is None or _is_count(depths.get(stage.buffer), 1),
             f"{stage.name}: buffer {stage.buffer!r} needs an integer depth >= 1")
    if stage.freed_by is not None:
        _require(stage.buffer is not None, f"{stage.name}: freed_by without a buffer")
        _require(stage.freed_by in by_name, f"{stage.name}: freed by the unknown stage {stage.freed_by!r}")


def _is_count(value: object, least: int) -> bool:
    """Tell whether the value is an integer that is not less than ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_seconds(what: str, names: Collection[str], table: Mapping[str, float]) -> None:
    """Check that the table has a finite, non-negative time for each of the names."""
    for name in names:
        _require(name in table, f"{what}: no entry for {name!r}")
        _require(math.isfinite(table[name]) and table[name] >= 0, f"{what}: bad time {table[name]!r} of {name!r}")


def _check(stages: Sequence[Stage], durations: Mapping[str, float], tail_durations: Mapping[str, float], steps: int,
           lookahead: int, depths: Mapping[str, int], sync: Mapping[str, float], compute: Collection[str]) -> None:
    """Check all of the input of ``simulate``."""
    by_name = {stage.name: stage for stage in stages}
    _require(len(by_name) == len(stages), "two stages have the same name")
    _require(_is_count(steps, 1), "steps must be an integer >= 1")
    _require(_is_count(lookahead, 0), "lookahead must be an integer >= 0")
    for stage in stages:
        _check_stage(stage, by_name, depths)
    usual = {s.name for s in stages if s.when != "step" or steps > 1}
    _check_seconds("durations", usual, durations)
    _check_seconds("tail_durations", {s.name for s in stages if s.when == "step"}, tail_durations)
    _require(set(sync) <= set(by_name), f"sync of unknown stages {sorted(set(sync) - set(by_name))}")
    _check_seconds("sync", sync, sync)
    _require(set(compute) <= set(by_name), f"unknown compute stages {sorted(set(compute) - set(by_name))}")


# --- the program ---------------------------------------------------------------------------------------------------


def _program_order(stages: Sequence[Stage], steps: Sequence[int], lookahead: int) -> Iterator[tuple[Stage, int, int]]:
    """Yield (stage, task, iteration) in the order in which the instructions enter the queues of their pipes.

    The iterations of all tasks form one stream; ``steps`` has the number of each task.
    """
    stream = [(task, iteration) for task, n in enumerate(steps) for iteration in range(n)]
    for slot in range(len(stream) + lookahead):
        for group, place in (("front", slot), ("back", slot - lookahead)):
            if not 0 <= place < len(stream):
                continue
            task, iteration = stream[place]
            if group == "front" and iteration == 0:
                yield from ((s, task, -1) for s in stages if s.when == "task_start")
            yield from ((s, task, iteration) for s in stages if s.when == "step" and s.group == group)
            if group == "back" and iteration == steps[task] - 1:
                yield from ((s, task, -1) for s in stages if s.when == "task_end")


class Program:
    """All instructions of the tasks in program order, tied together by their waits and buffer releases."""

    def __init__(self, stages: Sequence[Stage], tasks: Sequence[Task], lookahead: int,
                 sync: Mapping[str, float]) -> None:
        self.last = [task.steps - 1 for task in tasks]
        self.instructions: list[Instruction] = []
        self.index: dict[tuple[str, int, int], Instruction] = {}
        self.by_name = {stage.name: stage for stage in stages}
        order = _program_order(stages, [task.steps for task in tasks], lookahead)
        for position, (stage, task, iteration) in enumerate(order):
            at_end = iteration == self.last[task]
            seconds = (tasks[task].tail_durations if at_end else tasks[task].durations)[stage.name]
            instr = Instruction(stage, iteration, position, seconds, sync.get(stage.name, 0), task=task)
            self.instructions.append(instr)
            self.index[stage.name, task, iteration] = instr
        for instr in self.instructions:
            self._connect(instr)

    def partner(self, instr: Instruction, name: str) -> Instruction:
        """Return the instruction of stage ``name`` that belongs to ``instr``: same iteration, only one, or last."""
        if self.by_name[name].when != "step":
            return self.index[name, instr.task, -1]
        return self.index[name, instr.task, self.last[instr.task] if instr.iteration < 0 else instr.iteration]

    def _connect(self, instr: Instruction) -> None:
        """Register the instruction with those it waits for and with the one that frees its buffer slot."""
        instr.deps = [self.partner(instr, name) for name in instr.stage.waits]
        for dep in instr.deps:
            dep.waiters.append(instr)
        if instr.stage.freed_by is not None:
            self.partner(instr, instr.stage.freed_by).frees.append(instr)


# --- the event loop ------------------------------------------------------------------------------------------------


class Simulator:
    """Event loop: a heap of future events, pipes with FIFO queues, counted signals and buffer slots."""

    def __init__(self, program: Program, depths: Mapping[str, int]) -> None:
        self.now: float = 0
        self.started: list[Instruction] = []
        self.pipes: dict[str, Pipe] = {}
        self.pools: dict[str, BufferPool] = {}
        self._heap: list[tuple[float, int, Callable[[Instruction], None], Instruction]] = []
        self._serial = count()
        for instr in program.instructions:
            stage = instr.stage
            self.pipes.setdefault(stage.pipe, Pipe(stage.pipe)).queue.append(instr)
            if stage.buffer is not None and stage.buffer not in self.pools:
                self.pools[stage.buffer] = BufferPool(stage.buffer, depths[stage.buffer])

    def run(self) -> list[Instruction]:
        """Play all events; return the instructions in the order in which they started."""
        self._start_heads()
        while self._heap:
            self.now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self.now:
                _, _, action, instr = heapq.heappop(self._heap)
                action(instr)
            self._start_heads()
        if any(pipe.queue for pipe in self.pipes.values()):
            raise DeadlockError(self._describe_deadlock())
        return self.started

    def _schedule(self, delay: float, action: Callable[[Instruction], None], instr: Instruction) -> None:
        """Put an event on the heap; events of the same time keep the order in which they were scheduled."""
        heapq.heappush(self._heap, (self.now + delay, next(self._serial), action, instr))

    def _heads(self) -> list[Instruction]:
        """Return the heads of the queues in program order, those behind a running instruction too."""
        return sorted((pipe.queue[0] for pipe in self.pipes.values() if pipe.queue), key=lambda i: i.position)

    def _start_heads(self) -> None:
        """Start every head that can start now; one pass is enough, for a start enables nothing by itself."""
        for instr in self._heads():
            if self._can_start(instr):
                self._start(instr)

    def _can_start(self, instr: Instruction) -> bool:
        """Tell whether the pipe is idle, all signals have arrived and a buffer slot is free (if one is needed)."""
        pool = self.pools.get(instr.stage.buffer)
        idle = self.pipes[instr.stage.pipe].running is None
        return idle and instr.signals == len(instr.deps) and (pool is None or bool(pool.free))

    def _start(self, instr: Instruction) -> None:
        """Move the head of a queue into execution and schedule its completion."""
        pipe = self.pipes[instr.stage.pipe]
        pipe.running = pipe.queue.popleft()
        instr.start, instr.pipe_free_at = self.now, pipe.free_at
        if instr.stage.buffer is not None:
            self.pools[instr.stage.buffer].take(instr)
        self.started.append(instr)
        self._schedule(instr.duration, self._finish, instr)

    def _finish(self, instr: Instruction) -> None:
        """Completion event: free the pipe, send the signals, give back buffer slots."""
        pipe = self.pipes[instr.stage.pipe]
        instr.end, pipe.running, pipe.free_at = self.now, None, self.now
        for waiter in instr.waiters:
            self._schedule(waiter.sync, self._signal, waiter)
        for holder in instr.frees:
            self.pools[holder.stage.buffer].give_back(holder, instr)

    @staticmethod
    def _signal(instr: Instruction) -> None:
        """Arrival of one of the signals that the instruction waits for."""
        instr.signals += 1

    def _obstacles(self, instr: Instruction) -> list[str]:
        """Describe what the blocked head of a queue waits for, once nothing is under way any more."""
        obstacles = [dep.label for dep in instr.deps if dep.end is None]
        pool = self.pools.get(instr.stage.buffer)
        if pool is not None and not pool.free:
            obstacles.append(self._describe_full(pool))
        return obstacles

    @staticmethod
    def _describe_full(pool: BufferPool) -> str:
        """Describe a buffer without free slots: its depth, and who holds the slots until what finishes."""
        held = ", ".join(f"{h.label} until {h.stage.freed_by or 'never'}" for h in pool.holders)
        return f"a slot of buffer {pool.name!r} (depth {pool.depth}, held by {held})"

    def _describe_deadlock(self) -> str:
        """Name the blocked head of every queue and what it waits for, the earliest in program order first."""
        lines = [f"{instr.label} on pipe {instr.stage.pipe!r} waits for {' and '.join(self._obstacles(instr))}"
                 for instr in self._heads()]
        return f"deadlock at time {self.now}: " + "; ".join(lines)


# --- accounting ----------------------------------------------------------------------------------------------------


def _upstream_compute(instr: Instruction, compute: Collection[str]) -> list[Instruction]:
    """Follow the waits backwards through non-compute instructions up to the first compute ones."""
    found, seen, todo = [], set(), list(instr.deps)
    while todo:
        dep = todo.pop()
        if dep in seen:
            continue
        seen.add(dep)
        if dep.stage.name in compute:
            found.append(dep)
        else:
            todo.extend(dep.deps)
    return found


def _exposed_wait(instr: Instruction, compute: Collection[str]) -> float:
    """Return the time for which the idle pipe waited for transfers or hand-overs only."""
    bounds = [instr.pipe_free_at] + [dep.end for dep in _upstream_compute(instr, compute)]
    if instr.slot_from is not None and instr.slot_from.stage.name in compute:
        bounds.append(instr.slot_from.end)
    return max(0, instr.start - max(bounds))


def simulate(stages: Sequence[Stage], durations: Mapping[str, float], tail_durations: Mapping[str, float], steps: int,
             lookahead: int, depths: Mapping[str, int], sync: Mapping[str, float] | None = None,
             compute: Collection[str] = frozenset()) -> Result:
    """Play one task and return its makespan, events, busy time per stage and exposed wait per compute stage.

    ``durations`` holds for iterations 0..steps-2 and for the start and end stages, ``tail_durations`` for iteration
    steps-1.  ``depths`` gives the slots of each buffer, ``sync`` the latency of hand-overs per waiting stage.
    Raises ValueError for bad input and DeadlockError if some instruction can never start.
    """
    sync, compute = sync or {}, frozenset(compute)
    return simulate_stream(stages, [Task(durations, tail_durations, steps)], lookahead, depths, sync, compute)


def simulate_stream(stages: Sequence[Stage], tasks: Sequence[Task], lookahead: int, depths: Mapping[str, int],
                    sync: Mapping[str, float] | None = None, compute: Collection[str] = frozenset()) -> Result:
    """Play several tasks one behind the other without draining: the iterations of all of them are one stream.

    The stages at the start of a task come just before its first iteration, those at its end just behind its last one;
    their buffers are given back by the last iteration of their task.
    """
    sync, compute = sync or {}, frozenset(compute)
    for task in tasks:
        _check(stages, *task, lookahead, depths, sync, compute)
    done = Simulator(Program(stages, tasks, lookahead, sync), depths).run()
    busy = {stage.name: 0 for stage in stages}
    wait = {stage.name: 0 for stage in stages if stage.name in compute}
    for instr in done:
        busy[instr.stage.name] += instr.duration
        if instr.stage.name in compute:
            wait[instr.stage.name] += _exposed_wait(instr, compute)
    events = [Event(i.stage.name, i.iteration, i.stage.pipe, i.start, i.end, i.task) for i in done]
    return Result(max((i.end for i in done), default=0), events, busy, wait)
