"""Ways to search a space. Each is a generator that asks for points by number, `going = yield points`, and goes on when
their prices are in the Ledger, so that any number of searches advance together (`ledger.run`). `going`: whether the
budget sufficed. A search returns when it has nothing left to try; the best points are then the ledger's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence

import numpy as np

from npumodel.search import gradient
from npumodel.search.ledger import LOOK, Ledger, Search
from npumodel.search.rules import ladder, rule_of_thumb, vendor_rule
from npumodel.search.space import KNOBS, Space
from npumodel.tile import TileConfig

#: Points anywhere in the space that a search with a polish prices first, for each seed.
SCATTERED = 256
#: Points whose neighbours along one axis, and along two, are tried at once. With half as many, 1 of 20 searches ended
#: 1.6 % above the optimum.
_POLISHED = 8
#: Steps along the block axes, when two axes move at once; along all others it is one.
_REACH = 3
#: Chains of annealing, members of an evolution; and rounds of either.
_POPULATION, _ROUNDS = 64, 64
#: Share of the log of the prices seen by which annealing climbs at first; and in the end.
_HOT, _COLD = 0.5, 0.01
#: Steps of the descent between two looks at the clock.
_SEGMENT = 4


def by_gradient(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """Descend, round, polish. A budget leaves two thirds for what follows the descent."""
    per_step = gradient.GRADIENT_EVALS * gradient.STARTS
    ledger.expected = gradient.STEPS * per_step + SCATTERED + LOOK
    yield ledger.space.sample(SCATTERED, seed)
    steps = int(min(gradient.STEPS, ledger.left() / (3 * per_step)))
    ledger.complete &= steps == gradient.STEPS
    done = 0

    def stop(now: int) -> bool:
        nonlocal done
        done, fresh = now, now - done
        return not ledger.spend(fresh * per_step)

    starts = gradient.spread(ledger.space, seed, anchors)
    segment = _SEGMENT if ledger.looks_up else None
    path = gradient.descend(ledger.shape, ledger.device, ledger.space, starts, steps, segment, stop)
    ledger.complete &= len(path.seconds) == gradient.STEPS
    ledger.spend((len(path.seconds) - done) * per_step)
    if (yield gradient.rounded(ledger.space, path.end)):
        yield from polish(ledger)
    return path


def by_coordinates(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """Points anywhere; what is around the best of them, as long as that finds something better."""
    ledger.expected = 4 * LOOK
    if (yield ledger.space.sample(SCATTERED, seed)):
        yield from polish(ledger)


def polish(ledger: Ledger) -> Generator[np.ndarray, bool, None]:
    """Price what is around the best points until these stay the same or the budget is spent: all values along one axis;
    when that finds nothing more, a few steps along two axes at once."""
    before: np.ndarray | None = None
    while True:
        best = ledger.best(_POLISHED)
        if not (yield along_one(ledger.space, best)):
            return
        if not np.array_equal(ledger.best(_POLISHED), best):
            continue
        if before is not None and np.array_equal(best, before) or not (yield along_two(ledger.space, best)):
            return
        before = ledger.best(_POLISHED)


def along_one(space: Space, points: np.ndarray) -> np.ndarray:
    """The points that differ from one of these in a single knob."""
    places, found = space.places(points), []
    for i, size in enumerate(space.dims):
        moved = np.repeat(places[:, None], size, 1)
        moved[:, :, i] = np.arange(size)
        found.append(moved.reshape(-1, len(KNOBS)))
    return space.points(np.concatenate(found))


def along_two(space: Space, points: np.ndarray) -> np.ndarray:
    """The points a few steps away from one of these along two axes at once."""
    moves = [np.zeros(len(KNOBS), int)]
    steps = [range(-reach, reach + 1) for reach in (_REACH if name.startswith("block") else 1 for name in KNOBS)]
    for i, j in itertools.combinations([i for i, size in enumerate(space.dims) if size > 1], 2):
        for move in itertools.product(steps[i], steps[j]):
            moves.append(np.zeros(len(KNOBS), int))
            moves[-1][[i, j]] = move
    return space.points(space.places(points)[:, None] + np.stack(moves))


def at_random(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """Points anywhere, until the budget or the space is used up."""
    rng, size = np.random.default_rng(seed), ledger.space.size
    if ledger.max_evals is None and ledger.deadline is None:
        ledger.max_evals = ledger.evals + 8 * LOOK
    while (yield rng.integers(0, size, LOOK)) and len(ledger.points) < size:
        pass


def by_annealing(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """Simulated annealing (Metropolis): chains side by side, each moving along one axis at a time."""
    rng, space = np.random.default_rng(seed), ledger.space
    rounds = _rounds(ledger)
    now = yield from _population(ledger, rng)
    for i in range(rounds):
        heat = _HOT * (_COLD / _HOT) ** (i / max(1, rounds - 1))
        places = space.places(now)
        axis = rng.choice([i for i, size in enumerate(space.dims) if size > 1] or [0], len(now))
        step = np.maximum(1, np.round(abs(rng.normal(0, 1, len(now))) * np.array(space.dims)[axis] / 8)).astype(int)
        places[np.arange(len(now)), axis] += step * rng.choice([-1, 1], len(now))
        places = np.clip(places, 0, np.array(space.dims) - 1)
        new = np.asarray(np.ravel_multi_index(places.T, space.dims))
        if not (yield new):
            return
        old_s, new_s = np.log(ledger.of(now)), np.log(ledger.of(new))
        with np.errstate(invalid="ignore"):
            worse = np.where(np.isfinite(new_s), new_s - old_s, np.inf)
        now = np.where(rng.random(len(now)) < np.exp(-np.maximum(worse, 0.0) / heat), new, now)


def by_evolution(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """A (mu + lambda) evolution: parents by rank, uniform crossover of two, one or two knobs mutated."""
    rng, space = np.random.default_rng(seed), ledger.space
    yield from _population(ledger, rng)
    for _ in range(_rounds(ledger)):
        parents = space.places(ledger.best(_POPULATION // 2))
        if not len(parents):
            return
        rank = np.minimum(rng.geometric(0.1, (2, _POPULATION)) - 1, len(parents) - 1)
        mother, father = parents[rank]
        child = np.where(rng.random(mother.shape) < 0.5, mother, father)
        for _ in range(2):
            axis = rng.integers(0, len(KNOBS), _POPULATION)
            child[np.arange(_POPULATION), axis] = rng.integers(0, np.array(space.dims)[axis])
        if not (yield np.asarray(np.ravel_multi_index(child.T, space.dims))):
            return


def by_rule(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """The article's rule of thumb, on the nearest legal point of the space."""
    yield from _first_legal(ledger, rule_of_thumb(ledger.shape))


def by_vendor(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """The vendor's rules, on the nearest legal point of the space."""
    yield from _first_legal(ledger, vendor_rule(ledger.shape, ledger.device))


def _first_legal(ledger: Ledger, tile: TileConfig) -> Generator[np.ndarray, bool, None]:
    """Price the point nearest to a tile, or to the first smaller version of it that is legal there."""
    for step in ladder(tile, ledger.shape):
        point = np.array([ledger.space.nearest(step)])
        if not (yield point) or np.isfinite(ledger.of(point)[0]):
            return


def _rounds(ledger: Ledger) -> int:
    """Rounds of a population: _ROUNDS, or as many as the budget allows."""
    allowed = ledger.left() / _POPULATION
    ledger.complete &= allowed >= _ROUNDS
    return _ROUNDS if allowed >= _ROUNDS else math.ceil(allowed)


def _population(ledger: Ledger, rng: np.random.Generator) -> Generator[np.ndarray, bool, np.ndarray]:
    """Legal points to begin with: the best of a scatter."""
    yield rng.integers(0, ledger.space.size, 4 * _POPULATION)
    return ledger.best(_POPULATION)


def exhaustive(ledger: Ledger, seed: int, anchors: Sequence[TileConfig]) -> Search:
    """Every point, in bounded memory. A budget meets them in a random order as long as that fits into memory."""
    space = ledger.space
    ledger.expected = space.size
    if space.size <= 2**22:
        order = np.random.default_rng(seed).permutation(space.size)
        chunks = (order[i : i + 2**16] for i in range(0, space.size, 2**16))
    else:
        chunks = space.enumerate(2**16)
    for chunk in chunks:
        if not (yield chunk):
            return
        ledger.forget()


#: Name -> how.
STRATEGIES: dict[str, Callable[[Ledger, int, Sequence[TileConfig]], Search]] = {
    "coordinate": by_coordinates,
    "gradient": by_gradient,
    "annealing": by_annealing,
    "evolution": by_evolution,
    "random": at_random,
    "exhaustive": exhaustive,
}
#: What a search is compared with: no searches, and tiles that are policies of their own ("rules.POLICIES").
BASELINES: dict[str, Callable[[Ledger, int, Sequence[TileConfig]], Search]] = {"rule": by_rule, "cann": by_vendor}
