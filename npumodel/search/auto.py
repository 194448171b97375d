"""Which tile a call gets: the one resolution order. It serves numerics and price alike.

1. An explicit tile: a TileConfig, or a text such as "128x512".                              source "explicit"
2. A named level ("small", "large"), a number of parts, or a pair (parts_q, parts_kv).       "level: ..."
   1 and 2 are used as they are; on a device, one that does not fit raises the model's ValueError.
3. "auto" without a device: the blocks of the host's spec, cut to the lengths, no pricing.   "auto: host"
4. "auto", a row of the active tables with this very key: tables in order.                   "auto: table"
5. "auto", rows of the same power-of-two bucket: tables in order, nearest row first.         "auto: bucket"
6. "auto", the nearest rows of other sizes (all other fields of the key equal), of all       "auto: nearest"
   tables, at most 8.
   5 and 6: not used when the model says that what it would choose itself (8) is faster.
   4 to 6: blocks are cut to the lengths and the tile is checked against the spec in use; a row that does not fit is
   passed over, with a notice.
7. On a miss, as the innermost `use_table` says (on_miss), "autotune": a search now, for     "auto: tuned"
   the first call of a bucket; later ones find its row by 4 to 6. "error": TileTableMiss.
8. "auto", by the model: the fastest, by exact price, of a fixed small set of tiles that     "auto: model"
   has the default and the rule's in it, so that an auto tile is never slower than the default.
   Where there are tables, a warning says that no row served.
9. The default tile, where the model has no finite price.                                    "auto: default"
Notice and warning come once per device and key.

Policies "rule", "cann" and "default" skip 3..9 and take that tile, shrunk until it fits ("policy: rule").
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from npumodel.hardware import HOST, DeviceSpec
from npumodel.model.estimate import misfits
from npumodel.search.plans import priced
from npumodel.search.rules import POLICIES, does_not_fit, explicit, policy_tile, require_legal
from npumodel.search.space import fitted, legal, seconds_of, stacked
from npumodel.search.table import (
    SOURCES,
    Found,
    TileTable,
    TileTableError,
    TileTableMiss,
    Use,
    active_tables,
    active_use,
    call_of,
    named_tables,
    warn_once,
)
from npumodel.search.table_row import key_of, label_of
from npumodel.search.tuner import tune
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The tile of a call (a TileConfig; a matmul and a softmax have their own), and where it comes from (see the
    module)."""

    tile: Any
    source: str


#: Resolved calls, each with the tables that its key holds by identity (kept, so that an id stays its own).
_resolved: dict[tuple, tuple[Resolved, Any]] = {}
#: Fingerprints by the identity of the spec, each with its spec.
_fingerprints: dict[int, tuple[str, DeviceSpec]] = {}
#: Rows that were tuned on a miss in this process, by the file that they go into (None: into none).
_learned: dict[Path | None, TileTable] = {}
#: Held from the last look at `_learned` until the row is in it: of threads with one miss one searches, the others wait.
_tuning = threading.RLock()
#: Rows of other sizes that are tried.
_NEAREST = 8
#: Entries that a cache holds before it starts afresh.
_MANY = 8192


def resolve(
    shape: AttentionShape,
    device: DeviceSpec | None,
    tile_level: Any = "auto",
    policy: str | None = None,
    skips: bool = False,
) -> Resolved:
    """The tile of one call. device None: the host executes and nothing is priced.

    skips: whether something besides `shape.causal` leaves whole blocks unseen (a window, lengths); for the host.

    policy ("auto", "rule", "cann" or "default"): who picks the tile when tile_level is "auto". Repeated calls are
    answered from a cache, as long as the device's numbers, the active tables and on_miss are the same.

    Raises ValueError for a level or policy that is none, a tile that does not fit on the device, or a dtype that the
    device does not multiply; TileTableMiss, a KeyError, on a miss with on_miss "error".
    """
    tables = active_tables() if isinstance(tile_level, str) and tile_level == "auto" else []
    use = active_use()
    skips = device is None and (skips or shape.causal)
    key = (shape, _fingerprint(device), _hashable(tile_level), policy, skips, use.on_miss, use.file, *map(id, tables))
    known = _resolved.get(key)
    if known is None:
        known = (_resolve(shape, device, tile_level, policy, skips, tables, use), tables)
        _keep(_resolved, key, known)
    return known[0]


def _fingerprint(device: DeviceSpec | None) -> str | None:
    if device is None:
        return None
    known = _fingerprints.get(id(device))
    if known is None:
        known = (device.fingerprint(), device)
        _keep(_fingerprints, id(device), known)
    return known[0]


def _keep(cache: dict, key: Any, value: Any):
    if len(cache) >= _MANY:
        cache.clear()
    cache[key] = value


def _hashable(level: Any) -> Hashable:
    """A key for a level; 1, 1.0 and True are different levels."""
    if isinstance(level, list):
        level = tuple(level)
    try:
        hash(level)
    except TypeError:
        raise ValueError(f"tile_level: expected plain integers in a TileConfig or a pair, got {level!r}") from None
    return (type(level), level, *(map(type, level) if isinstance(level, tuple) else ()))


def _resolve(shape, device, tile_level, policy, skips, tables, use) -> Resolved:
    if policy not in (None, *POLICIES):
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if not (isinstance(tile_level, str) and tile_level == "auto"):
        return _explicit(shape, device, tile_level, policy)
    if device is None:
        return Resolved(fitted(TileConfig(*HOST.blocks(skips)), shape), "auto: host")
    if policy in POLICIES[1:]:
        return Resolved(policy_tile(policy, shape, device), f"policy: {policy}")
    found = look_up(shape, device, tables)
    return _from_row(found) if found else _on_miss(shape, device, tables, use)


def _explicit(shape, device, tile_level, policy) -> Resolved:
    if policy is not None:
        raise ValueError(f'policy: expected none beside a tile, got {policy!r}; give tile="auto" or no policy')
    tile, source = explicit(tile_level, shape)
    if device is not None:
        require_legal(shape, device, tile)
    return Resolved(tile, source)


# Tables --------------------------------------------------------------------------------------------------------------


def look_up(shape: AttentionShape, device: DeviceSpec, tables: Sequence[TileTable]) -> Found | None:
    """The first row that serves the call, its tile cut to the lengths and legal on the device: steps 4 to 6."""
    found = [row for table in tables for row in table.candidates(shape, device)]
    found.sort(key=_place)  # stable: then as the tables and their rows come
    nearby = sum(row.source != "nearest" for row in found)
    for table in tables if not nearby else ():
        table.warn_stale(shape, device)
    for row in found[: nearby + _NEAREST]:
        tile = fitted(row.tile, shape)
        if not legal([shape], stacked([tile]), device)[0]:
            _notice(row, tile, shape, device)
        elif row.source == "exact" or _beats_the_model(tile, shape, device):
            return dataclasses.replace(row, tile=tile)
    return None


def _place(row: Found) -> tuple[int, float]:
    return (SOURCES.index(row.source), row.distance if row.source == "nearest" else 0)


def _from_row(row: Found) -> Resolved:
    return Resolved(row.tile, "auto: table" if row.source == "exact" else f"auto: {row.source}")


def _notice(row: Found, tile: TileConfig, shape: AttentionShape, device: DeviceSpec):
    """Say that a row is passed over."""
    why = "; ".join(misfits(shape, device, tile))
    name = row.entry.header.name or "a device"
    what = f"tile table: row of {name} for {shape.label} is passed over: {does_not_fit(tile, device)}: {why}"
    warn_once(call_of(shape, device), what)


def _beats_the_model(tile: TileConfig, shape: AttentionShape, device: DeviceSpec) -> bool:
    """Whether a tile found for another call is at least as fast as what the model chooses without tables."""
    ours, other = seconds_of(shape, (tile, by_model([shape], device)[0].tile), device)
    return ours <= other


# On a miss -----------------------------------------------------------------------------------------------------------


def _on_miss(shape: AttentionShape, device: DeviceSpec, tables: Sequence[TileTable], use: Use) -> Resolved:
    if use.on_miss == "error":
        raise TileTableMiss(_missed(shape, device, 'use on_miss="heuristic" or "autotune"'))
    if use.on_miss == "autotune":
        return _tuned(shape, device, use.file)
    if any(map(len, tables)):
        warn_once(call_of(shape, device), _missed(shape, device, "leave it to the model, as now"))
    return by_model([shape], device)[0]


def _missed(shape: AttentionShape, device: DeviceSpec, else_: str) -> str:
    tables = "; ".join(f"{name}: {len(table)} row(s)" for name, table in named_tables()) or "none"
    cure = f"npumodel tune --shape {','.join(shape.label.split())} --device {device.name or 'DEVICE.toml'}"
    return (
        f"tile table: no row serves {label_of(key_of(shape))} on {device.name or 'the device'} "
        f"(spec_hash {device.fingerprint()}); searched: {tables}; tune it with `{cure}`, or {else_}"
    )


def _tuned(shape: AttentionShape, device: DeviceSpec, file: Path | None) -> Resolved:
    """The tile of a row that was tuned in this process, else of a search now, which is remembered and saved."""
    with _tuning:
        learned = _learned.get(file, TileTable())
        if found := look_up(shape, device, [learned]):
            return _from_row(found)
        chosen = by_model([shape], device)[0]
        in_bucket = any(row.source == "bucket" for row in learned.candidates(shape, device))
        if in_bucket or chosen.source == "auto: default":
            return chosen  # one search a bucket; none where nothing has a finite price
        result = tune(shape, device)
        if not result.complete:  # without a budget only Ctrl-C ends a search early, and that is for the caller
            raise KeyboardInterrupt
        row = result.table(explain=file is not None)
        _learned[file] = learned | row
    if file is not None:
        _save(row, file)
    return Resolved(fitted(result.tile, shape), "auto: tuned")


def _save(row: TileTable, file: Path):
    try:
        row.save(file)
    except (OSError, TileTableError) as error:
        warn_once((file,), f"{error}; what is tuned on a miss is kept for this process only")


# The model -----------------------------------------------------------------------------------------------------------


def by_model(shapes: Sequence[AttentionShape], device: DeviceSpec) -> list[Resolved]:
    """For each shape the fastest legal tile of a fixed small set, by exact price; alike shapes in one batch.

    Ties: fewer bytes of L1, then the earlier in the set. Raises ValueError when nothing is legal, or the device does
    not multiply the dtype.
    """
    found = priced(shapes, device)
    return [Resolved(plans.chosen, "auto: default" if plans.best is None else "auto: model") for plans in found]
