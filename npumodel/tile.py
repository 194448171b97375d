"""How a call is cut: one tile configuration, shared by the numerics, the price and the search."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax

#: Largest values of the two discrete knobs; the schedule keeps this much history per stage.
MAX_BUFFERS = 4
MAX_LOOKAHEAD = 3

FUSIONS = ("fused", "unfused")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One plan for one call.

    block_q    query rows of one task
    block_kv   key/value rows of one step of the loop inside a task
    buffers    K and V blocks that fit in L1 at once (1 = load, then compute; 2 = double buffering), 1..4
    lookahead  steps by which QK^T runs ahead of PV (0 = one step after the other), 0..3
    fusion     "fused": one kernel; "unfused": one kernel per graph op, S and P through HBM

    The four numbers are PyTree leaves: integers for a plan, arrays for many candidates at once, reals while an
    optimiser moves them. Plain numbers are checked; arrays and tracers are taken as they are.

    Raises ValueError (expected, got) for a plain number that is out of range or an unknown fusion.
    """

    block_q: Any
    block_kv: Any
    buffers: Any = 2
    lookahead: Any = 1
    fusion: str = dataclasses.field(default="fused", metadata={"static": True})

    def __post_init__(self):
        for name, low, high in (
            ("block_q", 1, None),
            ("block_kv", 1, None),
            ("buffers", 1, MAX_BUFFERS),
            ("lookahead", 0, MAX_LOOKAHEAD),
        ):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                continue
            if isinstance(value, bool) or not low <= float(value) <= (high or float("inf")):
                bound = f"{low}..{high}" if high is not None else f">= {low}"
                raise ValueError(f"{name}: expected a number {bound}, got {value!r}")
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion: expected one of {', '.join(FUSIONS)}, got {self.fusion!r}")

    def replace(self, **changes) -> TileConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def label(self) -> str:
        """ "128x512", with the knobs that are not at their default."""
        text = f"{self.block_q}x{self.block_kv}" + f" buffers={self.buffers}" * (self.buffers != 2)
        text += f" lookahead={self.lookahead}" * (self.lookahead != 1)
        return text + f" {self.fusion}" * (self.fusion != "fused")
