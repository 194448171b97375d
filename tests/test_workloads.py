"""Matmul and softmax as calls of their own: cycles on paper, bytes and products against plain loops, laws, the event
simulator, and the doors."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedule import simulate

import npumodel as npu
from npumodel.hardware import device
from npumodel.hardware.spec import OPTIONAL
from npumodel.model import estimate as estimate_module
from npumodel.model.cost import WITHOUT_FUSION, Options, parts, price
from npumodel.model.durations import time_constants
from npumodel.model.estimate import arguments, estimate, tasks_and_steps
from npumodel.model.graph import compile_graph
from npumodel.model.stages import stage_table
from npumodel.model.tiling import lowered, problem_of
from npumodel.tile import MatmulTile, SoftmaxTile
from npumodel.workload import AttentionShape, MatmulShape, SoftmaxShape, parse

CHIPS = {"split": device("ascend910b2"), "coupled": device("ascend910a"), "direct": device("ascend950pr")}
#: The rest compiles as long and says as much.
SLOW = [pytest.param(arch, marks=pytest.mark.slow) if arch != "split" else arch for arch in CHIPS]
DRAWS = 256


def close(value):
    return pytest.approx(value, rel=2e-5)


def cycles(cost):
    return {s.name: s.busy * cost.chip.cube_hz for s in cost.stages}


def device_cycles(cost):
    return (cost.seconds - cost.launch_seconds) * cost.chip.cube_hz


# On paper -----------------------------------------------------------------------------------------------------------

HALF, WHOLE = 128 * 128 * 2, 128 * 128 * 4  # bytes of a block of 128 x 128, float16 and float32


def matmul_block(arch):
    """Cycles of every stage of a product of 128 x 128 x 128, from the device's numbers."""
    c = CHIPS[arch]
    load = (HALF + c.burst_half_bytes) / c.gm_to_l1_bytes_per_cycle
    first = HALF / c.l1_to_l0a_bytes_per_cycle + HALF / c.l1_to_l0b_bytes_per_cycle  # the first blocks of L0A and L0B
    paper = {"load_a": load, "load_b": load, "matmul": first + 8 * 8 * 8 + 6}  # 512 fractals and the head
    if arch != "coupled":
        return paper | {"fixpipe_c": (HALF + c.burst_half_bytes) / c.l0c_to_gm_bytes_per_cycle}
    drain = WHOLE / c.l0c_to_ub_bytes_per_cycle  # the vector unit moves C out of L0C
    return paper | {"drain_c": drain, "store_c": (HALF + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle}


@pytest.mark.parametrize("arch", SLOW)
def test_one_matmul_block_is_a_chain_of_the_stages_on_paper(arch):
    cost = estimate(MatmulShape(128, 128, 128), CHIPS[arch], MatmulTile(128, 128, 128, buffers=1))
    paper = matmul_block(arch)
    assert cycles(cost) == {name: close(value) for name, value in paper.items()}
    assert device_cycles(cost) == close(sum(paper.values()) + CHIPS[arch].sync_cycles * (arch == "coupled"))
    assert {f.buffer: f.needed for f in cost.footprints} == {
        "L1": 2 * HALF, "L0A": 2 * HALF, "L0B": 2 * HALF, "L0C": WHOLE, "UB": 32768 * 1.5 * (arch == "coupled"),
        "HBM": 3 * HALF,
    }  # fmt: skip


@pytest.mark.parametrize("arch", SLOW)
def test_one_softmax_block_is_a_chain_of_the_stages_on_paper(arch):
    """64 rows of 512 on one core: read, softmax, write; then in two pieces of 256 columns: read and computed twice."""
    c = CHIPS[arch].replace(cube_cores=1)
    units = c.vector_cores_per_cube
    rows = 64 / units
    elements, tiles = rows * 512, rows * 512 * 4 / 32768
    add, reduce, exp = (
        1 / getattr(c, f"{name}_elements_per_cycle") for name in ("vector", "reduce", "exp")
    )  # cycles an element
    shape = SoftmaxShape(64, 512)
    for block_cols, again in ((512, 0), (256, 1)):
        cost = estimate(shape, c, SoftmaxTile(64, block_cols))
        work = elements * ((4 + 2 * again) * add + 2 * reduce + (1 + again) * exp) + rows * 8 * (2 * add + exp)
        work += (7 + 3 * again) * tiles * c.vector_instr_cycles
        moved = elements * 2
        paper = {
            "load_x": (1 + again) * (moved + tiles * c.burst_half_bytes) / c.gm_to_ub_bytes_per_cycle,
            "softmax": work,
            "store_y": (moved + c.burst_half_bytes) / c.ub_to_gm_bytes_per_cycle,
        }
        assert cycles(cost) == {name: close(value) for name, value in paper.items()}
        assert device_cycles(cost) == close(sum(paper.values()))


# Draws, priced side by side -----------------------------------------------------------------------------------------


@functools.cache
def plain(name):
    """A device that agrees in structure with all of its arch."""
    spec = device(name)
    missing = {field: 1.0 for field in OPTIONAL if getattr(spec, field) is None}
    return spec.replace(name="", soc="", family="", overflow="strict", macs_per_cycle={"float16": 4096.0}, **missing)


def length(rng):
    return int(2 ** rng.uniform(0, 13)) if rng.integers(3) else 128 * int(rng.integers(1, 33))


def draw(kind, rng):
    if kind == "matmul":
        shape = MatmulShape(length(rng), length(rng), length(rng), int(rng.choice([1, 1, 3, 16])))
        sizes = [int(2 ** rng.uniform(0, 9)) for _ in range(3)]
        return shape, MatmulTile(*sizes, buffers=int(rng.integers(1, 5)))
    return SoftmaxShape(length(rng), length(rng)), SoftmaxTile(int(2 ** rng.uniform(0, 7)), length(rng))


def stack(trees):
    return jax.tree.map(lambda *xs: np.asarray(xs, jnp.result_type(float)), *trees)


@functools.cache
def draws(kind, arch):
    """(shapes, tiles, their arrays, devices as arrays): DRAWS of each."""
    rng = np.random.default_rng(sum(map(ord, kind + arch)))
    names = [name for name in npu.devices() if device(name).arch == arch and device(name).overflow == "strict"]
    pairs = [draw(kind, rng) for _ in range(DRAWS)]
    shapes, tiles = ([pair[i] for pair in pairs] for i in (0, 1))
    d = stack([plain(names[int(rng.integers(len(names)))]).replace(l1_bytes=2**30) for _ in pairs])  # nothing spills
    return shapes, tiles, stack([problem_of(s) for s in shapes]), stack(tiles), d


@functools.partial(jax.jit, compiler_options=WITHOUT_FUSION)
def priced(t, p, tile, d):
    return price(t, p, tile, d, Options("float16", False))


@functools.partial(jax.jit, compiler_options=WITHOUT_FUSION)
def slopes(t, p, tile, d):
    return jax.grad(lambda t: price(t, p, tile, d, Options("float16", False, waits=False)).seconds.sum())(t)


KINDS = [
    pytest.param(kind, arch, marks=[pytest.mark.slow] * (arch != "split"))
    for kind, arch in itertools.product(("matmul", "softmax"), CHIPS)
]


@functools.cache
def outcome(kind, arch):
    *_, p, tile, d = draws(kind, arch)
    return jax.device_get(priced(time_constants(d, "float16"), p, tile, d))


@pytest.mark.parametrize("kind,arch", KINDS)
def test_bytes_are_those_of_the_closed_forms(kind, arch):
    """A once for every column block, B for every row block, C once; x once, or twice where a row comes in pieces."""
    shapes, tiles, *_ = draws(kind, arch)
    (kernel,) = outcome(kind, arch).kernels
    for i, (shape, tile) in enumerate(zip(shapes, tiles, strict=True)):
        if kind == "matmul":
            rows, columns = math.ceil(shape.m / tile.block_m), math.ceil(shape.n / tile.block_n)
            a, b, c = (2 * shape.batch * x for x in (shape.m * shape.k, shape.k * shape.n, shape.m * shape.n))
            want = {"load_a": a * columns, "load_b": b * rows, "fixpipe_c": c, "store_c": c}
            least = a + b + c
        else:
            x = 2 * shape.rows * shape.cols
            want = {"load_x": x * (1 + (tile.block_cols < shape.cols)), "store_y": x}
            least = 2 * x
        for name, bytes_ in kernel.bytes.items():
            assert bytes_[i] == pytest.approx(want.get(name, 0), rel=1e-5), (shape, tile, name)
        assert kernel.hbm_bytes[i] >= least * (1 - 1e-5), (shape, tile)
        assert kernel.hbm_bytes[i] <= sum(x[i] for x in kernel.bytes.values()) * (1 + 1e-5), (shape, tile)


@pytest.mark.parametrize("arch", SLOW)
def test_every_product_is_computed_once(arch):
    """With loads from L1 that take no time, the matrix unit is busy for the fractals of every block, edges included."""
    shapes, tiles, p, tile, d = draws("matmul", arch)
    t = time_constants(d, "float16")
    t = t._replace(l1_l0a=0.0 * t.mac, l1_l0b=0.0 * t.mac, mmad=0.0 * t.mac)
    (kernel,) = jax.device_get(priced(t, p, tile, d)).kernels
    share = kernel.traffic.tasks / kernel.traffic.waves
    found = share * kernel.busy["matmul"] / t.mac
    for i, (shape, one) in enumerate(zip(shapes, tiles, strict=True)):
        sides = zip((shape.m, shape.n, shape.k), (one.block_m, one.block_n, one.block_k), strict=True)
        pieces = [[min(block, size - at) for at in range(0, size, block)] for size, block in sides]
        padded = math.prod(sum(16 * math.ceil(piece / 16) for piece in side) for side in pieces)
        assert found[i] == pytest.approx(shape.batch * padded, rel=1e-4), (shape, one)


@pytest.mark.parametrize("kind,arch", KINDS)
def test_time_lies_between_the_busiest_pipe_and_all_in_a_row(kind, arch):
    got = outcome(kind, arch)
    (kernel,) = got.kernels
    assert all(np.isfinite(x).all() and (x >= 0).all() for x in jax.tree.leaves(got))
    pipes: dict = {}
    table = stage_table(compile_graph(False, "fused", kind).kernels[0], arch)
    for stage in table.stages:
        pipes[stage.pipe] = pipes.get(stage.pipe, 0) + kernel.busy[stage.name]
    for busy in (*pipes.values(), kernel.hbm_seconds):
        assert (busy <= kernel.core * (1 + 1e-5)).all()
    assert (kernel.core <= np.maximum(kernel.serial, kernel.hbm_seconds) * (1 + 1e-5)).all()
    assert got.seconds == pytest.approx(kernel.launch + kernel.core, rel=1e-6)


@pytest.mark.parametrize("kind,arch", [KINDS[0], *(pytest.param(*k.values, marks=pytest.mark.slow) for k in KINDS[1:])])
def test_breakdown_sums_to_the_time_and_time_is_homogeneous(kind, arch):
    *_, p, tile, d = draws(kind, arch)
    t = time_constants(d, "float16")
    gradient = jax.device_get(slopes(t, p, tile, d))
    total = sum(np.asarray(a) * b for a, b in zip(t, gradient, strict=True))
    assert all(np.isfinite(x).all() for x in gradient)
    assert total == pytest.approx(outcome(kind, arch).seconds, rel=1e-4)
    twice = priced(jax.tree.map(lambda x: 2 * x, t), p, tile, d).seconds
    assert np.asarray(twice) == pytest.approx(2 * outcome(kind, arch).seconds, rel=1e-5)


# Against the event simulator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", SLOW)
def test_matmul_is_launch_plus_the_simulated_tasks(arch):
    """One core works through all blocks of C, one after the other."""
    chip, rng = CHIPS[arch].replace(cube_cores=1), np.random.default_rng(3)
    kernel = compile_graph(False, "fused", "matmul").kernels[0]

    @jax.jit
    def cut(p, tile, d):
        p, tile = lowered(p, tile, d)
        found = parts(kernel, time_constants(d, "float16"), p, tile, d, Options("float16", False))
        return found.corners.seconds, found.narrow.seconds

    table = stage_table(kernel, arch)
    for i in range(6):
        m, n, k = (int(rng.integers(1, 600)) for _ in range(3))
        shape = MatmulShape(m, n, k, batch=1 + i % 2)
        tile = MatmulTile(*(16 * int(rng.integers(1, 9)) for _ in range(3)), buffers=1 + i % 4)
        total, sync = 0.0, float(chip.sync_cycles / chip.cube_hz)
        widths = cut(*arguments(shape, tile, chip))
        rows, columns, steps = (math.ceil(x / y) for x, y in zip((m, n, k), dataclasses.astuple(tile)[:3], strict=True))
        for row, column in itertools.product(range(rows), range(columns)):
            seconds, corner = widths[column == columns - 1], 2 * (row == rows - 1)
            full, tail = ({name: float(x[corner + j]) for name, x in seconds.items()} for j in (0, 1))
            total += shape.batch * simulate(table, full, tail, steps, tile.buffers, 0, sync).makespan
        cost = estimate(shape, chip, tile)
        assert cost.seconds - cost.launch_seconds == pytest.approx(total, rel=1e-3), (shape, tile)
        assert (cost.tasks, cost.steps) == (shape.batch * rows * columns, shape.batch * rows * columns * steps)


def test_softmax_is_launch_plus_the_simulated_rows():
    chip, tile = CHIPS["split"], SoftmaxTile(8, 1024)
    kernel = compile_graph(False, "fused", "softmax").kernels[0]

    @jax.jit
    def cut(p, tile, d):
        p, tile = lowered(p, tile, d)
        return parts(kernel, time_constants(d, "float16"), p, tile, d, Options("float16", False)).corners.seconds

    table = stage_table(kernel, "split")
    for rows, cols in ((4096, 1024), (1000, 333), (24 * 8, 1000), (25, 1024)):
        shape = SoftmaxShape(rows, cols)
        each = math.ceil(rows / 24)  # of the busiest core
        seconds = cut(*arguments(shape, tile, chip))
        full, tail = ({name: float(x[j]) for name, x in seconds.items()} for j in (0, 1))
        cost = estimate(shape, chip, tile)
        on_core = simulate(table, full, tail, math.ceil(each / 8), 2, 0, 0.0).makespan
        assert cost.seconds - cost.launch_seconds == pytest.approx(max(on_core, cost.hbm_seconds), rel=1e-3), shape
        assert cost.cores == math.ceil(rows / each)


# Memories -----------------------------------------------------------------------------------------------------------


def test_l2_that_holds_the_operands_reads_each_once_and_a_small_one_reads_a_again():
    shape, tile, chip = MatmulShape(4096, 4096, 4096), MatmulTile(128, 256, 128), CHIPS["split"]
    assert estimate(shape, chip, tile).traffic["hbm"] == shape.min_bytes
    small = estimate(shape, chip.replace(l2_bytes=chip.l2_bytes / 64), tile)
    assert shape.min_bytes < small.traffic["hbm"] < small.traffic["gm_l1"] + small.traffic["l0c_gm"]


def test_many_shapes_are_one_compilation():
    chip = CHIPS["split"]
    estimate(MatmulShape(64, 64, 64), chip, MatmulTile(64, 64, 64))
    estimate(SoftmaxShape(64, 64), chip, SoftmaxTile(8, 64))
    before = estimate_module._priced._cache_size()
    for size in (17, 500, 4096):
        estimate(MatmulShape(size, 2 * size, size, batch=2), chip, MatmulTile(16, 128, 48, buffers=3))
        estimate(SoftmaxShape(size, size), chip, SoftmaxTile(3, 1024))
    assert estimate_module._priced._cache_size() == before


def test_tile_that_does_not_fit_names_the_buffer():
    with pytest.raises(ValueError, match="L0C needs 262,144 bytes, there are 131,072"):
        estimate(MatmulShape(512, 512, 64), CHIPS["split"], MatmulTile(256, 256, 64))
    with pytest.raises(ValueError, match="UB needs 393,216 bytes, there are 196,608"):
        estimate(SoftmaxShape(64, 32768), CHIPS["split"], SoftmaxTile(1, 32768))


# Doors --------------------------------------------------------------------------------------------------------------


def test_short_forms_are_read_and_written():
    assert parse("M4096,N4096,K512") == MatmulShape(4096, 4096, 512)
    assert parse("B8 M3 N5 K7 float32") == MatmulShape(3, 5, 7, batch=8, dtype="float32")
    assert parse("R4096,C1000,bfloat16") == SoftmaxShape(4096, 1000, "bfloat16")
    assert isinstance(parse("B1,N2,KV1,S64,D64"), AttentionShape)
    for shape in (MatmulShape(3, 5, 7, 8, "float32"), SoftmaxShape(3, 5)):
        assert type(shape).parse(shape.label) == shape == parse(shape.label)
    assert MatmulTile.parse("128x256x64 buffers=1") == MatmulTile(128, 256, 64, 1)
    assert MatmulTile.parse(MatmulTile(1, 2, 3, 4).label) == MatmulTile(1, 2, 3, 4)
    assert SoftmaxTile.parse("4x4096").label == "4x4096"


@pytest.mark.parametrize(
    "text,why",
    [("M8,N8", "K missing"), ("M8,N8,K6,D3", "cannot read 'D3'"), ("R8", "C missing"), ("R8,R8,C1", "rows is given")],
)
def test_short_forms_that_are_none_say_why(text, why):
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_what_is_out_of_range_is_refused():
    for make, why in (
        (lambda: MatmulShape(0, 1, 1), "m: expected a positive integer, got 0"),
        (lambda: SoftmaxShape(1, 1, "int8"), "dtype: expected one of"),
        (lambda: MatmulTile(0, 1, 1), "block_m: expected a number >= 1, got 0"),
        (lambda: MatmulTile(1, 1, 1, 5), "buffers: expected a number 1..4, got 5"),
        (lambda: MatmulTile.parse("128x128"), "tile: expected a form like '128x256x64'"),
        (lambda: npu.estimate("M8,N8,K8", "ascend910b2", SoftmaxTile(8, 8)), "expected .* a MatmulTile"),
        (lambda: estimate(MatmulShape(8, 8, 8), CHIPS["split"], SoftmaxTile(8, 8)), "goes with a MatmulProblem"),
        (lambda: npu.estimate("M8,N8,K8", "ascend910b2", policy="rule"), "policy: expected none for a matmul"),
        (lambda: npu.trace(MatmulShape(8, 8, 8), "ascend910b2"), "expected attention, got the matmul"),
        (lambda: npu.tune(SoftmaxShape(8, 8), "ascend910b2"), "expected attention, got the softmax"),
    ):
        with pytest.raises(ValueError, match=why):
            make()


@pytest.mark.parametrize(
    "shape,tiles",
    [
        ("R1000,C3000", ("4x4096", "8x1024", "1x4096")),
        pytest.param("M1000,N1000,K1000", ("128x256x128", "128x128x256", "64x64x64"), marks=pytest.mark.slow),
    ],
)
def test_auto_is_no_slower_than_tiles_by_hand(shape, tiles):
    chip = CHIPS["split"]
    best = npu.estimate(shape, chip)
    assert best.seconds <= min(npu.estimate(shape, chip, tile).seconds for tile in tiles) * (1 + 1e-6)
    assert (best.tasks, best.steps) == tasks_and_steps(best.shape, best.tile, chip)
    assert sum(best.breakdown.values()) == pytest.approx(best.seconds, rel=1e-5)
