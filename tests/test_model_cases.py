"""Section C of the case list (public bug reports of performance models): every row, with the right value.

C1 .. C14 name the rows. Prices are of an Ascend 910B2 (24 cube cores and 48 vector units apart from them) unless said
otherwise.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel import units
from npumodel.attention.arguments import Arguments
from npumodel.hardware import device
from npumodel.model.cost import Options, price
from npumodel.model.durations import time_constants
from npumodel.model.estimate import arguments, estimate
from npumodel.search.space import exact_seconds, fits, needs
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

pytestmark = pytest.mark.slow

NPU = device("ascend910b2")
TILE = TileConfig(128, 128)
DECODE = TileConfig(16, 256)
#: Fields of a device that are rates: the larger the better.
RATES = [f for f in vars(NPU) if f.endswith("bytes_per_cycle") and getattr(NPU, f)] + ["hbm_bytes_per_s"]
GLOBAL_RATES = [f for f in RATES if "gm" in f]
LATENCIES = ("mmad_head_cycles", "sync_cycles", "launch_base_s", "launch_per_core_s", "launch_per_task_s")


def prefill(length, heads=32, **fields):
    return AttentionShape(1, heads, length, 128, **fields)


def decode(batch, q_heads, kv_heads, keys, **fields):
    return AttentionShape(batch, q_heads, 1, 128, kv_heads, keys, **fields)


def stages(cost):
    return {s.name: s for s in cost.stages}


def seconds(shapes, *blocks, chip=NPU, **knobs):
    """Exact prices: of each shape with one tile (block_q, block_kv), or of one shape with each tile."""
    count = max(len(shapes), len(blocks))
    rows, cols = np.array(blocks * (count // len(blocks))).T
    return exact_seconds(shapes, TileConfig(rows, cols, **knobs), chip)


def peak_seconds(shape, chip=NPU):
    """Time of the multiply-adds at the peak of all cubes."""
    return shape.flops / 2 / (chip.macs_per_cycle[shape.dtype] * chip.cube_cores * chip.cube_hz)


def memory_seconds(bytes_, chip=NPU):
    return bytes_ / (chip.hbm_bytes_per_s * chip.hbm_efficiency)


def faster(chip, fields, times):
    return chip.replace(**{name: getattr(chip, name) * times for name in fields})


def shapes_of_many_kinds():
    rng = np.random.default_rng(1)
    for _ in range(200):
        kv_heads, group, q_len, kv_len = (int(2 ** rng.uniform(0, top)) for top in (4, 3, 12, 13))
        window = (int(rng.integers(0, 3000)), None) if rng.integers(3) == 0 else None
        dims = [int(rng.choice([16, 40, 64, 96, 128])) for _ in range(2)]
        yield AttentionShape(
            int(rng.integers(1, 9)),
            kv_heads * group,
            q_len,
            dims[0],
            kv_heads,
            kv_len,
            dims[1],
            causal=bool(rng.integers(2)),
            window=window,
        )


SHAPES = list(shapes_of_many_kinds())
NO_LATENCY = NPU.replace(**dict.fromkeys(LATENCIES, 0.0), vector_instr_cycles=0.0, burst_half_bytes=1e-9)
IDEAL = faster(NPU, RATES, 1e12).replace(**dict.fromkeys(LATENCIES, 0.0), vector_instr_cycles=0.0)


# C1: utilisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", [NPU, IDEAL], ids=["real", "without_transfers_and_latencies"])
def test_c1_no_call_uses_more_than_the_peak(chip):
    peak = np.array([peak_seconds(shape) for shape in SHAPES])
    assert (peak <= seconds(SHAPES, (128, 128), chip=chip) * (1 + 1e-5)).all()


def test_c1_causal_16k_is_counted_as_what_it_computes():
    cost = estimate(prefill(16384, causal=True), NPU, TILE)
    cube = stages(cost)["qk_matmul"].busy + stages(cost)["pv_matmul"].busy
    assert 0.3 < peak_seconds(cost.shape) / cube <= 1
    assert peak_seconds(cost.shape) / cost.seconds < 1


def test_c1_flops_of_llama2_7b_at_8192():
    # 32 layers, batch 4, forward and backward = 3 times forward: 422.21 TFLOP in full, 211.11 causal.
    full, causal = (32 * 4 * 3 * prefill(8192, causal=c).flops / 1e12 for c in (False, True))
    assert full == pytest.approx(422.21, abs=0.01) and causal == pytest.approx(211.11, rel=2e-4)


def test_c1_full_over_causal_tends_to_two():
    lengths = [512, 1024, 2048, 4096, 8192, 16384, 32768]
    full, causal = (seconds([prefill(s, causal=c) for s in lengths], (128, 128)) for c in (False, True))
    ratios = full / causal
    assert (np.diff(ratios) > 0).all() and 1.95 < ratios[-1] <= 2


# C2: FLOPs ----------------------------------------------------------------------------------------------------------


def test_c2_pairs_of_a_bottom_right_causal_call():
    assert AttentionShape(1, 1, 4, 8, kv_len=10, v_head_dim=16, causal=True).flops == 34 * 2 * (8 + 16) == 1632


def test_c2_query_heads_count_and_not_kv_heads():
    calls = [AttentionShape(1, 8, 256, 64, kv_heads) for kv_heads in (1, 2, 4, 8)]
    assert {call.flops for call in calls} == {2**27}


def test_c2_lengths_and_head_sizes_differ():
    assert AttentionShape(2, 6, 5, 24, 3, 7, 40).flops == 2 * 2 * 6 * 5 * 7 * (24 + 40)


def test_c2_more_queries_than_keys():
    # Queries 0..2 see nothing; 3 and 4 see 1 and 2 keys.
    assert AttentionShape(1, 1, 5, 8, kv_len=2, causal=True).valid_pairs == 3


def test_c2_cube_cycles_follow_the_query_heads():
    busy = [stages(estimate(AttentionShape(1, 24, 256, 64, n), NPU, TILE))["qk_matmul"].busy for n in (2, 24)]
    assert busy[0] == pytest.approx(busy[1], rel=1e-6)


# C4: bytes of GQA decode --------------------------------------------------------------------------------------------

GQA = [(32, 8, 8192), (64, 8, 8192), (32, 8, 32768), (64, 8, 32768)]


@pytest.mark.parametrize("q_heads, kv_heads, keys", GQA)
def test_c4_kv_leaves_hbm_once_and_is_read_again_from_l2(q_heads, kv_heads, keys):
    cost, compulsory = estimate(decode(1, q_heads, kv_heads, keys), NPU, DECODE), 2 * kv_heads * keys * 128 * 2
    own = 2 * q_heads * 128 * 2  # Q and O
    assert cost.shape.min_bytes == compulsory + own
    assert cost.traffic["hbm"] == pytest.approx(compulsory + own, rel=1e-5)
    assert stages(cost)["load_k"].bytes + stages(cost)["load_v"].bytes == q_heads // kv_heads * compulsory


@pytest.mark.parametrize("q_heads, kv_heads, keys", GQA)
def test_c4_packed_heads_read_kv_once(q_heads, kv_heads, keys):
    tile, compulsory = DECODE.replace(heads_packed=q_heads // kv_heads), 2 * kv_heads * keys * 128 * 2
    cost = estimate(decode(1, q_heads, kv_heads, keys), NPU, tile)
    assert stages(cost)["load_k"].bytes + stages(cost)["load_v"].bytes == compulsory
    assert cost.traffic["hbm"] == pytest.approx(compulsory + 2 * q_heads * 128 * 2, rel=1e-5)


def test_c4_a_batch_whose_kv_fits_in_l2_is_read_from_hbm_once():
    shape = decode(32, 32, 8, 320)  # 42 MB of K and V; 201 MB of L2
    assert 2 * 32 * 8 * 320 * 128 * 2 == 41_943_040 < NPU.l2_bytes
    assert estimate(shape, NPU, DECODE).traffic["hbm"] == pytest.approx(shape.min_bytes, rel=1e-5)


def test_c4_only_without_l2_the_repeated_reads_reach_hbm():
    cost = estimate(decode(1, 32, 8, 8192), NPU.replace(l2_bytes=1.0), DECODE)
    assert cost.traffic["hbm"] > 4 * 2 * 8 * 8192 * 128 * 2


# C5: bytes of MLA decode --------------------------------------------------------------------------------------------


MLA_TILE = TileConfig(1, 64, heads_packed=16)


def mla(keys, v_in_k):
    return AttentionShape(8, 16, 1, 576, 1, keys, 512, causal=True, v_in_k=v_in_k)


@pytest.mark.parametrize("keys", [1024, 4096, 16384])
@pytest.mark.parametrize("v_in_k, elements", [(True, 576), (False, 1088)])
def test_c5_elements_per_key(keys, v_in_k, elements):
    cost = estimate(mla(keys, v_in_k), NPU, MLA_TILE)
    kv = 8 * keys * elements * 2
    assert cost.shape.min_bytes == 8 * 16 * (576 + 512) * 2 + kv
    assert stages(cost)["load_k"].bytes + stages(cost)["load_v"].bytes == kv


@pytest.mark.parametrize(
    "keys, v_in_k",
    [(1024, True), (1024, False), (16384, True), (16384, False)],
)
def test_c5_hbm_moves_each_key_once(keys, v_in_k):
    cost = estimate(mla(keys, v_in_k), NPU, MLA_TILE)
    assert cost.traffic["hbm"] == pytest.approx(cost.shape.min_bytes, rel=1e-5)


def test_c5_a_memory_bound_call_takes_the_time_of_its_bytes():
    calls = [stages(estimate(mla(4096, v_in_k), NPU, MLA_TILE)) for v_in_k in (True, False)]
    loads = [call["load_k"].busy + call["load_v"].busy for call in calls]
    assert loads[1] / loads[0] == pytest.approx(1088 / 576, rel=0.01)


# C6: partial tiles --------------------------------------------------------------------------------------------------


def test_c6_traffic_of_a_ragged_length_is_exact():
    # 1000 = 7 * 128 + 104: every one of 8 q blocks reads 1000 rows of K, not 1024.
    moved = {s.name: s.bytes for s in estimate(prefill(1000, heads=3), NPU, TILE).stages}
    assert moved["load_q"] == moved["store_o"] == 3 * 1000 * 128 * 2
    assert moved["load_k"] == moved["load_v"] == 3 * 8 * 1000 * 128 * 2
    assert moved["fixpipe_s"] == moved["load_s"] == 3 * 1000 * 1000 * 4
    assert moved["store_p"] == moved["load_p"] == 3 * 1000 * 1000 * 2


def test_c6_multiply_adds_of_a_ragged_length_are_those_of_whole_fractals():
    # 104 is padded to 112: 1008, not 1024. One head on one core: 1008 * 1008 * 128 / 4096 cycles.
    busy = stages(estimate(prefill(1000, heads=24), IDEAL, TILE))["qk_matmul"].busy
    assert busy * NPU.cube_hz == pytest.approx(1008 * 1008 * 128 / 4096, rel=1e-5)


def test_c6_eight_tasks_on_six_cores_take_two_rounds():
    chip = NPU.replace(cube_cores=6.0, hbm_bytes_per_s=1e15)  # so that they do not wait for each other
    six, eight, twelve = (estimate(prefill(128, heads=n), chip, TILE) for n in (6, 8, 12))
    alone = six.seconds - six.launch_seconds
    assert eight.seconds - eight.launch_seconds == pytest.approx(2 * alone, rel=1e-5)
    assert twelve.seconds == pytest.approx(eight.seconds, rel=1e-6)
    assert eight.traffic["hbm"] == pytest.approx(8 / 6 * six.traffic["hbm"], rel=1e-6)  # 8 tasks' bytes, not 12


@pytest.mark.parametrize("change", [dict(buffers=1), dict(lookahead=0), dict(lookahead=2)])
def test_c6_bytes_do_not_depend_on_the_order_of_the_same_work(change):
    shape = prefill(1000, heads=5, causal=True, kv_len=1300)
    moved = [[s.bytes for s in estimate(shape, NPU, tile).stages] for tile in (TILE, TILE.replace(**change))]
    assert moved[0] == moved[1]


def test_c6_bytes_do_not_depend_on_the_number_of_cores():
    moved = [
        [s.bytes for s in estimate(prefill(1000, heads=5), NPU.replace(cube_cores=n), TILE).stages]
        for n in (1.0, 7.0, 24.0)
    ]
    assert moved[0] == moved[1] == moved[2]


# C8: tiny products, no stalls ---------------------------------------------------------------------------------------


def cube_utilisation(cost):
    busy = stages(cost)["qk_matmul"].busy + stages(cost)["pv_matmul"].busy
    return peak_seconds(cost.shape, cost.chip.replace(cube_cores=float(cost.cores))) / busy


def test_c8_one_query_uses_at_most_a_sixteenth_of_the_cube():
    one, many = (estimate(AttentionShape(1, 24, q, 128, kv_len=4096), NPU, TileConfig(128, 256)) for q in (1, 256))
    assert cube_utilisation(one) <= 1 / 16 < 0.5 < cube_utilisation(many) <= 1


def test_c8_one_query_uses_a_sixteenth_where_nothing_else_takes_time():
    cost = estimate(AttentionShape(1, 24, 1, 128, kv_len=4096), IDEAL, TileConfig(128, 256))
    assert cube_utilisation(cost) == pytest.approx(1 / 16, rel=1e-5)


@pytest.mark.parametrize("knobs", [dict(), dict(buffers=1, lookahead=0), dict(buffers=1), dict(buffers=4, lookahead=3)])
def test_c8_infinite_bandwidth_is_no_stall(knobs):
    chip = faster(NPU, RATES, 1e12).replace(sync_cycles=0.0)
    cost = estimate(AttentionShape(1, 30, 700, 128, kv_len=1900, causal=True), chip, TileConfig(128, 128, **knobs))
    assert max(s.dma_wait for s in cost.stages) <= 1e-6 * cost.seconds


def test_c8_stalls_come_back_with_the_bandwidth():
    chips = [faster(NPU, RATES, times).replace(sync_cycles=0.0) for times in (1e3, 10, 1, 0.5)]
    waits = [sum(s.dma_wait for s in estimate(decode(8, 32, 8, 8192), chip, DECODE).stages) for chip in chips]
    assert waits == sorted(waits) and waits[-1] > 100 * waits[0]


# C9: units ----------------------------------------------------------------------------------------------------------

LOADS, COMPUTE = ("load_q", "load_k", "load_v"), ("qk_matmul", "softmax", "pv_matmul", "rescale", "finalize")


def busy_ratios(names, chip):
    before, after = (stages(estimate(prefill(1024), c, TILE)) for c in (NPU, chip))
    return [after[name].busy / before[name].busy for name in names]


def test_c9_twice_the_clock_halves_computation_only():
    slower_paths = [f for f in GLOBAL_RATES if f.endswith("per_cycle")]  # the same bytes a second
    chip = faster(faster(NPU, ["cube_hz", "vector_hz"], 2), slower_paths, 0.5)
    assert busy_ratios(COMPUTE, chip) == pytest.approx([0.5] * 5, rel=1e-5)
    assert busy_ratios((*LOADS, "fixpipe_s", "load_s", "store_o"), chip) == pytest.approx([1.0] * 6, rel=1e-5)


def test_c9_twice_the_bandwidth_halves_transfers_only():
    chip = faster(NPU, [*GLOBAL_RATES, "hbm_bytes_per_s"], 2)
    assert busy_ratios((*LOADS, "fixpipe_s", "load_s", "store_o"), chip) == pytest.approx([0.5] * 6, rel=1e-5)
    assert busy_ratios(COMPUTE, chip) == pytest.approx([1.0] * 5, rel=1e-5)


def test_c9_twice_the_bytes_of_an_element_are_twice_the_bytes():
    half, single = (decode(8, 8, 8, 8192, dtype=dtype) for dtype in ("float16", "float32"))
    assert single.min_bytes == 2 * half.min_bytes
    times = [seconds([shape], (16, 128), chip=NO_LATENCY)[0] for shape in (half, single)]
    assert times[1] / times[0] == pytest.approx(2, rel=0.03)  # bound by memory


def test_c9_float32_takes_four_times_the_cube_cycles():
    # k0 = 8 instead of 16, and 2 cycles a fractal instead of 1: 256 * 256 * 128 / 1024 cycles a product.
    chip = faster(IDEAL, [f for f in vars(NPU) if f.endswith("elements_per_cycle")], 1e12)
    half, single = (seconds([prefill(256, heads=24, dtype=t)], (64, 128), chip=chip)[0] for t in ("float16", "float32"))
    assert [half * NPU.cube_hz, single * NPU.cube_hz] == pytest.approx([2 * 2048, 2 * 8192], rel=1e-4)


def test_c9_gib_is_7_percent_more_than_gb():
    def k_seconds(unit):
        chip = NPU.replace(hbm_bytes_per_s=1600 * unit)
        return stages(estimate(decode(1, 24, 24, 4096), chip, DECODE))["load_k"].busy

    assert k_seconds(1e9) / k_seconds(2**30) == pytest.approx(1.0737418, rel=1e-5)
    assert (units.size(2**30), units.size(1e9)) == ("1 GiB", "954 MiB")


def test_c9_seconds_are_seconds():
    # 8 sequences of 8192 keys, 8 kv heads: 268 MB at 1.536 TB/s are 175 us: not 175 s, and not 2e9 ms.
    cost = estimate(decode(8, 64, 8, 8192), NPU, DECODE.replace(heads_packed=8))
    assert 175e-6 < cost.seconds < 2 * 175e-6
    assert units.seconds(cost.seconds).endswith(" us")


# C11: more than a roofline ------------------------------------------------------------------------------------------


def test_c11_never_below_the_floor_of_computation_and_compulsory_bytes():
    floor = np.array([max(peak_seconds(s), memory_seconds(s.min_bytes)) for s in SHAPES])
    assert (floor <= seconds(SHAPES, (128, 128)) * (1 + 1e-5)).all()
    assert (floor <= seconds(SHAPES, (16, 256), buffers=4, lookahead=3) * (1 + 1e-5)).all()


def test_c11_never_faster_than_the_memory_moves_the_calls_own_traffic():
    chip, tile = device("ascend910a"), TileConfig(128, 128, fusion="unfused")
    cost = estimate(prefill(4096), chip, tile)
    assert memory_seconds(cost.traffic["hbm"], chip) <= cost.seconds * (1 + 1e-5)


def test_c11_scores_that_are_read_back_at_once_stay_in_l2():
    cost = estimate(prefill(32768), NPU, TileConfig(128, 256))  # 402 MB of K and V in flight; 14 MB of S, P and O
    operands = sum(stages(cost)[name].bytes for name in ("load_q", "load_k", "load_v", "store_o"))
    assert cost.traffic["hbm"] <= operands


def test_c11_the_floor_is_further_away_for_short_calls():
    lengths = [64, 128, 256, 512, 1024, 2048, 4096]
    floor = np.array([max(peak_seconds(prefill(s)), memory_seconds(prefill(s).min_bytes)) for s in lengths])
    over = seconds([prefill(s) for s in lengths], (128, 128)) / floor
    assert over[1] > 2 * over[-1] and over[0] > over[1] > over[2] > over[3]


def test_c11_launches_and_step_latencies_are_what_short_calls_cost():
    calls = [prefill(64), prefill(4096)]
    shares = seconds(calls, (128, 128), chip=NO_LATENCY) / seconds(calls, (128, 128))
    assert shares[0] < 0.5 * shares[1]


def test_c11_small_transfers_get_less_bandwidth():
    rates = []
    for keys in (2, 4, 8, 16, 32, 64):  # 512 B .. 16 KB of K
        load = stages(estimate(AttentionShape(1, 1, 16, 128, kv_len=keys), NPU, TileConfig(16, keys)))["load_k"]
        rates.append(load.bytes / load.busy)
    assert rates == sorted(rates)
    assert rates[0] < 0.25 * rates[-1] < rates[-1] < NPU.gm_to_l1_bytes_per_cycle * NPU.cube_hz


@pytest.mark.parametrize("heads", [1, 24])
def test_c11_small_tiles_are_far_above_the_floor(heads):
    prices = seconds([prefill(2048, heads=heads)], (16, 16), (32, 32), (64, 64), (128, 128))
    assert list(prices) == sorted(prices, reverse=True) and prices[0] > 4 * prices[-1]


# C12: monotone ------------------------------------------------------------------------------------------------------

CANDIDATES = [(q, k) for q in (16, 64, 128, 256) for k in (64, 128, 256, 512)]
CALLS = {
    "prefill": prefill(2048, heads=8),
    "causal": prefill(3000, heads=6, causal=True),
    "decode": decode(6, 64, 8, 8192),
}


def best(shape, chip):
    """The cheapest of the candidates that fit."""
    tiles = TileConfig(*np.array(CANDIDATES).T)
    legal = fits(needs([shape], tiles, chip), chip, shape.dtype).all(-1)
    return float(np.where(legal, exact_seconds([shape], tiles, chip), np.inf).min())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("field, low, high", [("ub_bytes", 64, 512), ("l1_bytes", 128, 1024), ("l0c_bytes", 64, 256)])
def test_c12_a_larger_buffer_is_never_worse(call, field, low, high):
    found = [best(CALLS[call], NPU.replace(**{field: 1024.0 * kib})) for kib in np.geomspace(low, high, 7)]
    assert all(b <= a for a, b in zip(found, found[1:], strict=False)) and found[-1] < math.inf


@pytest.mark.parametrize("call", CALLS)
def test_c12_a_larger_l2_is_never_worse(call):
    found = [best(CALLS[call], NPU.replace(l2_bytes=2.0**n)) for n in range(10, 31, 2)]
    assert all(b <= a * (1 + 1e-5) for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("call", CALLS)
def test_c12_more_bandwidth_is_never_worse(call):
    for field in RATES:
        found = [best(CALLS[call], faster(NPU, [field], times)) for times in (0.01, 1, 2, 4, 8)]
        assert all(b <= a * (1 + 1e-5) for a, b in zip(found, found[1:], strict=False)), field


def test_c12_many_more_cores_are_better():
    found = [best(CALLS["prefill"], NPU.replace(cube_cores=float(n))) for n in (1, 2, 4, 8, 16, 32)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.05 * found[0]


@pytest.mark.parametrize("call", CALLS)
def test_c12_one_more_core_is_never_worse(call):
    chip = NPU.replace(launch_per_core_s=0.0)
    found = np.array([best(CALLS[call], chip.replace(cube_cores=float(n))) for n in range(1, 49)])
    assert (np.diff(found) <= 1e-4 * found[1:]).all()


def test_c12_48_streams_of_memory_take_the_same_time_on_47_cores_as_on_24():
    shape, free = AttentionShape(6, 8, 1, 128, kv_len=65536), dict(launch_per_core_s=0.0)
    few, many = (seconds([shape], (16, 256), chip=NPU.replace(cube_cores=n, **free))[0] for n in (24.0, 47.0))
    assert many <= few * 1.1


def sweep(fixed, moving):
    """Prices of S = 1 .. 4096, step 1, with one tile."""
    shapes = [AttentionShape(1, 1, **{**fixed, **dict.fromkeys(moving, s)}, head_dim=128) for s in range(1, 4097)]
    return seconds(shapes, (128, 256))


@pytest.mark.parametrize(
    "fixed, moving",
    [({"q_len": 128}, ["kv_len"]), ({"kv_len": 512}, ["q_len"]), ({}, ["q_len"]), ({"causal": True}, ["q_len"])],
)
def test_c12_a_longer_call_is_never_cheaper(fixed, moving):
    found = sweep(fixed, moving)
    assert np.isfinite(found).all() and (np.diff(found) >= -1e-4 * found[1:]).all()


def test_c12_one_more_key_costs_at_most_one_more_step():
    found = sweep({"q_len": 128}, ["kv_len"])
    serial = estimate(AttentionShape(1, 1, 128, 128, kv_len=256), NPU, TileConfig(128, 256))
    assert np.diff(found).max() <= serial.upper_bound - serial.launch_seconds


def test_c12_one_more_query_costs_at_most_one_more_task():
    found = sweep({"kv_len": 512}, ["q_len"])
    full = estimate(AttentionShape(1, 24, 128, 128, kv_len=512), NPU, TileConfig(128, 256))  # beside 23 others
    alone = full.seconds - full.launch_seconds + NPU.launch_per_core_s + NPU.launch_per_task_s
    assert np.diff(found).max() <= alone * (1 + 1e-5)


def test_c12_jumps_are_at_the_edges_of_tiles_and_fractals():
    jumps = np.diff(sweep({"q_len": 128}, ["kv_len"]))  # from S to S + 1
    edges = np.arange(1, 4096)
    assert set(edges[jumps > 6e-8] % 16) == {0} and set(edges[jumps > 3e-7] % 256) == {0}


def test_c12_less_than_a_byte_a_cycle_is_a_finite_time():
    slow = faster(NPU, RATES, 1e-4)
    found = seconds([prefill(256)], (128, 128), chip=slow)[0]
    assert found == pytest.approx(1e4 * seconds([prefill(256)], (128, 128))[0], rel=0.9) and found < 1e3


# C13: sensitivities -------------------------------------------------------------------------------------------------


def test_c13_decode_saturates_with_the_batch():
    batches = [2**n for n in range(11)]
    found = seconds([decode(b, 32, 8, 2048) for b in batches], (16, 256))
    per_sequence = found / batches
    assert (np.diff(found) > 0).all() and (np.diff(per_sequence) < 0).all()
    assert found[-1] / found[-2] == pytest.approx(2, rel=0.01)
    assert found[-1] >= memory_seconds(decode(1024, 32, 8, 2048).min_bytes)


@pytest.fixture(scope="module")
def slope():
    """d seconds / d field, for a field of the problem or of the device (forward mode)."""

    def cost(p, d, tile):
        return price(time_constants(d, "float16"), p, tile, d, Options("float16", False, waits=False)).seconds

    run = jax.jit(lambda p, d, tile, dp, dd: jax.jvp(lambda p, d: cost(p, d, tile), (p, d), (dp, dd))[1])

    def of(shape, tile, field):
        p, tile, d = arguments(shape, tile, NPU)
        directions = [jax.tree.map(jnp.zeros_like, x) for x in (p, d)]
        vars(directions[field not in vars(p)])[field] = jnp.ones(())
        return float(run(p, d, tile, *directions))

    return of


SLOPED = {"decode": (decode(8, 32, 8, 2000), DECODE), "prefill": (prefill(1000), TILE)}


@pytest.mark.parametrize("call", SLOPED)
@pytest.mark.parametrize("field", ["kv_len", "head_dim", "launch_base_s", "sync_cycles", "burst_half_bytes"])
def test_c13_more_work_and_latency_have_a_slope(slope, call, field):
    assert 0 < slope(*SLOPED[call], field) < math.inf


@pytest.mark.parametrize("call", SLOPED)
@pytest.mark.parametrize("field", ["cube_hz", "vector_hz", "hbm_bytes_per_s"])
def test_c13_slopes_of_rates_are_those_of_the_price(slope, call, field):
    shape, tile = SLOPED[call]
    chips = [faster(NPU, [field], times) for times in (0.999, 1.001)]
    below, above = (seconds([shape], (tile.block_q, tile.block_kv), chip=chip)[0] for chip in chips)
    found = slope(shape, tile, field) * getattr(NPU, field)
    assert found < 0 and found == pytest.approx((above - below) / 0.002, rel=0.05)


def test_c13_both_vector_units_of_a_core_count():
    chips = [NO_LATENCY.replace(vector_cores_per_cube=n) for n in (1.0, 2.0)]
    one, two = (stages(estimate(prefill(1024), chip, TileConfig(64, 128))) for chip in chips)
    assert one["softmax"].busy == pytest.approx(2 * two["softmax"].busy, rel=1e-5)
    assert one["qk_matmul"].busy == two["qk_matmul"].busy


@pytest.mark.parametrize("field", [*LATENCIES, "all"])
def test_c13_a_latency_of_zero_is_no_division_by_zero(field):
    chip = NPU.replace(**dict.fromkeys(LATENCIES if field == "all" else [field], 0.0))
    cost = estimate(prefill(300, heads=2), chip, TILE)
    numbers = [cost.seconds, cost.lower_bound, cost.upper_bound, cost.launch_share, *(s.dma_wait for s in cost.stages)]
    assert np.isfinite(numbers).all() and 0 < cost.seconds <= estimate(cost.shape, NPU, TILE).seconds
    assert cost.launch_seconds == (0 if field == "all" else pytest.approx(cost.launch_seconds))


# C14: layouts -------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "BNSD": lambda b, n, s, d: (b, n, s, d),
    "BSND": lambda b, n, s, d: (b, s, n, d),
    "BSH": lambda b, n, s, d: (b, s, n * d),
    "SBH": lambda b, n, s, d: (s, b, n * d),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [4096, 8])  # 8: as long as there are heads
def test_c14_one_problem_has_one_shape_in_any_layout(layout, length):
    x = np.broadcast_to(np.float16(0), LAYOUTS[layout](2, 8, length, 128))
    heads = 8 if layout in ("BSH", "SBH") else None
    assert Arguments(x, x, x, layout=layout, q_heads=heads).check() == AttentionShape(2, 8, length, 128)


def test_c14_heads_and_length_are_not_the_same():
    shape, swapped = AttentionShape(2, 8, 4096, 128), AttentionShape(2, 4096, 8, 128)
    assert shape.flops == 2 * 2 * 8 * 4096**2 * 256 == 512 * swapped.flops


# Windows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, window", [(16384, 128), (1000, 1), (300, 300), (300, 500)])
def test_pairs_of_a_causal_window_in_closed_form(length, window):
    shape = AttentionShape(1, 3, length, 64, causal=True, window=(window - 1, 0))
    w = min(window, length)
    assert shape.valid_pairs == 3 * (w * (w + 1) // 2 + (length - w) * w)
    assert shape.flops == 4 * 64 * shape.valid_pairs


@pytest.mark.parametrize("left, right", [(5, 0), (0, 7), (30, 20)])
def test_pairs_of_a_two_sided_window_in_closed_form(left, right):
    length = 100  # a band of left + 1 + right diagonals, less the corners that stick out
    pairs = length * (left + 1 + right) - left * (left + 1) // 2 - right * (right + 1) // 2
    assert AttentionShape(2, 2, length, 32, window=(left, right)).valid_pairs == 4 * pairs


def test_three_full_windows_are_causal():
    price_of = [estimate(prefill(700, window=w, causal=c), NPU, TILE).seconds for w, c in FULL_WINDOWS]
    assert len(set(price_of)) == 1


FULL_WINDOWS = [(None, True), ((None, 0), False), ((700, 0), False), ((699, 0), True)]


def test_decode_in_a_window_reads_its_keys_only():
    shape = decode(4, 64, 8, 4096, causal=True, window=(127, 0))
    cost, compulsory = estimate(shape, NPU, TileConfig(16, 128, heads_packed=8)), 2 * 4 * 8 * 128 * 128 * 2
    assert shape.seen_keys == 128 and shape.valid_pairs == 4 * 64 * 128
    assert shape.min_bytes == compulsory + 2 * 4 * 64 * 128 * 2
    assert stages(cost)["load_k"].bytes + stages(cost)["load_v"].bytes == compulsory
    assert cost.traffic["hbm"] == pytest.approx(shape.min_bytes, rel=1e-5)


def test_window_of_a_block_reads_two_blocks_a_task():
    # 8 q blocks of 128; each sees its own block and the one before; the first has none before.
    cost = estimate(prefill(1024, heads=2, causal=True, window=(128, 0)), NPU, TILE)
    assert stages(cost)["load_k"].bytes == 2 * (2 * 8 - 1) * 128 * 128 * 2
    assert cost.steps == 2 * 15


def windowed_ratios(tile):
    """How much longer calls of twice the length take, with a window of 128 keys and without what does not double."""
    chip = NPU.replace(cube_cores=32.0, l2_bytes=1e12, launch_base_s=0.0, launch_per_core_s=0.0)
    calls = [prefill(length, causal=True, window=(127, 0)) for length in (4096, 8192, 16384, 32768)]
    found = seconds(calls, tile, chip=chip)
    return found[1:] / found[:-1]


def test_time_of_a_windowed_call_is_linear_in_its_length():
    assert windowed_ratios((128, 128)) == pytest.approx([2, 2, 2], rel=0.01)


def test_time_of_a_windowed_call_is_linear_where_q_blocks_take_one_and_two_steps_by_turns():
    assert windowed_ratios((128, 256)) == pytest.approx([2, 2, 2], rel=0.02)


def test_keys_of_a_sliding_window_leave_hbm_once():
    cost = estimate(prefill(32768, causal=True, window=(127, 0)), NPU, TILE)
    assert cost.traffic["hbm"] == pytest.approx(cost.shape.min_bytes, rel=0.01)
