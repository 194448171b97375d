"""Counts, laws and gradients of the cost model."""

import dataclasses
import functools
import math
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel.hardware import device
from npumodel.model import estimate as estimate_module
from npumodel.model import tiling
from npumodel.model.cost import WITHOUT_FUSION, Options, price
from npumodel.model.durations import TimeConstants, time_constants
from npumodel.model.estimate import arguments, estimate, footprints, illegal, tasks_and_steps
from npumodel.model.graph import graph_of
from npumodel.model.tiling import Problem
from npumodel.model.trace import timeline
from npumodel.relax import ceil_div, floor_div, floor_sum, tent
from npumodel.report_text import Priced, warnings
from npumodel.tile import FUSIONS, SoftmaxTile, TileConfig
from npumodel.workload import AttentionShape, SoftmaxShape

ARTICLE = AttentionShape(batch=4, q_heads=32, q_len=4096, head_dim=128)
DEVICES = ("article", "ascend910b2")  # one coupled, one split
#: Where compiling takes longest: the second one in the slow run.
FIRST = ("article", pytest.param("ascend910b2", marks=pytest.mark.slow))


def random_shape(rng, **fixed):
    kv_heads = int(rng.integers(1, 5))
    sizes = dict(
        batch=int(rng.integers(1, 9)),
        kv_heads=kv_heads,
        q_heads=kv_heads * int(rng.integers(1, 5)),
        q_len=int(2 ** rng.uniform(0, 13)),
        kv_len=int(2 ** rng.uniform(0, 13)),
        head_dim=int(rng.choice([32, 64, 80, 128, 192])),
        v_head_dim=int(rng.choice([64, 128])),
        causal=bool(rng.integers(2)),
    )
    return AttentionShape(**(sizes | fixed))


def stacked(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def random_tile(rng, shape, dev):
    while True:
        blocks = 16 * rng.integers(1, 33, 2)
        tile = TileConfig(int(blocks[0]), int(blocks[1]), int(rng.integers(1, 5)), int(rng.integers(0, 4)))
        if not illegal(shape, dev, tile):
            return tile


# The relaxed ceiling ------------------------------------------------------------------------------------------------


def test_ceiling_is_exact_at_temperature_zero_traced_or_not():
    rng = np.random.default_rng(0)
    a, b = rng.integers(1, 2**20, 4000), rng.integers(1, 2**12, 4000)
    a = np.where(rng.integers(2, size=4000), a, a // b * b)
    want = -(-a // b)
    for temperature in (0.0, jnp.zeros(())):
        got = jax.jit(lambda a, b, t=temperature: ceil_div(a, b, t))(a.astype(np.float32), b.astype(np.float32))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(floor_div(a.astype(np.float32), b.astype(np.float32), temperature), a // b)


def test_ceiling_is_smooth_above_zero_and_tends_to_the_exact_one():
    x = jnp.linspace(0.3, 5.3, 400)
    ceiling = jax.jit(lambda x, temperature: ceil_div(x, 1.0, temperature))
    slope = jax.jit(jax.vmap(jax.grad(ceiling), (0, None)))(x, 0.3)
    assert np.isfinite(slope).all() and (slope > 0).all()
    off_jump = np.abs(x - np.round(x)) > 0.05
    errors = [np.abs(ceiling(x, t) - np.ceil(x))[off_jump].max() for t in (0.3, 0.03, 1e-3, 1e-5)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02
    assert float(ceil_div(3.0, 1.0, jnp.asarray(1e-6))) == pytest.approx(3, abs=1e-3)


def test_floor_sum_is_exact_in_logarithmic_time():
    rng, run = np.random.default_rng(1), jax.jit(floor_sum)
    for _ in range(60):
        count, slope, start, modulus = (int(2 ** rng.uniform(0, high)) for high in (9, 9, 10, 9))
        want = sum((slope * i + start) // modulus for i in range(count))
        assert float(run(*map(float, (count, slope, start, modulus)))) == want
    assert float(run(0.0, 3.0, 1.0, 2.0)) == 0.0


def test_tent_picks_one_integer_exactly():
    assert [float(tent(jnp.asarray(x, float))) for x in (-1, 0, 1, 0.25)] == [0, 1, 0, 0.75]


# Counts -------------------------------------------------------------------------------------------------------------


def by_hand(shape, tile):
    """(steps of each q block of a head, rows of K that it reads), counted one by one."""
    rows, cols = min(tile.block_q, shape.q_len), min(tile.block_kv, shape.kv_len)
    left, right = shape.window or (None, None)
    offset, counted = shape.kv_len - shape.q_len, []
    for first in range(0, shape.q_len, rows):
        last = min(first + rows, shape.q_len) - 1
        right = 0 if shape.causal else right
        end = shape.kv_len if right is None else min(shape.kv_len, last + offset + right + 1)
        begin = 0 if left is None else max(0, first + offset - left)
        blocks = range(begin // cols, math.ceil(max(0, end) / cols))
        counted.append((len(blocks), sum(min(cols, shape.kv_len - j * cols) for j in blocks)))
    return counted


def test_steps_and_rows_match_a_count_by_hand():
    rng, jitted = np.random.default_rng(2), jax.jit(tiling.cut)
    at_most, steps_before, steps_beyond = map(jax.jit, (tiling.at_most, tiling.steps_before, tiling.steps_beyond))
    for i in range(300):
        window = tuple(int(2 ** rng.uniform(0, 12)) if rng.integers(3) else None for _ in range(2)) if i % 2 else None
        shape = random_shape(rng, causal=bool(i % 4), window=window)
        tile = TileConfig(*map(int, rng.integers(1, 300, 2)))
        counted = by_hand(shape, tile)
        steps = [steps for steps, _ in counted]
        p, tile_ = arguments(shape, tile, device("article"))[:2]
        b = jitted(p, tile_)
        assert float(b.q_blocks) == len(counted)
        assert float(b.steps) == sum(steps), (shape, tile)
        assert float(b.last_steps) == steps[-1] and float(b.started) == sum(s > 0 for s in steps)
        assert float(b.most_steps) == max(steps[:-1], default=b.most_steps)
        assert float(b.least_steps) == min((s for s in steps[:-1] if s), default=b.least_steps)
        assert float(tiling.kv_rows(b)) == sum(rows for _, rows in counted)
        heads = shape.batch * shape.q_heads
        assert tasks_and_steps(shape, tile) == (heads * len(steps), heads * sum(steps))
        full = np.array(steps[:-1])
        for first, last in ((0, len(full)), sorted(rng.integers(0, len(full) + 1, 2))):
            for limit in rng.integers(0, max(steps) + 2, 3):
                got = float(at_most(p, b, float(limit), float(first), float(last)))
                whole = (first, last) == (0, len(full))  # elsewhere: those in the middle are taken to be mixed evenly
                assert abs(got - (full[first:last] <= limit).sum()) <= (1e-3 if whole else 2), (shape, tile, limit)
            assert float(steps_before(p, b, float(last))) == full[:last].sum()
        limit = int(rng.integers(1, max(steps) + 2))
        assert float(steps_beyond(p, b, float(limit))) == pytest.approx(np.maximum(full - limit, 0).sum(), abs=1e-2)


def test_pairs_and_bytes_of_a_shape_match_a_count_by_hand():
    rng = np.random.default_rng(12)
    for _ in range(200):
        q_len, kv_len = map(int, rng.integers(1, 40, 2))
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(0, 45)) for _ in range(2))
        shape = AttentionShape(
            2,
            4,
            q_len,
            16,
            2,
            kv_len,
            8,
            causal=bool(rng.integers(2)),
            window=(left, right),
            v_in_k=bool(rng.integers(2)),
        )
        diagonal = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)[None]
        seen = np.ones((q_len, kv_len), bool) if not shape.causal else diagonal >= 0
        seen &= (diagonal <= (np.inf if left is None else left)) & (-diagonal <= (np.inf if right is None else right))
        assert shape.valid_pairs == 8 * seen.sum()
        assert shape.seen_keys >= seen.any(0).sum()
        if q_len == 1:
            assert shape.seen_keys == kv_len - (0 if left is None else max(0, kv_len - 1 - left))
        row = 16 + 8 * (not shape.v_in_k)
        assert shape.min_bytes == 2 * (8 * q_len * 24 + 4 * shape.seen_keys * row)


def test_every_pair_is_computed_and_no_block_without_one():
    shape = AttentionShape(1, 1, 70, 64, kv_len=100, causal=True)
    steps = [s for s, _ in by_hand(shape, TileConfig(16, 16))]
    assert shape.valid_pairs == sum(min(100, i + 31) for i in range(70))
    covered = sum(min(16, 70 - 16 * i) * min(16 * s, 100) for i, s in enumerate(steps))
    assert shape.valid_pairs <= covered <= shape.valid_pairs + 70 * 31


@pytest.mark.parametrize("name", DEVICES)
def test_one_tile_call_moves_the_shapes_own_bytes(name):
    shape = AttentionShape(2, 3, 64, 64)
    cost = estimate(shape, device(name), TileConfig(64, 64, 1, 0))
    moved = {s.name: s.bytes for s in cost.stages}
    each = 2 * 3 * 64 * 64 * 2
    assert all(moved[n] == each for n in ("load_q", "load_k", "load_v", "store_o"))
    assert sum(moved[n] for n in ("load_q", "load_k", "load_v", "store_o")) == shape.min_bytes
    assert cost.tasks == 6 and cost.steps == 6


def test_split_moves_twelve_bytes_a_score_and_the_partial_outputs():
    cost = estimate(ARTICLE, device("ascend910b2"), TileConfig(128, 256))
    moved = {s.name: s.bytes for s in cost.stages}
    scores = 4 * 32 * 4096 * 4096
    assert moved["fixpipe_s"] + moved["load_s"] + moved["store_p"] + moved["load_p"] == 12 * scores
    assert moved["fixpipe_o"] == moved["load_o"] == 4 * 4 * 32 * 4096 * 128 * 16


def test_cube_time_of_one_block_added_on_paper():
    # 128 x 128 x 128 in fp16 on 910B2: 8*8*8 fractals of one cycle, one instruction head of 6, at 1.8 GHz; MTE1 loads
    # 32 KB at 256 B/cycle and 32 KB at 128 B/cycle = 384 cycles first, during which nothing computes.
    shape = AttentionShape(1, 1, 128, 128)
    cost = estimate(shape, device("ascend910b2"), TileConfig(128, 128, 1, 0))
    qk = next(s for s in cost.stages if s.name == "qk_matmul")
    assert qk.busy == pytest.approx((384 + 512 + 6) / 1.8e9, rel=1e-5)


@pytest.mark.slow
def test_graph_folds_the_mask_and_counts_launches():
    masked = dataclasses.replace(ARTICLE, mask="bool")
    assert [graph_of(s, f).launches for s in (ARTICLE, masked) for f in FUSIONS] == [1, 2, 3, 1, 2, 4]
    assert "one launch fewer" in str(graph_of(ARTICLE)) and "refused" in str(graph_of(masked))
    notes = [graph_of(masked, f).notes[1:] for f in FUSIONS]  # one for every pair of neighbours
    assert [["joined" in note for note in one] for one in notes] == [[True] * 3, [False, True, True], [False] * 3]
    assert "MatMul(Q,K) + Mask: joined, a barrier" in notes[0][0] and "both on the vector unit" in notes[0][1]
    dev = device("ascend910b2")
    tile = TileConfig(128, 128)
    assert estimate(masked, dev, tile).seconds > estimate(ARTICLE, dev, tile).seconds
    costs = [estimate(ARTICLE, dev, tile.replace(fusion=f)) for f in FUSIONS]
    assert [c.launches for c in costs] == [1, 2, 3]
    assert costs[0].traffic["hbm"] < costs[1].traffic["hbm"] < costs[2].traffic["hbm"]
    scores = 4 * 32 * 4096 * 4096 * 4
    moved = [{s.name: s.bytes for s in c.stages} for c in costs]
    assert [m["load_s"] for m in moved] == [scores, scores, 2 * scores]  # alone, softmax reads S twice


# Laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIRST, pytest.param("ascend950dt_9581", marks=pytest.mark.slow)])
def test_bounds_breakdown_and_busy_time(name):
    rng, dev = np.random.default_rng(3), device(name)
    for _ in range(25):
        shape = random_shape(rng)
        tile = random_tile(rng, shape, dev)
        cost = estimate(shape, dev, tile)
        assert np.isfinite(cost.seconds) and cost.seconds > 0
        assert cost.lower_bound <= cost.seconds * (1 + 1e-5)
        assert cost.seconds <= estimate(shape, dev, tile, overlap=False).seconds * (1 + 1e-5) + 1e-5
        assert sum(cost.breakdown.values()) == pytest.approx(cost.seconds, rel=1e-5)
        assert all(v >= -1e-6 * cost.seconds for v in cost.breakdown.values())
        assert all(s.busy <= cost.seconds * (1 + 1e-5) and s.dma_wait >= 0 for s in cost.stages)
        assert 0 <= cost.l1_hit_rate <= 1 and -1e-6 <= cost.l2_hit_rate <= 1 and 0 < cost.launch_share < 1


@pytest.mark.parametrize("name", DEVICES)
def test_faster_parts_never_lengthen_a_call(name):
    rng, dev = np.random.default_rng(4), device(name)
    latencies = ("mmad_head_cycles", "vector_instr_cycles", "sync_cycles", "launch_base_s", "launch_per_core_s")
    rates = [f for f in vars(dev) if f.endswith(("_per_cycle", "_hz", "_per_s")) and f != "macs_per_cycle"]
    for _ in range(4):
        shape = random_shape(rng)
        tile = random_tile(rng, shape, dev)
        base = estimate(shape, dev, tile).seconds
        for field in (*rates, *latencies):
            if getattr(dev, field) is not None:
                better = getattr(dev, field) * (0.5 if field in latencies else 2)
                changed = estimate(shape, dev.replace(**{field: better}), tile).seconds
                assert changed <= base * (1 + 1e-5), field


def test_twice_the_clocks_and_bandwidths_is_half_the_time():
    dev = device("ascend910b2")
    faster = dev.replace(
        cube_hz=2 * dev.cube_hz,
        vector_hz=2 * dev.vector_hz,
        hbm_bytes_per_s=2 * dev.hbm_bytes_per_s,
        launch_base_s=dev.launch_base_s / 2,
        launch_per_core_s=dev.launch_per_core_s / 2,
        launch_per_task_s=dev.launch_per_task_s / 2,
    )
    tile = TileConfig(128, 256)
    assert estimate(ARTICLE, faster, tile).seconds == pytest.approx(estimate(ARTICLE, dev, tile).seconds / 2, rel=1e-5)


@pytest.mark.parametrize("name", DEVICES)
def test_fast_and_exact_schedules_agree(name):
    rng, dev, calls = np.random.default_rng(5), device(name), []
    for _ in range(40):
        shape = random_shape(rng)
        calls.append((shape, random_tile(rng, shape, dev)))
    p, tiles, chips = (stacked(x) for x in zip(*(arguments(*call, dev) for call in calls), strict=True))
    exact = estimate_module._priced(p, tiles, chips, Options("float16", False, waits=False, transient=516))
    for (shape, tile), seconds in zip(calls, np.asarray(exact.seconds), strict=True):
        assert estimate(shape, dev, tile).seconds == pytest.approx(float(seconds), rel=1e-3), (shape, tile)


@pytest.mark.parametrize("name", FIRST)
def test_a_plan_on_fewer_cores_is_the_plan_of_a_chip_that_has_only_those(name):
    dev = device(name)
    tiles = TileConfig(64, 64), TileConfig(64, 64, split_kv=3), TileConfig(32, 64, core_order="contiguous")
    for shape in (AttentionShape(1, 5, 700, 64, causal=True), AttentionShape(3, 16, 300, 64)):
        for tile in tiles:
            for cores in (1, 3, int(dev.cube_cores), 4 * int(dev.cube_cores)):
                cost = estimate(shape, dev, tile.replace(cores=cores))
                small = estimate(shape, dev.replace(cube_cores=min(cores, float(dev.cube_cores))), tile)
                assert (cost.seconds, cost.cores) == (small.seconds, small.cores)
                assert cost.traffic == small.traffic
    tiny = AttentionShape(1, int(dev.cube_cores), 16, 64)
    for cores, tasks in ((dev.cube_cores, 1), (1, dev.cube_cores)):  # that are launched; tasks of each
        launch = dev.launch_base_s + dev.launch_per_core_s * cores + dev.launch_per_task_s * tasks
        cost = estimate(tiny, dev, TileConfig(16, 16, cores=2**20 if tasks == 1 else 1))
        assert cost.cores == cores and cost.launch_seconds == pytest.approx(launch, rel=1e-5)
    with pytest.raises(ValueError, match="cores: expected a number >= 1, got 0"):
        TileConfig(16, 16, cores=0)


HUGE = AttentionShape(batch=64, q_heads=128, q_len=1_048_576, head_dim=128, causal=True)


def test_a_call_too_large_for_the_memory_is_priced_as_a_question_of_what_if():
    dev = device("ascend910b2")
    cost = estimate(HUGE, dev, TileConfig(128, 128))
    bytes_ = 4 * 64 * 128 * 1_048_576 * 128 * 2
    assert HUGE.tensor_bytes == bytes_ and math.isfinite(cost.seconds)
    row = {f.buffer: f for f in cost.footprints}["HBM"]
    assert not row.fits and row.needed == pytest.approx(bytes_, rel=1e-4) and row.available == dev.hbm_bytes
    assert cost.too_large and f"HBM needs {bytes_:,} bytes" in cost.too_large and "68,719,476,736" in cost.too_large
    assert warnings(Priced(cost, "explicit"))[0] == f"warning: {cost.too_large}"
    assert estimate(HUGE, dev.replace(hbm_bytes=2.0 * bytes_), TileConfig(128, 128)).too_large is None
    assert estimate(ARTICLE, dev, TileConfig(128, 128)).too_large is None


def test_a_plan_whose_workspace_does_not_fit_is_refused():
    """S in float32 and P lie between the kernels of an unfused call; the fused one has but a few blocks."""
    dev, shape = device("ascend910b2"), AttentionShape(4, 32, 16384, 128)
    tensors, scores = 4 * 4 * 32 * 16384 * 128 * 2, 4 * 32 * 16384**2
    for fusion, workspace in (("unfused", scores * (4 + 2)), ("partly", scores * 4)):
        tile = TileConfig(128, 128, fusion=fusion)
        (problem,) = illegal(shape, dev, tile)
        needed, there = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{5,}", problem))
        assert problem.startswith("HBM needs ") and there == dev.hbm_bytes
        assert needed == pytest.approx(tensors + workspace, rel=1e-3)
        with pytest.raises(ValueError, match="does not fit on ascend910b2: HBM needs"):
            estimate(shape, dev, tile)
        assert not illegal(shape, dev.replace(hbm_bytes=1.01 * needed), tile)
    row = {f.buffer: f for f in footprints(shape, dev, TileConfig(128, 128))}["HBM"]
    assert row.fits and tensors < row.needed < 1.1 * tensors
    split = {f.buffer: f for f in footprints(shape, dev, TileConfig(128, 128, split_kv=4))}["HBM"]
    assert split.needed - row.needed == pytest.approx(4 * 4 * 32 * 16384 * (128 + 16) * 4, rel=1e-3)


def test_the_mask_is_one_of_the_tensors_and_a_view_is_none():
    plain = AttentionShape(2, 8, 300, 64, kv_heads=2, kv_len=500)
    assert plain.tensor_bytes == 2 * 64 * (2 * 2 * 8 * 300 + 2 * 2 * 2 * 500)
    for mask, size in (("bool", 1), ("additive", 2)):
        assert dataclasses.replace(plain, mask=mask).tensor_bytes == plain.tensor_bytes + size * 300 * 500
    view = AttentionShape(2, 8, 300, 576, kv_heads=1, kv_len=500, v_head_dim=512, v_in_k=True)
    assert view.tensor_bytes == 2 * (2 * 8 * 300 * (576 + 512) + 2 * 500 * 576)


@pytest.mark.parametrize("name", FIRST)
def test_timeline_ends_when_the_price_says(name, tmp_path):
    dev = device(name)
    for shape, tile in (
        (AttentionShape(2, 40, 300, 64), TileConfig(64, 64)),
        (AttentionShape(1, int(dev.cube_cores), 1000, 64), TileConfig(128, 96, 1, 2)),
        (AttentionShape(4, 8, 256, 64), TileConfig(64, 64, fusion="unfused")),
        (AttentionShape(1, int(dev.cube_cores), 320, 64, kv_len=200, causal=True), TileConfig(64, 64)),
    ):
        line = timeline(shape, dev, tile)
        assert line.complete
        assert line.shown_seconds == pytest.approx(line.cost.seconds, rel=1e-4)
        for stage in line.cost.stages:
            waited = sum(e.dma_wait for e in line.events if e.stage == stage.name)
            assert waited == pytest.approx(stage.dma_wait, rel=0.05, abs=1e-9)
        lanes = {}
        for e in sorted(line.events, key=lambda e: (e.start, e.end)):
            assert e.start >= lanes.get(e.pipe, 0.0) - 1e-10, e
            lanes[e.pipe] = e.end
        line.to_csv(tmp_path / "events.csv")
        assert len((tmp_path / "events.csv").read_text().splitlines()) == 1 + len(line.events)
        assert line.save_chrome_trace(tmp_path / "trace.json") >= len(line.events)
        assert line.table().splitlines()[0].startswith("[MatMul(Q,K)] tensor_core: ")
    cut_short = timeline(ARTICLE, dev, TileConfig(128, 64, 1), max_events=100)
    assert not cut_short.complete and len(cut_short.events) <= 120


@pytest.mark.parametrize("name", FIRST)
def test_article_shape_has_a_u_over_block_size_and_gains_by_overlap(name):
    dev = device(name)
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    seconds = []
    for size in sizes:
        tile = TileConfig(size, size, 1)
        seconds.append(math.inf if illegal(ARTICLE, dev, tile) else estimate(ARTICLE, dev, tile).seconds)
    best = int(np.argmin(seconds))
    assert 0 < best < len(sizes) - 1
    assert seconds[: best + 1] == sorted(seconds[: best + 1], reverse=True)  # too small: overhead
    assert seconds[-1] > 1.2 * seconds[best]  # too large: spill or illegal
    tile = TileConfig(sizes[best], sizes[best], 1)
    assert estimate(ARTICLE, dev, tile, overlap=False).seconds > 1.2 * estimate(ARTICLE, dev, tile).seconds


def test_ragged_length_costs_more_than_its_share_in_time_and_bytes():
    dev, tile = device("article"), TileConfig(32, 32)
    aligned, ragged = (estimate(dataclasses.replace(ARTICLE, q_len=s, kv_len=s), dev, tile) for s in (4096, 4097))
    assert ragged.seconds > aligned.seconds * (4097 / 4096) ** 2
    per_pair = [c.traffic["gm_l1"] / c.shape.valid_pairs for c in (aligned, ragged)]
    assert per_pair[1] > per_pair[0]


def test_illegal_tile_names_buffer_needed_and_available():
    dev = device("ascend910b2")
    with pytest.raises(ValueError, match=r"L1 needs 819,200 bytes, there are 524,288"):
        estimate(ARTICLE, dev, TileConfig(128, 512))
    assert not illegal(ARTICLE, device("article"), TileConfig(128, 512))  # the article's L1 spills
    need = {f.buffer: f.needed for f in footprints(ARTICLE, dev, TileConfig(128, 512))}
    assert need["L1"] == 128 * 128 * 2 + 2 * 2 * 512 * 128 * 2 + 2 * 128 * 512 * 2
    with pytest.raises(ValueError, match="bfloat16"):
        estimate(dataclasses.replace(ARTICLE, dtype="bfloat16"), device("ascend910a"), TileConfig(64, 64))


# Gradients ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, compiler_options=WITHOUT_FUSION)
def relaxed(p, tile, dev, temperature):
    t = time_constants(dev, "float16")
    return price(t, p, tile, dev, Options("float16", False, waits=False), temperature).seconds


@pytest.mark.parametrize("name", FIRST)
def test_gradient_is_finite_everywhere_and_matches_finite_differences(name):
    with jax.enable_x64(True):
        p, tile, dev = arguments(ARTICLE, TileConfig(100.3, 150.7, 1.6, 1.4), device(name))
        run = functools.partial(relaxed, p)
        grad = jax.jit(jax.grad(functools.partial(relaxed.__wrapped__, p), (0, 1)), compiler_options=WITHOUT_FUSION)
        warm = np.float64(0.2)
        for gradient in jax.tree.leaves(grad(tile, dev, warm)) + jax.tree.leaves(grad(tile, dev, np.float64(0.0))):
            assert np.isfinite(gradient)
        flat, unflatten = jax.flatten_util.ravel_pytree((tile, dev))
        slopes, _ = jax.flatten_util.ravel_pytree(grad(tile, dev, warm))
        at_a_jump = {float(dev.l0a_bytes), float(dev.l0b_bytes)}  # L0 holds a whole number of fractals: steps by design
        for i in range(len(flat)):
            if float(flat[i]) in at_a_jump:
                continue
            step = np.zeros_like(flat)
            step[i] = 1e-7 * max(abs(float(flat[i])), 1e-9)
            up, down = (run(*unflatten(flat + s), warm) for s in (step, -step))
            want = (up - down) / (2 * step[i])
            scale = float(run(tile, dev, warm)) / max(abs(float(flat[i])), 1e-9)
            assert float(slopes[i]) == pytest.approx(float(want), rel=2e-3, abs=1e-5 * scale), i


@pytest.mark.parametrize("name", FIRST)
def test_relaxed_at_temperature_zero_is_the_exact_price(name):
    """The relaxed one in float64, as in the test of the gradient: one compilation less."""
    rng, dev = np.random.default_rng(6), device(name)
    for _ in range(20):
        shape = random_shape(rng)
        tile = random_tile(rng, shape, dev)
        with jax.enable_x64(True):
            found = relaxed(*arguments(shape, tile, dev), np.float64(0.0))
        assert float(found) == pytest.approx(estimate(shape, dev, tile).seconds, rel=1e-5)


def test_one_compile_serves_a_thousand_shapes_and_tiles():
    rng, dev = np.random.default_rng(7), device("ascend910b2")
    estimate(ARTICLE, dev, TileConfig(128, 128))
    before = estimate_module._priced._cache_size()
    for i in range(1000):
        shape = random_shape(rng)
        tile = TileConfig(16 * int(rng.integers(1, 9)), 16 * int(rng.integers(1, 9)), 1, int(rng.integers(0, 3)))
        chip = dev.replace(name=f"chip{i}", l1_bytes=dev.l1_bytes + 1024 * i)
        jax.block_until_ready(estimate_module._priced(*arguments(shape, tile, chip), Options("float16", False)))
    assert estimate_module._priced._cache_size() == before


@pytest.mark.parametrize(
    "shape, tile",
    [
        (SoftmaxShape(1000, 4096), SoftmaxTile(4, 4096)),
        pytest.param(ARTICLE, TileConfig(128, 256), marks=pytest.mark.slow),
    ],
    ids=["softmax", "attention"],
)
def test_price_does_not_depend_on_x64(shape, tile):
    dev = device("ascend910b2")
    single = estimate(shape, dev, tile).seconds
    with jax.enable_x64(True):
        assert estimate(shape, dev, tile).seconds == pytest.approx(single, rel=1e-5)


def test_every_time_constant_has_a_title():
    from npumodel.model.durations import CONSTANT_TITLES

    assert set(CONSTANT_TITLES) == set(TimeConstants._fields)
    assert (Problem.of(ARTICLE).low, Problem.of(ARTICLE).high) == (-4096, 4096)
