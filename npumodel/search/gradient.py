"""Gradient search of a tile: real knobs, many starts at once, annealed, then rounded, and polished exactly together
with some points from anywhere.

    minimise over u = (log2 block_q, log2 block_kv, buffers, lookahead):
        log2 seconds(u; T)  +  PENALTY * sum over buffers of max(0, log2(bytes needed / bytes available))

with the temperature T of the relaxed model lowered geometrically, so that Adam first sees a smooth landscape and in the
end nearly the real one. Every start keeps its lookahead, a whole number: the starts share out all of them. The whole
descent, starts x steps, is one compiled function per architecture and mask: device, problem and bounds are traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from npumodel.hardware import DeviceSpec
from npumodel.model.cost import WITHOUT_FUSION, Options, price
from npumodel.model.tiling import Problem
from npumodel.search.space import KNOBS, Chip, Space, chip, footprint
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

STARTS = 32
STEPS = 12
#: Points anywhere in the space that are priced beside the ends of the descent: it finds valleys, not all of them.
SCATTERED = 512
#: A cost with its gradient counts as this many evaluations.
GRADIENT_EVALS = 3

#: Temperature of the relaxed counts: first and last.
HOT, COLD = 1.0, 0.02
#: Adam's step in octaves (and in buffers): first, with a cosine decay over the descent.
LEARNING_RATE = 0.6
#: Octaves of time per octave of bytes too many: more than any plan can gain by growing.
PENALTY = 4.0


class Path(NamedTuple):
    """A descent, for a plot: knobs [steps, starts, 4] = (block_q, block_kv, buffers, lookahead) as reals, relaxed
    seconds [steps, starts] and temperature [steps], each before the step; end [starts, 4]: knobs after the last."""

    knobs: np.ndarray
    seconds: np.ndarray
    temperature: np.ndarray
    end: np.ndarray


class Bounds(NamedTuple):
    """Lowest and highest u [4], and bytes available [6] (infinite where nothing is enforced)."""

    low: Any
    high: Any
    available: Any


class State(NamedTuple):
    """Where the descent is: u [starts, 4], Adam's moments, and what it has seen so far [STEPS, ...]."""

    u: Any
    adam: Any
    knobs: Any
    seconds: Any


def to_u(tiles: TileConfig) -> np.ndarray:
    """Tiles [n] as coordinates [n, 4]."""
    columns = [np.log2(tiles.block_q), np.log2(tiles.block_kv), tiles.buffers, tiles.lookahead]
    return np.stack([np.asarray(column, float) for column in columns], -1)


def to_tile(u) -> TileConfig:
    """Coordinates [4, ...] as tiles of reals, the lookahead without a gradient."""
    return TileConfig(2.0 ** u[0], 2.0 ** u[1], u[2], jax.lax.stop_gradient(u[3]))


def spread(space: Space, seed: int, anchors: Sequence[TileConfig], count: int = STARTS) -> np.ndarray:
    """Starting coordinates [count, 4]: the anchors, then points spread evenly over the box (an additive recurrence,
    shifted by the seed), with whole lookaheads."""
    low, high = (to_u(space.at([point]))[0] for point in (0, space.size - 1))
    golden = 1.1673039782614187  # x^5 = x + 1: the generalised golden ratio in 4 dimensions
    steps = (1 / golden) ** np.arange(1, len(KNOBS) + 1)
    shift = np.random.default_rng(seed).random(len(KNOBS))
    points = (shift + np.arange(1, count + 1)[:, None] * steps) % 1
    anchored = [to_u(space.at([space.point(tile)]))[0] for tile in anchors]
    spread_out = low + points * (high - low)
    spread_out[:, -1] = np.floor(low[-1] + points[:, -1] * (high[-1] + 1 - low[-1]))
    return np.concatenate([np.reshape(anchored, (-1, len(KNOBS))), spread_out])[:count]


def descend(
    shape: AttentionShape,
    device: DeviceSpec,
    space: Space,
    starts: np.ndarray,
    steps: int = STEPS,
    segment: int | None = None,
    stop: Callable[[int], bool] = lambda done: False,
) -> Path:
    """Run `steps` steps (at most STEPS) from `starts` [STARTS, 4].

    segment: look up every so many steps, and give `stop` the steps done; true ends the descent.
    Raises ValueError when the device does not multiply the dtype.
    """
    c, problem = chip(device, shape.dtype), jax.tree.map(_real, Problem.of(shape))
    low, high = (to_u(space.at([point]))[0] for point in (0, space.size - 1))
    bounds = jax.tree.map(_real, Bounds(low, high, c.available))
    state, done = _start(_real(starts)), 0
    while done < steps:
        until = min(steps, done + (segment or steps))
        state = _descend(c, problem, bounds, state, np.int32(done), np.int32(until), masked=shape.mask is not None)
        done = until
        if segment and stop(done):
            break
    knobs, seconds = np.asarray(state.knobs)[:done], np.asarray(state.seconds)[:done]
    return Path(_sizes(knobs), seconds, _temperature(np.arange(done)), _sizes(np.asarray(state.u)))


def _real(x) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float))


def _sizes(u: np.ndarray) -> np.ndarray:
    return np.concatenate([2.0 ** u[..., :2], u[..., 2:]], -1)


def _temperature(step):
    return HOT * (COLD / HOT) ** (step / (STEPS - 1))


_ADAM = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS, alpha=0.1), b1=0.8, b2=0.95)


def _start(u: np.ndarray) -> State:
    blank = np.zeros((STEPS, *u.shape), u.dtype)
    return State(u, jax.tree.map(np.asarray, _ADAM.init(jnp.asarray(u))), blank, blank[..., 0])


@functools.partial(jax.jit, static_argnames="masked", compiler_options=WITHOUT_FUSION)
def _descend(c: Chip, p: Problem, bounds: Bounds, state: State, first, last, masked: bool) -> State:
    """Steps first .. last - 1 of the descent."""

    def step(i, s: State) -> State:
        value = functools.partial(_objective, c, p, bounds, _temperature(i), masked)
        slope, seconds = jax.grad(value, has_aux=True)(s.u)
        move, adam = _ADAM.update(jnp.nan_to_num(slope, posinf=0.0, neginf=0.0), s.adam)
        u = jnp.clip(s.u + jnp.asarray(move), bounds.low[None], bounds.high[None])
        return State(u, adam, s.knobs.at[i].set(s.u), s.seconds.at[i].set(seconds))

    return jax.lax.fori_loop(first, last, step, state)


def _objective(c: Chip, p: Problem, bounds: Bounds, temperature, masked: bool, u):
    """(what is minimised, added up over all starts, which do not depend on each other; relaxed seconds [starts]) at u
    [starts, 4]."""
    tile = to_tile(u.T)
    options = Options("", masked, waits=False, whole_lookahead=True)
    seconds = price(c.t, p, tile, c.d, options, temperature).seconds
    over = jnp.log2(jnp.maximum(footprint(p, tile, c.d, masked), 1.0) / bounds.available[:, None])
    return (jnp.log2(seconds) + PENALTY * jnp.maximum(over, 0.0).sum(0)).sum(), seconds


# Back to the lattice -------------------------------------------------------------------------------------------------


def scattered(space: Space, seed: int) -> np.ndarray:
    """Lattice points anywhere in the space."""
    return np.random.default_rng(seed).integers(0, space.size, SCATTERED)


def rounded(space: Space, knobs: np.ndarray) -> np.ndarray:
    """The lattice points around real knobs [n, 4]: below and above along every axis."""
    below = []
    for i, axis in enumerate(space.axes):
        below.append(np.clip(np.searchsorted(axis, knobs[:, i] + 1e-6, side="right") - 1, 0, len(axis) - 1))
    corners = np.stack(np.meshgrid(*[[0, 1]] * len(KNOBS), indexing="ij"), -1).reshape(-1, len(KNOBS))
    return space.points(np.stack(below, -1)[:, None] + corners)


def _moves() -> np.ndarray:
    """[m, 4] steps along the axes: one along one or two of them at once; up to two along both block axes at once; three
    and four along one block axis."""
    grid = np.stack(np.meshgrid(*[np.arange(-4, 5)] * len(KNOBS), indexing="ij"), -1).reshape(-1, len(KNOBS))
    size, moved = abs(grid), (grid != 0).sum(-1)
    pair = (size.max(-1) == 1) & (moved <= 2)
    blocks = (size[:, 2:] == 0).all(-1) & (moved > 0) & ((size.max(-1) <= 2) | (moved == 1))
    return grid[pair | blocks]


MOVES = _moves()


def neighbours(space: Space, points: Sequence[int]) -> np.ndarray:
    """The lattice points that one of MOVES leads to, from any of these points."""
    return space.points(space.places(points)[:, None] + MOVES)


#: Points whose neighbours are tried at once.
_KEEP = 8


def polish(space: Space, price_points: Callable[[np.ndarray], bool], best: Callable[[int], Sequence[int]]):
    """Price the neighbours of the best few points until those stay the same.

    price_points: prices what it has not yet and is legal, false when the budget is spent; best(n): the n best points.
    """
    before: Sequence[int] = ()
    while (now := best(_KEEP)) != before:
        before = now
        if not price_points(neighbours(space, now)):
            return
