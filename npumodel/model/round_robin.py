"""Tasks dealt out like cards: core c gets the tasks c, c + C, c + 2C, ... of the launch order (heads outer, q blocks
inner, parts of split keys innermost).

Where the tasks of a head and the number of cores C have a common divisor g, a core only ever meets every g-th task of
a head: of a causal call it may get nothing but long ones. All heads are alike, so the tasks of a core repeat after
tasks of a head / g of them: so many whole rounds, and the beginning of one more. Which core is the busiest has no
closed form: all of them are looked at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..relax import floor_sum
from .pipeline import Lengths, TaskTimes, at_steps, plus
from .tiling import Blocks, Problem, Traffic, steps_of_block

#: Tasks of a round, and tasks beyond whole rounds, that are looked at one by one. More are taken to be mean tasks of
#: the head, and as much longer or shorter as the sum of their places says.
TASKS = 64


class Deal(NamedTuple):
    """How the tasks are dealt: cores C, tasks of the call, most tasks of a core, tasks of a head, their common divisor
    with C, and tasks of a core after which its places in a head repeat. Whole numbers, without gradient."""

    cores: Any
    tasks: Any
    waves: Any
    per_head: Any
    common: Any
    round: Any


class Kinds(NamedTuple):
    """The tasks that there are. every: of 0, 1, .. full steps and full rows; end: what the ragged columns of the last
    kv block change; ragged: the task of ragged rows that ends with them; mean: the mean task of a head."""

    every: Lengths
    end: TaskTimes
    ragged: TaskTimes
    mean: TaskTimes


class Share(NamedTuple):
    """Tasks of one core. places, times [TASKS, ...]: place in the head, 0 .. per_head - 1, and how often, of tasks that
    are looked at; mean: number of all others; moved: by how many places these lie behind mean ones, all together."""

    places: Any
    times: Any
    mean: Any
    moved: Any


def busiest(p: Problem, b: Blocks, x: Traffic, kinds: Kinds, mean_counts: dict) -> tuple[Any, TaskTimes, dict]:
    """The core that works longest: its number, its tasks, added up, and how often each stage runs in them, as
    `mean_counts`, which are those of a mean task (see `cost._counts`)."""
    counts = [x.active, x.tasks, x.waves, b.q_blocks * b.parts]
    counts = [jnp.maximum(jnp.round(jax.lax.stop_gradient(n)), 1.0) for n in counts]
    deal = _deal(*jnp.broadcast_arrays(*counts, kinds.ragged.makespan)[:4])
    slope = _slope(p, b, deal.per_head)
    core = _longest(*jax.tree.map(jax.lax.stop_gradient, (p, b, deal, kinds, slope)))
    return core, *_add_up(p, b, kinds, mean_counts, slope, _share(deal, core))


def _deal(cores, tasks, waves, per_head) -> Deal:
    common = _common_divisor(cores, per_head)
    return Deal(cores, tasks, waves, per_head, common, per_head / common)


def _common_divisor(a, b):
    """The greatest one of whole numbers, by Euclid; exact in floating point."""

    def step(pair):
        a, b = pair
        return jnp.where(b > 0, b, a), jnp.where(b > 0, jnp.mod(a, jnp.maximum(b, 1.0)), 0.0)

    return jax.lax.while_loop(lambda pair: (pair[1] > 0).any(), step, (a, b))[0]


def _share(deal: Deal, core) -> tuple[Share, ...]:
    """The tasks of one core: those of its whole rounds, by their places, and those beyond, as they come."""
    fewer = core >= deal.tasks - (deal.waves - 1) * deal.cores  # the last wave does not reach this core
    count = deal.waves - jnp.where(fewer, 1.0, 0.0)
    rounds = jnp.floor(count / deal.round)
    rest = count - rounds * deal.round
    first = jnp.mod(core, deal.common)
    in_round = deal.round * (first + deal.common * (deal.round - 1) / 2)
    in_rest = rest * core + deal.cores * rest * (rest - 1) / 2
    in_rest = in_rest - deal.per_head * floor_sum(rest, deal.cores, core, deal.per_head)

    def share(count, place_of, times, in_all) -> Share:  # number n of `count` tasks is at place_of(n), `times` times
        def one(number):
            return place_of(number), jnp.where(number < jnp.where(few, count, 0.0), times, 0.0)

        few = count <= TASKS
        many = jnp.where(few, 0.0, times * count)
        moved = jnp.where(few, 0.0, times * in_all - many * (deal.per_head - 1) / 2)
        return Share(*jax.vmap(one)(jnp.arange(float(TASKS))), many, moved)

    return (
        share(deal.round, lambda n: first + n * deal.common, rounds, in_round),
        share(rest, lambda n: jnp.mod(core + n * deal.cores, deal.per_head), 1.0, in_rest),
    )


def _steps(p: Problem, b: Blocks, places):
    """(steps, whether its rows are ragged, whether it ends with the ragged columns) of the tasks at these places."""
    block = jnp.floor(places / b.parts)
    part = places - block * b.parts
    last = block >= b.q_blocks - 1
    steps = jnp.where(last, b.last_steps, steps_of_block(p, b.rows, b.cols, b.kv_blocks, block))
    to_end = (part >= b.parts - 1) & (block >= b.q_blocks - b.reach_end)
    return jnp.floor((steps + part) / b.parts), last, to_end


class Slope(NamedTuple):
    """Steps that a task at the next place of the head has more, by least squares; and the mean steps of a task."""

    steps: Any
    mean: Any


def _slope(p: Problem, b: Blocks, per_head) -> Slope:
    def one(number):
        place = jnp.floor((number + 0.5) * per_head / TASKS)
        return place, _steps(p, b, place)[0]

    places, steps = jax.vmap(one)(jnp.arange(float(TASKS)))
    off = places - places.mean(0)[None]
    spread = (off * off).sum(0)
    return Slope((off * steps).sum(0) / jnp.where(spread > 0, spread, 1.0), steps.mean(0))


def _longest(p: Problem, b: Blocks, deal: Deal, kinds: Kinds, slope: Slope):
    """The core whose tasks take longest together; of equals the first."""

    def only(times: TaskTimes) -> TaskTimes:
        return TaskTimes(times.makespan, 0.0 * times.makespan, {})

    kinds = Kinds(Lengths(*map(only, kinds.every)), *map(only, kinds[1:]))

    def look(carry):
        core, longest, which = carry
        seconds = _add_up(p, b, kinds, {}, slope, _share(deal, core))[0].makespan
        better = (seconds > longest) & (core < deal.cores)
        return core + 1, jnp.where(better, seconds, longest), jnp.where(better, core, which)

    none = 0.0 * (deal.cores + kinds.ragged.makespan)
    return jax.lax.while_loop(lambda carry: (carry[0] < deal.cores).any(), look, (none, none - 1, none))[2]


def _add_up(
    p: Problem, b: Blocks, kinds: Kinds, mean_counts: dict, slope: Slope, shares: tuple[Share, ...]
) -> tuple[TaskTimes, dict]:
    def one(place, often):
        steps, last, to_end = _steps(p, b, place)
        times = plus(at_steps(kinds.every, steps), kinds.end, jnp.where(to_end, 1.0, 0.0))
        times = jax.tree.map(lambda usual, ragged: jnp.where(last & to_end, ragged, usual), times, kinds.ragged)
        full, ends = jnp.where(last, 0.0, often), jnp.where(to_end, 1.0, 0.0)
        tail, none, some = often - full, 0.0 * often, jnp.where(steps > 0, 1.0, 0.0)
        counts = {
            "step": (full * (steps - ends), full * ends, tail * (steps - ends), tail * ends),
            "task_start": (full * some, none, tail * some, none),
            "task_end": (full, none, tail, none),
        }
        return jax.tree.map(lambda x: often * x, times), {name: counts[name] for name in mean_counts}

    def total(share: Share):
        times, counts = jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(share.places, share.times))
        low = jnp.floor(slope.mean)
        growth = plus(at_steps(kinds.every, low + 1), at_steps(kinds.every, low), -1.0)
        more = share.moved * slope.steps
        times = plus(plus(times, kinds.mean, share.mean), growth, more)
        counts = jax.tree.map(lambda n, mean: n + share.mean * mean, counts, mean_counts)
        if counts:
            inner, *others = counts["step"]
            counts = counts | {"step": (inner + more, *others)}
        return times, counts

    (times, counts), (rest, more) = map(total, shares)
    return plus(times, rest), jax.tree.map(jnp.add, counts, more)
