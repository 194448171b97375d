"""Memory planning: a call and a tile become counts, bytes and footprints.

Everything is a smooth function of the tile above temperature 0, and exact at 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..hardware import DeviceSpec
from ..relax import ceil_div, floor_div, floor_sum, gate, tent
from ..tile import TileConfig
from ..workload import AttentionShape
from .pipeline import PERIOD

#: Side of one matrix fractal (vendor: load rows and columns in multiples of 16).
FRACTAL = 16
#: Rows and columns of one matrix instruction's block in L0 (vendor's FlashAttentionScore: cube base block 128 x 128).
L0_BLOCK = 128
#: Bytes of one score or partial sum: the matrix unit accumulates in float32.
ACC_BYTES = 4
#: Fewest rows that a vector pass works on (vendor: 8 rows, one per 32-byte block of the reduction).
MIN_VECTOR_ROWS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """An AttentionShape as reals, so that one compiled cost function serves all shapes. `offset`: keys that the first
    query row sees, less one (causal), or kv_len (not causal): query i sees keys j <= i + offset."""

    batch: Any
    q_heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    head_dim: Any
    v_head_dim: Any
    offset: Any
    element_bytes: Any
    mask_bytes: Any

    @classmethod
    def of(cls, shape: AttentionShape) -> Problem:
        offset = shape.kv_len - shape.q_len if shape.causal else shape.kv_len
        return cls(
            *map(float, (shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len)),
            *map(float, (shape.head_dim, shape.v_head_dim, offset, shape.element_bytes, shape.mask_bytes)),
        )


class Blocks(NamedTuple):
    """How one head is cut. A task is one q block; a step is one kv block inside it.

    q_blocks        tasks per head
    kv_blocks       steps of a task that sees all keys
    rows, cols      of a full block
    tail_rows, tail_cols   of the last q block and the last kv block
    shorter         [transient + 1] number of q blocks with fewer than 1, 2, ... steps (causal)
    reach_end       q blocks that reach the last kv block
    steps           steps of all tasks of a head
    late_sum        sum over j = transient+1 .. kv_blocks-1 of the q blocks with fewer than j steps
    late_phase      [PERIOD] shares of the q blocks with more than `transient` steps that stop before the last kv block,
                    by their steps beyond, modulo PERIOD; from a sample of _SAMPLES blocks spread over them
    """

    q_blocks: Any
    kv_blocks: Any
    rows: Any
    cols: Any
    tail_rows: Any
    tail_cols: Any
    shorter: Any
    reach_end: Any
    steps: Any
    late_sum: Any
    late_phase: Any


#: Late q blocks whose phase is looked at. Only the part of their time that is off the straight line depends on it.
_SAMPLES = 24


def cut(p: Problem, tile: TileConfig, transient: int, temperature=0.0) -> Blocks:
    """Cut one head into blocks; `transient` is the number of task lengths that the schedule looks at one by one."""
    rows, cols = jnp.minimum(tile.block_q, p.q_len), jnp.minimum(tile.block_kv, p.kv_len)
    q_blocks, kv_blocks = ceil_div(p.q_len, rows, temperature), ceil_div(p.kv_len, cols, temperature)

    def shorter(j):  # q blocks whose last key lies before kv block j (counted from 1)
        return jnp.clip(floor_div((j - 1) * cols - p.offset, rows, temperature), 0.0, q_blocks)

    def shorter_sum(first, last):  # sum of shorter(j) over j = first .. last
        first = jnp.maximum(first, ceil_div(jnp.maximum(p.offset, 0.0), cols, temperature) + 1)
        count = jnp.maximum(last - first + 1, 0.0)
        start = jnp.maximum((first - 1) * cols - p.offset, 0.0)
        return floor_sum(count, cols, start, rows, temperature)

    def phase_shares(first, last):  # of q blocks first .. last - 1
        block = first + jnp.floor((jnp.arange(_SAMPLES) + 0.5) * jnp.maximum(last - first, 0.0) / _SAMPLES)
        steps = ceil_div((block + 1) * rows + p.offset, cols, temperature) - transient
        phase = (steps - PERIOD * jnp.floor(jax.lax.stop_gradient(steps) / PERIOD))[None, :]
        away = phase - jnp.arange(PERIOD, dtype=phase.dtype)[:, None]
        return (tent(away) + tent(away - PERIOD)).mean(1)

    counts = shorter(jnp.arange(1, transient + 2, dtype=jnp.result_type(float)))
    reach_end = q_blocks - shorter(kv_blocks)
    return Blocks(
        q_blocks,
        kv_blocks,
        rows,
        cols,
        tail_rows=jnp.clip(p.q_len - (q_blocks - 1) * rows, 0.0, rows),
        tail_cols=jnp.clip(p.kv_len - (kv_blocks - 1) * cols, 0.0, cols),
        shorter=counts,
        reach_end=reach_end,
        steps=q_blocks * kv_blocks - shorter_sum(1.0, kv_blocks),
        late_sum=shorter_sum(transient + 1.0, kv_blocks - 1),
        late_phase=phase_shares(counts[-1], q_blocks - reach_end),
    )


def at_length(every_length, steps):
    """The entry for `steps` steps of a quantity [transient] known for 1, 2, ... steps; beyond, it grows by the mean of
    the last period. Between integers it is linear."""
    transient = every_length.shape[0]
    j = jnp.arange(1, transient + 1, dtype=every_length.dtype)
    known = tent(jnp.minimum(steps, transient) - j) @ every_length
    return known + jnp.maximum(steps - transient, 0.0) * _per_step(every_length)


def _per_step(every_length):
    return (every_length[-1] - every_length[-1 - PERIOD]) / PERIOD


def over_tasks(b: Blocks, every_length, whole, ragged, empty):
    """Sum a per-task quantity over all tasks of a head.

    every_length [transient, ...] for tasks of 1, 2, ... full steps; whole [...]: a task that reaches the last kv block;
    ragged [...]: the last q block of the head; empty [...]: a task without steps.
    """
    transient = every_length.shape[0]
    j = jnp.arange(1, transient + 1, dtype=b.shorter.dtype)
    exactly = (b.shorter[1:] - b.shorter[:-1]) * gate(b.kv_blocks - j)
    early_stop = b.q_blocks - b.reach_end  # q blocks that stop before the last kv block
    late = jnp.maximum(early_stop - b.shorter[-1], 0.0) * gate(b.kv_blocks - 1 - transient)
    late_steps = jnp.maximum((b.kv_blocks - 1 - transient) * early_stop - b.late_sum, 0.0) * (late > 0)
    per_step = _per_step(every_length)
    beyond = late * (every_length[-1] + b.late_phase @ _phases(every_length)) + late_steps * per_step
    return exactly @ every_length + beyond + b.shorter[0] * empty + jnp.maximum(b.reach_end - 1, 0.0) * whole + ragged


def _phases(every_length):
    """[PERIOD, ...] for a task of transient + 0, 1, 2, ... steps (modulo PERIOD): what it takes more than the straight
    line of slope `_per_step` through the last known length."""
    ahead = jnp.arange(PERIOD, dtype=every_length.dtype)
    behind = jnp.where(ahead > 0, ahead - PERIOD, 0.0).reshape(-1, *[1] * (every_length.ndim - 1))
    same_phase = jnp.concatenate([every_length[-1:], every_length[-PERIOD:-1]])
    return same_phase - every_length[-1:] - behind * _per_step(every_length)[None]


class Traffic(NamedTuple):
    """What one core sees of the shared levels. Shares are 0..1; a `miss` goes to HBM, the rest is served by L2.

    active      cores that have work
    tasks       tasks of the whole call
    waves       tasks of the busiest core
    kv_miss     share of K and V bytes that come from HBM
    work_miss   share of workspace bytes (S, P, O partials) that do not stay in L2
    spill       share of the L1 working set that does not fit and is fetched again every step
    """

    active: Any
    tasks: Any
    waves: Any
    kv_miss: Any
    work_miss: Any
    spill: Any


def share_of_chip(p: Problem, d: DeviceSpec, b: Blocks, l1_bytes, workspace, temperature=0.0) -> Traffic:
    """Spread the tasks over the cores, and split the traffic between HBM and L2.

    L2 holds K and V of the heads in flight plus the workspace; what fits is read from HBM once, the rest every time.
    workspace: bytes of S, P and O partials that the whole chip has in flight.
    """
    tasks = p.batch * p.q_heads * b.q_blocks
    active = jnp.minimum(d.cube_cores, tasks)
    kv_head = p.kv_len * (p.head_dim + p.v_head_dim) * p.element_bytes
    in_flight = jnp.minimum(active, p.batch * p.kv_heads) * kv_head
    resident = jnp.minimum(1.0, d.l2_bytes / (in_flight + workspace))
    once = p.batch * p.kv_heads * kv_head
    asked = p.batch * p.q_heads * kv_rows(b) * (p.head_dim + p.v_head_dim) * p.element_bytes
    kv_bytes = once + jnp.maximum(asked - once, 0.0) * (1 - resident)
    return Traffic(
        active,
        tasks,
        waves=ceil_div(tasks, d.cube_cores, temperature),
        kv_miss=jnp.minimum(kv_bytes / asked, 1.0),
        work_miss=1 - resident,
        spill=jnp.maximum(0.0, 1 - d.l1_bytes / l1_bytes),
    )


def kv_rows(b: Blocks):
    """Rows of K (and of V) that all tasks of a head read."""
    return (b.steps - b.reach_end) * b.cols + b.reach_end * b.tail_cols


def footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]) -> dict:
    """Bytes that a kernel of these ops needs in every buffer of a core (its UB: of one vector unit)."""
    e, split = p.element_bytes, d.arch == "split"
    q, k, v = b.rows * p.head_dim * e, b.cols * p.head_dim * e, b.cols * p.v_head_dim * e
    slots_p = 2 if split or len(kinds) == 1 else tile.lookahead + 1
    l1 = 0.0
    if "qk" in kinds:
        l1 = l1 + q + tile.buffers * k
    if "pv" in kinds:
        l1 = l1 + tile.buffers * v + slots_p * b.rows * b.cols * e
    rows = b.rows / d.vector_cores_per_cube
    least = MIN_VECTOR_ROWS * b.cols * ACC_BYTES  # the smallest vector pass
    scores = jnp.maximum(jnp.minimum(d.vector_tile_bytes, rows * b.cols * ACC_BYTES), least)
    ub = 2 * scores * (1 + e / ACC_BYTES) + 2 * MIN_VECTOR_ROWS * ACC_BYTES * rows  # S, P; row max and sum, 32 B a row
    if len(kinds) > 1:
        out = rows * p.v_head_dim * ACC_BYTES
        ub = ub + out + jnp.minimum(out, d.vector_tile_bytes)  # the accumulator and a pass over the partial
    k0 = l0_depth(d, e)
    cube = [("qk", p.head_dim, b.cols), ("pv", b.cols, p.v_head_dim)]
    cube = [(jnp.minimum(depth, k0), jnp.minimum(width, L0_BLOCK)) for kind, depth, width in cube if kind in kinds]
    m0 = jnp.minimum(b.rows, L0_BLOCK)
    zero = jnp.zeros_like(ub)
    return {
        "L1": l1 + zero,
        "L0A": _largest([2 * m0 * depth * e for depth, _ in cube], zero),
        "L0B": _largest([2 * width * depth * e for depth, width in cube], zero),
        "L0C": _largest([2 * m0 * width * ACC_BYTES for _, width in cube], zero),
        "UB": ub if set(kinds) & {"mask", "softmax"} else zero,
    }


def _largest(values, zero):
    for value in values:
        zero = jnp.maximum(zero, value)
    return zero


def l0_depth(d: DeviceSpec, element_bytes):
    """Depth k of an L0 block: as deep as half of L0A and L0B (ping-pong) allows at 128 rows, in whole fractals.

    A property of the chip and dtype, not of the tile, so it needs no relaxation.
    """
    half = jnp.minimum(d.l0a_bytes, d.l0b_bytes) / (2 * L0_BLOCK * element_bytes)
    return jnp.maximum(FRACTAL, FRACTAL * jnp.floor(half / FRACTAL))


def capacities(d: DeviceSpec) -> dict:
    """Bytes that a core (UB: a vector unit) has of every buffer."""
    return {"L1": d.l1_bytes, "L0A": d.l0a_bytes, "L0B": d.l0b_bytes, "L0C": d.l0c_bytes, "UB": d.ub_bytes}


def workspace_bytes(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]):
    """Bytes of scores, probabilities and partial outputs that the chip keeps in global memory."""
    e = p.element_bytes
    if len(kinds) == 1:  # unfused: whole S and P
        s, pr = kinds[0] != "pv", kinds[0] != "qk" and kinds[0] != "mask"
        return p.batch * p.q_heads * p.q_len * p.kv_len * (ACC_BYTES * s + e * pr)
    if d.arch != "split":
        return jnp.zeros_like(b.rows)
    active = jnp.minimum(d.cube_cores, p.batch * p.q_heads * b.q_blocks)
    scores = 2 * ACC_BYTES + (tile.lookahead + 1) * e
    return active * (b.rows * b.cols * scores + 2 * b.rows * p.v_head_dim * ACC_BYTES)
