"""Kernels of one to three tiles whose cycles and bytes are added up on paper, line by line, from the device's numbers.

The block is 128 queries x 128 keys x 128 columns in float16 unless said otherwise: 16384 scores, 32768 bytes for each
of Q, K, V and P, 65536 bytes of float32 scores. All three chips run cube and vector unit on one clock, so everything is
in cycles of that clock. Figures in comments are of the chip that the line names, to be checked with a pencil.
"""

import functools
from typing import Any, NamedTuple

import pytest

from npumodel.hardware import device
from npumodel.model.estimate import Cost, estimate
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

pytestmark = pytest.mark.slow

COUPLED, SPLIT, DIRECT = device("ascend910a"), device("ascend910b2"), device("ascend950pr")
CHIPS = {"coupled": COUPLED, "split": SPLIT, "direct": DIRECT}

BLOCK = AttentionShape(1, 1, 128, 128)
ONE_AT_A_TIME = TileConfig(128, 128, buffers=1, lookahead=0)
SCORES, HALF, WHOLE = 128 * 128, 128 * 128 * 2, 128 * 128 * 4  # elements, float16 bytes, float32 bytes


@functools.cache
def priced(shape, chip, tile) -> Cost:
    return estimate(shape, CHIPS[chip], tile)


def cycles(cost: Cost) -> dict:
    """Busy cycles by stage, with the op in front where a call has several of a name: "mask.load_s"."""
    hz = cost.chip.cube_hz
    return {s.name: s.busy * hz for s in cost.stages} | {f"{s.op}.{s.name}": s.busy * hz for s in cost.stages}


def moved(cost: Cost) -> dict:
    return {s.name: s.bytes for s in cost.stages}


def device_cycles(cost: Cost) -> float:
    """Cycles from start to end, without launches."""
    return (cost.seconds - cost.launch_seconds) * cost.chip.cube_hz


def close(value):
    return pytest.approx(value, rel=2e-5)


# One block on paper -------------------------------------------------------------------------------------------------


class Paper(NamedTuple):
    """Cycles of every stage of one block."""

    load: Any  # Q, K or V, from global memory
    matmul: Any  # Q K^T, and P V, which has the same sizes
    softmax: Any
    rescale: Any
    finalize: Any
    store_p: Any
    store_o: Any
    fixpipe: Any = 0.0  # S, and partial O
    load_s: Any = 0.0  # S, and partial O
    load_p: Any = 0.0


def coupled_block() -> Paper:
    c = COUPLED
    softmax = SCORES * 3 / 64 + SCORES * 2 / 32 + SCORES * 1 / 32  # 3 adds, 2 reductions, 1 exp: 768 + 1024 + 512
    softmax += 6 * 2 * 28  # 6 instructions on each of two vector tiles of 32 KB
    softmax += 128 * 8 * (2 / 64 + 1 / 32)  # per row (a 32-byte block): maximum, running sum; exp: 64
    softmax += WHOLE / 256  # the vector unit itself moves S out of L0C: 256
    rescale = SCORES / 64 + SCORES / 32 + 2 * 2 * 28 + WHOLE / 256  # multiply; two-source add; move O: 256 + 512 + ...
    finalize = SCORES / 64 + SCORES / 32 + 2 * 2 * 28  # cast; division at the rate of exp
    check_numbers(c, vector_elements_per_cycle=64, exp_elements_per_cycle=32, reduce_elements_per_cycle=32)
    check_numbers(c, vector_instr_cycles=28, vector_tile_bytes=32768, l0c_to_ub_bytes_per_cycle=256)
    return Paper(
        load=(HALF + c.burst_half_bytes) / c.gm_to_l1_bytes_per_cycle,  # (32768 + 1950) / 110 = 315.6
        matmul=HALF / 512 + HALF / 256 + 8 * 8 * 8 + 6,  # first L0A, L0B block: 64 + 128; 512 fractals; head 6: 710
        softmax=softmax,
        rescale=rescale,
        finalize=finalize,
        store_p=HALF / c.ub_to_l1_bytes_per_cycle,  # 32768 / 128 = 256, no burst inside a core
        store_o=(HALF + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle,  # / 64 = 542.5
    )


def split_block() -> Paper:
    c = SPLIT
    half = SCORES / 2  # scores of each of the two vector units: 8192
    softmax = half * 3 / 64 + half * 2 / 32 + half * 1 / 32 + 6 * 28  # 384 + 512 + 256 + 168; one vector tile of 32 KB
    softmax += 64 * 8 * (2 / 64 + 1 / 32)  # 64 rows: 32
    check_numbers(c, vector_elements_per_cycle=64, exp_elements_per_cycle=32, reduce_elements_per_cycle=32)
    check_numbers(c, vector_instr_cycles=28, vector_tile_bytes=32768, vector_cores_per_cube=2)
    return Paper(
        load=(HALF + c.burst_half_bytes) / c.gm_to_l1_bytes_per_cycle,  # (32768 + 1950) / 78 = 445.1
        matmul=HALF / 256 + HALF / 128 + 8 * 8 * 8 + 6,  # 128 + 256 + 512 + 6 = 902
        softmax=softmax,
        rescale=half / 64 + half / 32 + 2 * 28,  # 128 + 256 + 56
        finalize=half / 64 + half / 32 + 2 * 28,
        store_p=(HALF / 2 + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle,  # each unit its half: 18334 / 109 = 168.2
        store_o=(HALF / 2 + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle,
        fixpipe=(WHOLE + c.burst_half_bytes) / c.l0c_to_gm_bytes_per_cycle,  # 67486 / 40.6 = 1662.2
        load_s=(WHOLE / 2 + c.burst_half_bytes) / c.gm_to_ub_bytes_per_cycle,  # 34718 / 58.6 = 592.5
        load_p=(HALF + c.burst_half_bytes) / c.gm_to_l1_bytes_per_cycle,
    )


def direct_block() -> Paper:
    c = DIRECT
    half = SCORES / 2
    softmax = half * 3 / 64 + half * 2 / 64 + half * 1 / 16 + 6 * 35  # 384 + 256 + 512 + 210
    softmax += 64 * 8 * (2 / 64 + 1 / 16)  # 48
    check_numbers(c, vector_elements_per_cycle=64, exp_elements_per_cycle=16, reduce_elements_per_cycle=64)
    check_numbers(c, vector_instr_cycles=35, vector_tile_bytes=32768, vector_cores_per_cube=2)
    return Paper(
        load=(HALF + c.burst_half_bytes) / c.gm_to_l1_bytes_per_cycle,  # (32768 + 2430) / 100 = 352.0
        matmul=HALF / 256 + HALF / 256 + 8 * 8 * 8 + 6,  # 128 + 128 + 512 + 6 = 774
        softmax=softmax,
        rescale=half / 64 + half / 64 + 2 * 35,
        finalize=half / 64 + half / 16 + 2 * 35,
        store_p=HALF / 2 / c.ub_to_l1_bytes_per_cycle,  # each unit its half: 16384 / 128 = 128
        store_o=(HALF / 2 + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle,  # 18814 / 42 = 448.0
        fixpipe=WHOLE / 2 / c.l0c_to_ub_bytes_per_cycle,  # to both units at once: 32768 / 128 = 256
    )


def check_numbers(chip, **expected):
    """The figures that the paper uses as plain numbers are still those of the device file."""
    assert {name: getattr(chip, name) for name in expected} == expected


PAPER = {"coupled": coupled_block, "split": split_block, "direct": direct_block}

#: Stage of the model -> line of the paper.
LINES = {
    "coupled": {},
    "split": dict(fixpipe_s="fixpipe", fixpipe_o="fixpipe", load_s="load_s", load_o="load_s", load_p="load_p"),
    "direct": dict(fixpipe_s="fixpipe", fixpipe_o="fixpipe"),
}
COMMON = dict(load_q="load", load_k="load", load_v="load", qk_matmul="matmul", pv_matmul="matmul")
COMMON |= {name: name for name in ("softmax", "rescale", "finalize", "store_p", "store_o")}


@pytest.mark.parametrize("arch", CHIPS)
def test_every_stage_of_one_block_takes_the_cycles_on_paper(arch):
    lines = COMMON | LINES[arch]
    got, paper = cycles(priced(BLOCK, arch, ONE_AT_A_TIME)), PAPER[arch]()._asdict()
    assert {n: v for n, v in got.items() if "." not in n} == {n: close(paper[line]) for n, line in lines.items()}


@pytest.mark.parametrize("arch", CHIPS)
def test_one_block_moves_each_tensor_once(arch):
    got = moved(priced(BLOCK, arch, ONE_AT_A_TIME))
    assert [got[n] for n in ("load_q", "load_k", "load_v", "store_p", "store_o")] == [HALF] * 5
    scores = [n for n in ("fixpipe_s", "load_s", "fixpipe_o", "load_o") if n in got]
    assert [got[n] for n in scores] == [WHOLE] * {"coupled": 0, "split": 4, "direct": 2}[arch]
    assert arch != "split" or got["load_p"] == HALF


@pytest.mark.parametrize("arch", CHIPS)
def test_one_launch_is_base_and_one_core_and_one_task(arch):
    assert priced(BLOCK, arch, ONE_AT_A_TIME).launch_seconds == close(5.9e-6 + 6.083e-7 + 2e-7)


# One step: nothing but a chain --------------------------------------------------------------------------------------


def test_chain_of_one_block_on_a_coupled_core():
    b, sync = coupled_block(), 30
    total = b.load + b.load + b.matmul  # Q, K, Q K^T; V comes meanwhile
    total += sync + b.softmax + b.store_p
    total += sync + b.matmul
    total += sync + b.rescale + b.finalize + b.store_o
    assert device_cycles(priced(BLOCK, "coupled", ONE_AT_A_TIME)) == close(total)


def test_chain_of_one_block_on_split_cores():
    b, sync = split_block(), 220
    total = b.load + b.load + b.matmul + b.fixpipe  # S to global memory
    total += sync + b.load_s + b.softmax + b.store_p
    total += sync + b.load_p + b.matmul + b.fixpipe
    total += sync + b.load_s + b.rescale + b.finalize + b.store_o
    assert device_cycles(priced(BLOCK, "split", ONE_AT_A_TIME)) == close(total)


def test_chain_of_one_block_on_cores_with_direct_paths():
    b, sync = direct_block(), 220
    total = b.load + b.load + b.matmul + b.fixpipe
    total += sync + b.softmax + b.store_p
    total += sync + b.matmul + b.fixpipe
    total += sync + b.rescale + b.finalize + b.store_o
    assert device_cycles(priced(BLOCK, "direct", ONE_AT_A_TIME)) == close(total)


# Two and three steps: a timeline on paper ---------------------------------------------------------------------------


def test_two_steps_one_after_the_other_on_a_coupled_core():
    """One buffer, no lookahead: the second K waits until the first Q K^T has read its block."""
    b, sync = coupled_block(), 30
    k0 = b.load + b.load
    qk0 = k0 + b.matmul
    softmax0 = qk0 + sync + b.softmax
    pv0 = softmax0 + b.store_p + sync + b.matmul
    rescale0 = pv0 + sync + b.rescale
    k1 = max(k0 + b.load, qk0) + b.load  # after V0 on MTE2, and when K0's buffer is free
    qk1 = max(k1, pv0) + b.matmul  # the cube turns to it after P V
    softmax1 = max(qk1 + sync, rescale0) + b.softmax
    v1 = max(k1, pv0) + b.load
    pv1 = max(softmax1 + b.store_p, v1) + sync + b.matmul
    end = pv1 + sync + b.rescale + b.finalize + b.store_o
    shape = AttentionShape(1, 1, 128, 128, kv_len=256)
    assert device_cycles(priced(shape, "coupled", ONE_AT_A_TIME)) == close(end)


def test_two_steps_one_after_the_other_on_split_cores():
    b, sync = split_block(), 220
    qk0 = b.load + b.load + b.matmul
    softmax0 = qk0 + b.fixpipe + sync + b.load_s + b.softmax
    p0 = softmax0 + b.store_p + sync + b.load_p
    pv0 = p0 + b.matmul
    fixpipe0 = pv0 + b.fixpipe
    o0 = fixpipe0 + sync + b.load_s
    rescale0 = o0 + b.rescale
    k1 = p0 + b.load  # MTE2 has loaded P0 before it turns to K1
    qk1 = max(k1, pv0) + b.matmul
    s1 = max(max(qk1, fixpipe0) + b.fixpipe + sync, o0) + b.load_s
    softmax1 = max(s1, rescale0) + b.softmax
    v1 = max(k1, pv0) + b.load
    p1 = max(softmax1 + b.store_p + sync, v1) + b.load_p
    end = p1 + b.matmul + b.fixpipe + sync + b.load_s + b.rescale + b.finalize + b.store_o
    shape = AttentionShape(1, 1, 128, 128, kv_len=256)
    assert device_cycles(priced(shape, "split", ONE_AT_A_TIME)) == close(end)


def test_three_steps_with_lookahead_on_cores_with_direct_paths():
    """Two buffers, lookahead 1: the cube does Q K0, Q K1, P V0, Q K2, P V1, P V2."""
    b, sync = direct_block(), 220
    k0 = b.load + b.load
    qk0 = k0 + b.matmul
    s0 = qk0 + b.fixpipe
    softmax0 = s0 + sync + b.softmax
    p0 = softmax0 + b.store_p
    k1, v0 = k0 + b.load, k0 + 2 * b.load  # MTE2: Q K0 | K1 V0 | K2 V1 | V2
    qk1 = max(k1, qk0) + b.matmul
    s1 = max(qk1, s0) + b.fixpipe
    softmax1 = max(s1 + sync, softmax0) + b.softmax
    p1 = max(softmax1, p0) + b.store_p
    pv0 = max(p0 + sync, v0 + sync, qk1) + b.matmul
    o0 = max(pv0, s1) + b.fixpipe
    rescale0 = max(o0 + sync, softmax1) + b.rescale
    k2 = max(v0, qk0) + b.load  # K0's buffer is free after Q K0
    qk2 = max(k2, pv0, s0) + b.matmul  # the L0C slot of S0 is free after its fixpipe
    s2 = max(qk2, o0, softmax0) + b.fixpipe
    softmax2 = max(s2 + sync, rescale0) + b.softmax
    p2 = max(softmax2, p1, pv0) + b.store_p  # P0's place in L1 is free after P V0
    v1 = k2 + b.load
    pv1 = max(p1 + sync, v1 + sync, qk2) + b.matmul
    o1 = max(pv1, s2) + b.fixpipe
    rescale1 = max(o1 + sync, softmax2) + b.rescale
    v2 = max(v1, pv0) + b.load
    pv2 = max(p2 + sync, v2 + sync, pv1, o0) + b.matmul
    o2 = max(pv2, o1, rescale0) + b.fixpipe
    end = max(o2 + sync, rescale1) + b.rescale + b.finalize + b.store_o
    shape, tile = AttentionShape(1, 1, 128, 128, kv_len=384), TileConfig(128, 128, buffers=2, lookahead=1)
    assert device_cycles(priced(shape, "direct", tile)) == close(end)


# Other sizes on split cores -----------------------------------------------------------------------------------------


def test_matmul_of_several_l0_blocks_is_bound_by_the_cube_when_it_is_slower():
    # 128 x 256 x 128: 8 * 16 * 8 fractals, two instruction heads: 1024 + 12. MTE1 loads Q once per half of K, and K:
    # 65536 / 256 + 65536 / 128 = 768; the first blocks, 128 + 256 = 384, come before the cube, the rest beside it.
    got = cycles(priced(AttentionShape(1, 1, 128, 128, kv_len=256), "split", TileConfig(128, 256, 1, 0)))
    assert got["qk_matmul"] == close(384 + 1024 + 12)
    assert got["pv_matmul"] == close(384 + 1024 + 12)  # 128 x 128 x 256: as many fractals, two blocks of depth


def test_matmul_of_few_rows_is_bound_by_mte1():
    # 16 x 256 x 128: 1 * 16 * 8 + 2 * 6 = 140 cycles of the cube; MTE1: 2 * 4096 / 256 + 65536 / 128 = 544.
    got = cycles(priced(AttentionShape(1, 1, 16, 128, kv_len=256), "split", TileConfig(16, 256, 1, 0)))
    assert got["qk_matmul"] == close(544)


def test_ragged_sizes_pay_for_whole_vector_blocks():
    # 100 x 100 scores, 40 columns of V: each vector unit 50 rows of 104 scores (13 blocks of 8).
    got = cycles(priced(AttentionShape(1, 1, 100, 40), "split", ONE_AT_A_TIME))
    half = 50 * 104
    assert got["softmax"] == close(half * 3 / 64 + half * 2 / 32 + half / 32 + 6 * 28 + 50 * 8 * (2 / 64 + 1 / 32))
    assert got["rescale"] == close(50 * 40 / 64 + 50 * 40 / 32 + 2 * 28)


def test_matmul_of_ragged_sizes_loads_whole_fractals():
    # 100 x 100 x 40 in fractals of 16: 7 * 7 * 3. L0A and L0B hold whole fractals of 512 bytes (HARDWARE section 6):
    # 7 * 3 of them each, 10752 bytes.
    got = cycles(priced(AttentionShape(1, 1, 100, 40), "split", ONE_AT_A_TIME))
    assert got["qk_matmul"] == close(10752 / 256 + 10752 / 128 + 7 * 7 * 3 + 6)


def test_matmul_of_one_row_loads_a_whole_fractal_row():
    # C8. 1 x 128 x 128: 1 * 8 * 8 fractals and 6; before it K, 32768 / 128, and 8 fractals of Q, 4096 / 256.
    got = cycles(priced(AttentionShape(1, 1, 1, 128, kv_len=128), "split", ONE_AT_A_TIME))
    assert got["qk_matmul"] == close(16 + 256 + 64 + 6)


def test_one_row_is_moved_by_the_one_vector_unit_that_works_on_it():
    # C13. 128 scores on one of the two units: softmax 128 * (3/64 + 2/32 + 1/32) + 168 + 0.5, so the load is 512 bytes.
    got = cycles(priced(AttentionShape(1, 1, 1, 128, kv_len=128), "split", ONE_AT_A_TIME))
    assert got["softmax"] == close(128 * 3 / 64 + 128 * 2 / 32 + 128 / 32 + 6 * 28 + 8 * (2 / 64 + 1 / 32))
    assert got["load_s"] == close((512 + 1950) / 58.6)


def test_a_full_chip_shares_the_bandwidth_of_the_memory():
    # 24 cores ask at once: each gets 1.6e12 * 0.96 / 24 = 64 GB/s = 35.56 bytes a cycle of 1.8 GHz, less than its path
    # carries (78), and still pays for the burst: (32768 + 1950) / 35.56 = 976.4.
    got = cycles(priced(AttentionShape(1, 24, 128, 128), "split", ONE_AT_A_TIME))
    share = 1.6e12 * 0.96 / 24 / 1.8e9
    check_numbers(SPLIT, hbm_bytes_per_s=1.6e12, hbm_efficiency=0.96, cube_cores=24, cube_hz=1.8e9)
    assert [got[n] for n in ("load_q", "load_k", "load_v")] == [close((32768 + 1950) / share)] * 3
    assert got["store_o"] == close((16384 + 1950) / (share / 2))  # of one of the core's two vector units


def test_scores_between_the_cores_stay_in_l2_and_do_not_share_it():
    alone, full = (cycles(priced(AttentionShape(1, n, 128, 128), "split", ONE_AT_A_TIME)) for n in (1, 24))
    for name in ("fixpipe_s", "load_s", "store_p", "load_p", "fixpipe_o", "load_o"):
        assert full[name] == close(alone[name])


def test_packed_heads_make_the_same_block_as_one_head_of_as_many_rows():
    packed = priced(
        AttentionShape(1, 4, 32, 128, kv_heads=1, kv_len=128), "split", ONE_AT_A_TIME.replace(heads_packed=4)
    )
    whole = priced(BLOCK, "split", ONE_AT_A_TIME)
    assert cycles(packed) == {name: close(value) for name, value in cycles(whole).items()}
    assert moved(packed) == moved(whole)
    assert packed.seconds == close(whole.seconds)


def test_heads_that_are_not_packed_load_k_and_v_for_each():
    cost = priced(AttentionShape(1, 4, 32, 128, kv_heads=1, kv_len=128), "split", ONE_AT_A_TIME)
    got = moved(cost)
    assert cost.tasks == 4 and got["load_k"] == got["load_v"] == 4 * HALF and got["load_q"] == HALF


def test_softcap_adds_four_passes_at_the_add_rate_and_two_at_the_exp_rate():
    capped, plain = (
        cycles(priced(AttentionShape(1, 1, 128, 128, softcap=cap), "split", ONE_AT_A_TIME)) for cap in (True, False)
    )
    more = 8192 * 4 / 64 + 8192 * 2 / 32 + 6 * 28  # 512 + 512 + 168
    assert capped["softmax"] - plain["softmax"] == pytest.approx(more, rel=1e-3)
    assert {n: v for n, v in capped.items() if "softmax" not in n} == {
        n: close(v) for n, v in plain.items() if "softmax" not in n
    }


def test_keys_split_between_two_tasks_and_their_combine_step():
    """24 heads, 2 queries, 256 keys: 48 tasks of 128 keys, two for each core; then every vector unit joins one row."""
    shape, tile = AttentionShape(1, 24, 2, 128, kv_len=256), TileConfig(16, 128, 1, 0, split_kv=2)
    c, cost = SPLIT, priced(shape, "split", tile)
    share, burst, sync = 1.6e12 * 0.96 / 24 / 1.8e9, c.burst_half_bytes, 220  # bytes a cycle that a core gets of HBM
    got = cycles(cost)
    chain = (2 * 128 * 2 + burst) / share  # two rows of Q
    chain += (HALF + burst) / share  # K
    chain += got["qk_matmul"] / 2  # of a core's two tasks
    chain += (2 * 128 * 4 + burst) / c.l0c_to_gm_bytes_per_cycle
    chain += sync + (128 * 4 + burst) / c.gm_to_ub_bytes_per_cycle  # each vector unit has one row
    chain += 128 * 3 / 64 + 128 * 2 / 32 + 128 / 32 + 6 * 28 + 8 * (2 / 64 + 1 / 32)  # softmax: 6 + 8 + 4 + 168 + 0.5
    chain += (128 * 2 + burst) / c.ub_to_gm_bytes_per_cycle
    chain += sync + (2 * 128 * 2 + burst) / c.gm_to_l1_bytes_per_cycle
    chain += got["pv_matmul"] / 2
    chain += (2 * 128 * 4 + burst) / c.l0c_to_gm_bytes_per_cycle
    chain += sync + (128 * 4 + burst) / c.gm_to_ub_bytes_per_cycle
    chain += 2 * (128 / 64 + 128 / 32 + 2 * 28)  # rescale, finalize
    partial = 128 * 4 + 32 + 32  # float32 output, and row maximum and row sum, a 32-byte block each
    chain += (partial + burst) / (share / 2)
    combine = 2 * (partial + burst) / c.gm_to_ub_bytes_per_cycle  # both parts of the row, from L2
    combine += 2 * (128 / 64 + 128 / 32 + 8 / 32) + 2 * 3 * 28  # each part: weigh, add, exp of its maximum
    combine += 128 / 64 + 128 / 32 + 2 * 28 + sync  # divide, cast
    combine += (128 * 2 + burst) / (share / 2)
    assert cost.tasks == 48
    assert device_cycles(cost) == close(2 * chain + combine)
    assert cost.launch_seconds == close(5.9e-6 + 24 * 6.083e-7 + 2 * 2e-7)
    assert moved(cost)["load_partials"] == moved(cost)["store_o"] == 2 * 48 * partial
    assert moved(cost)["store_combined"] == 48 * 128 * 2


# A mask tensor ------------------------------------------------------------------------------------------------------


def test_a_bool_mask_on_a_coupled_core_costs_its_bytes_and_two_passes():
    masked, b, sync = AttentionShape(1, 1, 128, 128, mask="bool"), coupled_block(), 30
    cost = priced(masked, "coupled", ONE_AT_A_TIME)
    got = cycles(cost)
    drained = WHOLE / 256  # the first vector op takes S out of L0C: now the mask, no longer the softmax
    mask = SCORES * 2 / 64 + 2 * 2 * 28 + drained
    assert got["mask"] == close(mask) and got["softmax"] == close(b.softmax - drained)
    assert got["load_mask"] == close((SCORES + 2 * 1950) / 110)  # a byte a score, in two bursts of a vector tile each
    assert moved(cost)["load_mask"] == SCORES
    total = b.load + b.load + b.matmul + sync + mask + b.softmax - drained + b.store_p
    total += sync + b.matmul + sync + b.rescale + b.finalize + b.store_o
    assert device_cycles(cost) == close(total)


def test_an_additive_mask_has_the_bytes_of_the_dtype():
    cost = priced(AttentionShape(1, 1, 128, 128, mask="additive"), "coupled", ONE_AT_A_TIME)
    assert moved(cost)["load_mask"] == 2 * SCORES
    assert cycles(cost)["load_mask"] == close((2 * SCORES + 2 * 1950) / 110)


# Unfused kernels ----------------------------------------------------------------------------------------------------


def test_three_kernels_on_a_coupled_core():
    cost = priced(BLOCK, "coupled", ONE_AT_A_TIME.replace(fusion="unfused"))
    b, sync, burst = coupled_block(), 30, 1950
    scores = b.load + b.load + b.matmul + sync + WHOLE / 256  # the vector unit takes S out of L0C
    scores += (WHOLE + burst) / 64  # S to global memory
    work = SCORES * 6 / 64 + SCORES * 2 / 32 + SCORES * 2 / 32 + 10 * 2 * 28 + 128 * 8 * (2 / 64 + 1 / 32)
    softmax = (2 * WHOLE + 2 * burst) / 110 + work + (HALF + burst) / 64  # reads S twice, writes P
    outputs = b.load + b.load + b.matmul + sync + WHOLE / 256 + (HALF + burst) / 64  # P, V
    assert cycles(cost)["softmax"] == close(work)
    assert device_cycles(cost) == close(scores + softmax + outputs)
    assert cost.launches == 3 and cost.launch_seconds == close(3 * (5.9e-6 + 6.083e-7 + 2e-7))


def test_four_kernels_with_a_mask_on_split_cores():
    shape = AttentionShape(1, 1, 128, 128, mask="bool")
    cost = priced(shape, "split", ONE_AT_A_TIME.replace(fusion="unfused"))
    b, c, half, burst = split_block(), SPLIT, SCORES / 2, 1950
    scores = b.load + b.load + b.matmul + b.fixpipe
    mask = (4 * half + burst) / c.gm_to_ub_bytes_per_cycle + (half + burst) / c.gm_to_ub_bytes_per_cycle  # S, the mask
    mask += half * 2 / 64 + 2 * 28 + (4 * half + burst) / c.ub_to_gm_bytes_per_cycle
    softmax = (2 * 4 * half + burst) / c.gm_to_ub_bytes_per_cycle  # S twice
    softmax += half * 6 / 64 + half * 2 / 32 + half * 2 / 32 + 10 * 28 + 64 * 8 * (2 / 64 + 1 / 32) + b.store_p
    outputs = b.load_p + b.load + b.matmul + (HALF + burst) / c.l0c_to_gm_bytes_per_cycle  # O leaves in float16
    assert device_cycles(cost) == close(scores + mask + softmax + outputs)
    assert cost.launches == 4 and cost.launch_seconds == close(4 * (5.9e-6 + 6.083e-7 + 2e-7))


def test_unfused_kernels_move_scores_six_times_with_a_mask():
    shape = AttentionShape(1, 1, 128, 128, mask="bool")
    stages = priced(shape, "split", ONE_AT_A_TIME.replace(fusion="unfused")).stages
    got = {(s.op, s.name): s.bytes for s in stages if s.bytes}
    assert got["qk", "fixpipe_s"] == got["mask", "load_s"] == got["mask", "store_s"] == WHOLE
    assert got["softmax", "load_s"] == 2 * WHOLE and got["softmax", "store_p"] == got["pv", "load_p"] == HALF
    assert got["pv", "fixpipe_o"] == HALF and got["mask", "load_mask"] == SCORES
