"""`sweep`: what other hardware would buy. The price of a call over numbers of its device, tile kept and re-tuned.

By the envelope theorem the slope of the re-tuned time is that of the time with the best tile kept: the elasticity says
what a small change buys, the curve what a large one does, where another tile takes over. Every tile that is found on
one device is priced on all of them, so that no curve has the noise of a search: the re-tuned one is never above the
kept one, touches it at factor 1, and does not rise with more of what a device can only gain from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from npumodel import units
from npumodel.hardware import DeviceSpec
from npumodel.hardware.spec import COUNTS, RANGES, near
from npumodel.model.estimate import misfits, slopes, too_large
from npumodel.search.ledger import Priced
from npumodel.search.space import exact_seconds, seconds_of, stacked
from npumodel.search.tuner import DEFAULT_STRATEGY, tune
from npumodel.tile import ALL_CORES, TileConfig
from npumodel.workload import AttentionShape

#: Half octaves around a device.
FACTORS = (0.5, 0.71, 1.0, 1.41, 2.0)
#: Short names.
ALIASES = {"hbm_bandwidth": "hbm_bytes_per_s", "cores": "cube_cores", "macs": "macs_per_cycle"}
#: Sizes of memories, and the bytes that they are whole multiples of: a matrix fractal of 16 x 32 bytes.
MEMORIES = ("l1_bytes", "l0a_bytes", "l0b_bytes", "l0c_bytes", "ub_bytes", "l2_bytes", "hbm_bytes")
GRAIN = 512


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of the device. elasticity: d log seconds / d log number with the tile kept, by the model's gradient;
    of a count, which has steps and no slope, between one less and one more. remark: words, where it is 0."""

    name: str
    value: float
    elasticity: float
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Point:
    """One device that there might be.

    factors        number -> factor asked for
    values         number -> value that the device has: counts whole, memories in multiples of GRAIN, shares at most 1
    kept           seconds with the tile of the device as it is; None where that does not fit
    refused        why it does not, a sentence for every buffer
    tile, seconds  re-tuned; None where no tile fits
    """

    factors: dict[str, float]
    values: dict[str, float]
    kept: float | None
    refused: tuple[str, ...]
    tile: TileConfig | None
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Times in seconds, by the exact model.

    tile, seconds  the optimum on the device as it is
    numbers        what was asked for, in this order
    points         of one number after the other, ascending; of a grid all pairs, the second number changing fastest
    """

    shape: AttentionShape
    device: DeviceSpec
    tile: TileConfig
    seconds: float
    numbers: tuple[Number, ...]
    points: tuple[Point, ...]
    grid: bool

    @property
    def elasticities(self) -> dict[str, float]:
        """By number."""
        return {number.name: number.elasticity for number in self.numbers}

    def series(self, name: str) -> tuple[Point, ...]:
        """The points at which this number alone changes."""
        return tuple(point for point in self.points if [*point.values] == [name])

    def rows(self) -> Iterator[dict[str, Any]]:
        """A flat row for every point: number, value, factor, elasticity (number_2, ... in a grid), seconds, tiles."""
        for point in self.points:
            row: dict[str, Any] = {"shape": self.shape.label, "device": self.device.name}
            for i, (name, value) in enumerate(point.values.items()):
                end = f"_{i + 1}" * (i > 0)
                row |= {f"number{end}": name, f"value{end}": value, f"factor{end}": point.factors[name]}
                row[f"elasticity{end}"] = self.elasticities[name]
            row |= {"kept_tile": self.tile.label, "kept_seconds": point.kept, "refused": "; ".join(point.refused)}
            yield row | {"tile": point.tile and point.tile.label, "seconds": point.seconds}

    def as_dict(self) -> dict[str, Any]:
        """For programs: plain numbers, SI units."""
        whole = {"device": self.device.name, "device_fingerprint": self.device.fingerprint(), "grid": self.grid}
        parts = {name: dataclasses.asdict(getattr(self, name)) for name in ("shape", "tile")}
        lists = {name: [*map(dataclasses.asdict, getattr(self, name))] for name in ("numbers", "points")}
        return {"label": self.shape.label, "seconds": self.seconds} | whole | parts | lists

    def __str__(self) -> str:
        large = too_large(self.shape, self.device)
        head = f"{self.shape.label} on {self.device.name or 'this device'}: {units.seconds(self.seconds)}"
        lines = [f"{head} with tile {self.tile.label}", *[f"warning: {large}"] * bool(large)]
        for number in self.numbers:
            remark = f" ({number.remark})" if number.remark else ""
            value = units.number(number.name, number.value)
            lines += ["", f"{number.name} {value}: elasticity {number.elasticity:.3g}{remark}"]
            lines += [] if self.grid else self._series_table(number.name)
        return "\n".join(lines + (["", *self._grid_table()] if self.grid else []))

    def _series_table(self, name: str) -> list[str]:
        rows: list[tuple[str, ...]] = [("factor", name, "tile kept", "", "re-tuned", "", "tile")]
        for point in self.series(name):
            kept = self._time(point.kept) if point.kept else (_short(point.refused), "")
            tile = point.tile.label if point.tile else "none fits"
            value = units.number(name, point.values[name])
            rows.append((f"{point.factors[name]:g}", value, *kept, *self._time(point.seconds), tile))
        last = max(len(row[-1]) for row in rows)
        return units.columns([(*row[:-1], row[-1].ljust(last)) for row in rows])

    def _grid_table(self) -> list[str]:
        down, across = (number.name for number in self.numbers)
        by_row = [[*points] for _, points in itertools.groupby(self.points, lambda point: point.factors[down])]
        tops = [units.number(across, point.values[across]) for point in by_row[0]]
        rows: list[tuple[str, ...]] = [(f"{down} x {across}", *tops)]
        rows += [
            (units.number(down, points[0].values[down]), *(self._time(p.seconds)[0] for p in points))
            for points in by_row
        ]
        return ["re-tuned:", *units.columns(rows)]

    def _time(self, seconds: float | None) -> tuple[str, str]:
        """The time, and how much it is above that of the device as it is."""
        if seconds is None:
            return "-", ""
        return units.seconds(seconds), f"{round(100 * (seconds / self.seconds - 1), 1) + 0.0:+.1f} %"


def _short(refused: Sequence[str]) -> str:
    """ "L1 too small" for "L1 needs 540,672 bytes, there are 262,144"."""
    buffers = (why.partition(" needs ") for why in refused)
    return ", ".join(f"{first} too small" if needs else first for first, needs, _ in buffers)


def elasticity_table(sweeps: Sequence[Sweep]) -> str:
    """A line for every call: its optimum and its elasticities."""
    names = [number.name for number in sweeps[0].numbers]
    rows: list[tuple[str, ...]] = [("elasticities", "time", *names)]
    for one in sweeps:
        rows.append((one.shape.label, units.seconds(one.seconds), *(f"{one.elasticities[n]:.3g}" for n in names)))
    return "\n".join(line[2:] for line in units.columns(rows))


# The sweep -----------------------------------------------------------------------------------------------------------


def sweep(
    shape: AttentionShape,
    device: DeviceSpec,
    what: str | Iterable[str],
    factors: Iterable[float] = FACTORS,
    *,
    grid: bool = False,
    seed: int = 0,
    strategy: str = DEFAULT_STRATEGY,
) -> Sweep:
    """Price a call on devices that differ from `device` in one number each, with its tile kept and re-tuned.

    what            numbers of the device by name, as `DeviceSpec.numbers` has them ("macs_per_cycle": that of the
                    call's dtype), or one of ALIASES; one, or several
    factors         by which each is multiplied
    grid            cross two numbers: all pairs of factors
    seed, strategy  of the searches, as `tune`

    Devices that do not have the memory for the tensors of the call run no tile, unless `device` has not either.
    Raises ValueError for a number that there is none, or that this device has not, for bad factors, for a grid of
    anything but two numbers, and what `tune` raises.
    """
    names, factors = _names(what, device, shape.dtype), _checked(factors)
    if grid and len(names) != 2:
        raise ValueError(f"grid: expected two numbers to cross, got {len(names)} ({', '.join(names)})")
    asked: list[dict[str, float]] = [{name: factor} for name in names for factor in factors]
    if grid:
        asked = [dict(zip(names, pair, strict=True)) for pair in itertools.product(factors, repeat=2)]
    there = device.numbers
    values = [{name: _scaled(name, there[name], factor) for name, factor in one.items()} for one in asked]
    devices = [device.with_numbers(changes) for changes in values]
    best = tune(shape, device, seed=seed, strategy=strategy)
    if best.interrupted:
        raise KeyboardInterrupt
    tiles = [best.tile, *(_best_tile(shape, chip, seed, strategy) for chip in devices)]
    pool = _pool(tiles, [device, *devices])
    tile, seconds = _fastest(pool, seconds_of(shape, pool, device))
    pool = list(dict.fromkeys([tile, *pool]))
    tolerated = too_large(shape, device) is not None
    points = tuple(
        _point(shape, chip, one, changes, pool, tolerated)
        for one, changes, chip in zip(asked, values, devices, strict=True)
    )
    numbers = tuple(_number(shape, device, tile, name, points) for name in names)
    return Sweep(shape, device, tile, seconds, numbers, points, grid)


def _names(what: str | Iterable[str], device: DeviceSpec, dtype: str) -> list[str]:
    """As `DeviceSpec.numbers` has them."""
    known, names = device.numbers, []
    for word in [what] if isinstance(what, str) else list(what):
        name = ALIASES.get(word, word)
        name = f"{name}.{dtype}" if name == "macs_per_cycle" else name
        if name not in known:
            raise ValueError(
                f"what: expected numbers of {device.name or 'the device'}, got {word!r}{near(str(word), known)}; "
                f"there are {', '.join(known)}"
            )
        if known[name] is None:
            raise ValueError(
                f"what: expected numbers that {device.name or 'the device'} has, got {word!r}: a chip of arch "
                f"{device.arch!r} without this path; leave it out"
            )
        names.append(name)
    if not names or len(set(names)) != len(names):
        got = ", ".join(names) or "none"
        raise ValueError(f"what: expected distinct numbers of the device, at least one, got {got}")
    return names


def _checked(factors: Iterable[float]) -> list[float]:
    """Ascending, each once."""
    found = [*factors]
    good = [isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in found]
    if not found or not all(good):
        raise ValueError(f"factors: expected finite numbers > 0, at least one, got {found}")
    return sorted({float(x) for x in found})


def _scaled(name: str, value: float, factor: float) -> float:
    """The number times a factor, as a spec can have it; at factor 1 as it is."""
    wanted = value * factor
    if factor == 1 or not math.isfinite(wanted):
        return wanted
    if name in COUNTS:
        return max(1.0, float(round(wanted)))
    if name in MEMORIES:
        return max(1.0, float(round(wanted / GRAIN))) * GRAIN
    return min(wanted, float(RANGES[name][2])) if name in RANGES else wanted


def _best_tile(shape: AttentionShape, device: DeviceSpec, seed: int, strategy: str) -> TileConfig | None:
    """The best tile of a device that there might be, None where none is legal."""
    try:
        result = tune(shape, device, seed=seed, strategy=strategy)
    except ValueError:  # the call itself is good, since the device as it is has a tile for it
        return None
    if result.interrupted:
        raise KeyboardInterrupt
    return result.tile


def _pool(tiles: Sequence[TileConfig | None], devices: Sequence[DeviceSpec]) -> list[TileConfig]:
    """The tiles, each once. A tile of all cores also on as many as its device has, where another one has more of them:
    to start them costs something."""
    most = max(int(chip.cube_cores) for chip in devices)
    found: dict[TileConfig, None] = {}
    for tile, chip in zip(tiles, devices, strict=True):
        if tile is not None:
            found[tile] = None
            if tile.cores == ALL_CORES and chip.cube_cores < most:
                found[tile.replace(cores=int(chip.cube_cores))] = None
    return list(found)


def _fastest(pool: Sequence[TileConfig], seconds: Sequence[float]) -> Priced:
    best = int(np.argmin(seconds))
    return Priced(pool[best], seconds[best])


def _point(
    shape: AttentionShape,
    device: DeviceSpec,
    factors: Mapping[str, float],
    values: Mapping[str, float],
    pool: Sequence[TileConfig],
    tolerated: bool,
) -> Point:
    """pool: the first of them is the tile that is kept. tolerated: a call too large for the memory is priced."""
    changes = dict(factors), dict(values)
    large = None if tolerated else too_large(shape, device)
    if large:
        return Point(*changes, None, (large.partition(";")[0],), None, None)
    seconds = seconds_of(shape, pool, device)
    kept = seconds[0] if math.isfinite(seconds[0]) else None
    refused = () if kept else tuple(misfits(shape, device, pool[0])) or ("price is not finite",)
    best = _fastest(pool, seconds)
    return Point(*changes, kept, refused, *(best if math.isfinite(best.seconds) else (None, None)))


# Elasticities --------------------------------------------------------------------------------------------------------


def _number(
    shape: AttentionShape, device: DeviceSpec, tile: TileConfig, name: str, points: Sequence[Point]
) -> Number:
    value = float(device.numbers[name])
    if name in COUNTS:
        low, high = max(1.0, value - 1), value + 1
        return Number(name, value, _between(shape, device, tile, name, low, high), f"between {low:g} and {high:g}")
    elasticity = float(slopes(shape, device, tile).elasticities.numbers[name]) + 0.0
    alone = [point for point in points if all(n == name or x == 1 for n, x in point.factors.items())]
    return Number(name, value, elasticity, "" if elasticity else _why_zero(value, alone))


def _between(
    shape: AttentionShape, device: DeviceSpec, tile: TileConfig, name: str, low: float, high: float
) -> float:
    first, last = (
        float(exact_seconds([shape], stacked([tile]), device.with_numbers({name: x}))[0]) for x in (low, high)
    )
    return math.log(last / first) / math.log(high / low) + 0.0


def _why_zero(value: float, points: Sequence[Point]) -> str:
    """What an elasticity of 0 means, from the points at which the number alone changes."""
    if value == 0:
        return "0 here, whatever the factor"
    small = "a small change does not change the price of this tile"
    if not points:
        return small
    if len({point.kept for point in points} - {None}) > 1:
        return f"{small}, larger ones do"
    if any(point.refused for point in points) or len({point.seconds for point in points}) > 1:
        return f"{small}; it decides which tiles fit"
    return f"{small}, and here no large one does"
