"""`tune`: find the fastest legal tile of a call, within a budget, and say how good it is.

Default, rule of thumb and the tiles that `auto` chooses from are priced first, whatever the budget, so the result is
never slower than any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.model.estimate import Cost, estimate, too_large
from npumodel.search import gradient
from npumodel.search.auto import candidates
from npumodel.search.rules import default_tile, rule_tile
from npumodel.search.space import Space, exact_seconds, fits, needs, rejected
from npumodel.search.table import Entry, Header, TileTable
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

STRATEGIES = ("gradient", "exhaustive")

#: Points priced between two looks at the clock, when there is a time limit or somebody who wants to see progress.
_LOOK = 512
#: Steps of the descent between two looks.
_SEGMENT = 8
#: Legal points that are simply all priced: a descent takes more evaluations.
_WHOLE = gradient.GRADIENT_EVALS * gradient.STARTS * gradient.STEPS

Progress = Callable[[int, int, float], object]


class Priced(NamedTuple):
    """A tile and its exact price in seconds."""

    tile: TileConfig
    seconds: float


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a search found. Times in seconds, by the exact model.

    tile, seconds   the best candidate; ties: smaller cost, then fewer bytes of L1, then smaller block_q, block_kv, ...
    default, rule   the default tile and the rule of thumb's, both legal
    auto            what tile_level="auto" takes without a table; the result is never slower than these three
    runner_up       the second-best candidate (None if there was only one)
    evals           prices computed; one with its gradient counts as 3
    space_size      points of the space; rejected: how many each buffer refuses (a point may be refused by several)
    elapsed         wall time of the search, compilation included, the exhaustive check not
    strategy        the one that was used: a space smaller than a descent is priced whole
    history         path of the descent (None without one)
    optimum         the exhaustive optimum, when it was asked for
    complete        False: the budget ended the search early
    """

    shape: AttentionShape
    device: DeviceSpec
    tile: TileConfig
    seconds: float
    default: Priced
    rule: Priced
    auto: Priced
    runner_up: Priced | None
    evals: int
    space_size: int
    rejected: dict[str, int]
    elapsed: float
    strategy: str
    seed: int
    complete: bool
    history: gradient.Path | None = dataclasses.field(default=None, repr=False, compare=False)
    optimum: Priced | None = None

    @property
    def margin(self) -> float | None:
        """How much slower the runner-up is: 0.02 = 2 %."""
        return None if self.runner_up is None else self.runner_up.seconds / self.seconds - 1

    @property
    def gap(self) -> float | None:
        """How much slower the result is than the exhaustive optimum: 0.02 = 2 %; None if that is not known."""
        return None if self.optimum is None else self.seconds / self.optimum.seconds - 1

    @property
    def speed_up(self) -> float:
        """Time of the default tile / time of the result."""
        return self.default.seconds / self.seconds

    @functools.cached_property
    def cost(self) -> Cost:
        """The whole price of the tile: why it is fast."""
        return estimate(self.shape, self.device, self.tile)

    def table(self, explain: bool = False, command: str | None = None) -> TileTable:
        """The result as a tile table of one row. explain: also price what bounds the tile and where it waits."""
        return _table([self], explain, command)

    def __str__(self) -> str:
        named = {"default": self.default, "rule of thumb": self.rule, "auto, no table": self.auto}
        rows = [(name, tile, seconds) for name, (tile, seconds) in named.items()]
        rows.append(("learned", self.tile, self.seconds))
        width = max(len(tile.label) for _, tile, _ in rows)
        lines = [f"{self.shape.label} on {self.device.name or 'this device'}"]
        for name, tile, seconds in rows:
            gain = self.default.seconds / seconds
            lines.append(f"  {name:<14}  {tile.label:<{width}}  {seconds * 1e3:>10.4f} ms  {gain:5.2f}x")
        notes = [] if self.gap is None else [f"gap to the exhaustive optimum {self.gap * 100:.2f} %"]
        notes += [f"{self.evals:,} evaluations ({self.space_size:,} points)", f"{self.elapsed:.2f} s"]
        notes += [] if self.complete else ["not finished: the budget ran out"]
        sentence = too_large(self.shape, self.device)
        large = [f"  warning: {sentence}"] if sentence else []
        return "\n".join([*lines, "  " + ", ".join(notes), *large])


@dataclasses.dataclass(frozen=True)
class TuneResults(Sequence):
    """The results of several shapes, in their order."""

    results: tuple[TuneResult, ...]

    def __getitem__(self, i):
        return self.results[i]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[TuneResult]:
        return iter(self.results)

    def table(self, explain: bool = False, command: str | None = None) -> TileTable:
        """All results as one tile table."""
        return _table(self.results, explain, command)

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))


def _table(results: Sequence[TuneResult], explain: bool, command: str | None) -> TileTable:
    headers: dict[tuple, Header] = {}  # one block of the file per device, strategy and seed
    entries = []
    for r in results:
        key = (r.device.name, r.device.fingerprint(), r.strategy, r.seed)
        if key not in headers:
            headers[key] = Header.of(r.device, command=command, strategy=r.strategy, seed=r.seed)
        entries.append(_entry(headers[key], r, explain))
    return TileTable(tuple(entries))


def _entry(header: Header, r: TuneResult, explain: bool) -> Entry:
    why = {"dma_wait_s": r.cost.by_op("dma_wait"), "bound": r.cost.bound} if explain else {}
    return Entry.of(
        header,
        r.shape,
        r.tile,
        r.seconds,
        default_s=r.default.seconds,
        rule_s=r.rule.seconds,
        runner_up_s=r.runner_up.seconds if r.runner_up else None,
        evals=r.evals,
        complete=r.complete,
        **why,
    )


# The search ----------------------------------------------------------------------------------------------------------


class Ledger:
    """What a search has priced so far, and its budget. The only thing here that changes.

    seconds [size]: nan until priced; need [size, 6]: bytes per buffer; legal [size].
    """

    def __init__(self, shape, device, max_evals=None, deadline=None, progress: Progress | None = None, total=0):
        self.shape, self.device, self.space = shape, device, Space.of(shape)
        self.need = needs([shape], self.space.enumerate(), device)
        self.fits = fits(self.need, device, shape.dtype)
        self.legal = np.asarray(self.fits.all(-1))
        self.seconds = np.full(self.space.size, np.nan)
        self.max_evals, self.deadline, self.progress = max_evals, deadline, progress
        self.evals, self.total = 0, total or int(self.legal.sum())
        self.complete = True

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
            self.progress(self.evals, max(self.total, self.evals), float(np.nanmin(self.seconds)))
        return self.left() > 0

    def price(self, points: np.ndarray, always: bool = False) -> bool:
        """Price these points, if legal, new, and (unless `always`) in the budget; whether the budget sufficed."""
        todo = np.asarray(points, int)
        todo = todo[self.legal[todo] & np.isnan(self.seconds[todo])]
        while len(todo):
            look = _LOOK if self.looks_up else len(todo)
            now, todo = np.split(todo, [int(min(look, len(todo) if always else self.left()))])
            if not len(now):
                self.complete = False
                return False
            self.seconds[now] = exact_seconds([self.shape], self.space.at(now), self.device)
            self.spend(len(now))
        return True

    def best(self, count: int) -> list[int]:
        """The best points so far: by cost, then bytes of L1, then their number (which is lexicographic)."""
        known = np.flatnonzero(~np.isnan(self.seconds))
        order = np.lexsort((known, self.need[known, 0], self.seconds[known]))
        return known[order[:count]].tolist()

    def priced(self, point: int) -> Priced:
        return Priced(self.space.tile(point), float(self.seconds[point]))


@overload
def tune(shape: AttentionShape, device: DeviceSpec, **options) -> TuneResult: ...
@overload
def tune(shape: Sequence[AttentionShape], device: DeviceSpec, **options) -> TuneResults: ...
def tune(shape, device, **options):
    """Find the fastest legal tile of a call (or of each of several: TuneResults) on `device`.

    seed        of the starting points; the result is deterministic for a seed
    strategy    "gradient" (module `gradient`) or "exhaustive" (every legal point of the space)
    max_evals   most prices to compute, for each shape; one with its gradient counts as 3
    time_limit  seconds, for each shape, looked at between compiled calls (the first of an architecture compiles)
    progress    called as progress(evaluations done, expected, best seconds so far)
    exhaustive  also price the whole space, for `gap`; outside the budget

    A budget that runs out gives the best tile so far, `complete=False`; what "auto" chooses from is always priced.
    Raises ValueError for an unknown strategy or a bad budget, when no tile is legal (the buffer, bytes needed and
    available), and when the device does not multiply the dtype.
    """
    if isinstance(shape, AttentionShape):
        return _tune(shape, device, **options)
    return TuneResults(tuple(_tune(one, device, **options) for one in shape))


def _tune(
    shape: AttentionShape,
    device: DeviceSpec,
    *,
    seed: int = 0,
    strategy: str = "gradient",
    max_evals: int | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    exhaustive: bool = False,
) -> TuneResult:
    _check(strategy, max_evals, time_limit)
    begin = time.perf_counter()
    named = default_tile(shape, device), rule_tile(shape, device)
    ledger = Ledger(shape, device, max_evals, None if time_limit is None else begin + time_limit, progress)
    default, rule = (ledger.space.point(tile) for tile in named)
    plans = np.unique([ledger.space.point(tile) for tile in candidates(shape, *named)])  # default and rule among them
    ledger.price(plans, always=True)
    auto = ledger.best(1)[0]  # what "auto" takes without a table
    strategy = "exhaustive" if ledger.legal.sum() <= _WHOLE else strategy
    history = _by_gradient(ledger, seed, named) if strategy == "gradient" else _by_all(ledger, seed)
    best, *others = ledger.best(2)
    return TuneResult(
        shape,
        device,
        *ledger.priced(best),
        default=ledger.priced(default),
        rule=ledger.priced(rule),
        auto=ledger.priced(auto),
        runner_up=ledger.priced(others[0]) if others else None,
        evals=ledger.evals,
        space_size=ledger.space.size,
        rejected=rejected(ledger.fits),
        elapsed=time.perf_counter() - begin,
        strategy=strategy,
        seed=seed,
        complete=ledger.complete,
        history=history,
        optimum=_optimum(ledger) if exhaustive or (strategy == "exhaustive" and ledger.complete) else None,
    )


def _check(strategy, max_evals, time_limit):
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    for name, value in (("max_evals", max_evals), ("time_limit", time_limit)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected a number > 0 or None, got {value!r}")


def _by_all(ledger: Ledger, seed: int) -> None:
    """Every legal point, in an order that a budget may cut anywhere."""
    ledger.price(np.random.default_rng(seed).permutation(np.flatnonzero(ledger.legal)))


def _by_gradient(ledger: Ledger, seed: int, anchors: tuple[TileConfig, TileConfig]) -> gradient.Path:
    """Descend, round, polish. A budget leaves a third for what follows the descent."""
    per_step = gradient.GRADIENT_EVALS * gradient.STARTS
    steps = int(min(gradient.STEPS, ledger.left() * 2 // (3 * per_step)))
    ledger.complete &= steps == gradient.STEPS
    ledger.total = steps * per_step + _LOOK
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
    ends = gradient.rounded(ledger.space, path.end)
    if ledger.price(np.union1d(ends, gradient.scattered(ledger.space, seed))):
        gradient.polish(ledger.space, ledger.price, ledger.best)
    return path


def _optimum(ledger: Ledger) -> Priced:
    """The best of the whole space, whatever the budget was."""
    rest = Ledger(ledger.shape, ledger.device)
    rest.seconds = ledger.seconds.copy()
    rest.price(np.flatnonzero(rest.legal))
    return rest.priced(rest.best(1)[0])
