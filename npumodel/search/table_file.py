"""The file of a tile table: JSON that is checked when read, locked while it changes, and never half written.

    {"format": "npumodel.tile_table", "format_version": "1.0", "key": {"exact": [...], "bucket": [...]},
     "tables": [{"device": {...}, "kernel": ..., "model_version": ..., "environment": {...}, "provenance": {...},
                 "entries": [{"key": {...}, "config": {...}, "predicted_us": ..., ...}, ...]}, ...]}

A block of "tables" is one tuning run on one device; one file holds any number of devices and runs.
`table_row` says what is in a block and in a row; `tile_table.schema.json`, beside this file and in the wheel, says the
same as a JSON Schema.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npumodel.search.table_row import BUCKET, EXACT

try:
    import fcntl
except ImportError:  # Windows: no lock. Each write is still atomic, but of two at the same moment the later one wins
    fcntl = None

FRAME = {
    "format": "npumodel.tile_table",
    "format_version": "1.0",
    "key": {"exact": [*EXACT], "bucket": [*BUCKET]},
}


class TileTableWarning(UserWarning):
    """A table, or a row of it, is not used; the message says which and why."""


class TileTableError(ValueError):
    """A file is no readable tile table: corrupt, truncated, empty, or of another kind."""


class NewerTileTableError(TileTableError):
    """The file's format_version has a higher major number than this program knows."""


def read_document(path: Path) -> dict[str, Any]:
    """The document in `path`, its frame checked; rows are not looked at.

    Raises TileTableError or NewerTileTableError (what is wrong, the cure), OSError if the file cannot be read.
    """
    raw = path.read_bytes()
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        what = f"not JSON, perhaps cut short ({error})" if raw.strip() else "empty"
        raise TileTableError(f"{path}: expected a tile table, but the file is {what}") from None
    _check_frame(path, document)
    return document


def _check_frame(path: Path, document: Any):
    if not isinstance(document, dict) or document.get("format") != FRAME["format"]:
        raise TileTableError(f'{path}: expected a tile table ("format": "{FRAME["format"]}"), got another kind of JSON')
    major, found, known = _version(document)[0], document.get("format_version"), FRAME["format_version"]
    if major > _version(FRAME)[0]:
        raise NewerTileTableError(f"{path}: format_version {found} is newer than {known}; update npumodel to read it")
    if major < 1:
        raise TileTableError(f"{path}: format_version: expected a version like {known!r}, got {found!r}")
    blocks = document.get("tables")
    if not isinstance(blocks, list) or not all(map(_is_block, blocks)):
        raise TileTableError(f"{path}: tables: expected a list of blocks, each with a device and a list of entries")


def _version(document: Mapping[str, Any]) -> tuple[int, int]:
    major, _, minor = str(document.get("format_version")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _is_block(block: Any) -> bool:
    if not isinstance(block, dict) or not isinstance(block.get("entries"), list):
        return False
    return all(isinstance(block.get(name, default), dict) for name, default in _HEADER_DICTS.items())


_HEADER_DICTS = {"device": None, "environment": {}, "provenance": {}}


@contextlib.contextmanager
def changing(path: Path) -> Iterator[dict[str, Any]]:
    """Hold the file's lock around read, merge and `replace_document`; gives the document on disk, {} if there is none.

    A broken file is first copied to `<name>.corrupt-<n>`, with a TileTableWarning. Missing parents are created.
    Raises NewerTileTableError for a newer file, and the fitting OSError, both saying that nothing was written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            yield _read_to_change(path)
    except OSError as error:
        why = f"tile table not written, what was there is untouched ({error.strerror or error}); give another path"
        raise OSError(error.errno, why, str(path)) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_name(f".{path.name}.lock"), "a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            _drop_leftovers(path)
        yield


def _drop_leftovers(path: Path):
    """Only the holder of the lock writes: any other temporary file is that of a process that was killed."""
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(".tmp"):
            (path.parent / name).unlink(missing_ok=True)


def _read_to_change(path: Path) -> dict[str, Any]:
    try:
        return read_document(path)
    except FileNotFoundError:
        return {}
    except NewerTileTableError as error:
        raise NewerTileTableError(f"{error}; it is not overwritten") from None
    except TileTableError as error:
        if path.stat().st_size:
            warnings.warn(f"{error}; kept aside as {_copy_aside(path)}", TileTableWarning, stacklevel=2)
        return {}


def _copy_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    return Path(shutil.copy2(path, aside))


def replace_document(path: Path, old: Mapping[str, Any], blocks: list[dict[str, Any]]):
    """Write `blocks` beside `path`, flush to the disk, move over `path` in one step; other fields of `old` are kept."""
    frame = {**old, **FRAME} if _version(old) <= _version(FRAME) else old
    text = json.dumps({**frame, "tables": blocks}, indent=2, sort_keys=True) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
