"""What knowing the lengths of examples, and the next kernel, is worth; and the article's timeline."""

import pytest

import npumodel as npu
from npumodel.model.estimate import estimate
from npumodel.model.trace import timeline

CHIP = npu.device("ascend910b2")
TILE = npu.TileConfig(128, 128)


def test_full_lengths_are_worth_nothing():
    shape = npu.AttentionShape(4, 6, 1024, 64)
    found = npu.hints(shape, CHIP, TILE, kv_lengths=[1024] * 4)
    assert found.valid == found.padded == estimate(shape, CHIP, TILE).seconds
    assert found.lengths == 0


def test_examples_of_one_shorter_length_cost_what_they_cost_unpadded():
    shape = npu.AttentionShape(4, 6, 1024, 64)
    short = npu.AttentionShape(3, 6, 1024, 64, kv_len=300)
    found = npu.hints(shape, CHIP, TILE, kv_lengths=[300, 0, 300, 300])
    assert found.valid == pytest.approx(estimate(short, CHIP, TILE).seconds, rel=1e-6)
    assert found.valid < found.padded


def test_examples_of_several_lengths_share_the_cores():
    """48 tasks for each example on 24 cores: two waves of each, which add up."""
    shape = npu.AttentionShape(3, 6, 1024, 64)
    alone = [estimate(npu.AttentionShape(1, 6, 1024, 64, kv_len=n), CHIP, TILE) for n in (1024, 512, 100)]
    found = npu.hints(shape, CHIP, TILE, kv_lengths=[1024, 100, 512])
    launch = CHIP.launch_base_s + 24 * CHIP.launch_per_core_s + 6 * CHIP.launch_per_task_s
    assert found.valid == pytest.approx(launch + sum(c.seconds - c.launch_seconds for c in alone), rel=1e-5)


def test_no_valid_position_costs_the_launch():
    found = npu.hints("B2,N1,S64,D64", CHIP, TILE, q_lengths=[0, 0])
    assert found.valid == pytest.approx(float(CHIP.launch_base_s), rel=1e-6)


def test_the_first_loads_of_a_core_are_those_of_q_and_the_first_keys():
    shape = npu.AttentionShape(1, 24, 128, 64, kv_len=1024)
    events = timeline(shape, CHIP, TILE).events
    loads = [e for e in events if (e.stage, e.iteration) in (("load_q", -1), ("load_k", 0))]
    assert npu.hints(shape, CHIP, TILE).next_loads == pytest.approx(sum(e.end - e.start for e in loads), rel=1e-5)


@pytest.mark.parametrize("lengths", [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 1.5], [-1, 2, 3, 4], [65, 1, 1, 1]], ids=str)
def test_bad_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match=r"kv_lengths: expected 4 integers \(one an example\) of 0\.\.64, got"):
        npu.hints("B4,N1,S64,D64", CHIP, TILE, kv_lengths=lengths)


@pytest.mark.parametrize(
    "name", ["ascend910b2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("article", "ascend950pr"))]
)
def test_the_articles_five_steps(name):
    """t0 load Q0; t1 Q K; t2 softmax, and the next keys come in; t3 P V, V having come in beside; t4 store O0, and the
    loads of the next task come in. On split cores MTE2 also fetches P, in order: there the next keys are asked for
    before it only if Q K runs a step ahead."""
    chip = npu.device(name)
    shape = npu.AttentionShape(1, int(chip.cube_cores), 256, 64, kv_len=256)
    tile = npu.TileConfig(128, 128, buffers=2, lookahead=1 if chip.arch == "split" else 0)
    events, drained = (timeline(shape, chip, tile.replace(persistent=p)).events for p in (True, False))

    def at(stage, task, iteration, events=events):
        return next(e for e in events if (e.stage, e.task, e.iteration) == (stage, task, iteration))

    chain = [at(*place) for place in (("load_q", 0, -1), ("qk_matmul", 0, 0), ("softmax", 0, 0), ("pv_matmul", 0, 0))]
    assert all(one.end <= other.start * (1 + 1e-6) for one, other in zip(chain, chain[1:], strict=False))
    assert at("load_k", 0, 1).start < at("softmax", 0, 0).end
    assert at("load_v", 0, 0).end <= at("pv_matmul", 0, 0).start * (1 + 1e-6)
    assert at("load_q", 1, -1).start < at("store_o", 0, -1).end
    assert at("load_q", 1, -1, drained).start >= at("store_o", 0, -1, drained).end * (1 - 1e-6)
