"""The commands: options in, text out. tyro makes the options of each from its signature and its docstring."""

from __future__ import annotations

import contextlib
import csv as csv_files
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from npumodel import api, hardware, record, report_text, table_commands
from npumodel.model import chrome
from npumodel.model.estimate import estimate as price
from npumodel.model.trace import timeline
from npumodel.report_text import Priced
from npumodel.search.sweep import Sweep, elasticity_table
from npumodel.workload import AttentionShape, parse

app = tyro.extras.SubcommandApp()
_DEVICE = "ascend910b2"


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    try:
        if argv[:1] == ["table"]:
            about = table.__doc__
            return table_commands.app.cli(prog="npumodel table", description=about, args=argv[1:], config=config)
        return app.cli(prog="npumodel", description=_ABOUT, args=argv, config=config)
    except SystemExit as stop:  # --help, or a mistake that tyro has explained
        return int(stop.code or 0)


_ABOUT = "Price attention calls on Ascend NPUs. NAME of a device: see `npumodel devices`, or the path of a TOML file."


@app.command
def estimate(shape: str, device: str | None = None, tile: str = "auto", json: bool = False) -> int:
    """Price one call: stages, waits, bounds, where the time goes, traffic, buffers.

    Args:
        shape: B4,N32,S4096,D128 (also KV8, SKV512, DV64, WL4095, WR0 (window), bfloat16, float32, causal, bool,
            additive, softcap, v_in_k, backward, kv_lengths=4096/512x3, q_lengths alike: of each example); a matmul
            M4096,N4096,K512; a softmax R4096,C4096 (rows, columns)
        device: name or TOML file, else NPUMODEL_DEVICE, else ascend910b2
        tile: auto, small, large, a number of parts, or 128x512 with buffers=2 lookahead=1 heads_packed=8 split_kv=4
            kv_pieces=4 cores=8 unfused contiguous round_robin persistent; of a matmul 128x256x64 (m, n, k), of a
            softmax 4x4096 (rows, columns)
        json: print JSON, in SI units
    """
    spec, asked = _spec(device), parse(shape)
    resolved = api.resolve_any(asked, spec, _level(tile))
    call = Priced(price(asked, spec, resolved.tile), resolved.source)
    print(report_text.to_json(report_text.as_dict(call, breakdown=True)) if json else report_text.details(call))
    return 0


@app.command
def explain(shape: str, device: str | None = None, tile: str = "auto") -> int:
    """One page about one call: graph, plan, stages, what bounds it, where the time goes, what would help most.

    Args:
        shape: B4,N32,S4096,D128 (also KV8, SKV512, DV64, WL4095, WR0 (window), bfloat16, float32, causal, bool,
            additive, softcap, v_in_k, backward, kv_lengths=4096/512x3, q_lengths alike)
        device: name or TOML file, else NPUMODEL_DEVICE, else ascend910b2
        tile: auto, small, large, a number of parts, or 128x512 with buffers=2 lookahead=1 heads_packed=8 split_kv=4
            kv_pieces=4 cores=8 unfused contiguous round_robin persistent
    """
    print(api.explain(shape, _spec(device), _level(tile)))
    return 0


@app.command
def trace(
    script: Positional[Path],
    args: Positional[tuple[str, ...]] = (),
    device: str | None = None,
    tile_level: str | None = None,
    batch: int | None = None,
    heads: int | None = None,
    json: bool = False,
    chrome: Path | None = None,
) -> int:
    """Run a script and price every flash_attention call that it makes, once per distinct call.

    Args:
        script: a Python file
        args: what the script gets, after --
        device: name or TOML file, else NPUMODEL_DEVICE, else ascend910b2; the script runs with it as its target
        tile_level: price all calls with this tile instead of their own
        batch: price all calls with this batch instead of their own
        heads: price all calls with this number of query heads (kv heads in proportion)
        json: print JSON, in SI units; what the script prints goes to stderr
        chrome: also write a Chrome trace, for Perfetto and MindStudio Insight (.json or .json.gz)
    """
    spec, place = _spec(device), chrome and chrome.expanduser().resolve()  # the script may change folder
    level = None if tile_level is None else _level(tile_level)
    with api.target(spec), contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        recording, code = record.run_script(script, args)
    calls = report_text.dearest_first(record.priced(recording.calls, spec, level, batch, heads))
    if json:
        print(report_text.to_json(_trace_json(script, spec.name, code, calls)))
    else:
        print("\n" + report_text.tables(calls))
    if place is not None:
        _write_chrome(place, calls)
    return code


def _trace_json(script: Path, device: str, code: int, calls: Sequence[Priced]) -> dict:
    return {
        "format": "npumodel.trace",
        "format_version": "1.0",
        "script": str(script),
        "device": device,
        "exit_code": code,
        "seconds": sum(call.seconds for call in calls),
        "calls": [report_text.as_dict(call) for call in calls],
    }


def _write_chrome(path: Path, calls: Sequence[Priced]):
    timelines = [timeline(call.cost.shape, call.cost.chip, call.cost.tile) for call in calls]
    count = chrome.write(path, timelines)
    print(f"{path}: {count:,} slices; open it in https://ui.perfetto.dev or MindStudio Insight", file=sys.stderr)


@app.command
def tune(
    shape: tuple[str, ...],
    device: str | None = None,
    out: Path = Path("table.json"),
    strategy: Literal["coordinate", "gradient", "annealing", "evolution", "random", "exhaustive"] = "coordinate",
    seed: int = 0,
    max_evals: int | None = None,
    time_limit: float | None = None,
    exhaustive: bool = False,
) -> int:
    """Search the fastest tile of one or more calls, and keep it in a table that tile_level="auto" reads.

    Args:
        shape: B4,N32,S4096,D128 (also KV8, SKV512, DV64, WL4095, WR0 (window), bfloat16, float32, causal, bool,
            additive, softcap, v_in_k, backward, kv_lengths=4096/512x3, q_lengths alike); several, if wanted
        device: name or TOML file, else NPUMODEL_DEVICE, else ascend910b2
        out: the table; rows that are there are kept, or renewed if it is the same call on the same device
        strategy: how to search
        seed: of the starting points
        max_evals: most prices to compute; one with its gradient counts as 3
        time_limit: seconds for each shape
        exhaustive: also price the whole space, to know the gap to its optimum
    """
    options = {"strategy": strategy, "seed": seed, "max_evals": max_evals, "time_limit": time_limit}
    shapes, spec = [AttentionShape.parse(one) for one in shape], _spec(device)
    texts = ["npumodel", "tune", "--shape", *shape, "--device", device or spec.name]
    texts += ["--strategy", strategy, "--seed", str(seed)]
    for one in shapes:
        with _progress(one.label) as progress:
            result = api.tune(one, spec, exhaustive=exhaustive, progress=progress, **options)
        print(result)
        saved = result.table(explain=True, command=shlex.join(texts)).save(out)  # at once: an interrupt loses nothing
        print(f"saved in {out} ({len(saved)} row(s) in all)")
        if result.interrupted:
            return 130
    print(f'tile_level="auto" reads it with NPUMODEL_TABLE_PATH={out}')
    return 0


@app.command
def sweep(
    shape: tuple[str, ...],
    what: str,
    device: str | None = None,
    factors: str = "0.5,0.71,1,1.41,2",
    grid: bool = False,
    json: bool = False,
    csv: Path | None = None,
) -> int:
    """What other hardware would buy: the price over numbers of the device, with the tile kept and re-tuned, and its
    elasticities (0.8 % less time for 1 % more: -0.8).

    Args:
        shape: B4,N32,S4096,D128 (also KV8, SKV512, DV64, WL4095, WR0 (window), bfloat16, float32, causal, bool,
            additive, softcap, v_in_k, backward, kv_lengths=4096/512x3, q_lengths alike); several, if wanted
        what: numbers of the device: l1_bytes,hbm_bandwidth (or hbm_bytes_per_s), cores (cube_cores), macs_per_cycle,
            ...; `npumodel devices NAME` lists them
        device: name or TOML file, else NPUMODEL_DEVICE, else ascend910b2
        factors: what each number is multiplied by, one number at a time
        grid: cross two numbers
        json: print JSON, in SI units
        csv: also write a file of one row a point
    """
    found = api.sweep(shape, _spec(device), _words(what), _numbers("factors", factors), grid=grid)
    if csv is not None:
        _write_rows(csv, found)
    if json:
        sweeps = {"format": "npumodel.sweep", "format_version": "1.0", "sweeps": [one.as_dict() for one in found]}
        print(report_text.to_json(sweeps))
    else:
        print("\n\n".join([*map(str, found), *([elasticity_table(found)] if len(found) > 1 else [])]))
    return 0


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"--{option}: expected numbers like 0.5,1,2, got {text!r}") from None


def _write_rows(path: Path, sweeps: Sequence[Sweep]):
    rows = [row for one in sweeps for row in one.rows()]
    with path.open("w", newline="") as file:
        writer = csv_files.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{path}: {len(rows)} rows", file=sys.stderr)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """A bar on stderr if that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)

        def show(done: int, expected: int, best: float):
            bar.update(task, completed=done, total=expected, description=f"{label}  best {best * 1e3:.4g} ms")

        yield show


@app.command
def table() -> int:
    """Learned tables: show, validate, merge, diff, prune, export. See `npumodel table --help`."""
    raise AssertionError("`run` gives these to `table_commands`")  # here for the list of commands only


@app.command
def devices(name: Positional[str | None] = None) -> int:
    """List the devices, or every number of one with its source.

    Args:
        name: name or TOML file
    """
    print(report_text.device_list() if name is None else report_text.device_text(name))
    return 0


@app.command
def demo(out: Path = Path("npumodel-demo")) -> int:
    """The whole story in a minute: execute, price, trace, tune, and use what was learned.

    Args:
        out: folder for trace.json, table.json and cost.png
    """
    from npumodel import demo as story

    story.run(out)
    return 0


def _spec(device: str | None) -> hardware.DeviceSpec:
    """The device named on the command line, else that of NPUMODEL_DEVICE, else the usual one."""
    return hardware.device(device) if device else api.current_device() or hardware.device(_DEVICE)


def _level(text: str) -> str | int:
    """A tile as the library takes it: "12" is a number of parts."""
    return int(text) if text.isdecimal() else text
