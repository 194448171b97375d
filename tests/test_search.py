"""Search: the space and its legality, the rules, the descent, `tune`, and the order in which auto resolves."""

import dataclasses
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import npumodel
from npumodel.hardware import device, devices
from npumodel.model import estimate as cost
from npumodel.search import auto, gradient, plans, rules, space
from npumodel.search import table as table_module
from npumodel.search.auto import resolve
from npumodel.search.ledger import Ledger
from npumodel.search.space import BUFFERS, Space
from npumodel.search.strategies import STRATEGIES
from npumodel.search.table import Entry, Header, TileTable, TileTableMiss, TileTableWarning, use_table
from npumodel.search.tuner import TuneResults, tune
from npumodel.tile import ALL_CORES, TileConfig
from npumodel.workload import AttentionShape

#: One chip of each architecture, and the one of the README.
DEVICES = ("article", "ascend310b1", "ascend910b2", "ascend910b4", "ascend950dt_9581")
ARTICLE_SHAPE = AttentionShape(4, 32, 4096, 128)
SMALL = AttentionShape(1, 8, 1000, 64, causal=True)
PACKED = TileConfig(16, 512, heads_packed=8, split_kv=4, core_order="contiguous", cores=12)
GROUPED = AttentionShape(1, 8, 2048, 64, kv_heads=1)
DECODE = AttentionShape(16, 64, 1, 128, kv_heads=8, kv_len=8192)
B2, A, PR, ARTICLE = map(device, ("ascend910b2", "ascend910a", "ascend950pr", "article"))


# Space ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 1000, 4096, 4097, 131072])
def test_the_lattice_is_bounded_and_holds_the_one_block_tile(length):
    sizes = space.lattice(length)
    assert sizes == tuple(sorted(set(sizes))) and len(sizes) <= 60
    assert all(size % 16 == 0 for size in sizes)
    assert sizes[0] == 16 and sizes[-1] == space.padded(length) >= length
    assert {2**n for n in range(4, 18) if 2**n <= length} <= set(sizes)


def test_points_and_tiles_are_one_to_one():
    for here in (Space.of(SMALL, B2), Space.full(GROUPED, B2)):
        points = np.unique(here.sample(50))
        for part, tiles in here.by_kind(points):
            for i, point in enumerate(points[part].tolist() if tiles.fusion == "fused" else ()):
                tile = space.plain(tiles, i)
                assert here.point(tile) == here.nearest(tile) == point and tile in here and here.tile(point) == tile
        assert here.points(here.places(points)).tolist() == points.tolist()
        assert sum(map(len, here.enumerate(2**20))) == here.size
        with pytest.raises(ValueError):
            here.point(TileConfig(17, 16))
        assert TileConfig(17, 16) not in here


def test_a_space_has_every_knob_of_a_tile():
    assert set(space.KNOBS) == {field.name for field in dataclasses.fields(TileConfig)}
    here = Space.full(GROUPED, B2)
    assert all(len(axis) > 1 for axis in here.axes) and here.size == np.prod([len(axis) for axis in here.axes])
    assert here.heads_packed == (1, 2, 4, 8) and here.split_kv == (1, 2, 4, 8, 16) and here.cores[0] == ALL_CORES
    backward = Space.full(dataclasses.replace(GROUPED, backward=True), B2)
    assert backward.heads_packed == backward.split_kv == backward.kv_pieces == (1,) and backward.persistent == (False,)


def test_a_space_can_be_restricted():
    here = Space.of(SMALL, B2).restrict(block_q=[64, 128], block_kv=range(16, 49, 16), cores=np.array([3, 5]))
    here = here.restrict(fusion="partly")
    assert here.block_q == (64, 128) and here.block_kv == (16, 32, 48) and here.cores == (3, 5)
    assert here.fusion == ("partly",) and here.lookahead == (0, 1, 2, 3)
    bad: list[dict] = [{"depth": [1]}, {"block_q": []}, {"block_q": [16, 16]}, {"buffers": [9]}, {"fusion": ["half"]}]
    for axes in (*bad, {"block_kv": [64.5]}, {"cores": ["a"]}):
        with pytest.raises(ValueError, match="expected .*got"):
            here.restrict(**axes)


def test_a_refused_point_says_why():
    here = Space.full(GROUPED, B2).restrict(block_q=[16, 1024], block_kv=[64, 1024], kv_pieces=[1, 8])
    points = here.sample(200, seed=1)
    why = here.why_not(GROUPED, B2, points)
    good = np.zeros(len(points), bool)
    for part, tiles in here.by_kind(points):
        good[part] = space.legal([GROUPED], tiles, B2)
    assert good.tolist() == [not reasons for reasons in why]
    text = " ".join(reason for reasons in why for reason in reasons)
    for word in ("L1 needs", "UB needs", "kv_pieces: expected pieces of whole fractals", "split_kv: expected 1 with"):
        assert word in text
    backward = dataclasses.replace(GROUPED, backward=True)
    assert "for the backward pass" in here.why_not(backward, B2, [here.point(TileConfig(16, 64, heads_packed=2))])[0][0]


@pytest.mark.parametrize("spec", [B2, A, ARTICLE], ids=lambda d: d.name)
def test_batched_legality_is_that_of_the_model(spec):
    shape = dataclasses.replace(SMALL, mask="bool", head_dim=256, v_head_dim=128)
    here = Space.of(shape, spec)
    points = np.unique(here.sample(25))
    need = space.needs([shape], here.at(points), spec)
    fit = space.fits(need, spec, shape.dtype)
    for point, bytes_, good in zip(points, need, fit.all(-1), strict=True):
        tile = here.tile(int(point))
        assert {f.buffer: f.needed for f in cost.footprints(shape, spec, tile)} == dict(
            zip(BUFFERS, bytes_, strict=True)
        )
        assert good == (not cost.illegal(shape, spec, tile))
    ledger = Ledger(shape, spec, here)
    ledger.price(points)
    counts = {name: int(n) for name, n in zip(BUFFERS, (~fit).sum(0), strict=True) if n}
    assert counts and ledger.rejected == counts
    assert ("L1" in counts) == (spec is not ARTICLE and bool((need[:, 0] > spec.l1_bytes).any()))


def test_batched_prices_are_those_of_the_model():
    tiles = [TileConfig(128, 256), TileConfig(208, 16, 1, 0), TileConfig(16, 16, 4, 3)]
    tiles += [TileConfig(64, 128, split_kv=4, cores=7)]
    seconds = space.exact_seconds([SMALL], space.stacked(tiles), ARTICLE)
    for tile, found in zip(tiles, seconds, strict=True):
        assert found == pytest.approx(cost.estimate(SMALL, ARTICLE, tile).seconds, rel=1e-5)


def test_a_price_does_not_depend_on_its_place_in_the_batch():
    here = Space.of(SMALL, B2)
    points = here.sample(300, seed=1)
    once = space.exact_seconds([SMALL], here.at(points), B2)
    again = space.exact_seconds([SMALL], here.at(points[::-1]), B2)[::-1]
    alone = [space.exact_seconds([SMALL], here.at([point]), B2)[0] for point in points[:5]]
    assert np.array_equal(once, again) and np.array_equal(once[:5], alone)


@pytest.fixture
def compiled():
    """Messages of JAX about what it compiles."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        yield seen
    logging.getLogger("jax").removeHandler(handler)


def test_compilations_are_seen(compiled):
    jax.jit(lambda x: x + 1)(3)
    assert any("XLA compilation" in message for message in compiled)


def test_one_compilation_serves_shapes_tiles_dtypes_and_devices_of_an_arch(compiled):
    resolve(SMALL, A)
    compiled.clear()
    for spec in (A, device("ascend310p3"), ARTICLE):
        for dtype in ("float16", "float32"):
            shapes = [AttentionShape(1, 4, n, 64, dtype=dtype, causal=bool(n % 2)) for n in range(1, 1000, 6)]
            tiles = space.stacked(rules.shrunk(shapes, spec, [rules.DEFAULT] * len(shapes)))
            assert np.isfinite(space.exact_seconds(shapes, tiles, spec)).all()
    assert not [name for name in compiled if "_seconds_jit" in name or "_needs_jit" in name]


# Rules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level, tile",
    [
        ("small", (32, 32)),
        ("large", (128, 128)),
        (1, (4096, 4096)),
        (12, (1024, 1376)),
        ((4, 3), (1024, 1376)),
        ((4, 6), (1024, 688)),
        ((2, 3), (2048, 1376)),
        ([2, 3], (2048, 1376)),
        (7, (592, 4096)),
        ("128x256", (128, 256)),
    ],
)
def test_levels(level, tile):
    found, source = rules.explicit(level, ARTICLE_SHAPE)
    assert (found.block_q, found.block_kv) == tile
    assert source == "explicit" if level == "128x256" else source.startswith("level: ")


@pytest.mark.parametrize("parts", [(1, 1), (3, 5), (10, 7), (16, 1)])
@pytest.mark.parametrize("length", [16, 17, 100, 4097])
def test_parts_are_exact(parts, length):
    shape = AttentionShape(1, 1, length, 64)
    if any(-(-length // -(-length // n)) != n for n in parts):
        with pytest.raises(ValueError, match="cut into"):
            rules.explicit(parts, shape)
    else:
        tile, _ = rules.explicit(parts, shape)
        assert (-(-length // tile.block_q), -(-length // tile.block_kv)) == parts


def test_part_counts_follow_the_lengths():
    assert rules.balanced(12, AttentionShape(1, 1, 1, 64, kv_len=100)) == (1, 12)
    assert rules.balanced(24, ARTICLE_SHAPE) == (6, 4)
    assert rules.balanced(10**9 + 7, AttentionShape(1, 1, 1, 64, kv_len=10**9 + 7)) == (1, 10**9 + 7)


def test_a_label_reads_back():
    for tile in (TileConfig(128, 512), TileConfig(16, 32, 3, 0), TileConfig(16, 32, 1, 2, "unfused"), PACKED):
        assert rules.parse(tile.label) == tile


@pytest.mark.parametrize(
    "level", ["huge", "128", "128x", "128x64 depth=2", "", 0, -3, True, 1.5, None, (1, 2, 3), (1.0, 2)]
)
def test_what_names_no_tile_is_refused(level):
    with pytest.raises(ValueError, match="expected .*got"):
        resolve(ARTICLE_SHAPE, None, level)


@pytest.mark.parametrize("tile", [TileConfig(16.5, 32), TileConfig(np.array([16]), 32)], ids=["real", "array"])
def test_a_tile_of_the_search_is_no_level(tile):
    with pytest.raises(ValueError, match="integer"):
        resolve(ARTICLE_SHAPE, None, tile)


@pytest.mark.parametrize(
    "shape, tile",
    [
        (ARTICLE_SHAPE, rules.LEVELS["large"]),
        (AttentionShape(8, 8, 1024, 128), rules.LEVELS["small"]),
        (AttentionShape(8, 8, 1025, 128), rules.DEFAULT),
        (AttentionShape(4, 8, 4096, 32), rules.DEFAULT),
        (DECODE, rules.LEVELS["large"]),
    ],
)
def test_rule_of_thumb(shape, tile):
    assert rules.rule_of_thumb(shape) == tile


def test_the_ladder_shrinks_in_its_order():
    steps = rules.ladder(rules.DEFAULT, AttentionShape(1, 1, 4096, 64, kv_len=40))
    assert [(t.block_q, t.block_kv) for t in steps[:6]] == [(128, 48), (64, 48), (32, 48), (32, 32), (32, 16), (16, 16)]
    assert [(t.buffers, t.lookahead) for t in steps[::6]] == [(2, 1), (2, 0), (1, 0)]


@pytest.mark.parametrize("name", DEVICES)
def test_a_default_for_every_head_dim(name):
    shapes = [AttentionShape(1, 8, 4096, d, dtype=t) for t in ("float16", "float32") for d in range(64, 577, 8)]
    for part in (shapes[:65], shapes[65:]):
        tiles = rules.shrunk(part, device(name), [rules.DEFAULT] * len(part))
        assert space.legal(part, space.stacked(tiles), device(name)).all()
        assert all(tile.buffers == 2 for tile in tiles)
    assert rules.default_tile(ARTICLE_SHAPE, device(name)) == rules.DEFAULT


def test_nothing_fits_is_an_error_that_names_the_buffer():
    with pytest.raises(ValueError, match=r"16x16 .* UB needs [\d,]+ bytes, there are 64"):
        rules.default_tile(SMALL, B2.replace(ub_bytes=64))


# Tune ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned():
    """Shape and device -> result with its gap."""
    spilling = B2.replace(overflow="spill", l1_bytes=65536)
    cases = [(ARTICLE_SHAPE, B2), (SMALL, B2), (DECODE, ARTICLE), (AttentionShape(2, 4, 777, 80), spilling)]
    return [tune(shape, spec, exhaustive=True, space={"cores": [ALL_CORES, 4]}) for shape, spec in cases]


def test_tuned_is_never_slower_and_near_the_optimum(tuned):
    for r in tuned:
        assert r.seconds <= min(r.default.seconds, r.rule.seconds) and r.seconds <= r.runner_up.seconds
        assert r.margin >= 0 and 0 <= r.gap <= 0.02, str(r)
        assert not cost.illegal(r.shape, r.device, r.tile)
        chosen = auto.by_model([r.shape], r.device)[0].tile
        assert r.seconds <= space.exact_seconds([r.shape], space.stacked([chosen]), r.device)[0]
        assert r.complete and 0 < r.evals < r.space_size
    assert np.median([r.gap for r in tuned]) <= 0.005
    assert tuned[2].cost.seconds == pytest.approx(tuned[2].seconds, rel=1e-5)


def test_a_small_space_is_priced_whole():
    r = tune(DECODE, ARTICLE, space={"heads_packed": [1], "split_kv": [1], "cores": [ALL_CORES]})
    assert r.strategy == "exhaustive" and r.gap == 0 and r.history is None and r.evals <= r.space_size < 1000
    assert r.tile.heads_packed == 1 and tune(DECODE, ARTICLE).seconds < r.seconds


def test_a_restricted_search_stays_inside(tuned):
    r = tune(SMALL, B2, space={"block_q": [80], "buffers": [3, 4]})
    assert r.tile.block_q == 80 and r.tile.buffers >= 3 and r.seconds > r.auto.seconds
    with pytest.raises(ValueError, match=r"space: expected a legal point, got none among .*UB refuses.*UB needs"):
        tune(ARTICLE_SHAPE, B2, space={"block_q": [4096], "block_kv": [4096]})


@pytest.mark.slow
def test_every_kind_of_plan_can_be_searched():
    here = Space.full(GROUPED, B2).restrict(block_q=[64, 128], block_kv=[128, 256], buffers=[2], lookahead=[1, 2])
    here = here.restrict(fusion=["fused", "unfused"], core_order=["balanced", "contiguous"], cores=[ALL_CORES])
    r = tune(GROUPED, B2, space=here, max_evals=600)
    assert r.tile in here and r.seconds <= r.runner_up.seconds
    assert r.seconds == pytest.approx(cost.estimate(GROUPED, B2, r.tile).seconds, rel=1e-5)


def test_many_calls_together_get_what_each_gets_alone():
    shapes = [SMALL, dataclasses.replace(SMALL, q_len=77), dataclasses.replace(SMALL, dtype="float32"), GROUPED]
    together = tune(shapes, B2, max_evals=700)
    for shape, one in zip(shapes, together, strict=True):
        alone = tune(shape, B2, max_evals=700)
        assert (one.shape, one.tile, one.seconds, one.evals) == (shape, alone.tile, alone.seconds, alone.evals)
        assert (one.runner_up, one.auto, one.rejected) == (alone.runner_up, alone.auto, alone.rejected)


@pytest.mark.slow
def test_calls_with_lengths_beside_others():
    shapes = [AttentionShape(2, 8, 1024, 64, causal=True, kv_lengths=(512, 1024), q_lengths=(512, 1024)), SMALL]
    shapes += [dataclasses.replace(SMALL, window=(100, 0)), dataclasses.replace(shapes[0], causal=False)]
    for order in (shapes, shapes[::-1]):
        for shape, one in zip(order, tune(order, B2, max_evals=300), strict=True):
            alone = tune(shape, B2, max_evals=300)
            assert (one.shape, one.tile, one.seconds) == (shape, alone.tile, alone.seconds)


def test_a_result_serves_as_a_table(tuned):
    r = tuned[0]
    with r as opened:
        assert opened is r and resolve(r.shape, r.device) == auto.Resolved(r.tile, "auto: table")
    assert resolve(r.shape, r.device).source == "auto: model"


def test_near_ties_are_told(tuned):
    for r in tuned:
        assert [near.seconds for near in r.near_ties] == sorted(near.seconds for near in r.near_ties)
        assert all(r.seconds <= near.seconds <= 1.01 * r.seconds for near in r.near_ties)
        assert not r.near_ties or r.near_ties[0] == r.runner_up


def test_tuned_says_what_it_found(tuned):
    text = str(tuned[0])
    for word in (
        "default",
        "rule of thumb",
        "learned",
        "gap",
        "evaluations",
        tuned[0].tile.label,
        "1.00x",
        "ascend910b2",
    ):
        assert word in text
    assert tuned[0].speed_up > 1 and set(tuned[0].rejected) == {"L1", "UB"}


@pytest.fixture(scope="module")
def descended():
    return tune(ARTICLE_SHAPE, B2, strategy="gradient")


@pytest.mark.slow
def test_history_is_the_path_of_the_descent(descended):
    path = descended.history
    assert path.knobs.shape == (gradient.STEPS, gradient.STARTS, len(space.NUMBERS))
    assert path.seconds.shape == path.knobs.shape[:2] and np.isfinite(path.seconds).all()
    assert (np.diff(path.temperature) < 0).all()
    assert (path.knobs[..., :2] >= 15.99).all() and (path.knobs[..., 3] <= 4).all() and (path.knobs[..., 4] >= 0).all()
    prices = []
    for knobs in (path.knobs[0], path.end):
        tiles = Space.of(ARTICLE_SHAPE, B2).at(gradient.rounded(Space.of(ARTICLE_SHAPE, B2), knobs))
        legal = space.legal([ARTICLE_SHAPE], tiles, B2)
        prices.append((legal.mean(), np.median(space.exact_seconds([ARTICLE_SHAPE], tiles, B2)[legal])))
    (legal_at_start, start), (legal_at_end, end) = prices
    assert legal_at_end > legal_at_start and end < start


def test_tuning_is_deterministic(tuned):
    again = tune(tuned[1].shape, tuned[1].device, space={"cores": [ALL_CORES, 4]})
    assert (again.tile, again.seconds, again.evals, again.runner_up) == (
        (r := tuned[1]).tile,
        r.seconds,
        r.evals,
        r.runner_up,
    )


def test_the_winner_does_not_depend_on_the_order_of_candidates():
    shape = AttentionShape(1, 2, 40, 32)  # many ties: one block makes buffers and lookahead idle
    assert Space.of(shape, B2).size < 2000
    found = {tune(shape, B2, strategy="exhaustive", seed=seed).tile for seed in range(4)}
    assert len(found) == 1
    ledger = Ledger(shape, B2)
    ledger.price(np.random.default_rng(0).permutation(ledger.space.size))
    best = ledger.best(ledger.space.size)
    assert len(best) == np.isfinite(ledger.seconds).sum()
    order = np.searchsorted(ledger.points, best)
    keys = [*zip(ledger.seconds[order], ledger.l1[order], best, strict=True)]
    assert keys == sorted(keys)


def test_exhaustive_is_the_optimum(tuned):
    few = {"cores": [ALL_CORES, 6], "split_kv": [1, 2]}
    r = tune(tuned[1].shape, tuned[1].device, strategy="exhaustive", space=few)
    other = tune(tuned[1].shape, tuned[1].device, exhaustive=True, space=few)
    assert (r.tile, r.seconds, r.gap, r.history) == (*other.optimum, 0.0, None) and other.evals < r.evals


#: The descent compiles for half a minute.
SEARCHES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "gradient")) for name in STRATEGIES]
FEW = {"cores": [ALL_CORES, 12], "split_kv": [1]}


@pytest.mark.parametrize("strategy", SEARCHES)
def test_budgets(strategy):
    for budget in ({"max_evals": 1}, {"max_evals": 400}, {"time_limit": 1e-6}):
        r = tune(SMALL, B2, strategy=strategy, **budget)
        assert not r.complete
        assert r.seconds <= r.auto.seconds <= r.default.seconds
        auto_tile = space.stacked([resolve(SMALL, B2).tile])
        assert r.auto.seconds == space.exact_seconds([SMALL], auto_tile, B2)[0]
        assert r.evals <= max(60, budget.get("max_evals", 0))
    enough = tune(SMALL, B2, strategy=strategy, max_evals=10**5, time_limit=1000, space=FEW)
    assert enough.complete
    assert strategy == "random" or enough.tile == tune(SMALL, B2, strategy=strategy, space=FEW).tile


@pytest.mark.parametrize("strategy", SEARCHES)
def test_progress(strategy):
    seen = []
    r = tune(SMALL, B2, strategy=strategy, space=FEW, progress=lambda *now: seen.append(now))
    done, total, best = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == r.evals and all(d <= t for d, t in zip(done, total, strict=True))
    assert best[-1] == r.seconds and list(best) == sorted(best, reverse=True)


@pytest.mark.parametrize("strategy", SEARCHES)
def test_ctrl_c_keeps_what_was_found(strategy):
    def interrupt(done, expected, best):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the first look comes before a search has begun
        tune(SMALL, B2, strategy=strategy, progress=interrupt)
    calls = []

    def interrupt_later(done, expected, best):
        calls.append(done)
        if len(calls) == 2:
            raise KeyboardInterrupt

    r = tune(SMALL, B2, strategy=strategy, progress=interrupt_later)
    assert r.complete == (len(calls) < 2) != r.interrupted and ("interrupted" in str(r)) == r.interrupted
    assert r.evals == calls[-1] and r.seconds <= r.default.seconds


@pytest.mark.parametrize("options", [{"strategy": "magic"}, {"max_evals": 0}, {"time_limit": -1.0}, {"max_evals": "9"}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        tune(SMALL, B2, **options)


def test_a_dtype_that_the_device_cannot_multiply():
    shape = dataclasses.replace(SMALL, dtype="bfloat16")
    for call in (lambda: tune(shape, A), lambda: resolve(shape, A), lambda: resolve(shape, A, "small")):
        with pytest.raises(ValueError, match="ascend910a multiplies .*float16.*got 'bfloat16'"):
            call()


@pytest.mark.slow
def test_one_descent_compiles_once_per_arch(descended, compiled):
    assert descended.strategy == "gradient"
    compiled.clear()
    for dtype in ("float32", "bfloat16"):
        shape = AttentionShape(1, 1, 999, 40, dtype=dtype, causal=True)
        assert tune(shape, B2.replace(cube_cores=5), max_evals=2000, strategy="gradient").history is not None
    assert not [name for name in compiled if "_descend" in name]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [B2, A, PR, ARTICLE], ids=lambda d: d.name)
def test_gaps_on_many_shapes(spec):
    rng = np.random.default_rng(0)
    choices = ((1, 4, 16), (1, 8, 32), (300, 1500, 4096, 8191), (64, 80, 128))
    gaps = []
    for _ in range(12):
        batch, heads, length, dim = (int(rng.choice(values)) for values in choices)
        shape = AttentionShape(batch, heads, length, dim, causal=bool(rng.integers(2)))
        gaps.append(tune(shape, spec, exhaustive=True, space={"cores": [ALL_CORES]}).gap)
    assert np.median(gaps) == 0 and max(gaps) <= 0.03, gaps


#: Calls of public models: shared cases W1..W16. (batch, q_heads, q_len, head_dim), what differs from plain attention.
REAL = [
    ((1, 32, 4096, 128), {"causal": True}),
    ((1, 64, 8192, 128), {"kv_heads": 8, "causal": True}),
    ((16, 64, 1, 128), {"kv_heads": 8, "kv_len": 8192, "causal": True}),
    ((2, 32, 512, 128), {"kv_heads": 8, "kv_len": 8704, "causal": True}),
    ((2, 32, 8192, 128), {"kv_heads": 8, "causal": True, "window": (4096, 0)}),
    ((1, 128, 4096, 192), {"v_head_dim": 128, "causal": True}),
    ((32, 128, 1, 576), {"kv_heads": 1, "kv_len": 4096, "v_head_dim": 512, "v_in_k": True, "causal": True}),
    ((1, 16, 2048, 192), {"v_head_dim": 128, "causal": True}),
    ((2, 8, 4096, 40), {}),
    ((2, 8, 4096, 40), {"kv_len": 77}),
    ((2, 8, 64, 160), {}),
    ((8, 20, 1500, 64), {}),
    ((8, 20, 1, 64), {"kv_len": 448, "causal": True}),
    ((1, 32, 4096, 96), {"causal": True, "window": (2047, 0)}),
    ((4, 32, 2048, 80), {"causal": True}),
    ((1, 16, 8192, 256), {"kv_heads": 8, "causal": True, "window": (4096, 0), "softcap": True}),
    ((1, 8, 4096, 512), {"kv_heads": 2, "causal": True}),
    ((64, 64, 1, 64), {"kv_heads": 8, "kv_len": 4096, "causal": True, "window": (128, 0)}),
    ((1, 40, 32760, 128), {"kv_len": 512}),
    ((2048, 4, 49, 32), {}),
    ((1, 24, 4250, 63), {}),
    ((1, 9, 5, 59), {"kv_heads": 3, "kv_len": 7, "v_head_dim": 24}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", devices())
def test_tuned_is_never_slower_than_default_or_rule_on_real_models(name):
    spec = device(name)
    for result in tune([AttentionShape(*sizes, **more) for sizes, more in REAL], spec):
        assert result.seconds <= min(result.default.seconds, result.rule.seconds, result.auto.seconds), str(result)
        assert not cost.illegal(result.shape, spec, result.tile)


# Auto ----------------------------------------------------------------------------------------------------------------


def test_tune_to_table_to_auto(tuned, tmp_path):
    table = TuneResults(tuple(tuned)).table()
    assert len(table) == len(tuned)
    table.save(tmp_path / "table.json")
    with use_table(tmp_path / "table.json"):
        for r in tuned:
            assert resolve(r.shape, r.device) == auto.Resolved(r.tile, "auto: table")
    row = next(entry for entry in table.entries if entry.key["q_len"] == 1000)
    assert row.predicted_us == pytest.approx(tuned[1].seconds * 1e6) and row.evals == tuned[1].evals
    assert row.default_us == pytest.approx(tuned[1].default.seconds * 1e6) and row.complete


def test_the_table_can_say_why(tuned):
    row = tuned[2].table(explain=True).entries[0]
    assert row.bound and set(row.dma_wait_us) == {"qk", "softmax", "pv"}


def table_of(spec, shape, tile):
    return TileTable((Entry.of(Header.of(spec), shape, tile, 1e-3),))


@pytest.fixture
def fresh(monkeypatch):
    """Nothing warned about, resolved or tuned on a miss yet."""
    monkeypatch.setattr(table_module, "_seen", set())
    monkeypatch.setattr(auto, "_resolved", {})
    monkeypatch.setattr(auto, "_learned", {})


def test_an_illegal_row_is_passed_over_with_one_notice(fresh, monkeypatch):
    big = TileConfig(128, 256)
    assert resolve(ARTICLE_SHAPE, B2, big).source == "explicit"
    small_l1 = B2.replace(l1_bytes=300_000)
    table = table_of(small_l1, ARTICLE_SHAPE, big)  # as if it had been written for a spec of this very fingerprint
    with use_table(table):
        with pytest.warns(TileTableWarning, match=r"passed over.*L1 needs [\d,]+ bytes, there are 300,000"):
            found = resolve(ARTICLE_SHAPE, small_l1)
        assert found.source == "auto: model" and not cost.illegal(ARTICLE_SHAPE, small_l1, found.tile)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resolve(ARTICLE_SHAPE, small_l1) == found
    monkeypatch.setattr(table_module, "_seen", set())
    near = AttentionShape(4, 32, 4000, 128)  # next best: a row of the same bucket
    with use_table(table | table_of(small_l1, near, TileConfig(80, 320, 1, 3))), pytest.warns(TileTableWarning):
        assert resolve(ARTICLE_SHAPE, small_l1) == auto.Resolved(TileConfig(80, 320, 1, 3), "auto: bucket")


def test_exact_rows_come_first_and_bucket_rows_must_beat_the_model(fresh):
    near, good, bad = AttentionShape(4, 32, 4000, 128), TileConfig(160, 384, 1, 3), TileConfig(128, 256)
    with use_table(table_of(B2, ARTICLE_SHAPE, good)):
        assert resolve(near, B2) == auto.Resolved(good, "auto: bucket")
        with use_table(table_of(B2, near, bad)):
            assert resolve(ARTICLE_SHAPE, B2) == auto.Resolved(good, "auto: table")
            assert resolve(near, B2) == auto.Resolved(bad, "auto: table")
    missing = "no row serves q_len=4096 .* on ascend910b2 .*searched: a TileTable: 1 row.*npumodel tune --shape B4,N32"
    with use_table(table_of(B2, near, bad)), pytest.warns(TileTableWarning, match=missing) as told:
        assert resolve(ARTICLE_SHAPE, B2).source == resolve(ARTICLE_SHAPE, B2).source == "auto: model"
    with use_table(table_of(B2, near, TileConfig(128, 192))):
        assert resolve(ARTICLE_SHAPE, B2).source == "auto: model"  # silently
    assert len(told) == 1 and resolve(ARTICLE_SHAPE, B2).source == "auto: model"


def test_nearest_rows_come_last_and_must_beat_the_model(fresh):
    far, farther = AttentionShape(4, 32, 2000, 128), AttentionShape(4, 32, 64, 128)
    good, also, bad = TileConfig(160, 384, 1, 3), TileConfig(128, 384, 1, 3), TileConfig(128, 256)
    with use_table(table_of(B2, far, good)):
        assert resolve(ARTICLE_SHAPE, B2) == auto.Resolved(good, "auto: nearest")
        with use_table(table_of(B2, farther, also)):  # of all tables the nearest
            assert resolve(ARTICLE_SHAPE, B2) == auto.Resolved(good, "auto: nearest")
        with use_table(table_of(B2, AttentionShape(4, 32, 4000, 128), also)):
            assert resolve(ARTICLE_SHAPE, B2) == auto.Resolved(also, "auto: bucket")
        for other in ({"head_dim": 64}, {"dtype": "bfloat16"}, {"causal": True}):
            with pytest.warns(TileTableWarning, match="no row serves"):
                assert resolve(dataclasses.replace(ARTICLE_SHAPE, **other), B2).source == "auto: model"
    short, shorter = (dataclasses.replace(ARTICLE_SHAPE, kv_len=n) for n in (20, 7))
    tile = auto.by_model([short], B2)[0].tile
    with use_table(table_of(B2, shorter, tile.replace(block_kv=512))):  # cut to the call
        assert tile.block_kv == 32 and resolve(short, B2) == auto.Resolved(tile, "auto: nearest")
    with use_table(table_of(B2, far, bad)), pytest.warns(TileTableWarning, match="no row serves"):
        assert resolve(ARTICLE_SHAPE, B2).source == "auto: model"


def test_the_named_shape_of_a_miss_reads_back():
    for shape in (ARTICLE_SHAPE, SMALL, GROUPED, dataclasses.replace(SMALL, mask="bool", window=(9, None))):
        command = auto._missed(shape, B2, "").split("--shape ")[1].split()[0]
        assert AttentionShape.parse(command) == shape


def test_a_miss_that_is_an_error(fresh, tmp_path):
    table_of(B2, SMALL, TileConfig(64, 64)).save(tmp_path / "mine.json")
    with use_table(tmp_path / "mine.json", on_miss="error"):
        assert resolve(SMALL, B2).source == "auto: table"
        missing = r"q_len=4096.*ascend910b2.*mine.json: 1 row.*npumodel tune --shape B4,N32.*on_miss=\"heuristic\""
        with pytest.raises(TileTableMiss, match=missing) as caught:
            resolve(ARTICLE_SHAPE, B2)
        assert isinstance(caught.value, KeyError) and str(caught.value).startswith("tile table: no row")
        assert resolve(ARTICLE_SHAPE, B2, "small").source == "level: small"
        assert resolve(ARTICLE_SHAPE, None).source == "auto: host"
        with use_table(TileTable()), pytest.warns(TileTableWarning):  # the innermost decides
            assert resolve(ARTICLE_SHAPE, B2).source == "auto: model"
    with pytest.raises(ValueError, match="on_miss: expected one of heuristic, autotune, error, got 'tune'"):
        with use_table(TileTable(), on_miss="tune"):
            pass


@pytest.fixture
def searches(fresh, monkeypatch):
    """The shapes that were searched on a miss; the search itself is a budget of one evaluation."""
    seen = []

    def search(shape, spec):
        seen.append(shape)
        return dataclasses.replace(tune(shape, spec, max_evals=1), complete=True)

    monkeypatch.setattr(auto, "tune", search)
    return seen


def test_a_miss_is_tuned_remembered_and_saved(searches, tmp_path):
    path = tmp_path / "new" / "mine.json"
    with use_table(path, on_miss="autotune"):
        first = resolve(SMALL, B2)
        assert first.source == "auto: tuned" and resolve(SMALL, B2) is first
        assert resolve(dataclasses.replace(SMALL, kv_len=999), B2).source == "auto: bucket"
    assert searches == [SMALL]
    (row,) = TileTable.load(path).entries
    assert row.tile == first.tile and row.bound and row.dma_wait_us
    with use_table(path, on_miss="error"):
        assert resolve(SMALL, B2) == auto.Resolved(first.tile, "auto: table")
    with use_table(TileTable(), on_miss="autotune"):  # without a file: in memory, where no other `with` looks
        assert resolve(SMALL, B2).source == "auto: tuned"
        auto._resolved.clear()
        assert resolve(SMALL, B2) == auto.Resolved(first.tile, "auto: table")
    assert len(searches) == 2 and resolve(SMALL, B2).source == "auto: model"


def test_many_lengths_are_one_search_a_bucket(searches):
    with use_table(TileTable(), on_miss="autotune"):
        for batch in range(1, 51):  # B6
            resolve(dataclasses.replace(SMALL, batch=batch, q_len=900 + batch, kv_len=900 + batch), B2)
    assert len({table_module.call_of(shape, B2) for shape in searches}) == len(searches) <= 7


def test_a_bucket_whose_row_loses_is_not_searched_again(searches, monkeypatch):
    monkeypatch.setattr(auto, "_beats_the_model", lambda *_: False)
    with use_table(TileTable(), on_miss="autotune"):
        sources = [resolve(dataclasses.replace(SMALL, q_len=1000 - n), B2).source for n in range(3)]
    assert sources == ["auto: tuned", "auto: model", "auto: model"] and len(searches) == 1


def test_threads_with_one_miss_search_once(searches):
    def work(_):
        with use_table(TileTable(), on_miss="autotune"):
            return resolve(SMALL, B2)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(8)))
    assert len({r.tile for r in found}) == len(searches) == 1


def test_a_tuned_row_that_cannot_be_saved_is_remembered(searches, tmp_path):
    (tmp_path / "file").write_text("mine")
    with use_table(tmp_path / "file" / "t.json", on_miss="autotune"):
        with pytest.warns(TileTableWarning, match="not written.*for this process only"):
            assert resolve(SMALL, B2).source == "auto: tuned"
        auto._resolved.clear()
        assert resolve(SMALL, B2).source == "auto: table"
    assert len(searches) == 1


def test_ctrl_c_while_tuning_on_a_miss_is_the_callers(fresh, monkeypatch):
    monkeypatch.setattr(auto, "tune", lambda shape, spec: tune(shape, spec, max_evals=1))  # as if interrupted
    with use_table(TileTable(), on_miss="autotune"), pytest.raises(KeyboardInterrupt):
        resolve(SMALL, B2)
    assert not auto._learned


@pytest.mark.slow
def test_a_call_is_tuned_while_it_is_traced_and_compiled_once(fresh, tmp_path):
    q = jax.numpy.ones((1, 2, 64, 32), "float16")

    def call(q):
        return npumodel.flash_attention(q, q, q, device=B2)

    with use_table(tmp_path / "t.json", on_miss="autotune"):
        jax.jit(call)(q).block_until_ready()
        call(q)
        size = npumodel.api._blocked._cache_size()
    for _ in range(2):
        with use_table(tmp_path / "t.json", on_miss="error"):
            call(q)
    assert len(TileTable.load(tmp_path / "t.json")) == 1 and npumodel.api._blocked._cache_size() == size > 0


def test_a_row_is_cut_to_the_lengths():
    shape = AttentionShape(1, 1, 20, 64)
    with use_table(table_of(B2, shape, TileConfig(128, 512))):
        assert resolve(shape, B2) == auto.Resolved(TileConfig(32, 32), "auto: table")


def test_host_policy_and_level_need_no_table():
    assert resolve(ARTICLE_SHAPE, None) == auto.Resolved(TileConfig(512, 512), "auto: host")
    assert resolve(ARTICLE_SHAPE, None, skips=True) == auto.Resolved(TileConfig(256, 256), "auto: host")
    assert resolve(AttentionShape(1, 1, 20, 64, kv_len=600), None).tile == TileConfig(32, 512)
    assert resolve(ARTICLE_SHAPE, B2, policy="rule") == auto.Resolved(TileConfig(128, 128), "policy: rule")
    assert resolve(ARTICLE_SHAPE, B2, policy="default").tile == rules.DEFAULT
    assert resolve(ARTICLE_SHAPE, B2, "small") == auto.Resolved(TileConfig(32, 32), "level: small")
    with pytest.raises(ValueError, match="policy: expected one of auto, rule, cann, default, got 'best'"):
        resolve(ARTICLE_SHAPE, B2, policy="best")
    with pytest.raises(ValueError, match="policy: expected none beside a tile"):
        resolve(ARTICLE_SHAPE, B2, "small", policy="rule")


@pytest.mark.parametrize("level", [1, (2, 2), "2048x2048", TileConfig(2048, 128)])
def test_an_explicit_tile_that_does_not_fit_is_an_error(level):
    with pytest.raises(ValueError, match=r"does not fit on ascend910b2: .*needs [\d,]+ bytes, there are [\d,]+"):
        resolve(ARTICLE_SHAPE, B2, level)


def test_one_tile_is_best_for_a_short_call_on_one_core():
    shape, one_core = AttentionShape(1, 1, 64, 64), A.replace(cube_cores=1)  # article S4
    auto_tile, one = resolve(shape, one_core).tile, resolve(shape, one_core, 1).tile
    assert (auto_tile.block_q, auto_tile.block_kv) == (one.block_q, one.block_kv) == (64, 64)


LENGTHS = [*range(1, 301), 511, 512, 513, 4095, 4096, 4097, 8191]
HEAD_DIMS = (32, 40, 64, 80, 96, 128, 192, 256, 512, 576)


@pytest.mark.parametrize(
    "name, one_in",
    [*((name, 1 if name == "ascend910b2" else 7) for name in DEVICES)]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in DEVICES if name != "ascend910b2"],
)
def test_auto_is_never_illegal_whatever_the_prices_say(name, one_in, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(plans, "exact_seconds", lambda shapes, tiles, spec, which: rng.random(len(which)))
    shapes = [AttentionShape(1, 8, s, d) for s in LENGTHS for d in HEAD_DIMS][::one_in]
    tiles = space.stacked([r.tile for r in auto.by_model(shapes, device(name))])
    assert space.legal(shapes, tiles, device(name)).all()


@pytest.mark.parametrize("name", DEVICES)
def test_auto_is_never_slower_than_the_default(name):
    spec = device(name)
    pairs = [(s, d) for s in LENGTHS for d in HEAD_DIMS][:: 7 if name == "ascend910b2" else 29]
    shapes = [AttentionShape(1, 8, s, d, causal=bool((s + d) % 3)) for s, d in pairs]
    found = auto.by_model(shapes, spec)
    tiles = space.stacked([r.tile for r in found])
    assert space.legal(shapes, tiles, spec).all() and {r.source for r in found} == {"auto: model"}
    default = space.stacked(rules.shrunk(shapes, spec, [rules.DEFAULT] * len(shapes)))
    assert (space.exact_seconds(shapes, tiles, spec) <= space.exact_seconds(shapes, default, spec)).all()
    for i in np.random.default_rng(0).integers(len(shapes), size=3):
        assert resolve(shapes[i], spec) == found[i]
        assert not cost.illegal(shapes[i], spec, found[i].tile)


def test_resolving_again_is_a_look_up(monkeypatch):
    shape = AttentionShape(1, 3, 50, 64)
    first = resolve(shape, A)
    monkeypatch.setattr(auto, "_resolve", None)
    assert resolve(shape, A) is first
    assert all(type(leaf) is int for leaf in jax.tree.leaves(first.tile))
