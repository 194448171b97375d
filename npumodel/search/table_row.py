"""One row of the learned tile table: its key, its header and its values, as they stand in the file.

Times are microseconds here (`*_us`), since `Entry` is the record of the file; `Entry.of` takes seconds.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from npumodel.hardware.spec import DeviceSpec
from npumodel.tile import TILE_DEFAULTS, TileConfig
from npumodel.workload import AttentionShape

#: Version of the performance model. Raise it when the same plan gets another price: rows of another one are stale.
MODEL_VERSION = "3"
KERNEL = "flash_attention_fwd"

#: Fields of a key. An absent field means null, so that a later version can add one whose null is today's meaning;
#: a row with a field that is unknown here (and not null) is kept, but never matches.
EXACT = (
    "dtype",
    "head_dim",
    "v_head_dim",
    "causal",
    "mask",
    "gqa_group",
    "window",
    "softcap",
    "v_in_k",
    "backward",
    "lengths",
)
BUCKET = ("q_len", "kv_len", "batch_heads")

#: Knobs of a config: those that every row has, and those that it has where they are not at their default.
_ALWAYS = ("block_q", "block_kv", "buffers", "lookahead", "fusion")
_NUMBERS = tuple(name for name in TILE_DEFAULTS if name not in ("fusion", "core_order", "persistent"))
_FIELDS = ("predicted_us", "default_us", "rule_us", "runner_up_us", "dma_wait_us", "bound", "evals", "complete")


def key_of(shape: AttentionShape) -> dict[str, Any]:
    """The key of a call, for writing and for reading: EXACT and BUCKET fields, batch_heads = batch * q_heads.

    Of a call with lengths, the sizes are those without padding. lengths: null if they are equal; else queries x keys
    and number of the examples of each pair of lengths, "512x2048:3 1024x1024:1". So what was found for some lengths
    serves the same ones in any order, and no others. Raises ValueError for a call that does nothing."""
    groups, shape = shape.groups, shape.largest
    lengths = " ".join(f"{g.q_len}x{g.kv_len}:{g.batch}" for g in groups)
    derived: dict[str, Any] = {
        "gqa_group": shape.q_heads // shape.kv_heads,
        "batch_heads": shape.batch * shape.q_heads,
        "window": shape.window and list(shape.window),
        "softcap": shape.softcap or None,
        "v_in_k": shape.v_in_k or None,
        "backward": shape.backward or None,
        "lengths": lengths if len(groups) > 1 else None,
    }
    return {name: derived[name] if name in derived else getattr(shape, name) for name in EXACT + BUCKET}


def text_of(key: Mapping[str, Any]) -> str:
    """One text for equal keys: sorted, without nulls."""
    return json.dumps({name: value for name, value in key.items() if value is not None}, sort_keys=True)


def label_of(key: Any) -> str:
    """A key for people, without what is null or false: "q_len=4096 kv_len=4096 batch_heads=128 dtype=float16 ..."."""
    if not isinstance(key, Mapping):
        return repr(key)
    return " ".join(f"{name}={key[name]}" for name in (*BUCKET, *EXACT) if key.get(name) not in (None, False))


@dataclasses.dataclass(frozen=True)
class Header:
    """What the rows of one block share. `extra`: fields of the block that this version does not know, kept as they are.

    device       {name, soc, family, arch, spec_hash = fingerprint of the spec, cube_cores}
    environment  {npumodel, jax}: versions
    provenance   {source: "model", created: UTC in ISO 8601, command, strategy, seed}
    """

    device: Mapping[str, Any]
    model_version: str = MODEL_VERSION
    kernel: str = KERNEL
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        device: DeviceSpec,
        *,
        model_version: str = MODEL_VERSION,
        command: str | None = None,
        strategy: str | None = None,
        seed: int | None = None,
        **provenance,
    ) -> Header:
        """The header of a run on `device`, made now with the model; further provenance must be plain JSON values."""
        created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        run = {"source": "model", "created": created, "command": command, "strategy": strategy, "seed": seed}
        return cls(_device(device), model_version, KERNEL, _environment(), {**run, **provenance})

    @classmethod
    def from_block(cls, block: Mapping[str, Any]) -> Header:
        """Read the header of a block of the file."""
        known = [field.name for field in dataclasses.fields(cls) if field.name != "extra"]
        extra = {name: value for name, value in block.items() if name not in (*known, "entries")}
        return cls(**{name: block[name] for name in known if name in block}, extra=extra)

    def to_block(self) -> dict[str, Any]:
        """The block of the file, without its entries."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**known.pop("extra"), **known}

    @property
    def name(self) -> str:
        """Name of the device."""
        return str(self.device.get("name"))

    @functools.cached_property
    def validity(self) -> dict[str, str]:
        """What has to be as it is now for the rows to be used."""
        return {"spec_hash": str(self.device.get("spec_hash")), "model_version": str(self.model_version)}

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """Place of the block in a file: by device, spec, model, age, then by all of it."""
        age = str(self.provenance.get("created"))
        return (self.name, *self.validity.values(), age, json.dumps(self.to_block(), sort_keys=True))

    def identity(self, key: Any) -> tuple[str, ...]:
        """What tells a row under this header from all others: kernel, spec_hash, model_version, key."""
        return (str(self.kernel), *self.validity.values(), text_of(key) if isinstance(key, Mapping) else repr(key))


def validity_of(device: DeviceSpec, model_version: str) -> dict[str, str]:
    """The `Header.validity` of rows made now on `device`."""
    return {"spec_hash": device.fingerprint(), "model_version": str(model_version)}


def _device(device: DeviceSpec) -> dict[str, Any]:
    names = {name: getattr(device, name) for name in ("name", "soc", "family", "arch")}
    return {**names, "spec_hash": device.fingerprint(), "cube_cores": _plain(device.cube_cores)}


@functools.cache
def _environment() -> dict[str, str]:
    try:
        version = importlib.metadata.version("npumodel")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    return {"npumodel": version, "jax": jax.__version__}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row: the tile found for one key, and how sure that is. Times in microseconds; None = not known.

    predicted_us         price of the tile
    default_us, rule_us  price of the default tile and of the rule's tile for the same call
    runner_up_us         price of the second-best tile
    dma_wait_us          stage -> time that it waited for data
    bound                name of what limits the plan
    evals, complete      candidates priced; whether the search finished (False: it ran out of budget)
    extra                fields of the row that this version does not know, kept as they are

    Raises ValueError (expected, got) for a key without its sizes, a block or a time that is not finite and positive.
    """

    header: Header
    key: Mapping[str, Any]
    tile: TileConfig
    predicted_us: float
    default_us: float | None = None
    rule_us: float | None = None
    runner_up_us: float | None = None
    dma_wait_us: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bound: str | None = None
    evals: int | None = None
    complete: bool = True
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if wrong := row_problems(self.to_row()):
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(
        cls,
        header: Header,
        shape: AttentionShape,
        tile: TileConfig,
        predicted_s: float,
        *,
        default_s: float | None = None,
        rule_s: float | None = None,
        runner_up_s: float | None = None,
        dma_wait_s: Mapping[str, float] | None = None,
        bound: str | None = None,
        evals: int | None = None,
        complete: bool = True,
        **extra,
    ) -> Entry:
        """The row of one search result. Times in seconds, kept as microseconds with 9 digits; `extra`: JSON values."""
        plain = tile.replace(**{name: _plain(getattr(tile, name)) for name in _NUMBERS})
        waits = {stage: _us(wait) for stage, wait in (dma_wait_s or {}).items()}
        default, rule, runner_up = (None if time is None else _us(time) for time in (default_s, rule_s, runner_up_s))
        count = None if evals is None else int(evals)
        return cls(
            header,
            key_of(shape),
            plain,
            _us(predicted_s),
            default,
            rule,
            runner_up,
            dma_wait_us=waits,
            bound=bound,
            evals=count,
            complete=bool(complete),
            extra=extra,
        )

    @classmethod
    def from_row(cls, header: Header, row: Any) -> Entry:
        """Read a row of the file. Raises ValueError that says everything that is wrong with it."""
        if wrong := row_problems(row):
            raise ValueError("; ".join(wrong))
        fields = {name: row[name] for name in _FIELDS if name in row}
        extra = {name: value for name, value in row.items() if name not in (*_FIELDS, "key", "config")}
        return cls(header, row["key"], TileConfig(**row["config"]), **fields, extra=extra)

    def to_row(self) -> dict[str, Any]:
        """The row of the file."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        knobs = {name: getattr(self.tile, name) for name in TILE_DEFAULTS}
        config = {name: value for name, value in knobs.items() if name in _ALWAYS or value != TILE_DEFAULTS[name]}
        return {**self.extra, "key": self.key, "config": config, **fields}

    @property
    def identity(self) -> tuple[str, ...]:
        """Of two rows with equal identity the newer wins."""
        return self.header.identity(self.key)

    @property
    def order(self) -> tuple:
        """Place of the row in a file: by block, then by key, numbers as numbers."""
        named = sorted((name, *_place(value)) for name, value in self.key.items() if value is not None)
        return (self.header.order, named)


def _place(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, value if number else 0, "" if number else json.dumps(value))


# What may be wrong ---------------------------------------------------------------------------------------------------


def block_problems(block: Mapping[str, Any]) -> list[str]:
    """What is wrong with the header of a block of the file; its rows cannot be told from others, then."""
    device = block["device"]
    texts = {f"device.{name}": device.get(name) for name in ("name", "spec_hash")}
    texts |= {name: block.get(name) for name in ("kernel", "model_version")}
    return [f"{name}: expected a string, got {_shown(x)}" for name, x in texts.items() if not isinstance(x, str)]


def row_problems(row: Any) -> list[str]:
    """What is wrong with a row of the file, everything at once; [] if it can be used."""
    if not isinstance(row, Mapping) or not all(isinstance(row.get(name), Mapping) for name in ("key", "config")):
        return ["expected an object with a key and a config"]
    return [*_key_problems(row["key"]), *_config_problems(row["config"]), *_value_problems(row)]


def _key_problems(key: Mapping[str, Any]) -> list[str]:
    sizes = [_number_problem(f"key.{name}", key.get(name), int) for name in BUCKET]
    others = [
        f"key.{name}: expected a string, a number, null or a list of these, got {_shown(value)}"
        for name, value in key.items()
        if name not in BUCKET and not all(map(_is_scalar, value if isinstance(value, list) else [value]))
    ]
    return [*filter(None, sizes), *others]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | None)


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    if unknown := sorted(set(config) - set(TILE_DEFAULTS)):
        return [f"config: {', '.join(unknown)} is not known here; update npumodel to use the row"]
    asked = {name: config.get(name) for name in _NUMBERS if name in config or name in ("block_q", "block_kv")}
    wrong = [_number_problem(f"config.{name}", x, int, zero=name == "lookahead") for name, x in asked.items()]
    if any(wrong):
        return [*filter(None, wrong)]
    try:
        TileConfig(**config)
    except ValueError as error:
        return [f"config.{error}"]
    return []


def _value_problems(row: Mapping[str, Any]) -> list[str]:
    times = [name for name in ("default_us", "rule_us", "runner_up_us") if row.get(name) is not None]
    wrong = [_number_problem(name, row.get(name), float) for name in ("predicted_us", *times)]
    waits = row.get("dma_wait_us", {})
    if isinstance(waits, Mapping):
        wrong += [_number_problem(f"dma_wait_us.{stage}", wait, float, zero=True) for stage, wait in waits.items()]
    else:
        wrong.append(f"dma_wait_us: expected an object, got {_shown(waits)}")
    if not isinstance(row.get("bound"), str | None):
        wrong.append(f"bound: expected a string or null, got {_shown(row['bound'])}")
    if row.get("evals") is not None:
        wrong.append(_number_problem("evals", row["evals"], int, zero=True))
    if not isinstance(row.get("complete", True), bool):
        wrong.append(f"complete: expected true or false, got {_shown(row['complete'])}")
    return [*filter(None, wrong)]


def _number_problem(name: str, value: Any, kind: type, *, zero: bool = False) -> str | None:
    kinds = (int, float) if kind is float else (int,)
    good = isinstance(value, kinds) and not isinstance(value, bool) and -_MOST < value < _MOST
    if good and (value > 0 or (value == 0 and zero)):
        return None
    noun, sign = "a number" if kind is float else "an integer", ">=" if zero else ">"
    return f"{name}: expected {noun} {sign} 0, got {_shown(value)}"


#: Beyond any number of a row.
_MOST = 1e300


def _shown(value: Any) -> str:
    return reprlib.repr(value)  # a number may have thousands of digits


def _us(seconds: Any) -> float:
    return float(f"{float(seconds) * 1e6:.9g}")


def _plain(number: Any) -> int | float:
    """A Python number, an int where it is whole; NumPy and JAX scalars do not go into JSON."""
    value = float(number)
    return int(value) if value.is_integer() else value
