"""The page on one call: its numbers are those of the price, and what it recommends is legal and as good as it says."""

import re

import numpy as np
import pytest

import npumodel as npu
from npumodel import cli, units
from npumodel.explain_text import (
    LEAST,
    MOST,
    WIDTH,
    better_devices,
    by_pipe,
    hardware_changes,
    neighbours,
    page,
    plan_changes,
    shares,
)
from npumodel.hardware.spec import NUMBERS
from npumodel.model.durations import CONSTANT_TITLES
from npumodel.model.estimate import estimate, illegal
from npumodel.report_text import Priced, header
from npumodel.search.rules import parse
from npumodel.search.space import lattice

NPU = npu.device("ascend910b2")
SPILLING = NPU.replace(name="spilling", overflow="spill", l1_bytes=65536)
DECODE, SPLIT = "B8,N32,KV8,S1,SKV4096,D128,bool", "B1,N8,KV2,S16,SKV131072,D128,bool"


def full(text, left):
    """A chip with memory for the tensors of this call and these bytes: for some blocks of each core, not for scores."""
    return NPU.replace(name="full", hbm_bytes=npu.AttentionShape.parse(text).tensor_bytes + left)


#: First those that share few compiled functions: of one architecture, with a mask, and fused or not at all, since the
#: scores do not fit into the memory. The others in the slow run.
CASES = {
    "masked": ("B4,N32,S32768,D128,additive", NPU, "128x256 buffers=1 lookahead=3"),
    "decode": (DECODE, full(DECODE, 2**21), "16x256"),
    "split": (SPLIT, full(SPLIT, 2**24), npu.TileConfig(16, 256, heads_packed=4, split_kv=8)),
    "spilling": ("B1,N2,S131072,D128,bool", SPILLING, "128x256"),
    "long": ("B1,N8,S65536,D64,bool", NPU, "32x32 buffers=1 lookahead=0"),
    "plain": ("B4,N32,S4096,D128", NPU, "128x384 buffers=1 lookahead=3"),
    "shorter": ("B4,N32,S4096,D128,additive", NPU, "128x256 buffers=1 lookahead=3"),
    "unfused": ("B2,N4,S1000,D64,bool", NPU, "64x128 unfused"),
    "causal": ("B2,N8,KV2,S700,SKV1500,D80,DV48,causal", NPU, "100x200"),
    "one query": ("B1,N8,KV2,S1,SKV8192,D128,bool", NPU, npu.TileConfig(16, 256, heads_packed=4, split_kv=8)),
    "small": ("B1,N8,S512,D64,bool", NPU, "32x32 buffers=1 lookahead=0"),
}
SLOW = tuple(CASES)[5:]
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
UNFUSED = pytest.param("unfused", marks=pytest.mark.slow)


def case(name):
    """(shape, device, tile) of a case."""
    shape, device, tile = CASES[name]
    return npu.AttentionShape.parse(shape), device, parse(tile) if isinstance(tile, str) else tile


@pytest.fixture(scope="module")
def priced():
    """The price of a case, computed once."""
    known = {}

    def find(name):
        if name not in known:
            known[name] = estimate(*case(name))
        return known[name]

    return find


@pytest.fixture(scope="module")
def pages(priced):
    known = {}

    def find(name):
        if name not in known:
            known[name] = page(Priced(priced(name), "explicit"))
        return known[name]

    return find


def cells(text, first):
    """The cells of the only line whose first cells are these."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    (row,) = [row for row in rows if row[: len(first)] == list(first)]
    return row[len(first) :]


# The page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_page(priced, pages, name):
    lines = pages(name).splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= WIDTH and all(line == line.rstrip() for line in lines)
    title = f"{header(Priced(priced(name), 'explicit'))} predicted time {units.seconds(priced(name).seconds)}"
    assert " ".join(pages(name).split()).startswith(" ".join(title.split()))
    assert not re.search(r"\b(nan|inf|None|Array|float32\()", pages(name))
    for note in priced(name).graph.splitlines():
        assert f"  {note}" in lines


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_that_of_the_price(priced, pages, name):
    cost = priced(name)
    waves = -(-cost.tasks // cost.cores)
    last = cost.tasks % cost.cores or cost.cores
    assert (" split between 8 tasks" in " ".join(pages(name).split())) == (name in ("split", "one query"))
    assert f"{cost.tasks:,} tasks on {cost.cores} of " in pages(name)
    assert re.search(rf" cores: {waves:,} waves?, {last} cores? in the last; {cost.steps:,} steps", pages(name))
    for f in cost.footprints:
        needed, available, used = cells(pages(name), [f.buffer])
        assert (needed, available) == (units.size(f.needed), units.size(f.available))
        assert float(used.split(" %")[0]) == pytest.approx(100 * f.needed / f.available, abs=0.06)
        assert used.endswith("spills") == (f.needed > f.available)


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_are_those_of_the_price(priced, pages, name):
    cost = priced(name)
    for s in cost.stages:
        busy, wait, moved, share = cells(pages(name), [s.name, s.op, s.pipe])
        assert busy == units.seconds(s.busy) and share == units.percent(s.busy / cost.seconds)
        compute = s.pipe in ("CUBE", "VECTOR")
        assert (wait, moved) == ((units.seconds(s.dma_wait), "-") if compute else ("-", units.size(s.bytes)))
    pipes = by_pipe(cost)
    assert sum(len(stages) for stages in pipes.values()) == len(cost.stages)
    for pipe in pipes:
        busy, _, _, share = cells(pages(name), ["all stages", pipe])
        total = sum(s.busy for s in cost.stages if s.pipe == pipe)
        assert busy == units.seconds(total) and float(share[:-2]) <= 100.1


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_and_the_gap_above_it(priced, pages, name):
    cost, text = priced(name), " ".join(pages(name).split())
    assert f"bound by {cost.bound}: " in text
    gap = cost.seconds - cost.lower_bound
    free = gap - (cost.seconds - estimate(cost.shape, cost.chip.replace(sync_cycles=0.0), cost.tile).seconds)
    assert f"{units.seconds(gap)} ({units.percent(gap / cost.lower_bound)}) above the lower bound of" in text
    assert f"cost {units.seconds(gap - free)} of it, pipes that fill, drain and wait for each other" in text
    assert f"one stage after the other: {units.seconds(cost.upper_bound)}" in text


def test_a_call_of_launches():
    cost = estimate(npu.AttentionShape.parse("B1,N1,S16,D16,bool"), NPU, npu.TileConfig(16, 16))
    assert cost.bound == "launch"
    shape, chip, tile = case("decode")
    cost = estimate(shape, chip.replace(launch_base_s=0.01), tile)
    assert cost.bound == "launch" and "\nbound by launch: " in page(Priced(cost, "explicit"))


# Breakdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_breakdown_in_words(priced, pages, name):
    cost = priced(name)
    section = pages(name).split("where the time goes")[1].split("\n\n")[0].split("\n", 1)[1]
    said = {title: int(n) for n, title in re.findall(r"(\d+) % ([^;]+?)(?:;|$)", " ".join(section.split()))}
    assert sum(said.values()) == 100
    by_title = {CONSTANT_TITLES[key]: 100 * seconds / cost.seconds for key, seconds in cost.breakdown.items()}
    for title in said.keys() - {"other"}:
        assert said[title] == pytest.approx(by_title.pop(title), abs=1.01)
    assert said.get("other", 0) == pytest.approx(sum(by_title.values()), abs=1.01)


def test_shares_always_add_up_to_100():
    rng = np.random.default_rng(0)
    for _ in range(300):
        names = rng.permutation(list(CONSTANT_TITLES))[: rng.integers(1, len(CONSTANT_TITLES))]
        seconds = dict(zip(map(str, names), 10 ** rng.uniform(-9, -3, len(names)), strict=True))
        found = shares(seconds)
        assert sum(found.values()) == 100 and min(found.values()) > 0
        assert [n for title, n in found.items() if title != "other"] == sorted(
            [n for title, n in found.items() if title != "other"], reverse=True
        )


# Changes of the plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_differ_in_one_knob(name):
    shape, _, tile = case(name)
    found = neighbours(tile, shape)
    for what, other in found.items():
        (knob,) = [knob for knob in vars(tile) if getattr(tile, knob) != getattr(other, knob)]
        assert what == f"{knob} {getattr(tile, knob)} -> {getattr(other, knob)}"
    assert len(set(found.values())) == len(found)


def test_neighbours_on_and_off_the_lattice():
    shape = npu.AttentionShape.parse("B1,N1,S4096,D64")
    blocks = {tile.block_kv for tile in neighbours(npu.TileConfig(128, 1000), shape).values()} - {1000}
    assert blocks == {896, 1024, 512, 2000} and {896, 1024} <= set(lattice(4096))
    assert {tile.block_q for tile in neighbours(npu.TileConfig(4096, 64), shape).values()} == {2048, 3584, 4096}
    decode = npu.AttentionShape.parse("B1,N1,S1,SKV64,D64")
    assert {tile.block_q for tile in neighbours(npu.TileConfig(128, 64), decode).values()} == {16}


def test_neighbours_only_where_they_can_matter():
    """The order of tasks of one length, split keys of one block or of an unfused call, packed heads without a group,
    pieces of less than a fractal; and of a backward pass what it does not have."""
    knobs = {}
    for text, tile in (
        ("B1,N8,KV2,S512,D64,causal", "64x64"),
        ("B1,N8,S512,D64", "64x512"),
        ("B1,N8,S64,D64", "8x8 unfused"),
    ):
        found = neighbours(parse(tile), npu.AttentionShape.parse(text))
        knobs[tile] = {what.split()[0] for what in found}
    always = {"block_q", "block_kv", "buffers", "lookahead", "fusion", "persistent"}
    assert knobs["64x64"] == always | {"core_order", "split_kv", "heads_packed", "kv_pieces"}
    assert knobs["64x512"] == always | {"kv_pieces"} and knobs["8x8 unfused"] == always
    backward = neighbours(parse("64x64"), npu.AttentionShape.parse("B1,N8,S512,D64,backward"))
    assert {what.split()[0] for what in backward} == {"block_q", "block_kv", "buffers", "lookahead"}
    split = neighbours(npu.TileConfig(64, 64, split_kv=2), npu.AttentionShape.parse("B1,N8,S512,D64"))
    few = neighbours(parse("64x64 cores=3"), npu.AttentionShape.parse("B1,N8,S512,D64"), cores=3)
    assert {what: tile.cores for what, tile in few.items() if "cores" in what} == {
        "cores 3 -> 1": 1, "cores 3 -> 2": 2, "cores 3 -> 4": 4, "cores 3 -> 6": 6
    }  # fmt: skip
    assert few["block_q 64 -> 80"].cores == 3
    assert "fusion fused -> unfused" not in split and {"split_kv 2 -> 1", "split_kv 2 -> 4"} <= set(split)


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_the_plan_are_legal_and_cost_what_they_say(priced, pages, name):
    cost = priced(name)
    fit, refused = plan_changes(cost)
    around = neighbours(cost.tile, cost.shape, cost.cores)
    assert {change.what for change in fit} | set(refused) == set(around)
    assert all(illegal(cost.shape, cost.chip, around[what]) for what in refused)
    for change in fit:
        again = estimate(cost.shape, CASES[name][1], around[change.what])
        assert change.cost.tile == around[change.what] and change.cost.seconds == again.seconds
    assert [c.cost.seconds for c in fit] == sorted(c.cost.seconds for c in fit)
    text = " ".join(pages(name).split())
    assert bool(refused) == ("too large for a buffer: " in text)
    for what in refused:
        assert what in text.split("too large for a buffer: ")[1]
    saved = 1 - fit[0].cost.seconds / cost.seconds
    if saved >= LEAST:
        assert f"plan: {fit[0].what} saves {units.percent(saved)} ({units.seconds(fit[0].cost.seconds)})" in text
        assert f"tile {fit[0].cost.tile.label}" in text
    else:
        assert f"plan: none of {len(fit)} neighbours that fit saves" in text


@pytest.mark.slow
def test_following_the_advice_ends_at_a_tile_without_any(priced):
    cost = priced("small")
    for _ in range(20):
        best = plan_changes(cost)[0][0].cost
        if best.seconds > cost.seconds * (1 - LEAST):
            break
        cost = best
    assert cost.seconds < priced("small").seconds / 1.5
    assert "plan: none of " in page(Priced(cost, "explicit"))


# Changes of the hardware -------------------------------------------------------------------------------------------


def test_every_number_of_a_chip_is_tried_once():
    chip = NPU
    found = dict(better_devices(chip, "float16"))
    names = [what.split()[0].partition(".")[0] for what in found]
    left_out = {"hbm_efficiency", "hbm_bytes", "vector_tile_bytes"}
    assert sorted(names) == sorted(n for n in NUMBERS if getattr(chip, n) is not None and n not in left_out)
    for name, better in zip(names, found.values(), strict=True):
        changed = [n for n in NUMBERS if getattr(chip, n) != getattr(better, n)]
        assert changed == [name]
    assert found["l0c_to_gm_bytes_per_cycle 40.6 -> 81.2"].l0c_to_gm_bytes_per_cycle == 81.2
    assert found["sync_cycles 220 -> 110"].sync_cycles == 110
    assert found["macs_per_cycle.float16 4096 -> 8192"].macs_per_cycle["float32"] == chip.macs_per_cycle["float32"]
    assert found["l1_bytes 512 KiB -> 1 MiB"].l1_bytes == 2 * chip.l1_bytes


@pytest.mark.parametrize("name", ["masked", UNFUSED, "decode", "spilling"])
def test_changes_of_the_hardware_cost_what_they_say(priced, pages, name):
    cost = priced(name)
    found = hardware_changes(cost)
    chips = dict(better_devices(CASES[name][1], cost.shape.dtype))
    assert {change.what for change in found} <= set(chips)
    assert [c.cost.seconds for c in found] == sorted(c.cost.seconds for c in found)
    shown = 0
    for change in found:
        assert change.cost.tile == cost.tile
        assert change.cost.seconds == estimate(cost.shape, chips[change.what], cost.tile).seconds
        saved = 1 - change.cost.seconds / cost.seconds
        if saved >= LEAST and shown < MOST:
            row = cells(pages(name), [change.what])
            gradient = "-" if change.predicted is None else units.percent(1 - change.predicted / cost.seconds)
            assert row == [units.seconds(change.cost.seconds), units.percent(saved), gradient]
            shown += 1
    assert shown


@pytest.mark.parametrize("name", ["masked", UNFUSED, "decode"])
def test_the_gradient_is_the_slope_and_promises_too_much(priced, name):
    """Against finite differences; the time bends upwards in the constants, so that its tangent lies below it."""
    cost, step = priced(name), 0.01
    rates = [c for c in hardware_changes(cost) if c.predicted is not None]
    assert len(rates) > 10
    for change in rates:
        field = change.what.split()[0]
        if field.startswith("macs_per_cycle"):
            factor, near = 2, {"macs_per_cycle": {k: v * (1 + step) for k, v in cost.chip.macs_per_cycle.items()}}
        else:
            factor = getattr(change.cost.chip, field) / getattr(cost.chip, field)
            near = {field: getattr(cost.chip, field) * (1 + step if factor > 1 else 1 / (1 + step))}
        faster = estimate(cost.shape, cost.chip.replace(**near), cost.tile).seconds
        slope = (cost.seconds - faster) * (1 + step) / step
        assert cost.seconds - change.predicted == pytest.approx(slope / 2, abs=2e-3 * cost.seconds), change.what
        assert change.predicted <= change.cost.seconds + 1e-3 * cost.seconds, change.what


# Doors -------------------------------------------------------------------------------------------------------------


def test_the_function(pages):
    shape, device, tile = CASES["long"]
    assert npu.explain(shape, device, tile) == pages("long")
    with npu.target(device):
        assert npu.explain(npu.AttentionShape.parse(shape), tile=parse(tile)) == pages("long")
    assert "(level: small)" in npu.explain(shape, device, "small").splitlines()[0]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"shape": "B4,N32"}, "S, D missing"),
        ({"device": None}, "device: expected one"),
        ({"device": "ascend999"}, "ascend910b2"),
        ({"tile": "huge"}, "'huge'"),
        ({"tile": "4096x4096"}, "does not fit"),
        ({"policy": "luck"}, "policy"),
    ],
)
def test_mistakes_are_those_of_estimate(options, words):
    options = {"shape": "B1,N1,S4096,D128", "device": "ascend910b2"} | options
    for door in (npu.estimate, npu.explain):
        with pytest.raises(ValueError, match=words):
            door(**options)


def test_the_command(pages, capsys):
    shape, device, tile = CASES["long"]
    assert cli.main(["explain", "--shape", shape, "--device", device.name, "--tile", tile]) == 0
    assert capsys.readouterr().out == pages("long") + "\n"
    assert cli.main(["explain", "--shape", "B1,N1,S4096,D128", "--tile", "4096x4096"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "does not fit" in err and "Traceback" not in err
