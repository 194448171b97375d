"""Hand-counted cases for the event simulator: the numbers in the comments are added on paper."""

import random
from fractions import Fraction

import pytest
from event_simulator import DeadlockError, Event, SimulationError, Stage, simulate


def times(result, name):
    """Return the (start, end) pairs of a stage in the order of execution."""
    return [(e.start, e.end) for e in result.events if e.name == name]


def play(stages, durations, steps, lookahead=0, depths=None, tail=None, **more):
    """Simulate with a tail as long as the other iterations unless told otherwise."""
    return simulate(stages, durations, durations if tail is None else tail, steps, lookahead, depths or {}, **more)


LOAD_MUL = [Stage("load", "mte", buffer="b", freed_by="mul"), Stage("mul", "cube", waits=("load",))]

ATTENTION = [
    Stage("qk", "cube"),
    Stage("softmax", "vector", waits=("qk",), group="back"),
    Stage("pv", "cube", waits=("softmax",), group="back"),
]
ATTENTION_TIMES = {"qk": 3, "softmax": 4, "pv": 2}


# --- one pipe ------------------------------------------------------------------------------------------------------


def test_single_stage():
    """4 steps of 2 s in a row: 0-2, 2-4, 4-6, 6-8."""
    result = play([Stage("a", "p")], {"a": 2}, 4, compute={"a"})
    assert result.events == [Event("a", i, "p", 2 * i, 2 * i + 2) for i in range(4)]
    assert (result.makespan, result.busy, result.wait) == (8, {"a": 8}, {"a": 0})


def test_single_stage_tail():
    """3 steps of 2 s and a tail of 1 s: 3*2 + 1 = 7."""
    result = play([Stage("a", "p")], {"a": 2}, 4, tail={"a": 1})
    assert times(result, "a") == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert (result.makespan, result.busy, result.wait) == (7, {"a": 7}, {})


def test_only_step_is_the_tail():
    """With n = 1 the only iteration is the ragged one; its usual duration is not needed."""
    assert simulate([Stage("a", "p")], {}, {"a": 1}, 1, 0, {}).makespan == 1


def test_fractions_stay_exact():
    """Three thirds are one."""
    assert play([Stage("a", "p")], {"a": Fraction(1, 3)}, 3).makespan == 1


# --- load and multiply with a counted buffer -----------------------------------------------------------------------


def test_depth_one_serialises():
    """load 2, mul 3, one slot: every step takes 2 + 3 = 5, in all 15; each mul waits 2 for its load."""
    result = play(LOAD_MUL, {"load": 2, "mul": 3}, 3, depths={"b": 1}, compute={"mul"})
    assert times(result, "load") == [(0, 2), (5, 7), (10, 12)]
    assert times(result, "mul") == [(2, 5), (7, 10), (12, 15)]
    assert (result.makespan, result.busy, result.wait) == (15, {"load": 6, "mul": 9}, {"mul": 6})


def test_depth_two_overlaps_mul_bound():
    """load 2, mul 3, two slots: load 2 needs the slot of mul 0 (at 5); mul runs 2 + 3*3 = 11 without gaps."""
    result = play(LOAD_MUL, {"load": 2, "mul": 3}, 3, depths={"b": 2}, compute={"mul"})
    assert times(result, "load") == [(0, 2), (2, 4), (5, 7)]
    assert times(result, "mul") == [(2, 5), (5, 8), (8, 11)]
    assert (result.makespan, result.wait) == (11, {"mul": 2})


def test_depth_two_overlaps_load_bound():
    """load 3, mul 2, two slots: loads back to back up to 9, last mul 9-11; waits 3 + (6-5) + (9-8) = 5."""
    result = play(LOAD_MUL, {"load": 3, "mul": 2}, 3, depths={"b": 2}, compute={"mul"})
    assert times(result, "load") == [(0, 3), (3, 6), (6, 9)]
    assert times(result, "mul") == [(3, 5), (6, 8), (9, 11)]
    assert (result.makespan, result.wait) == (11, {"mul": 5})


def test_depth_two_tail():
    """As mul bound, but the tail has load 1, mul 1: load 2 is 5-6, mul 2 is 8-9."""
    result = play(LOAD_MUL, {"load": 2, "mul": 3}, 3, depths={"b": 2}, tail={"load": 1, "mul": 1})
    assert times(result, "load")[2] == (5, 6)
    assert times(result, "mul")[2] == (8, 9)
    assert result.busy == {"load": 5, "mul": 7}


def test_events_are_in_order_of_start():
    """Depth 2, mul bound: starts 0, 2 (mul 0), 2 (load 1), 5 (mul 1), 5 (load 2), 8; ties in program order."""
    result = play(LOAD_MUL, {"load": 2, "mul": 3}, 3, depths={"b": 2})
    assert [(e.name, e.iteration) for e in result.events] == [
        ("load", 0), ("mul", 0), ("load", 1), ("mul", 1), ("load", 2), ("mul", 2)]


def test_buffer_shared_by_two_stages():
    """k and v take turns on one slot: k0 0-1, qk0 1-3, v0 3-4, pv0 4-6, k1 6-7, qk1 7-9, v1 9-10, pv1 10-12."""
    stages = [Stage("k", "mte", buffer="kv", freed_by="qk"), Stage("v", "mte", buffer="kv", freed_by="pv"),
              Stage("qk", "cube", waits=("k",)), Stage("pv", "cube", waits=("v",))]
    result = play(stages, {"k": 1, "v": 1, "qk": 2, "pv": 2}, 2, depths={"kv": 1})
    assert times(result, "k") == [(0, 1), (6, 7)]
    assert times(result, "v") == [(3, 4), (9, 10)]
    assert result.makespan == 12


# --- lookahead on a shared pipe ------------------------------------------------------------------------------------


def test_lookahead_zero():
    """Cube: qk0 pv0 qk1 pv1 qk2 pv2; every step is a chain of 3 + 4 + 2 = 9, in all 27."""
    result = play(ATTENTION, ATTENTION_TIMES, 3, 0, compute={"qk", "softmax", "pv"})
    assert times(result, "qk") == [(0, 3), (9, 12), (18, 21)]
    assert times(result, "softmax") == [(3, 7), (12, 16), (21, 25)]
    assert times(result, "pv") == [(7, 9), (16, 18), (25, 27)]
    assert result.wait == {"qk": 0, "softmax": 0, "pv": 0}


def test_lookahead_one():
    """Cube: qk0 qk1 pv0 qk2 pv1 pv2.

    qk0 0-3, qk1 3-6, sm0 3-7, pv0 7-9, sm1 7-11, qk2 9-12, pv1 12-14, sm2 12-16, pv2 16-18.
    """
    result = play(ATTENTION, ATTENTION_TIMES, 3, 1)
    assert times(result, "qk") == [(0, 3), (3, 6), (9, 12)]
    assert times(result, "softmax") == [(3, 7), (7, 11), (12, 16)]
    assert times(result, "pv") == [(7, 9), (12, 14), (16, 18)]
    assert result.makespan == 18
    cube = [(e.name, e.iteration) for e in result.events if e.pipe == "cube"]
    assert cube == [("qk", 0), ("qk", 1), ("pv", 0), ("qk", 2), ("pv", 1), ("pv", 2)]


def test_lookahead_two():
    """Cube: qk0 qk1 qk2 pv0 pv1 pv2.

    qk 0-3, 3-6, 6-9; softmax 3-7, 7-11, 11-15; pv0 9-11 (cube is free at 9), pv1 11-13, pv2 15-17.
    """
    result = play(ATTENTION, ATTENTION_TIMES, 3, 2)
    assert times(result, "qk") == [(0, 3), (3, 6), (6, 9)]
    assert times(result, "softmax") == [(3, 7), (7, 11), (11, 15)]
    assert times(result, "pv") == [(9, 11), (11, 13), (15, 17)]
    assert result.makespan == 17


def test_lookahead_beyond_the_steps():
    """With 3 steps every lookahead >= 2 gives the same order."""
    assert play(ATTENTION, ATTENTION_TIMES, 3, 9) == play(ATTENTION, ATTENTION_TIMES, 3, 2)


def test_lookahead_one_tail():
    """Tail of 1 s each: qk2 9-10, pv1 11-13 (softmax 1 ends at 11), softmax 2 11-12, pv2 13-14."""
    result = play(ATTENTION, ATTENTION_TIMES, 3, 1, tail={"qk": 1, "softmax": 1, "pv": 1})
    assert times(result, "qk")[2] == (9, 10)
    assert times(result, "softmax")[2] == (11, 12)
    assert times(result, "pv")[1:] == [(11, 13), (13, 14)]


# --- start and end of the task -------------------------------------------------------------------------------------

TASK = [
    Stage("load_q", "mte", when="task_start"),
    Stage("load_k", "mte"),
    Stage("qk", "cube", waits=("load_q", "load_k")),
    Stage("pv", "cube", waits=("qk",), group="back"),
    Stage("norm", "vector", waits=("pv",), when="task_end"),
    Stage("store", "mte", waits=("norm",), when="task_end"),
]
TASK_TIMES = {"load_q": 2, "load_k": 1, "qk": 3, "pv": 1, "norm": 2, "store": 3}


def test_task_start_and_end():
    """load_q 0-2, load_k 2-3 3-4, qk0 3-6, pv0 6-7, qk1 7-10, pv1 10-11, norm 11-13, store 13-16.

    The tail durations of the start and end stages are not used.  Only qk0 waits for transfers: 3 - 0 = 3.
    """
    tail = TASK_TIMES | {"load_q": 100, "norm": 100, "store": 100}
    result = play(TASK, TASK_TIMES, 2, tail=tail, compute={"qk", "pv", "norm"})
    assert times(result, "load_k") == [(2, 3), (3, 4)]
    assert times(result, "qk") == [(3, 6), (7, 10)]
    assert result.events[0] == Event("load_q", -1, "mte", 0, 2)
    assert result.events[-2:] == [Event("norm", -1, "vector", 11, 13), Event("store", -1, "mte", 13, 16)]
    assert result.makespan == 16
    assert result.wait == {"qk": 3, "pv": 0, "norm": 0}


def test_task_end_waits_for_the_last_iteration():
    """a 5 s (2 steps, 0-10); end stage on an idle pipe must wait for a[1], not a[0]."""
    result = play([Stage("a", "p"), Stage("out", "q", waits=("a",), when="task_end")], {"a": 5, "out": 1}, 2)
    assert times(result, "out") == [(10, 11)]


def test_wait_through_start_stages():
    """init (compute, 1) -> move (2) -> mul: mul starts at 3; wait 3 - 1 = 2, for init is upstream of it."""
    stages = [Stage("init", "vector", when="task_start"), Stage("move", "mte", waits=("init",), when="task_start"),
              Stage("mul", "cube", waits=("move",))]
    result = play(stages, {"init": 1, "move": 2, "mul": 5}, 2, compute={"init", "mul"})
    assert times(result, "mul") == [(3, 8), (8, 13)]
    assert result.wait == {"init": 0, "mul": 2}


# --- latency of hand-overs -----------------------------------------------------------------------------------------


def test_sync_latency():
    """a 0-2, 2-4; b needs 5 s more after a: b0 7-8, b1 max(4+5, 8) = 9-10; wait of b: 7-2 and 9-8, 6 in all."""
    stages = [Stage("a", "p"), Stage("b", "q", waits=("a",))]
    result = play(stages, {"a": 2, "b": 1}, 2, sync={"b": 5}, compute={"a", "b"})
    assert times(result, "b") == [(7, 8), (9, 10)]
    assert result.wait == {"a": 0, "b": 6}


def test_sync_runs_while_the_pipe_is_busy():
    """x occupies q for 0-10; the signal of a arrives at 2 + 5 = 7, so b follows x at once: 10-11."""
    stages = [Stage("a", "p"), Stage("x", "q"), Stage("b", "q", waits=("a",))]
    assert times(play(stages, {"a": 2, "x": 10, "b": 1}, 1, sync={"b": 5}), "b") == [(10, 11)]


def test_sync_does_not_apply_to_buffers_or_pipe_order():
    """load has no waits, so its sync changes nothing: still 15 as without."""
    assert play(LOAD_MUL, {"load": 2, "mul": 3}, 3, depths={"b": 1}, sync={"load": 100}).makespan == 15


def test_sync_after_the_last_of_several_waits():
    """a 2, b 4, c waits for both with sync 1: starts at max(2, 4) + 1 = 5."""
    stages = [Stage("a", "p"), Stage("b", "q"), Stage("c", "r", waits=("a", "b"))]
    assert times(play(stages, {"a": 2, "b": 4, "c": 1}, 1, sync={"c": 1}), "c") == [(5, 6)]


# --- deadlocks and bad input ---------------------------------------------------------------------------------------

KV = [
    Stage("load", "mte", buffer="kv", freed_by="pv"),
    Stage("qk", "cube", waits=("load",)),
    Stage("pv", "cube", waits=("qk",), group="back"),
]
KV_TIMES = {"load": 1, "qk": 2, "pv": 3}


def test_deadlock_names_the_blocked_instruction():
    """Lookahead 1 puts qk1 before pv0, but load 1 needs the only slot, which pv0 gives back."""
    with pytest.raises(DeadlockError) as error:
        play(KV, KV_TIMES, 3, 1, depths={"kv": 1})
    assert str(error.value) == (
        "deadlock at time 3: load[1] on pipe 'mte' waits for a slot of buffer 'kv' "
        "(depth 1, held by load[0] until pv); qk[1] on pipe 'cube' waits for load[1]")


def test_enough_depth_for_the_lookahead():
    """load0 0-1, load1 1-2, qk0 1-3, qk1 3-5, pv0 5-8, load2 8-9, qk2 9-11, pv1 11-14, pv2 14-17.

    qk waits 1 for load 0 and 9 - 8 = 1 for load 2.
    """
    result = play(KV, KV_TIMES, 3, 1, depths={"kv": 2}, compute={"qk", "pv"})
    assert times(result, "load") == [(0, 1), (1, 2), (8, 9)]
    assert times(result, "qk") == [(1, 3), (3, 5), (9, 11)]
    assert times(result, "pv") == [(5, 8), (11, 14), (14, 17)]
    assert result.wait == {"qk": 2, "pv": 0}


def test_no_deadlock_with_a_single_step():
    """One step never needs a second slot: 1 + 2 + 3 = 6."""
    assert play(KV, KV_TIMES, 1, 1, depths={"kv": 1}).makespan == 6


def test_buffer_that_nobody_frees():
    """Two slots serve two steps; the third blocks."""
    stages = [Stage("a", "p", buffer="b")]
    assert play(stages, {"a": 1}, 2, depths={"b": 2}).makespan == 2
    with pytest.raises(DeadlockError, match=r"a\[2\] on pipe 'p' waits for a slot .* until never"):
        play(stages, {"a": 1}, 3, depths={"b": 2})


def test_circular_wait():
    """a waits for b, b waits for a."""
    stages = [Stage("a", "p", waits=("b",)), Stage("b", "q", waits=("a",))]
    with pytest.raises(DeadlockError, match=r"a\[0\] .* waits for b\[0\]; b\[0\] .* waits for a\[0\]"):
        play(stages, {"a": 1, "b": 1}, 1)


def test_slot_given_back_before_it_is_taken():
    """free ends at 1, long before a starts at 5 and takes the slot."""
    stages = [Stage("late", "r"), Stage("a", "p", waits=("late",), buffer="b", freed_by="free"), Stage("free", "q")]
    with pytest.raises(SimulationError, match="has not taken yet"):
        play(stages, {"late": 5, "a": 1, "free": 1}, 1, depths={"b": 1})


A = Stage("a", "p")


@pytest.mark.parametrize("stages, changes", [
    ([A, A], {}),
    ([Stage("a", "p", waits=("b",))], {}),
    ([Stage("a", "p", when="never")], {}),
    ([Stage("a", "p", group="middle")], {}),
    ([Stage("a", "p", buffer="b")], {}),
    ([Stage("a", "p", buffer="b")], {"depths": {"b": 0}}),
    ([Stage("a", "p", buffer="b", freed_by="z")], {"depths": {"b": 1}}),
    ([Stage("a", "p", freed_by="a")], {}),
    ([A, Stage("b", "p", waits=("a",), when="task_start")], {}),
    ([A], {"steps": 0}),
    ([A], {"lookahead": -1}),
    ([A], {"durations": {}}),
    ([A], {"tail_durations": {}}),
    ([A], {"durations": {"a": -1}}),
    ([A], {"tail_durations": {"a": float("nan")}}),
    ([A], {"sync": {"z": 1}}),
    ([A], {"compute": {"z"}}),
])
def test_bad_input(stages, changes):
    """Every one of these is refused before anything is played."""
    good = {"durations": {"a": 1, "b": 1}, "tail_durations": {"a": 1, "b": 1}, "steps": 2, "lookahead": 0, "depths": {}}
    with pytest.raises(ValueError):
        simulate(stages, **(good | changes))


# --- accounting of exposed waits -----------------------------------------------------------------------------------

MOVED = [
    Stage("qk", "cube"),
    Stage("softmax", "vector", waits=("qk",), group="back"),
    Stage("move", "mte", waits=("softmax",), group="back"),
    Stage("pv", "cube", waits=("move",), group="back"),
]
MOVED_TIMES = {"qk": 3, "softmax": 4, "move": 1, "pv": 2}


def test_wait_is_counted_from_the_upstream_compute_stage():
    """Lookahead 1: qk 0-3 3-6, softmax 3-7 7-11, move 7-8 11-12, pv 8-10 12-14.

    pv0 waits 8 - max(6, 7) = 1, pv1 12 - max(10, 11) = 1; without softmax as compute 8 - 6 and 12 - 10, 4 in all.
    """
    result = play(MOVED, MOVED_TIMES, 2, 1, compute={"qk", "softmax", "pv"})
    assert times(result, "pv") == [(8, 10), (12, 14)]
    assert result.wait == {"qk": 0, "softmax": 0, "pv": 2}
    assert play(MOVED, MOVED_TIMES, 2, 1, compute={"pv"}).wait == {"pv": 4}


def test_wait_includes_the_sync_latency():
    """As above with half a second in front of pv: pv 8.5-10.5 12.5-14.5, waits 1.5 + 1.5 = 3."""
    result = play(MOVED, MOVED_TIMES, 2, 1, sync={"pv": 0.5}, compute={"qk", "softmax", "pv"})
    assert times(result, "pv") == [(8.5, 10.5), (12.5, 14.5)]
    assert result.wait["pv"] == 3


def test_slot_freed_by_compute_is_not_a_wait():
    """qk 0-1, softmax 1-5, qk1 at 5 when softmax gives back the slot: 5 - max(1, 5) = 0."""
    stages = [Stage("qk", "cube", buffer="s", freed_by="softmax"), Stage("softmax", "vector", waits=("qk",))]
    result = play(stages, {"qk": 1, "softmax": 4}, 2, depths={"s": 1}, compute={"qk", "softmax"})
    assert times(result, "qk") == [(0, 1), (5, 6)]
    assert result.wait == {"qk": 0, "softmax": 0}


def test_slot_freed_by_a_transfer_is_a_wait():
    """The same with a copy instead of softmax: 5 - 1 = 4."""
    stages = [Stage("qk", "cube", buffer="s", freed_by="copy"), Stage("copy", "mte", waits=("qk",))]
    assert play(stages, {"qk": 1, "copy": 4}, 2, depths={"s": 1}, compute={"qk"}).wait == {"qk": 4}


def test_slot_that_is_needed_is_the_one_of_iteration_i_minus_depth():
    """Two slots: qk 0-1 1-2, softmax 1-5 5-9 9-13, qk2 at 5 takes the slot of softmax 0 (not 1): wait 0."""
    stages = [Stage("qk", "cube", buffer="s", freed_by="softmax"), Stage("softmax", "vector", waits=("qk",))]
    result = play(stages, {"qk": 1, "softmax": 4}, 3, depths={"s": 2}, compute={"qk", "softmax"})
    assert times(result, "qk") == [(0, 1), (1, 2), (5, 6)]
    assert result.wait == {"qk": 0, "softmax": 0}
    assert result.makespan == 13


def test_of_two_free_slots_the_older_one_counts():
    """load 0-1 1-2 2-12 (tail 10), qk 1-2 2-3 12-13, softmax 2-6 6-10: both slots are free when qk2 starts.

    Needed is that of softmax 0, given back at 6: waits 1 + 0 + (12 - max(3, 6)) = 7.
    """
    stages = [Stage("load", "mte"), Stage("qk", "cube", waits=("load",), buffer="s", freed_by="softmax"),
              Stage("softmax", "vector", waits=("qk",))]
    usual = {"load": 1, "qk": 1, "softmax": 4}
    result = play(stages, usual, 3, depths={"s": 2}, tail=usual | {"load": 10}, compute={"qk", "softmax"})
    assert times(result, "qk") == [(1, 2), (2, 3), (12, 13)]
    assert result.wait == {"qk": 7, "softmax": 0}


def test_wait_beyond_the_slot():
    """load 0-4 4-8; qk 4-5, softmax 5-7 frees the slot at 7, qk1 at 8: waits 4 - 0 and 8 - max(5, 7) = 1, 5 in all."""
    stages = [Stage("load", "mte"), Stage("qk", "cube", waits=("load",), buffer="s", freed_by="softmax"),
              Stage("softmax", "vector", waits=("qk",))]
    result = play(stages, {"load": 4, "qk": 1, "softmax": 2}, 2, depths={"s": 1}, compute={"qk", "softmax"})
    assert times(result, "qk") == [(4, 5), (8, 9)]
    assert result.wait == {"qk": 5, "softmax": 0}


def test_zero_durations():
    """Instructions of no length pass through waits and a buffer at one instant."""
    result = play(LOAD_MUL, {"load": 0, "mul": 0}, 3, depths={"b": 1}, tail={"load": 1, "mul": 0})
    assert times(result, "mul") == [(0, 0), (0, 0), (1, 1)]


# --- properties of random tasks ------------------------------------------------------------------------------------


def random_task(seed):
    """Draw a chain of stages with extra waits on few pipes, buffers freed by the next stage, and integer times."""
    rng = random.Random(seed)
    size, names, stages = rng.randint(3, 6), "abcdef", []
    split = rng.randint(1, size)
    for i in range(size):
        waits = {names[i - 1]} if i else set()
        waits |= {names[j] for j in range(i) if rng.random() < 0.2}
        buffered = i + 1 < size and rng.random() < 0.6
        stages.append(Stage(names[i], f"pipe{rng.randrange(3)}", tuple(sorted(waits)), names[i] if buffered else None,
                            names[i + 1] if buffered else None, "front" if i < split else "back"))
    draw = {s.name: rng.randint(0, 9) for s in stages}
    tail = {s.name: rng.randint(0, draw[s.name]) for s in stages}
    sync = {s.name: rng.randint(0, 3) for s in stages if rng.random() < 0.3}
    lookahead = rng.randint(0, 2)
    depths = {s.name: lookahead + rng.randint(1, 2) for s in stages}
    return stages, draw, tail, rng.randint(1, 6), lookahead, depths, sync


def allowed_starts(stage, i, when, depths, sync):
    """Return the times at which the waits and the buffer of one instruction let it start."""
    ready = [when[name, i].end + sync.get(stage.name, 0) for name in stage.waits]
    if stage.buffer and i >= depths[stage.buffer]:
        ready.append(when[stage.freed_by, i - depths[stage.buffer]].end)
    return ready


@pytest.mark.parametrize("seed", range(200))
def test_random_tasks_start_as_soon_as_possible_and_never_earlier(seed):
    """Every start equals the latest of its conditions: pipe free, waits with latency, buffer slot."""
    stages, draw, tail, steps, lookahead, depths, sync = random_task(seed)
    result = simulate(stages, draw, tail, steps, lookahead, depths, sync, compute={s.name for s in stages})
    when = {(e.name, e.iteration): e for e in result.events}
    by_name = {s.name: s for s in stages}
    free = {s.pipe: 0 for s in stages}
    assert len(when) == len(result.events) == steps * len(stages)
    assert [e.start for e in result.events] == sorted(e.start for e in result.events)
    for e in result.events:
        assert e.start == max([free[e.pipe]] + allowed_starts(by_name[e.name], e.iteration, when, depths, sync))
        assert e.end - e.start == (tail if e.iteration == steps - 1 else draw)[e.name]
        free[e.pipe] = e.end
    assert result.makespan == max(free.values())


@pytest.mark.parametrize("seed", range(50))
def test_random_tasks_keep_program_order_on_every_pipe(seed):
    """Sorting by (slot, front before back, place in the list) gives the order of execution of each pipe."""
    stages, draw, tail, steps, lookahead, depths, sync = random_task(seed)
    result = simulate(stages, draw, tail, steps, lookahead, depths, sync)
    back = {s.name: s.group == "back" for s in stages}
    for pipe in {s.pipe for s in stages}:
        keys = [(e.iteration + lookahead * back[e.name], back[e.name], e.name) for e in result.events if e.pipe == pipe]
        assert keys == sorted(keys)


@pytest.mark.parametrize("seed", range(50))
def test_random_tasks_wait_only_for_hand_overs_if_all_stages_compute(seed):
    """If every stage computes and every hand-over is immediate, nothing is exposed."""
    stages, draw, tail, steps, lookahead, depths, _ = random_task(seed)
    result = simulate(stages, draw, tail, steps, lookahead, depths, compute={s.name for s in stages})
    assert set(result.wait.values()) == {0}
