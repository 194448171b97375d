"""How a call is cut: one tile configuration, shared by the numerics, the price and the search."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from typing import Any

import jax

#: Largest values of the two discrete knobs; the schedule keeps this much history per stage.
MAX_BUFFERS = 4
MAX_LOOKAHEAD = 3
#: More cores than any chip has: all of them.
ALL_CORES = 2**20

FUSIONS = ("fused", "partly", "unfused")
CORE_ORDERS = ("balanced", "contiguous", "round_robin")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One plan for one call.

    block_q    query rows of one task
    block_kv   key/value rows of one step of the loop inside a task
    buffers    K and V blocks that fit in L1 at once (1 = load, then compute; 2 = double buffering), 1..4
    lookahead  steps by which QK^T runs ahead of PV (0 = one step after the other), 0..3
    fusion     "fused": one kernel; "partly": Q K^T on its own, the rest in one, S through global memory; "unfused":
               one kernel per graph op, S and P through global memory
    heads_packed  query heads of one kv head whose rows share a block (GQA): K and V are read once for all of them; a
               divisor of q_heads / kv_heads
    split_kv   tasks that share the keys of one q block, joined by a combine step at the end (flash decoding)
    persistent True: the next task of a core starts while the last steps of the one before drain (its Q has a second
               slot in L1, and the buffers and the lookahead go on over the border); False: it starts when that is done
    kv_pieces  pieces in which K and V of a step come into L1 and through the matrix unit, 1 = whole: a piece is
               block_kv_compute = block_kv / kv_pieces keys, and `buffers` counts pieces (the vendor's nRatio: 8 pieces
               of 128 keys a step); of fused kernels
    core_order "balanced": tasks of a causal call are dealt out in long and short pairs; "contiguous": in a row;
               "round_robin": each core in turn gets the next task in the order of launch (heads, their q blocks, parts)
    cores      cores that are launched, at most (a launch costs something for each); by default all of the chip

    `flash_attention` executes block_q and block_kv; the rest changes the price, not the result.
    The numbers are PyTree leaves: integers for a plan, arrays for many candidates at once, reals while an
    optimiser moves them. Plain numbers are checked; arrays and tracers are taken as they are.

    Raises ValueError (expected, got) for a plain number that is out of range or an unknown fusion.
    """

    block_q: Any
    block_kv: Any
    buffers: Any = 2
    lookahead: Any = 1
    fusion: str = dataclasses.field(default="fused", metadata={"static": True})
    heads_packed: Any = 1
    split_kv: Any = 1
    core_order: str = dataclasses.field(default="balanced", metadata={"static": True})
    kv_pieces: Any = 1
    cores: Any = ALL_CORES
    persistent: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self):
        for name, low, high in (
            ("block_q", 1, None),
            ("block_kv", 1, None),
            ("buffers", 1, MAX_BUFFERS),
            ("lookahead", 0, MAX_LOOKAHEAD),
            ("heads_packed", 1, None),
            ("split_kv", 1, None),
            ("kv_pieces", 1, None),
            ("cores", 1, None),
        ):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                continue
            if isinstance(value, bool) or not low <= float(value) <= (high or float("inf")):
                bound = f"{low}..{high}" if high is not None else f">= {low}"
                raise ValueError(f"{name}: expected a number {bound}, got {value!r}")
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion: expected one of {', '.join(FUSIONS)}, got {self.fusion!r}")
        if self.core_order not in CORE_ORDERS:
            raise ValueError(f"core_order: expected one of {', '.join(CORE_ORDERS)}, got {self.core_order!r}")
        if not isinstance(self.persistent, bool):
            raise ValueError(f"persistent: expected True or False, got {self.persistent!r}")
        for name in ("split_kv", "kv_pieces"):
            value = getattr(self, name)
            if self.fusion != "fused" and isinstance(value, numbers.Real) and value != 1:
                raise ValueError(f"{name}: expected 1 with fusion {self.fusion!r}, got {value!r}")

    def replace(self, **changes) -> TileConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def label(self) -> str:
        """ "128x512", with the knobs that are not at their default."""
        text = f"{self.block_q}x{self.block_kv}" + f" buffers={self.buffers}" * (self.buffers != 2)
        text += f" lookahead={self.lookahead}" * (self.lookahead != 1)
        ones = ("heads_packed", "split_kv", "kv_pieces")
        text += "".join(f" {name}={getattr(self, name)}" for name in ones if getattr(self, name) != 1)
        text += f" cores={self.cores}" * (self.cores != ALL_CORES)
        return (
            text
            + f" {self.fusion}" * (self.fusion != "fused")
            + f" {self.core_order}" * (self.core_order != "balanced")
            + " persistent" * self.persistent
        )


#: Every knob, and what it is where nothing is said (block_q, block_kv: nothing).
TILE_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TileConfig)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """One plan for one matmul: a task makes a block [block_m, block_n] of C, in steps of block_k along the depth.

    buffers   blocks of A and of B that fit in L1 at once, 1..4
    Leaves as in TileConfig. Raises ValueError (expected, got) for a plain number that is out of range.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    buffers: Any = 2

    def __post_init__(self):
        _check_numbers(self, {"block_m": None, "block_n": None, "block_k": None, "buffers": MAX_BUFFERS})

    @classmethod
    def parse(cls, text: str) -> MatmulTile:
        """Read "128x256x64", with " buffers=1" if not 2. Raises ValueError (expected, got)."""
        sizes, *rest = text.split()
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", sizes), re.fullmatch(r"buffers=(\d+)", " ".join(rest) or "buffers=2")
        if not all(match):
            raise ValueError(f"tile: expected a form like '128x256x64' or '128x256x64 buffers=1', got {text!r}")
        return cls(*(int(x) for m in match if m for x in m.groups()))

    @property
    def label(self) -> str:
        """ "128x256x64", with the buffers if they are not 2."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}" + f" buffers={self.buffers}" * (self.buffers != 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxTile:
    """One plan for one softmax: every core takes an equal share of the rows, block_rows of them a step. Rows wider than
    block_cols are read twice, in pieces: for the maximum and the sum, then for the result.

    Leaves as in TileConfig. Raises ValueError (expected, got) for a plain number that is out of range.
    """

    block_rows: Any
    block_cols: Any

    def __post_init__(self):
        _check_numbers(self, {"block_rows": None, "block_cols": None})

    @classmethod
    def parse(cls, text: str) -> SoftmaxTile:
        """Read "64x4096" (rows x columns). Raises ValueError (expected, got)."""
        match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
        if not match:
            raise ValueError(f"tile: expected a form like '64x4096' (rows x columns), got {text!r}")
        return cls(*map(int, match.groups()))

    @property
    def label(self) -> str:
        """ "64x4096": rows x columns."""
        return f"{self.block_rows}x{self.block_cols}"


def _check_numbers(tile, tops: dict[str, int | None]):
    """Refuse plain numbers below 1 or above their top; arrays and tracers are taken as they are."""
    for name, top in tops.items():
        value = getattr(tile, name)
        if isinstance(value, numbers.Real) and (isinstance(value, bool) or not 1 <= float(value) <= (top or math.inf)):
            raise ValueError(f"{name}: expected a number {f'1..{top}' if top else '>= 1'}, got {value!r}")
