"""Speed and memory of `npumodel.flash_attention` on this machine's CPU, beside other implementations.

    python experiments/bench_attention.py --markdown speed.md     all cases: minutes on 2 cores
    python experiments/bench_attention.py --quick                 small sizes, seconds: does it run?
    python experiments/bench_attention.py --blocks                our own passes by block size: behind hardware/host.py

One process, rounds: each round times every implementation once, in another order. A ratio is the median of the ratios
within a round, so what slows a whole round down cancels. Compilation and the arrays of each layout come before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from attention_libraries import (
    BOTH,
    FORWARD,
    JAX_NN,
    OPTIONAL,
    OURS,
    TORCH,
    Case,
    Entry,
    block_entries,
    cores,
    entries,
    exact,
    inputs,
    installed,
)

import npumodel as npu

CASES = (
    Case("main", 1, 8, 8, 4096, 4096, 64),
    Case("causal", 1, 8, 8, 4096, 4096, 64, "causal"),
    Case("gqa", 1, 8, 2, 4096, 4096, 64, "causal"),
    Case("window", 1, 8, 8, 4096, 4096, 64, "window"),
    Case("decode", 1, 32, 8, 1, 8192, 128),
    Case("d128", 1, 8, 8, 2048, 2048, 128),
)
QUICK = ("main", "gqa", "window", "decode")
BLOCK_CASES = (
    *(case for case in CASES if case.name in ("main", "causal", "window")),
    Case("s2048", 1, 8, 8, 2048, 2048, 128),
    Case("s1024", 1, 8, 8, 1024, 1024, 64, "causal"),
)
#: Case, pass, column (what is divided by, or the temporaries), and what the value must not exceed.
BARS = (
    ("main", FORWARD, JAX_NN, 0.36),
    ("causal", FORWARD, JAX_NN, 0.22),
    ("main", BOTH, JAX_NN, 0.31),
    ("causal", BOTH, JAX_NN, 0.17),
    *((case, what, TORCH, 1.3) for what in (FORWARD, BOTH) for case in ("main", "causal")),
    *((case, BOTH, "MiB", 64) for case in ("main", "causal")),
)


class Row(NamedTuple):
    """One line of the table: median seconds, their ratio to other implementations (by name), bytes of temporaries
    (None: unknown), the largest error of the rows in `exact`."""

    case: Case
    what: str
    name: str
    seconds: float
    ratios: dict[str, float]
    temporaries: int | None
    error: float


def main():
    options = _options()
    header = [_setting(), "", f"`{shlex.join(['python', *sys.argv])}`", ""]
    rows = [] if options.blocks else _measured(options)
    lines = _blocks(options) if options.blocks else table(rows)
    lines += [] if options.quick or options.blocks else ["", *verdicts(rows)]
    print("\n".join([*header, *lines]))
    if options.markdown:
        options.markdown.write_text("\n".join([*header, *lines, ""]))
    if options.json:
        plain = [row._asdict() | {"case": row.case._asdict()} for row in rows]
        options.json.write_text(json.dumps({"header": header, "rows": plain}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, help="default: all (with --quick: some)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default 7)")
    parser.add_argument("--quick", action="store_true", help="lengths / 16 and one round: a smoke test, no verdict")
    parser.add_argument("--blocks", action="store_true", help="our own passes over block sizes 128 .. 1024 instead")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file (not for --blocks)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    return options


def _setting() -> str:
    """Versions and machine; then what is left out."""
    there = [x for x in OPTIONAL if installed(x)]
    found = [f"{x} {metadata.version(x)}" for x in ("jax", "jaxlib", "numpy", *there)]
    load = f"load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "load unknown"
    line = f"Python {platform.python_version()}, npumodel {npu.__version__}, {', '.join(found)}; "
    line += f"{cores()} CPUs, {_cpu()}, {load}."
    missing = [x for x in OPTIONAL if x not in there]
    return f"{line}\n\nNot installed, left out: {', '.join(missing)}." if missing else line


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Beside others -------------------------------------------------------------------------------------------------------


def _measured(options: argparse.Namespace) -> list[Row]:
    rows, default = [], QUICK if options.quick else [case.name for case in CASES]
    chosen = [case for case in CASES if case.name in (options.cases or default)]
    for case in (case.small() if options.quick else case for case in chosen):
        for what in case.passes:
            print(f"{case.name}, {what} ...", file=sys.stderr)
            rows += measure(case, what, options.dtype, 1 if options.quick else options.repeats)
    return rows


def measure(case: Case, what: str, dtype: str, repeats: int) -> list[Row]:
    """One pass of one case by all that take it. dtype: of the arrays; repeats: rounds."""
    arrays = inputs(case, dtype)
    found, expected = entries(case, what, arrays), exact(case, what, arrays)
    times = rounds(found, repeats)

    def row(entry: Entry) -> Row:
        ours = times[entry.name]
        ratios = {name: _ratio(ours, times[name]) for name in (JAX_NN, TORCH) if name in times}
        error = float(np.abs(entry.rows - expected).max())
        return Row(case, what, entry.name, statistics.median(ours), ratios, entry.temporaries, error)

    return [row(entry) for entry in found]


def rounds(found: Sequence[Entry], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call of each, per round; a short call is repeated for 20 ms within its round."""
    turns = {x.name: max(1, int(0.02 / min(_seconds(x, 1) for _ in range(2)))) for x in found}
    times: dict[str, list[float]] = {x.name: [] for x in found}
    for number in range(repeats):
        first = number % len(found)
        order = [*found[first:], *found[:first]]
        for entry in order if number % 2 else reversed(order):
            settle()
            times[entry.name].append(_seconds(entry, turns[entry.name]))
    return times


def settle(limit: float = 2.0):
    """Wait (`limit` seconds at most) until this process is idle: the call before may still spin its threads, or give
    gigabytes of temporaries back to the system after its result is ready, which would be counted against the next.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(0.02)
        if time.process_time() - used < 0.002:
            return


def _seconds(entry: Entry, turns: int) -> float:
    start = time.perf_counter()
    for _ in range(turns):
        entry.run()
    return (time.perf_counter() - start) / turns


def _ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(times, base, strict=True))


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    lines = [f"| call | pass | implementation | median ms | / {JAX_NN} | / {TORCH} | temporaries MiB | max error |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        cells = [row.case.label, row.what, row.name, f"{row.seconds * 1e3:.4g}"]
        cells += [f"{row.ratios[x]:.2f}" if x in row.ratios else "-" for x in (JAX_NN, TORCH)]
        cells += ["-" if row.temporaries is None else f"{row.temporaries / 2**20:.1f}", f"{row.error:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each of `BARS` that was measured."""
    ours = {(row.case.name, row.what): row for row in rows if row.name == OURS}
    lines = []
    for case, what, column, bar in BARS:
        row = ours.get((case, what))
        if row is None or column not in ("MiB", *row.ratios):
            continue
        value = row.temporaries / 2**20 if column == "MiB" else row.ratios[column]
        verdict, unit = "met" if value <= bar else "MISSED", "temporaries, MiB" if column == "MiB" else f"/ {column}"
        lines.append(f"- {verdict}: {case}, {what}, {unit}: {value:.3g} (bar {bar})")
    return lines


# Our own blocks ------------------------------------------------------------------------------------------------------


def _blocks(options: argparse.Namespace) -> list[str]:
    sizes, repeats = ((64, 128), 1) if options.quick else ((128, 256, 512, 1024), options.repeats)
    lines = ["| call | blocks | forward ms | / best | backward ms | / best |", "|---|---|---:|---:|---:|---:|"]
    for case in [BLOCK_CASES[1].small()] if options.quick else BLOCK_CASES:
        print(f"{case.label} ...", file=sys.stderr)
        lines += block_table(case, sizes, options.dtype, repeats)
    return lines


def block_table(case: Case, sizes: Sequence[int], dtype: str, repeats: int) -> list[str]:
    """A line for each pair (block_q, block_kv): our forward, and our backward alone."""
    pairs, arrays = [(x, y) for x in sizes for y in sizes], inputs(case, dtype)
    forward, backward = zip(*(block_entries(case, pair, arrays) for pair in pairs), strict=True)
    times = rounds([*forward, *backward], repeats)
    seconds = [[statistics.median(times[x.name]) for x in entries] for entries in (forward, backward)]
    lines = []
    for (block_q, block_kv), *both in zip(pairs, *seconds, strict=True):
        cells = [case.label, f"{block_q} x {block_kv}"]
        for x, column in zip(both, seconds, strict=True):
            cells += [f"{x * 1e3:.4g}", f"{x / min(column):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
