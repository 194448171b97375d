"""Memory planning: a call and a tile become counts, bytes and footprints.

Everything is a smooth function of the tile above temperature 0, and exact at 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..hardware import DeviceSpec
from ..relax import ceil_div, floor_div, floor_sum, gate
from ..tile import MatmulTile, SoftmaxTile, TileConfig
from ..workload import AttentionShape, MatmulShape, Shape, SoftmaxShape

#: Side of one matrix fractal (vendor: load rows and columns in multiples of 16).
FRACTAL = 16
#: Rows and columns of one matrix instruction's block in L0 (vendor's FlashAttentionScore: cube base block 128 x 128).
L0_BLOCK = 128
#: Bytes of one score or partial sum: the matrix unit accumulates in float32.
ACC_BYTES = 4
#: Fewest rows that a vector pass works on (vendor: 8 rows, one per 32-byte block of the reduction).
MIN_VECTOR_ROWS = 8


#: The axis along which `cost.price` works on the groups of a call side by side.
GROUPS = "groups"


class Others(NamedTuple):
    """What a group of examples of equal lengths knows of the call that it is a part of.

    longer        examples of the call with at least its queries and keys, its own included
    tensor_bytes  of the tensors of the whole call, padding included
    """

    longer: Any
    tensor_bytes: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """An AttentionShape as reals, so that one compiled cost function serves all shapes.

    low, high   query i sees the keys i + low .. i + high that exist (causal, windows); low = -q_len and high = kv_len
                where nothing is cut off
    v_loads     1, or 0 where V is a view of K and is never moved on its own
    softcap     1 or 0
    kind        "attention", "backward" (of attention); "matmul", "softmax": what `lowered` makes of those
    v_tail      v_head_dim of the last head, where that differs (matmul)
    piece       columns of a row that a vector pass works on at once (softmax)
    others      None; for a call whose examples have lengths of their own, every leaf is [groups, ...], its sizes those
                of the groups of equal lengths. Some of them may have no example: then their batch is 0
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
    v_tail: Any = None
    piece: Any = None
    others: Others | None = None
    kind: str = dataclasses.field(default="attention", metadata={"static": True})

    @classmethod
    def of(cls, shape: AttentionShape) -> Problem:
        """Raises ValueError for a call of which no example does anything."""
        if shape.has_lengths:
            return _grouped(shape)
        return cls(
            *map(float, (shape.batch, shape.q_heads, shape.kv_heads, shape.q_len, shape.kv_len)),
            *map(float, (shape.head_dim, shape.v_head_dim, *shape.band, shape.element_bytes, shape.mask_bytes)),
            v_loads=float(not shape.v_in_k),
            softcap=float(shape.softcap),
            kind=shape.kind,
        )


def _grouped(shape: AttentionShape) -> Problem:
    """A call with lengths: its groups, and as many without any example as make their number a power of two."""
    shape.largest  # noqa: B018, refuses a call without groups
    groups, bytes_ = shape.groups, float(shape.tensor_bytes)

    def longer(group: AttentionShape) -> int:
        return sum(g.batch for g in groups if g.q_len >= group.q_len and g.kv_len >= group.kv_len)

    rows = [dataclasses.replace(Problem.of(g), others=Others(float(longer(g)), bytes_)) for g in groups]
    rows += [dataclasses.replace(rows[0], batch=0.0)] * (2 ** (len(rows) - 1).bit_length() - len(rows))
    return jax.tree.map(lambda *xs: np.array(xs), *rows)


def over_groups(p: Problem, x):
    """x of all groups of the call added up; x itself where it has no groups."""
    return x if p.others is None else jax.lax.psum(x, GROUPS)


def _mean_example(p: Problem, x):
    """x of a mean example of the call."""
    return x if p.others is None else over_groups(p, p.batch * x) / over_groups(p, p.batch)


def _largest_group(p: Problem, x):
    """The largest x of a group."""
    return x if p.others is None else jax.lax.all_gather(x, GROUPS).max(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """A MatmulShape as reals."""

    batch: Any
    m: Any
    n: Any
    k: Any
    element_bytes: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxProblem:
    """A SoftmaxShape as reals."""

    rows: Any
    cols: Any
    element_bytes: Any


#: Anything that `cost.price` takes, and the tile that goes with it.
AnyProblem = Problem | MatmulProblem | SoftmaxProblem
AnyTile = TileConfig | MatmulTile | SoftmaxTile


def problem_of(shape: Shape) -> AnyProblem:
    """A shape as reals."""
    if isinstance(shape, MatmulShape):
        return MatmulProblem(*map(float, (shape.batch, shape.m, shape.n, shape.k, shape.element_bytes)))
    if isinstance(shape, SoftmaxShape):
        return SoftmaxProblem(*map(float, (shape.rows, shape.cols, shape.element_bytes)))
    return Problem.of(shape)


def lowered(p: AnyProblem, tile: AnyTile, d: DeviceSpec, temperature=0.0) -> tuple[Problem, TileConfig]:
    """A call and its tile as attention's kernels see them.

    A matmul is P V on its own: A is P [m, k], a column block of B and of C is V [k, block_n] and O [m, block_n] of a
    head, so that there are ceil(n / block_n) heads, the last one ragged. A softmax is that of S on its own, transposed:
    the steps go along its rows, and a core's rows are a head; if the cores cannot share them evenly, the last head has
    fewer rows, and the number of heads is a fraction.
    """
    if isinstance(p, MatmulProblem) and isinstance(tile, MatmulTile):
        width = jnp.minimum(tile.block_n, p.n)
        heads = ceil_div(p.n, width, temperature)
        tail = jnp.clip(p.n - (heads - 1) * width, 0.0, width)
        sizes = (p.batch, heads, heads, p.m, p.k, 0.0, width, -p.m, p.k, p.element_bytes)
        as_pv = Problem(*sizes, 0.0, 1.0, 0.0, v_tail=tail, kind="matmul")
        return as_pv, TileConfig(tile.block_m, tile.block_k, tile.buffers, 0)
    if isinstance(p, SoftmaxProblem) and isinstance(tile, SoftmaxTile):
        rows = ceil_div(p.rows, jnp.minimum(d.cube_cores, p.rows), temperature)
        sizes = (1.0, p.rows / rows, 1.0, p.cols, rows, 0.0, 0.0, -p.cols, rows, p.element_bytes)
        piece = jnp.minimum(tile.block_cols, p.cols)
        return Problem(*sizes, 0.0, 1.0, 0.0, piece=piece, kind="softmax"), TileConfig(p.cols, tile.block_rows, 2, 0)
    if isinstance(p, Problem) and isinstance(tile, TileConfig):
        return p, tile
    raise ValueError(f"tile: expected the kind that goes with a {type(p).__name__}, got a {type(tile).__name__}")


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
    most_steps      most steps of a q block before the last; least_steps: least, but for those without any
    end_steps       steps of the middle one of the q blocks before the last that reach the last kv block
    reach_end       q blocks that reach the last kv block
    started         q blocks with at least one step; `empty`: those before them
    from_start      q blocks before the last that begin with the first kv block
    moving_steps    mean steps of those before the last that neither begin there nor reach the end
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
    least_steps: Any
    end_steps: Any
    reach_end: Any
    started: Any
    from_start: Any
    moving_steps: Any

    @property
    def empty(self):
        return self.q_blocks - self.started

    @property
    def before_end(self):
        """q blocks that do not reach the last kv block."""
        return self.q_blocks - self.reach_end


def cut(p: Problem, tile: TileConfig, temperature=0.0) -> Blocks:
    """Cut one head into blocks. The kv blocks lie on one grid that starts at key 0."""
    rows, cols = jnp.minimum(tile.block_q, p.q_len), jnp.minimum(tile.block_kv, p.kv_len)
    q_blocks, kv_blocks = ceil_div(p.q_len, rows, temperature), ceil_div(p.kv_len, cols, temperature)
    full = q_blocks - 1
    ends, starts = _range_of_block(p, rows, cols)

    def before(keys, start):  # q blocks whose range is, at `start`, not yet at so many keys
        return jnp.clip(ceil_div(keys - start, rows, temperature), 0.0, full)

    from_start, before_end, empty = before(cols, starts), before(kv_blocks * cols, ends), before(cols, ends)
    moving = jnp.maximum(before_end - from_start, 0.0)
    both = ((ends, from_start, before_end), (starts, from_start, before_end))
    every = ((ends, empty, before_end), (starts, from_start, full))
    last_moving, first_moving, last_blocks, first_blocks = _kv_blocks_before(rows, cols, (*both, *every), temperature)
    moving_steps = (last_moving - first_moving) / jnp.maximum(moving, 1.0)

    def steps_of(block):
        return steps_of_block(p, rows, cols, kv_blocks, jnp.clip(block, 0.0, jnp.maximum(full - 1, 0.0)), temperature)

    less, more = (f(jax.lax.stop_gradient(moving_steps)) for f in (jnp.floor, jnp.ceil))
    less, more = (jnp.where(temperature <= 0, x, moving_steps) for x in (less, more))
    most = jnp.maximum(steps_of(from_start - 1), steps_of(jnp.maximum(from_start, before_end)))
    least = jnp.minimum(steps_of(empty), steps_of(full - 1))
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
        steps=last_blocks + (full - before_end) * kv_blocks - first_blocks + last_steps,
        last_steps=last_steps,
        most_steps=jnp.maximum(most, more),
        least_steps=jnp.where(moving > 0, jnp.minimum(least, less), least),
        end_steps=jnp.maximum(steps_of(jax.lax.stop_gradient(jnp.floor((before_end + full - 1) / 2))), 1.0),
        reach_end=full - before_end + 1,
        started=q_blocks - empty,
        from_start=from_start,
        moving_steps=moving_steps,
    )


def _whole(x, temperature):
    """x rounded up, with the gradient of x; above temperature 0 x itself."""
    return x + jnp.where(temperature <= 0, jax.lax.stop_gradient(jnp.ceil(x) - x), 0.0)


def _range_of_block(p: Problem, rows, cols) -> tuple[Any, Any]:
    """Where the range of q block 0 ends, and where it starts, in keys; q block i lies i rows behind. In whole kv blocks
    and clipped to those that there are: the number of its last kv block, from 1, and that of its first, from 0."""
    return rows - 1 + p.high + cols, p.low + jnp.zeros_like(rows)


def _kv_blocks_before(rows, cols, ranges, temperature):
    """For each of `ranges` (keys at q block 0, first, last): the whole kv blocks before that place, added up over the q
    blocks first .. last - 1, all of them behind key 0."""
    counted = ((start, first, jnp.maximum(last - first, 0.0)) for start, first, last in ranges)
    start, first, count = (jnp.stack(jnp.broadcast_arrays(*x)) for x in zip(*counted, strict=True))
    sums = floor_sum(count, rows[None], jnp.maximum(start + first * rows[None], 0.0), cols[None], temperature)
    return [sums[i] for i in range(len(ranges))]


def steps_of_block(p: Problem, rows, cols, kv_blocks, block, temperature=0.0):
    """Steps of the q block of this number, from 0, if it is a full one."""
    ends, _ = _range_of_block(p, rows, cols)
    end = jnp.clip(floor_div(block * rows + ends, cols, temperature), 0.0, kv_blocks)
    return jnp.maximum(end - _first_of_block(p, rows, cols, kv_blocks, block, temperature), 0.0)


def _first_of_block(p: Problem, rows, cols, kv_blocks, block, temperature):
    """The first kv block of a q block."""
    return jnp.clip(floor_div(block * rows + p.low, cols, temperature), 0.0, kv_blocks)


def at_most(p: Problem, b: Blocks, steps, first, last, temperature=0.0):
    """How many of the q blocks first .. last - 1, all before the last one of the head, have at most so many steps (a
    real, >= 0).

    Those that begin with the first kv block have ever more steps, those that reach the last one ever fewer; in between
    there are only two numbers of steps, next to each other.
    """
    growing, shrinking = _beyond(p, b, steps, temperature)

    def within(begin, end):  # of these q blocks, those that are first .. last - 1
        return jnp.maximum(jnp.minimum(end, last) - jnp.maximum(begin, first), 0.0)

    until = jnp.maximum(b.from_start, b.before_end)
    fewer = jnp.clip(_next(steps, temperature) - b.moving_steps, 0.0, 1.0)
    count = within(0.0 * b.from_start, growing) + fewer * within(b.from_start, until)
    return count + within(shrinking, b.q_blocks - 1)


def _next(steps, temperature):
    """The first whole number above `steps`; above temperature 0, that for the mean of all steps around."""
    return jnp.where(temperature <= 0, jnp.floor(jax.lax.stop_gradient(steps)) + 1, steps + 0.5)


def _beyond(p: Problem, b: Blocks, steps, temperature) -> tuple[Any, Any]:
    """(the first of the q blocks that begin with the first kv block to have more steps, the first that has no more of
    those that neither do nor come before the end)."""
    ends, starts = _range_of_block(p, b.rows, b.cols)
    more = _next(steps, temperature)

    def bound(kv_blocks, start):  # the first q block whose range is, at `start`, at so many kv blocks
        place = (kv_blocks * b.cols - start) / b.rows
        return jnp.where(temperature <= 0, ceil_div(kv_blocks * b.cols - start, b.rows), place + 0.5)

    growing = jnp.where(steps < b.kv_blocks, jnp.maximum(bound(more, ends), 0.0), b.from_start)
    shrinking = bound(b.kv_blocks - more + 1, starts)
    return jnp.minimum(growing, b.from_start), jnp.maximum(shrinking, jnp.maximum(b.from_start, b.before_end))


def steps_before(p: Problem, b: Blocks, block, temperature=0.0):
    """Steps of all q blocks 0 .. block - 1, these before the last one of the head; of a block a share, where `block` is
    not whole."""
    whole = jnp.floor(jax.lax.stop_gradient(block))
    ends, starts = _range_of_block(p, b.rows, b.cols)
    ranges = ((ends, b.empty, jnp.minimum(whole, b.before_end)), (starts, b.from_start, whole))
    last_blocks, first_blocks = _kv_blocks_before(b.rows, b.cols, ranges, temperature)
    share = (block - whole) * steps_of_block(p, b.rows, b.cols, b.kv_blocks, whole, temperature)
    return last_blocks + jnp.maximum(whole - b.before_end, 0.0) * b.kv_blocks - first_blocks + share


def steps_beyond(p: Problem, b: Blocks, limit, temperature=0.0):
    """Steps beyond the first `limit` (a whole number) of each q block before the last one of the head, added up."""
    ends, starts = _range_of_block(p, b.rows, b.cols)
    growing, shrinking = _beyond(p, b, limit, temperature)
    shrinking = jnp.minimum(shrinking, b.q_blocks - 1)
    until = jnp.maximum(b.from_start, b.before_end)
    before_end = jnp.clip(b.before_end, growing, b.from_start)
    ranges = ((ends, growing, before_end), (starts, until, shrinking))
    last_blocks, first_blocks = _kv_blocks_before(b.rows, b.cols, ranges, temperature)
    left = jnp.maximum(shrinking - until, 0.0)
    grown = last_blocks + (b.from_start - before_end) * b.kv_blocks - (b.from_start - growing) * limit
    moved = (until - b.from_start) * jnp.maximum(b.moving_steps - limit, 0.0)
    return grown + moved + left * (b.kv_blocks - limit) - first_blocks


class Traffic(NamedTuple):
    """What one core sees of the shared levels. Shares are 0..1; a `miss` goes to HBM, the rest is served by L2.

    stacks      heads of the whole call, or of a group, packed ones counted once
    active      cores that have work
    tasks       tasks of the whole call, or of a group
    waves       tasks of the busiest core; of a group: of the core with the most of the tasks that are as long
    launched    tasks of the core that gets the most
    sharing     cores at work at a time, in the mean: those that share HBM
    kv_miss     share of K and V bytes that come from HBM
    s_miss, p_miss, o_miss   share of the bytes of S, P and partial O that do not stay in L2; backward: of S and dP, of
                P and dS, and of the sums of dQ, dK and dV at the end
    q_miss, dq_miss   share of the bytes of Q (dO alike) and of dQ that come from, or end up in, HBM
    spill       share of the L1 working set that does not fit and is fetched again every step
    """

    stacks: Any
    active: Any
    tasks: Any
    waves: Any
    launched: Any
    sharing: Any
    kv_miss: Any
    s_miss: Any
    p_miss: Any
    o_miss: Any
    spill: Any
    q_miss: Any = 1.0
    dq_miss: Any = 1.0


def share_of_chip(
    p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, l1_bytes, kinds: tuple[str, ...], temperature=0.0
) -> Traffic:
    """Spread the tasks over the cores, and split the traffic between HBM and L2.

    Assumed (no source says how the L2 replaces lines): it holds the blocks that the cores hand to each other, which are
    read back at once, then K and V of the heads in flight (those that a window has left behind are not); what fits is
    read from HBM once, the rest every time. What lies between two kernels finds room in what is left.

    Backward: the float32 sums of dK and dV lie beside K and V, and an atomic add costs HBM what a write does. A task's
    Q, dO and dQ stay in L2. Of all sums, what fits is still there when they are cast at the end.

    A group of a call with lengths shares all of this with the others: cores, memory and L2 are those of the whole call,
    with the mean of its examples in flight, and as many cores at a time at work as if all steps took equally long.
    """
    if p.kind == "matmul":
        return _share_of_matmul(p, d, b, l1_bytes, temperature)
    if p.kind == "softmax":
        return _share_of_softmax(p, d, b, temperature)
    stacks = p.batch * p.q_heads / tile.heads_packed
    tasks = stacks * b.q_blocks * b.parts
    active, cores = active_cores(p, tile, d, b), launched_cores(tile, d)
    launched = waves = ceil_div(over_groups(p, tasks), cores, temperature)
    sharing = tasks / waves
    if p.others is not None:
        of_example = p.q_heads / tile.heads_packed * b.q_blocks * b.parts
        waves = ceil_div(p.others.longer * of_example, cores, temperature)
        steps = over_groups(p, stacks * b.steps)
        longest = _largest_group(p, waves * b.steps / (b.q_blocks * b.parts))
        sharing = steps / jnp.maximum(steps / active, longest)
    row_bytes = (p.head_dim + p.v_loads * p.v_head_dim) * p.element_bytes
    seen = jnp.minimum(p.kv_len, kv_rows(b)) * row_bytes  # of a head: keys that no query sees are not read
    near = jnp.minimum(seen, (jnp.maximum(b.most_steps, b.last_steps) + 1) * b.cols * row_bytes)
    sums = near / row_bytes * (p.head_dim + p.v_head_dim) * ACC_BYTES if p.kind == "backward" else 0.0
    in_flight = jnp.minimum(active, over_groups(p, p.batch * p.kv_heads)) * _mean_example(p, near + sums)
    workspace, between = workspace_bytes(p, tile, d, b, kinds)
    resident = jnp.minimum(1.0, jnp.maximum(d.l2_bytes - workspace, 0.0) / in_flight)
    handed = jnp.minimum(1.0, d.l2_bytes / jnp.maximum(workspace, 1.0))
    kept = jnp.maximum(d.l2_bytes - in_flight - workspace, 0.0) / jnp.maximum(between, 1.0)
    between_miss = 1 - jnp.minimum(kept, 1.0)
    once = p.batch * p.kv_heads * seen
    asked = stacks * kv_rows(b) * row_bytes
    kv_bytes = once + jnp.maximum(asked - once, 0.0) * (1 - resident)
    q_miss = dq_miss = jnp.ones_like(resident)
    if p.kind == "backward":
        dq_miss = jnp.minimum(1.0, p.q_len / ((b.steps - b.last_steps) * b.rows + b.last_steps * b.tail_rows))
        q_miss = dq_miss if d.arch == "split" else q_miss
    return Traffic(
        stacks,
        active,
        tasks,
        waves=waves,
        launched=launched,
        sharing=sharing,
        kv_miss=jnp.minimum(kv_bytes / jnp.maximum(asked, 1.0), 1.0),
        s_miss=1 - handed if {"qk", "softmax"} <= set(kinds) or p.kind == "backward" else between_miss,
        p_miss=1 - handed if {"softmax", "pv"} <= set(kinds) or p.kind == "backward" else between_miss,
        o_miss=1 - (jnp.minimum(1.0, d.l2_bytes / sum_bytes(p)) if p.kind == "backward" else handed),
        spill=jnp.maximum(0.0, 1 - d.l1_bytes / l1_bytes),
        q_miss=q_miss,
        dq_miss=dq_miss,
    )


def sum_bytes(p: Problem):
    """Bytes of the float32 sums of dQ, dK and dV."""
    per_column = p.q_heads * p.q_len * p.head_dim + p.kv_heads * p.kv_len * (p.head_dim + p.v_head_dim)
    return over_groups(p, p.batch * per_column * ACC_BYTES)


def query_rows(p: Problem):
    """Query rows of all heads of the call."""
    return over_groups(p, p.batch * p.q_heads * p.q_len)


def _share_of_matmul(p: Problem, d: DeviceSpec, b: Blocks, l1_bytes, temperature) -> Traffic:
    """A is "p", B is "v". Assumed: blocks of C are dealt out to the cores column block by column block. The L2 holds
    the columns of B that the cores work on, then A. Of both, what fits is read from HBM once; the rest of B for every
    row block, the rest of A for every group of column blocks that are worked on side by side."""
    stacks = p.batch * p.q_heads
    tasks = stacks * b.q_blocks
    active = jnp.minimum(d.cube_cores, tasks)
    waves = ceil_div(tasks, d.cube_cores, temperature)
    beside = jnp.clip(active / b.q_blocks, 1.0, stacks)
    columns = beside * p.kv_len * p.v_head_dim * p.element_bytes
    rows = jnp.maximum(beside / p.q_heads, 1.0) * p.q_len * p.kv_len * p.element_bytes  # A of every product in flight
    b_kept = jnp.minimum(1.0, d.l2_bytes / columns)
    a_kept = jnp.minimum(1.0, jnp.maximum(d.l2_bytes - columns, 0.0) / rows)
    groups = jnp.maximum(p.q_heads / beside, 1.0)
    one = jnp.ones_like(rows)
    return Traffic(
        stacks * one,
        active,
        tasks,
        waves=waves,
        launched=waves,
        sharing=tasks / waves,
        kv_miss=(1 + (b.q_blocks - 1) * (1 - b_kept)) / b.q_blocks,
        s_miss=one,
        p_miss=(1 + (groups - 1) * (1 - a_kept)) / p.q_heads,
        o_miss=one,
        spill=jnp.maximum(0.0, 1 - d.l1_bytes / l1_bytes),
    )


def launched_cores(tile: TileConfig, d: DeviceSpec):
    """Cores that a plan may use: all of the chip, or fewer."""
    return jnp.minimum(tile.cores, d.cube_cores)


def active_cores(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks):
    """Cores that a plan launches: those that have work."""
    tasks = p.batch * p.q_heads / tile.heads_packed * b.q_blocks * b.parts
    return jnp.minimum(launched_cores(tile, d), over_groups(p, tasks))


def _share_of_softmax(p: Problem, d: DeviceSpec, b: Blocks, temperature) -> Traffic:
    """Everything crosses HBM once; rows that are read twice come from there again as far as the L2 cannot hold the
    rows that the cores work on."""
    tasks = ceil_div(p.q_heads, 1.0, temperature)
    one, again = jnp.ones_like(tasks + b.cols), read_again(p, temperature)
    kept = jnp.minimum(1.0, d.l2_bytes / (tasks * b.cols * p.q_len * p.element_bytes))
    return Traffic(
        p.q_heads * one,
        tasks * one,
        tasks * one,
        waves=one,
        launched=one,
        sharing=tasks * one,
        kv_miss=one,
        s_miss=(1 + again * (1 - kept)) / (1 + again),
        p_miss=one,
        o_miss=one,
        spill=0 * one,
    )


def read_again(p: Problem, temperature=0.0):
    """1 where a softmax that is all of the call reads its rows twice, since a vector pass cannot hold one; else 0."""
    return gate(ceil_div(p.q_len, p.piece, temperature) - 1)


def kv_rows(b: Blocks):
    """Rows of K (and of V) that all tasks of a head read."""
    return (b.steps - b.reach_end) * b.cols + b.reach_end * b.tail_cols


def largest(feet: dict) -> dict:
    """The most bytes that any of the kernels, or groups, [n, ...] needs in each buffer."""
    return {name: needed.max(0) for name, needed in feet.items()}


def footprints_of_call(p: Problem, tile: TileConfig, d: DeviceSpec, kernels: tuple[tuple[str, ...], ...]) -> dict:
    """`footprints` of a whole call, the largest over its kernels, given as the kinds of their ops."""

    def of_group(p: Problem) -> dict:
        b = cut(p, tile)
        feet = [footprints(p, tile, d, b, kinds) for kinds in kernels]
        return largest({name: jnp.stack([f[name] for f in feet]) for name in feet[0]})

    return of_group(p) if p.others is None else largest(jax.vmap(of_group, axis_name=GROUPS)(p))


def footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]) -> dict:
    """Bytes that a kernel of these ops needs in every buffer of a core (its UB: of one vector unit), and in HBM."""
    if p.kind == "matmul":
        core = _matmul_footprints(p, tile, d, b)
    elif p.kind == "softmax":
        core = _softmax_footprints(p, d, b)
    elif p.kind == "backward":
        core = _backward_footprints(p, tile, d, b)
    else:
        core = _attention_footprints(p, tile, d, b, kinds)
    return core | {"HBM": tensor_bytes(p) + hbm_workspace(p, tile, d, b, kinds) + 0 * core["UB"]}


def _attention_footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]) -> dict:
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
    }


def _backward_footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks) -> dict:
    """split: as the vendor's SameAB template, in which Q and dO share their room in L1 and K and V theirs, and P and dS
    come in two panels as wide as a block of L0. Elsewhere as the stage table says. UB: two tiles of S and of dP, one of
    P and of dS (float32: in place), and 32 bytes a row for the maximum, the sum and delta; on coupled cores a tile of
    a gradient on its way out."""
    e, heads = p.element_bytes, p.head_dim + p.v_head_dim
    if d.arch == "split":
        panel = jnp.minimum(L0_BLOCK, jnp.minimum(b.rows, b.cols)) * jnp.maximum(b.rows, b.cols)
        l1 = (tile.buffers * (b.rows + b.cols) * jnp.maximum(p.head_dim, p.v_head_dim) + 2 * panel) * e
    else:
        keys = (tile.lookahead + 1) * p.head_dim + tile.buffers * p.v_head_dim
        l1 = (b.rows * heads + b.cols * keys + (tile.lookahead + 1) * 2 * b.rows * b.cols) * e
    rows = b.rows / d.vector_cores_per_cube
    least = MIN_VECTOR_ROWS * b.cols * ACC_BYTES
    tile_bytes = jnp.maximum(jnp.minimum(d.vector_tile_bytes, rows * b.cols * ACC_BYTES), least)
    copies = 4 + 2 * jnp.where(e < ACC_BYTES, e / ACC_BYTES, 0.0) + (d.arch == "coupled")
    m, n = jnp.minimum(b.rows, L0_BLOCK), jnp.minimum(b.cols, L0_BLOCK)
    qk, v = (jnp.minimum(x, L0_BLOCK) for x in (p.head_dim, p.v_head_dim))
    products = ((m, n, p.head_dim), (m, n, p.v_head_dim), (n, v, b.rows), (n, qk, b.rows), (m, qk, b.cols))
    k0, zero = l0_depth(d, e), jnp.zeros_like(l1 + rows)
    return {
        "L1": l1 + zero,
        "L0A": _largest([2 * left * jnp.minimum(depth, k0) * e for left, _, depth in products], zero),
        "L0B": _largest([2 * right * jnp.minimum(depth, k0) * e for _, right, depth in products], zero),
        "L0C": _largest([2 * left * right * ACC_BYTES for left, right, _ in products], zero),
        "UB": copies * tile_bytes + 3 * MIN_VECTOR_ROWS * ACC_BYTES * rows,
    }


def _matmul_footprints(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks) -> dict:
    """The block of C stays in L0C over all steps; a coupled core takes it out through UB, a vector tile at a time."""
    e, k = p.element_bytes, jnp.minimum(b.cols, l0_depth(d, p.element_bytes))
    out = b.rows * p.v_head_dim * ACC_BYTES
    return {
        "L1": tile.buffers * b.cols * (b.rows + p.v_head_dim) * e,
        "L0A": 2 * jnp.minimum(b.rows, L0_BLOCK) * k * e,
        "L0B": 2 * jnp.minimum(p.v_head_dim, L0_BLOCK) * k * e,
        "L0C": out,
        "UB": jnp.minimum(out, d.vector_tile_bytes) * (1 + e / ACC_BYTES) * (d.arch == "coupled"),
    }


def _softmax_footprints(p: Problem, d: DeviceSpec, b: Blocks) -> dict:
    """Of one vector pass: the input and the result, two slots each, and the scores in float32 (assumed: one copy);
    where a row comes in several pieces, also its maximum and sum, 32 bytes each."""
    rows, row = jnp.maximum(b.cols / d.vector_cores_per_cube, 1.0), p.piece * ACC_BYTES
    scores = jnp.maximum(jnp.minimum(d.vector_tile_bytes, rows * row), row)
    kept = read_again(p) * 2 * MIN_VECTOR_ROWS * ACC_BYTES * rows
    return dict.fromkeys(("L1", "L0A", "L0B", "L0C"), 0 * kept) | {"UB": scores * (1 + p.element_bytes) + kept}


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
    """Bytes of the tensors of the call, as `tensor_bytes` of its shape."""
    if p.others is not None:
        return p.others.tensor_bytes
    if p.kind == "matmul":
        n = (p.q_heads - 1) * p.v_head_dim + p.v_tail
        return p.element_bytes * p.batch * (p.q_len * (p.kv_len + n) + p.kv_len * n)
    if p.kind == "softmax":
        return 2 * p.element_bytes * p.q_heads * p.kv_len * p.q_len
    q_side = p.batch * p.q_heads * p.q_len * (p.head_dim + p.v_head_dim)
    kv_side = p.batch * p.kv_heads * p.kv_len * (p.head_dim + p.v_loads * p.v_head_dim)
    gradients = 1 + (p.kind == "backward")
    return p.element_bytes * gradients * (q_side + kv_side) + p.mask_bytes * p.q_len * p.kv_len


def hbm_workspace(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]):
    """Most bytes of global memory beside the tensors of the call at a time: scores, probabilities and partial outputs.
    Of split keys every part keeps its output until all are joined: float32, row max and row sum (32 bytes each).
    Backward: the float32 sums."""
    if p.kind in ("matmul", "softmax"):
        return 0.0
    in_flight, between = workspace_bytes(p, tile, d, b, kinds)
    if p.kind == "backward":
        return in_flight + between + sum_bytes(p)
    partial = ACC_BYTES * (p.v_head_dim + 2 * MIN_VECTOR_ROWS)
    split = gate(b.parts - 1) * b.parts * p.batch * p.q_heads * p.q_len * partial
    return in_flight + between + over_groups(p, split)


def workspace_bytes(p: Problem, tile: TileConfig, d: DeviceSpec, b: Blocks, kinds: tuple[str, ...]):
    """(bytes in flight, bytes that lie between kernels) of scores, probabilities and partial outputs in global memory.

    In flight: blocks that the cores of one kernel hand to each other, gone as soon as they are read; between kernels:
    all of S and P. Backward: S and dP, two blocks each, whose room P and dS take over (as in the vendor's SameAB
    template).
    """
    e = p.element_bytes
    zero, calls = jnp.zeros_like(b.rows + p.q_heads), over_groups(p, p.batch * p.q_heads * p.q_len * p.kv_len)
    if len(kinds) == 1:
        s, pr = kinds[0] != "pv", kinds[0] != "qk" and kinds[0] != "mask"
        return zero, zero + calls * (ACC_BYTES * s + e * pr)
    between = zero if "qk" in kinds else zero + calls * ACC_BYTES
    if d.arch != "split":
        return zero, between
    all_rows = b.rows * tile.heads_packed
    if p.kind == "backward":
        more = jnp.maximum(tile.lookahead - 1, 0) * 2 * e
        blocks = active_cores(p, tile, d, b) * all_rows * b.cols * (4 * ACC_BYTES + more)
        return _mean_example(p, blocks), zero
    scores = 2 * ACC_BYTES * ("qk" in kinds) + (tile.lookahead + 1) * e
    blocks = active_cores(p, tile, d, b) * all_rows * (b.cols * scores + 2 * p.v_head_dim * ACC_BYTES)
    return _mean_example(p, blocks), between
