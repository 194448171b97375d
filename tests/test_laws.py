"""The laws of the price, on random calls, tiles and devices: every chip, every feature of a call, every knob of a tile.

Draws of one architecture, mask, fusion and order are priced side by side by one compiled function, so that the number
of draws costs little; compiling takes nearly all of the time. The laws that need nothing else are one test for each of
the 54 combinations, so that no function is compiled twice however the tests are spread over processes; those that need
a function of their own (another schedule, a gradient) are held on a few combinations.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel.hardware import DeviceSpec, device, devices
from npumodel.hardware.spec import OPTIONAL
from npumodel.model import estimate as estimate_module
from npumodel.model import tiling
from npumodel.model.cost import WITHOUT_FUSION, Options, Price, price
from npumodel.model.durations import TimeConstants, time_constants
from npumodel.model.estimate import estimate, footprints, illegal, kv_blocks, tasks_and_steps
from npumodel.model.graph import compile_graph
from npumodel.model.pipeline import TRANSIENT
from npumodel.model.stages import stage_table
from npumodel.model.tiling import Problem
from npumodel.search.space import BUFFERS, footprint
from npumodel.tile import ALL_CORES, CORE_ORDERS, FUSIONS, MAX_BUFFERS, MAX_LOOKAHEAD, TileConfig
from npumodel.workload import AttentionShape

pytestmark = pytest.mark.slow

ARCHS = ("coupled", "split", "direct")


class Plan(NamedTuple):
    """What is compiled apart."""

    arch: str
    masked: bool
    fusion: str
    core_order: str

    @property
    def persistent(self):
        return self.masked and self.core_order != "round_robin"

    @property
    def in_pieces(self):
        return self.core_order == "contiguous" and self.fusion == "fused"

    def options(self, **more):
        return Options("", self.masked, in_pieces=self.in_pieces, **more)

    @property
    def kernels(self):
        return compile_graph(self.masked, self.fusion).kernels

    @property
    def tables(self):
        return [stage_table(kernel, self.arch) for kernel in self.kernels]


PLANS = tuple(
    Plan(arch, masked, fusion, order)
    for arch in ARCHS
    for masked in (False, True)
    for fusion in FUSIONS
    for order in CORE_ORDERS
)
FUSED = (
    Plan("split", False, "fused", "balanced"),
    Plan("coupled", True, "fused", "contiguous"),
    Plan("direct", True, "fused", "round_robin"),
)
#: Draws of one plan: 20,736 of all; and for the laws that are held on `FUSED`.
COUNT = 384
MANY = 3456
#: Rounding of float64; the laws are those of the model, and float32 is compared with it below.
ROUNDING = 1e-9
#: Where the tasks of a persistent plan differ, what a border saves is that of a border between two alike.
MIXED = 5e-2
#: Of a step in pieces the schedule knows the first and the last piece.
IN_PIECES = 1e-4
#: Slots that the schedule runs one by one: nearly all pipelines have settled, so that the laws are those of the exact
#: schedule; how far the O(1) reading of the price is from it is a law of its own.
SETTLED = 132


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def plans(chosen, seed=0):
    """Parameters of a test: these plans, and the seed of their draws."""
    return pytest.mark.parametrize("plan,seed", [pytest.param(plan, seed, id=name(plan)) for plan in chosen])


def draws_of(seed):
    return COUNT if seed == 0 else MANY


def name(plan):
    return f"{plan.arch}-{'masked' if plan.masked else 'bare'}-{plan.fusion}-{plan.core_order}"


LAWS = []


def law(check):
    """A law of every plan that needs no compiled function but `priced`."""
    LAWS.append(check)
    return check


@plans(PLANS)
def test_laws(plan, seed):
    assert len(LAWS) == 10
    failed = []
    for check in LAWS:
        try:
            check(plan, seed)
        except (AssertionError, pytest.fail.Exception) as failure:
            failed.append(f"{check.__name__}: {failure}")
    assert not failed, "\n".join(failed)


# Draws --------------------------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """Calls, legal tiles and devices [n], as what they are and as arrays."""

    plan: Plan
    shapes: list
    devices: list
    tiles: list
    p: Problem
    tile: TileConfig
    d: DeviceSpec

    @property
    def t(self) -> TimeConstants:
        return constants(self.d)

    def show(self, i):
        return f"{self.devices[i]}: {self.shapes[i]}, {self.tiles[i]}"


def draw_length(rng):
    kind = rng.integers(8)
    if kind == 0:
        return int(rng.integers(1, 20))
    if kind == 1:
        return 128 * int(rng.integers(1, 33))
    return int(2 ** rng.uniform(0, 17 if kind == 2 else 13))


def draw_side(rng):
    return None if rng.integers(3) == 0 else int(2 ** rng.uniform(0, 13)) - 1


def draw_shape(rng, masked, dtypes):
    kv_heads = int(rng.choice([1, 2, 3, 4, 8]))
    group = int(rng.choice([1, 1, 2, 3, 4, 8, 16]))
    q_len, kv_len = (draw_length(rng) for _ in range(2))
    kind = rng.integers(6)
    q_len = {0: 1, 1: kv_len}.get(kind, q_len)
    head_dim = int(rng.choice([16, 32, 40, 64, 80, 96, 128, 192, 256]))
    v_head_dim = head_dim if rng.integers(2) else int(rng.choice([8, 64, 128, 192]))
    v_in_k = rng.integers(6) == 0
    if v_in_k:
        kv_heads, head_dim, v_head_dim = 1, 576, 512
    return AttentionShape(
        batch=int(rng.choice([1, 2, 5, 16, 64])),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=str(rng.choice(dtypes)),
        causal=bool(rng.integers(2)),
        mask=str(rng.choice(["bool", "additive"])) if masked else None,
        window=(draw_side(rng), draw_side(rng)) if rng.integers(3) == 0 else None,
        softcap=bool(rng.integers(4) == 0),
        v_in_k=bool(v_in_k),
    )


def draw_tile(rng, shape, plan):
    group = shape.q_heads // shape.kv_heads
    fused = plan.fusion == "fused"
    blocks = (2 ** rng.uniform(0, 10, 2)).astype(int)
    if rng.integers(3):
        blocks = -(-blocks // 16) * 16
    return TileConfig(
        *map(int, blocks),
        buffers=int(rng.integers(1, MAX_BUFFERS + 1)),
        lookahead=int(rng.integers(MAX_LOOKAHEAD + 1)),
        fusion=plan.fusion,
        heads_packed=int(rng.choice([n for n in range(1, group + 1) if group % n == 0])),
        split_kv=int(rng.choice([1, 1, 2, 3, 4, 8, 24])) if fused else 1,
        core_order=plan.core_order,
        cores=int(rng.choice([ALL_CORES, ALL_CORES, 1, rng.integers(1, 40)])),
        persistent=plan.persistent,
        kv_pieces=int(rng.choice([1, 2, 3, 4, 8])) if plan.in_pieces else 1,
    )


def smaller(tile):
    return tile.replace(
        block_q=-(-tile.block_q // 2), block_kv=-(-tile.block_kv // 2), heads_packed=1, buffers=-(-tile.buffers // 2)
    )


@functools.cache
def plain(device_name, dtype):
    """A device as numbers that agree in structure with all of its arch; the rate of `dtype` stands alone."""
    spec = device(device_name)
    missing = {field: 1.0 for field in OPTIONAL if getattr(spec, field) is None}
    same = {"name": "", "soc": "", "family": "", "overflow": "strict"}
    return spec.replace(**same, **missing, macs_per_cycle={"float16": spec.macs_per_cycle[dtype]})


@functools.cache
def of_arch(arch):
    return [d for d in devices() if device(d).arch == arch]


def stack(trees) -> Any:
    """Trees of numbers as one tree of arrays."""
    return jax.tree.map(lambda *xs: np.asarray(xs, jnp.result_type(float)), *trees)


def gathered(plan, shapes, names, tiles) -> Any:
    specs = [plain(n, s.dtype) for n, s in zip(names, shapes, strict=True)]
    return Draws(plan, shapes, names, tiles, stack([Problem.of(s) for s in shapes]), stack(tiles), stack(specs))


@functools.cache
def drawn(plan, seed) -> Draws:
    """Random draws with tiles that fit into a core: one that does not is halved until it does."""
    rng = np.random.default_rng([seed, ARCHS.index(plan.arch), plan.masked, len(plan.fusion), len(plan.core_order)])
    chips = of_arch(plan.arch)
    names = [chips[i % len(chips)] for i in range(draws_of(seed))]
    shapes = [draw_shape(rng, plan.masked, list(device(n).macs_per_cycle)) for n in names]
    tiles = [draw_tile(rng, s, plan) for s in shapes]
    draws = gathered(plan, shapes, names, tiles)
    for _ in range(12):
        fits = legal(draws)
        if fits.all():
            return draws
        tiles = [tile if fit else smaller(tile) for tile, fit in zip(tiles, fits, strict=True)]
        draws = gathered(plan, shapes, names, tiles)
    raise AssertionError(f"no legal tile: {draws.show(int(np.argmin(legal(draws))))}")


@functools.partial(jax.jit, static_argnames="masked")
def _needs(p, tile, d, masked):
    return footprint(p, tile, d, masked)


def legal(draws, d=None, memory=False):
    """Whether each tile fits into a core [n]; L1 may spill where the device lets it. memory: also into the HBM, with
    the tensors of the call, however large these are."""
    d = draws.d if d is None else d
    available = np.stack([tiling.capacities(d)[n] for n in BUFFERS])
    tile = draws.tile.replace(core_order="balanced")  # of no interest here: one compilation less
    boundless = d.replace(hbm_bytes=0 * d.hbm_bytes + 1e30)  # with less, calls too large for it are let through
    fits = np.asarray(_needs(draws.p, tile, boundless, draws.plan.masked)) <= available
    spills = np.array([device(n).overflow == "spill" for n in draws.devices])
    fits[BUFFERS.index("L1")] |= spills
    fits[BUFFERS.index("HBM")] |= not memory
    return np.asarray(fits.all(0))


# The price of all draws at once ---------------------------------------------------------------------------------------


def constants(d) -> TimeConstants:
    """Seconds per unit of work of devices [n]."""
    t = time_constants(d, "float16")
    return jax.tree.map(lambda x: np.broadcast_to(x, np.shape(d.cube_hz)).astype(jnp.result_type(float)), t)


@functools.partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _priced(t, p, tile, d, options) -> Price:
    return price(t, p, tile, d, options)


def priced(draws, t=None, d=None) -> Any:
    """Price of all draws, with waits; the one compiled function that most laws share."""
    d = draws.d if d is None else d
    t = constants(d) if t is None else t
    return jax.device_get(_priced(t, draws.p, draws.tile, d, draws.plan.options(transient=SETTLED)))


@functools.cache
def base(plan, seed) -> Any:
    return priced(drawn(plan, seed))


@functools.cache
def counted(plan, seed):
    """Tasks and steps of all draws [2, n], counted in integers."""
    draws = drawn(plan, seed)
    return np.array([tasks_and_steps(s, t) for s, t in zip(draws.shapes, draws.tiles, strict=True)]).T


def rounding(draws, mixed=MIXED):
    """How closely each draw obeys [n]. mixed: where tasks differ that are not drained in between."""
    alike = [
        not (s.causal or s.window or s.q_len % min(t.block_q, s.q_len))
        and -(-s.kv_len // min(t.block_kv, s.kv_len)) % t.split_kv == 0
        for s, t in zip(draws.shapes, draws.tiles, strict=True)
    ]
    whole = np.where([t.kv_pieces > 1 for t in draws.tiles], IN_PIECES, ROUNDING)
    return np.where(draws.plan.persistent & ~np.array(alike), mixed, whole)


def seconds_of(stages):
    return sum(stages.values())


def holds(draws, good, *values):
    """Every draw obeys; else the smallest one that does not, and its values."""
    bad = np.flatnonzero(~np.asarray(good))
    if len(bad):
        i = int(min(bad, key=lambda i: draws.shapes[i].batch * draws.shapes[i].q_heads * sum(counts(draws, i))))
        numbers = [float(v[i]) for v in values]
        pytest.fail(f"{len(bad)} of {len(draws.shapes)} draws fail, such as {i}: {draws.show(i)}: {numbers}")


def counts(draws, i):
    shape, tile = draws.shapes[i], draws.tiles[i]
    return -(-shape.q_len // tile.block_q), -(-shape.kv_len // tile.block_kv)


# Terms and bounds -----------------------------------------------------------------------------------------------------


@law
def every_term_is_finite_and_not_negative(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    terms = [(jax.tree_util.keystr(path), term) for path, term in jax.tree_util.tree_leaves_with_path(found)]
    failed = []
    for where, term in terms:
        good = np.isfinite(term) & (np.broadcast_to(term, COUNT) >= 0)
        failed += [f"{where}: {(~good).sum()} draws, such as {draws.show(int(good.argmin()))}"] * (not good.all())
    assert not failed
    holds(draws, found.seconds > 0, found.seconds)


@functools.cache
def bounds(plan, seed):
    """Launches and the busiest pipe; launches and everything in a row, hand-overs between the units included."""
    found = base(plan, seed)
    low = high = 0.0
    for table, kernel in zip(plan.tables, found.kernels, strict=True):
        pipes = [sum(kernel.busy[s.name] for s in table.stages if s.pipe == pipe) for pipe in table.pipes]
        always = kernel.launch + seconds_of(kernel.combine.seconds)
        low = low + always + np.max(pipes, 0)
        high = high + kernel.launch + kernel.serial
    return low, high


@law
def time_is_at_least_the_busiest_pipe_and_the_launches(plan, seed):
    draws, found, (low, _) = drawn(plan, seed), base(plan, seed), bounds(plan, seed)
    holds(draws, low <= found.seconds * (1 + ROUNDING), low, found.seconds)


@law
def time_is_at_most_everything_in_a_row(plan, seed):
    draws, found, (_, high) = drawn(plan, seed), base(plan, seed), bounds(plan, seed)
    holds(draws, found.seconds <= high * (1 + ROUNDING), found.seconds, high)


@plans(FUSED, seed=1)
def test_overlap_never_lengthens_a_call(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    options = plan.options(overlap=False, waits=False, transient=SETTLED)
    serial = np.asarray(_priced(draws.t, draws.p, draws.tile, draws.d, options).seconds)
    holds(draws, found.seconds <= serial * (1 + ROUNDING), found.seconds, serial)


@law
def no_stage_is_busy_for_longer_than_the_call(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    for kernel in found.kernels:
        for busy in (*kernel.busy.values(), *kernel.combine.seconds.values()):
            holds(draws, busy <= kernel.core * (1 + ROUNDING), busy, kernel.core)
        holds(draws, kernel.core <= found.seconds, kernel.core, found.seconds)


# Scaling and monotony -------------------------------------------------------------------------------------------------

RATES = ("cube_hz", "vector_hz", "hbm_bytes_per_s")
LAUNCHES = ("launch_base_s", "launch_per_core_s", "launch_per_task_s")
LATENCIES = ("mmad_head_cycles", "vector_instr_cycles", "sync_cycles", *LAUNCHES)


@law
def time_scales_with_the_units(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    twice = {n: 2 * getattr(draws.d, n) for n in RATES} | {n: getattr(draws.d, n) / 2 for n in LAUNCHES}
    half = priced(draws, d=draws.d.replace(**twice)).seconds
    holds(draws, np.isclose(half, found.seconds / 2, rtol=ROUNDING), half, found.seconds)
    triple = priced(draws, t=jax.tree.map(lambda x: 3 * x, draws.t)).seconds
    holds(draws, np.isclose(triple, 3 * found.seconds, rtol=ROUNDING), triple, found.seconds)


def rate_fields(d):
    return [f for f in vars(d) if f.endswith(("_per_cycle", "_hz", "_per_s"))]


@law
def a_faster_part_never_lengthens_a_call(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    rng = np.random.default_rng(seed)
    failed = {}
    for field in (*rate_fields(draws.d), "hbm_efficiency", *LATENCIES):
        factor = rng.choice([1.1, 2.0, 8.0], COUNT)
        factor = 1 / factor if field in LATENCIES else factor
        better = jax.tree.map(lambda x, f=factor: x * f, getattr(draws.d, field))
        if field == "hbm_efficiency":
            better = np.minimum(better, 1.0)
        seconds = priced(draws, d=draws.d.replace(**{field: better})).seconds
        bad = np.flatnonzero(seconds > found.seconds * (1 + rounding(draws)))
        longer = seconds / found.seconds - 1
        if len(bad):
            failed[field] = f"{len(bad)} draws, up to {longer.max():.1g}, {draws.show(int(longer.argmax()))}"
    assert not failed


CANDIDATES = 48
#: Of these, how many cores a tile is tried with: all; as many as the chip has now; and some fewer.
CORES = 4
MEMORIES = ("l1_bytes", "l0a_bytes", "l0b_bytes", "l0c_bytes", "ub_bytes", "l2_bytes", "hbm_bytes")


@functools.cache
def contests(plan, seed) -> Draws:
    """COUNT / CANDIDATES calls, each with CANDIDATES plans, legal or not: tiles on all cores, and on fewer."""
    rng = np.random.default_rng([2, seed])
    chips = of_arch(plan.arch)
    names = [chips[i % len(chips)] for i in range(COUNT // CANDIDATES)]
    shapes = [draw_shape(rng, plan.masked, list(device(n).macs_per_cycle)) for n in names]
    tiles = []
    for shape, n in zip(shapes, names, strict=True):
        there = int(device(n).cube_cores)
        for tile in [draw_tile(rng, shape, plan) for _ in range(CANDIDATES // CORES)]:
            fewer = rng.integers(1, there + 1, CORES - 2)
            tiles += [tile.replace(cores=int(cores)) for cores in (ALL_CORES, there, *fewer)]
    shapes, names = ([x for x in xs for _ in range(CANDIDATES)] for xs in (shapes, names))
    return gathered(plan, shapes, names, tiles)


def optimum(draws, d):
    """Best price of each call over its legal candidates [COUNT], infinite where there is none; and which one it is."""
    seconds = np.where(legal(draws, d, memory=True), priced(draws, d=d).seconds, np.inf).reshape(-1, CANDIDATES)
    return np.repeat(seconds.min(1), CANDIDATES), np.repeat(seconds.argmin(1), CANDIDATES)


@functools.cache
def first_optimum(plan, seed):
    draws = contests(plan, seed)
    return optimum(draws, draws.d)


@law
def more_of_anything_never_makes_the_optimum_worse(plan, seed):
    draws = contests(plan, seed)
    before, winner = first_optimum(plan, seed)
    for field in (*MEMORIES, "hbm_bytes_per_s", "cube_cores"):
        for factor in (1.25, 2.0):
            more = np.ceil(factor * getattr(draws.d, field))
            after, _ = optimum(draws, draws.d.replace(**{field: more}))
            good = (np.arange(COUNT) % CANDIDATES != winner) | (after <= before * (1 + ROUNDING)) | np.isinf(before)
            holds(draws, good, after, before, more)


# Breakdown and gradient -----------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _slopes(t, p, tile, d, options):
    """Gradient of each draw's seconds with respect to its own time constants."""
    return jax.grad(lambda t: price(t, p, tile, d, options).seconds.sum())(t)


@plans(FUSED, seed=1)
def test_breakdown_is_not_negative_and_sums_to_the_total(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    options = plan.options(waits=False, transient=SETTLED)
    slopes = _slopes(draws.t, draws.p, draws.tile, draws.d, options)
    parts = jax.tree.map(lambda x, slope: x * np.asarray(slope), draws.t, slopes)._asdict()
    for part in parts.values():
        holds(draws, part >= -rounding(draws, 4 * MIXED) * found.seconds, part, found.seconds)
    total = sum(parts.values())
    holds(draws, np.isclose(total, found.seconds, rtol=ROUNDING), total, found.seconds)


KNOBS = ("block_q", "block_kv", "buffers", "lookahead", "heads_packed", "split_kv")


@functools.partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _relaxed(t, p, tile, d, temperature, options):
    return price(t, p, tile, d, options, temperature).seconds


@functools.partial(jax.jit, static_argnames="options", compiler_options=WITHOUT_FUSION)
def _relaxed_slopes(t, p, tile, d, temperature, options):
    return jax.grad(lambda x: price(x[0], p, x[1], d, options, temperature).seconds.sum())((t, tile))


@plans(FUSED[:1], seed=1)
def test_single_precision_and_relaxed_at_temperature_zero_are_the_exact_price(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    options = plan.options(waits=False, transient=SETTLED)
    seconds = np.asarray(_relaxed(draws.t, draws.p, draws.tile, draws.d, np.zeros(MANY), options))
    holds(draws, np.isclose(found.seconds, seconds, rtol=ROUNDING), found.seconds, seconds)
    with jax.enable_x64(False):
        single = priced(gathered(*draws[:4])).seconds
    holds(draws, np.isclose(found.seconds, single, rtol=1e-4), found.seconds, single)


@plans(FUSED[:1], seed=1)
def test_gradient_is_the_finite_difference_away_from_kinks(plan, seed):
    """Each draw moves one number: a time constant, or a knob of a tile between the whole numbers."""
    places = [(0, field) for field in TimeConstants._fields] + [(1, knob) for knob in KNOBS]
    moved = np.arange(MANY) % len(places)
    draws, options = drawn(plan, seed), plan.options(waits=False)
    rng, warm, share = np.random.default_rng(3), np.full(MANY, 0.3), 3e-8
    between = {n: getattr(draws.tile, n) * rng.uniform(1, 1.1, MANY) + rng.uniform(0, 0.1, MANY) for n in KNOBS}
    at = (draws.t, draws.tile.replace(**between))

    def run(sign):
        by = [1 + sign * share * (moved == i) for i in range(len(places))]
        t, tile = at
        t = t._replace(**{n: getattr(t, n) * by[i] for i, (part, n) in enumerate(places) if part == 0})
        tile = tile.replace(**{n: getattr(tile, n) * by[i] for i, (part, n) in enumerate(places) if part == 1})
        return np.asarray(_relaxed(t, draws.p, tile, draws.d, warm, options))

    here = run(0)
    slopes = jax.device_get(_relaxed_slopes(at[0], draws.p, at[1], draws.d, warm, options))
    want = [getattr(slopes[part], n) * getattr(at[part], n) * share for part, n in places]
    want = np.stack(want)[moved, np.arange(MANY)]
    up, down = run(1) - here, here - run(-1)
    noise = 1e-4 * share * here
    smooth = np.abs(up - down) <= 1e-3 * np.abs(up) + noise
    assert smooth.mean() > 0.9
    holds(draws, ~smooth | (np.abs(want - (up + down) / 2) <= 2e-3 * np.abs(up) + noise), want, up, down, here)


# Schedules, batches and names -----------------------------------------------------------------------------------------


@plans(FUSED, seed=1)
def test_fast_and_exact_schedules_agree(plan, seed):
    draws = drawn(plan, seed)
    options = [plan.options(waits=False, transient=slots) for slots in (TRANSIENT, 516)]
    fast, exact = (np.asarray(_priced(draws.t, draws.p, draws.tile, draws.d, o).seconds) for o in options)
    off = np.abs(fast / exact - 1)
    holds(draws, off < 3e-3, fast, exact)
    assert np.mean(off > 1e-3) < 2e-3, np.sort(off)[-9:]  # two circuits of nearly the same length settle slowly


@law
def order_and_neighbours_in_a_batch_change_nothing(plan, seed):
    draws, found = drawn(plan, seed), base(plan, seed)
    order = np.random.default_rng(4).permutation(COUNT)
    half = np.where(np.arange(COUNT) % 2, order, order[0])  # every second one is a copy of one draw
    for places in (order, half):
        p, tile, d = jax.tree.map(lambda x, places=places: x[places], (draws.p, draws.tile, draws.d))
        again = jax.device_get(_priced(constants(d), p, tile, d, plan.options(transient=SETTLED)))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.broadcast_to(x, COUNT)[places], np.broadcast_to(y, COUNT))


def test_a_call_alone_costs_what_it_costs_in_a_batch():
    plan = FUSED[1]
    draws, found = drawn(plan, 1), base(plan, 1)
    for i in range(0, MANY, 100):
        cost = estimate(draws.shapes[i], device(draws.devices[i]), draws.tiles[i])
        assert cost.seconds == pytest.approx(float(found.seconds[i]), rel=ROUNDING), draws.show(i)


def compilations():
    priced_alone: Any = estimate_module._priced
    return priced_alone._cache_size()


def test_names_of_a_device_are_of_no_interest():
    shape, tile, spec = AttentionShape(1, 4, 300, 64), TileConfig(32, 32), device("ascend910b2")
    seconds = estimate(shape, spec, tile).seconds
    compiled = compilations()
    assert estimate(shape, spec.replace(name="x", soc="y", family="z"), tile).seconds == seconds
    assert compilations() == compiled


@pytest.mark.parametrize("device_name", devices())
def test_an_illegal_tile_names_the_buffer_the_bytes_needed_and_those_there_are(device_name):
    spec, shape, tile = device(device_name), AttentionShape(1, 8, 8192, 256, dtype="float32"), TileConfig(4096, 4096, 4)
    short = [f for f in footprints(shape, spec, tile) if not f.fits and (f.buffer, spec.overflow) != ("L1", "spill")]
    problems = illegal(shape, spec, tile)
    assert short and [f.buffer for f in short] == [p.split()[0] for p in problems]
    for foot, problem in zip(short, problems, strict=True):
        numbers = [int(n.replace(",", "")) for n in re.findall(r"(?<= )[\d,]+\d", problem)]
        assert numbers == [round(foot.needed), round(foot.available)]
    with pytest.raises(ValueError, match=re.escape(problems[0])):
        estimate(shape, spec, tile)


# Counts ---------------------------------------------------------------------------------------------------------------


def visible(shape):
    """Which pairs take part, [q_len, kv_len], written down from the definition."""
    ahead = np.arange(shape.kv_len)[None] - np.arange(shape.q_len)[:, None] - (shape.kv_len - shape.q_len)
    left, right = shape.window or (None, None)
    seen = np.ones((shape.q_len, shape.kv_len), bool)
    seen &= (ahead <= 0) | (not shape.causal)
    seen &= True if left is None else ahead >= -left
    return seen & (True if right is None else ahead <= right)


def test_steps_cover_exactly_the_blocks_with_a_visible_pair():
    rng = np.random.default_rng(5)
    for _ in range(1500):
        q_len, kv_len, rows, cols = map(int, rng.integers(1, 60, 4))
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(70)) for _ in range(2))
        shape = AttentionShape(2, 6, q_len, 16, 3, kv_len, causal=bool(rng.integers(2)), window=(left, right))
        tile = TileConfig(rows, cols, heads_packed=2, split_kv=3)
        seen = visible(shape)
        rows, cols = min(rows, q_len), min(cols, kv_len)
        blocks = np.add.reduceat(np.add.reduceat(seen, range(0, q_len, rows), 0, int), range(0, kv_len, cols), 1)
        begin, end = kv_blocks(shape, tile)
        number = np.arange(blocks.shape[1])
        np.testing.assert_array_equal((number >= begin[:, None]) & (number < end[:, None]), blocks > 0)
        assert shape.valid_pairs == 12 * seen.sum() == 12 * blocks.sum()
        assert tasks_and_steps(shape, tile) == (6 * len(blocks) * 3, 6 * (blocks > 0).sum())


@jax.jit
def _cut(p, tile):
    return tiling.cut(p, tile)


@law
def priced_steps_are_those_counted_in_integers(plan, seed):
    draws = drawn(plan, seed)
    tasks, steps = counted(plan, seed)
    tile = draws.tile.replace(fusion="fused", core_order="balanced")
    exact = _cut(draws.p, tile)
    with jax.enable_x64(False):
        single = _cut(*jax.tree.map(np.float32, (draws.p, tile)))
    stacks = np.array([s.batch * s.q_heads // t.heads_packed for s, t in zip(draws.shapes, draws.tiles, strict=True)])
    small = np.asarray(single.q_blocks * single.kv_blocks) < 2**24
    for b in (single, exact):
        got, want = np.asarray(b.steps, float), steps / stacks
        same = np.where(small | (b is exact), got == want, np.isclose(got, want, rtol=1e-4))
        holds(draws, same, got, want)
        got, want = np.asarray(b.q_blocks * b.parts, float), tasks / stacks
        holds(draws, got == want, got, want)


def macs(plan, p, tile, d):
    """Multiply-adds that a call is priced at: the seconds of the one core that does all of its tasks, where nothing
    else takes time and loads are free."""
    t = constants(d)
    one = jax.tree.map(np.zeros_like, t)._replace(mac=np.ones_like(t.mac))
    tile = tile.replace(cores=0 * tile.cores + 1)
    kernels = jax.device_get(_priced(one, p, tile, d, plan.options(transient=SETTLED))).kernels
    return sum(kernel.busy.get(n, 0.0) for kernel in kernels for n in ("qk_matmul", "pv_matmul"))


@law
def no_pair_is_left_out_and_none_is_multiplied_twice(plan, seed):
    """The priced multiply-adds are those of the visible pairs and what pads them to whole blocks."""
    draws = drawn(plan, seed)
    _, steps = counted(plan, seed)
    got = macs(plan, draws.p, draws.tile, draws.d)
    least = np.array([shape.flops / 2 for shape in draws.shapes])
    t, p, pad = draws.tile, draws.p, 16
    rows = np.ceil(np.minimum(t.block_q, p.q_len) * t.heads_packed / pad) * pad
    cols = np.ceil(np.minimum(t.block_kv, p.kv_len) / pad) * pad
    most = steps * rows * cols * (np.ceil(p.head_dim / pad) + np.ceil(p.v_head_dim / pad)) * pad
    holds(draws, got >= least * (1 - ROUNDING), got, least)
    holds(draws, got <= most * (1 + ROUNDING), got, most)


@plans(FUSED, seed=1)
def test_a_one_tile_plan_has_the_bytes_and_flops_of_the_shape(plan, seed):
    rng, chips = np.random.default_rng(6), of_arch(plan.arch)
    names = [chips[i % len(chips)] for i in range(MANY)]
    shapes, tiles = [], []
    for n in names:
        dtype = str(rng.choice(list(device(n).macs_per_cycle)))
        q_len, kv_len = (16 * int(rng.integers(1, 4)) for _ in range(2))
        heads, batch = (int(rng.integers(1, 70)) for _ in range(2))
        head_dim, v_head_dim = (16 * int(rng.integers(1, 9)) for _ in range(2))
        mask = "bool" if plan.masked else None
        shapes.append(AttentionShape(batch, heads, q_len, head_dim, heads, kv_len, v_head_dim, dtype, mask=mask))
        tiles.append(TileConfig(64, 64, 1, 0, core_order=plan.core_order))
    draws = gathered(plan, shapes, names, tiles)
    assert legal(draws).all()
    kernel = priced(draws).kernels[0]
    moved, spills = kernel.bytes, kernel.traffic.spill > 0
    assert spills.mean() < 0.01
    got = sum(np.asarray(moved[n], float) for n in ("load_q", "load_k", "load_v", "store_o"))
    want = np.array([shape.min_bytes for shape in shapes], float)
    holds(draws, spills | np.isclose(got, want, rtol=1e-6), got, want)
    got, want = macs(plan, draws.p, draws.tile, draws.d), np.array([shape.flops / 2 for shape in shapes])
    holds(draws, np.isclose(got, want, rtol=1e-6), got, want)


HUGE = AttentionShape(batch=64, q_heads=128, q_len=1_048_576, head_dim=128, causal=True)


def test_a_huge_call_is_counted_exactly():
    tile = TileConfig(128, 128)
    cost = estimate(HUGE, device("ascend910b2"), tile)
    assert np.isfinite(cost.seconds) and cost.seconds > 0
    blocks = 1_048_576 // 128
    assert cost.tasks == 64 * 128 * blocks and cost.steps == 64 * 128 * blocks * (blocks + 1) // 2
    assert HUGE.valid_pairs == 64 * 128 * 1_048_576 * 1_048_577 // 2
    assert dataclasses.replace(HUGE, causal=False).valid_pairs == 64 * 128 * 1_048_576**2


@plans(FUSED[:1], seed=1)
def test_a_huge_call_costs_the_same_in_single_and_double_precision(plan, seed):
    rng, chips = np.random.default_rng(7), of_arch(plan.arch)
    names = [chips[i % len(chips)] for i in range(MANY)]
    windows = (None, (4095, 0), (None, 5), (1_000_000, None))
    mask = "bool" if plan.masked else None
    shapes = [
        dataclasses.replace(HUGE, mask=mask, causal=bool(i % 2), window=windows[i % 4], kv_len=2**20 - 777 * (i % 3))
        for i in range(MANY)
    ]
    blocks = 16 * rng.integers(1, 9, (MANY, 2))
    tiles = [TileConfig(int(q), int(kv), split_kv=1 + i % 2) for i, (q, kv) in enumerate(blocks)]
    tiles = [tile.replace(core_order=plan.core_order) for tile in tiles]
    with jax.enable_x64(False):
        single = gathered(plan, shapes, names, tiles)
        seconds = priced(single).seconds
    want = priced(gathered(plan, shapes, names, tiles)).seconds
    holds(single, np.isclose(seconds, want, rtol=1e-4), seconds, want)
