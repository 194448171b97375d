"""What a search has priced so far, and what it may still spend. Every strategy works on one of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.search.plans import Plans
from npumodel.search.space import BUFFERS, KINDS, NUMBERS, Space, alike, exact_seconds, fits, needs, possible
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

#: Points priced between two looks at the clock, when there is a time limit or somebody who wants to see progress.
LOOK = 512
#: Points that an exhaustive search keeps, and how many it may have before it forgets the others.
_KEPT, _MANY = 2**16, 2**20

Progress = Callable[[int, int, float], object]


class Priced(NamedTuple):
    """A tile and its exact price in seconds."""

    tile: TileConfig
    seconds: float


class Ledger:
    """Prices of the points of a space, and a budget.

    points [n]: numbers of the points looked at, ascending; seconds [n]: their prices, infinite if illegal; l1 [n]:
    bytes of L1. evals: prices computed; a cost with its gradient counts as 3. complete: False once the budget has run
    out. rejected: how many of the points looked at each buffer refuses; "knobs": that no call can have, or not this.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: DeviceSpec,
        space: Space | None = None,
        max_evals: float | None = None,
        deadline: float | None = None,
        progress: Progress | None = None,
    ):
        self.shape, self.device, self.space = shape, device, space or Space.of(shape, device)
        self.max_evals, self.deadline, self.progress = max_evals, deadline, progress
        self.points, self.seconds, self.l1 = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        self.rejected: dict[str, int] = {}
        self.evals, self.expected, self.complete = 0, 0, True

    @property
    def looks_up(self) -> bool:
        """Whether somebody wants the search to look up from its work now and then."""
        return self.deadline is not None or self.progress is not None

    def left(self) -> float:
        """Evaluations that the budget still allows."""
        late = self.deadline is not None and time.perf_counter() >= self.deadline
        return 0 if late else np.inf if self.max_evals is None else max(0, self.max_evals - self.evals)

    def spend(self, evals: int) -> bool:
        """Count evaluations and report them; whether there is budget left."""
        self.evals += evals
        if self.progress is not None:
            self.progress(self.evals, max(self.expected, self.evals), float(self.seconds.min(initial=np.inf)))
        return self.left() > 0

    def known(self, points: np.ndarray) -> np.ndarray:
        """Whether each of these points has been looked at."""
        place = np.minimum(np.searchsorted(self.points, points), max(0, len(self.points) - 1))
        return self.points[place] == points if len(self.points) else np.zeros(len(points), bool)

    def of(self, points: np.ndarray) -> np.ndarray:
        """Prices of points that have been looked at."""
        return self.seconds[np.searchsorted(self.points, points)]

    def begin(self, plans: Plans):
        """Take over what is priced anyway, whatever the budget, as far as it is in the space."""
        inside = [i for i, tile in enumerate(plans.tiles) if tile in self.space]
        points = np.array([self.space.point(plans.tiles[i]) for i in inside], np.int64)
        self.record(points, plans.seconds[inside], plans.l1[inside])
        self.spend(int(np.isfinite(plans.seconds[inside]).sum()))

    def price(self, points: np.ndarray) -> bool:
        """Look at these points, as they come, but for known ones: price them if legal and in the budget; whether the
        budget sufficed."""
        return price_all([(self, points)])[0]

    def fresh(self, points: np.ndarray) -> np.ndarray:
        """Those of the points that have not been looked at, each once, as they come."""
        points = np.asarray(points, np.int64).ravel()
        points = points[np.sort(np.unique(points, return_index=True)[1])]
        return points[~self.known(points)]

    def forget(self):
        """For a search that never comes back: of very many points only the best are kept."""
        if len(self.points) > _MANY:
            best = np.sort(np.lexsort((self.points, self.l1, self.seconds))[:_KEPT])
            self.points, self.seconds, self.l1 = self.points[best], self.seconds[best], self.l1[best]

    def record(self, points: np.ndarray, seconds: Any, l1: np.ndarray):
        """Keep what was found at points that were not known: prices (infinite if illegal) and bytes of L1."""
        order = np.argsort(points)
        points, l1, seconds = points[order], l1[order], np.broadcast_to(seconds, len(points))[order]
        place = np.searchsorted(self.points, points)
        self.points = np.insert(self.points, place, points)
        self.seconds, self.l1 = np.insert(self.seconds, place, seconds), np.insert(self.l1, place, l1)

    def reject(self, fit: np.ndarray, possible_: np.ndarray):
        """Count what refuses the points of `fits` [n, 6] and `possible` [n]."""
        for name, bad in zip((*BUFFERS, "knobs"), (*~fit.T, ~possible_), strict=True):
            if bad.any():
                self.rejected[name] = self.rejected.get(name, 0) + int(bad.sum())

    def best(self, count: int) -> np.ndarray:
        """The best legal points so far: by price, then bytes of L1, then their number (which is lexicographic)."""
        legal = np.flatnonzero(np.isfinite(self.seconds))
        order = np.lexsort((self.points[legal], self.l1[legal], self.seconds[legal]))
        return self.points[legal[order[:count]]]

    def priced(self, point: int) -> Priced:
        """A point that has been looked at."""
        return Priced(self.space.tile(point), float(self.of(np.array([point]))[0]))


# Many searches side by side ------------------------------------------------------------------------------------------

#: A search: yields the points that it wants priced, is sent whether the budget sufficed, and returns what it has to
#: tell beside the prices.
Search = Generator[np.ndarray, bool, Any]


def run(searches: Sequence[tuple[Ledger, Search]]) -> list[Any]:
    """Run searches to their ends; what they ask for at a time is priced together. Returns what each returned."""
    results: list[Any] = [None] * len(searches)
    asked: dict[int, np.ndarray] = {}

    def advance(i: int, going: bool | None):
        try:
            asked[i] = next(searches[i][1]) if going is None else searches[i][1].send(going)
        except StopIteration as end:
            results[i] = end.value

    for i in range(len(searches)):
        advance(i, None)
    while asked:
        now, asked = asked, {}
        going = price_all([(searches[i][0], points) for i, points in now.items()])
        for i, good in zip(now, going, strict=True):
            advance(i, good)
    return results


def price_all(requests: Sequence[tuple[Ledger, np.ndarray]]) -> list[bool]:
    """Ledger.price of several ledgers at once, in as few compiled calls as possible."""
    todo = []
    for ledger, points in requests:
        todo.append((ledger, ledger.fresh(points)))
    bytes_ = _together(todo, _look)
    for i, ((ledger, points), found) in enumerate(zip(todo, bytes_, strict=True)):
        l1, fit, possible_ = found[:, 0], found[:, 1:-1] > 0, found[:, -1] > 0
        good = fit.all(-1) & possible_
        ledger.reject(fit, possible_)
        ledger.record(points[~good], np.inf, l1[~good])
        todo[i] = (ledger, points[good])
        bytes_[i] = l1[good]
    going = [True] * len(todo)
    while any(len(points) for _, points in todo):
        counts = []
        for i, (ledger, points) in enumerate(todo):
            look = min(LOOK, len(points)) if ledger.looks_up else len(points)
            counts.append(int(min(look, ledger.left())))
            if len(points) and not counts[i]:
                ledger.complete = going[i] = False
                todo[i] = (ledger, points[:0])
        now = [(ledger, points[:count]) for (ledger, points), count in zip(todo, counts, strict=True)]
        for i, ((ledger, points), seconds) in enumerate(zip(now, _together(now, _price), strict=True)):
            if len(points):
                ledger.record(points, seconds, bytes_[i][: len(points)])
                ledger.spend(len(points))
            todo[i], bytes_[i] = (ledger, todo[i][1][len(points) :]), bytes_[i][len(points) :]
    return going


def _look(ledgers: Sequence[Ledger], tiles: TileConfig, which: np.ndarray) -> np.ndarray:
    """[n, 8]: bytes of L1, whether each buffer is large enough, whether the knobs go together."""
    shapes, device = [ledger.shape for ledger in ledgers], ledgers[0].device
    need = needs(shapes, tiles, device, which)
    fit = fits(need, device, shapes[0].dtype)
    return np.concatenate([need[:, :1], fit, possible(shapes, tiles, which)[:, None]], -1)


def _price(ledgers: Sequence[Ledger], tiles: TileConfig, which: np.ndarray) -> np.ndarray:
    return exact_seconds([ledger.shape for ledger in ledgers], tiles, ledgers[0].device, which)


def _together(requests: Sequence[tuple[Ledger, np.ndarray]], ask: Callable) -> list[np.ndarray]:
    """ask(ledgers, tiles [n], which ledger each belongs to [n]) -> [n, ...], once for all points of one kind of plan
    and one kind of call; the answers by request."""
    groups: dict[Any, list[tuple[int, np.ndarray, TileConfig]]] = {}
    for i, (ledger, points) in enumerate(requests):
        for here, tiles in ledger.space.by_kind(points):
            call = (id(ledger.device), alike(ledger.shape))
            groups.setdefault((call, *(getattr(tiles, name) for name in KINDS)), []).append((i, here, tiles))
    found: list[Any] = [None] * len(requests)
    for parts in groups.values():
        which = np.repeat(np.arange(len(parts)), [len(here) for _, here, _ in parts])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(tiles, name) for _, _, tiles in parts]) for name in NUMBERS
        }
        answer = ask([requests[i][0] for i, _, _ in parts], parts[0][2].replace(**columns), which)
        start = 0
        for i, here, _ in parts:
            if found[i] is None:
                found[i] = np.empty((len(requests[i][1]), *answer.shape[1:]))
            found[i][here] = answer[start : start + len(here)]
            start += len(here)
    none = np.zeros((0, 2 + len(BUFFERS))) if ask is _look else np.zeros(0)
    return [none if answers is None else answers for answers in found]
