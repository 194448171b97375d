"""A tile table in the formats of other tools: what they read, and what of a tile they cannot say.

csv       one line a row, for spreadsheets
t4        results of an auto-tuning run as FAIR T4 1.0.0 JSON (odgaard/TuningSchema, branch T4, results-schema.json)
triton    `triton.Config`s for an attention kernel; on an NPU triton-ascend tunes block sizes and `multibuffer`
tilelang  parameters of an attention kernel as tilelang(-ascend)'s examples name them
vllm      {bucket: config} files as vLLM keeps them for its fused MoE kernel (vllm/.../fused_moe/configs)

Every time here is a prediction of the model, no measurement, unless the row's `source` says otherwise. A knob that a
format has no word for stands under "npumodel" or as "npumodel_<knob>"; none is lost. `perf_model` has the other half of
Triton: prices for its autotuner.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from npumodel.search.table import TileTable
from npumodel.search.table_file import TileTableWarning
from npumodel.search.table_row import BUCKET, EXACT, MODEL_VERSION, Entry, Header
from npumodel.search.tuner import TuneResult, TuneResults
from npumodel.tile import TILE_DEFAULTS, TileConfig

FORMATS = ("csv", "t4", "triton", "tilelang", "vllm")
#: Knobs of a tile, in the order of TileConfig.
KNOBS = tuple(TILE_DEFAULTS)

#: Columns of the CSV, in this order, whatever the rows; a later version may know more: read them by name.
COLUMNS = (
    *("device", "soc", "family", "spec_hash", "model_version", "kernel"),
    *EXACT,
    *BUCKET,
    *KNOBS,
    *("predicted_us", "default_us", "rule_us", "runner_up_us", "bound", "evals", "complete"),
    *("source", "created", "strategy", "seed", "dma_wait_us", "other"),
)

#: What the knobs are called in a Triton kernel and in a TileLang one.
TRITON_NAMES = {"block_q": "BLOCK_M", "block_kv": "BLOCK_N"}
TILELANG_NAMES = {"block_q": "block_M", "block_kv": "block_N", "buffers": "num_stages"}
_RESERVED = {"multibuffer", "num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override"}
#: Triton's own default. The NPU has no warps.
_WARPS = 4


def export(table: TileTable, to: str, **options) -> str:
    """The table as the text of a file: CSV, else JSON. vllm: {file name: {bucket: config}}, a file each.

    options: those of the function for the format. Raises ValueError for an unknown format, and as that function does.
    """
    if to not in FORMATS:
        raise ValueError(f"to: expected one of {', '.join(FORMATS)}, got {to!r}")
    if to == "csv":
        return to_csv(table, **options)
    make: Any = {"t4": to_t4, "triton": triton_configs, "tilelang": tilelang_configs, "vllm": vllm_configs}[to]
    return json.dumps(make(table, **options), indent=2, allow_nan=False) + "\n"


def save(table: TileTable, to: str, out: str | os.PathLike[str], **options) -> list[Path]:
    """Write what `export` gives to the file `out`; vllm: to files in the folder `out`. Returns what was written."""
    out, text = Path(out).expanduser(), export(table, to, **options)
    texts = {out: text}
    if to == "vllm":
        texts = {out / name: json.dumps(file, indent=2) + "\n" for name, file in json.loads(text).items()}
    for path, content in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="\n")
    return [*texts]


# CSV -----------------------------------------------------------------------------------------------------------------


def to_csv(table: TileTable) -> str:
    """One line a row, under COLUMNS. Times in microseconds; `cores` 1048576 = all of the chip.

    Empty: null. True and False: true, false. A window, the waits of the stages (`dma_wait_us`) and what this version
    does not know of a row (`other`): JSON.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for entry in _entries(table):
        writer.writerow({name: _cell(value) for name, value in _row(entry).items()})
    return out.getvalue()


def _row(entry: Entry) -> dict[str, Any]:
    header, known = entry.header, {*EXACT, *BUCKET}
    device, run = header.device, header.provenance
    strange = {name: value for name, value in entry.key.items() if name not in known and value is not None}
    other = {**({"key": strange} if strange else {}), **entry.extra}
    return {
        "device": header.name,
        **{name: device.get(name) for name in ("soc", "family", "spec_hash")},
        "model_version": header.model_version,
        "kernel": header.kernel,
        **{name: entry.key.get(name) for name in EXACT + BUCKET},
        **_knobs(entry.tile),
        **{name: getattr(entry, name) for name in ("predicted_us", "default_us", "rule_us", "runner_up_us")},
        **{name: getattr(entry, name) for name in ("bound", "evals", "complete")},
        **{name: run.get(name) for name in ("source", "created", "strategy", "seed")},
        "dma_wait_us": entry.dma_wait_us or None,
        "other": other or None,
    }


def _cell(value: Any) -> Any:
    if isinstance(value, bool | list | tuple | Mapping):
        return json.dumps(value, sort_keys=True)
    return "" if value is None else value


def _knobs(tile: TileConfig) -> dict[str, Any]:
    return {name: getattr(tile, name) for name in KNOBS}


# FAIR T4 -------------------------------------------------------------------------------------------------------------


def to_t4(source: TileTable | TuneResult | TuneResults) -> dict[str, Any]:
    """FAIR T4 1.0.0: {schema_version, metadata, results}. Times in milliseconds, as Kernel Tuner writes them.

    Of a search: the best tile, its near ties, the runner-up, and the default's, the rule's and `auto`'s, fastest first
    (the search keeps no others). Of a table: every row, which is the best tile of its call. `configuration` has every
    knob. Nothing was compiled, run or checked: these times are 0 and `runtimes` is the one prediction; all points are
    legal in the model ("correct"). Beyond T4, each result has an "npumodel" object: device, call, and what it is.
    """
    if isinstance(source, TuneResult):
        return _t4(*_searched(source))
    if isinstance(source, TuneResults):
        parts = [_searched(one) for one in source]
        return _t4([result for results, _ in parts for result in results], {"searches": [about for _, about in parts]})
    return _t4([_t4_result(entry, ["best"]) for entry in _entries(source)], {})


def _searched(r: TuneResult) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    named = {name: getattr(r, name) for name in ("runner_up", "default", "rule", "auto")}
    points = [("best", r.tile, r.seconds), *((role, *point) for role, point in named.items() if point is not None)]
    points += [("near_tie", *point) for point in r.near_ties]
    roles: dict[TileConfig, list[str]] = {}
    for role, tile, _ in points:
        roles.setdefault(tile, []).append(role)
    seconds = {tile: time for _, tile, time in points}
    header = Header.of(r.device, strategy=r.strategy, seed=r.seed)
    tiles = sorted(roles, key=seconds.__getitem__)
    results = [_t4_result(Entry.of(header, r.shape, tile, seconds[tile]), roles[tile]) for tile in tiles]
    about = {"call": r.shape.label, "device": r.device.name, "space_size": r.space_size, "rejected": r.rejected}
    about |= {name: getattr(r, name) for name in ("evals", "complete", "strategy", "seed")} | {"elapsed_s": r.elapsed}
    return results, about


def _t4(results: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    versions = sorted({result["npumodel"].pop("npumodel_version") for result in results})
    metadata = {
        "autotuner": "npumodel",
        "autotuner_version": ", ".join(versions),
        "device": ", ".join(sorted({result["npumodel"]["device"] for result in results})),
        "timeunit": "milliseconds",
        "npumodel": {"times": "predicted by the performance model, unless a result's source says otherwise", **about},
    }
    return {"schema_version": "1.0.0", "metadata": metadata, "results": results}


def _t4_result(entry: Entry, roles: list[str]) -> dict[str, Any]:
    milliseconds = entry.predicted_us / 1e3
    nothing = dict.fromkeys(("framework", "search_algorithm", "validation"), 0.0)
    return {
        "timestamp": str(entry.header.provenance.get("created", "")),
        "configuration": _knobs(entry.tile),
        "objectives": ["time"],
        # T4 says compilation_time, Kernel Tuner reads and writes compilation
        "times": {"compilation_time": 0.0, "compilation": 0.0, "runtimes": [milliseconds], **nothing},
        "invalidity": "correct",
        "correctness": 1,
        "measurements": [{"name": "time", "value": milliseconds, "unit": "ms"}],
        "npumodel": {
            **_origin(entry),
            "is": roles,
            "source": entry.header.provenance.get("source"),
            "npumodel_version": str(entry.header.environment.get("npumodel", "unknown")),
        },
    }


def _origin(entry: Entry) -> dict[str, Any]:
    """Which call on which device a tile is for."""
    key = {name: value for name, value in entry.key.items() if value is not None}
    header = entry.header
    where = {"device": header.name, "spec_hash": header.device.get("spec_hash"), "model_version": header.model_version}
    return {**where, "key": key}


# Kernels -------------------------------------------------------------------------------------------------------------


def triton_configs(
    table: TileTable, names: Mapping[str, str] | None = None, ascend: bool = True
) -> list[dict[str, Any]]:
    """Distinct candidates for `triton.autotune`, fastest row first: {"kwargs": {"BLOCK_M": block_q, "BLOCK_N":
    block_kv, "multibuffer": buffers > 1}, "num_warps": 4, "num_stages": buffers, "npumodel": [...]}.

    names   what the kernel calls a knob, beside or instead of TRITON_NAMES: {"split_kv": "SPLIT_KV"}
    ascend  False: without `multibuffer`, which is a compile option of triton-ascend only

    triton-ascend does not use num_warps and its multibuffer is two buffers (triton-ascend, python/triton/runtime/
    autotuner.py, has the signature of Config). "npumodel" lists the rows behind a candidate: device, key, predicted_us
    (microseconds), and `not_in_config`: the knobs that it cannot say and that are not at TileConfig's default.

    Rows of another model version are left out, with a TileTableWarning. Raises ValueError for names that are none, and
    for a table with rows of both passes.
    """
    names = triton_names(names)

    def config(entry: Entry) -> tuple[dict[str, Any], set[str]]:
        buffers = entry.tile.buffers
        kwargs = _renamed(entry.tile, names) | ({"multibuffer": buffers > 1} if ascend else {})
        said = {"buffers"} if not ascend or buffers <= 2 else set()
        return {"kwargs": kwargs, "num_warps": _WARPS, "num_stages": buffers}, {*names} | said

    return _distinct(_one_pass(_fresh(table)), config)


def triton_objects(configs: Iterable[Mapping[str, Any]], ignore: Collection[str] = ()) -> list[Any]:
    """`triton.Config` objects of what `triton_configs` gives.

    ignore  knobs that may be left out, because the kernel or the compiler settles them: ("lookahead", "cores")

    Raises ImportError without triton, and ValueError for a candidate whose tile has a knob that the Config cannot say:
    the kernel would not be the plan that was priced.
    """
    _check_knobs("ignore", ignore)
    configs = [*configs]
    for config in configs:
        for row in config["npumodel"]:
            if lost := {name: value for name, value in row["not_in_config"].items() if name not in ignore}:
                first, text = next(iter(lost)), ", ".join(f"{name}={value}" for name, value in lost.items())
                raise ValueError(
                    f"configs: expected tiles that {config['kwargs']} says in full, got {text} besides; give "
                    f'triton_configs names={{"{first}": "{first.upper()}"}} if the kernel takes it, '
                    f'or ignore=("{first}",) if it settles that itself'
                )
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        cure = "install triton-ascend (triton on a GPU), or use the dictionaries of triton_configs"
        raise ImportError(f"triton is not there ({error}); {cure}", name="triton") from None
    return [triton.Config(dict(c["kwargs"]), num_warps=c["num_warps"], num_stages=c["num_stages"]) for c in configs]


def tilelang_configs(table: TileTable, names: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Distinct parameters of a TileLang attention kernel, fastest row first: {"config": {"block_M": block_q, "block_N":
    block_kv, "num_stages": buffers}, "npumodel": [...]}.

    names   what the kernel calls a knob, beside or instead of TILELANG_NAMES

    The names are those of the attention examples of tile-ai/tilelang and tilelang-ascend; `num_stages` is that of
    T.Pipelined, taken to be the number of buffers (assumed, not checked on a compiler). There is no `threads`: the
    model has none. "npumodel", warnings and errors: as of `triton_configs`.
    """
    names = _names(names, TILELANG_NAMES)
    return _distinct(_one_pass(_fresh(table)), lambda entry: ({"config": _renamed(entry.tile, names)}, {*names}))


def vllm_configs(
    table: TileTable, names: Mapping[str, str] | None = None, q_heads: int | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """{file name: {bucket: config}}: one file for each device and kind of call, buckets as text, ascending.

    bucket   batch * kv_len where `q_heads` is given, else batch * q_heads * kv_len (a table knows only the product)
    config   BLOCK_M, BLOCK_N, multibuffer, num_warps, num_stages as of `triton_configs`; every knob that these cannot
             say and that is not at TileConfig's default as npumodel_<knob>, which no kernel takes by accident

    The name says what is fixed ("q_len=kv_len,dtype=float16,...,device_name=ascend910b2.json"); a reader takes the
    nearest bucket, as vLLM does. Such a file has no word for the times: keep the table.

    Raises ValueError for two rows of one bucket with different configs, two specs under one name, and a q_heads that
    does not divide.
    """
    names = triton_names(names)
    files: dict[str, dict[int, dict[str, Any]]] = {}
    first: dict[Any, Entry] = {}  # of each file, and of each bucket of it
    for entry in _fresh(table):
        bucket, config, name = _bucket(entry, q_heads), _vllm_config(entry.tile, names), _vllm_name(entry, q_heads)
        other = first.setdefault(name, entry)
        if other.header.validity != entry.header.validity:
            raise ValueError(f"table: expected one device a name, got two: {_two(other, entry)}")
        if files.setdefault(name, {}).setdefault(bucket, config) != config:
            two = _two(first[name, bucket], entry)
            raise ValueError(f"table: expected one config a bucket, got two for {bucket}: {two}")
        first.setdefault((name, bucket), entry)
    return {name: {str(bucket): files[name][bucket] for bucket in sorted(files[name])} for name in sorted(files)}


def _two(one: Entry, other: Entry) -> str:
    cure = "keep one of them: TileTable(tuple(entry for entry in table.entries if ...))"
    return f"{_origin(one)} and {_origin(other)}; {cure}"


def _vllm_config(tile: TileConfig, names: Mapping[str, str]) -> dict[str, Any]:
    said = {*names} | ({"buffers"} if tile.buffers <= 2 else set())
    rest = {f"npumodel_{name}": value for name, value in _unsaid(tile, said).items()}
    plain = {"multibuffer": tile.buffers > 1, "num_warps": _WARPS, "num_stages": tile.buffers}
    return {**_renamed(tile, names), **plain, **rest}


def _vllm_name(entry: Entry, q_heads: int | None) -> str:
    key = entry.key
    q_len = "kv_len" if key["q_len"] == key["kv_len"] else key["q_len"]
    exact = {name: key.get(name) for name in sorted({*EXACT, *key} - {*BUCKET})}
    parts: dict[str, Any] = {"q_len": q_len, "q_heads": q_heads, **exact, "device_name": entry.header.name}
    texts = (f"{name}={value}" for name, value in parts.items() if value is not None and value is not False)
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(texts)) + ".json"


def _bucket(entry: Entry, q_heads: int | None) -> int:
    batch_heads = int(entry.key["batch_heads"])
    if q_heads is None:
        return batch_heads * int(entry.key["kv_len"])
    if isinstance(q_heads, bool) or not isinstance(q_heads, int) or q_heads < 1 or batch_heads % q_heads:
        raise ValueError(f"q_heads: expected a divisor of batch * q_heads = {batch_heads}, got {q_heads!r}")
    return batch_heads // q_heads * int(entry.key["kv_len"])


# Common --------------------------------------------------------------------------------------------------------------


def _entries(table: Any) -> tuple[Entry, ...]:
    if not isinstance(table, TileTable):
        raise ValueError(f"table: expected a TileTable, got {table!r}; read a file with TileTable.load")
    return table.entries


def _fresh(table: Any) -> list[Entry]:
    """Rows of this model version, fastest first; ties in the order of the table."""
    entries = _entries(table)
    fresh = [entry for entry in entries if str(entry.header.model_version) == MODEL_VERSION]
    if len(fresh) < len(entries):
        what = f"tile table: {len(entries) - len(fresh)} row(s) of another model_version are left out"
        warnings.warn(f"{what} (now {MODEL_VERSION}); tune again to renew them", TileTableWarning, stacklevel=3)
    return sorted(fresh, key=lambda entry: entry.predicted_us)


def _one_pass(entries: list[Entry]) -> list[Entry]:
    if len({bool(entry.key.get("backward")) for entry in entries}) > 1:
        cure = 'TileTable(tuple(entry for entry in table.entries if not entry.key.get("backward")))'
        raise ValueError(f"table: expected rows of one pass, got forward and backward ones; keep one kind: {cure}")
    return entries


def triton_names(names: Mapping[str, str] | None) -> dict[str, str]:
    """TRITON_NAMES with these beside or instead. Raises ValueError for a knob or a name that is none."""
    found = _names(names, TRITON_NAMES)
    if clash := _RESERVED & {*found.values()}:
        raise ValueError(f"names: expected names that Triton does not use itself, got {', '.join(sorted(clash))}")
    return found


def _names(names: Mapping[str, str] | None, usual: Mapping[str, str]) -> dict[str, str]:
    _check_knobs("names", names or {})
    found = {**usual, **(names or {})}
    bad = [name for name in found.values() if not isinstance(name, str) or not name.isidentifier()]
    if bad or len({*found.values()}) < len(found):
        raise ValueError(f"names: expected distinct names of kernel parameters, got {found}")
    return found


def _check_knobs(what: str, knobs: Iterable[str]):
    unknown = [knobs] if isinstance(knobs, str) else [str(name) for name in knobs if name not in KNOBS]
    if unknown:
        raise ValueError(f"{what}: expected knobs out of {', '.join(KNOBS)}, got {', '.join(unknown)}")


def _renamed(tile: TileConfig, names: Mapping[str, str]) -> dict[str, Any]:
    return {name: getattr(tile, knob) for knob, name in names.items()}


def _unsaid(tile: TileConfig, said: Collection[str]) -> dict[str, Any]:
    """The knobs not in `said` that are not at their default."""
    return {name: value for name, value in _knobs(tile).items() if name not in said and value != TILE_DEFAULTS[name]}


def _distinct(entries: Iterable[Entry], config) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        made, said = config(entry)
        row = {**_origin(entry), "predicted_us": entry.predicted_us, "not_in_config": _unsaid(entry.tile, said)}
        found.setdefault(json.dumps(made, sort_keys=True), {**made, "npumodel": []})["npumodel"].append(row)
    return [*found.values()]
