"""Gradient descent over real knobs: many starts at once, annealed. What it ends at is rounded, and polished exactly.

    minimise over u = (log2 block_q, log2 block_kv, buffers, log2 split_kv, log2 cores):
        log2 seconds(u; T)  +  PENALTY * sum over buffers of max(0, log2(bytes needed / bytes available))

with the temperature T of the relaxed model lowered geometrically, so that Adam first sees a smooth landscape and in the
end nearly the real one. Every start keeps its lookahead, its packed heads and its pieces of K and V: the starts share
out all of them. The whole descent, starts x steps, is one compiled function per architecture, mask and kind of plan:
device, problem and bounds are traced.
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
from npumodel.search.space import KINDS, NUMBERS, Chip, Space, chip, footprint
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

STARTS = 16
STEPS = 8
#: Knobs that stay as a start has them, and knobs that are no sizes: moved as they are, not in octaves.
FIXED = ("kv_pieces", "lookahead", "heads_packed")
COUNTS = ("buffers", "lookahead")
#: A cost with its gradient counts as this many evaluations.
GRADIENT_EVALS = 3

#: Temperature of the relaxed counts: first and last.
HOT, COLD = 1.0, 0.02
#: Adam's step in octaves (and in buffers): first, with a cosine decay over the descent.
LEARNING_RATE = 0.6
#: Octaves of time per octave of bytes too many: more than any plan can gain by growing.
PENALTY = 4.0


class Path(NamedTuple):
    """A descent, for a plot: knobs [steps, starts, 8] in the order of `space.NUMBERS` as reals, relaxed seconds [steps,
    starts] and temperature [steps], each before the step; end [starts, 8]: knobs after the last."""

    knobs: np.ndarray
    seconds: np.ndarray
    temperature: np.ndarray
    end: np.ndarray


class Bounds(NamedTuple):
    """Lowest and highest u [8], and bytes available [6] (infinite where nothing is enforced)."""

    low: Any
    high: Any
    available: Any


class State(NamedTuple):
    """Where the descent is: u [starts, 8], Adam's moments, and what it has seen so far [STEPS, ...]."""

    u: Any
    adam: Any
    knobs: Any
    seconds: Any


class Kind(NamedTuple):
    """What is fixed at compile time: the kind of plan, whether there is a mask, whether K and V come in pieces."""

    plan: tuple
    masked: bool
    in_pieces: bool


_COUNT = np.array([name in COUNTS for name in NUMBERS])


def axes_of(space: Space) -> list[np.ndarray]:
    """The values of the space's numbers as coordinates: log2, but for counts."""
    numbers = [np.array(getattr(space, name), float) for name in NUMBERS]
    return [axis if count else np.log2(axis) for axis, count in zip(numbers, _COUNT, strict=True)]


def to_tile(u, plan: tuple) -> TileConfig:
    """Coordinates [8, ...] as tiles of reals; what stays as it is has no gradient."""
    knobs: dict[str, Any] = {}
    for name, x in zip(NUMBERS, u, strict=True):
        size = x if name in COUNTS else 2.0**x
        knobs[name] = jax.lax.stop_gradient(size) if name in FIXED else size
    return TileConfig(**knobs, **dict(zip(KINDS, plan, strict=True)))


def spread(space: Space, seed: int, anchors: Sequence[TileConfig], count: int = STARTS) -> np.ndarray:
    """Starting coordinates [count, 8]: the anchors, then points spread evenly over the box (an additive recurrence,
    shifted by the seed), those that stay on values of their axes."""
    axes = axes_of(space)
    golden = _generalised_golden(len(NUMBERS))
    shift = np.random.default_rng(seed).random(len(NUMBERS))
    points = (shift + np.arange(1, count + 1)[:, None] * (1 / golden) ** np.arange(1, len(NUMBERS) + 1)) % 1
    columns = []
    for name, axis, share in zip(NUMBERS, axes, points.T, strict=True):
        low, high = axis.min(), axis.max()
        columns.append(axis[(share * len(axis)).astype(int)] if name in FIXED else low + share * (high - low))
    anchored = [
        [axis[getattr(space, name).index(getattr(tile, name))] for name, axis in zip(NUMBERS, axes, strict=True)]
        for tile in anchors
        if tile in space
    ]
    return np.concatenate([np.reshape(anchored, (-1, len(NUMBERS))), np.stack(columns, -1)])[:count]


def _generalised_golden(dimensions: int) -> float:
    """The root of x^(d + 1) = x + 1."""
    x = 1.5
    for _ in range(60):
        x = (1 + x) ** (1 / (dimensions + 1))
    return x


def descend(
    shape: AttentionShape,
    device: DeviceSpec,
    space: Space,
    starts: np.ndarray,
    steps: int = STEPS,
    segment: int | None = None,
    stop: Callable[[int], bool] = lambda done: False,
) -> Path:
    """Run `steps` steps (at most STEPS) from `starts` [STARTS, 8], all of the first kind of plan of the space.

    segment: look up every so many steps, and give `stop` the steps done; true ends the descent.
    Raises ValueError when the device does not multiply the dtype.
    """
    c, problem = chip(device, shape.dtype), jax.tree.map(_real, Problem.of(shape))
    low, high = (np.array([f(axis) for axis in axes_of(space)]) for f in (np.min, np.max))
    most = NUMBERS.index("cores")
    high[most] = max(low[most], min(high[most], np.log2(float(device.cube_cores))))
    bounds = jax.tree.map(_real, Bounds(low, high, c.available))
    kind = Kind(tuple(getattr(space, name)[0] for name in KINDS), shape.mask is not None, space.kv_pieces != (1,))
    state, done = _start(_real(starts)), 0
    while done < steps:
        until = min(steps, done + (segment or steps))
        state = _descend(c, problem, bounds, state, np.int32(done), np.int32(until), kind=kind)
        done = until
        if segment and stop(done):
            break
    knobs, seconds = np.asarray(state.knobs)[:done], np.asarray(state.seconds)[:done]
    return Path(_sizes(knobs), seconds, _temperature(np.arange(done)), _sizes(np.asarray(state.u)))


def _real(x) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float))


def _sizes(u: np.ndarray) -> np.ndarray:
    return np.where(_COUNT, u, 2.0**u)


def _temperature(step):
    return HOT * (COLD / HOT) ** (step / (STEPS - 1))


_ADAM = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS, alpha=0.1), b1=0.8, b2=0.95)


def _start(u: np.ndarray) -> State:
    blank = np.zeros((STEPS, *u.shape), u.dtype)
    return State(u, jax.tree.map(np.asarray, _ADAM.init(jnp.asarray(u))), blank, blank[..., 0])


@functools.partial(jax.jit, static_argnames="kind", compiler_options=WITHOUT_FUSION)
def _descend(c: Chip, p: Problem, bounds: Bounds, state: State, first, last, kind: Kind) -> State:
    """Steps first .. last - 1 of the descent."""

    def step(i, s: State) -> State:
        value = functools.partial(_objective, c, p, bounds, _temperature(i), kind)
        slope, seconds = jax.grad(value, has_aux=True)(s.u)
        move, adam = _ADAM.update(jnp.nan_to_num(slope, posinf=0.0, neginf=0.0), s.adam)
        u = jnp.clip(s.u + jnp.asarray(move), bounds.low[None], bounds.high[None])
        return State(u, adam, s.knobs.at[i].set(s.u), s.seconds.at[i].set(seconds))

    return jax.lax.fori_loop(first, last, step, state)


def _objective(c: Chip, p: Problem, bounds: Bounds, temperature, kind: Kind, u):
    """(what is minimised, added up over all starts, which do not depend on each other; relaxed seconds [starts]) at u
    [starts, 8]."""
    tile = to_tile(u.T, kind.plan)
    options = Options("", kind.masked, waits=False, in_pieces=kind.in_pieces, whole_lookahead=True)
    seconds = price(c.t, p, tile, c.d, options, temperature).seconds
    over = jnp.log2(jnp.maximum(footprint(p, tile, c.d, kind.masked), 1.0) / bounds.available[:, None])
    return (jnp.log2(seconds) + PENALTY * jnp.maximum(over, 0.0).sum(0)).sum(), seconds


def rounded(space: Space, knobs: np.ndarray) -> np.ndarray:
    """The lattice points nearest to real knobs [n, 8], of the first kind of plan, and the ones with either block on its
    other side."""
    u = np.where(_COUNT, knobs, np.log2(np.where(_COUNT, 1.0, knobs)))
    places = [abs(axis[None] - column[:, None]).argmin(-1) for axis, column in zip(axes_of(space), u.T, strict=True)]
    nearest = np.zeros((len(u), len(space.dims)), int)
    nearest[:, : len(NUMBERS)] = np.stack(places, -1)
    other = [nearest]
    for i in range(2):
        axis = axes_of(space)[i]
        shift = np.zeros_like(nearest)
        shift[:, i] = np.where(u[:, i] >= axis[nearest[:, i]], 1, -1)
        other += [place + shift for place in other]
    return space.points(np.stack(other))
