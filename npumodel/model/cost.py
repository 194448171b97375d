"""The price of one call: seconds, and everything that explains them, as one pure function of PyTrees.

    seconds = sum over kernels of  launch + per_core * cores + per_task * waves + time of the busiest core

`price` is what the search differentiates and vmaps; `estimate` (a module of its own) makes a readable Cost of it.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..hardware import DeviceSpec
from ..relax import floor_div, gate, tent
from ..tile import TileConfig
from . import tiling
from .durations import Block, TimeConstants, l0_bytes, measure, miss_share, stage_bytes, stage_seconds
from .graph import Kernel, compile_graph
from .pipeline import TRANSIENT, fast, knobs
from .stages import GM_PATHS, StageTable, stage_table
from .tiling import Blocks, Problem, Traffic


class Options(NamedTuple):
    """What is fixed at compile time. overlap False: nothing runs beside anything else; waits False: the waits are not
    computed (zeros); transient: see `pipeline.fast`."""

    dtype: str
    masked: bool
    overlap: bool = True
    waits: bool = True
    transient: int = TRANSIENT


class KernelPrice(NamedTuple):
    """One kernel. Times in seconds; busy, wait and bytes per stage of its table [stages]: of the busiest core, bytes of
    the whole call."""

    launch: Any
    core: Any
    busy: Any
    wait: Any
    bytes: Any
    hbm_bytes: Any
    l1_read_bytes: Any
    l1_fill_bytes: Any
    footprints: dict
    traffic: Traffic
    steps: Any


class Price(NamedTuple):
    """One call: the total and its kernels, in the order of the graph."""

    seconds: Any
    kernels: tuple[KernelPrice, ...]


def price(t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, options: Options, temperature=0.0) -> Price:
    """Price a call. Differentiable in `t` (homogeneous of degree 1), in the tile and in the capacities of `d`.

    temperature: a plain 0 = exact; above it counts are relaxed and the discrete knobs are blended.
    """
    graph = compile_graph(options.masked, tile.fusion)
    kernels = tuple(_price_kernel(kernel, t, p, tile, d, options, temperature) for kernel in graph.kernels)
    return Price(sum(k.launch + k.core for k in kernels), kernels)


class Parts(NamedTuple):
    """One kernel, cut and timed: everything that the schedule starts from. seconds, bytes [stages, 2, 2]: full and
    ragged rows by full and ragged columns; feet: bytes needed per buffer."""

    table: StageTable
    blocks: Blocks
    traffic: Traffic
    corners: Block
    seconds: Any
    bytes: Any
    feet: dict


def parts(
    kernel: Kernel, t: TimeConstants, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature=0.0
) -> Parts:
    """Cut a call into blocks and time every stage of one of its kernels."""
    table = stage_table(kernel, d.arch)
    table = table if o.overlap else table.serial()
    b = tiling.cut(p, tile, o.transient, temperature)
    feet = tiling.footprints(p, tile, d, b, kernel.kinds)
    work = tiling.workspace_bytes(p, tile, d, b, kernel.kinds)
    x = tiling.share_of_chip(p, d, b, feet["L1"], work, temperature)
    rows, cols = jnp.stack([b.rows, b.tail_rows]), jnp.stack([b.cols, b.tail_cols])
    corners = measure(p, d, rows, cols, len(kernel.ops) > 1, temperature)
    seconds = stage_seconds(table, t, p, d, x, corners)
    return Parts(table, b, x, corners, seconds, stage_bytes(table, p, x, corners), feet)


def _price_kernel(kernel: Kernel, t, p: Problem, tile: TileConfig, d: DeviceSpec, o: Options, temperature):
    table, b, x, corners, seconds, moved, feet = parts(kernel, t, p, tile, d, o, temperature)
    head, heaviest = _head_times(table, seconds, b, tile, t.sync, o, temperature)
    per_core = x.waves / b.q_blocks  # heads that the busiest core works through
    calls = p.batch * p.q_heads
    runs = _runs(table, b)
    moved = calls * (runs * moved).sum((1, 2))
    fills = np.array([s.action in ("gm_l1", "ub_l1") for s in table.stages])
    from_gm = jnp.stack([miss_share(s, x) * (s.action in GM_PATHS) * jnp.ones_like(b.rows) for s in table.stages])
    reads = [runs[i] * sum(l0_bytes(s, p, corners)) for i, s in enumerate(table.stages) if s.action == "matmul"]
    return KernelPrice(
        launch=t.launch + t.launch_core * x.active + t.launch_task * x.waves,
        core=jnp.maximum(_core_seconds(b, x, head, temperature), heaviest),
        busy=per_core * (runs * seconds).sum((1, 2)),
        wait=per_core * head.wait,
        bytes=moved,
        hbm_bytes=moved @ from_gm,
        l1_read_bytes=calls * sum(r.sum() for r in reads) if reads else jnp.zeros_like(b.rows),
        l1_fill_bytes=jnp.where(fills, moved, 0.0).sum(),
        footprints=feet,
        traffic=x,
        steps=calls * b.steps,
    )


def _runs(table: StageTable, b: Blocks):
    """[stages, 2, 2] how often each stage runs in one head, for full and ragged rows by full and ragged columns."""
    one, none = jnp.ones_like(b.rows), jnp.zeros_like(b.rows)
    at_end = jnp.maximum(b.reach_end - 1, 0.0)
    inner = jnp.maximum(b.steps - b.kv_blocks - at_end, 0.0)
    started = jnp.maximum(b.q_blocks - b.shorter[0] - 1, 0.0)  # tasks without a single step load nothing
    counts = {
        "step": (inner, at_end, jnp.maximum(b.kv_blocks - 1, 0.0), one),
        "task_start": (started, none, one, none),
        "task_end": (b.q_blocks - 1, none, one, none),
    }
    return jnp.stack([jnp.stack(counts[s.when]).reshape(2, 2) for s in table.stages])


class _Head(NamedTuple):
    """All tasks of a head: their makespans added up, the mean of those before the last, the waits added up."""

    makespan: Any
    usual: Any
    wait: Any


def _core_seconds(b: Blocks, x: Traffic, head: _Head, temperature):
    """The busiest core: whole heads, and of one more head so many tasks as are left: full ones, or, where tasks differ
    in length (causal), tasks of mean length, since long and short ones are dealt out in pairs."""
    heads = floor_div(x.waves, b.q_blocks, temperature)
    task = jnp.maximum(head.usual, head.makespan / b.q_blocks)
    return heads * head.makespan + jnp.maximum(x.waves - heads * b.q_blocks, 0.0) * task


def _head_times(table: StageTable, seconds, b: Blocks, tile: TileConfig, sync, o: Options, temperature):
    """(times of all tasks of a head, seconds of its longest task). Between whole buffers and lookaheads: the mean of
    the neighbours."""

    def at(buffers, lookahead):
        k = knobs(table, buffers, lookahead, sync)
        run = partial(fast, table, steps=b.kv_blocks, k=k, transient=o.transient, waits=o.waits)
        times = jax.vmap(run, 1)(seconds[..., 0], seconds[..., 1])  # [2]: full rows, ragged rows
        (whole, lengths, empty), (ragged, _, _) = (jax.tree.map(itemgetter(i), times) for i in (0, 1))
        early = gate(b.q_blocks - b.reach_end) * tiling.at_length(lengths.makespan, b.kv_blocks - 1)
        heaviest = jnp.maximum(jnp.maximum(early, ragged.makespan), gate(b.reach_end - 1) * whole.makespan)
        total = jax.tree.map(partial(tiling.over_tasks, b), lengths, whole, ragged, empty)
        usual = (total.makespan - ragged.makespan) / jnp.maximum(b.q_blocks - 1, 1.0)
        return _Head(total.makespan, usual, total.wait), heaviest

    lookahead = tile.lookahead if o.overlap else 0 * tile.lookahead
    if isinstance(temperature, (int, float)) and temperature == 0:
        return at(tile.buffers, lookahead)
    low = [jax.lax.stop_gradient(jnp.floor(x)) for x in (tile.buffers, lookahead)]
    share = [x - whole for x, whole in zip((tile.buffers, lookahead), low, strict=True)]
    corners = [(i, j) for i in (0.0, 1.0) for j in (0.0, 1.0)]
    weights = jnp.stack([tent(share[0] - i) * tent(share[1] - j) for i, j in corners])
    values = jax.vmap(lambda c: at(low[0] + c[0], low[1] + c[1]))(jnp.asarray(corners))
    return jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), values)
