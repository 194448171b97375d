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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from npumodel.search.table_row import (
    BUCKET,
    EXACT,
    KERNEL,
    MODEL_VERSION,
    Entry,
    Header,
    block_problems,
    key_of,
    label_of,
    row_problems,
    text_of,
    validity_of,
)
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

__all__ = [
    "MODEL_VERSION",
    "Entry",
    "Found",
    "Header",
    "NewerTileTableError",
    "ON_MISS",
    "TileTable",
    "TileTableError",
    "TileTableMiss",
    "TileTableWarning",
    "active_tables",
    "change_file",
    "key_of",
    "listing",
    "problems",
    "use_table",
]

#: What a call gets that no row serves: the model's choice, a search now, or a TileTableMiss.
ON_MISS = ("heuristic", "autotune", "error")
#: How a row answers a call, best first.
SOURCES = ("exact", "bucket", "nearest")


class TileTableMiss(KeyError):
    """No row serves a call, and on_miss is "error"."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its text in quotes


@dataclasses.dataclass(frozen=True)
class Found:
    """What a table knows about a call. Not checked for legality on the device: whoever uses the tile does that.

    source    "exact": the row of this very key; "bucket": one whose sizes are in the same power-of-two bucket;
              "nearest": one of other sizes. All other fields of the key are equal
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

        As `change_file`, which see for other writers, broken files and errors.
        """
        return change_file(path, lambda old: old | self)

    def _blocks(self) -> list[dict[str, Any]]:
        rows = [(entry.header, entry.to_row()) for entry in self.entries] + [*self.refused]
        blocks = {}
        for header, row in sorted(rows, key=lambda pair: pair[0].order):
            blocks.setdefault(header.order, {**header.to_block(), "entries": []})["entries"].append(row)
        return [*blocks.values()]

    def lookup(self, shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION) -> Found | None:
        """The row of this call: the exact key, else the nearest in its power-of-two bucket, else the nearest of all
        whose exact fields match, else None.

        Rows of another spec_hash or model_version are passed over; if that leaves none in the bucket, `warn_stale` says
        so. The name of the device does not matter, its numbers do.
        """
        found = next(iter(self.candidates(shape, device, model_version)), None)
        if found is None or found.source == "nearest":
            self.warn_stale(shape, device, model_version)
        return found

    def candidates(self, shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION) -> list[Found]:
        """Every row that `lookup` may answer with, best first, for a caller that has to pass over some; no warnings.

        Order: exact, bucket, nearest; then distance; then the smaller q_len, kv_len, batch_heads.
        """
        key, now = key_of(shape), validity_of(device, model_version)
        rows = self._alike.get(_exact(key), ())
        return sorted((_found(key, entry) for entry in rows if entry.header.validity == now), key=_rank)

    def warn_stale(self, shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION):
        """Say, once per device and key, if a row of the bucket is of another spec or model, and which field differs."""
        key, now = key_of(shape), validity_of(device, model_version)
        for entry in self._alike.get(_exact(key), ()):
            had = entry.header.validity
            other = entry.header.name != device.name and had["spec_hash"] != now["spec_hash"]  # a row of another chip
            if had == now or other or _bucket(entry.key) != _bucket(key):
                continue
            why = "; ".join(f"{name} was {had[name]}, is {now[name]} now" for name in now if had[name] != now[name])
            row = f"tile table: row {device.name} {label_of(entry.key)} is not used"
            warn_once(call_of(shape, device, model_version), f"{row}: {why}; tune again to renew it")

    @functools.cached_property
    def _alike(self) -> dict[str, list[Entry]]:
        """The rows by the exact fields of their keys."""
        alike = {}
        for entry in self.entries:
            if entry.header.kernel == KERNEL:
                alike.setdefault(_exact(entry.key), []).append(entry)
        return alike

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
        return "\n".join([repr(self), *listing(self.entries)])


def change_file(path: str | os.PathLike[str], change: Callable[[TileTable], TileTable]) -> TileTable:
    """Write what `change` makes of the table in the file (an empty one if there is none), in one step; returns it.

    Concurrent writers wait for each other (a lock file beside it). A broken file there is kept aside as
    `<name>.corrupt-<n>`, with a TileTableWarning. Raises NewerTileTableError for a file of a higher major version and
    OSError if the place cannot be written; what was there is untouched then.
    """
    path = Path(path).expanduser().resolve()
    with changing(path) as old:
        changed = change(_from_document(path, old))
        replace_document(path, old, changed._blocks())
    return changed


def problems(path: str | os.PathLike[str]) -> list[str]:
    """All that keeps a table file, or rows of it, from being used, with the names of the rows; [] for a good file.

    Raises OSError if the file cannot be read.
    """
    path = Path(path).expanduser()
    try:
        blocks = read_document(path)["tables"]
    except TileTableError as error:
        return [str(error)]
    return [f"{path}: {what}" for what in _problems(blocks)]


def _problems(blocks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    seen = set()
    for number, block in enumerate(blocks, 1):
        header = Header.from_block(block)
        yield from (f"block {number}: {what}" for what in block_problems(block))
        for row in block["entries"]:
            name, identity = f"row {header.name} {label_of(_key(row))}", header.identity(_key(row))
            wrong = row_problems(row)
            yield from (f"{name}: {what}" for what in wrong)
            if wrong:
                continue
            if unknown := sorted(k for k, x in row["key"].items() if k not in EXACT + BUCKET and x is not None):
                yield f"{name}: key: {', '.join(unknown)} is not known here; the row is never used"
            if identity in seen:
                yield f"{name}: there twice; the last one is used"
            seen.add(identity)


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


def listing(entries: Iterable[Entry], note: Callable[[Entry], str] = lambda entry: "") -> list[str]:
    """One line a row: device, key, tile, time, gain over the default, bound, whether its search finished, a note."""
    cells = [(*_cells(entry), note(entry)) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [("  " + "  ".join(map(str.ljust, row, widths))).rstrip() for row in cells]


def _cells(entry: Entry) -> tuple[str, ...]:
    gain = f"{entry.default_us / entry.predicted_us:.2f}x default" if entry.default_us else ""
    done = "" if entry.complete else "search not finished"
    time = f"{entry.predicted_us:.6g} us"
    return (entry.header.name, label_of(entry.key), entry.tile.label, time, gain, entry.bound or "", done)


def _exact(key: Mapping[str, Any]) -> str:
    """The key's text without its sizes."""
    return text_of({name: value for name, value in key.items() if name not in BUCKET})


def _bucket(key: Mapping[str, Any]) -> list[int]:
    """The sizes, as exponents of the next power of two."""
    return [(key[name] - 1).bit_length() for name in BUCKET]


def _found(key: Mapping[str, Any], entry: Entry) -> Found:
    far = _distance(key, entry.key)
    source = "exact" if not far else "bucket" if _bucket(entry.key) == _bucket(key) else "nearest"
    return Found(entry.tile, source, far, entry)


def _rank(found: Found) -> tuple:
    return (SOURCES.index(found.source), found.distance, [found.entry.key[name] for name in BUCKET])


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """sqrt(sum over BUCKET of log2(ratio)^2); fsum, so that ties are ties in any order of the terms."""
    ratios = (max(one[name], other[name]) / min(one[name], other[name]) for name in BUCKET)
    return math.sqrt(math.fsum(math.log2(ratio) ** 2 for ratio in ratios))


def call_of(shape: AttentionShape, device: DeviceSpec, model_version: str = MODEL_VERSION) -> tuple[str, ...]:
    """A call as warnings tell it from others."""
    return (device.name, *validity_of(device, model_version).values(), text_of(key_of(shape)))


_seen: set[tuple] = set()  # what was warned about


def warn_once(what: tuple, message: str):
    """A TileTableWarning, once per process for each `what`, which for a call is `call_of` it."""
    if what not in _seen:
        _seen.add(what)
        warnings.warn(message, TileTableWarning, stacklevel=2)


# Which tables are searched -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Use:
    """A `use_table` that is in force. name: for messages; file: where rows go that are tuned on a miss, if anywhere."""

    table: TileTable
    name: str
    on_miss: str = ON_MISS[0]
    file: Path | None = None


_stack: contextvars.ContextVar[tuple[Use, ...]] = contextvars.ContextVar("npumodel_tables", default=())
_files: dict[Path, tuple[tuple[int, ...], TileTable]] = {}  # path -> version of the file, what it held
_files_lock = threading.RLock()


@contextlib.contextmanager
def use_table(table: TileTable | str | os.PathLike[str], on_miss: str = "heuristic") -> Iterator[TileTable]:
    """Search this table (or file, or directory of *.json files) first, inside the `with` and in this thread; nests.

    on_miss  what an "auto" call on a device gets that no row of any active table serves; the innermost `with` decides:
             "heuristic"  the model's choice of a small fixed set, with one TileTableWarning per device and key
             "autotune"   a search now (`tune` as it is by default). Its row is remembered in this process and, if
                          `table` is a file, saved in it (a *.json that does not exist is made). One search at most per
                          device and bucket of sizes
             "error"      TileTableMiss (a KeyError): the key, the tables searched, the cure

    A broken file is a miss with a TileTableWarning. Raises FileNotFoundError for a path that does not exist, ValueError
    for another on_miss.
    """
    if on_miss not in ON_MISS:
        raise ValueError(f"on_miss: expected one of {', '.join(ON_MISS)}, got {on_miss!r}")
    use = _use(table, on_miss)
    token = _stack.set((use, *_stack.get()))
    try:
        yield use.table
    finally:
        _stack.reset(token)


def _use(table: TileTable | str | os.PathLike[str], on_miss: str) -> Use:
    if isinstance(table, TileTable):
        return Use(table, "a TileTable", on_miss)
    path = Path(table).expanduser().resolve()
    if path.is_dir():
        tables = [found for _, found in _tables_at(path)]
        return Use(functools.reduce(TileTable.merge, reversed(tables), TileTable()), str(path), on_miss)
    if on_miss == "autotune" and path.suffix == ".json" and not path.exists():
        return Use(TileTable(), str(path), on_miss, path)
    path.stat()
    return Use(_cached(path), str(path), on_miss, path)


def active_use() -> Use:
    """The innermost `use_table`."""
    return next(iter(_stack.get()), Use(TileTable(), "no table"))


def active_tables() -> list[TileTable]:
    """The tables to search, in order: those of `use_table`, inner first, then those of NPUMODEL_TABLE_PATH.

    NPUMODEL_TABLE_PATH: files, and directories of *.json files (by name), joined by os.pathsep. A file is read again
    only when it has changed. A missing path and a broken file are a miss with a TileTableWarning, once.
    """
    return [table for _, table in named_tables()]


def named_tables() -> list[tuple[str, TileTable]]:
    """`active_tables`, each with a name for messages."""
    places = filter(None, os.environ.get("NPUMODEL_TABLE_PATH", "").split(os.pathsep))
    used = [(use.name, use.table) for use in _stack.get()]
    return [*used, *(named for place in places for named in _tables_at(Path(place).expanduser()))]


def _tables_at(path: Path) -> list[tuple[str, TileTable]]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        warn_once((path,), f"tile table directory {path} holds no *.json file")
    return [(str(file), _cached(file)) for file in files]


def _cached(path: Path) -> TileTable:
    try:
        stat = path.stat()
    except OSError as error:
        warn_once((path,), f"tile table {path} (NPUMODEL_TABLE_PATH) is not used: {error.strerror}")
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
