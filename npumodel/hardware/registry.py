"""The chips that ship with the package, and reading a chip from a TOML file.

A file has the strings `description`, `name`, `soc`, `family`, `arch` and `overflow`, and one table per number:

    [l1_bytes]
    value = 524288
    source = "CANN platform ini (PYP-ini)"
    confidence = "F"

`macs_per_cycle` has one such table per dtype. A path that the chip has not says so: value = "none".
A number without source or confidence is refused.

With a `base` a file says only what differs. A 910B2 with another L1:

    base = "ascend910b2"
    description = "A 910B2 with 1 MiB of L1."
    name = "large-l1"
    soc = "none"
    l1_bytes = {value = 1048576, source = "assumption: what if", confidence = "A"}

`base` is a shipped device, or another .toml file by its path from this file, which may have a base itself. From it
come all numbers that the file does not give (in `macs_per_cycle`: all dtypes), with source and confidence, and
`family`, `arch` and `overflow`. `aliases`, a list, are further names of a shipped device.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import pathlib
import tomllib
from typing import Any

from npumodel.hardware.spec import NUMBERS, OPTIONAL, STRINGS, DeviceSpec, check, near

#: How far a number can be trusted.
CONFIDENCE = {
    "F": "read in a vendor file",
    "V": "stated by the vendor",
    "M": "measured and published",
    "3P": "third party",
    "D": "derived by arithmetic",
    "A": "our assumption",
}

Provenance = dict[str, tuple[float | None, str, str]]

_Chip = tuple[dict[str, Any], Provenance]  # fields of a DeviceSpec, and where the numbers come from

_OWN = ("description", "name", "soc")  # what a file states itself, with a base too
_INHERITED = tuple(key for key in STRINGS if key not in _OWN)
_NEEDED = ("description", *STRINGS, *NUMBERS)
_KNOWN = ("base", "aliases", *_NEEDED)


def device(name_or_path: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """The spec of a chip: by name, from a TOML file (a path, or text that ends in .toml), or a spec as it is.

    "Ascend910B2", "910b2 " and "ascend-910-b2" are one name; "Ascend950PR_9589" is another for "ascend950pr".
    Raises ValueError for an unknown name (what there is, what is near) and for a bad file (all that is wrong in it).
    """
    if isinstance(name_or_path, DeviceSpec):
        return name_or_path
    return DeviceSpec(**_read(name_or_path)[0])


def devices() -> list[str]:
    """The names that `device` knows, sorted, without their aliases."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def provenance(name_or_path: str | os.PathLike[str]) -> Provenance:
    """Field -> (value, source, confidence); "macs_per_cycle.float16" and so on for the matrix rates.

    The value is None for a path that the chip has not. `CONFIDENCE` explains the tags. Raises what `device` raises.
    """
    return dict(_read(name_or_path)[1])


# Names ---------------------------------------------------------------------------------------------------------------


def _resolve(name: Any) -> str:
    spellings, key = _spellings(), _key(name) if isinstance(name, str) else ""
    if key in spellings:
        return spellings[key][1]
    expected = f"{', '.join(devices())}, or the path of a .toml file"
    raise ValueError(f"device: expected one of {expected}, got {name!r}{_hint(key)}")


@functools.cache
def _spellings() -> dict[str, tuple[str, str]]:
    """Key -> (the name or alias as its file writes it, the name of the device)."""
    pairs = [(text, name) for name in devices() for text in (name, *_shipped_table(name).get("aliases", ()))]
    return {_key(text): (text, name) for text, name in pairs}


def _key(name: str) -> str:
    """A name without case, spaces, "-", "_" and the prefix "ascend"."""
    return "".join(name.lower().replace("-", " ").replace("_", " ").split()).removeprefix("ascend")


def _hint(key: str) -> str:
    """The spellings that begin with `key`, else those that look like it."""
    spellings = _spellings()
    longer = [repr(text) for known, (text, _) in spellings.items() if key and known.startswith(key)]
    return f"; did you mean {' or '.join(longer)}?" if longer else near(key, spellings, lambda k: spellings[k][0])


# Files ---------------------------------------------------------------------------------------------------------------


def _read(name_or_path: Any, above: tuple[pathlib.Path, ...] = ()) -> _Chip:
    """`above`: the files that are based on this one, nearest last; a path counts from the folder of that one."""
    if not (isinstance(name_or_path, os.PathLike) or str(name_or_path).strip().lower().endswith(".toml")):
        return _shipped(_resolve(name_or_path))
    folder = above[-1].parent if above else pathlib.Path()
    path = pathlib.Path(os.path.realpath(folder / os.fspath(name_or_path).strip()))
    if path in above:
        chain = " -> ".join(map(str, [*above, path]))
        raise ValueError(f"expected a file that is not based on itself, got {chain}; give one of them another base")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"device file {path}: expected a readable TOML file, got {error}") from error
    return _chip(_toml(content, str(path)), str(path), (*above, path))


@functools.cache
def _shipped(name: str) -> _Chip:
    return _chip(_shipped_table(name), f"{name}.toml")


@functools.cache
def _shipped_table(name: str) -> dict[str, Any]:
    return _toml(_folder().joinpath(f"{name}.toml").read_bytes(), f"{name}.toml")


def _folder():
    return importlib.resources.files("npumodel.hardware").joinpath("devices")


def _toml(content: bytes, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"device file {file}: expected TOML, got {error}") from error


def _chip(table: dict[str, Any], file: str, above: tuple[pathlib.Path, ...] = ()) -> _Chip:
    """What the file and its base say. Raises ValueError with everything that is wrong."""
    problems = [f"  {key}: unknown key{near(key, _KNOWN)}" for key in table if key not in _KNOWN]
    needed = _OWN if "base" in table else _NEEDED
    problems += [f"  {key}: missing" for key in needed if key not in table]
    problems += _text_problems(table)
    strings, numbers = _base(table, problems, above)
    found = numbers | _numbers({key: table[key] for key in NUMBERS if key in table}, problems)
    values = strings | {key: table[key] for key in STRINGS if key in table} | _nested(found)
    problems += check(values)
    if problems:
        raise ValueError("\n".join([f"device file {file}: {len(problems)} problem(s)", *problems]))
    return values, found


def _text_problems(table: dict[str, Any]) -> list[str]:
    problems = []
    if not isinstance(table.get("description", ""), str):
        problems.append(f"  description: expected a string, got {table['description']!r}")
    aliases = table.get("aliases", [])
    if not (isinstance(aliases, list) and all(isinstance(alias, str) for alias in aliases)):
        problems.append(f"  aliases: expected a list of strings, got {aliases!r}")
    return problems


def _base(table: dict[str, Any], problems: list[str], above: tuple[pathlib.Path, ...]) -> _Chip:
    """The strings and numbers to take over; none without a base, nor from a bad one, which goes to `problems`."""
    if "base" not in table:
        return {}, {}
    try:
        values, numbers = _read(table["base"], above)
    except ValueError as error:
        problems.append("  base: " + str(error).removeprefix("device: ").replace("\n", "\n  "))
        return {}, {}
    return {key: values[key] for key in _INHERITED}, numbers


# Numbers -------------------------------------------------------------------------------------------------------------


def _numbers(tables: dict[str, Any], problems: list[str]) -> Provenance:
    """Field -> (value, source, confidence) of the good tables; what is wrong with the others goes to `problems`."""
    found: Provenance = {}
    for field, table in _flat(tables).items():
        bad = _entry_problems(field, table)
        problems += bad
        if not bad:
            value = None if table["value"] == "none" else table["value"]
            found[field] = (value, table["source"], table["confidence"])
    return found


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    """macs_per_cycle = {float16: t} as "macs_per_cycle.float16": t."""
    macs = tables.get("macs_per_cycle")
    if not isinstance(macs, dict) or not macs:
        return tables
    flat = {key: table for key, table in tables.items() if key != "macs_per_cycle"}
    return flat | {f"macs_per_cycle.{dtype}": table for dtype, table in macs.items()}


def _nested(found: Provenance) -> dict[str, Any]:
    values: dict[str, Any] = {key: entry[0] for key, entry in found.items() if "." not in key}
    macs = {key.partition(".")[2]: entry[0] for key, entry in found.items() if "." in key}
    return values | ({"macs_per_cycle": macs} if macs else {})


def _entry_problems(field: str, table: Any) -> list[str]:
    keys = ("value", "source", "confidence")
    if not isinstance(table, dict) or (field == "macs_per_cycle"):
        what = "one table per dtype" if field == "macs_per_cycle" else "a table"
        return [f"  {field}: expected {what} with {', '.join(keys)}, got {table!r}"]
    problems = [f"  {field}.{key}: unknown key{near(key, keys)}" for key in table if key not in keys]
    problems += [f"  {field}.{key}: missing" for key in keys if key not in table]
    good = {
        "value": _is_value(field, table.get("value", 0)),
        "source": isinstance(table.get("source", ""), str) and bool(table.get("source", "?").strip()),
        "confidence": table.get("confidence", "A") in tuple(CONFIDENCE),
    }
    wanted = {
        "value": 'a number or "none"' if field in OPTIONAL else "a number",
        "source": "a text that says where the value comes from",
        "confidence": f"one of {', '.join(CONFIDENCE)}",
    }
    return problems + [f"  {field}.{k}: expected {wanted[k]}, got {table[k]!r}" for k in keys if not good[k]]


def _is_value(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (value == "none" and field in OPTIONAL)
