"""Speed of the price: evaluations, gradients and compilations, and of `tune`; beside ZigZag where it is installed.

    python experiments/bench_model.py --markdown speed.md         everything: about ten minutes on 2 cores
    python experiments/bench_model.py --quick                     one device, small: does it run?

One process, rounds: each round times every entry once, in another order. A ratio is the median of the ratios within a
round, so what slows a whole round down cancels. ZigZag (pip install zigzag-dse six) prices mappings of Q K^T and P V as
two matrix products on accelerators of its own examples; only the time inside its cost model is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from attention_libraries import cores
from bench_attention import _cpu, settle

import npumodel as npu
from npumodel.model.cost import WITHOUT_FUSION, Options, price
from npumodel.search import space

#: One device of each architecture.
DEVICES = ("ascend910b2", "ascend910a", "ascend950pr")
MASKS = ("full", "causal")
THREADS = 2
#: Example accelerators of ZigZag; ratios are to the first.
ZIGZAG = ("tpu_like", "ascend_like")
TUNED = "B4,N32,S4096,D128"

EVALS, GRADIENTS, WARM, COLD = "evaluations/s", "cost + gradient/s", "tune, warm", "tune, cold process"
#: What a value must reach: at least (per second), at most (seconds).
BARS = {EVALS: 1_000_000, GRADIENTS: 150_000, WARM: 0.050, COLD: 6.0}


class Entry(NamedTuple):
    """What is timed. what: a key of `BARS`; run(): does it once and returns the seconds it took; points: evaluations in
    that; compiled: seconds that compiling took (None: nothing of its own)."""

    what: str
    device: str
    way: str
    points: int
    run: Callable[[], float]
    compiled: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.what, self.device, self.way


class Row(NamedTuple):
    """A line of the table. value: evaluations a second, or seconds; ratio: to ZigZag's evaluations a second."""

    what: str
    device: str
    way: str
    value: float
    ratio: float | None = None
    compiled: float | None = None


class Compiled(NamedTuple):
    """How many compilations of the search's price a number of calls took: expected 1 for an architecture."""

    arch: str
    calls: int
    compilations: int


def main():
    options = _options()
    there = bool(util.find_spec("zigzag"))
    left_out = [] if there else ["Not installed, left out: ZigZag (pip install zigzag-dse six).", ""]
    header = [setting(*["zigzag-dse"] * there), "", *left_out, f"`{shlex.join(['python', *sys.argv])}`", ""]
    names = DEVICES[:1] if options.quick else DEVICES
    found = [entry for name in names for entry in entries(name, options.quick)]
    found += [zigzag(name, options.quick) for name in ZIGZAG] if there else []
    rows = measure(found, 2 if options.quick else options.repeats)
    rows += [Row(COLD, name, TUNED, cold_tune(name)) for name in names]
    counts = [compilations(npu.device(name).arch, 5 if options.quick else 1000) for name in names]
    lines = [*table(rows), "", *count_table(counts)]
    lines += [] if options.quick else ["", *verdicts(rows, counts)]
    print("\n".join([*header, *lines]))
    if options.markdown:
        options.markdown.write_text("\n".join([*header, *lines, ""]))
    if options.json:
        plain = {"rows": [row._asdict() for row in rows], "compilations": [count._asdict() for count in counts]}
        options.json.write_text(json.dumps({"header": header, **plain}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--quick", action="store_true", help="one device, few points, two rounds: a smoke test")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    return options


def setting(*packages: str) -> str:
    """Versions, also of these packages, and machine."""
    found = [f"{x} {metadata.version(x)}" for x in ("jax", "jaxlib", "numpy", *packages)]
    load = f"load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "load unknown"
    line = f"Python {platform.python_version()}, npumodel {npu.__version__}, {', '.join(found)}; "
    return line + f"{cores()} CPUs, {_cpu()}, {load}."


# What is priced ------------------------------------------------------------------------------------------------------


def shapes(mask: str, count: int, dtype: str = "float16", seed: int = 0) -> list[npu.AttentionShape]:
    """Random calls: prefill and decode, grouped heads, lengths that no block divides."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        kv_heads = int(2 ** random.integers(0, 5))
        kv_len = int(2 ** random.uniform(7, 14))
        sizes: dict[str, Any] = {
            "batch": int(random.integers(1, 9)),
            "q_heads": kv_heads * int(2 ** random.integers(0, 4)),
            "kv_heads": kv_heads,
            "q_len": kv_len if random.random() < 0.7 else max(1, kv_len // 7),
            "kv_len": kv_len,
            "head_dim": int(random.choice([64, 128])),
        }
        found.append(npu.AttentionShape(**sizes, dtype=dtype, causal=mask == "causal"))
    return found


def tiles(shape: npu.AttentionShape, device: npu.DeviceSpec, count: int) -> npu.TileConfig:
    """Random legal tiles of a call [count]."""
    whole = space.Space.of(shape, device)
    random = np.random.default_rng(1)
    points = random.integers(0, whole.size, max(4096, count))
    points = points[space.legal([shape], whole.at(points), device)]
    return whole.at(random.choice(points, count))


class Batch(NamedTuple):
    """Arguments of the price: leaves are arrays [n] (of chip: scalars)."""

    chip: space.Chip
    problem: Any
    tile: npu.TileConfig


def batch(device: npu.DeviceSpec, mask: str, n: int) -> Batch:
    """n random tiles, 32 for each shape."""
    each = min(n, 32)
    calls = shapes(mask, n // each)
    mine = [tiles(call, device, each) for call in calls]
    columns: dict[str, Any] = {name: np.concatenate([getattr(tile, name) for tile in mine]) for name in space.NUMBERS}
    tile = npu.TileConfig(**columns)
    problems = [jax.tree.map(np.float32, space.Problem.of(call)) for call in calls for _ in range(each)]
    problem = jax.tree.map(lambda *xs: np.stack(xs), *problems)
    return Batch(space.chip(device, "float16"), problem, jax.tree.map(np.float32, tile))


def seconds_of(b: Batch, temperature: Any = 0.0) -> jax.Array:
    """What the search prices: seconds [n] of the fused kernel. Lookaheads are whole numbers, as in its descent."""
    b = b._replace(tile=b.tile.replace(lookahead=jax.lax.stop_gradient(b.tile.lookahead)))
    options = Options("", masked=False, waits=False, whole_lookahead=True)
    return price(b.chip.t, b.problem, b.tile, b.chip.d, options, temperature).seconds


def by_tile(b: Batch, temperature):
    """(seconds [n], their gradient with respect to each tile)."""

    def total(tile):
        seconds = seconds_of(b._replace(tile=tile), temperature)
        return seconds.sum(), seconds

    slope, seconds = jax.grad(total, has_aux=True)(b.tile)
    return seconds, slope


def by_tile_and_device(b: Batch, temperature):
    """(seconds [n]; gradients with respect to each tile, and of their sum to the device: its rates and capacities)."""

    def total(tile, chip):
        seconds = seconds_of(Batch(chip, b.problem, tile), temperature)
        return seconds.sum(), seconds

    slopes, seconds = jax.grad(total, (0, 1), has_aux=True)(b.tile, b.chip)
    return seconds, slopes


# Entries -------------------------------------------------------------------------------------------------------------


def entries(name: str, quick: bool) -> list[Entry]:
    """All that is timed on one device."""
    print(f"{name}: compiling ...", file=sys.stderr)
    device, found = npu.device(name), []
    for mask in MASKS:
        found += door(device, mask, quick)
    for n in (512,) if quick else (512, 4096):
        found += evaluations(device, n)
    for function in (by_tile,) if quick else (by_tile, by_tile_and_device):
        found += gradients(device, function, 64 if quick else 512)
    shape = npu.AttentionShape.parse(TUNED)
    npu.tune(shape, device)
    return [*found, Entry(WARM, name, TUNED, 1, timed(lambda: npu.tune(shape, device)))]


def door(device: npu.DeviceSpec, mask: str, quick: bool) -> list[Entry]:
    """The way that the search takes, one shape a call."""
    calls = shapes(mask, 2 if quick else 8)
    work = [(call, tiles(call, device, 512 if quick else space.BATCH)) for call in calls]
    count = sum(len(tile.block_q) for _, tile in work)

    def one(part: Sequence[tuple[npu.AttentionShape, npu.TileConfig]]):
        for call, tile in part:
            space.exact_seconds([call], tile, device)

    start = time.perf_counter()
    one(work[:1])
    compiled = time.perf_counter() - start if mask == MASKS[0] else None
    halves = [work[i::THREADS] for i in range(THREADS)]
    ways = {"": timed(lambda: one(work)), f", {THREADS} threads": timed(lambda: together(one, halves))}
    found = [Entry(EVALS, device.name, f"exact_seconds, {mask}{way}", count, run) for way, run in ways.items()]
    return [found[0]._replace(compiled=compiled), *found[1:]]


def evaluations(device: npu.DeviceSpec, n: int) -> list[Entry]:
    """A compiled call of the price on arrays [n]; then one on each thread."""
    found: list[Entry] = []
    run = compiled = None
    for mask in MASKS:
        b = batch(device, mask, n)
        if run is None:
            run, compiled = compile_(seconds_of, {}, b)
        found += _alone_and_together(EVALS, device, f"price [{n}], {mask}", n, _call(run, b), compiled)
        compiled = None
    return found


def gradients(device: npu.DeviceSpec, function, n: int) -> list[Entry]:
    """The same of cost and gradient, half of the points causal. The temperature is an argument, as in the search."""
    found: list[Entry] = []
    both = [batch(device, mask, n // 2) for mask in MASKS]
    halves = [jax.tree.map(lambda x: np.broadcast_to(x, n // 2), (b.problem, b.tile)) for b in both]
    problem, tile = jax.tree.map(lambda *xs: np.concatenate(xs), *halves)
    b, what = Batch(both[0].chip, problem, tile), {by_tile: "tile", by_tile_and_device: "tile and device"}[function]
    run, compiled = compile_(function, WITHOUT_FUSION, b, np.float32(0))
    for temperature in (0.0, 0.3):
        once = _call(run, b, np.float32(temperature))
        found += _alone_and_together(GRADIENTS, device, f"by {what} [{n}], T={temperature:g}", n, once, compiled)
        compiled = None
    return found


def _alone_and_together(what: str, device: npu.DeviceSpec, way: str, n: int, once, compiled) -> list[Entry]:
    alone = Entry(what, device.name, way, n, timed(once), compiled)
    threads = timed(lambda: together(lambda _: once(), range(THREADS)))
    return [alone, Entry(what, device.name, f"{way}, {THREADS} threads", THREADS * n, threads)]


def compile_(function, options: dict, *arguments) -> tuple[Callable, float]:
    """(compiled for these arguments, seconds)"""
    start = time.perf_counter()
    run = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return run, time.perf_counter() - start


def _call(run, *arguments) -> Callable[[], object]:
    return lambda: jax.block_until_ready(run(*arguments))


_POOL = ThreadPoolExecutor(THREADS)


def together(run, parts: Sequence) -> list:
    """run(part) of each part, on a thread of its own."""
    return list(_POOL.map(run, parts))


def timed(once: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        once()
        return time.perf_counter() - start

    return run


# ZigZag --------------------------------------------------------------------------------------------------------------


def zigzag(accelerator: str, quick: bool) -> Entry:
    """Its search over loop orders for both products of one head, S = 4096 and D = 128."""
    import zigzag
    from zigzag.mapping.temporal_mapping import TemporalMappingType
    from zigzag.stages.evaluation.cost_model_evaluation import CostModelStage
    from zigzag.stages.main import MainStage
    from zigzag.stages.mapping.spatial_mapping_generation import SpatialMappingGeneratorStage
    from zigzag.stages.mapping.temporal_mapping_generator_stage import TemporalMappingGeneratorStage
    from zigzag.stages.parser.accelerator_parser import AcceleratorParserStage
    from zigzag.stages.parser.workload_parser import WorkloadParserStage
    from zigzag.stages.results.reduce_stages import MinimalLatencyStage, SumStage
    from zigzag.stages.workload_iterator import WorkloadStage

    logging.getLogger("zigzag").setLevel(logging.ERROR)
    inside: list[float] = []

    class Timed(CostModelStage):
        def run(self):
            start = time.perf_counter()
            found = list(super().run())
            inside.append(time.perf_counter() - start)
            yield from found

    stages = [WorkloadParserStage, AcceleratorParserStage, SumStage, WorkloadStage, MinimalLatencyStage]
    stages += [SpatialMappingGeneratorStage, MinimalLatencyStage, TemporalMappingGeneratorStage, Timed]
    inputs = Path(str(zigzag.__file__)).parent / "inputs"

    def run() -> float:
        inside.clear()
        with contextlib.redirect_stderr(io.StringIO()):
            MainStage(
                stages,
                workload=[_product(0, "qk", 4096, 128, 4096), _product(1, "pv", 4096, 4096, 128)],
                accelerator=str(inputs / f"hardware/{accelerator}.yaml"),
                mapping=str(inputs / f"mapping/{accelerator}.yaml"),
                loma_lpf_limit=4 if quick else 5,
                loma_show_progress_bar=False,
                nb_mappings_generated=1,
                enable_mix_spatial_mapping_generation=False,
                access_same_data_considered_as_no_access=True,
                temporal_mapping_type=TemporalMappingType.UNEVEN,
            ).run()
        return sum(inside)

    run()
    return Entry(EVALS, f"ZigZag, {accelerator}", "its cost model, both products", len(inside), run)


def _product(number: int, name: str, rows: int, depth: int, columns: int) -> dict[str, Any]:
    return {
        "id": number,
        "name": name,
        "operator_type": "Gemm",
        "equation": "O[d][k]+=I[d][c]*W[c][k]",
        "dimension_relations": [],
        "loop_dims": ["C", "D", "K"],
        "loop_sizes": [depth, rows, columns],
        "operand_precision": {"W": 8, "I": 8, "O": 16, "O_final": 8},
        "operand_source": {"W": number, "I": number},
    }


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(found: Sequence[Entry], repeats: int) -> list[Row]:
    """Medians over the rounds; a short call is repeated for 50 ms within its round."""
    turns = {entry.key: max(1, min(50, int(0.05 / min(entry.run() for _ in range(2))))) for entry in found}
    times: dict[tuple, list[float]] = {entry.key: [] for entry in found}
    for number in range(repeats):
        print(f"round {number + 1} of {repeats} ...", file=sys.stderr)
        first = number % len(found)
        order = [*found[first:], *found[:first]]
        for entry in order if number % 2 else reversed(order):
            settle()
            turn = turns[entry.key]
            times[entry.key].append(sum(entry.run() for _ in range(turn)) / turn)
    rates = {x.key: [x.points / seconds for seconds in times[x.key]] for x in found}
    base = next((rates[x.key] for x in found if x.device == f"ZigZag, {ZIGZAG[0]}"), None)

    def row(x: Entry) -> Row:
        if x.what == WARM:
            return Row(*x.key, statistics.median(times[x.key]))
        ratios = [a / b for a, b in zip(rates[x.key], base, strict=True)] if base else []
        return Row(*x.key, statistics.median(rates[x.key]), statistics.median(ratios) if ratios else None, x.compiled)

    return [row(x) for x in found]


def cold_tune(name: str) -> float:
    """Seconds of a fresh process that imports the package, and tunes one shape without any compilation cache."""
    code = f"import npumodel as n; n.tune(n.AttentionShape.parse({TUNED!r}), n.device({name!r}))"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    return time.perf_counter() - start


def compilations(arch: str, calls: int) -> Compiled:
    """Price `calls` random shapes with a random tile each, on all devices of one architecture in turn."""
    jitted: Any = space._seconds_jit
    jitted.clear_cache()
    devices = [device for device in map(npu.device, npu.devices()) if device.arch == arch]
    for number in range(calls):
        mask, device = MASKS[number % 2], devices[number % len(devices)]
        dtypes = [dtype for dtype in ("float16", "bfloat16") if dtype in device.macs_per_cycle]
        (shape,) = shapes(mask, 1, dtypes[number % len(dtypes)], seed=number)
        whole = space.Space.of(shape, device)
        space.exact_seconds([shape], whole.at([number % whole.size]), device)
    return Compiled(arch, calls, jitted._cache_size())


# Printing ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    lines = [f"| what | device | way | value | / ZigZag {ZIGZAG[0]} | compile s |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        cells = [row.what, row.device, row.way, _value(row)]
        cells += [f"{x:,.{digits}f}" if x else "-" for x, digits in ((row.ratio, 0), (row.compiled, 1))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _value(row: Row) -> str:
    return f"{row.value:,.0f}" if row.what in (EVALS, GRADIENTS) else f"{row.value:.3g} s"


def count_table(counts: Sequence[Compiled]) -> list[str]:
    lines = ["| architecture | shapes and tiles | compilations |", "|---|---:|---:|"]
    return lines + [f"| {count.arch} | {count.calls:,} | {count.compilations} |" for count in counts]


def verdicts(rows: Sequence[Row], counts: Sequence[Compiled]) -> list[str]:
    """A line for each bar and device: of the ways, the best in its slowest case."""
    lines = []
    for what, bar in BARS.items():
        for device in dict.fromkeys(row.device for row in rows if row.what == what and "ZigZag" not in row.device):
            row = _judged([x for x in rows if (x.what, x.device) == (what, device)])
            met = row.value >= bar if what in (EVALS, GRADIENTS) else row.value <= bar
            goal = f"bar {bar:,} /s" if what in (EVALS, GRADIENTS) else f"bar {bar:g} s"
            lines.append(f"- {'met' if met else 'MISSED'}: {what}, {device}, {row.way}: got {_value(row)} ({goal})")
    for count in counts:
        verdict = "met" if count.compilations == 1 else "MISSED"
        lines.append(f"- {verdict}: compilations, {count.arch}: got {count.compilations} (bar 1)")
    return lines


def _judged(rows: Sequence[Row]) -> Row:
    """Ways differ in the call and the threads, cases of a way in the mask or the temperature. The slowest case of the
    best way; for gradients that of the hardest, by tile and device."""
    hardest = [row for row in rows if "device [" in row.way] or list(rows)
    cases: dict[str, list[Row]] = {}
    for row in hardest:
        way = row.way
        for case in ("full", "causal", "T=0.3", "T=0"):
            way = way.replace(f", {case}", "")
        cases.setdefault(way, []).append(row)
    return max((min(way, key=lambda row: row.value) for way in cases.values()), key=lambda row: row.value)


if __name__ == "__main__":
    main()
