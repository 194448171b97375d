"""The backward pass of attention: cycles on paper, bytes and products against plain loops over blocks, laws, and the
event simulator."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from test_schedule import TRANSIENT, draw, reading, simulate, tasks_by_hand
from test_workloads import CHIPS, SLOW, close, cycles, device_cycles, plain, priced, slopes, stack

import npumodel as npu
from npumodel.hardware import device
from npumodel.model import estimate as estimate_module
from npumodel.model.cost import Options, parts
from npumodel.model.durations import AFTER, BEFORE, time_constants
from npumodel.model.estimate import arguments, estimate, illegal, kv_blocks
from npumodel.model.graph import compile_graph
from npumodel.model.stages import stage_table
from npumodel.model.tiling import problem_of
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape, parse

BLOCK = AttentionShape(1, 1, 128, 128, backward=True)
ONE_AT_A_TIME = TileConfig(128, 128, buffers=1, lookahead=0)
SCORES, HALF, WHOLE = 128 * 128, 128 * 128 * 2, 128 * 128 * 4
DRAWS = 192


# On paper -----------------------------------------------------------------------------------------------------------


def block(arch):
    """Cycles of the stages of one block of 128 x 128 x 128, by kind, from the device's numbers."""
    c = CHIPS[arch]
    units, burst = c.vector_cores_per_cube, c.burst_half_bytes
    share, tiles = SCORES / units, SCORES / units * 4 / 32768  # of a vector unit
    gradient = share * 5 / c.vector_elements_per_cycle  # scale, subtract, cast, subtract, cast
    gradient += share * 1 / c.reduce_elements_per_cycle  # P times dP, a two-source op
    gradient += share * 2 / c.exp_elements_per_cycle + 8 * tiles * c.vector_instr_cycles  # exp; divide
    paper = {
        "load": (HALF + burst) / c.gm_to_l1_bytes_per_cycle,
        "matmul": HALF / c.l1_to_l0a_bytes_per_cycle + HALF / c.l1_to_l0b_bytes_per_cycle + 8 * 8 * 8 + 6,
        "stats": (3 * 32 * 128 / units + burst) / c.gm_to_ub_bytes_per_cycle,
        "gradient": gradient,
    }
    if arch == "coupled":
        move = WHOLE / c.l0c_to_ub_bytes_per_cycle  # the vector unit moves S and dP out of L0C, and the gradients
        store = (WHOLE + burst) / c.ub_to_gm_bytes_per_cycle
        return paper | {"gradient": gradient + 2 * move, "put": HALF / 128, "drain": move, "store": store}
    if arch == "direct":
        out = (WHOLE + burst) / c.l0c_to_gm_bytes_per_cycle
        return paper | {"s": WHOLE / units / c.l0c_to_ub_bytes_per_cycle, "put": HALF / units / 128, "add": out}
    out = (WHOLE + burst) / c.l0c_to_gm_bytes_per_cycle
    put = (HALF / units + burst) / c.ub_to_gm_bytes_per_cycle
    return paper | {"s": out, "add": out, "get": (WHOLE / 2 + burst) / c.gm_to_ub_bytes_per_cycle, "put": put}


def chain(arch):
    """Cycles from the first load to the last sum."""
    b, sync = block(arch), CHIPS[arch].sync_cycles
    load, matmul = b["load"], b["matmul"]
    if arch == "split":
        qk = 2 * load + matmul  # Q, K
        dp = max(qk, 4 * load) + matmul  # dO, V
        s = qk + b["s"]
        both = max(s, dp) + b["s"]  # fixpipe: S, then dP
        taken = max(s + sync, b["stats"]) + b["get"]
        taken = max(both + sync, taken) + b["get"]
        p = taken + b["gradient"] + b["put"]
        ds = p + b["put"]
        dv_ready = p + sync + 2 * load  # P, dO
        dv = dv_ready + matmul
        dk_ready = max(dv_ready, ds + sync) + 2 * load  # dS, Q
        dk = max(dv, dk_ready) + matmul
        dq = max(dk, dk_ready + 2 * load) + matmul  # dS, K
        added = max(dv + b["add"], dk) + b["add"]
        return max(added, dq) + b["add"]
    k, v = 3 * load, 4 * load  # Q and dO first, for the task
    qk = k + matmul
    dp = max(qk, v) + matmul
    if arch == "direct":
        ready = max(qk + b["s"], dp) + b["s"]
        gradient = ready + sync + b["gradient"]
    else:
        gradient = dp + sync + b["gradient"]
    p = gradient + b["put"]
    dv = p + sync + matmul
    dk = max(dv, p + b["put"] + sync) + matmul
    dq = dk + matmul
    if arch == "direct":
        added = max(dv + b["add"], dk) + b["add"]
        return max(added, dq) + b["add"]
    drained = [dv + sync + b["drain"]]
    for done in (dk, dq):
        drained.append(max(done + sync, drained[-1]) + b["drain"])
    end = 0.0
    for ready in drained:
        end = max(end, ready) + b["store"]
    return end


#: Stage -> line of the paper.
COMMON = dict.fromkeys(("load_q", "load_k", "load_do", "load_v"), "load")
COMMON |= dict.fromkeys([f"{op}_matmul" for op in ("qk", "dp", "dv", "dk", "dq")], "matmul")
COMMON |= {"load_stats": "stats", "softmax_grad": "gradient", "store_p": "put", "store_ds": "put"}
AGAIN = ("load_p", "load_do_again", "load_ds", "load_q_again", "load_ds_again", "load_k_again")
ADDED = dict.fromkeys(("fixpipe_dv", "fixpipe_dk", "fixpipe_dq"), "add")
LINES = {
    "split": ADDED
    | dict.fromkeys(AGAIN, "load")
    | {"fixpipe_s": "s", "fixpipe_dp": "s", "load_s": "get", "load_dp": "get"},
    "direct": ADDED | {"fixpipe_s": "s", "fixpipe_dp": "s"},
    "coupled": dict.fromkeys(("drain_dv", "drain_dk", "drain_dq"), "drain")
    | dict.fromkeys(("store_dv", "store_dk", "store_dq"), "store"),
}
ONCE = [name for name, _, _ in BEFORE + AFTER]


@pytest.mark.parametrize("arch", SLOW)
def test_one_block_takes_the_cycles_on_paper(arch):
    cost = estimate(BLOCK, CHIPS[arch], ONE_AT_A_TIME)
    found, paper = cycles(cost), block(arch)
    assert {n: v for n, v in found.items() if n not in ONCE} == {
        name: close(paper[line]) for name, line in (COMMON | LINES[arch]).items()
    }
    assert device_cycles(cost) == close(chain(arch) + sum(found[name] for name in ONCE))


def test_what_comes_before_and_after_the_tasks_takes_the_cycles_on_paper():
    """Split, 2 heads of 96 x 1000: 192 rows over 48 vector units, 4 rows each; all of it in one vector tile a unit."""
    c = CHIPS["split"]
    shape = AttentionShape(1, 2, 96, 64, kv_heads=1, kv_len=1000, backward=True)
    cost = estimate(shape, c, ONE_AT_A_TIME)
    share = 4 / 192
    outputs, sums = 192 * 64, 192 * 64 + 1000 * 128  # elements
    hbm = 48 * c.cube_hz / (c.hbm_bytes_per_s * c.hbm_efficiency)  # cycles a byte of a unit if all 48 read

    def move(bytes_, bursts, rate, from_hbm=True):
        return (share * bytes_ + bursts * c.burst_half_bytes) * (max(1 / rate, hbm) if from_hbm else 1 / rate)

    want = {
        "load_do_o": move(2 * outputs * 2, 1, c.gm_to_ub_bytes_per_cycle),
        "delta": share * outputs * (2 / 64 + 2 / 32) + 4 * c.vector_instr_cycles + c.sync_cycles,
        "store_delta": move(192 * 32 + sums * 4, 1, c.ub_to_gm_bytes_per_cycle),
        "load_sums": move(sums * 4, 1, c.gm_to_ub_bytes_per_cycle, from_hbm=False),  # still in L2
        "cast_sums": share * sums * 2 / 64 + 2 * c.vector_instr_cycles + c.sync_cycles,
        "store_grads": move(sums * 2, 1, c.ub_to_gm_bytes_per_cycle),
    }
    found = cycles(cost)
    assert {name: found[name] for name in ONCE} == {name: close(value) for name, value in want.items()}


# Draws, priced side by side -----------------------------------------------------------------------------------------


def draw_call(rng):
    kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 1, 2, 4]))
    q_len, kv_len = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
    shape = AttentionShape(
        int(rng.choice([1, 2, 8])),
        kv_heads * group,
        q_len,
        int(rng.choice([40, 64, 128, 192])),
        kv_heads=kv_heads,
        kv_len=kv_len if rng.integers(2) else q_len,
        v_head_dim=int(rng.choice([64, 128])),
        causal=bool(rng.integers(2)),
        window=(int(rng.integers(2000)), None) if rng.integers(4) == 0 else None,
        softcap=bool(rng.integers(4) == 0),
        backward=True,
    )
    rows, cols = (16 * int(rng.integers(1, 17)) if rng.integers(2) else int(2 ** rng.uniform(2, 8)) for _ in range(2))
    return shape, TileConfig(rows, cols, buffers=1, lookahead=int(rng.integers(4)))


@functools.cache
def draws(arch):
    rng = np.random.default_rng(len(arch))
    names = [name for name in npu.devices() if device(name).arch == arch and device(name).overflow == "strict"]
    pairs = [draw_call(rng) for _ in range(DRAWS)]
    shapes, tiles = ([pair[i] for pair in pairs] for i in (0, 1))
    d = stack([plain(names[int(rng.integers(len(names)))]).replace(l1_bytes=2**30) for _ in pairs])  # nothing spills
    return shapes, tiles, stack([problem_of(s) for s in shapes]), stack(tiles), d


@functools.cache
def outcome(arch):
    *_, p, tile, d = draws(arch)
    return jax.device_get(priced(time_constants(d, "float16"), p, tile, d))


def table(arch, masked=False):
    return stage_table(compile_graph(masked, "fused", "backward").kernels[0], arch)


def pairs_of_blocks(shape, tile):
    """(rows, cols) of every step of one head."""
    begin, end = kv_blocks(shape, tile)
    rows, cols = min(tile.block_q, shape.q_len), min(tile.block_kv, shape.kv_len)
    height = [min(rows, shape.q_len - at) for at in range(0, shape.q_len, rows)]
    width = [min(cols, shape.kv_len - at) for at in range(0, shape.kv_len, cols)]
    return np.array([(height[i], width[j]) for i in range(len(height)) for j in range(begin[i], end[i])]).reshape(-1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_bytes_and_products_are_those_of_every_pair_of_blocks(arch):
    shapes, tiles, p, tile, d = draws(arch)
    t = time_constants(d, "float16")
    free = t._replace(l1_l0a=0.0 * t.mac, l1_l0b=0.0 * t.mac, mmad=0.0 * t.mac)
    (kernel,) = jax.device_get(priced(free, p, tile, d)).kernels
    macs = kernel.traffic.tasks / kernel.traffic.waves / t.mac
    pad = lambda x: 16 * np.ceil(x / 16)  # noqa: E731
    for i, (shape, one) in enumerate(zip(shapes, tiles, strict=True)):
        rows, cols = pairs_of_blocks(shape, one).T.astype(float)
        heads, qk, v = shape.batch * shape.q_heads, shape.head_dim, shape.v_head_dim
        sides = {"qk": (rows, cols, qk), "dp": (rows, cols, v), "dv": (cols, v, rows), "dk": (cols, qk, rows)}
        for op, (a, b, c) in (sides | {"dq": (rows, qk, cols)}).items():
            want = heads * (pad(a) * pad(b) * pad(c)).sum()
            assert macs[i] * kernel.busy[f"{op}_matmul"][i] == pytest.approx(want, rel=1e-4), (shape, one, op)
        sums = {"dv": cols * v, "dk": cols * qk, "dq": rows * qk}
        scores = (rows * cols).sum()
        want = {"load_k": 2 * cols.sum() * qk, "load_v": 2 * cols.sum() * v, "store_p": 2 * scores}
        want |= {"store_ds": 2 * scores, "load_stats": 96 * rows.sum()}
        want |= {f"{kind}_{op}": 4 * x.sum() for op, x in sums.items() for kind in ("fixpipe", "store")}
        if arch != "coupled":
            want |= {"fixpipe_s": 4 * scores, "fixpipe_dp": 4 * scores}
        if arch == "split":
            want |= {"load_q": 2 * rows.sum() * qk, "load_do_again": 2 * rows.sum() * v, "load_ds_again": 2 * scores}
        for name in want.keys() & kernel.bytes.keys():
            assert kernel.bytes[name][i] == pytest.approx(heads * want[name], rel=1e-4, abs=1), (shape, one, name)
        assert shape.flops * 2 == 5 * dataclasses.replace(shape, backward=False).flops or qk != v


@pytest.mark.parametrize("arch", SLOW)
def test_laws_of_time(arch):
    """Finite; no pipe and no memory is busier than the time, which is no more than everything in a row; inputs and
    gradients cross HBM at least once."""
    shapes, tiles, *_ = draws(arch)
    got = outcome(arch)
    (kernel,) = got.kernels
    assert all(np.isfinite(x).all() and (np.asarray(x) >= 0).all() for x in jax.tree.leaves(got))
    pipes: dict = {}
    for stage in table(arch).stages:
        pipes[stage.pipe] = pipes.get(stage.pipe, 0) + kernel.busy[stage.name]
    together = sum(kernel.combine.seconds.values())
    for busy in (*pipes.values(), kernel.hbm_seconds):
        assert (busy + together <= kernel.core * (1 + 2e-5)).all()
    assert (kernel.core <= np.maximum(kernel.serial, kernel.hbm_seconds + together) * (1 + 2e-5)).all()
    for i, (shape, one) in enumerate(zip(shapes, tiles, strict=True)):
        begin, end = kv_blocks(shape, one)
        if (end > begin).all():
            assert kernel.hbm_bytes[i] >= shape.min_bytes * (1 - 1e-5), (shape, one)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_breakdown_sums_to_the_time(arch):
    *_, p, tile, d = draws(arch)
    t = time_constants(d, "float16")
    gradient = jax.device_get(slopes(t, p, tile, d))
    assert all(np.isfinite(x).all() for x in gradient)
    total = sum(np.asarray(a) * b for a, b in zip(t, gradient, strict=True))
    assert total == pytest.approx(outcome(arch).seconds, rel=1e-4)


# Against the event simulator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", SLOW)
def test_schedule_matches_the_event_simulator(arch, masked):
    rng, found = np.random.default_rng(11), table(arch, masked)
    run = reading(found, TRANSIENT, waits=False)
    for i in range(20):
        full, tail, buffers, lookahead, sync = draw(rng, found)
        steps = int(rng.integers(1, 9) if i % 2 else rng.integers(1, 400))
        got, *_ = run(full, tail, steps, buffers, lookahead, sync)
        want = simulate(found, full, tail, steps, buffers, lookahead, sync)
        assert float(got.makespan) == pytest.approx(want.makespan, rel=1e-3), (steps, buffers, lookahead)


@pytest.mark.parametrize("arch", SLOW)
def test_price_is_launch_and_both_ends_and_the_simulated_tasks(arch):
    """With one head for each core, a core works through the q blocks of its head, one after the other."""
    chip, rng, found = CHIPS[arch], np.random.default_rng(9), table(arch)
    kernel, options = compile_graph(False, "fused", "backward").kernels[0], Options("float16", False)
    cut = jax.jit(lambda p, tile, d: parts(kernel, time_constants(d, "float16"), p, tile, d, options).corners)
    for i in range(6):
        q_len, kv_len = int(rng.integers(1, 900)), int(rng.integers(300, 1200))
        v, causal = (64, 128)[i % 2], bool(i % 2)
        heads = int(chip.cube_cores)
        shape = AttentionShape(1, heads, q_len, 64, kv_len=kv_len, causal=causal, backward=True, v_head_dim=v)
        tile = TileConfig(16 * int(rng.integers(1, 9)), 16 * int(rng.integers(1, 9)), 1, i % 4)
        seconds = cut(*arguments(shape, tile, chip)).seconds
        full, tail = ([{n: float(x[2 * row + j]) for n, x in seconds.items()} for row in (0, 1)] for j in (0, 1))
        total, sync = 0.0, float(chip.sync_cycles / chip.cube_hz)
        for steps, ragged, to_end in tasks_by_hand(shape, tile):
            last = (tail if to_end else full)[ragged]
            if steps:
                total += simulate(found, full[ragged], last, steps, tile.buffers, tile.lookahead, sync).makespan
        cost = estimate(shape, chip, tile)
        total = max(total, cost.hbm_seconds) + sum(s.busy for s in cost.stages if s.name in ONCE)
        assert cost.seconds - cost.launch_seconds == pytest.approx(total, rel=1e-3), (shape, tile)


# Doors --------------------------------------------------------------------------------------------------------------


def test_shape_says_that_it_is_the_backward_pass():
    shape = parse("B2,N8,KV2,S512,D128,causal,backward")
    assert shape.backward and shape.label == "B2 N8 KV2 S512 D128 float16 causal backward"
    assert AttentionShape.parse(shape.label) == shape
    forward = dataclasses.replace(shape, backward=False)
    assert 2 * shape.flops == 5 * forward.flops
    q, kv = 2 * 8 * 512 * 128 * 2, 2 * 2 * 512 * 128 * 2
    assert (forward.min_bytes, shape.min_bytes) == (2 * q + 2 * kv, 4 * q + 4 * kv)
    with pytest.raises(ValueError, match="backward: expected a call without v_in_k"):
        AttentionShape(1, 1, 8, 576, v_head_dim=512, v_in_k=True, backward=True)


def test_knobs_that_it_does_not_have_are_refused():
    shape, chip = AttentionShape(1, 4, 256, 64, kv_heads=1, backward=True), CHIPS["split"]
    for knob, value in (("fusion", "unfused"), ("split_kv", 2), ("heads_packed", 4)):
        with pytest.raises(ValueError, match=f"{knob}: expected .* for the backward pass, got {value!r}"):
            estimate(shape, chip, ONE_AT_A_TIME.replace(**{knob: value}))
    assert illegal(shape, chip, ONE_AT_A_TIME) == []
    with pytest.raises(ValueError, match="fusion: expected 'fused' for the backward pass"):
        compile_graph(False, "partly", "backward")


def test_many_backward_shapes_are_one_compilation():
    chip = CHIPS["split"]
    estimate(BLOCK, chip, ONE_AT_A_TIME)
    before = estimate_module._priced._cache_size()
    for size in (17, 512, 4096):
        estimate(AttentionShape(2, 8, size, 64, kv_heads=2, causal=True, backward=True), chip, TileConfig(64, 256))
    assert estimate_module._priced._cache_size() == before


def test_vendors_tile_fills_l1_of_a_910b():
    """512 x 512 x 128 in float16: the template's own plan of L1 takes all of its 512 KiB (queryBufL1, keyBufL1, and
    dsBufL1 twice)."""
    shape = AttentionShape(2, 4, 4096, 128, backward=True)
    feet = {f.buffer: f for f in estimate(shape, CHIPS["split"], TileConfig(512, 512, buffers=1)).footprints}
    assert feet["L1"].needed == 4 * 128 * 1024 == feet["L1"].available
    assert math.isclose(feet["UB"].needed, 5 * 32768 + 256 * 96)


@pytest.mark.slow
def test_auto_and_trace_take_the_backward_pass():
    cost = npu.estimate("B1,N8,S1024,D64,backward", "ascend910b2")
    run = npu.trace(cost.shape, "ascend910b2", cost.tile)
    assert run.complete and run.shown_seconds == pytest.approx(cost.seconds, rel=0.02)
    assert [e.stage for e in run.events][:3] == [name for name, _, _ in BEFORE]
    assert [e.stage for e in run.events][-3:] == [name for name, _, _ in AFTER]
    assert npu.estimate("B1,N8,S1024,D64", "ascend910b2").seconds < cost.seconds
