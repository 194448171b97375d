"""`npumodel table ...`: the commands that look at tile tables and change them.

They return 0, or 1 where `validate` or `diff` find something; a mistake raises, which `cli` makes 2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from npumodel import hardware
from npumodel.hardware import DeviceSpec
from npumodel.search import export as exports
from npumodel.search.table import MODEL_VERSION, Entry, TileTable, change_file, listing, problems
from npumodel.search.table_row import label_of

app = tyro.extras.SubcommandApp()


@app.command
def show(file: Positional[Path], device: str | None = None) -> int:
    """List the rows of a table; says which are stale (of another spec or model) and which search did not finish.

    Args:
        file: the table
        device: only the rows of this device: its name, or its TOML file
    """
    table = TileTable.load(file)
    rows, specs = _of_device(table, device)
    stale = {entry.identity: _stale(entry, specs) for entry in rows}
    print("\n".join(listing(rows, lambda entry: stale[entry.identity]) or ["no rows"]))
    counts = {"stale": sum(map(bool, stale.values())), "unfinished": sum(not entry.complete for entry in rows)}
    print(f"{file}: {len(rows)} row(s), " + ", ".join(f"{n} {name}" for name, n in counts.items()) + _unread(table))
    return 0


@app.command
def validate(file: Positional[tuple[Path, ...]]) -> int:
    """Check tables: every problem of every row, at once. Exit code 0 if there is none, else 1.

    Args:
        file: one or more tables
    """
    _need(file, 1)
    found = {path: problems(path) for path in file}
    for path, wrong in found.items():
        print("\n".join(wrong) if wrong else f"{path}: good, {len(TileTable.load(path))} row(s)")
    return int(any(found.values()))


@app.command
def merge(file: Positional[tuple[Path, ...]], out: Path) -> int:
    """Join tables; of two rows of the same call, device, spec and model that of the later file is kept.

    Args:
        file: two or more tables
        out: the joined table; rows that are there are kept, unless the others renew them
    """
    _need(file, 2)
    tables = [TileTable.load(path) for path in file]
    saved = functools.reduce(TileTable.merge, tables).save(out)
    print("\n".join(f"{path}: {len(table)} row(s)" for path, table in zip(file, tables, strict=True)))
    print(f"saved in {out} ({len(saved)} row(s) in all)")
    return 0


@app.command
def diff(a: Positional[Path], b: Positional[Path]) -> int:
    """Compare two tables: rows that only one has (- a, + b), rows that differ and in what. When and how a row was made
    is not compared. Exit code 0 if they are equal, else 1.

    Args:
        a: a table
        b: another
    """
    first, second = ({entry.identity: entry for entry in TileTable.load(path).entries} for path in (a, b))
    gone = [entry for name, entry in first.items() if name not in second]
    new = [entry for name, entry in second.items() if name not in first]
    both = {name: _differences(first[name], second[name]) for name in first if name in second}
    changed = {name: what for name, what in both.items() if what}
    for sign, entries in (("-", gone), ("+", new)):
        for entry in entries:
            print(f"{sign} {_name(entry)} {_versions(entry)}: {entry.tile.label}, {entry.predicted_us:.6g} us")
    for name, what in changed.items():
        print(f"~ {_name(first[name])}: {'; '.join(what)}")
    equal = len(both) - len(changed)
    print(f"{len(gone)} row(s) only in {a}, {len(new)} only in {b}, {len(changed)} differ, {equal} equal")
    return int(bool(gone or new or changed))


@app.command
def prune(
    file: Positional[Path], out: Path, stale: bool = False, incomplete: bool = False, device: str | None = None
) -> int:
    """Take rows out of a table, and list them. Rows that cannot be read stay.

    Args:
        file: the table
        out: where the rest goes: a new file, or FILE itself, which is replaced in one step
        stale: rows of another model version, or of another spec of their device (of shipped devices, or that given)
        incomplete: rows whose search did not finish
        device: of this device only: its name, or its TOML file; without --stale and --incomplete all of its rows
    """
    if not (stale or incomplete or device):
        raise ValueError("prune: expected --stale, --incomplete or --device, got none of them; nothing is removed")
    if out.exists() and not out.samefile(file):
        raise ValueError(f"--out: expected a new file, or {file} itself, got {out}, which exists")
    removed: dict[tuple, tuple[Entry, str]] = {}

    def rest(table: TileTable) -> TileTable:
        rows, specs = _of_device(table, device)
        for entry in rows:
            why = [_stale(entry, specs)] * stale + ["search not finished"] * (incomplete and not entry.complete)
            why += [f"of {device}"] * (not (stale or incomplete))
            if any(why):
                removed[entry.identity] = (entry, ", ".join(filter(None, why)))
        kept = tuple(entry for entry in table.entries if entry.identity not in removed)
        return TileTable(kept, table.refused)

    table = TileTable.load(file)  # raises for a broken file, which `change_file` would begin anew
    left = change_file(file, rest) if out.exists() else rest(table).save(out)
    for entry, why in removed.values():
        print(f"removed {_name(entry)} {_versions(entry)}: {why}")
    print(f"{len(removed)} row(s) removed, {len(left)} left in {out}" + _unread(left))
    return 0

@app.command
def export(
    file: Positional[Path], to: Literal["csv", "t4", "triton", "tilelang", "vllm"], out: Path | None = None
) -> int:
    """Write a tile table in the format of another tool.

    Args:
        file: a tile table
        to: csv (one line a row), t4 (FAIR T4 results, JSON), triton (candidates for triton.autotune), tilelang (kernel
            parameters), vllm (one {bucket: config} file for each device and kind of call)
        out: where to write, with vllm a folder; else print
    """
    table = TileTable.load(file)
    if out is None:
        print(exports.export(table, to), end="")
        return 0
    for path in exports.save(table, to, out):
        print(f"saved in {path}")
    return 0


def _need(files: Sequence[Path], least: int):
    if len(files) < least:
        raise ValueError(f"expected {least} or more tables, got {len(files)}")


def _of_device(table: TileTable, device: str | None) -> tuple[list[Entry], dict[str, DeviceSpec]]:
    """The rows of a device (None: all), and by their names the specs that their hashes are compared with."""
    names = {entry.header.name for entry in table.entries}
    specs = {name: hardware.device(name) for name in names & set(hardware.devices())}
    if device is None:
        return [*table.entries], specs
    if device not in names:  # another spelling, or a file
        spec = hardware.device(device)
        specs[spec.name], device = spec, spec.name
    return [entry for entry in table.entries if entry.header.name == device], specs


def _stale(entry: Entry, specs: Mapping[str, DeviceSpec]) -> str:
    """Why a row is not used any more; "" if it is, or if that cannot be told."""
    now = {"model_version": MODEL_VERSION}
    if entry.header.name in specs:
        now["spec_hash"] = specs[entry.header.name].fingerprint()
    had = entry.header.validity
    what = ", ".join(f"{name} was {had[name]}, is {now[name]}" for name in now if had[name] != now[name])
    return what and f"stale: {what}"


def _unread(table: TileTable) -> str:
    return f", {len(table.refused)} that cannot be read" if table.refused else ""


def _name(entry: Entry) -> str:
    return f"{entry.header.name} {label_of(entry.key)}"


def _versions(entry: Entry) -> str:
    return "({spec_hash}, model {model_version})".format(**entry.header.validity)


def _differences(one: Entry, other: Entry) -> list[str]:
    """Which fields of two rows differ: "config.block_q 128 -> 64"."""
    before, after = _flat(one.to_row()), _flat(other.to_row())
    names = sorted(before.keys() | after.keys())
    return [f"{n} {before.get(n)} -> {after.get(n)}" for n in names if before.get(n) != after.get(n)]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in row.items():
        nested = value if isinstance(value, Mapping) and name != "key" else None
        flat.update({name: value} if nested is None else {f"{name}.{part}": x for part, x in nested.items()})
    return flat
