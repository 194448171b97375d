"""`npumodel demo`: one call executed, priced, traced and tuned. Every number printed comes out of the package."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from npumodel import api, plot, record, report_text, units
from npumodel.attention import reference_attention
from npumodel.hardware import DeviceSpec, device
from npumodel.model.estimate import Cost, estimate
from npumodel.model.trace import timeline
from npumodel.record import Recorded
from npumodel.report_text import Priced
from npumodel.search.table import use_table
from npumodel.search.tuner import TuneResult
from npumodel.workload import AttentionShape

#: The article's call, and the part of it (batch, heads) that really runs here.
SHAPE = AttentionShape.parse("B4,N32,S4096,D128")
SMALL = record.resized(SHAPE, 1, 2)
SAME_PLAN = "large"
#: Slices in the picture of the schedule: the first tasks of one core.
EVENTS = 2000


def run(out: Path):
    """Tell the story, and leave trace.json, table.json and cost.png in `out`."""
    begin, spec = time.perf_counter(), device("ascend910b2")
    out.mkdir(parents=True, exist_ok=True)
    _step(1, "execute: blocked attention on real arrays, in the plan for ascend910b2, against plain attention")
    with ThreadPoolExecutor() as pool:  # the prices compile meanwhile, on another core
        costs = [pool.submit(_price, one) for one in (device("article"), spec)]
        calls = _execute(spec)
        _step(2, f"price: one plan of {SHAPE.label} on two devices")
        for cost in costs:
            print(f"   {_line(cost.result())}", flush=True)
    _step(3, "trace: the call that ran, priced at the article's batch and heads")
    _trace(calls, spec, out / "trace.json")
    _step(4, f"tune: the fastest tile for {SHAPE.label} on {spec.name}, against the whole space")
    result = _tune(spec, out)
    _step(5, 'use: tile_level="auto" with the table that was learned')
    _use(result, out / "table.json")
    print(f"\n{units.seconds(time.perf_counter() - begin)} in all; see {out}/")


def _step(number: int, text: str):
    print(f"\n{number}. {text}", flush=True)


def _execute(spec: DeviceSpec) -> list[Recorded]:
    """Run the small call, report its error, and return what was recorded."""
    size = (SMALL.batch, SMALL.q_heads, SMALL.q_len, SMALL.head_dim)
    q, k, v = (jax.random.normal(key, size, SMALL.dtype) for key in jax.random.split(jax.random.key(0), 3))
    with api.target(spec), record.recording() as found:
        out = jax.jit(api.flash_attention)(q, k, v)
    expected = reference_attention(q, k, v)
    error = float(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max())
    print(f"   {SMALL.label}, tile {found.calls[0].tile.label} ({found.calls[0].source}): largest error {error:.1e}")
    return found.calls


def _price(spec: DeviceSpec) -> Cost:
    return estimate(SHAPE, spec, api.resolve(SHAPE, spec, SAME_PLAN).tile)


def _line(cost: Cost) -> str:
    parts = [
        f"{units.seconds(cost.seconds)}, {cost.shape.flops / cost.seconds / 1e12:.0f} TFLOP/s",
        f"bound by {cost.bound}",
        f"L1 miss rate {units.percent(1 - cost.l1_hit_rate)}",
        f"{units.seconds(cost.upper_bound)} if nothing overlapped",
    ]
    return f"{cost.device:<12}  tile {cost.tile.label}: {', '.join(parts)}"


def _trace(calls: list[Recorded], spec: DeviceSpec, path: Path):
    priced = record.priced(calls, spec, batch=SHAPE.batch, heads=SHAPE.q_heads)
    print(_indented(report_text.tables(priced)))
    cost = priced[0].cost
    shown = timeline(cost.shape, spec, cost.tile, max_events=EVENTS)
    count = shown.save_chrome_trace(path)
    print(f"   {path}: the first {units.seconds(shown.shown_seconds)} of a core, {count:,} slices, for ui.perfetto.dev")


def _tune(spec: DeviceSpec, out: Path) -> TuneResult:
    result = api.tune(SHAPE, spec, exhaustive=True)
    print(_indented(str(result)))
    result.table(command="npumodel demo").save(out / "table.json")
    figure = Figure(figsize=(8, 6), layout="constrained")
    plot.tile_map(result, figure.subplots())
    figure.savefig(out / "cost.png", dpi=120)
    print(f"   {out / 'table.json'}: the learned tile; {out / 'cost.png'}: cost over tile sizes")
    return result


def _use(result: TuneResult, path: Path):
    """What "auto" takes before and after, and what that is worth."""
    with use_table(path):
        learned = api.resolve(SHAPE, result.device)
    plans = {"policy: default": result.default.tile, **_before(result), learned.source: learned.tile}
    costs = {source: estimate(SHAPE, result.device, tile) for source, tile in plans.items()}
    for source, cost in costs.items():
        gain = costs["policy: default"].seconds / cost.seconds
        print(f"   {source:<15}  tile {cost.tile.label}: {units.seconds(cost.seconds)}, {gain:.2f}x as fast as default")
    print("\n" + _indented(report_text.table(Priced(costs[learned.source], learned.source))))


def _before(result: TuneResult) -> dict:
    found = api.resolve(SHAPE, result.device)
    return {found.source: found.tile}


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" if line else "" for line in text.splitlines())
