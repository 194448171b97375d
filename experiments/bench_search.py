"""How near each search comes to the optimum, at equal evaluations; then who finds the best tile in the whole space.

    python experiments/bench_search.py --markdown search.md     everything: about half an hour on 2 cores
    python experiments/bench_search.py --quick                  three shapes, no descent: does it run?

Part 1: random calls on one device of each architecture, each with a sub-space of at least 100,000 points over six knobs
or more, priced whole. Every strategy starts with the tiles that `auto` chooses from, and may spend 2 % of the points (a
cost with its gradient counts as 3). gap: how much slower its tile is than the optimum.

Part 2: the whole space of `tune` (up to 10^7 points), which nobody can price whole: how much slower each strategy's
tile is than the best that any of them found, at the evaluations that the coordinate search takes, and at its seconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_model import DEVICES, setting

import npumodel as npu
from npumodel.search.ledger import Ledger, run
from npumodel.search.plans import priced
from npumodel.search.space import Space
from npumodel.search.strategies import BASELINES, STRATEGIES

#: What the coordinate search must reach: gap at the median, the 95th percentile and the worst; share of evaluations.
BARS = {"median": 0.0, "p95": 0.01, "worst": 0.05, "evaluations": 0.02}
SHARE = 0.02
FEWEST = 100_000
#: Most values of each axis of a sub-space of part 1.
AXES = {"block_q": 20, "block_kv": 20, "buffers": 4, "lookahead": 4, "heads_packed": 4, "split_kv": 4, "cores": 4}


class Case(NamedTuple):
    """A call on a device with a sub-space, and the seconds of its optimum, all of it priced."""

    shape: npu.AttentionShape
    device: npu.DeviceSpec
    space: Space
    optimum: float


def main():
    options = _options()
    header = [setting(), "", f"`{shlex.join(['python', *sys.argv])}`", ""]
    names = [n for n in STRATEGIES if n not in ("exhaustive", *["gradient"] * options.quick)]
    count = 1 if options.quick else options.shapes
    sizes, found, wide = [], {name: [] for name in (*names, *BASELINES)}, []
    for device in DEVICES:
        for number, case in enumerate(drawn(device, count)):
            sizes.append(case.space.size)
            for name in found:
                found[name].append(gap(name, case))
            if number < max(1, count // 10):
                wide.append(wide_gaps(case.shape, case.device, names))
            print(f"\r{device}: {number + 1} of {count} calls", end="", file=sys.stderr)
        print(file=sys.stderr)
    lines = [*part_1(sizes, found), ""]
    lines += part_2(wide)
    print("\n".join([*header, *lines]))
    if options.markdown:
        options.markdown.write_text("\n".join([*header, *lines, ""]))
    if options.json:
        options.json.write_text(json.dumps({"header": header, "gaps": found, "whole": wide}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=200, help="calls on each device (default 200)")
    parser.add_argument("--quick", action="store_true", help="one call on each device, no descent: a smoke test")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every gap to this file")
    options = parser.parse_args()
    if options.shapes < 1:
        parser.error(f"--shapes: expected at least 1, got {options.shapes}")
    return options


# Part 1 --------------------------------------------------------------------------------------------------------------


def drawn(name: str, count: int, seed: int = 0) -> Iterator[Case]:
    """Random calls whose sub-space is large enough, with all prices of it."""
    random, device = np.random.default_rng(seed), npu.device(name)
    while count:
        shape = draw(random)
        space = thinned(Space.of(shape, device))
        if space.size >= FEWEST and sum(len(axis) > 1 for axis in space.axes) >= 6:
            yield _priced(shape, device, space)
            count -= 1


def draw(random: np.random.Generator) -> npu.AttentionShape:
    """A prefill or a chunk of one, heads grouped or not, lengths that no block divides."""
    kv_heads, length = int(2 ** random.integers(0, 4)), int(2 ** random.uniform(9, 14))
    return npu.AttentionShape(
        batch=int(2 ** random.integers(0, 5)),
        q_heads=kv_heads * int(2 ** random.integers(0, 4)),
        kv_heads=kv_heads,
        q_len=length if random.random() < 0.7 else max(64, length // 7),
        kv_len=length,
        head_dim=int(random.choice([64, 128])),
        causal=bool(random.integers(2)),
    )


def thinned(space: Space) -> Space:
    """The space with at most so many values along each axis, evenly spread, first and last among them."""
    axes = {name: getattr(space, name) for name in AXES}
    places = {n: np.unique(np.linspace(0, len(axes[n]) - 1, AXES[n]).round().astype(int)) for n in AXES}
    return space.restrict(**{name: [axes[name][i] for i in places[name]] for name in AXES})


def _priced(shape: npu.AttentionShape, device: npu.DeviceSpec, space: Space) -> Case:
    ledger = Ledger(shape, device, space)
    ledger.price(np.arange(space.size))
    return Case(shape, device, space, float(ledger.seconds.min()))


def gap(name: str, case: Case) -> tuple[float, float]:
    """(gap to the optimum, share of the points that were priced)"""
    ledger = Ledger(case.shape, case.device, case.space, SHARE * case.space.size)
    search(name, ledger)
    best = ledger.of(ledger.best(1))[0]
    return float(best / case.optimum - 1), ledger.evals / case.space.size


def search(name: str, ledger: Ledger, seed: int = 0):
    """A strategy from the tiles that auto chooses from, as `tune` runs it; or a baseline alone."""
    if name in BASELINES:
        run([(ledger, BASELINES[name](ledger, seed, ()))])
        return
    (plans,) = priced([ledger.shape], ledger.device)
    ledger.begin(plans)
    run([(ledger, STRATEGIES[name](ledger, seed, (plans.default, plans.rule)))])


def part_1(sizes: list[int], found: dict[str, list[tuple[float, float]]]) -> list[str]:
    lines = [f"{len(sizes)} calls, spaces of {min(sizes):,} to {max(sizes):,} points ({sum(sizes):,} in all).", ""]
    lines.append("| strategy | gap: median | p95 | worst | optimum found | evaluations: mean | most |")
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for name, pairs in found.items():
        gaps, shares = np.array(pairs).T
        numbers = [np.median(gaps), np.quantile(gaps, 0.95), gaps.max(), (gaps == 0).mean()]
        lines.append(_row(name, [*numbers, shares.mean(), shares.max()]))
    gaps, shares = np.array(found["coordinate"]).T
    reached = (np.median(gaps), np.quantile(gaps, 0.95), gaps.max(), shares.max())
    good = all(value <= bar for value, bar in zip(reached, BARS.values(), strict=True))
    bars = ", ".join(f"{name} <= {100 * bar:g} %" for name, bar in BARS.items())
    return [*lines, "", f"Bars ({bars}), coordinate: {'met' if good else 'MISSED'}."]


# Part 2 --------------------------------------------------------------------------------------------------------------


def wide_gaps(shape: npu.AttentionShape, device: npu.DeviceSpec, names: list[str]) -> dict[str, tuple[float, float]]:
    """Strategy -> (gap at the evaluations of the coordinate search, gap at its seconds), to the best found at all."""

    def once(name: str, **budget) -> tuple[float, int, float]:
        ledger = Ledger(shape, device, **budget)
        start = time.perf_counter()
        search(name, ledger)
        return float(ledger.of(ledger.best(1))[0]), ledger.evals, time.perf_counter() - start

    for name in names:
        once(name)  # compiled
    best, evals, elapsed = once("coordinate")
    at_evals = {name: once(name, max_evals=evals)[0] for name in names if name != "coordinate"}
    at_time = {n: once(n, deadline=time.perf_counter() + elapsed)[0] for n in names if n != "coordinate"}
    top = min(best, *at_evals.values(), *at_time.values())
    gaps = {name: (at_evals[name] / top - 1, at_time[name] / top - 1) for name in at_evals}
    return {"coordinate": (best / top - 1, best / top - 1), **gaps}


def part_2(found: list[dict[str, tuple[float, float]]]) -> list[str]:
    lines = [f"The whole space, {len(found)} calls: gap to the best that any of them found.", ""]
    lines.append("| strategy | equal evaluations: median | worst | equal seconds: median | worst |")
    lines.append("|---|--:|--:|--:|--:|")
    for name in found[0]:
        evals, seconds = np.array([gaps[name] for gaps in found]).T
        lines.append(_row(name, [np.median(evals), evals.max(), np.median(seconds), seconds.max()]))
    return lines


def _row(name: str, shares: list[float]) -> str:
    return "| " + " | ".join([name, *(f"{100 * share:.2f} %" for share in shares)]) + " |"


if __name__ == "__main__":
    main()
