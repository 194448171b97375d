"""Tiles that are named, not searched: levels, part counts, the article's rule of thumb, and the default.

level   "small" = 32 x 32, "large" = 128 x 128 (article M4)
parts   12 or (4, 3): the score square in 4 blocks of queries x 3 blocks of keys (article S3)
text    "128x512", as `TileConfig.label` prints it
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from npumodel.hardware import DeviceSpec
from npumodel.model.estimate import illegal
from npumodel.model.tiling import FRACTAL
from npumodel.search.space import NUMBERS, SPLIT_KEYS, fitted, legal, padded, stacked
from npumodel.tile import CORE_ORDERS, FUSIONS, TileConfig
from npumodel.workload import AttentionShape

LEVELS = {"small": TileConfig(32, 32), "large": TileConfig(128, 128)}
DEFAULT = TileConfig(128, 128)

#: Policies: who picks a tile when none is given.
POLICIES = ("auto", "rule", "cann", "default")
#: Most queries of a decode step, and most scores of a block of the vendor's kernels.
_DECODE, _MOST_SCORES = 16, 131_072

_CURE = '"auto", "small", "large", a text like "128x512", a number of parts, (parts_q, parts_kv), or a TileConfig'


def explicit(level: Any, shape: AttentionShape) -> tuple[TileConfig, str]:
    """The plain tile that `level` names for a call, and how it was given ("explicit" or "level: ...").

    Parts and blocks are those of the longest lengths. Raises ValueError (expected, got) for something that names no
    tile.
    """
    shape = shape.largest
    if isinstance(level, TileConfig):
        return _checked(level), "explicit"
    if isinstance(level, str) and level in LEVELS:
        return fitted(LEVELS[level], shape), f"level: {level}"
    if isinstance(level, str):
        return parse(level), "explicit"
    if isinstance(level, int) and not isinstance(level, bool):
        q, kv = balanced(level, shape)
    elif isinstance(level, tuple | list) and len(level) == 2 and all(type(n) is int for n in level):
        q, kv = level
    else:
        raise ValueError(f"tile_level: expected {_CURE}, got {level!r}")
    tile = DEFAULT.replace(block_q=block(shape.q_len, q, "queries"), block_kv=block(shape.kv_len, kv, "keys"))
    return tile, f"level: {q}x{kv} parts"


def _checked(tile: TileConfig) -> TileConfig:
    for name in NUMBERS:
        value = getattr(tile, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"tile_level.{name}: expected an integer, got {value!r}; give plain integers")
    return tile


def parse(text: str) -> TileConfig:
    """Read "128x512", also with " buffers=3", " lookahead=2", " heads_packed=8", " split_kv=4", " kv_pieces=4",
    " cores=8", " unfused", " round_robin", " persistent". Raises ValueError with the forms expected."""
    first, *rest = text.split() or [""]
    size = re.fullmatch(r"(\d+)[xX](\d+)", first)
    fields: dict[str, Any] = {}
    for word in rest:
        knob = re.fullmatch(r"(buffers|lookahead|heads_packed|split_kv|kv_pieces|cores)=(\d+)", word)
        if knob:
            fields[knob[1]] = int(knob[2])
        elif word in FUSIONS:
            fields["fusion"] = word
        elif word in CORE_ORDERS:
            fields["core_order"] = word
        elif word == "persistent":
            fields["persistent"] = True
        else:
            size = None
    if size is None:
        raise ValueError(f"tile_level: expected {_CURE}, got {text!r}")
    return TileConfig(int(size[1]), int(size[2]), **fields)


def balanced(parts: int, shape: AttentionShape) -> tuple[int, int]:
    """(parts_q, parts_kv) with this product: as equal as can be, more of q than of kv, and possible for the lengths.

    12 -> (4, 3); 1 -> (1, 1); 12 with a single query -> (1, 12). Raises ValueError if no such cut exists.
    """
    if parts < 1:
        raise ValueError(f"tile_level: expected a number of parts >= 1, got {parts}")
    small = range(1, math.isqrt(min(parts, shape.q_len * shape.kv_len)) + 1)
    pairs = [pair for n in small if parts % n == 0 for pair in ((n, parts // n), (parts // n, n))]
    pairs.sort(key=lambda pair: (max(pair) / min(pair), -pair[0]))
    for q, kv in pairs:
        if _block(shape.q_len, q) and _block(shape.kv_len, kv):
            return q, kv
    raise ValueError(
        f"tile_level: expected a number of parts that {shape.q_len} queries x {shape.kv_len} keys can be cut into, "
        f"got {parts}; give fewer, or a pair (parts_q, parts_kv)"
    )


def block(length: int, parts: int, what: str) -> int:
    """The block size that cuts `length` into exactly `parts`. Raises ValueError if there is none."""
    size = _block(length, parts)
    if size is None:
        raise ValueError(f"tile_level: expected parts that {length} {what} can be cut into, got {parts}; give fewer")
    return size


def _block(length: int, parts: int) -> int | None:
    """The smallest block with this count, in whole fractals where that keeps the count; None if no block has it."""
    if parts < 1 or parts > length:
        return None
    size = -(-length // parts)
    for candidate in (padded(size), size):
        if -(-length // candidate) == parts:
            return candidate
    return None


def rule_of_thumb(shape: AttentionShape) -> TileConfig:
    """The article's rule (M4), S = the longer of q_len and kv_len: S >= 2048 and D >= 64 -> large; B >= 8 and
    S <= 1024 -> small; else the default."""
    shape = shape.largest
    length = max(shape.q_len, shape.kv_len)
    if length >= 2048 and shape.head_dim >= 64:
        return LEVELS["large"]
    if shape.batch >= 8 and length <= 1024:
        return LEVELS["small"]
    return DEFAULT


def vendor_rule(shape: AttentionShape, device: DeviceSpec) -> TileConfig:
    """What the vendor's kernels do, as tiles of this model (design documents and tiling of ops-transformer's
    FlashAttentionScore and IncreFlashAttention):

      q_len 1..16       heads of a kv head packed, 512 keys a step; keys split over idle cores where batch * kv_heads is
                        less than 0.4 of the cores
      kv_len > 1024     128 queries x 128 keys, 8 (5 for 1025..1040 keys, 6 for 2049..2304 with head_dim 64) of them a
                        step, Q K^T one step ahead
      kv_len > 128      128 queries, up to 4 times as many while all cores stay busy and a block has at most 131,072
                        scores; all keys in one step
      else              one block

    Assumed: pieces of 128 keys are `kv_pieces`, the kernel's ping-pong `buffers` 2. Not checked against the device.
    """
    shape = shape.largest
    group, cores = shape.q_heads // shape.kv_heads, int(device.cube_cores)
    if shape.backward:
        return fitted(TileConfig(128, 128), shape)
    if shape.q_len <= _DECODE:
        split = max(1, cores // (shape.batch * shape.kv_heads)) if shape.batch * shape.kv_heads < 0.4 * cores else 1
        split = min(split, max(1, shape.kv_len // SPLIT_KEYS))
        return fitted(TileConfig(16, 512, heads_packed=group, split_kv=split), shape)
    if shape.kv_len > 1024:
        pieces = 5 if shape.kv_len <= 1040 else 6 if 2049 <= shape.kv_len <= 2304 and shape.head_dim == 64 else 8
        return fitted(TileConfig(128, 128 * pieces, kv_pieces=pieces), shape)
    if shape.kv_len > 128:
        ratio = 1
        while ratio < 4 and _stays_busy(shape, cores, 128 * (ratio + 1)):
            ratio += 1
        return fitted(TileConfig(128 * ratio, padded(shape.kv_len)), shape)
    return fitted(TileConfig(padded(shape.q_len), padded(shape.kv_len)), shape)


def _stays_busy(shape: AttentionShape, cores: int, rows: int) -> bool:
    tasks = shape.batch * shape.q_heads * math.ceil(shape.q_len / rows)
    return tasks >= cores and rows * padded(shape.kv_len) <= _MOST_SCORES


def default_tile(shape: AttentionShape, device: DeviceSpec) -> TileConfig:
    """128 x 128, double buffered, lookahead 1, shrunk by `ladder` until it fits.

    Raises ValueError that names the buffer, the bytes needed and the bytes there are, when nothing fits.
    """
    return shrunk([shape], device, [DEFAULT])[0]


def rule_tile(shape: AttentionShape, device: DeviceSpec) -> TileConfig:
    """The rule of thumb as a policy: its tile, shrunk by `ladder` until it fits. Raises as `default_tile`."""
    return shrunk([shape], device, [rule_of_thumb(shape)])[0]


def vendor_tile(shape: AttentionShape, device: DeviceSpec) -> TileConfig:
    """The vendor's rule as a policy: its tile, shrunk by `ladder` until it fits. Raises as `default_tile`."""
    return shrunk([shape], device, [vendor_rule(shape, device)])[0]


def policy_tile(policy: str, shape: AttentionShape, device: DeviceSpec) -> TileConfig:
    """The tile of policy "rule", "cann" or "default"."""
    if policy == "cann":
        return vendor_tile(shape, device)
    return {"rule": rule_tile, "default": default_tile}[policy](shape, device)


def ladder(tile: TileConfig, shape: AttentionShape) -> list[TileConfig]:
    """A tile and its smaller versions, in the order in which they are tried.

    Blocks are first cut to the lengths; then the larger one is halved (block_kv if equal) down to 16 x 16. If that is
    not enough: the same with lookahead 0, and then with lookahead 0 and one buffer. Pieces of K and V become fewer
    where a block is no longer so many whole fractals.
    """
    sizes = [fitted(tile, shape)]
    while max(sizes[-1].block_q, sizes[-1].block_kv) > FRACTAL:
        last = sizes[-1]
        name = "block_q" if last.block_q > last.block_kv else "block_kv"
        sizes.append(last.replace(**{name: padded(math.ceil(getattr(last, name) / 2))}))
    sizes = [size.replace(kv_pieces=math.gcd(size.kv_pieces, size.block_kv // FRACTAL) or 1) for size in sizes]
    plans = ({}, {"lookahead": 0}, {"lookahead": 0, "buffers": 1})
    return [size.replace(**plan) for plan in plans for size in sizes]


def shrunk(shapes: Sequence[AttentionShape], device: DeviceSpec, tiles: Sequence[TileConfig]) -> list[TileConfig]:
    """For every shape its tile, or the first of the tile's `ladder` that fits. All shapes: one dtype, masked or not.

    Raises ValueError for a shape on which nothing fits.
    """
    chosen = [ladder(tile, shape)[0] for tile, shape in zip(tiles, shapes, strict=True)]
    for i in np.flatnonzero(~legal(shapes, stacked(chosen), device)).tolist():
        steps = ladder(chosen[i], shapes[i])
        fit = legal([shapes[i]], stacked(steps), device)
        if not fit.any():
            require_legal(shapes[i], device, steps[-1])
        chosen[i] = steps[int(fit.argmax())]
    return chosen


def require_legal(shape: AttentionShape, device: DeviceSpec, tile: TileConfig):
    """Raise the model's ValueError (buffer, bytes needed, bytes available) when a tile does not fit."""
    problems = illegal(shape, device, tile)
    if problems:
        raise ValueError(f"{does_not_fit(tile, device)}: " + "; ".join(problems))


def does_not_fit(tile: TileConfig, device: DeviceSpec) -> str:
    """The beginning of a sentence."""
    return f"tile {tile.label} does not fit on {device.name or 'this device'}"
