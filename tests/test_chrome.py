"""The Chrome trace: valid, in microseconds, one track per pipe, no overlaps made by rounding, sums kept."""

import dataclasses
import gzip
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import npumodel as npu
from npumodel.model import chrome


@dataclasses.dataclass(frozen=True)
class Event:
    stage: str = "qk_matmul"
    op: str = "qk"
    pipe: str = "CUBE"
    core: int = 0
    task: int = 0
    iteration: int = 0
    start: float = 0.0
    end: float = 0.0
    dma_wait: float = 0.0
    waits_on: str | None = None
    bytes: float = 0.0


def timeline(*events, seconds=None, shape="B1,N1,S256,D64", device="ascend910b2"):
    end = max((event.end for event in events), default=0.0)
    call = {"shape": npu.AttentionShape.parse(shape), "device": device, "tile": npu.TileConfig(64, 64)}
    cost = SimpleNamespace(**call, seconds=end, launch_seconds=0.0)
    return SimpleNamespace(events=events, cost=cost, shown_seconds=end if seconds is None else seconds, complete=True)


def text_of(*timelines):
    return "".join(chrome.pieces(timelines))


def slices(text):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_microseconds_with_three_decimals():
    """250 cycles at 1.85 GHz are 0.135 us, and 10 s are ten million, whatever the viewer's display unit."""
    text = text_of(timeline(Event(end=250 / 1.85e9), Event(start=10.0, end=15.0)))
    assert chrome.problems(text) == []
    assert [(s["ts"], s["dur"]) for s in slices(text)] == [(0.0, 0.135), (1e7, 5e6)]


def test_header_comes_before_the_events_and_tracks_have_names():
    text = text_of(timeline(Event(end=1e-6), Event(pipe="MTE2.V", end=2e-6), Event(pipe="MTE2", core=1, end=1e-6)))
    head = text.partition("[")[0]
    assert '"profilingType": "op"' in head
    assert text.count("[") >= 1 and text.index('"profilingType"') < text.index('"traceEvents"')
    names = [e for e in json.loads(text)["traceEvents"] if e["name"] == "thread_name"]
    assert {(e["pid"], e["tid"]) for e in names} == {
        ("core0.cubecore0", "CUBE"),
        ("core0.veccore0", "MTE2"),
        ("core1.cubecore0", "MTE2"),
    }
    assert all("ts" not in e for e in json.loads(text)["traceEvents"] if e["ph"] == "M")


def test_a_wait_is_a_slice_before_its_stage():
    events = Event(end=1e-6), Event(start=3e-6, end=4e-6, dma_wait=1.5e-6, waits_on="load_k", iteration=1)
    first, wait, second = slices(text_of(timeline(*events)))
    assert (wait["name"], wait["cat"], wait["ts"], wait["dur"]) == ("WAIT_FLAG", "dma_wait", 1.5, 1.5)
    assert wait["args"]["waits_on"] == "load_k" and wait["args"]["dma_wait_us"] == pytest.approx(1.5)
    assert second["ts"] == 3.0 and first["ts"] + first["dur"] <= wait["ts"]


def test_calls_follow_one_another():
    one = timeline(Event(end=2e-6), seconds=3e-6)
    text = text_of(one, timeline(Event(end=1e-6), device="article"))
    assert [s["ts"] for s in slices(text)] == [0.0, 3.0]
    assert [c["start_us"] for c in json.loads(text)["otherData"]["calls"]] == [0.0, 3.0]


#: Lengths of slices and gaps in seconds, down to a fraction of a nanosecond.
spans = st.floats(0, 2e-6, allow_nan=False)


@given(st.lists(st.tuples(spans, spans, spans), max_size=40), st.floats(0, 100))
def test_rounding_never_makes_slices_overlap(parts, start):
    at, events = start, []
    for number, (gap, wait, length) in enumerate(parts):
        begin = at + gap + wait
        events.append(Event(start=begin, end=begin + length, dma_wait=wait, iteration=number))
        at = begin + length
    text = text_of(timeline(*events))
    assert chrome.problems(text) == []
    stages = [s for s in slices(text) if s["name"] != chrome.WAIT]
    assert len(stages) == len(events)
    for event, shown in zip(events, stages, strict=True):
        assert shown["ts"] == pytest.approx(event.start * 1e6, abs=0.002)
        assert shown["dur"] == pytest.approx((event.end - event.start) * 1e6, abs=0.002)


def test_float32_seconds_that_overlap_by_their_rounding_are_pushed_apart():
    text = text_of(timeline(Event(end=10.0000005), Event(start=10.0, end=11.0)))
    assert chrome.problems(text) == []


@pytest.mark.parametrize(
    "event, words",
    [
        (Event(start=2e-6, end=1e-6), "ends before it starts"),
        (Event(start=math.nan, end=1e-6), "start finite"),
        (Event(end=math.inf), "end finite"),
        (Event(end=1e-6, dma_wait=-1e-6), "dma_wait finite and >= 0"),
        (Event(pipe="TURBO", end=1e-6), "expected one of MTE2"),
    ],
)
def test_impossible_events_are_refused(event, words):
    with pytest.raises(ValueError, match=words):
        text_of(timeline(event))


def test_true_overlaps_are_refused():
    with pytest.raises(ValueError, match="starts before CUBE is free"):
        text_of(timeline(Event(end=5e-6), Event(start=3e-6, end=7e-6)))


@pytest.mark.parametrize("name", ["a\x01b", "tab\there", 'quo"te', "back\\slash", "表\N{ROCKET}", "x" * 10_000, "[{"])
def test_any_name_round_trips(name):
    text = text_of(timeline(Event(stage=name, end=1e-6), device=name))
    assert chrome.problems(text) == []
    assert slices(text)[0]["name"] == name
    assert json.loads(text)["otherData"]["calls"][0]["device"] == name


def test_written_in_one_step(tmp_path):
    path = tmp_path / "new" / "trace.json"
    assert chrome.write(path, [timeline(Event(end=1e-6))]) == 1
    before = path.read_text()
    assert chrome.problems(before) == []
    with pytest.raises(ValueError):
        chrome.write(path, [timeline(Event(end=1e-6), Event(end=math.nan))])
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["trace.json"]


def test_compressed(tmp_path):
    chrome.write(tmp_path / "trace.json.gz", [timeline(Event(end=1e-6))])
    assert chrome.problems(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()) == []


def test_no_events():
    assert chrome.problems(text_of(timeline())) == [] and chrome.problems(text_of()) == []


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda e: e.update(ts=-1), "ts: expected >= 0"),
        (lambda e: e.update(dur="1"), "dur: expected >= 0"),
        (lambda e: e.update(ts=0.12345), "3 decimals"),
        (lambda e: e.update(pid=3), "pid: expected a text"),
        (lambda e: e.pop("args"), "args missing"),
        (lambda e: e.update(ph="B"), "ph: expected"),
        (lambda e: e.update(tid="OTHER"), "no thread_name"),
    ],
)
def test_the_check_finds_faults(change, words):
    document = json.loads(text_of(timeline(Event(end=1e-6))))
    change(document["traceEvents"][-1])
    assert words in " ".join(chrome.problems(json.dumps(document)))


def test_the_check_finds_overlaps_wrong_headers_and_nan():
    document = json.loads(text_of(timeline(Event(end=5e-6))))
    slice_ = document["traceEvents"][-1]
    document["traceEvents"].append(slice_ | {"ts": 3})
    late_header = {"traceEvents": document["traceEvents"], "profilingType": "op"}
    assert "overlap" in " ".join(chrome.problems(json.dumps(document)))
    assert "header" in " ".join(chrome.problems(json.dumps(late_header)))
    assert "strict JSON" in " ".join(chrome.problems('{"profilingType": "op", "traceEvents": [], "x": NaN}'))
