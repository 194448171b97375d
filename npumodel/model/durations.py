"""Seconds of every stage of one step, from counts and from the chip's time constants.

Every duration is linear in `TimeConstants`, so the total time is homogeneous of degree 1 in them, and
sum(constant * d seconds / d constant) is the total: the breakdown is the gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..hardware import DeviceSpec
from ..relax import ceil_div, gate
from .stages import GM_PATHS, VECTOR_PATHS, Stage, StageTable
from .tiling import (
    ACC_BYTES,
    FRACTAL,
    L0_BLOCK,
    MIN_VECTOR_ROWS,
    Problem,
    Traffic,
    l0_depth,
    query_rows,
    read_again,
    sum_bytes,
)

#: Vector passes over the scores: (elements at the add rate, at the reduce rate, at the exp rate) per score.
#: Online softmax: scale, subtract max, cast; row max, row sum; exp.
SOFTMAX_PASSES = (3, 2, 1)
#: Softmax as its own kernel: scale or cast, subtract; max, sum; exp; divide by the sum (assumed: times its reciprocal,
#: one value a row), cast. Where it reads S twice, first for max and sum, then for the probabilities, it scales,
#: subtracts and takes the exp once more.
SOFTMAX_ALONE_PASSES = (4, 2, 1)
SOFTMAX_AGAIN_PASSES = (2, 0, 1)
#: Applying a mask: cast or select, then add.
MASK_PASSES = (2, 0, 0)
#: Rescaling the accumulator: multiply by alpha; add the partial, a two-source op, which the bank conflict makes as
#: slow as a reduction (HARDWARE section 2: 2 cycles a repeat).
RESCALE_PASSES = (1, 1, 0)
#: Dividing by the row sum runs at the exp rate (vendor table: Div as Exp); then the cast.
FINALIZE_PASSES = (1, 0, 1)
#: Weighing a partial output: multiply; add, a two-source op; and exp of its row max, one value a row.
COMBINE_PASSES = (1, 1, 1)
#: Softcap: multiply by 1 / cap; tanh as (e^2x - 1) / (e^2x + 1): exp, two adds, a division; multiply by the cap.
SOFTCAP_PASSES = (4, 0, 2)
#: dS from S and dP, as the vendor's kernel: scale, subtract max; exp, divide by the sum (at the exp rate); cast P;
#: subtract delta from dP; multiply by P, a two-source op; cast dS.
SOFTMAX_GRAD_PASSES = (5, 1, 2)
#: Softcap's slope 1 - tanh^2: square it and multiply dS by it, two-source ops; subtract from 1.
SOFTCAP_GRAD_PASSES = (1, 2, 0)
#: delta, the row sums of dO * O: cast both; multiply, a two-source op; sum.
DELTA_PASSES = (2, 2, 0)
#: The sums of dQ, dK and dV: scale (dQ and dK; counted for all), cast.
CAST_SUMS_PASSES = (2, 0, 0)
#: Moving L0C to UB by the vector unit (coupled): the move itself is charged in bytes.
DRAIN_PASSES = (0, 0, 0)


class TimeConstants(NamedTuple):
    """What a chip takes, all in seconds per something, per core or vector unit unless said otherwise.

    mac                     per multiply-add
    mmad                    per matrix instruction, start-up
    hbm                     per byte, whole chip, achieved
    gm_l1 ... l1_l0b        per byte of a path
    vector, exp, reduce     per float32 element
    vector_instr            per vector instruction
    sync                    per hand-over between cube and vector unit
    launch, launch_core, launch_task   per launch; per launch and core; per task that a core starts
    """

    mac: Any
    mmad: Any
    hbm: Any
    gm_l1: Any
    gm_ub: Any
    ub_gm: Any
    l0c_gm: Any
    l0c_ub: Any
    ub_l1: Any
    l1_l0a: Any
    l1_l0b: Any
    vector: Any
    exp: Any
    reduce: Any
    vector_instr: Any
    sync: Any
    launch: Any
    launch_core: Any
    launch_task: Any


#: What each time constant is, in words, for the breakdown.
CONSTANT_TITLES = {
    "mac": "cube multiply-adds",
    "mmad": "cube instruction start-up",
    "hbm": "HBM bandwidth",
    "gm_l1": "GM/L2 -> L1 (MTE2)",
    "gm_ub": "GM/L2 -> UB (MTE2)",
    "ub_gm": "UB -> GM (MTE3)",
    "l0c_gm": "L0C -> GM (fixpipe)",
    "l0c_ub": "L0C -> UB",
    "ub_l1": "UB -> L1 (MTE3)",
    "l1_l0a": "L1 -> L0A (MTE1)",
    "l1_l0b": "L1 -> L0B (MTE1)",
    "vector": "vector add/multiply/cast",
    "exp": "vector exp",
    "reduce": "vector reduce",
    "vector_instr": "vector instruction overhead",
    "sync": "cube-vector hand-over",
    "launch": "kernel launch",
    "launch_core": "launch, per core",
    "launch_task": "launch, per task",
}


def time_constants(d: DeviceSpec, dtype: str) -> TimeConstants:
    """Seconds per unit of work on device `d` for elements of `dtype`.

    Raises ValueError when the chip's matrix unit has no such dtype.
    """
    if dtype not in d.macs_per_cycle:
        raise ValueError(
            f"dtype: expected one that {d.name or 'this device'} multiplies ({', '.join(d.macs_per_cycle)}), "
            f"got {dtype!r}"
        )

    def per_byte(per_cycle, hz):
        return 0.0 if per_cycle is None else 1 / (per_cycle * hz)

    cube, vec = d.cube_hz, d.vector_hz
    return TimeConstants(
        mac=1 / (d.macs_per_cycle[dtype] * cube),
        mmad=d.mmad_head_cycles / cube,
        hbm=1 / (d.hbm_bytes_per_s * d.hbm_efficiency),
        gm_l1=per_byte(d.gm_to_l1_bytes_per_cycle, cube),
        gm_ub=per_byte(d.gm_to_ub_bytes_per_cycle, vec),
        ub_gm=per_byte(d.ub_to_gm_bytes_per_cycle, vec),
        l0c_gm=per_byte(d.l0c_to_gm_bytes_per_cycle, cube),
        l0c_ub=per_byte(d.l0c_to_ub_bytes_per_cycle, cube),
        ub_l1=per_byte(d.ub_to_l1_bytes_per_cycle, vec),
        l1_l0a=per_byte(d.l1_to_l0a_bytes_per_cycle, cube),
        l1_l0b=per_byte(d.l1_to_l0b_bytes_per_cycle, cube),
        vector=1 / (d.vector_elements_per_cycle * vec),
        exp=1 / (d.exp_elements_per_cycle * vec),
        reduce=1 / (d.reduce_elements_per_cycle * vec),
        vector_instr=d.vector_instr_cycles / vec,
        sync=d.sync_cycles / cube,
        launch=d.launch_base_s,
        launch_core=d.launch_per_core_s,
        launch_task=d.launch_per_task_s,
    )


class Size(NamedTuple):
    """A length of the block, and in how many pieces it comes: padded to whole fractals, to the depth of one, to whole
    32-byte blocks of float32; blocks of L0 along rows or columns, and along the depth of a product."""

    length: Any
    fractal: Any
    depth: Any
    vector: Any
    l0_blocks: Any
    l0_depths: Any


class Block(NamedTuple):
    """One step's work: `rows` query rows (of all packed heads) by `cols` keys, cut into pieces.

    unit_rows: rows of one of the `units` vector units; score_tiles, out_tiles: vector tiles of a unit's share; parts:
    tasks that share one q block; fused: whether other ops share the kernel; again: 1 where softmax as its own kernel
    reads S twice, else 0; pieces: in which K, V and P come into L1.
    """

    rows: Size
    cols: Size
    head_dim: Size
    v_head_dim: Size
    units: Any
    unit_rows: Any
    score_tiles: Any
    out_tiles: Any
    parts: Any
    fused: bool
    again: Any
    pieces: Any = 1.0

    @property
    def scores(self):
        return self.rows.length * self.cols.length


class Work(NamedTuple):
    """One run of every stage of a table: seconds by stage; bytes that it moves by stage, by one core with all its
    vector units (0 for compute); bytes that the matrix unit's loads read from L1."""

    seconds: dict
    bytes: dict
    l1_reads: Any


def work(table: StageTable, t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, b: Block) -> Work:
    """Time every stage of one step."""
    zero = jnp.zeros_like(b.scores * p.head_dim * x.active)
    moved = {s.name: zero if s.compute else zero + _bytes(s, p, x, b) for s in table.stages}
    seconds = {s.name: zero + _seconds(s, table, t, p, d, x, b) for s in table.stages}
    reads = [sum(l0_bytes(s, p, b)) for s in table.stages if s.action == "matmul"]
    return Work(seconds, moved, sum(reads, zero))


def measure(p: Problem, d: DeviceSpec, rows, cols, parts, fused: bool, temperature=0.0) -> Block:
    """Count the pieces of a block of `rows` x `cols`. A softmax that is all of the call comes transposed, and a vector
    pass of it may be a single row."""
    again = 1.0
    if p.kind == "softmax":
        rows, cols, again = cols, rows, read_again(p, temperature)
    k_fractal, k_block = 32 / p.element_bytes, l0_depth(d, p.element_bytes)

    def size(length) -> Size:
        def pieces(of):
            return ceil_div(length, of, temperature)

        fractal, depth, vector = (of * pieces(of) for of in (FRACTAL, k_fractal, MIN_VECTOR_ROWS))
        return Size(length, fractal, depth, vector, pieces(L0_BLOCK), pieces(k_block))

    row, col, v_head = size(rows), size(cols), size(p.v_head_dim)
    unit_rows = ceil_div(rows, d.vector_cores_per_cube, temperature)
    least = MIN_VECTOR_ROWS * cols if p.piece is None else p.piece
    tile = jnp.maximum(d.vector_tile_bytes, ACC_BYTES * least)
    score_tiles = ceil_div(unit_rows * col.vector * ACC_BYTES, tile, temperature)
    out_tiles = ceil_div(unit_rows * v_head.vector * ACC_BYTES, d.vector_tile_bytes, temperature)
    units = d.vector_cores_per_cube
    return Block(row, col, size(p.head_dim), v_head, units, unit_rows, score_tiles, out_tiles, parts, fused, again)


def _seconds(stage: Stage, table: StageTable, t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, b: Block):
    if stage.action == "matmul":
        return _matmul_seconds(stage, t, p, d, b)
    if stage.action == "vector":
        return _vector_seconds(stage, table, t, p, b)
    return _move_seconds(stage, t, p, d, x, b)


def _matmul_seconds(stage: Stage, t: TimeConstants, p: Problem, d: DeviceSpec, b: Block):
    """Matrix unit against MTE1, both streaming L0 blocks with ping-pong: the first load, then the slower of the two.

    Matrix unit: head + ceil(m/16) ceil(n/16) ceil(k/k0) cycles an instruction (vendor formula; k0 = 32 bytes).
    """
    m, n, k = _matmul_sizes(stage, b)
    cube = m.fractal * n.fractal * k.depth * t.mac + m.l0_blocks * n.l0_blocks * k.l0_depths * t.mmad
    bytes_a, bytes_b = l0_bytes(stage, p, b)
    mte1 = bytes_a * t.l1_l0a + bytes_b * t.l1_l0b
    depth = jnp.minimum(k.depth, l0_depth(d, p.element_bytes)) * p.element_bytes
    first = depth * (jnp.minimum(m.fractal, L0_BLOCK) * t.l1_l0a + jnp.minimum(n.fractal, L0_BLOCK) * t.l1_l0b)
    return first + jnp.maximum(cube, mte1 - first)


def _matmul_sizes(stage: Stage, b: Block) -> tuple[Size, Size, Size]:
    sizes = {
        "s": (b.rows, b.cols, b.head_dim),
        "dp": (b.rows, b.cols, b.v_head_dim),
        "dv": (b.cols, b.v_head_dim, b.rows),
        "dk": (b.cols, b.head_dim, b.rows),
        "dq": (b.rows, b.head_dim, b.cols),
    }
    return sizes.get(stage.tensor, (b.rows, b.v_head_dim, b.cols))


def l0_bytes(stage: Stage, p: Problem, b: Block):
    """Bytes that one matmul stage reads from L1 into L0A and L0B: each operand once per L0 block of the other."""
    m, n, k = _matmul_sizes(stage, b)
    shared = k.depth * p.element_bytes
    return m.fractal * shared * n.l0_blocks, n.fractal * shared * m.l0_blocks


_PASSES = {
    "softmax": SOFTMAX_PASSES,
    "mask": MASK_PASSES,
    "rescale": RESCALE_PASSES,
    "finalize": FINALIZE_PASSES,
    "drain_s": DRAIN_PASSES,
    "drain_o": DRAIN_PASSES,
    "drain_c": DRAIN_PASSES,
    "softmax_grad": SOFTMAX_GRAD_PASSES,
    "drain_dv": DRAIN_PASSES,
    "drain_dk": DRAIN_PASSES,
    "drain_dq": DRAIN_PASSES,
}


def _vector_seconds(stage: Stage, table: StageTable, t: TimeConstants, p: Problem, b: Block):
    """Vector passes over a unit's share of the block, a vector tile at a time; each pass is one instruction a tile."""
    outputs = stage.tensor in ("o", "o_final")
    elements = b.unit_rows * (b.v_head_dim.vector if outputs else b.cols.vector)
    if stage.tensor in ("dv", "dk", "dq"):  # on their way out of L0C
        m, n, _ = _matmul_sizes(stage, b)
        elements = m.length / b.units * n.vector
    tiles = b.out_tiles if outputs else b.score_tiles

    def run(passes, times=1.0):
        add, reduce, exp = passes
        rates = add * t.vector + reduce * t.reduce + exp * t.exp
        return times * (elements * rates + sum(passes) * tiles * t.vector_instr)

    if stage.name == "softmax" and not b.fused:
        seconds = run(SOFTMAX_ALONE_PASSES) + run(SOFTMAX_AGAIN_PASSES, b.again)
    else:
        seconds = run(_PASSES[stage.name])
    if stage.name == "softmax":
        seconds = seconds + run(SOFTCAP_PASSES, p.softcap)
    if stage.name == "softmax_grad":
        seconds = seconds + run(SOFTCAP_PASSES, p.softcap) + run(SOFTCAP_GRAD_PASSES, p.softcap)
    if stage.name == "softmax":  # new maximum, its exp, the running sum: a few ops on one value a row
        seconds = seconds + b.unit_rows * MIN_VECTOR_ROWS * (2 * t.vector + t.exp)
    fills = sum(table.stage(name).action == "matmul" for name in stage.waits) if table.arch == "coupled" else 0
    return seconds + fills * elements * ACC_BYTES * t.l0c_ub if fills else seconds


def _bytes(stage: Stage, p: Problem, x: Traffic, b: Block):
    e = p.element_bytes
    q, k, v = b.rows.length * p.head_dim * e, b.cols.length * p.head_dim * e, b.cols.length * p.v_head_dim * e
    reads = 1 + b.again if stage.op == "softmax" and not b.fused else 1
    score_bytes = e if p.kind == "softmax" else ACC_BYTES
    size = {
        "q": q,
        "k": k + x.spill * (q + k),  # what does not fit in L1 is fetched again every step: Q and K for QK^T,
        "v": p.v_loads * v + x.spill * (v + b.scores * e),  # V and P for PV
        "s": reads * b.scores * score_bytes,
        "p": b.scores * e,
        "do": b.rows.length * p.v_head_dim * e,
        "dp": b.scores * ACC_BYTES,
        "ds": b.scores * e,
        "dv": b.cols.length * p.v_head_dim * ACC_BYTES,
        "dk": b.cols.length * p.head_dim * ACC_BYTES,
        "dq": b.rows.length * p.head_dim * ACC_BYTES,
        "stats": 3 * b.rows.length * MIN_VECTOR_ROWS * ACC_BYTES,  # maximum, sum and delta, a 32-byte block each
        "mask": b.scores * p.mask_bytes,
        "o": b.rows.length * p.v_head_dim * ACC_BYTES,
        "o_final": b.rows.length * (p.v_head_dim * e + partial_bytes(p, b.parts)),
    }
    return size[stage.tensor.removesuffix("_again")]


def partial_bytes(p: Problem, parts):
    """Bytes of one row of a partial output beyond those of the output: float32 instead of the dtype, and row max and
    sum (a 32-byte block each, as the vendor's softmax_max and softmax_sum: CANN section 1.1). 0 where one task sees all
    keys of its rows."""
    more = p.v_head_dim * (ACC_BYTES - p.element_bytes) + 2 * MIN_VECTOR_ROWS * ACC_BYTES
    return gate(parts - 1) * more


def _move_seconds(stage: Stage, t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, b: Block):
    """A transfer: bytes times seconds a byte of its path. Across global memory, a byte from HBM costs the slower of the
    path and this core's share of the HBM bandwidth, and every burst costs `burst_half_bytes` more:
    bw(bytes) = peak * bytes / (bytes + half) (vendor measurements, HARDWARE section 4). One burst a step or piece, but
    scores enter UB one vector tile at a time. Vector units that have no row to work on move nothing."""
    units = b.rows.length / b.unit_rows if stage.action in VECTOR_PATHS else 1.0
    moved = _bytes(stage, p, x, b) / units
    if stage.action not in GM_PATHS:
        return moved * getattr(t, stage.action)
    bursts = b.score_tiles if stage.action == "gm_ub" and stage.tensor in ("s", "dp", "mask") else 1.0
    bursts = bursts * (1 + b.again) if p.kind == "softmax" and stage.tensor == "s" else bursts
    bursts = b.pieces if stage.action == "gm_l1" and stage.tensor in ("k", "v", "p") else bursts
    bursts = bursts * p.v_loads if stage.tensor == "v" else bursts
    return _gm_seconds(stage.action, moved, bursts, miss_share(stage, x), units, t, d, x)


def _gm_seconds(path: str, moved, bursts, miss, units, t: TimeConstants, d: DeviceSpec, x: Traffic):
    per_byte = getattr(t, path)
    from_hbm = jnp.maximum(per_byte, t.hbm * x.sharing * units)
    return (moved + bursts * d.burst_half_bytes) * ((1 - miss) * per_byte + miss * from_hbm)


#: The stages that join partial outputs: name, pipe of the vector unit, data path (or "vector").
COMBINE = (("load_partials", "MTE2", "gm_ub"), ("combine", "VECTOR", "vector"), ("store_combined", "MTE3", "ub_gm"))


def combine(t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, parts, temperature=0.0) -> Work:
    """Joining the partial outputs of split keys, after all cores have met: every vector unit of the cores that were
    launched takes an equal share of the rows, reads all parts of them (from L2 as far as it holds the workspace),
    weighs and adds them, divides and stores. All zero where parts = 1."""
    units, split = x.active * d.vector_cores_per_cube, gate(parts - 1)
    rows = query_rows(p)
    mine = ceil_div(rows, units, temperature)
    row_bytes = p.v_head_dim * p.element_bytes + partial_bytes(p, parts)
    add, reduce, exp = COMBINE_PASSES
    elements = mine * MIN_VECTOR_ROWS * ceil_div(p.v_head_dim, MIN_VECTOR_ROWS, temperature)
    passes = add * t.vector + reduce * t.reduce
    vector = elements * (parts * passes + FINALIZE_PASSES[0] * t.vector + FINALIZE_PASSES[2] * t.exp)
    vector = vector + parts * mine * MIN_VECTOR_ROWS * exp * t.exp
    tiles = ceil_div(elements * ACC_BYTES, d.vector_tile_bytes, temperature)
    vector = vector + tiles * (parts * sum(COMBINE_PASSES) + sum(FINALIZE_PASSES)) * t.vector_instr + t.sync
    everywhere = x._replace(sharing=rows / mine / d.vector_cores_per_cube)
    moved = (parts * rows * row_bytes, 0.0, rows * p.v_head_dim * p.element_bytes)
    share = mine / rows
    load = _gm_seconds("gm_ub", moved[0] * share, parts * tiles, x.o_miss, d.vector_cores_per_cube, t, d, everywhere)
    store = _gm_seconds("ub_gm", moved[2] * share, tiles, 1.0, d.vector_cores_per_cube, t, d, everywhere)
    names = [name for name, _, _ in COMBINE]
    seconds = {name: split * s for name, s in zip(names, (load, vector, store), strict=True)}
    return Work(seconds, {name: split * m for name, m in zip(names, moved, strict=True)}, 0.0)


#: Backward: what all vector units do before the tasks and after, each phase ending when all cores have met (vendor's
#: pre, sfmg and post stages): delta for every row, and zeros for the sums; the sums in the dtype of the gradients.
BEFORE = (("load_do_o", "MTE2", "gm_ub"), ("delta", "VECTOR", "vector"), ("store_delta", "MTE3", "ub_gm"))
AFTER = (("load_sums", "MTE2", "gm_ub"), ("cast_sums", "VECTOR", "vector"), ("store_grads", "MTE3", "ub_gm"))


def before_and_after(t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, temperature=0.0) -> Work:
    """The stages of BEFORE and AFTER, one after the other; every vector unit takes an equal share of the rows."""
    units = d.cube_cores * d.vector_cores_per_cube
    rows = query_rows(p)
    share = ceil_div(rows, units, temperature) / rows
    everywhere = x._replace(sharing=1 / share / d.vector_cores_per_cube)
    outputs, sums = rows * p.v_head_dim, sum_bytes(p)
    zeros = rows * MIN_VECTOR_ROWS * ACC_BYTES + sums
    moved = (2 * outputs * p.element_bytes, 0.0, zeros, sums, 0.0, sums / ACC_BYTES * p.element_bytes)

    def passes(elements, each):
        add, reduce, exp = each
        tiles = ceil_div(share * elements * ACC_BYTES, d.vector_tile_bytes, temperature)
        rates = add * t.vector + reduce * t.reduce + exp * t.exp
        return share * elements * rates + sum(each) * tiles * t.vector_instr + t.sync

    def move(path, bytes_, elements, miss):
        tiles = ceil_div(share * elements * ACC_BYTES, d.vector_tile_bytes, temperature)
        return _gm_seconds(path, share * bytes_, tiles, miss, d.vector_cores_per_cube, t, d, everywhere)

    seconds = (
        move("gm_ub", moved[0], 2 * outputs, 1.0),
        passes(outputs, DELTA_PASSES),
        move("ub_gm", moved[2], sums / ACC_BYTES, 1.0),
        move("gm_ub", moved[3], sums / ACC_BYTES, x.o_miss),
        passes(sums / ACC_BYTES, CAST_SUMS_PASSES),
        move("ub_gm", moved[5], sums / ACC_BYTES, 1.0),
    )
    names = [name for name, _, _ in BEFORE + AFTER]
    return Work(dict(zip(names, seconds, strict=True)), dict(zip(names, moved, strict=True)), 0.0)


def once(t: TimeConstants, p: Problem, d: DeviceSpec, x: Traffic, parts, temperature=0.0) -> tuple[Work, Any]:
    """What all cores do together, once a call, and its bytes of HBM: joining the parts of split keys; or, of a backward
    pass, what comes before and after its tasks."""
    if p.kind == "backward":
        work = before_and_after(t, p, d, x, temperature)
        return work, sum(work.bytes.values()) - (1 - x.o_miss) * work.bytes["load_sums"]
    work = combine(t, p, d, x, parts, temperature)
    partials, _, joined = work.bytes.values()
    return work, x.o_miss * partials + joined


def miss_share(stage: Stage, x: Traffic):
    """Share of a tensor's bytes that come from, or end up in, HBM."""
    shares = {"k": x.kv_miss, "v": x.kv_miss, "mask": x.kv_miss, "s": x.s_miss, "p": x.p_miss, "o": x.o_miss}
    shares |= {"q": x.q_miss, "do": x.q_miss, "stats": x.dq_miss, "dp": x.s_miss, "ds": x.p_miss, "ds_again": x.p_miss}
    shares |= {"dk": x.kv_miss, "dv": x.kv_miss, "dq": x.dq_miss}
    shares |= dict.fromkeys(("q_again", "do_again", "k_again"), 0 * x.kv_miss)  # read before in the same step
    return shares.get(stage.tensor, 1.0)
