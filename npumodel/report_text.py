"""What is printed about a call: the article's table, the warning, the long form, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from npumodel import units
from npumodel.hardware import device, devices, provenance
from npumodel.hardware.registry import CONFIDENCE
from npumodel.model.durations import CONSTANT_TITLES
from npumodel.model.estimate import Cost

#: A stage that waits longer than this (s) has the wrong tile, says the article.
WAIT_LIMIT = 0.5e-3


@dataclasses.dataclass(frozen=True)
class Priced:
    """One call of a program and its price; `source` says who chose the tile, `better` is a cheaper tile's price, and
    `unpriced` names arguments of the call that the price leaves out."""

    cost: Cost
    source: str
    count: int = 1
    better: Cost | None = None
    unpriced: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All runs of this call together."""
        return self.count * self.cost.seconds


def table(call: Priced) -> str:
    """The article's table of one call: header, one row an op, the totals, and a warning where an op waits too long."""
    cost = call.cost
    parts = [
        f"total {units.milliseconds(cost.seconds)}",
        f"launch share {units.percent(cost.launch_share)}",
        f"L1 miss rate {units.percent(1 - cost.l1_hit_rate)}",
        f"count {call.count}",
    ]
    notes = [f"note: the price leaves out {', '.join(call.unpriced)}"] if call.unpriced else []
    return "\n".join([header(call), cost.table(), " | ".join(parts), *warnings(call), *notes])


def header(call: Priced) -> str:
    """ "flash_attention  B4 N32 S4096 D128 float16  tile 128x512 (auto: table)  on ascend910b2"."""
    cost = call.cost
    source = f" ({call.source})" if call.source else ""
    return f"{cost.shape.operation}  {cost.shape.label}  tile {cost.tile.label}{source}  on {cost.device}"


def warnings(call: Priced) -> list[str]:
    """One line if the call does not fit into the HBM. One if an op waits longer than WAIT_LIMIT: which tile, which ops,
    and a cheaper tile if one is known."""
    large = [f"warning: {call.cost.too_large}"] if call.cost.too_large else []
    return large + _late(call)


def _late(call: Priced) -> list[str]:
    late = [row for row in call.cost.rows if row.dma_wait > WAIT_LIMIT]
    if not late:
        return []
    waits = ", ".join(f"{row.title} {units.milliseconds(row.dma_wait)}" for row in late)
    text = f"warning: tile {call.cost.tile.label}: dma_wait above {units.milliseconds(WAIT_LIMIT)} in {waits}; "
    if call.better is None:
        hint = "" if call.source in ("auto: table", "auto: tuned") else " (`npumodel tune` searches)"
        return [text + f"no cheaper tile is known{hint}; bound by {call.cost.bound}"]
    gain = call.cost.seconds / call.better.seconds
    better = f"tile {call.better.tile.label} is predicted {gain:.2f}x as fast"
    return [text + f"{better} ({units.milliseconds(call.better.seconds)})"]


def tables(calls: Sequence[Priced]) -> str:
    """All calls, the dearest first, and their sum."""
    if not calls:
        return "no flash_attention call was made"
    ordered = dearest_first(calls)
    count = sum(call.count for call in calls)
    total = f"{count} calls, {len(calls)} distinct, {units.milliseconds(sum(call.seconds for call in calls))} in all"
    return "\n\n".join([*map(table, ordered), total] if count > 1 else map(table, ordered))


def dearest_first(calls: Iterable[Priced]) -> list[Priced]:
    """By the seconds of all runs together; equal ones keep their order."""
    return sorted(calls, key=lambda call: -call.seconds)


def details(call: Priced) -> str:
    """The long form of one price: the table, bounds, breakdown, traffic and buffers."""
    cost = call.cost
    low, high = units.milliseconds(cost.lower_bound), units.milliseconds(cost.upper_bound)
    bounds = f"between {low} (busiest pipe and launches) and {high}"
    plan = f"{cost.tasks} tasks on {cost.cores} cores, {cost.steps} steps, {cost.launches} launch(es)"
    lines = [table(call), f"bound by {cost.bound}; {bounds} (nothing overlapped)", plan, ""]
    lines += ["where the time goes (constant x gradient):", *_shares(cost.breakdown, cost.seconds), ""]
    lines += [f"L2 hit rate {units.percent(cost.l2_hit_rate)}; bytes moved:"]
    lines += units.columns((path, units.size(total)) for path, total in cost.traffic.items())
    lines += ["", "buffers of a core, and HBM:"]
    lines += units.columns((f.buffer, units.size(f.needed), f"of {units.size(f.available)}") for f in cost.footprints)
    return "\n".join(lines)


def _shares(breakdown: dict[str, float], total: float) -> list[str]:
    largest = sorted(breakdown.items(), key=lambda item: -item[1])
    rows = ((CONSTANT_TITLES[name], units.seconds(value), units.percent(value / total)) for name, value in largest)
    return units.columns(rows)


# Devices -----------------------------------------------------------------------------------------------------------


def device_list() -> str:
    """One line a device: cores, L1, L2, HBM."""
    lines: list[tuple[str, ...]] = [("name", "arch", "cube", "vector", "L1", "L2", "HBM", "HBM/s")]
    for name in devices():
        spec = device(name)
        cores = f"{spec.cube_cores:.0f}", f"{spec.cube_cores * spec.vector_cores_per_cube:.0f}"
        memory = (spec.l1_bytes, spec.l2_bytes, spec.hbm_bytes)
        rate = f"{spec.hbm_bytes_per_s / 1e9:.0f} GB/s"
        lines.append((name, spec.arch, *cores, *map(units.size, memory), rate))
    return "\n".join(line[2:] for line in units.columns(lines))


def device_text(name: str) -> str:
    """Every number of a device with its confidence and its source."""
    spec, numbers = device(name), provenance(name)
    lines = [f"{spec.name} ({spec.soc}), {spec.arch}, L1 overflow: {spec.overflow}, fingerprint {spec.fingerprint()}"]
    width, digits = max(map(len, numbers)), max(len(_number(value)) for value, _, _ in numbers.values())
    for field, (value, source, confidence) in numbers.items():
        lines.append(f"{field:<{width}}  {_number(value):>{digits}}  {confidence:<2}  {source}")
    legend = ", ".join(f"{tag} {words}" for tag, words in CONFIDENCE.items())
    return "\n".join([*lines, f"confidence: {legend}"])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.12g}"


# JSON --------------------------------------------------------------------------------------------------------------


def as_dict(call: Priced, breakdown: bool = False) -> dict[str, Any]:
    """A priced call for programs: SI units, plain numbers. breakdown: also where the time goes, by gradient."""
    cost = call.cost
    names = [field.name for field in dataclasses.fields(cost) if field.name != "chip"]
    return {name: _plain(getattr(cost, name)) for name in names} | {
        "label": cost.shape.label,
        "device_fingerprint": cost.chip.fingerprint(),
        "launch_share": cost.launch_share,
        "l1_miss_rate": 1 - cost.l1_hit_rate,
        "tile_source": call.source,
        "count": call.count,
        "ops": [_plain(row) for row in cost.rows],
        "warnings": warnings(call),
        "unpriced": list(call.unpriced),
        "better": call.better and {"tile": _plain(call.better.tile), "seconds": call.better.seconds},
        **({"breakdown": cost.breakdown} if breakdown else {}),
    }


def to_json(value: Any) -> str:
    """Strict JSON (no NaN), indented."""
    return json.dumps(value, indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, sequences as lists, scalars of NumPy and JAX as numbers."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value
