"""One page about one call, for whoever tunes it: what runs, how it is cut, where the time goes, what would help most.

Every number is one of the call's `Cost`, or of the Cost of the same call with one thing changed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from npumodel import units
from npumodel.hardware import DeviceSpec
from npumodel.hardware.spec import RANGES
from npumodel.model.durations import CONSTANT_TITLES, time_constants
from npumodel.model.estimate import Cost, StageCost, estimate, illegal
from npumodel.model.tiling import FRACTAL
from npumodel.report_text import Priced, header
from npumodel.search.space import fitted, lattice, longest, padded
from npumodel.tile import ALL_CORES, CORE_ORDERS, FUSIONS, MAX_BUFFERS, MAX_LOOKAHEAD, TileConfig
from npumodel.workload import AttentionShape

#: Columns of the page.
WIDTH = 120
#: A change that saves a smaller share of the time than this is not worth a line.
LEAST = 1e-3
#: Shares of the time below this are joined as "other".
SMALL = 0.02
#: Most changes of the hardware that are shown.
MOST = 5

#: Numbers of a device that are no wish for hardware: a share of `hbm_bytes_per_s`, which is there itself; what a kernel
#: chose; and a capacity that the price does not look at.
_NO_WISH = ("hbm_efficiency", "vector_tile_bytes", "hbm_bytes")


def page(call: Priced) -> str:
    """The page: about 70 lines at most, of at most WIDTH columns. Times with SI prefixes, sizes in KiB, MiB, GiB."""
    cost = call.cost
    sections = [_title(call), _graph(cost), _plan(cost), _stages(cost), _bound(cost), _breakdown(cost), _changes(cost)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _wrapped(text: str, indent: int = 2) -> list[str]:
    """A paragraph, its further lines indented by two more; what `_whole` has tied stays on one line."""
    first, later = " " * indent, " " * (indent + 2)
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
    return [line.replace(_TIE, " ") for line in lines]


#: A space that `textwrap` does not break at (no-break space).
_TIE = "\u00a0"


def _whole(text: str) -> str:
    return text.replace(" ", _TIE)


def _count(number: int, one: str, more: str) -> str:
    return _whole(f"{number:,} {one if number == 1 else more}")


def _title(call: Priced) -> list[str]:
    large = _wrapped(f"warning: {call.cost.too_large}", indent=0) if call.cost.too_large else []
    return [*_wrapped(header(call), indent=0), *large, f"predicted time {units.seconds(call.cost.seconds)}"]


def _graph(cost: Cost) -> list[str]:
    lines = [f"  {line}" for line in cost.graph.splitlines()]
    others = [f"  {fusion} instead: {_other_fusion(cost, fusion)}" for fusion in FUSIONS if fusion != cost.tile.fusion]
    return ["graph, and what the passes did:", *lines, *others]


def _other_fusion(cost: Cost, fusion: str) -> str:
    """What the same tile would cost as other kernels, or why it cannot."""
    fused_only = {} if fusion == "fused" else {"split_kv": 1, "kv_pieces": 1}
    tile = cost.tile.replace(fusion=fusion, **fused_only)
    refusals = illegal(cost.shape, cost.chip, tile)
    if refusals:
        return f"refused, {'; '.join(refusals)}"
    other = estimate(cost.shape, cost.chip, tile)
    return f"{_count(other.launches, 'launch', 'launches')}, {units.seconds(other.seconds)}".replace(_TIE, " ")


def _plan(cost: Cost) -> list[str]:
    tile, waves = cost.tile, math.ceil(cost.tasks / cost.cores)
    buffers = _count(tile.buffers, "buffer", "buffers")
    ahead = _count(tile.lookahead, "step", "steps")
    heads = f" of {tile.heads_packed} heads" * (tile.heads_packed > 1)
    cut = f"up to {tile.block_q} query rows{heads} a task and {tile.block_kv} keys a step, {buffers} of K and of V"
    split = f", the keys split between {tile.split_kv} tasks" * (tile.split_kv > 1)
    last = _count(cost.tasks - (waves - 1) * cost.cores, "core", "cores")
    cores = f"{_count(cost.tasks, 'task', 'tasks')} on {cost.cores} of {float(cost.chip.cube_cores):.0f} cores"
    spread = f"{cores}: {_count(waves, 'wave', 'waves')}, {last} in the last"
    count = f"{_count(cost.steps, 'step', 'steps')}, {_count(cost.launches, 'launch', 'launches')}"
    lines = [*_wrapped(f"{cut}, Q K^T {ahead} ahead of P V{split}, {tile.fusion}"), *_wrapped(f"{spread}; {count}")]
    rows = [("buffer of a core (UB: of a vector unit), HBM", "needed", "available", "used")]
    for f in cost.footprints:
        beyond = ", does not fit" if f.buffer == "HBM" else ", the rest spills"
        used = units.percent(f.needed / f.available) + ("" if f.fits else beyond)
        rows.append((f.buffer, units.size(f.needed), units.size(f.available), used))
    return ["plan:", *lines, *units.columns(rows)]


# Stages and bound ----------------------------------------------------------------------------------------------------


def _stages(cost: Cost) -> list[str]:
    rows = [("stage", "op", "pipe", "busy", "dma_wait", "bytes", "of the call")]
    rows += [(stage.name, stage.op, stage.pipe, *_times(cost, [stage])) for stage in cost.stages]
    rows += [("all stages", "", pipe, *_times(cost, stages)) for pipe, stages in by_pipe(cost).items()]
    title = f"stages (of the busiest core; bytes: of all cores; of the call: busy / {units.seconds(cost.seconds)}):"
    return [title, *units.columns(rows, left=3)]


def _times(cost: Cost, stages: Sequence[StageCost]) -> tuple[str, ...]:
    """busy, dma_wait (of computations), bytes (of transfers) and busy / wall of these stages together."""
    busy, wait, moved = (sum(getattr(s, name) for s in stages) for name in ("busy", "dma_wait", "bytes"))
    wait_text, size = ("-", units.size(moved)) if moved else (units.seconds(wait), "-")
    return units.seconds(busy), wait_text, size, units.percent(busy / cost.seconds)


def by_pipe(cost: Cost) -> dict[str, list[StageCost]]:
    """The stages of every pipe, the busiest pipe first."""
    pipes: dict[str, list[StageCost]] = {}
    for stage in cost.stages:
        pipes.setdefault(stage.pipe, []).append(stage)
    return dict(sorted(pipes.items(), key=lambda item: -_busy(item[1])))


def _busy(stages: Iterable[StageCost]) -> float:
    return sum(stage.busy for stage in stages)


def _bound(cost: Cost) -> list[str]:
    hidden = (cost.upper_bound - cost.seconds) / (cost.upper_bound - cost.lower_bound)
    rest = f"one stage after the other: {units.seconds(cost.upper_bound)}; of what overlap could hide, the plan hides"
    return [f"bound by {_bound_by(cost)}", *_gap(cost), *_wrapped(f"{rest} {units.percent(hidden)}")]


def _bound_by(cost: Cost) -> str:
    pipe, stages = next(iter(by_pipe(cost).items()))
    work, launch = _of_the_call(cost, _busy(stages)), _of_the_call(cost, cost.launch_seconds)
    if cost.bound == "launch":
        return f"launch: {launch}; the busiest pipe, {pipe}, works for {work}"
    if cost.bound == "HBM":
        return f"HBM: busy for {_of_the_call(cost, cost.hbm_seconds)}; the busiest pipe, {pipe}, works for {work}"
    return f"{pipe}: busy for {work}; launches take {launch}"


def _of_the_call(cost: Cost, seconds: float) -> str:
    return f"{units.seconds(seconds)} ({units.percent(seconds / cost.seconds)} of the call)"


def _gap(cost: Cost) -> list[str]:
    """How far the call is above its lower bound, and why, as far as prices can tell."""
    gap = max(cost.seconds - cost.lower_bound, 0.0)
    above = f"{units.seconds(gap)} ({units.percent(gap / cost.lower_bound)}) above the lower bound of"
    ends = "launches and the join of the split keys" if cost.tile.split_kv > 1 else "and launches"
    bound = f"{units.seconds(cost.lower_bound)}, the busiest pipe (or HBM) of every kernel without a gap, {ends}"
    free = estimate(cost.shape, cost.chip.replace(sync_cycles=0.0), cost.tile)
    hand_overs = min(max(cost.seconds - free.seconds, 0.0), gap)
    why = f"hand-overs between cube and vector units cost {units.seconds(hand_overs)} of it"
    others = f"pipes that fill, drain and wait for each other {units.seconds(gap - hand_overs)}"
    return _wrapped(f"{above} {bound}: {why}, {others}")


# Breakdown -----------------------------------------------------------------------------------------------------------


def _breakdown(cost: Cost) -> list[str]:
    words = "; ".join(_whole(f"{percent} % {title}") for title, percent in shares(cost.breakdown).items())
    return ["where the time goes (each constant of the chip times the gradient of the time):", *_wrapped(words)]


def shares(breakdown: dict[str, float]) -> dict[str, int]:
    """Percents of the time by title, the largest first, those below SMALL joined as "other".

    Whole numbers that add up to 100: rounded down, and the ones left over go to the largest remainders.
    """
    total, largest = sum(breakdown.values()), sorted(breakdown.items(), key=lambda item: -item[1])
    exact = {CONSTANT_TITLES[name]: 100 * value / total for name, value in largest if value >= SMALL * total}
    exact["other"] = 100 - sum(exact.values())
    whole = {title: math.floor(part) for title, part in exact.items()}
    by_remainder = sorted(exact, key=lambda title: whole[title] - exact[title])
    for title in by_remainder[: 100 - sum(whole.values())]:
        whole[title] += 1
    return {title: percent for title, percent in whole.items() if percent}


# Changes -------------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """One thing changed: what, the price then, and the seconds that the gradient predicts (None: it cannot say)."""

    what: str
    cost: Cost
    predicted: float | None = None


def _changes(cost: Cost) -> list[str]:
    return ["what one change would help most:", *_plan_lines(cost), *_hardware_lines(cost)]


def _saved(cost: Cost, seconds: float) -> float:
    return 1 - seconds / cost.seconds


def _plan_lines(cost: Cost) -> list[str]:
    fit, refused = plan_changes(cost)
    lines = _wrapped(f"plan: {_best_plan(cost, fit)}")
    return [*lines, *_wrapped(f"plan: too large for a buffer: {', '.join(map(_whole, refused))}")] if refused else lines


def _best_plan(cost: Cost, fit: Sequence[Change]) -> str:
    if not fit:
        return "no neighbour of this tile fits"
    what, best, _ = fit[0]
    price, saved = units.seconds(best.seconds), _saved(cost, best.seconds)
    count = f"of {_count(len(fit), 'neighbour', 'neighbours')} that fit"
    if saved < LEAST:
        return f"none {count} saves {units.percent(LEAST)} or more; the nearest is {_whole(what)} ({price})"
    return f"{_whole(what)} saves {units.percent(saved)} ({price}), the best {count}: tile {_whole(best.tile.label)}"


def plan_changes(cost: Cost) -> tuple[list[Change], list[str]]:
    """The legal tiles that differ in one knob, priced, the fastest first; and the changes that do not fit."""
    around = neighbours(cost.tile, cost.shape, cost.cores)
    refused = [what for what, tile in around.items() if illegal(cost.shape, cost.chip, tile)]
    fit = [Change(w, estimate(cost.shape, cost.chip, tile)) for w, tile in around.items() if w not in refused]
    return sorted(fit, key=lambda change: change.cost.seconds), refused


def neighbours(tile: TileConfig, shape: AttentionShape, cores: int = 1) -> dict[str, TileConfig]:
    """Tiles that differ in one knob, by what changes: the next value on either side (of a block, of the search's
    lattice); half and double a block, the parts of the keys or the pieces of a block; the other fusion and order, tasks
    drained or not; one of the `cores` at work fewer, or half of them, and where the tile says how many, one more, or
    twice as many. Blocks are cut to the lengths."""
    now, (q_len, kv_len) = fitted(tile, shape).replace(cores=cores), longest(shape)
    heads, parts = shape.q_heads // shape.kv_heads, math.ceil(kv_len / now.block_kv)
    around = {
        "block_q": _blocks(now.block_q, q_len),
        "block_kv": _blocks(now.block_kv, kv_len),
        "buffers": _around(now.buffers, range(1, MAX_BUFFERS + 1)),
        "lookahead": _around(now.lookahead, range(MAX_LOOKAHEAD + 1)),
        "heads_packed": _around(now.heads_packed, [n for n in range(1, heads + 1) if heads % n == 0]),
        "split_kv": _around(now.split_kv, range(1, parts + 1), now.split_kv // 2, 2 * now.split_kv),
        "kv_pieces": [n for n in (now.kv_pieces // 2, 2 * now.kv_pieces) if 1 <= n <= now.block_kv // FRACTAL],
        "persistent": [not now.persistent],
        "fusion": [fusion for fusion in FUSIONS if fusion != now.fusion],
        "core_order": [order for order in CORE_ORDERS if order != now.core_order],
        "cores": sorted({cores // 2, cores - 1, *[cores + 1, 2 * cores] * (tile.cores != ALL_CORES)} - {0}),
    }
    if now.fusion != "fused":
        around["split_kv"] = around["kv_pieces"] = []
    elif max(now.split_kv, now.kv_pieces) > 1:
        around["fusion"] = []  # keys are split, and come in pieces, in a fused kernel only
    if not (shape.causal or shape.window):
        around["core_order"] = []  # tasks of one length: the order changes nothing
    if len(shape.groups) > 1:
        around["core_order"] = [order for order in around["core_order"] if order != "round_robin"]
    if shape.backward:
        around |= dict.fromkeys(("heads_packed", "split_kv", "kv_pieces", "persistent", "fusion"), [])
    changes = [(name, value) for name, values in around.items() for value in values]
    kept = now.replace(cores=tile.cores)
    return {f"{name} {getattr(now, name)} -> {value}": kept.replace(**{name: value}) for name, value in changes}


def _blocks(now: int, length: int) -> list[int]:
    return _around(now, lattice(length), padded(math.ceil(now / 2)), padded(2 * now))


def _around(now: int, values: Sequence[int], *others: int) -> list[int]:
    """The nearest of `values` (ascending) on either side of `now`, and those `others` that lie between its ends."""
    near = [value for value in values if value < now][-1:] + [value for value in values if value > now][:1]
    far = [value for value in others if values[0] <= value <= values[-1]]
    return sorted({*near, *far} - {now})


def _hardware_lines(cost: Cost) -> list[str]:
    best = [change for change in hardware_changes(cost) if _saved(cost, change.cost.seconds) >= LEAST][:MOST]
    if not best:
        return _wrapped(f"hardware: no number of {cost.device}, twice as good, saves {units.percent(LEAST)} or more")
    rows = [("hardware, twice as good, same tile", "time", "saves", "by gradient")]
    for what, then, predicted in best:
        by_gradient = "-" if predicted is None else units.percent(_saved(cost, predicted))
        rows.append((what, units.seconds(then.seconds), units.percent(_saved(cost, then.seconds)), by_gradient))
    note = "by gradient: what the breakdown promises, as if the bottleneck stayed; -: a size or a count, not part of it"
    return [*units.columns(rows), *_wrapped(note)]


def hardware_changes(cost: Cost) -> list[Change]:
    """The call with the same tile on devices that are better in one number, the fastest first."""
    found = []
    for what, chip in better_devices(cost.chip, cost.shape.dtype):
        if not illegal(cost.shape, chip, cost.tile):  # a deeper L0 block may need more of another buffer
            found.append(Change(what, estimate(cost.shape, chip, cost.tile), _by_gradient(cost, chip)))
    return sorted(found, key=lambda change: change.cost.seconds)


def better_devices(device: DeviceSpec, dtype: str) -> Iterator[tuple[str, DeviceSpec]]:
    """(what changes, device) for every number that a chip could be better in: rates, capacities and counts doubled,
    overheads halved; of the matrix rates, that of `dtype`."""
    for name, value in device.numbers.items():
        field, _, of = name.partition(".")
        if value and name not in _NO_WISH and of in ("", dtype):
            better = (0.5 if _is_overhead(field) else 2.0) * value
            what = f"{name} {units.number(name, value)} -> {units.number(name, better)}"
            yield what, device.with_numbers({name: better})


def _is_overhead(name: str) -> bool:
    """Whether less is better: what a chip may do without altogether, and the burst that gets half of the bandwidth."""
    low, low_allowed, *_ = RANGES.get(name, (0, False))
    return (low == 0 and low_allowed) or name == "burst_half_bytes"


def _by_gradient(cost: Cost, chip: DeviceSpec) -> float | None:
    """Seconds on a changed chip if they stayed linear in its time constants; None where no constant changes."""
    now, then = (time_constants(d, cost.shape.dtype)._asdict() for d in (cost.chip, chip))
    if now == then:
        return None
    return sum(seconds * then[name] / now[name] for name, seconds in cost.breakdown.items())
