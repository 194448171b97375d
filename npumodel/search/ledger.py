"""What a search has priced so far, and what it may still spend. Every strategy works on one of these."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.search.space import BUFFERS, Space, exact_seconds, fits, needs, possible
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

    def price(self, points: np.ndarray, always: bool = False) -> bool:
        """Look at these points, as they come, but for known ones: price them if legal and (unless `always`) in the
        budget; whether the budget sufficed."""
        points = np.asarray(points, np.int64).ravel()
        points = points[np.sort(np.unique(points, return_index=True)[1])]
        points = points[~self.known(points)]
        good, l1 = self._legal(points)
        self._record(points[~good], np.inf, l1[~good])
        todo, l1 = points[good], l1[good]
        while len(todo):
            look = min(LOOK, len(todo)) if self.looks_up else len(todo)
            count = int(look if always else min(look, self.left()))
            if not count:
                self.complete = False
                return False
            self._record(todo[:count], self._prices(todo[:count]), l1[:count])
            self.spend(count)
            todo, l1 = todo[count:], l1[count:]
        return True

    def sweep(self, points: np.ndarray) -> bool:
        """`price` for a search that never comes back: of very many points only the best are kept."""
        going = self.price(points)
        if len(self.points) > _MANY:
            best = np.sort(np.lexsort((self.points, self.l1, self.seconds))[:_KEPT])
            self.points, self.seconds, self.l1 = self.points[best], self.seconds[best], self.l1[best]
        return going

    def _legal(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(whether each of the points is legal, its bytes of L1)"""
        good, l1 = np.zeros(len(points), bool), np.zeros(len(points))
        for here, tiles in self.space.by_kind(points):
            need = needs([self.shape], tiles, self.device)
            fit, possible_ = fits(need, self.device, self.shape.dtype), possible([self.shape], tiles)
            good[here], l1[here] = fit.all(-1) & possible_, need[:, 0]
            for name, bad in zip((*BUFFERS, "knobs"), (*~fit.T, ~possible_), strict=True):
                if bad.any():
                    self.rejected[name] = self.rejected.get(name, 0) + int(bad.sum())
        return good, l1

    def _prices(self, points: np.ndarray) -> np.ndarray:
        """Exact prices of legal points."""
        seconds = np.empty(len(points))
        for here, tiles in self.space.by_kind(points):
            seconds[here] = exact_seconds([self.shape], tiles, self.device)
        return seconds

    def _record(self, points: np.ndarray, seconds, l1: np.ndarray):
        place = np.searchsorted(self.points, points)
        order = np.argsort(points)
        place, points, l1 = place[order], points[order], l1[order]
        seconds = np.broadcast_to(seconds, len(points))[order]
        self.points = np.insert(self.points, place, points)
        self.seconds, self.l1 = np.insert(self.seconds, place, seconds), np.insert(self.l1, place, l1)

    def best(self, count: int) -> np.ndarray:
        """The best legal points so far: by price, then bytes of L1, then their number (which is lexicographic)."""
        legal = np.flatnonzero(np.isfinite(self.seconds))
        order = np.lexsort((self.points[legal], self.l1[legal], self.seconds[legal]))
        return self.points[legal[order[:count]]]

    def priced(self, point: int) -> Priced:
        """A point that has been looked at."""
        return Priced(self.space.tile(point), float(self.of(np.array([point]))[0]))
