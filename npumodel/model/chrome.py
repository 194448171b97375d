"""Timelines as a Chrome trace, for Perfetto, chrome://tracing and MindStudio Insight.

One track per pipe; a wait for a transfer is a slice named WAIT_FLAG before the stage that waited. Times are whole
nanoseconds inside and microseconds in the file, so rounding never makes two slices of a track overlap (a viewer would
drop one). MindStudio Insight tells an operator trace by the text before the first "[", hence the order of the header.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .trace import Event, Timeline

#: Pipe of the model -> (kind of core, name of the track). Two vector units beside one cube run in step: one is shown.
TRACKS = {
    "MTE2": ("cubecore0", "MTE2"),
    "CUBE": ("cubecore0", "CUBE"),
    "FIXP": ("cubecore0", "FIXP"),
    "SERIAL": ("cubecore0", "SERIAL"),
    "MTE2.V": ("veccore0", "MTE2"),
    "VECTOR": ("veccore0", "VECTOR"),
    "MTE3": ("veccore0", "MTE3"),
    "MTE3.V": ("veccore0", "MTE3"),
}
ORDER = ("MTE2", "MTE1", "CUBE", "FIXP", "VECTOR", "MTE3", "SERIAL")
WAIT = "WAIT_FLAG"

_COLOURS = {"CUBE": "rail_response", "VECTOR": "rail_idle", "MTE2": "yellow", "MTE3": "rail_animation"}
_HEADER = {"displayTimeUnit": "ns", "profilingType": "op", "schemaVersion": 1}
#: Two neighbours may overlap by this share of their time, the rounding of 32-bit seconds.
_ROUNDING = 1e-6


class Track(NamedTuple):
    """Where a slice is shown; both are strings, as MindStudio Insight wants them."""

    pid: str
    tid: str


def write(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> int:
    """Write the timelines one after the other, in one step (a file is never half written); returns the slices written.

    A name that ends in .gz is compressed. Missing parents are created.
    Raises ValueError for an event that is not finite, ends before it starts, or overlaps another of its pipe.
    """
    path = Path(path).expanduser().resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with gzip.open(temporary, "wt") if path.suffix == ".gz" else open(temporary, "w", newline="\n") as file:
            slices = 0
            for piece in pieces(timelines):
                slices += piece.count('"ph": "X"')
                file.write(piece)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return slices


def pieces(timelines: Sequence[Timeline]) -> Iterator[str]:
    """The text of the trace, one event a line, in pieces."""
    yield _dump(_HEADER)[:-1] + ', "traceEvents": [\n'
    separator = ""
    for event in events(timelines):
        yield separator + _dump(event)
        separator = ",\n"
    yield '\n], "otherData": ' + _dump({"calls": list(_calls(timelines))}) + "}\n"


def events(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Trace events: the names of all tracks, then the slices of each timeline in order of time."""
    tracks = {_track(event) for timeline in timelines for event in timeline.events}
    yield from _names(sorted(tracks, key=_place))
    for number, (timeline, start) in enumerate(zip(timelines, _starts(timelines), strict=True)):
        yield from _slices(timeline, number, start)


def _starts(timelines: Iterable[Timeline]) -> Iterator[int]:
    """When each timeline starts, in ns: where the one before it ends."""
    start = 0
    for timeline in timelines:
        yield start
        start += _length(timeline)


def _length(timeline: Timeline) -> int:
    last = max((event.end for event in timeline.events), default=0.0)
    return max(_ns(last), _ns(timeline.shown_seconds))


def _calls(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    for timeline, start in zip(timelines, _starts(timelines), strict=True):
        cost = timeline.cost
        yield {
            "call": cost.shape.label,
            "device": cost.device,
            "tile": cost.tile.label,
            "start_us": _us(start),
            "shown_us": _us(_length(timeline)),
            "complete": timeline.complete,
            "predicted_us": cost.seconds * 1e6,
            "launch_us": cost.launch_seconds * 1e6,
        }


def _names(tracks: Iterable[Track]) -> Iterator[dict[str, Any]]:
    """Names and places of the tracks; these events have no time."""
    pids = []
    for track in tracks:
        if track.pid not in pids:
            pids.append(track.pid)
            yield {"ph": "M", "name": "process_name", "pid": track.pid, "args": {"name": track.pid}}
            yield {"ph": "M", "name": "process_sort_index", "pid": track.pid, "args": {"sort_index": len(pids)}}
        where = {"pid": track.pid, "tid": track.tid}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track.tid}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": ORDER.index(track.tid) + 1}}


def _slices(timeline: Timeline, number: int, offset: int) -> Iterator[dict[str, Any]]:
    label = timeline.cost.shape.label
    free: dict[Track, int] = {}  # when the last slice of a track ends, ns
    for event in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        track = _track(event)
        start, end = _interval(event, free.get(track, 0))
        waited = min(_ns(event.dma_wait), start - free.get(track, 0))
        if waited > 0:
            wait = {"stage": event.stage, "waits_on": event.waits_on, "dma_wait_us": event.dma_wait * 1e6}
            yield _slice(WAIT, "dma_wait", track, offset + start - waited, waited, wait | {"call": number})
        args = {"stage": event.stage, "op": event.op, "task": event.task, "iter": event.iteration, "bytes": event.bytes}
        args |= {"call": number, "shape": label, "tile": timeline.cost.tile.label}
        yield _slice(event.stage, track.tid, track, offset + start, end - start, args)
        free[track] = end


def _interval(event: Event, free: int) -> tuple[int, int]:
    """Start and end in ns, moved behind `free` if rounding alone put it before."""
    for name in ("start", "end", "dma_wait"):
        if not (math.isfinite(getattr(event, name)) and getattr(event, name) >= 0):
            raise ValueError(f"{event.stage}: expected {name} finite and >= 0, got {getattr(event, name)!r}")
    start, end = _ns(event.start), _ns(event.end)
    slack = 1 + math.ceil(_ROUNDING * end)
    if end < start or free - start > slack:
        fault = "ends before it starts" if end < start else f"starts before {event.pipe} is free"
        raise ValueError(f"{event.stage} of core {event.core}, task {event.task}, step {event.iteration} {fault}")
    start = max(start, free)
    return start, max(start, end)


def _slice(name: str, category: str, track: Track, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    colour = {} if name == WAIT or track.tid not in _COLOURS else {"cname": _COLOURS[track.tid]}
    place = {"pid": track.pid, "tid": track.tid, "ts": _us(start), "dur": _us(length)}
    return {"ph": "X", "name": name, "cat": category, **place, **colour, "args": args}


def _track(event: Event) -> Track:
    try:
        core, name = TRACKS[event.pipe]
    except KeyError:
        raise ValueError(f"pipe: expected one of {', '.join(TRACKS)}, got {event.pipe!r}") from None
    return Track(f"core{event.core}.{core}", name)


def _place(track: Track) -> tuple:
    core, _, kind = track.pid.partition(".")
    return int(core.removeprefix("core")), kind, ORDER.index(track.tid)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    """The nearest double prints with at most three decimals for any time below 50 days."""
    return nanoseconds / 1000


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


# Checking ----------------------------------------------------------------------------------------------------------


def problems(text: str) -> list[str]:
    """What is wrong with the text of a trace, [] if nothing: strict JSON, header, fields, times, overlaps."""
    try:
        document = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return [f"not strict JSON: {error}"]
    head = text.partition("[")[0]
    found = [f"header: {word} missing before the first '['" for word in ('"profilingType"', '"op"') if word not in head]
    tracks: dict[Track, list[tuple[int, int]]] = {}
    for number, event in enumerate(document["traceEvents"]):
        faults = _faults(event)
        found += [f"event {number}: {fault}" for fault in faults]
        if event.get("ph") == "X" and not faults:
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks.setdefault(Track(event["pid"], event["tid"]), []).append((start, start + length))
    for track, spans in tracks.items():
        spans.sort()
        found += [f"{track}: {a} and {b} overlap" for a, b in zip(spans, spans[1:], strict=False) if b[0] < a[1]]
    named = {Track(e["pid"], e["tid"]) for e in document["traceEvents"] if e.get("name") == "thread_name"}
    return found + [f"{track}: no thread_name" for track in tracks if track not in named]


def _refuse(word: str):
    raise ValueError(f"{word} is no JSON number")


def _faults(event: dict[str, Any]) -> list[str]:
    fields = {"X": ("name", "cat", "pid", "tid", "ts", "dur", "args"), "M": ("name", "pid", "args")}
    if event.get("ph") not in fields:
        return [f"ph: expected X or M, got {event.get('ph')!r}"]
    found = [f"{name} missing" for name in fields[event["ph"]] if name not in event]
    found += [f"{name}: expected a text, got {event[name]!r}" for name in ("pid", "tid") if not _is_text(event, name)]
    if event["ph"] == "M":
        return found + ["a name has no time"] * ("ts" in event)
    times = [(name, event.get(name, 0)) for name in ("ts", "dur")]
    return found + [f"{n}: expected >= 0 with at most 3 decimals, got {t!r}" for n, t in times if not _is_time(t)]


def _is_text(event: dict[str, Any], name: str) -> bool:
    return name not in event or (isinstance(event[name], str) and bool(event[name]))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0 and value == round(value * 1000) / 1000
