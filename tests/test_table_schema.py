"""The JSON Schema of tile tables: what is written obeys it, and it refuses what the reader refuses."""

import dataclasses
import importlib.resources
import json
import re

import pytest

from npumodel.hardware import device
from npumodel.search.table import Entry, Header, TileTable, key_of, problems
from npumodel.search.table_file import FRAME
from npumodel.search.table_row import EXACT
from npumodel.tile import CORE_ORDERS, FUSIONS, MAX_BUFFERS, MAX_LOOKAHEAD, TileConfig
from npumodel.workload import AttentionShape

SCHEMA = json.loads(importlib.resources.files("npumodel.search").joinpath("tile_table.schema.json").read_text())
SHAPE = AttentionShape.parse("B1,N8,S1024,D128,causal,WL128")
B2 = device("ascend910b2")

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
}
ABOUT = {"$schema", "title", "description", "$defs"}


def is_type(value, name):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in ("number", "integer"):
        return number and (name == "number" or value == int(value))
    return isinstance(value, TYPES[name])


def errors(value, schema, place="$"):
    """What a schema has against a value: as much of JSON Schema as this one uses, and an error for anything else."""
    for word, asked in schema.items():
        if word == "$ref":
            yield from errors(value, SCHEMA["$defs"][asked.removeprefix("#/$defs/")], place)
        elif word == "type":
            if not any(is_type(value, name) for name in ([asked] if isinstance(asked, str) else asked)):
                yield f"{place}: no {asked}"
        elif word == "const":
            if value != asked or type(value) is not type(asked):
                yield f"{place}: not {asked}"
        elif word == "enum":
            if value not in asked:
                yield f"{place}: none of {asked}"
        elif word == "pattern":
            if isinstance(value, str) and not re.search(asked, value):
                yield f"{place}: not like {asked}"
        elif word in LIMITS:
            if is_type(value, "number") and not LIMITS[word](value, asked):
                yield f"{place}: {word} {asked}"
        elif word == "anyOf":
            if all([*errors(value, one, place)] for one in asked):
                yield f"{place}: none of the alternatives"
        elif word == "items":
            for number, item in enumerate(value if isinstance(value, list) else ()):
                yield from errors(item, asked, f"{place}[{number}]")
        elif word == "required":
            yield from (f"{place}.{name}: missing" for name in asked if isinstance(value, dict) and name not in value)
        elif word == "properties":
            for name in value if isinstance(value, dict) else ():
                yield from errors(value[name], asked.get(name, {}), f"{place}.{name}")
        elif word == "additionalProperties":
            for name in set(value if isinstance(value, dict) else ()) - set(
                schema["properties"] if "properties" in schema else ()
            ):
                yield from errors(value[name], {"enum": []} if asked is False else asked, f"{place}.{name}")
        elif word not in ABOUT:
            raise NotImplementedError(word)


def document(path):
    return json.loads(path.read_text())


@pytest.fixture
def saved(tmp_path):
    """A table with every kind of row."""
    header = Header.of(B2, command="npumodel tune", strategy="coordinate", seed=0)
    shapes = [SHAPE, dataclasses.replace(SHAPE, window=(8, 9)), AttentionShape.parse("B1,N8,KV1,S9,D64,bool,softcap")]
    tiles = [TileConfig(128, 256, 1, 0), TileConfig(16, 32, fusion="partly", cores=3)]
    tiles += [TileConfig(16, 64, heads_packed=8, split_kv=2, kv_pieces=2, persistent=True, core_order="contiguous")]
    rows = [Entry.of(header, shape, tile, 1e-3) for shape, tile in zip(shapes, tiles, strict=True)]
    more = {"default_s": 2e-3, "rule_s": 2e-3, "runner_up_s": 1e-3, "bound": "mte2", "evals": 3, "complete": False}
    rows.append(Entry.of(header, AttentionShape(1, 1, 5, 6), tiles[0], 1e-3, dma_wait_s={"qk": 0.0}, note="x", **more))
    TileTable(tuple(rows)).save(tmp_path / "t.json")
    return tmp_path / "t.json"


def test_what_is_saved_obeys_the_schema(saved):
    assert [*errors(document(saved), SCHEMA)] == [] and problems(saved) == []


def test_the_schema_names_what_the_program_knows():
    config = SCHEMA["$defs"]["config"]["properties"]
    assert set(config) == {field.name for field in dataclasses.fields(TileConfig)}
    assert tuple(config["fusion"]["enum"]) == FUSIONS and tuple(config["core_order"]["enum"]) == CORE_ORDERS
    assert (config["buffers"]["maximum"], config["lookahead"]["maximum"]) == (MAX_BUFFERS, MAX_LOOKAHEAD)
    assert (
        set(SCHEMA["properties"]) == {*FRAME, "tables"} and SCHEMA["properties"]["format"]["const"] == FRAME["format"]
    )
    header = {field.name for field in dataclasses.fields(Header)} - {"extra"}
    assert set(SCHEMA["$defs"]["block"]["properties"]) == header | {"entries"}
    row = {field.name for field in dataclasses.fields(Entry)} - {"header", "tile", "extra"}
    assert set(SCHEMA["$defs"]["row"]["properties"]) == row | {"config"}
    assert set(SCHEMA["$defs"]["key"]["required"]) == set(key_of(SHAPE)) - set(EXACT)


BAD = [
    {"predicted_us": 0},
    {"predicted_us": float("nan")},
    {"predicted_us": float("inf")},
    {"predicted_us": None},
    {"predicted_us": True},
    {"default_us": -3},
    {"rule_us": "fast"},
    {"dma_wait_us": {"qk": float("inf")}},
    {"dma_wait_us": {"qk": -1}},
    {"dma_wait_us": [1]},
    {"bound": 3},
    {"evals": -1},
    {"evals": 0.5},
    {"complete": 1},
    {"config": []},
    {"config": {"block_q": 64}},
    {"config": {"block_q": 0, "block_kv": 64}},
    {"config": {"block_q": 64, "block_kv": 64, "buffers": 5}},
    {"config": {"block_q": 64, "block_kv": 64, "lookahead": -1}},
    {"config": {"block_q": 64, "block_kv": 64, "cores": "all"}},
    {"config": {"block_q": 64, "block_kv": 64, "persistent": 1}},
    {"config": {"block_q": 64, "block_kv": 64, "fusion": "half"}},
    {"config": {"block_q": 64, "block_kv": 64, "fusion": "partly", "split_kv": 2}},
    {"config": {"block_q": 64, "block_kv": 64, "warps": 4}},
    {"key": 3},
    {"key": {"q_len": 1024, "kv_len": 1024}},
    {"key": {**key_of(SHAPE), "q_len": 0}},
    {"key": {**key_of(SHAPE), "window": {}}},
    {"key": {**key_of(SHAPE), "window": [[1]]}},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_schema_and_reader_refuse_the_same_rows(saved, bad):
    changed = document(saved)
    changed["tables"][0]["entries"][1].update(bad)
    saved.write_text(json.dumps(changed))
    assert [*errors(changed, SCHEMA)] and problems(saved)


@pytest.mark.parametrize("place", ["format", "format_version", "tables"])
def test_schema_and_reader_refuse_the_same_frames(saved, place):
    for value in (None, "2.0", {}):
        changed = {**document(saved), place: value}
        saved.write_text(json.dumps(changed))
        assert [*errors(changed, SCHEMA)] and problems(saved)


@pytest.mark.parametrize("change", [{"model_version": 3}, {"kernel": None}, {"device": {"name": "x"}}, {"device": 1}])
def test_schema_and_reader_refuse_the_same_blocks(saved, change):
    changed = document(saved)
    changed["tables"][0].update(change)
    saved.write_text(json.dumps(changed))
    assert [*errors(changed, SCHEMA)] and problems(saved)


def test_every_problem_is_told_at_once_with_its_row(saved):
    changed = document(saved)
    rows = changed["tables"][0]["entries"]
    rows[0].update(predicted_us=0, evals=-1)
    rows[1]["config"]["block_q"] = 1.5
    rows[2]["key"]["windw"] = 4
    rows.append(rows[3])
    saved.write_text(json.dumps(changed))
    found = problems(saved)
    assert len(found) == 5 and all(line.startswith(f"{saved}: row ascend910b2 q_len=") for line in found)
    for what in ("predicted_us", "evals", "config.block_q", "windw is not known here; the row is never", "there twice"):
        assert sum(what in line for line in found) == 1


def test_a_common_validator_agrees(saved):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document(saved), SCHEMA)
