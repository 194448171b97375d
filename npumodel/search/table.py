"""The learned tile table: which tile was found best for which call on which device.

A row is told from others by kernel, spec_hash, model_version and key, so a second run adds or renews rows and never
touches those of another device, spec or model. `table_row` has the row, `table_file` the file.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from npumodel.hardware.spec import DeviceSpec
from npumodel.search.table_file import (
    NewerTileTableError,
    TileTableError,
    TileTableWarning,
    changing,
    read_document,
    replace_document,
)
from npumodel.search.table_row import BUCKET, KERNEL, MODEL_VERSION, Entry, Header, key_of, label_of, text_of
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

__all__ = [
    "MODEL_VERSION",
    "Entry",
    "Found",
    "Header",
    "NewerTileTableError",
    "TileTable",
    "TileTableError",
    "TileTableWarning",
    "active_tables",
    "key_of",
    "use_table",
]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a table knows about a call. Not checked for legality on the device: whoever uses the tile does that.

    source    "exact": the row of this very key; "bucket": the nearest row with sizes in the same power-of-two bucket
    distance  between the sizes asked and found, in octaves (0 = exact)
    """

    tile: TileConfig
    source: str
    distance: float
    entry: Entry


@dataclasses.dataclass(frozen=True, repr=False)
class TileTable:
    """Rows of any number of devices, each identity once (the last one given wins), in the order of the file.

    `refused`: (header, row) of rows that could not be read; they are never found, but written back until renewed.
    """

    entries: tuple[Entry, ...] = ()
    refused: tuple[tuple[Header, Any], ...] = ()

    def __post_init__(self):
        last = {entry.identity: entry for entry in self.entries}
        refused = {(*header.identity(_key(row)), repr(row)): (header, row) for header, row in self.refused}
        refused = {name: refused[name] for name in sorted(refused) if name[:-1] not in last}
        object.__setattr__(self, "entries", tuple(sorted(last.values(), key=lambda entry: entry.order)))
        object.__setattr__(self, "refused", tuple(refused.values()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TileTable:
        """Read a table file. A row with an impossible value is refused, with a TileTableWarning that names it.

        Raises TileTableError for a corrupt, truncated, empty or foreign file, NewerTileTableError for a format of a
        higher major version, OSError if it cannot be read.
        """
        path = Path(path).expanduser()
        return _from_document(path, read_document(path))

    def save(self, path: str | os.PathLike[str]) -> TileTable:
        """Add these rows to the file, in one step; of two rows with equal identity these win. Returns what is written.

        Concurrent writers wait for each other (a lock file beside it). A broken file there is kept aside as
        `<name>.corrupt-<n>`, with a TileTableWarning. Raises NewerTileTableError for a file of a higher major version
        and OSError if the place cannot be written; what was there is untouched then.
        """
        path = Path(path).expanduser().resolve()
        with changing(path) as old:
            merged = _from_document(path, old) | self
            replace_document(path, old, merged._blocks())
        return merged

    def _blocks(self) -> list[dict[str, Any]]:
        rows = [(entry.header, entry.to_row()) for entry in self.entries] + [*self.refused]
        blocks = {}
        for header, row in sorted(rows, key=lambda pair: pair[0].order):
            blocks.setdefault(header.order, {**header.to_block(), "entries": []})["entries"].append(row)
        return [*blocks.values()]

    def lookup(self, shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION) -> Found | None:
        """The row of this call: the exact key, else the nearest in its power-of-two bucket, else None.

        Rows of another spec_hash or model_version are passed over; if that leaves nothing, a TileTableWarning says
        which field differs, once per device, key and field. The name of the device does not matter, its numbers do.
        """
        return next(iter(self.candidates(shape, device, model_version)), None)

    def candidates(self, shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION) -> list[Found]:
        """Every row that `lookup` may answer with, best first, for a caller that has to pass over illegal tiles.

        Order: distance; then the smaller q_len, kv_len, batch_heads.
        """
        key, now = key_of(shape), {"spec_hash": device.fingerprint(), "model_version": str(model_version)}
        rows = self._buckets.get(_bucket(key), ())
        fresh = [entry for entry in rows if entry.header.validity == now]
        if not fresh:
            _warn_stale(rows, key, device.name, now)
        near = [(_distance(key, entry.key), [entry.key[name] for name in BUCKET], entry) for entry in fresh]
        near.sort(key=lambda item: item[:2])
        return [Found(entry.tile, "bucket" if far else "exact", far, entry) for far, _, entry in near]

    @functools.cached_property
    def _buckets(self) -> dict[str, list[Entry]]:
        buckets = {}
        for entry in self.entries:
            if entry.header.kernel == KERNEL:
                buckets.setdefault(_bucket(entry.key), []).append(entry)
        return buckets

    def merge(self, other: TileTable) -> TileTable:
        """The rows of both; of two with equal identity the other's wins. Also `table | other`."""
        return TileTable(self.entries + other.entries, self.refused + other.refused)

    __or__ = merge

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        devices = sorted({entry.header.name for entry in self.entries})
        return f"TileTable({len(self)} row{'s' * (len(self) != 1)}{': ' * bool(devices)}{', '.join(devices)})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *_columns(map(_cells, self.entries))])


def _from_document(path: Path, document: Mapping[str, Any]) -> TileTable:
    entries, refused = [], []
    for block in document.get("tables", ()):
        header = Header.from_block(block)
        for row in block["entries"]:
            try:
                entries.append(Entry.from_row(header, row))
            except ValueError as error:
                refused.append((header, row))
                what = f"{path}: row {header.name} {label_of(_key(row))} is not used: {error}"
                warnings.warn(what, TileTableWarning, stacklevel=2)
    return TileTable(tuple(entries), tuple(refused))


def _key(row: Any) -> Any:
    return row.get("key") if isinstance(row, dict) else row


def _cells(entry: Entry) -> tuple[str, ...]:
    gain = f"{entry.default_us / entry.predicted_us:.2f}x default" if entry.default_us else ""
    note = "" if entry.complete else "search not finished"
    return (entry.header.name, label_of(entry.key), entry.tile.label, f"{entry.predicted_us:.6g} us", gain, note)


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows]


def _bucket(key: Mapping[str, Any]) -> str:
    """The key's text with each BUCKET field rounded up to a power of two."""
    return text_of({**key, **{name: 1 << (key[name] - 1).bit_length() for name in BUCKET}})


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """sqrt(sum over BUCKET of log2(ratio)^2); fsum, so that ties are ties in any order of the terms."""
    ratios = (max(one[name], other[name]) / min(one[name], other[name]) for name in BUCKET)
    return math.sqrt(math.fsum(math.log2(ratio) ** 2 for ratio in ratios))


def _warn_stale(rows: Iterable[Entry], key: Mapping[str, Any], device: str, now: Mapping[str, str]):
    for entry in rows:
        had = entry.header.validity
        if entry.header.name != device and had["spec_hash"] != now["spec_hash"]:
            continue  # a row of another chip: nothing to tell
        for name in now:
            if had[name] != now[name]:
                row = f"tile table: row {device} {label_of(entry.key)} is not used"
                why = f"{name} was {had[name]}, is {now[name]} now; tune again to renew it"
                _warn_once((device, text_of(key), name), f"{row}: {why}")


_seen: set[tuple] = set()  # what was warned about


def _warn_once(what: tuple, message: str):
    if what not in _seen:
        _seen.add(what)
        warnings.warn(message, TileTableWarning, stacklevel=2)


_stack: contextvars.ContextVar[tuple[TileTable, ...]] = contextvars.ContextVar("npumodel_tables", default=())
_files: dict[Path, tuple[tuple[int, ...], TileTable]] = {}  # path -> version of the file, what it held
_files_lock = threading.RLock()


@contextlib.contextmanager
def use_table(table: TileTable | str | os.PathLike[str]) -> Iterator[TileTable]:
    """Search this table (or file, or directory of *.json files) first, inside the `with` and in this thread; nests.

    A broken file is a miss with a TileTableWarning. Raises FileNotFoundError for a path that does not exist.
    """
    if not isinstance(table, TileTable):
        path = Path(table).expanduser()
        path.stat()
        table = functools.reduce(TileTable.merge, reversed(_tables_at(path)), TileTable())
    token = _stack.set((table, *_stack.get()))
    try:
        yield table
    finally:
        _stack.reset(token)


def active_tables() -> list[TileTable]:
    """The tables to search, in order: those of `use_table`, inner first, then those of NPUMODEL_TABLE_PATH.

    NPUMODEL_TABLE_PATH: files, and directories of *.json files (by name), joined by os.pathsep. A file is read again
    only when it has changed. A missing path and a broken file are a miss with a TileTableWarning, once.
    """
    places = filter(None, os.environ.get("NPUMODEL_TABLE_PATH", "").split(os.pathsep))
    return [*_stack.get(), *(table for place in places for table in _tables_at(Path(place).expanduser()))]


def _tables_at(path: Path) -> list[TileTable]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        _warn_once((path,), f"tile table directory {path} holds no *.json file")
    return [_cached(file) for file in files]


def _cached(path: Path) -> TileTable:
    try:
        stat = path.stat()
    except OSError as error:
        _warn_once((path,), f"tile table {path} (NPUMODEL_TABLE_PATH) is not used: {error.strerror}")
        return TileTable()
    version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    with _files_lock:
        if path not in _files or _files[path][0] != version:
            _files[path] = (version, TileTable())  # the answer as long as the file is broken
            _files[path] = (version, _load_or_miss(path))
        return _files[path][1]


def _load_or_miss(path: Path) -> TileTable:
    try:
        return TileTable.load(path)
    except (TileTableError, OSError) as error:
        warnings.warn(f"{error}; the table is not used", TileTableWarning, stacklevel=2)
        return TileTable()
