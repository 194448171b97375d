"""What other hardware would buy: elasticities against finite differences, laws of the curves, and the command."""

import csv
import json
import math

import numpy as np
import pytest

import npumodel as npu
from npumodel.cli import main
from npumodel.model.estimate import slopes
from npumodel.search import space
from npumodel.search.sweep import GRAIN, MEMORIES

SHAPE, DEVICE = "B2,N8,S1024,D128", "ascend910b2"
WHAT = ["l1_bytes", "hbm_bandwidth", "cores", "l0c_to_gm_bytes_per_cycle", "hbm_efficiency"]
#: More of these can only help, whatever the tile.
GAINS = ("l1_bytes", "hbm_bytes_per_s", "cube_cores", "l0c_to_gm_bytes_per_cycle", "hbm_efficiency")


@pytest.fixture(scope="module")
def found():
    return npu.sweep(SHAPE, DEVICE, WHAT, (0.3, 0.71, 1, 1.41, 2))


def check_curves(sweep):
    for number in sweep.numbers:
        points = sweep.series(number.name)
        there = [point for point in points if point.seconds is not None]
        assert there
        for point in there:
            assert math.isfinite(point.seconds) and point.seconds > 0
            assert point.kept is None or point.seconds <= point.kept
            if point.factors[number.name] == 1:
                assert point.seconds == point.kept == sweep.seconds and point.tile == sweep.tile
        if number.name in GAINS:
            seconds = [point.seconds for point in there]
            assert seconds == sorted(seconds, reverse=True), number.name


def test_the_re_tuned_curve_touches_the_kept_one_and_never_rises_with_more(found):
    check_curves(found)


def test_numbers_stay_what_a_spec_can_have(found):
    for point in found.points:
        ((name, value),) = point.values.items()
        npu.device(DEVICE).with_numbers(point.values)
        if name in MEMORIES and point.factors[name] != 1:
            assert value % GRAIN == 0
        if name == "cube_cores":
            assert value == int(value)
        if name == "hbm_efficiency":
            assert value <= 1


def test_a_tile_that_does_not_fit_is_refused_and_re_tuned(found):
    small = found.series("l1_bytes")[0]
    assert small.kept is None and "L1" in small.refused[0]
    assert small.seconds > found.seconds and small.tile != found.tile
    spec = npu.device(DEVICE).with_numbers(small.values)
    assert npu.estimate(SHAPE, spec, small.tile).seconds == pytest.approx(small.seconds, rel=1e-5)


@pytest.mark.parametrize("name", ["l0c_to_gm_bytes_per_cycle", "hbm_bytes_per_s", "cube_hz", "launch_base_s"])
def test_elasticity_is_the_slope_of_the_price(found, name):
    device, step = npu.device(DEVICE), 1e-2
    value = device.numbers[name]
    tiles = space.stacked([found.tile])
    low, high = (
        float(space.exact_seconds([found.shape], tiles, device.with_numbers({name: value * x}))[0])
        for x in (1 - step, 1 + step)
    )
    measured = math.log(high / low) / math.log((1 + step) / (1 - step))
    predicted = slopes(found.shape, device, found.tile).elasticities.numbers[name]
    assert predicted == pytest.approx(measured, abs=3e-3)


def test_elasticities_that_must_be_there(found):
    elasticity = found.elasticities
    assert -1 <= elasticity["l0c_to_gm_bytes_per_cycle"] < -0.3
    assert elasticity["cube_cores"] < 0  # beyond -1 where one core more saves a whole wave
    assert elasticity["l1_bytes"] == 0
    remarks = {number.name: number.remark for number in found.numbers}
    assert "which tiles fit" in remarks["l1_bytes"] and "between 23 and 25" in remarks["cube_cores"]
    assert all(math.isfinite(x) for x in elasticity.values())


def test_elasticities_agree_with_the_breakdown(found):
    cost = npu.estimate(found.shape, DEVICE, found.tile)
    assert cost.elasticities["launch_base_s"] * cost.seconds == pytest.approx(cost.breakdown["launch"], rel=1e-5)
    assert "cube_cores" not in cost.elasticities


def test_devices_that_there_might_be_share_one_compiled_price(found):
    before = space._seconds_jit._cache_size()
    npu.sweep(SHAPE, DEVICE, "l2_bytes", (0.5, 1, 3))
    npu.sweep(SHAPE, npu.device("ascend910b4"), "hbm_bandwidth", (0.5, 1))
    assert space._seconds_jit._cache_size() == before


def test_two_numbers_crossed():
    sweep = npu.sweep(SHAPE, DEVICE, ["l1_bytes", "hbm_bandwidth"], (0.5, 1), grid=True)
    assert [tuple(p.factors.values()) for p in sweep.points] == [(0.5, 0.5), (0.5, 1), (1, 0.5), (1, 1)]
    assert sweep.points[-1].seconds == sweep.seconds
    assert sweep.points[0].seconds >= max(sweep.points[1].seconds, sweep.points[2].seconds)
    assert "l1_bytes x hbm_bytes_per_s" in str(sweep)


@pytest.mark.parametrize(
    "what, factors, options, message",
    [
        ("l1_byte", (1,), {}, "got 'l1_byte'.*l1_bytes"),
        ("ub_to_l1_bytes_per_cycle", (1,), {}, "without this path"),
        ([], (1,), {}, "at least one, got none"),
        (["cores", "cube_cores"], (1,), {}, "distinct"),
        ("l1_bytes", (), {}, "factors"),
        ("l1_bytes", (0, 1), {}, "factors"),
        ("l1_bytes", (math.nan,), {}, "factors"),
        ("l1_bytes", ("2",), {}, "factors"),
        ("l1_bytes", (1,), {"grid": True}, "grid: expected two"),
    ],
)
def test_bad_questions(what, factors, options, message):
    with pytest.raises(ValueError, match=message):
        npu.sweep(SHAPE, DEVICE, what, factors, **options)


def test_a_list_of_calls_is_a_list_of_sweeps():
    one, two = npu.sweep([SHAPE, "B1,N8,S512,D128"], DEVICE, "hbm_bandwidth", (1,))
    assert one.seconds > two.seconds


def test_the_command_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "sweep.csv"
    words = ["sweep", "--shape", SHAPE, "B1,N8,S512,D128", "--device", DEVICE, "--what", "l1_bytes,cores"]
    assert main([*words, "--factors", "0.3,1", "--csv", str(path)]) == 0
    text = capsys.readouterr().out
    assert "L1 too small" in text and "elasticities" in text and "cube_cores 24" in text
    rows = [*csv.DictReader(path.read_text().splitlines())]
    assert len(rows) == 8 and {row["number"] for row in rows} == {"l1_bytes", "cube_cores"}
    assert rows[0]["kept_seconds"] == "" and float(rows[0]["seconds"]) > 0
    assert main([*words, "--factors", "1", "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["format"] == "npumodel.sweep" and len(parsed["sweeps"]) == 2


@pytest.mark.parametrize("options", [["--what", "speed"], ["--what", "l1_bytes", "--factors", "1,x"]])
def test_the_command_explains_mistakes(options, capsys):
    assert main(["sweep", "--shape", SHAPE, "--device", DEVICE, *options]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("device", ["ascend910a", "ascend910b3", "ascend950pr"])
def test_laws_of_the_curves_on_random_calls(device):
    random, spec = np.random.default_rng(0), npu.device(device)
    names = [name for name in GAINS if spec.numbers[name] is not None]
    for _ in range(4):
        heads, length = int(2 ** random.integers(0, 5)), int(2 ** random.uniform(6, 13))
        q_len = int(random.choice([1, length]))
        sizes = {"batch": int(random.integers(1, 5)), "q_heads": heads, "q_len": q_len, "kv_len": length}
        shape = npu.AttentionShape(**sizes, head_dim=128, causal=bool(random.integers(2)))
        check_curves(npu.sweep(shape, spec, names, (0.5, 0.71, 1, 1.41, 2)))
