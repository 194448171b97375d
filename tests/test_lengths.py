"""Examples with lengths of their own in one call: what they count, what they cost together, what is refused."""

import dataclasses

import numpy as np
import pytest

import npumodel as npu
from npumodel.model import estimate as estimate_module
from npumodel.model.estimate import estimate, illegal
from npumodel.model.trace import timeline
from npumodel.search.table import key_of

CHIP = npu.device("ascend910b2")
TILE = npu.TileConfig(128, 128)


def shape_of(kv_lengths, q_lengths=None, q_heads=2, q_len=512, kv_len=1024, **more):
    batch = len(kv_lengths if kv_lengths is not None else q_lengths)
    return npu.AttentionShape(
        batch, q_heads, q_len, 64, kv_len=kv_len, q_lengths=q_lengths, kv_lengths=kv_lengths, **more
    )


# The shape -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda x: np.array(x, float)], ids=["list", "tuple", "array", "reals"]
)
def test_lengths_are_plain_and_hashable(kind):
    shape = shape_of(kind([1, 0, 1024]), kind([512, 512, 512]))
    assert shape.kv_lengths == (1, 0, 1024) and shape.q_lengths is None
    assert {shape: "found"}[shape_of((1, 0, 1024))] == "found"
    assert all(type(n) is int for n in shape.kv_lengths)


def test_full_lengths_are_none():
    assert shape_of([1024] * 3, [512] * 3) == npu.AttentionShape(3, 2, 512, 64, kv_len=1024)


@pytest.mark.parametrize(
    ("lengths", "got"),
    [([1], r"\[1\]"), ([1, 2, 1025], "1025"), ([1, 2, -1], "-1"), ([1, 2, 0.5], "0.5"), (7, "7"), ("abc", "a")],
)
def test_bad_lengths_are_refused(lengths, got):
    expected = r"kv_lengths: expected 3 integers \(one an example\) of 0\.\.1024, got "
    with pytest.raises(ValueError, match=expected + f".*{got}"):
        npu.AttentionShape(3, 2, 512, 64, kv_len=1024, kv_lengths=lengths)


def test_the_short_form_is_read_back():
    text = "B6,N2,S512,SKV1024,D64,causal,q_lengths=512/0x4/7,kv_lengths=1024x2/3x3/0"
    shape = npu.AttentionShape.parse(text)
    assert shape.q_lengths == (512, 0, 0, 0, 0, 7) and shape.kv_lengths == (1024, 1024, 3, 3, 3, 0)
    assert shape.label == "B6 N2 S512 SKV1024 D64 float16 causal q_lengths=512/0x4/7 kv_lengths=1024x2/3x3/0"
    assert npu.AttentionShape.parse(shape.label) == shape
    with pytest.raises(ValueError, match="cannot read 'kv_lengths=1x'"):
        npu.AttentionShape.parse("B1,N2,S512,D64,kv_lengths=1x")


def test_groups_are_the_examples_of_equal_lengths_that_do_something():
    shape = shape_of([9, 0, 9, 1024, 5], [4, 4, 4, 0, 512], causal=True)
    assert [(g.batch, g.q_len, g.kv_len, g.causal, g.has_lengths) for g in shape.groups] == [
        (2, 4, 9, True, False),
        (1, 512, 5, True, False),
    ]
    assert (shape.largest.batch, shape.largest.q_len, shape.largest.kv_len) == (3, 512, 9)
    plain = npu.AttentionShape(3, 2, 512, 64)
    assert plain.groups == (plain,) and plain.largest == plain


def seen(q_len, kv_len, causal, window):
    """Whether query i sees key j: [q_len, kv_len], one by one."""
    left, right = window or (None, None)
    pairs = np.zeros((q_len, kv_len), bool)
    for i in range(q_len):
        own = i + kv_len - q_len
        for j in range(kv_len):
            late = (causal and j > own) or (right is not None and j > own + right)
            pairs[i, j] = not late and not (left is not None and j < own - left)
    return pairs


@pytest.mark.parametrize("window", [None, (3, 0), (5, 2), (None, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_counts_are_those_of_every_example_on_its_own(causal, window):
    rng = np.random.default_rng(7)
    for backward in (False, True):
        q_lengths, kv_lengths = rng.integers(0, 13, 5), rng.integers(0, 18, 5)
        sizes = {"q_heads": 6, "kv_heads": 3, "q_len": 12, "kv_len": 17, "v_head_dim": 32, "backward": backward}
        shape = shape_of(kv_lengths, q_lengths, causal=causal, window=window, **sizes)
        pairs = moved = 0
        for q_len, kv_len in zip(q_lengths, kv_lengths, strict=True):
            sees = seen(q_len, kv_len, causal, window)
            pairs += 6 * int(sees.sum())
            if q_len and kv_len:  # K and V from the first key that a window leaves; a backward pass writes all dK, dV
                unseen = max(0, kv_len - q_len - window[0]) if window and window[0] is not None else 0
                keys = kv_len - unseen
                rows = 6 * q_len + 3 * keys if not backward else 2 * 6 * q_len + 3 * (keys + kv_len)
                moved += rows * (64 + 32) * 2
        assert shape.valid_pairs == pairs
        assert shape.flops == 2 * pairs * ((3 * 64 + 2 * 32) if backward else (64 + 32))
        assert shape.min_bytes == moved
        assert shape.tensor_bytes == dataclasses.replace(shape, q_lengths=None, kv_lengths=None).tensor_bytes


def test_what_differs_between_examples_is_refused():
    for name in ("band", "seen_keys"):
        with pytest.raises(ValueError, match=f"{name}: expected a shape without q_lengths and kv_lengths.*groups"):
            getattr(shape_of([1, 2]), name)


# The price -----------------------------------------------------------------------------------------------------------

#: What a price without padding may differ in from that of the padded tensors.
PADDED = ("shape", "footprints", "graph", "chip")


def same(one, other, rel=1e-6):
    for field in dataclasses.fields(one):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name == "stages":
            assert [s.name for s in mine] == [s.name for s in its]
            mine, its = ([x for s in cost.stages for x in (s.busy, s.dma_wait, s.bytes)] for cost in (one, other))
        if field.name not in PADDED:
            assert mine == (its if isinstance(mine, str | npu.TileConfig) else pytest.approx(its, rel=rel)), field.name
    core = [[f for f in cost.footprints if f.buffer != "HBM"] for cost in (one, other)]
    assert core[0] == core[1]


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_cost_what_the_shape_of_these_lengths_does(causal):
    for q_len, kv_len in ((512, 300), (130, 1024), (77, 77)):
        shape = shape_of([kv_len] * 5 + [0], [q_len] * 6, causal=causal)
        plain = npu.AttentionShape(5, 2, q_len, 64, kv_len=kv_len, causal=causal)
        same(estimate(shape, CHIP, TILE), estimate(plain, CHIP, TILE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "tile"),
    [
        ({"backward": True, "causal": True}, TILE),
        ({"mask": "bool"}, TILE.replace(fusion="unfused")),
        ({"causal": True}, TILE.replace(persistent=True)),
        ({"causal": True}, TILE.replace(core_order="round_robin")),
        ({"kv_heads": 1}, TILE.replace(heads_packed=2, split_kv=3)),
        ({}, npu.TileConfig(128, 512, kv_pieces=4)),
        ({"window": (100, 0)}, TILE.replace(core_order="contiguous")),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ascend910b2", "ascend310p3", "ascend950pr"])
def test_equal_lengths_cost_the_same_for_every_kind_of_plan(more, tile, name):
    chip = npu.device(name)
    shape, plain = shape_of([700] * 5 + [0], [300] * 6, **more), npu.AttentionShape(5, 2, 300, 64, kv_len=700, **more)
    if illegal(plain, chip, tile):
        pytest.skip("does not fit")
    same(estimate(shape, chip, tile), estimate(plain, chip, tile))


LENGTHS = [1024, 100, 512, 0, 100, 300]


def test_the_order_of_the_examples_does_not_matter():
    one, other = (estimate(shape_of(lengths), CHIP, TILE) for lengths in (LENGTHS, sorted(LENGTHS)))
    assert dataclasses.replace(one, shape=None) == dataclasses.replace(other, shape=None)


def test_work_is_that_of_every_example_on_its_own():
    for causal in (True, False):
        check_work(shape_of(LENGTHS, causal=causal))


def check_work(shape):
    cost, alone = estimate(shape, CHIP, TILE), [estimate(g, CHIP, TILE) for g in shape.groups]
    assert (cost.tasks, cost.steps) == (sum(c.tasks for c in alone), sum(c.steps for c in alone))
    for path in ("gm_l1", "gm_ub", "ub_gm", "l0c_gm"):
        assert cost.traffic[path] == pytest.approx(sum(c.traffic[path] for c in alone), rel=1e-6)
    if not shape.causal:  # else there are queries without any key, and they need not be read
        assert cost.traffic["hbm"] >= shape.min_bytes * (1 - 1e-6)
    memory = {f.buffer: f.needed for f in cost.footprints}
    assert memory["L1"] == max(f.needed for c in alone for f in c.footprints if f.buffer == "L1")
    assert memory["HBM"] >= shape.tensor_bytes


def test_busy_and_bounds():
    for lengths in (LENGTHS, [1024, 1, 1, 2, 3, 0], [1024, 1023, 1022, 1021, 0, 0]):
        cost = estimate(shape_of(lengths), CHIP, TILE)
        pipes = {s.pipe: sum(t.busy for t in cost.stages if t.pipe == s.pipe) for s in cost.stages}
        assert max(pipes.values()) <= cost.lower_bound <= cost.seconds <= cost.upper_bound * (1 + 1e-6)


def four_lengths(rng, batch=8):
    """Lengths [batch] of exactly four kinds, and zeros."""
    kinds = rng.choice(np.arange(1, 1025), 4, replace=False)
    return np.concatenate([kinds, rng.choice([0, *kinds], batch - 4)])


def test_shorter_examples_never_cost_more():
    rng = np.random.default_rng(1)
    for draw in range(12):
        lengths = four_lengths(rng)
        kinds = np.unique(lengths[lengths > 0])
        shorter = np.where(np.arange(8) < 4, lengths, rng.choice([0, *kinds], 8))  # no new kinds
        lengths, shorter = np.maximum(lengths, shorter), np.minimum(lengths, shorter)
        both = draw % 2 == 1  # causal: of queries and keys alike, so that the rest sees what it did
        sizes = {"q_len": 1024, "causal": both, "q_heads": int(rng.integers(1, 12))}
        now, then = (
            estimate(shape_of(n, n if both else None, **sizes), CHIP, TILE).seconds for n in (lengths, shorter)
        )
        assert then <= now * (1 + 1e-6)


def test_examples_take_turns_on_the_cores():
    """Three times 48 tasks on 24 cores: two waves of each. 25 tasks of almost one length: two waves, as if they were
    alike. One long task and 23 short ones: the long one, which has the memory for itself."""
    alone = [estimate(npu.AttentionShape(1, 12, 512, 64, kv_len=n), CHIP, TILE) for n in (1024, 512, 100)]
    found = estimate(shape_of([1024, 512, 100], q_heads=12), CHIP, TILE)
    launch = CHIP.launch_base_s + 24 * CHIP.launch_per_core_s + 6 * CHIP.launch_per_task_s
    assert found.seconds == pytest.approx(float(launch) + sum(c.seconds - c.launch_seconds for c in alone), rel=1e-5)

    def tasks_of(lengths):
        return estimate(shape_of(lengths, q_heads=1, q_len=128), CHIP, TILE)

    low, high = (tasks_of([n] * 25 + [0]).seconds for n in (1000, 1016))
    assert low <= tasks_of([1016] * 22 + [1008, 1008, 1000]).seconds <= high
    one, all_ = tasks_of([1024] + [0] * 23), tasks_of([1024] + [16] * 22 + [15])
    assert one.seconds < all_.seconds
    assert all_.seconds - all_.launch_seconds == pytest.approx(one.seconds - one.launch_seconds, rel=0.02)


def test_one_compilation_serves_all_lengths_of_as_many_groups():
    rng = np.random.default_rng(2)
    estimate(shape_of(four_lengths(rng)), CHIP, TILE)
    before = estimate_module._priced._cache_size()
    for number in (4, 3):  # three groups are padded to four
        lengths = rng.choice(np.arange(1, 1025), number, replace=False)
        for causal in (False, True):
            estimate(shape_of([*lengths, 0, lengths[0]], causal=causal), CHIP, npu.TileConfig(64, 256))
    assert estimate_module._priced._cache_size() == before


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"causal": True, "backward": True}, {"mask": "bool"}], ids=str)
def test_the_breakdown_adds_up_to_the_total(more):
    tile = TILE.replace(fusion="unfused") if "mask" in more else TILE
    for lengths in (LENGTHS, [1024, 1, 1, 2, 3, 0], [1024, 1023, 1022, 1021, 0, 0]):
        cost = estimate(shape_of(lengths, q_heads=1, **more), CHIP, tile)
        assert sum(cost.breakdown.values()) == pytest.approx(cost.seconds, rel=1e-5)
        assert all(seconds >= 0 for seconds in cost.breakdown.values())


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["ascend910b2", "ascend310p3", "ascend950pr"])
def test_shorter_examples_never_cost_more_anywhere(name, persistent):
    rng, chip, tile = np.random.default_rng(3), npu.device(name), npu.TileConfig(64, 128, persistent=persistent)
    for draw in range(60):
        lengths = four_lengths(rng)
        shorter = np.minimum(lengths, rng.choice(lengths[lengths > 0]))
        more = {"q_len": 1024, "q_heads": int(rng.integers(1, 40)), "causal": draw % 2 == 1}
        costs = [estimate(shape_of(n, n if more["causal"] else None, **more), chip, tile) for n in (lengths, shorter)]
        assert costs[1].seconds <= costs[0].seconds * (1 + (0.05 if persistent else 1e-4))


# Who uses it ---------------------------------------------------------------------------------------------------------


def test_a_call_that_does_nothing_has_no_price():
    with pytest.raises(ValueError, match="expected an example that has both queries and keys, got none"):
        npu.estimate(shape_of([0, 5], [7, 0]), CHIP, TILE)


def test_a_trace_is_refused_with_its_cure():
    with pytest.raises(ValueError, match=r"trace: expected a call without q_lengths and kv_lengths.*shape\.groups"):
        timeline(shape_of([1, 2]), CHIP, TILE)


def test_round_robin_is_refused_for_several_lengths():
    with pytest.raises(ValueError, match="core_order: expected 'balanced' or 'contiguous' for examples of several"):
        estimate(shape_of(LENGTHS), CHIP, TILE.replace(core_order="round_robin"))


def test_a_tile_is_judged_by_the_largest_example():
    tile = npu.TileConfig(128, 8192)
    assert not illegal(shape_of([128, 64, 0], kv_len=16384), CHIP, tile)
    refusals = illegal(shape_of([128, 64, 8192], kv_len=16384), CHIP, tile)
    assert refusals == illegal(npu.AttentionShape(3, 2, 512, 64, kv_len=8192), CHIP, tile) != []


def test_the_key_of_a_table_is_that_of_the_lengths_in_any_order_and_padding():
    key = key_of(shape_of([9, 0, 7, 9]))
    assert key["lengths"] == "512x7:1 512x9:2" and key["kv_len"] == 9 and key["batch_heads"] == 6
    assert key == key_of(shape_of([9, 9, 7])) == key_of(shape_of([7, 9, 9], kv_len=64))
    assert key_of(shape_of([9, 9, 0])) == key_of(npu.AttentionShape(2, 2, 512, 64, kv_len=9))


@pytest.mark.slow
def test_tune_prices_the_sum_of_the_groups():
    shape = shape_of([4096, 512, 64, 64], kv_len=4096, q_heads=8)
    best = npu.tune(shape, CHIP, exhaustive=True)
    assert best.seconds == pytest.approx(estimate(shape, CHIP, best.tile).seconds, rel=1e-5)
    assert best.seconds <= min(best.default.seconds, best.rule.seconds, best.auto.seconds)
    assert best.strategy == "coordinate" and best.gap < 0.01
    permuted = shape_of([64, 4096, 0, 512, 64], kv_len=8192, q_heads=8)
    with npu.use_table(best.table()):
        assert npu.estimate(permuted, CHIP).tile == best.tile


@pytest.mark.slow
def test_explain_has_a_page_for_it():
    page = npu.explain(shape_of(LENGTHS), CHIP, TILE)
    assert "kv_lengths=1024/100/512/0/100/300" in page and "round_robin" not in page
