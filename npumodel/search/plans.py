"""The tiles that "auto" chooses from where no table has one, and that every search begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.search.rules import DEFAULT, rule_of_thumb, shrunk
from npumodel.search.space import (
    MOST_SPLIT,
    SPLIT_KEYS,
    alike,
    exact_seconds,
    fits,
    fitted,
    longest,
    needs,
    padded,
    possible,
    stacked,
)
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


class Plans(NamedTuple):
    """The candidates of one call, the default first: exact prices in seconds [n], infinite where a tile is not legal,
    and bytes of L1 [n]."""

    tiles: list[TileConfig]
    seconds: np.ndarray
    l1: np.ndarray
    default: TileConfig
    rule: TileConfig

    @property
    def best(self) -> int | None:
        """Place of the fastest; ties: fewer bytes of L1, then the earlier. None where nothing has a finite price."""
        place = int(np.lexsort((np.arange(len(self.tiles)), self.l1, self.seconds))[0])
        return place if np.isfinite(self.seconds[place]) else None

    @property
    def chosen(self) -> TileConfig:
        """The fastest, else the default."""
        return self.tiles[self.best or 0]

    def price(self, tile: TileConfig) -> float:
        """Seconds of one of them."""
        return float(self.seconds[self.tiles.index(tile)])


def priced(shapes: Sequence[AttentionShape], device: DeviceSpec) -> list[Plans]:
    """The candidates of each shape; those of alike shapes in one batch.

    Raises ValueError when nothing is legal, or the device does not multiply the dtype.
    """
    groups: dict[Any, list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault(alike(shape), []).append(i)
    found: list[Any] = [None] * len(shapes)
    for places in groups.values():
        for i, plans in zip(places, _priced([shapes[i] for i in places], device), strict=True):
            found[i] = plans
    return found


def _priced(shapes: Sequence[AttentionShape], device: DeviceSpec) -> list[Plans]:
    default = shrunk(shapes, device, [DEFAULT] * len(shapes))
    rule = shrunk(shapes, device, [rule_of_thumb(shape) for shape in shapes])
    sets = [candidates(shape, device, *both) for shape, *both in zip(shapes, default, rule, strict=True)]
    which, tiles = np.repeat(np.arange(len(sets)), [*map(len, sets)]), [tile for some in sets for tile in some]
    every = stacked(tiles)
    need = needs(shapes, every, device, which)
    seconds = np.full(len(tiles), np.inf)
    keep = np.flatnonzero(fits(need, device, shapes[0].dtype).all(-1) & possible(shapes, every, which))
    seconds[keep] = exact_seconds(shapes, stacked([tiles[i] for i in keep.tolist()]), device, which[keep])
    cuts = np.cumsum([*map(len, sets)])[:-1]
    return [*map(Plans, sets, np.split(seconds, cuts), np.split(need[:, 0], cuts), default, rule)]


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
