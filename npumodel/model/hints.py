"""What knowing more is worth (the article's trade-off: a runtime does not know which positions are padding, nor what
kernel comes next)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from ..hardware import DeviceSpec
from ..tile import TileConfig
from ..workload import AttentionShape
from .estimate import Cost, estimate
from .trace import timeline


@dataclasses.dataclass(frozen=True)
class Hints:
    """Seconds of one call.

    padded      of the whole call, padding computed like everything else
    valid       where the lengths of its examples are known and padding is skipped
    next_loads  that each core loads before it computes anything: what a call saves where the kernel before it knows
                that it comes, and loads them while the launch is under way
    """

    padded: float
    valid: float
    next_loads: float

    @property
    def lengths(self) -> float:
        """Seconds that knowing the lengths is worth."""
        return self.padded - self.valid


def hints(
    shape: AttentionShape,
    device: DeviceSpec,
    tile: TileConfig,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
) -> Hints:
    """What the lengths of the examples, and the kernel that comes next, are worth to a call.

    q_lengths, kv_lengths  [batch], 0 .. q_len and kv_len (None: all of it); causal stays bottom-right aligned

    Examples of several lengths run in one launch. Assumed: their tasks are dealt out evenly, so that a core takes its
    share of each length, and never less than the longest task.

    Raises ValueError for lengths of another number or out of range, and as `estimate`.
    """
    pairs = zip(
        _lengths("q_lengths", q_lengths, shape.batch, shape.q_len),
        _lengths("kv_lengths", kv_lengths, shape.batch, shape.kv_len),
        strict=True,
    )
    groups = Counter(pair for pair in pairs if min(pair) > 0)
    whole = estimate(shape, device, tile)
    costs = [
        estimate(dataclasses.replace(shape, batch=count, q_len=q_len, kv_len=kv_len), device, tile)
        for (q_len, kv_len), count in sorted(groups.items())
    ]
    events = timeline(shape, device, tile, max_events=1).events
    first = min(e.start for e in events if e.pipe in ("CUBE", "VECTOR"))
    return Hints(whole.seconds, _together(costs, device, tile), first - min(e.start for e in events))


def _together(costs: list[Cost], device: DeviceSpec, tile: TileConfig) -> float:
    """Seconds of several calls as one launch."""
    if len(costs) == 1:
        return costs[0].seconds
    there, tasks = int(min(device.cube_cores, tile.cores)), sum(cost.tasks for cost in costs)
    launch = device.launch_base_s + device.launch_per_core_s * min(there, tasks)
    launch = float(launch + device.launch_per_task_s * math.ceil(tasks / there))
    cores, longest = 0.0, 0.0
    for cost in costs:
        waves, core = math.ceil(cost.tasks / there), cost.seconds - cost.launch_seconds
        cores += core * cost.tasks / (waves * there)
        longest = max(longest, core / waves)
    return launch + max(cores, longest)


def _lengths(name: str, lengths: Sequence[int] | None, batch: int, most: int) -> list[int]:
    if lengths is None:
        return [most] * batch
    found = [int(n) for n in lengths]
    if len(found) != batch or any(n != m or not 0 <= n <= most for n, m in zip(found, lengths, strict=True)):
        raise ValueError(f"{name}: expected {batch} integers (one an example) of 0..{most}, got {list(lengths)}")
    return found
