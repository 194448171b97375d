"""The chips that ship with the package, and reading a chip from a TOML file.

A file has the strings `description`, `name`, `soc`, `family`, `arch` and `overflow`, and one table per number:

    [l1_bytes]
    value = 524288
    source = "CANN platform ini (PYP-ini)"
    confidence = "F"

`macs_per_cycle` has one such table per dtype. A path that the chip has not says so: value = "none".
A number without source or confidence is refused.
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


def device(name_or_path: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """The spec of a chip: by name, from a TOML file (a path, or text that ends in .toml), or a spec as it is.

    "Ascend910B2", "910b2 " and "ascend-910-b2" are one name.
    Raises ValueError for an unknown name (what there is, what is near) and for a bad file (all that is wrong in it).
    """
    if isinstance(name_or_path, DeviceSpec):
        return name_or_path
    return DeviceSpec(**_read(name_or_path)[0])


def devices() -> list[str]:
    """The names that `device` knows, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def provenance(name_or_path: str | os.PathLike[str]) -> Provenance:
    """Field -> (value, source, confidence); "macs_per_cycle.float16" and so on for the matrix rates.

    The value is None for a path that the chip has not. `CONFIDENCE` explains the tags. Raises what `device` raises.
    """
    return dict(_read(name_or_path)[1])


def _read(name_or_path: str | os.PathLike[str]) -> tuple[dict[str, Any], Provenance]:
    if isinstance(name_or_path, os.PathLike) or str(name_or_path).strip().lower().endswith(".toml"):
        path = pathlib.Path(os.fspath(name_or_path).strip())
        try:
            return _parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ValueError(f"device file {path}: expected a readable TOML file, got {error}") from error
    return _shipped(_resolve(name_or_path))


@functools.cache
def _shipped(name: str) -> tuple[dict[str, Any], Provenance]:
    return _parse(_folder().joinpath(f"{name}.toml").read_bytes(), f"{name}.toml")


def _folder():
    return importlib.resources.files("npumodel.hardware").joinpath("devices")


def _resolve(name: Any) -> str:
    by_key = {_key(known): known for known in devices()}
    if isinstance(name, str) and _key(name) in by_key:
        return by_key[_key(name)]
    hint = near(_key(name), by_key, by_key.get) if isinstance(name, str) else ""
    raise ValueError(
        f"device: expected one of {', '.join(by_key.values())}, or the path of a .toml file, got {name!r}{hint}"
    )


def _key(name: str) -> str:
    """A name without case, spaces, "-", "_" and the prefix "ascend"."""
    return "".join(name.lower().replace("-", " ").replace("_", " ").split()).removeprefix("ascend")


def _parse(content: bytes, file: str) -> tuple[dict[str, Any], Provenance]:
    try:
        table = tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"device file {file}: expected TOML, got {error}") from error
    known = ("description", *STRINGS, *NUMBERS)
    problems = [f"  {key}: unknown key{near(key, known)}" for key in table if key not in known]
    problems += [f"  {key}: missing" for key in known if key not in table]
    if not isinstance(table.get("description", ""), str):
        problems.append(f"  description: expected a string, got {table['description']!r}")
    found = _numbers({key: table[key] for key in NUMBERS if key in table}, problems)
    values = {key: table[key] for key in STRINGS if key in table} | _nested(found)
    problems += check(values)
    if problems:
        raise ValueError("\n".join([f"device file {file}: {len(problems)} problem(s)", *problems]))
    return values, found


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
    flat = {key: table for key, table in tables.items() if key != "macs_per_cycle"}
    macs = tables.get("macs_per_cycle", {})
    if not isinstance(macs, dict) or not macs:
        return flat | {"macs_per_cycle": macs}
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
