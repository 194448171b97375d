"""`tune`: find the fastest legal tile of a call, within a budget, and say how good it is.

Default, rule of thumb and the tiles that `auto` chooses from are priced first, whatever the budget, so the result is
never slower than any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.model.estimate import Cost, estimate, too_large
from npumodel.search import gradient
from npumodel.search.ledger import Ledger, Priced, Progress, Search, run
from npumodel.search.plans import Plans, priced
from npumodel.search.space import Space
from npumodel.search.strategies import STRATEGIES
from npumodel.search.table import Entry, Header, TileTable, use_table
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

#: Spaces that are simply priced whole: other strategies would take about as long.
_WHOLE = 2048
#: Calls that are tuned side by side.
_WAVE = 128
#: Priced points that are looked at for near ties, and how much slower those may be.
_NEAR, NEAR_TIE = 16, 0.01
#: The one that comes nearest to the optimum for what it costs: see `experiments/bench_search.py`.
DEFAULT_STRATEGY = "coordinate"


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What a search found. Times in seconds, by the exact model.

    tile, seconds   the best candidate; ties: smaller cost, then fewer bytes of L1, then smaller block_q, block_kv, ...
    default, rule   the default tile and the rule of thumb's, both legal
    auto            what tile_level="auto" takes without a table; the result is never slower than these three
    runner_up       the second-best candidate (None if there was only one)
    near_ties       the next best ones (at most 15) that are no more than 1 % slower
    evals           prices computed; one with its gradient counts as 3
    space_size      points of the space
    rejected        of the points looked at, how many each buffer refuses (a point may be refused by several), and
                    "knobs": how many have values that exclude each other
    elapsed         wall time of the search, compilation included, the exhaustive check not; of several calls tuned
                    together the mean
    strategy        the one that was used: a space smaller than a descent is priced whole
    history         path of the descent (None without one)
    optimum         the exhaustive optimum, when it was asked for
    complete        False: the budget or Ctrl-C ended the search early; interrupted: it was Ctrl-C
    """

    shape: AttentionShape
    device: DeviceSpec
    tile: TileConfig
    seconds: float
    default: Priced
    rule: Priced
    auto: Priced
    runner_up: Priced | None
    near_ties: tuple[Priced, ...]
    evals: int
    space_size: int
    rejected: dict[str, int]
    elapsed: float
    strategy: str
    seed: int
    complete: bool
    history: gradient.Path | None = dataclasses.field(default=None, repr=False, compare=False)
    optimum: Priced | None = None
    interrupted: bool = False
    _open: list = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

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

    def __enter__(self) -> TuneResult:
        """`with result:` tile_level="auto" takes the tile, for this call on this device."""
        self._open.append(use_table(self.table()))
        self._open[-1].__enter__()
        return self

    def __exit__(self, *error):
        self._open.pop().__exit__(*error)

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
        why = "interrupted" if self.interrupted else "the budget ran out"
        notes += [] if self.complete else [f"not finished: {why}"]
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


@overload
def tune(shape: AttentionShape, device: DeviceSpec, **options) -> TuneResult: ...
@overload
def tune(shape: Sequence[AttentionShape], device: DeviceSpec, **options) -> TuneResults: ...
def tune(shape, device, **options):
    """Find the fastest legal tile of a call (or of each of several: TuneResults) on `device`.

    space       a `space.Space`, or values of some knobs to keep to, as `Space.restrict` takes them:
                {"block_q": [64, 128]}; else `Space.of` the call
    seed        of what is random; the result is deterministic for a seed
    strategy    one of `strategies.STRATEGIES`
    max_evals   most prices to compute, for each shape; one with its gradient counts as 3
    time_limit  seconds, for each shape in the mean, looked at between compiled calls (the first of an architecture
                compiles)
    progress    called as progress(evaluations done, expected, best seconds so far), of several calls with the sums
    exhaustive  also price the whole space, for `gap`; outside the budget

    Several calls share what there is: the points of all are sharded over the devices of the process (`jax.devices()`),
    and the calls over the processes of `jax.distributed`, each of which returns all results.

    A budget that runs out gives the best tile so far, `complete=False`; so does Ctrl-C, once something is priced; of a
    long list the calls that were not begun then have no result. What "auto" chooses from (some 30 to 100 tiles) is
    always priced, whatever the budget, as far as it is in the space.
    Raises ValueError for an unknown strategy or a bad budget, when no tile is legal (the buffer, bytes needed and
    available), and when the device does not multiply the dtype.
    """
    if isinstance(shape, AttentionShape):
        return _tune([shape], device, **options)[0]
    shapes = list(shape)
    return TuneResults(tuple(_over_processes(shapes, lambda mine: _in_waves(mine, device, **options))))


def _in_waves(shapes: Sequence[AttentionShape], device: DeviceSpec, **options) -> list[TuneResult]:
    results: list[TuneResult] = []
    for i in range(0, len(shapes), _WAVE):
        results += _tune(shapes[i : i + _WAVE], device, **options)
        if results[-1].interrupted:
            break
    return results


def _over_processes(
    shapes: Sequence[AttentionShape], work: Callable[[Sequence[AttentionShape]], list[TuneResult]]
) -> list[TuneResult]:
    """work(shapes), shared out over the processes of `jax.distributed`; every process gets all results."""
    count = jax.process_count()
    if count == 1:
        return work(shapes)
    from jax.experimental import multihost_utils

    mine = np.frombuffer(pickle.dumps(work(shapes[jax.process_index() :: count])), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(mine))).ravel()
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(mine)] = mine
    every = multihost_utils.process_allgather(padded).reshape(count, -1)
    parts = [pickle.loads(row[:size].tobytes()) for row, size in zip(every, sizes, strict=True)]
    places = [(i % count, i // count) for i in range(len(shapes))]
    return [parts[process][place] for process, place in places if place < len(parts[process])]  # less after Ctrl-C


def _tune(
    shapes: Sequence[AttentionShape],
    device: DeviceSpec,
    *,
    space: Space | Mapping[str, Any] | None = None,
    seed: int = 0,
    strategy: str = DEFAULT_STRATEGY,
    max_evals: int | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    exhaustive: bool = False,
) -> list[TuneResult]:
    """Tune several calls side by side: what their searches ask for at a time is priced together."""
    _check(strategy, max_evals, time_limit)
    begin = time.perf_counter()
    deadline = None if time_limit is None else begin + time_limit * len(shapes)
    begun = zip(shapes, priced(shapes, device), strict=True)
    tasks = [_Task(shape, device, space, strategy, plans) for shape, plans in begun]
    ledgers = [Ledger(task.shape, device, task.space, max_evals, deadline) for task in tasks]
    if progress is not None:
        _report_to(progress, ledgers)
    for task, ledger in zip(tasks, ledgers, strict=True):
        ledger.begin(task.plans)
    started = [task.search(ledger, seed) for task, ledger in zip(tasks, ledgers, strict=True)]
    interrupted = False
    try:
        histories = run([*zip(ledgers, started, strict=True)])
    except KeyboardInterrupt:
        if not all(len(ledger.best(1)) for ledger in ledgers):
            raise
        histories, interrupted = [None] * len(tasks), True
    elapsed = (time.perf_counter() - begin) / len(shapes)
    found = zip(tasks, ledgers, histories, strict=True)
    seen = {"seed": seed, "elapsed": elapsed, "interrupted": interrupted}
    return [_result(task, ledger, history, exhaustive and not interrupted, **seen) for task, ledger, history in found]


class _Task:
    """One call to be tuned: its space, how to search it, and the tiles to begin with."""

    def __init__(self, shape: AttentionShape, device: DeviceSpec, space, strategy: str, plans: Plans):
        self.shape, self.plans = shape, plans
        self.space = space if isinstance(space, Space) else Space.of(shape, device).restrict(**(space or {}))
        self.strategy = "exhaustive" if self.space.size <= _WHOLE else strategy

    def search(self, ledger: Ledger, seed: int) -> Search:
        return STRATEGIES[self.strategy](ledger, seed, (self.plans.default, self.plans.rule))

    def priced(self, tile: TileConfig) -> Priced:
        """One of the tiles to begin with."""
        return Priced(tile, self.plans.price(tile))


def _report_to(progress: Progress, ledgers: Sequence[Ledger]):
    """Report sums over all ledgers, whenever one of them has spent something."""

    def report(*_):
        expected = sum(max(ledger.expected, ledger.evals) for ledger in ledgers)
        best = sum(float(ledger.seconds.min(initial=np.inf)) for ledger in ledgers)
        progress(sum(ledger.evals for ledger in ledgers), expected, best)

    for ledger in ledgers:
        ledger.progress = report


def _result(
    task: _Task, ledger: Ledger, history: gradient.Path | None, exhaustive: bool, *, interrupted: bool, **seen
) -> TuneResult:
    near = [ledger.priced(point) for point in ledger.best(_NEAR)]
    if not near:
        raise ValueError(_nothing(ledger))
    best, *others = near
    complete = ledger.complete and not interrupted
    whole = task.strategy == "exhaustive" and complete
    return TuneResult(
        task.shape,
        ledger.device,
        *best,
        default=task.priced(task.plans.default),
        rule=task.priced(task.plans.rule),
        auto=task.priced(task.plans.chosen),
        runner_up=others[0] if others else None,
        near_ties=tuple(other for other in others if other.seconds <= best.seconds * (1 + NEAR_TIE)),
        evals=ledger.evals,
        space_size=task.space.size,
        rejected=ledger.rejected,
        strategy=task.strategy,
        complete=complete,
        interrupted=interrupted,
        history=history,
        optimum=best if whole else _optimum(ledger) if exhaustive else None,
        **seen,
    )


def _check(strategy, max_evals, time_limit):
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    for name, value in (("max_evals", max_evals), ("time_limit", time_limit)):
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if value is not None and not good:
            raise ValueError(f"{name}: expected a number > 0 or None, got {value!r}")


def _nothing(ledger: Ledger) -> str:
    why = "; ".join(ledger.space.why_not(ledger.shape, ledger.device, [0])[0])
    counts = ", ".join(f"{name} refuses {count:,}" for name, count in ledger.rejected.items())
    seen = f"the {len(ledger.points):,} of {ledger.space.size:,} looked at"
    return f"space: expected a legal point, got none among {seen} ({counts}); the first: {why}"


def _optimum(ledger: Ledger) -> Priced:
    """The best of the whole space, whatever the budget was."""
    rest = Ledger(ledger.shape, ledger.device, ledger.space)
    run([(rest, STRATEGIES["exhaustive"](rest, 0, ()))])
    return rest.priced(int(rest.best(1)[0]))
