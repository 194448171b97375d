"""Memory planning: a call and a tile become counts, bytes and footprints.

Everything is a smooth function of the tile above temperature 0, and exact at 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..hardware import DeviceSpec
from ..relax import ceil_div, floor_div, floor_sum, gate
from ..tile import TileConfig
from ..workload import AttentionShape

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
    """An AttentionShape as reals, so that one compiled cost function serves all shapes.

    low, high   query i sees the keys i + low .. i + high that exist (causal, windows); low = -q_len and high = kv_len
                where nothing is cut off
    v_loads     1, or 0 where V is a view of K and is never moved on its own
    softcap     1 or 0
    """

    batch: Any
    q_heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    head_dim: Any
    v_head_dim: Any
    low: Any
    high: Any
    element_bytes: Any
    mask_bytes: Any
    v_loads: Any
    softcap: Any

    @classmethod
    def of(cls, shape: AttentionShape) -> Problem:
        return cls(
            *map(float, (shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len)),
            *map(float, (shape.head_dim, shape.v_head_dim, *shape.band, shape.element_bytes, shape.mask_bytes)),
            v_loads=float(not shape.v_in_k),
            softcap=float(shape.softcap),
        )


#: Tasks of a head that the schedule looks at one by one; of more, the middles of this many equal ranges.
SAMPLES = 32


class Blocks(NamedTuple):
    """How one head (of `heads_packed` query heads) is cut. A unit of work is one q block; a step is one kv block of it.

    q_blocks        q blocks of a head
    kv_blocks       kv blocks of a head
    rows, cols      query rows (of each packed head) and key rows of a full block
    piece_cols      key rows of a piece of a block
    tail_rows, tail_cols   of the last q block and the last kv block
    parts           tasks that share the keys of one q block (split_kv)
    steps           steps of all q blocks of a head
    last_steps      steps of the last q block
    most_steps      most steps of a q block before the last
    end_steps       steps of the middle one of the q blocks before the last that reach the last kv block
    reach_end       q blocks that reach the last kv block
    started         q blocks with at least one step; `empty`: those before them
    sample_steps    [SAMPLES] steps of q blocks spread over the started ones before the last
    """

    q_blocks: Any
    kv_blocks: Any
    rows: Any
    cols: Any
    piece_cols: Any
    tail_rows: Any
    tail_cols: Any
    parts: Any
    steps: Any
    last_steps: Any
    most_steps: Any
    end_steps: Any
    reach_end: Any
    started: Any
    sample_steps: Any

    @property
    def empty(self):
        return self.q_blocks - self.started


def cut(p: Problem, tile: TileConfig, temperature=0.0) -> Blocks:
    """Cut one head into blocks. The kv blocks lie on one grid that starts at key 0."""
    rows, cols = jnp.minimum(tile.block_q, p.q_len), jnp.minimum(tile.block_kv, p.kv_len)
    q_blocks, kv_blocks = ceil_div(p.q_len, rows, temperature), ceil_div(p.kv_len, cols, temperature)
    full = q_blocks - 1
    after_last = rows - 1 + p.high + cols  # q block i ends with kv block (i rows + this) // cols, counted from 1
    both = jnp.stack(jnp.broadcast_arrays(after_last, p.low + jnp.zeros_like(after_last)))
    run = jax.vmap(lambda start: _clipped_floor_sum(full, rows, start, cols, kv_blocks, temperature))
    (ends, starts), (before_end, _), (empty, _) = run(both)

    def steps_of(block):
        return steps_of_block(p, rows, cols, kv_blocks, block, temperature)

    def sample(number):
        return steps_of(empty + jax.lax.stop_gradient(jnp.floor((number + 0.5) * _stride(full - empty))))

    numbers = jnp.arange(float(SAMPLES))
    samples = jax.vmap(sample)(numbers)
    there = jax.vmap(lambda number, steps: jnp.where(number < full - empty, steps, 0.0))(numbers, samples)
    last_steps = jnp.maximum(kv_blocks - _first_of_block(p, rows, cols, kv_blocks, full, temperature), 1.0)
    return Blocks(
        q_blocks,
        kv_blocks,
        rows,
        cols,
        piece_cols=_whole(cols / tile.kv_pieces, temperature),
        tail_rows=jnp.clip(p.q_len - full * rows, 0.0, rows),
        tail_cols=jnp.clip(p.kv_len - (kv_blocks - 1) * cols, 0.0, cols),
        parts=tile.split_kv,
        steps=ends - starts + last_steps,
        last_steps=last_steps,
        most_steps=jnp.maximum(there.max(0), steps_of(jnp.maximum(full - 1, 0.0))),
        end_steps=jnp.maximum(steps_of(jax.lax.stop_gradient(jnp.floor((before_end + full - 1) / 2))), 1.0),
        reach_end=full - before_end + 1,
        started=q_blocks - empty,
        sample_steps=samples,
    )


def _whole(x, temperature):
    """x rounded up, with the gradient of x; above temperature 0 x itself."""
    return x + jnp.where(temperature <= 0, jax.lax.stop_gradient(jnp.ceil(x) - x), 0.0)


def steps_of_block(p: Problem, rows, cols, kv_blocks, block, temperature=0.0):
    """Steps of the q block of this number, from 0, if it is a full one."""
    end = jnp.clip(floor_div(block * rows + (rows - 1 + p.high + cols), cols, temperature), 0.0, kv_blocks)
    return jnp.maximum(end - _first_of_block(p, rows, cols, kv_blocks, block, temperature), 0.0)


def _first_of_block(p: Problem, rows, cols, kv_blocks, block, temperature):
    """The first kv block of a q block."""
    return jnp.clip(floor_div(block * rows + p.low, cols, temperature), 0.0, kv_blocks)


def _stride(count):
    """q blocks that each sample stands for, at least 1."""
    return jnp.maximum(count / SAMPLES, 1.0)


def _clipped_floor_sum(count, slope, start, modulus, top, temperature):
    """(sum over i = 0 .. count-1 of floor((slope i + start) / modulus) clipped to 0 .. top, terms below top, terms that
    are 0 because they would be negative or less than 1)."""
    first = jnp.clip(ceil_div(-start, slope, temperature), 0.0, count)
    some = jnp.clip(ceil_div(modulus - start, slope, temperature), 0.0, count)
    last = jnp.clip(ceil_div(top * modulus - start, slope, temperature), first, count)
    inside = floor_sum(last - first, slope, jnp.maximum(start + first * slope, 0.0), modulus, temperature)
    return inside + (count - last) * top, last, some


def sample_weights(b: Blocks, first, last):
    """[SAMPLES] how many of the q blocks first .. last - 1 (the empty ones and the last one of the head not among them)
    each sample stands for."""
    full, stride = b.q_blocks - 1, _stride(b.started - 1)

    def weight(number):
        low, high = b.empty + number * stride, b.empty + (number + 1) * stride
        return jnp.maximum(jnp.minimum(jnp.minimum(high, last), full) - jnp.maximum(low, first), 0.0)

    return jax.vmap(weight)(jnp.arange(float(SAMPLES)))


class Traffic(NamedTuple):
    """What one core sees of the shared levels. Shares are 0..1; a `miss` goes to HBM, the rest is served by L2.

    stacks      heads of the whole call, packed ones counted once
    active      cores that have work
    tasks       tasks of the whole call
    waves       tasks of the busiest core
    sharing     cores at work at a time, in the mean: those that share HBM
    kv_miss     share of K and V bytes that come from HBM
    s_miss, p_miss, o_miss   share of the bytes of S, P and partial O that do not stay in L2
    spill       share of the L1 working set that does not fit and is fetched again every step
    """

    stacks: Any
    active: Any
    tasks: Any
    waves: Any
    sharing: Any
    kv_miss: Any
    s_miss: Any
    p_miss: Any
    o_miss: Any
    spill: Any


def share_of_chip(
    p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, l1_bytes, kinds: tuple[str, ...], temperature=0.0
) -> Traffic:
    """Spread the tasks over the cores, and split the traffic between HBM and L2.

    Assumed (no source says how the L2 replaces lines): it holds the blocks that the cores hand to each other, which are
    read back at once, then K and V of the heads in flight (those that a window has left behind are not); what fits is
    read from HBM once, the rest every time. What lies between two kernels finds room in what is left.
    """
    stacks = p.batch * p.q_heads / tile.heads_packed
    tasks = stacks * b.q_blocks * b.parts
    active = active_cores(p, tile, d, b)
    waves = ceil_div(tasks, launched_cores(tile, d), temperature)
    row_bytes = (p.head_dim + p.v_loads * p.v_head_dim) * p.element_bytes
    seen = jnp.minimum(p.kv_len, kv_rows(b)) * row_bytes  # of a head: keys that no query sees are not read
    near = jnp.minimum(seen, (jnp.maximum(b.most_steps, b.last_steps) + 1) * b.cols * row_bytes)
    in_flight = jnp.minimum(active, p.batch * p.kv_heads) * near
    workspace, between = workspace_bytes(p, tile, d, b, kinds)
    resident = jnp.minimum(1.0, jnp.maximum(d.l2_bytes - workspace, 0.0) / in_flight)
    handed = jnp.minimum(1.0, d.l2_bytes / jnp.maximum(workspace, 1.0))
    kept = jnp.maximum(d.l2_bytes - in_flight - workspace, 0.0) / jnp.maximum(between, 1.0)
    between_miss = 1 - jnp.minimum(kept, 1.0)
    once = p.batch * p.kv_heads * seen
    asked = stacks * kv_rows(b) * row_bytes
    kv_bytes = once + jnp.maximum(asked - once, 0.0) * (1 - resident)
    return Traffic(
        stacks,
        active,
        tasks,
        waves=waves,
        sharing=tasks / waves,
        kv_miss=jnp.minimum(kv_bytes / asked, 1.0),
        s_miss=1 - handed if {"qk", "softmax"} <= set(kinds) else between_miss,
        p_miss=1 - handed if {"softmax", "pv"} <= set(kinds) else between_miss,
        o_miss=1 - handed,
        spill=jnp.maximum(0.0, 1 - d.l1_bytes / l1_bytes),
    )


def launched_cores(tile: TileConfig, d: DeviceSpec):
    """Cores that a plan may use: all of the chip, or fewer."""
    return jnp.minimum(tile.cores, d.cube_cores)


def active_cores(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks):
    """Cores that a plan launches: those that have work."""
    return jnp.minimum(launched_cores(tile, d), p.batch * p.q_heads / tile.heads_packed * b.q_blocks * b.parts)


def kv_rows(b: Blocks):
    """Rows of K (and of V) that all tasks of a head read."""
    return (b.steps - b.reach_end) * b.cols + b.reach_end * b.tail_cols


def footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]) -> dict:
    """Bytes that a kernel of these ops needs in every buffer of a core (its UB: of one vector unit), and in HBM."""
    e, split, all_rows = p.element_bytes, d.arch == "split", b.rows * tile.heads_packed
    q, k, v = all_rows * p.head_dim * e, b.piece_cols * p.head_dim * e, b.piece_cols * p.v_head_dim * p.v_loads * e
    ping_pong = split or len(kinds) == 1  # pieces of P from global memory; else P waits whole for a stage that lags
    probabilities = all_rows * e * (2 * b.piece_cols if ping_pong else (tile.lookahead + 1) * b.cols)
    l1 = 0.0
    if "qk" in kinds:
        l1 = l1 + q * (1 + tile.persistent) + tile.buffers * k
    if "pv" in kinds:
        l1 = l1 + tile.buffers * v + probabilities
    rows = all_rows / d.vector_cores_per_cube
    least = MIN_VECTOR_ROWS * b.cols * ACC_BYTES  # the smallest vector pass
    scores = jnp.maximum(jnp.minimum(d.vector_tile_bytes, rows * b.cols * ACC_BYTES), least)
    ub = 2 * scores * (1 + e / ACC_BYTES) + 2 * MIN_VECTOR_ROWS * ACC_BYTES * rows  # S, P; row max and sum, 32 B a row
    if len(kinds) > 1:
        out = rows * p.v_head_dim * ACC_BYTES
        ub = ub + out + jnp.minimum(out, d.vector_tile_bytes)  # the accumulator and a pass over the partial
    k0 = l0_depth(d, e)
    cube = [("qk", p.head_dim, b.cols), ("pv", b.cols, p.v_head_dim)]
    cube = [(jnp.minimum(depth, k0), jnp.minimum(width, L0_BLOCK)) for kind, depth, width in cube if kind in kinds]
    m0 = jnp.minimum(all_rows, L0_BLOCK)
    zero = jnp.zeros_like(ub)
    return {
        "L1": l1 + zero,
        "L0A": _largest([2 * m0 * depth * e for depth, _ in cube], zero),
        "L0B": _largest([2 * width * depth * e for depth, width in cube], zero),
        "L0C": _largest([2 * m0 * width * ACC_BYTES for _, width in cube], zero),
        "UB": ub if set(kinds) & {"mask", "softmax"} else zero,
        "HBM": tensor_bytes(p) + hbm_workspace(p, tile, d, b, kinds) + zero,
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
    """Bytes that a core (UB: a vector unit; HBM: the chip) has of every buffer."""
    core = {"L1": d.l1_bytes, "L0A": d.l0a_bytes, "L0B": d.l0b_bytes, "L0C": d.l0c_bytes, "UB": d.ub_bytes}
    return {**core, "HBM": d.hbm_bytes}


def tensor_bytes(p: Problem):
    """Bytes of q, k, v, o and the mask, as `AttentionShape.tensor_bytes`."""
    q_side = p.batch * p.q_heads * p.q_len * (p.head_dim + p.v_head_dim)
    kv_side = p.batch * p.kv_heads * p.kv_len * (p.head_dim + p.v_loads * p.v_head_dim)
    return p.element_bytes * (q_side + kv_side) + p.mask_bytes * p.q_len * p.kv_len


def hbm_workspace(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]):
    """Most bytes of global memory beside the tensors of the call at a time: scores, probabilities and partial outputs.
    Of split keys every part keeps its output until all are joined: float32, row max and row sum (32 bytes each)."""
    in_flight, between = workspace_bytes(p, tile, d, b, kinds)
    partial = ACC_BYTES * (p.v_head_dim + 2 * MIN_VECTOR_ROWS)
    return in_flight + between + gate(b.parts - 1) * b.parts * p.batch * p.q_heads * p.q_len * partial


def workspace_bytes(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]):
    """(bytes in flight, bytes that lie between kernels) of scores, probabilities and partial outputs in global memory.

    In flight: blocks that the cores of one kernel hand to each other, gone as soon as they are read; between kernels:
    all of S and P.
    """
    e = p.element_bytes
    zero, calls = jnp.zeros_like(b.rows + p.q_heads), p.batch * p.q_heads * p.q_len * p.kv_len
    if len(kinds) == 1:
        s, pr = kinds[0] != "pv", kinds[0] != "qk" and kinds[0] != "mask"
        return zero, zero + calls * (ACC_BYTES * s + e * pr)
    between = zero if "qk" in kinds else zero + calls * ACC_BYTES
    if d.arch != "split":
        return zero, between
    all_rows = b.rows * tile.heads_packed
    scores = 2 * ACC_BYTES * ("qk" in kinds) + (tile.lookahead + 1) * e
    return active_cores(p, tile, d, b) * all_rows * (b.cols * scores + 2 * p.v_head_dim * ACC_BYTES), between
