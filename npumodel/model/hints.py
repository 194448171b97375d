"""What knowing more is worth (the article's trade-off: a runtime does not know which positions are padding, nor what
kernel comes next)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..hardware import DeviceSpec
from ..tile import TileConfig
from ..workload import AttentionShape
from .estimate import estimate
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

    q_lengths, kv_lengths  [batch], as those of AttentionShape; None: those of `shape`

    Raises ValueError for lengths of another number or out of range, and as `estimate`.
    """
    q_lengths, kv_lengths = (
        own if given is None else given for given, own in ((q_lengths, shape.q_lengths), (kv_lengths, shape.kv_lengths))
    )
    known = dataclasses.replace(shape, q_lengths=q_lengths, kv_lengths=kv_lengths)
    padded = dataclasses.replace(shape, q_lengths=None, kv_lengths=None)
    whole = estimate(padded, device, tile)
    # Of a call that does nothing, what is left is the launches.
    valid = estimate(known, device, tile).seconds if known.groups else whole.launches * float(device.launch_base_s)
    events = timeline(padded, device, tile, max_events=1).events
    first = min(e.start for e in events if e.pipe in ("CUBE", "VECTOR"))
    return Hints(whole.seconds, valid, first - min(e.start for e in events))
