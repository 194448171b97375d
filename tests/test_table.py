"""The learned tile table: what is written is found again, and nothing that a user had gets lost."""

# pyright: reportOptionalMemberAccess=false

import contextlib
import dataclasses
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from npumodel.hardware.spec import DeviceSpec
from npumodel.search import table as table_module
from npumodel.search.table import (
    MODEL_VERSION,
    Entry,
    Header,
    NewerTileTableError,
    TileTable,
    TileTableError,
    TileTableWarning,
    active_tables,
    key_of,
    use_table,
)
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

ROOT = Path(__file__).parents[1]


def chip(**changes) -> DeviceSpec:
    """A tiny split chip, all numbers 1 but for the names."""
    numbers = [field.name for field in dataclasses.fields(DeviceSpec) if not field.metadata.get("static")]
    names = {"name": "tiny", "soc": "Tiny1", "family": "Tiny", "arch": "split", "overflow": "strict"}
    return DeviceSpec(**{**dict.fromkeys(numbers, 1), **names, "macs_per_cycle": {"float16": 1}, **changes})


TINY = chip()
SHAPE = AttentionShape.parse("B1,N8,S1024,D128")


def entry(shape=SHAPE, device=TINY, block_q=128, predicted_s=1e-3, header=None, **fields) -> Entry:
    header = header or Header.of(device, created="2026-01-01T00:00:00Z")
    return Entry.of(header, shape, TileConfig(block_q, 256), predicted_s, **fields)


def table(*shapes, **fields) -> TileTable:
    return TileTable(tuple(entry(shape, **fields) for shape in shapes or (SHAPE,)))


def sized(q_len=1024, kv_len=1024, q_heads=8, **fields) -> AttentionShape:
    return AttentionShape(batch=1, q_heads=q_heads, q_len=q_len, kv_len=kv_len, head_dim=128, **fields)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No table from outside, nothing warned about yet."""
    monkeypatch.delenv("NPUMODEL_TABLE_PATH", raising=False)
    monkeypatch.setattr(table_module, "_seen", set())
    monkeypatch.setattr(table_module, "_files", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", TileTableWarning)
        yield


def text(value) -> str:
    return json.dumps(value, sort_keys=True)


def edit(path: Path, change):
    """Rewrite a table file as a person would."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# Round trip


def test_round_trip_keeps_everything(tmp_path):
    header = Header.of(TINY, command="npumodel tune --device tiny", strategy="gradient", seed=0)
    rows = [
        entry(
            sized(causal=True),
            header=header,
            predicted_s=1 / 3,
            default_s=0.5,
            rule_s=0.4,
            runner_up_s=1.1 / 3,
            dma_wait_s={"qk": 0.0, "pv": np.float64(1e-5)},
            bound="mte2",
            evals=np.int64(64),
            complete=False,
        ),
        entry(sized(mask="bool"), header=header),
    ]
    made = TileTable(tuple(rows))
    made.save(tmp_path / "t.json")
    assert TileTable.load(tmp_path / "t.json") == made
    first = json.loads((tmp_path / "t.json").read_text())["tables"][0]["entries"][1]
    assert first["predicted_us"] == 333333.333 and first["dma_wait_us"] == {"qk": 0.0, "pv": 10.0}


def test_the_file_is_for_people(tmp_path):
    made = table(sized(2048), sized(16384), sized(512))
    made.save(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    assert text.endswith("}\n") and text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    document = json.loads(text)
    assert document["format"] == "npumodel.tile_table" and document["format_version"] == "1.0"
    (block,) = document["tables"]
    assert block["device"] == {
        "name": "tiny",
        "soc": "Tiny1",
        "family": "Tiny",
        "arch": "split",
        "spec_hash": TINY.fingerprint(),
        "cube_cores": 1,
    }
    assert block["provenance"]["source"] == "model" and set(block["environment"]) == {"npumodel", "jax"}
    assert [row["key"]["q_len"] for row in block["entries"]] == [512, 2048, 16384]
    made.save(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == text  # saving again changes nothing
    assert "tiny" in str(made) and "128x256" in str(made) and "1000 us" in str(made)
    assert repr(made) == "TileTable(3 rows: tiny)" and repr(TileTable()) == str(TileTable()) == "TileTable(0 rows)"


def test_second_tune_loses_nothing(tmp_path):
    path = tmp_path / "new" / "t.json"
    other = chip(name="other", l1_bytes=2)
    assert len(table(sized(1024), sized(2048)).save(path)) == 2
    assert len(table(sized(2048), sized(4096), block_q=64).save(path)) == 3
    assert len(table(sized(1024), device=other, block_q=32).save(path)) == 4
    back = TileTable.load(path)
    found = {q: back.lookup(sized(q), TINY).tile.block_q for q in (1024, 2048, 4096)}
    assert found == {1024: 128, 2048: 64, 4096: 64}  # of equal keys the new row wins
    assert back.lookup(sized(1024), other).tile.block_q == 32


def test_each_run_keeps_its_provenance(tmp_path):
    for seed, shape in enumerate((sized(1024), sized(2048))):
        TileTable((entry(shape, header=Header.of(TINY, seed=seed)),)).save(tmp_path / "t.json")
    back = TileTable.load(tmp_path / "t.json")
    seeds = [back.lookup(sized(q), TINY).entry.header.provenance["seed"] for q in (1024, 2048)]
    assert seeds == [0, 1]


KNOBS = [
    {"buffers": 3},
    {"lookahead": 0},
    {"heads_packed": 8},
    {"split_kv": 4},
    {"cores": 12},
    {"kv_pieces": 8},
    {"persistent": True},
    {"core_order": "contiguous"},
    {"core_order": "round_robin"},
    {"fusion": "partly"},
    {"fusion": "unfused", "heads_packed": 2, "cores": 3},
    {"heads_packed": 2, "split_kv": 2, "kv_pieces": 2, "cores": 7, "persistent": True, "core_order": "contiguous"},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_every_knob_comes_back(tmp_path, knobs):
    tile = TileConfig(128, 256, **knobs)
    plain = tile.replace(**{k: np.int64(v) for k, v in knobs.items() if type(v) is int})  # as a search gives them
    TileTable((Entry.of(Header.of(TINY), SHAPE, plain, 1e-3),)).save(tmp_path / "t.json")
    assert TileTable.load(tmp_path / "t.json").lookup(SHAPE, TINY).tile == tile
    row = json.loads((tmp_path / "t.json").read_text())["tables"][0]["entries"][0]
    assert row["config"] == {"block_q": 128, "block_kv": 256, "buffers": 2, "lookahead": 1, "fusion": "fused", **knobs}


def test_the_knobs_above_are_all():
    named = {name for knobs in KNOBS for name in knobs}
    assert named | {"block_q", "block_kv"} == {field.name for field in dataclasses.fields(TileConfig)}


def test_windows_have_rows_too(tmp_path):
    left, both = sized(window=(128, None)), sized(causal=True, window=(128, 64))
    (table(left) | table(both) | table()).save(tmp_path / "t.json")
    back = TileTable.load(tmp_path / "t.json")
    assert [back.lookup(shape, TINY).source for shape in (left, both, SHAPE)] == ["exact"] * 3
    assert back.lookup(sized(window=(64, None)), TINY) is None


def test_merge_right_wins_and_order_does_not_matter():
    rows = [entry(sized(q)) for q in (256, 1024, 4096, 999)]
    shuffled = random.Random(0).sample(rows, 4)
    assert TileTable(tuple(rows)) == TileTable(tuple(shuffled))
    left, right = table(sized(256), sized(512)), table(sized(512), sized(1024), block_q=64)
    assert len(left | right) == 3 and (left | right) == left.merge(right)
    assert (left | right).lookup(sized(512), TINY).tile.block_q == 64
    assert (right | left).lookup(sized(512), TINY).tile.block_q == 128


# Lookup


def test_every_field_of_a_shape_is_in_the_key():
    in_key = {"dtype", "head_dim", "v_head_dim", "causal", "mask", "q_len", "kv_len", "batch", "q_heads", "kv_heads"}
    in_key |= {"window", "softcap", "v_in_k", "backward", "q_lengths", "kv_lengths"}
    assert {field.name for field in dataclasses.fields(AttentionShape)} == in_key  # a new field: add it to EXACT
    assert key_of(AttentionShape.parse("B2,N8,KV2,S64,SKV96,D128,DV64,causal")) == {
        "dtype": "float16",
        "head_dim": 128,
        "v_head_dim": 64,
        "causal": True,
        "mask": None,
        "gqa_group": 4,
        "window": None,
        "softcap": None,
        "v_in_k": None,
        "backward": None,
        "lengths": None,
        "q_len": 64,
        "kv_len": 96,
        "batch_heads": 16,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"causal": True},
        {"mask": "bool"},
        {"window": (128, 0)},
        {"softcap": True},
        {"v_in_k": True},
        {"backward": True},
        {"kv_heads": 4},
    ],
    ids=str,
)
def test_no_row_of_another_call(change):
    assert table().lookup(sized(**change), TINY) is None


def test_head_dims_are_exact():
    have = table(AttentionShape.parse("B1,N8,S1024,D128"))
    assert have.lookup(AttentionShape.parse("B1,N8,S1024,D126"), TINY) is None
    assert have.lookup(AttentionShape.parse("B1,N8,S1024,D128,DV64"), TINY) is None


def test_exact_before_bucket():
    have = table(sized(1000), block_q=64) | table(sized(1024), block_q=128)
    exact, near = have.lookup(sized(1000), TINY), have.lookup(sized(1001), TINY)
    assert (exact.source, exact.distance, exact.tile.block_q) == ("exact", 0, 64)
    assert near.source == "bucket" and near.tile.block_q == 64
    assert near.distance == pytest.approx(np.log2(1001 / 1000))
    assert [found.tile.block_q for found in have.candidates(sized(1010), TINY)] == [64, 128]


def test_bucket_edges_and_batch_heads():
    have = table(sized(1024))
    assert have.lookup(sized(513), TINY).source == "bucket"
    assert have.lookup(sized(512), TINY).source == have.lookup(sized(1025), TINY).source == "nearest"
    assert have.lookup(sized(kv_len=512), TINY).source == "nearest"
    assert have.lookup(sized(q_heads=9, kv_heads=9), TINY).source == "nearest"
    assert have.lookup(sized(q_heads=5), TINY).source == "bucket"
    split = dataclasses.replace(SHAPE, batch=2, q_heads=4, kv_heads=4)
    assert have.lookup(split, TINY).source == "exact"  # batch * q_heads counts, not its factors


def test_nearest_comes_last_and_by_the_distance():
    have = table(sized(513), block_q=16) | table(sized(2048), block_q=32) | table(sized(64), block_q=64)
    found = have.candidates(sized(1024), TINY)
    assert [row.source for row in found] == ["bucket", "nearest", "nearest"]
    assert [row.tile.block_q for row in found] == [16, 32, 64]
    assert [row.distance for row in found] == pytest.approx([np.log2(1024 / 513), 1, 4])
    assert have.lookup(sized(4096), TINY).tile.block_q == 32
    assert have.lookup(sized(1, 10**6, dtype="bfloat16"), TINY) is None


def test_ties_are_broken_by_a_rule():
    rows = [entry(sized(q_len, kv_len)) for q_len, kv_len in ((72, 96), (128, 96), (96, 72), (96, 128))]
    for seed in range(5):
        have = TileTable(tuple(random.Random(seed).sample(rows, 4)))
        order = [
            (found.entry.key["q_len"], found.entry.key["kv_len"]) for found in have.candidates(sized(96, 96), TINY)
        ]
        assert order == [(72, 96), (96, 72), (96, 128), (128, 96)]


def test_same_numbers_under_another_name_are_the_same_device():
    assert table().lookup(SHAPE, chip(name="tiny-b")).source == "exact"


# Staleness


def test_stale_spec_is_skipped_and_named_once():
    changed = chip(l1_bytes=2)
    with pytest.warns(TileTableWarning, match=f"tiny q_len=1024.*spec_hash was {TINY.fingerprint()}.*tune again"):
        assert table().lookup(SHAPE, changed) is None
    assert table().lookup(SHAPE, changed) is None  # silent: warnings are errors here


def test_stale_model_is_skipped_and_named():
    with pytest.warns(TileTableWarning, match=f"model_version was 0, is {MODEL_VERSION}") as caught:
        assert table(header=Header.of(TINY, model_version="0")).lookup(SHAPE, TINY) is None
    assert len(caught) == 1
    with pytest.warns(TileTableWarning, match=f"model_version was {MODEL_VERSION}, is 7"):
        assert table().lookup(sized(1000), TINY, model_version="7") is None


def test_fresh_row_beside_a_stale_one_and_none_is_deleted(tmp_path):
    table(header=Header.of(TINY, model_version="0"), block_q=64).save(tmp_path / "t.json")
    table().save(tmp_path / "t.json")
    back = TileTable.load(tmp_path / "t.json")
    assert len(back) == 2
    assert back.lookup(SHAPE, TINY).tile.block_q == 128
    assert back.lookup(SHAPE, TINY, model_version="0").tile.block_q == 64


def test_rows_of_another_device_are_no_news():
    assert table().lookup(SHAPE, chip(name="other", l1_bytes=2)) is None


def test_stale_by_both_is_one_warning_and_far_rows_are_no_news():
    old = table(header=Header.of(TINY, model_version="0"))
    with pytest.warns(TileTableWarning, match="spec_hash was .* now; model_version was 0, is") as caught:
        assert old.lookup(SHAPE, chip(l1_bytes=2)) is None
    assert len(caught) == 1 and old.lookup(sized(4096), TINY) is None
    table_module._seen.clear()
    with pytest.warns(TileTableWarning, match="model_version was 0"):  # a far row does not hide a stale one
        assert (old | table(sized(4096))).lookup(SHAPE, TINY).source == "nearest"


# Values


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_no_entry(bad):
    with pytest.raises(ValueError, match="predicted_us: expected a number > 0"):
        entry(predicted_s=bad)
    with pytest.raises(ValueError, match="runner_up_us: expected a number > 0"):
        entry(runner_up_s=bad)


@pytest.mark.parametrize(
    "place, bad, what",
    [
        ("predicted_us", 0, "predicted_us: expected a number > 0, got 0"),
        ("predicted_us", float("nan"), "predicted_us.*nan"),
        ("predicted_us", 10**400, "predicted_us: expected a number > 0, got 1000"),
        ("default_us", -3, "default_us"),
        ("dma_wait_us", {"qk": float("inf")}, "dma_wait_us.qk"),
        ("dma_wait_us", [1], "dma_wait_us: expected an object"),
        ("config", {"block_q": 0, "block_kv": 64}, "block_q"),
        ("config", {"block_q": 64.5, "block_kv": 64}, "block_q: expected an integer"),
        ("config", {"block_q": "64", "block_kv": 64}, "block_q"),
        ("config", {"block_q": 64}, "block_kv"),
        ("config", {"block_q": 64, "block_kv": 64, "block_kv_compute": 32}, "block_kv_compute is not known"),
        ("config", [], "a key and a config"),
        ("key", {"q_len": 1024}, "key.kv_len"),
        ("key", {**key_of(SHAPE), "q_len": [1]}, "key.q_len"),
        ("key", 3, "a key and a config"),
    ],
)
def test_bad_row_is_refused_by_name_and_kept(tmp_path, place, bad, what):
    path = tmp_path / "t.json"
    table(sized(2048), SHAPE).save(path)
    edit(path, lambda document: document["tables"][0]["entries"][0].update({place: bad}))
    with pytest.warns(TileTableWarning, match=f"t.json: row tiny .*{what}"):
        back = TileTable.load(path)
    assert len(back) == 1 and back.lookup(sized(2048), TINY) is not None
    with pytest.warns(TileTableWarning):
        table(sized(4096)).save(path)
    rows = [row for block in json.loads(path.read_text())["tables"] for row in block["entries"]]
    assert len(rows) == 3 and text(bad) in [text(row[place]) for row in rows]


def test_a_row_says_everything_that_is_wrong_with_it(tmp_path):
    path = tmp_path / "t.json"
    table().save(path)
    bad = {"predicted_us": 0, "evals": -1, "complete": "yes", "bound": 3, "config": {"block_q": 0, "block_kv": 1.5}}
    edit(path, lambda document: document["tables"][0]["entries"][0].update(bad))
    with pytest.warns(TileTableWarning) as caught:
        TileTable.load(path)
    (told,) = [str(warning.message) for warning in caught]
    for name in ("predicted_us", "evals", "complete", "bound", "config.block_q", "config.block_kv"):
        assert f"{name}: expected" in told


def test_refused_row_goes_when_it_is_renewed(tmp_path):
    path = tmp_path / "t.json"
    table().save(path)
    edit(path, lambda document: document["tables"][0]["entries"][0].update(predicted_us=-1))
    with pytest.warns(TileTableWarning):
        table().save(path)
    assert len(TileTable.load(path)) == 1  # without a warning


def test_unknown_fields_are_kept(tmp_path):
    path = tmp_path / "t.json"
    table().save(path)

    def annotate(document):
        document["comment"] = "of the file"
        document["format_version"] = "1.3"
        document["tables"][0]["comment"] = "of the block"
        document["tables"][0]["device"]["vector_cores"] = 40
        document["tables"][0]["entries"][0]["measured_us"] = 812.4
        document["tables"][0]["entries"][0]["note"] = "\ud800 \u6607"

    edit(path, annotate)
    table(sized(4096)).save(path)
    document = json.loads(path.read_text())
    assert document["comment"] == "of the file" and document["format_version"] == "1.3"
    block = next(block for block in document["tables"] if "comment" in block)
    assert block["device"]["vector_cores"] == 40 and block["entries"][0]["measured_us"] == 812.4
    assert TileTable.load(path).lookup(SHAPE, TINY).entry.extra["note"] == "\ud800 \u6607"


def test_key_field_of_a_later_version_never_matches_unless_null(tmp_path):
    path = tmp_path / "t.json"
    table().save(path)
    edit(path, lambda document: document["tables"][0]["entries"][0]["key"].update(window=1024))
    assert TileTable.load(path).lookup(SHAPE, TINY) is None
    edit(path, lambda document: document["tables"][0]["entries"][0]["key"].update(window=None))
    assert TileTable.load(path).lookup(SHAPE, TINY).source == "exact"


# Broken files


def whole_text() -> str:
    header = Header.of(TINY).to_block()
    document = {
        "format": "npumodel.tile_table",
        "format_version": "1.0",
        "tables": [{**header, "entries": [entry().to_row()]}],
    }
    return json.dumps(document)


BROKEN = {
    "corrupt": b"\xff\xfe\x00garbage",
    "truncated": whole_text()[:-40].encode(),
    "deep": b"[" * 100_000,
    "foreign": b'{"name": "a package"}',
    "list": b"[]",
    "blocks": whole_text().replace('"entries"', '"rows"').encode(),
    "version": whole_text().replace('"1.0"', '"one"').encode(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file(tmp_path, monkeypatch, kind):
    path = tmp_path / "t.json"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(TileTableError, match="t.json"):
        TileTable.load(path)
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(path))
    with pytest.warns(TileTableWarning, match="t.json.*not used"):
        assert [len(found) for found in active_tables()] == [0]
    active_tables()  # the second time silently
    with use_table(path) as empty:
        assert len(empty) == 0
    for number in (1, 2):
        path.write_bytes(BROKEN[kind])
        with pytest.warns(TileTableWarning, match=f"kept aside as .*t.json.corrupt-{number}"):
            table().save(path)
        assert (tmp_path / f"t.json.corrupt-{number}").read_bytes() == BROKEN[kind]
        assert len(TileTable.load(path)) == 1
    assert len(active_tables()[0]) == 1  # seen at once


def test_empty_file_is_a_miss_and_no_loss(tmp_path):
    path = tmp_path / "t.json"
    path.touch()
    with pytest.raises(TileTableError, match="empty"):
        TileTable.load(path)
    table().save(path)
    assert len(TileTable.load(path)) == 1


def test_newer_file_is_never_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text(text := whole_text().replace('"1.0"', '"2.0"'))
    with pytest.raises(NewerTileTableError, match="2.0 is newer than 1.0; update npumodel"):
        TileTable.load(path)
    with pytest.raises(NewerTileTableError, match="not overwritten"):
        table().save(path)
    assert path.read_text() == text
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(path))
    with pytest.warns(TileTableWarning, match="newer"):
        assert len(active_tables()[0]) == 0


def test_missing_file_is_the_users_to_know(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json"):
        TileTable.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="none.json"), use_table(tmp_path / "none.json"):
        pass


def test_byte_order_mark_of_an_editor(tmp_path):
    (tmp_path / "t.json").write_text("\ufeff" + whole_text(), encoding="utf-8")
    assert len(TileTable.load(tmp_path / "t.json")) == 1


# Writing


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="tile table not written.*give another path.*file/t.json"):
        table().save(tmp_path / "file" / "t.json")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(IsADirectoryError, match="not written"):
        table().save(tmp_path / "folder.json")


def test_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    table().save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        table(sized(4096)).save(path)
    assert caught.value.errno == 28
    assert path.read_bytes() == before and not list(tmp_path.glob(".*.tmp"))


@pytest.mark.skipif(sys.platform == "win32", reason="no limits, no modes")
def test_a_write_that_stops_in_its_middle_and_a_folder_that_is_read_only(tmp_path):
    path, folder = tmp_path / "t.json", Path(tempfile.mkdtemp())  # the latter for everyone
    try:
        for place in (path, folder / "t.json"):
            table().save(place)
        before = path.read_bytes()
        with start(FULL, path, folder) as writer:
            full, read, read_only = writer.stdout.read().splitlines()
        assert re.search("full: .*not written, what was there is untouched .*File too large.*another path", full)
        assert read == "1 row(s) read"
        assert re.search("read-only: .*not written.*Permission denied.*another path", read_only)
        assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == [".t.json.lock", "t.json"]
        assert (folder / "t.json").read_bytes() == before
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB of its own, where that is allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full(small_disk):
    path, saved = small_disk / "t.json", 0
    with pytest.raises(OSError, match="not written, what was there is untouched .*No space left") as caught:
        for n in range(1, 1000):
            table(sized(64 * n)).save(path)
            saved = n
    assert caught.value.errno == errno.ENOSPC
    assert len(TileTable.load(path)) == saved > 10 and sorted(os.listdir(small_disk)) == [".t.json.lock", "t.json"]


def test_mode_and_symlink_survive(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "t.json", tmp_path / "t.json"
    table().save(real)
    real.chmod(0o640)
    link.symlink_to(real)
    table(sized(4096)).save(link)
    assert link.is_symlink() and len(TileTable.load(real)) == 2 and real.stat().st_mode & 0o777 == 0o640


WRITER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_table import table, sized
number = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for step in range(5):
    table(sized(1024 * (1 + 5 * number + step)), block_q=16 * (1 + number)).save(sys.argv[1])
"""

KILLED = """
import os, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from test_table import table, sized
def hang(_):
    print("ready", flush=True)
    time.sleep(60)
os.fsync = hang
table(sized(4096)).save(sys.argv[1])
"""


FULL = """
import os, resource, sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_table import table, sized, TileTable
path, readable = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # bytes of a file: the next write stops in its middle
rows = TileTable()
for n in range(1, 40):
    rows = rows | table(sized(64 * n))
try:
    rows.save(path)
except OSError as error:
    print("full:", error, flush=True)
os.chmod(readable, 0o555)
if not os.getuid():
    os.setgid(65534), os.setuid(65534)  # root may write anywhere
print(len(TileTable.load(os.path.join(readable, "t.json"))), "row(s) read")
try:
    table(sized(4096)).save(os.path.join(readable, "t.json"))
except OSError as error:
    print("read-only:", error)
"""


def start(code: str, *arguments) -> subprocess.Popen:
    code = code.format(root=str(ROOT), tests=str(ROOT / "tests"))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "t.json"
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(start(WRITER, path, number)) for number in range(6)]
        assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 6
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
    assert [writer.returncode for writer in writers] == [0] * 6
    back = TileTable.load(path)
    assert len(back) == 30
    found = [back.lookup(sized(1024 * (1 + row)), TINY).tile.block_q for row in range(30)]
    assert found == [16 * (1 + row // 5) for row in range(30)]
    assert sorted(os.listdir(tmp_path)) == [".t.json.lock", "t.json"]


def test_concurrent_threads_lose_nothing(tmp_path):
    path = tmp_path / "t.json"
    threads = [threading.Thread(target=table(sized(1024 * n)).save, args=(path,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TileTable.load(path)) == 8


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL, no lock")
def test_killed_while_writing(tmp_path):
    path = tmp_path / "t.json"
    table().save(path)
    before = path.read_bytes()
    with start(KILLED, path) as victim:
        assert victim.stdout.readline() == "ready\n"
        victim.send_signal(signal.SIGKILL)
    assert path.read_bytes() == before and list(tmp_path.glob(".t.json.*.tmp"))
    assert len(table(sized(2048)).save(path)) == 2
    assert sorted(os.listdir(tmp_path)) == [".t.json.lock", "t.json"]


# Where tables are looked for


def test_environment_variable(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    for name, block_q in (("b.json", 32), ("a.json", 16)):
        table(block_q=block_q).save(folder / name)
    table(block_q=64).save(tmp_path / "one.json")
    (folder / "notes.txt").write_text("not a table")
    assert active_tables() == []
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", os.pathsep.join([str(tmp_path / "one.json"), "", str(folder)]))
    first, second = active_tables(), active_tables()
    assert [found.lookup(SHAPE, TINY).tile.block_q for found in first] == [64, 16, 32]
    assert all(one is two for one, two in zip(first, second, strict=True))  # read once
    table(block_q=48).save(tmp_path / "one.json")
    assert active_tables()[0].lookup(SHAPE, TINY).tile.block_q == 48


def test_missing_path_and_empty_folder_warn_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("none.json", "NPUMODEL_TABLE_PATH.*No such file"),
        ("file/t.json", "Not a directory"),
        ("empty", "holds no"),
    ):
        monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(tmp_path / name))
        with pytest.warns(TileTableWarning, match=f"{name}.*{what}"):
            assert sum(map(len, active_tables())) == 0
            active_tables()


def test_use_table_nests_before_the_environment(tmp_path, monkeypatch):
    table(block_q=16).save(tmp_path / "env.json")
    table(block_q=32).save(tmp_path / "folder" / "b.json")
    table(block_q=48).save(tmp_path / "folder" / "a.json")
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(tmp_path / "env.json"))

    def order():
        return [found.lookup(SHAPE, TINY).tile.block_q for found in active_tables()]

    with use_table(table(block_q=64)), use_table(str(tmp_path / "folder")) as inner:
        assert len(inner) == 1 and order() == [48, 64, 16]
        with pytest.raises(RuntimeError), use_table(TileTable()):
            assert len(active_tables()) == 4
            raise RuntimeError
        assert order() == [48, 64, 16]
    assert order() == [16]


def test_use_table_stays_in_its_thread():
    seen, both = {}, threading.Barrier(2)

    def work(block_q):
        with use_table(table(block_q=block_q)):
            both.wait()
            seen[block_q] = [found.lookup(SHAPE, TINY).tile.block_q for found in active_tables()]
            both.wait()

    with use_table(table()):
        threads = [threading.Thread(target=work, args=(block_q,)) for block_q in (16, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {16: [16], 32: [32]}
