"""Which tile a call gets: the one resolution order. It serves numerics and price alike.

1. An explicit tile: a TileConfig, or a text such as "128x512".                              source "explicit"
2. A named level ("small", "large"), a number of parts, or a pair (parts_q, parts_kv).       "level: ..."
   1 and 2 are used as they are; on a device, one that does not fit raises the model's ValueError.
3. "auto" without a device: the blocks of the host's spec, cut to the lengths, no pricing.   "auto: host"
4. "auto", a row of the active tables with this very key: tables in order.                   "auto: table"
5. "auto", rows of the same power-of-two bucket: tables in order, nearest row first; not     "auto: bucket"
   used when the model says that the default tile is faster.
   4 and 5: blocks are cut to the lengths and the tile is checked against the spec in use; a row that does not fit is
   passed over, with one notice.
6. "auto", by the model: the fastest, by exact price, of a fixed small set of tiles that     "auto: model"
   has the default and the rule's in it, so that an auto tile is never slower than the default.
7. The default tile, where the model has no finite price.                                    "auto: default"

Policies "rule", "cann" and "default" skip 3..6 and take that tile, shrunk until it fits ("policy: rule").
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from npumodel.hardware import HOST, DeviceSpec
from npumodel.model.estimate import misfits
from npumodel.search.rules import (
    DEFAULT,
    POLICIES,
    does_not_fit,
    explicit,
    policy_tile,
    require_legal,
    rule_of_thumb,
    shrunk,
)
from npumodel.search.space import (
    MOST_SPLIT,
    SPLIT_KEYS,
    exact_seconds,
    fits,
    fitted,
    legal,
    longest,
    needs,
    padded,
    possible,
    seconds_of,
    stacked,
)
from npumodel.search.table import Found, TileTable, TileTableWarning, active_tables
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

#: (block_q, block_kv, buffers, lookahead) that the model chooses from, beside the default, the rule and one tile for
#: the whole call: picked greedily from 847, each time the one that most lowered the mean log of seconds / optimum over
#: 80 random shapes on four devices (coupled, split, direct, spilling). Their best is 0.7 % above the optimum (median).
_PLANS = """
    96x256x1x2  32x192x1x1   128x384x1x2  256x128x1x3  64x192x2x3  512x32x2x3   192x384x2x2  64x64x1x1
    32x96x1x1   96x192x2x3   192x64x1x3   128x256x1x2  64x512x1x2  16x512x1x0   128x384x1x3  48x256x1x2
    32x1024x1x2 384x48x2x1   256x512x1x2  256x128x2x2  128x96x2x3  128x48x1x1   96x96x2x3    32x128x1x1
"""
_CANDIDATES = tuple(TileConfig(q, kv, b, ahead) for q, kv, b, ahead in (map(int, p.split("x")) for p in _PLANS.split()))


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
    answered from a cache, as long as the device's numbers and the active tables are the same.

    Raises ValueError for a level or policy that is none, a tile that does not fit on the device, or a dtype that the
    device does not multiply.
    """
    tables = active_tables() if isinstance(tile_level, str) and tile_level == "auto" else []
    skips = device is None and (skips or shape.causal)
    key = (shape, _fingerprint(device), _hashable(tile_level), policy, skips, *map(id, tables))
    known = _resolved.get(key)
    if known is None:
        known = (_resolve(shape, device, tile_level, policy, skips, tables), tables)
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


def _resolve(shape, device, tile_level, policy, skips, tables) -> Resolved:
    if policy not in (None, *POLICIES):
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if not (isinstance(tile_level, str) and tile_level == "auto"):
        return _explicit(shape, device, tile_level, policy)
    if device is None:
        return Resolved(fitted(TileConfig(*HOST.blocks(skips)), shape), "auto: host")
    if policy in POLICIES[1:]:
        return Resolved(policy_tile(policy, shape, device), f"policy: {policy}")
    return _from_tables(shape, device, tables) or by_model([shape], device)[0]


def _explicit(shape, device, tile_level, policy) -> Resolved:
    if policy is not None:
        raise ValueError(f'policy: expected none beside a tile, got {policy!r}; give tile="auto" or no policy')
    tile, source = explicit(tile_level, shape)
    if device is not None:
        require_legal(shape, device, tile)
    return Resolved(tile, source)


# Tables --------------------------------------------------------------------------------------------------------------


def _from_tables(shape: AttentionShape, device: DeviceSpec, tables: Sequence[TileTable]) -> Resolved | None:
    found = [row for table in tables for row in table.candidates(shape, device)]
    found.sort(key=lambda row: row.source != "exact")  # stable: then as the tables and their rows come
    if not found:
        return None
    tiles = [fitted(row.tile, shape) for row in found]
    for row, tile in zip(found, tiles, strict=True):
        if not legal([shape], stacked([tile]), device)[0]:
            _notice(row, tile, shape, device)
        elif row.source == "exact":
            return Resolved(tile, "auto: table")
        elif _beats_default(tile, shape, device):
            return Resolved(tile, "auto: bucket")
    return None


def _notice(row: Found, tile: TileConfig, shape: AttentionShape, device: DeviceSpec):
    """Say once per call and device that a row is passed over (once, since what is resolved is cached)."""
    why = "; ".join(misfits(shape, device, tile))
    name = row.entry.header.name or "a device"
    what = f"tile table: row of {name} for {shape.label} is passed over: {does_not_fit(tile, device)}: {why}"
    warnings.warn(what, TileTableWarning, stacklevel=2)


def _beats_default(tile: TileConfig, shape: AttentionShape, device: DeviceSpec) -> bool:
    default = shrunk([shape], device, [DEFAULT])[0]
    ours, other = seconds_of(shape, (tile, default), device)
    return ours <= other


# The model -----------------------------------------------------------------------------------------------------------


def by_model(shapes: Sequence[AttentionShape], device: DeviceSpec) -> list[Resolved]:
    """For each shape the fastest legal tile of a fixed small set, by exact price; all shapes in one batch.

    The shapes have one dtype, a mask all or none, and no lengths if there are several shapes. Ties: fewer bytes of L1,
    then the earlier in the set. Raises ValueError when nothing is legal, or the device does not multiply the dtype.
    """
    default = shrunk(shapes, device, [DEFAULT] * len(shapes))
    rule = shrunk(shapes, device, [rule_of_thumb(shape) for shape in shapes])
    sets = [candidates(shape, device, *both) for shape, *both in zip(shapes, default, rule, strict=True)]
    pairs = [(shape, tile) for shape, tiles in zip(shapes, sets, strict=True) for tile in tiles]
    many, tiles = [shape for shape, _ in pairs], stacked([tile for _, tile in pairs])
    need = needs(many, tiles, device)
    seconds = np.full(len(pairs), np.inf)
    keep = np.flatnonzero(fits(need, device, shapes[0].dtype).all(-1) & possible(many, tiles))
    seconds[keep] = exact_seconds([many[i] for i in keep], stacked([pairs[i][1] for i in keep]), device)
    starts = np.cumsum([0, *map(len, sets)])
    return [_fastest(sets[i], *(x[starts[i] : starts[i + 1]] for x in (seconds, need[:, 0]))) for i in range(len(sets))]


def candidates(
    shape: AttentionShape, device: DeviceSpec, default: TileConfig, rule: TileConfig
) -> list[TileConfig]:
    """The default first; distinct, cut to the lengths. Where query heads share a kv head, the plans also with all of
    them packed; where their tasks leave cores idle, also with the keys split over these."""
    whole = TileConfig(*map(padded, longest(shape)), buffers=1, lookahead=0)
    plans = [default, rule, whole, *(fitted(tile, shape) for tile in _CANDIDATES)]
    return list(dict.fromkeys(plan for tile in plans for plan in _spread(tile, shape, device)))


def _spread(tile: TileConfig, shape: AttentionShape, device: DeviceSpec) -> list[TileConfig]:
    """A plan; also with its heads packed, its keys split, and both."""
    if shape.backward:
        return [tile]
    group = shape.q_heads // shape.kv_heads
    found = []
    for packed in dict.fromkeys((1, group)):
        plan = tile.replace(heads_packed=packed)
        tasks = sum(one.batch * one.q_heads // packed * -(-one.q_len // tile.block_q) for one in shape.groups)
        most = min(MOST_SPLIT, longest(shape)[1] // SPLIT_KEYS, int(device.cube_cores) // tasks)
        found += [plan.replace(split_kv=parts) for parts in dict.fromkeys((1, 2 ** max(0, most.bit_length() - 1)))]
    return found


def _fastest(tiles: Sequence[TileConfig], seconds: np.ndarray, l1_bytes: np.ndarray) -> Resolved:
    best = int(np.lexsort((np.arange(len(tiles)), l1_bytes, seconds))[0])
    if not np.isfinite(seconds[best]):
        return Resolved(tiles[0], "auto: default")
    return Resolved(tiles[best], "auto: model")
