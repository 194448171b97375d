"""`npumodel table ...`: what it prints, what it writes, and with which exit code."""

import dataclasses
import json

import pytest

from npumodel import cli, hardware
from npumodel.search.table import MODEL_VERSION, Entry, Header, TileTable, TileTableWarning
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

B2, A = hardware.device("ascend910b2"), hardware.device("ascend910a")
SHAPE = AttentionShape.parse("B1,N8,S1024,D128")
LONG = dataclasses.replace(SHAPE, q_len=4096)


def table(shape=SHAPE, spec=B2, block_q=64, model=MODEL_VERSION, **fields):
    header = Header.of(spec, model_version=model, created="2026-01-01T00:00:00Z")
    return TileTable((Entry.of(header, shape, TileConfig(block_q, 128), 1e-3, **fields),))


@pytest.fixture
def run(capsys):
    """Run `npumodel table` in this process: (exit code, stdout, stderr)."""

    def runner(*argv):
        capsys.readouterr()
        code = cli.main(["table", *map(str, argv)])
        return (code, *capsys.readouterr())

    return runner


@pytest.fixture
def mixed(tmp_path):
    """One good row; one that is stale by its model, one by its spec, one unfinished, one of another device."""
    rows = table() | table(model="0") | table(LONG, B2.replace(l1_bytes=300_000)) | table(LONG, complete=False)
    (rows | table(spec=A)).save(tmp_path / "mixed.json")
    return tmp_path / "mixed.json"


def test_show(run, mixed):
    code, out, err = run("show", mixed)
    *rows, total = out.splitlines()
    assert code == 0 and err == "" and len(rows) == 5 and total == f"{mixed}: 5 row(s), 2 stale, 1 unfinished"
    assert sum(f"stale: model_version was 0, is {MODEL_VERSION}" in row for row in rows) == 1
    assert sum("stale: spec_hash was " in row and f"is {B2.fingerprint()}" in row for row in rows) == 1
    assert sum("search not finished" in row for row in rows) == 1 and all("64x128" in row for row in rows)
    for name in ("ascend910a", "Ascend910A ", "910a"):
        code, out, _ = run("show", mixed, "--device", name)
        assert code == 0 and out.splitlines()[-1] == f"{mixed}: 1 row(s), 0 stale, 0 unfinished"


def test_show_of_a_device_of_a_file(run, tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nbase = "ascend910b2"\nsoc = "Mine1"\ndescription = "a chip"\n')
    spec = hardware.device(tmp_path / "mine.toml")
    (table(spec=spec) | table(LONG, spec.replace(l1_bytes=300_000))).save(tmp_path / "t.json")
    assert "2 row(s), 0 stale" in run("show", tmp_path / "t.json")[1]  # unknown here: only its model can be told
    assert "2 row(s), 0 stale" in run("show", tmp_path / "t.json", "--device", "mine")[1]
    assert "2 row(s), 1 stale" in run("show", tmp_path / "t.json", "--device", tmp_path / "mine.toml")[1]


def test_validate(run, mixed, tmp_path):
    assert run("validate", mixed) == (0, f"{mixed}: good, 5 row(s)\n", "")
    document = json.loads(mixed.read_text())
    document["tables"][0]["entries"][0].update(predicted_us=0, complete="no")
    (tmp_path / "bad.json").write_text(json.dumps(document))
    (tmp_path / "cut.json").write_text(mixed.read_text()[:-40])
    code, out, err = run("validate", mixed, tmp_path / "bad.json", tmp_path / "cut.json")
    first, *others = out.splitlines()
    assert code == 1 and err == "" and "good" in first and len(others) == 3
    assert "bad.json: row ascend910a q_len=1024" in others[0] and "predicted_us: expected" in others[0]
    assert "complete: expected" in others[1] and "cut.json: expected a tile table" in others[2]


def test_merge(run, tmp_path):
    a, b, out = (tmp_path / name for name in ("a.json", "b.json", "out.json"))
    (table(block_q=16) | table(LONG)).save(a)
    (table(block_q=32) | table(spec=A)).save(b)
    code, text, _ = run("merge", a, b, "--out", out)
    assert code == 0 and text.splitlines() == [f"{a}: 2 row(s)", f"{b}: 2 row(s)", f"saved in {out} (3 row(s) in all)"]
    assert TileTable.load(out).lookup(SHAPE, B2).tile.block_q == 32
    run("merge", b, a, "--out", b)
    assert TileTable.load(b).lookup(SHAPE, B2).tile.block_q == 16 and len(TileTable.load(b)) == 3


def test_diff(run, mixed, tmp_path):
    other = tmp_path / "other.json"
    assert run("diff", mixed, mixed) == (0, f"0 row(s) only in {mixed}, 0 only in {mixed}, 0 differ, 5 equal\n", "")
    rows = table(block_q=32, bound="mte2", dma_wait_s={"qk": 1e-6}) | table(LONG, A) | table(spec=A)
    rows.save(other)
    code, out, _ = run("diff", mixed, other)
    *rows, total = out.splitlines()
    assert code == 1 and [row[0] for row in rows] == ["-", "-", "-", "+", "~"]
    assert f"({B2.fingerprint()}, model 0): 64x128, 1000 us" in out
    assert "config.block_q 64 -> 32" in rows[-1] and "bound None -> mte2; " in rows[-1]
    assert "dma_wait_us.qk None -> 1.0" in rows[-1] and "provenance" not in out
    assert total == f"3 row(s) only in {mixed}, 1 only in {other}, 1 differ, 1 equal"


@pytest.mark.parametrize(
    "options, gone",
    [
        (["--stale"], ["stale: model_version was 0", "stale: spec_hash"]),
        (["--incomplete"], ["search not finished"]),
        (["--stale", "--incomplete"], ["model_version", "spec_hash", "not finished"]),
        (["--device", "910A"], ["of 910A"]),
        (["--device", "910A", "--stale"], []),
    ],
    ids=str,
)
def test_prune(run, mixed, tmp_path, options, gone):
    before, out = mixed.read_bytes(), tmp_path / "rest.json"
    code, text, _ = run("prune", mixed, *options, "--out", out)
    *removed, total = text.splitlines()
    assert code == 0 and len(removed) == len(gone) and all(line.startswith("removed ascend") for line in removed)
    assert all(any(what in line for line in removed) for what in gone)
    assert total == f"{len(gone)} row(s) removed, {5 - len(gone)} left in {out}"
    assert mixed.read_bytes() == before and len(TileTable.load(out)) == 5 - len(gone)
    assert run("prune", mixed, *options, "--out", mixed)[0] == 0  # in place
    assert TileTable.load(mixed) == TileTable.load(out)


def test_prune_keeps_what_it_cannot_read_and_what_it_does_not_know(run, mixed):
    document = json.loads(mixed.read_text())
    document["comment"] = "mine"
    document["tables"][0]["entries"][0]["predicted_us"] = -1
    mixed.write_text(json.dumps(document))
    with pytest.warns(TileTableWarning):
        code, text, _ = run("prune", mixed, "--stale", "--out", mixed)
    assert code == 0 and text.endswith("left in " + f"{mixed}, 1 that cannot be read\n")
    left = json.loads(mixed.read_text())
    assert left["comment"] == "mine" and left["tables"][0]["entries"][0]["predicted_us"] == -1


def test_mistakes_are_explained_and_change_nothing(run, mixed, tmp_path):
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    table().save(other)
    broken.write_text("{")
    before = {path: path.read_bytes() for path in (mixed, other, broken)}
    for argv, word in (
        (["prune", mixed, "--out", mixed], "nothing is removed"),
        (["prune", mixed, "--stale"], "--out"),
        (["prune", mixed, "--stale", "--out", other], "which exists"),
        (["prune", broken, "--stale", "--out", broken], "broken.json: expected a tile table"),
        (["prune", tmp_path / "none.json", "--stale", "--out", tmp_path / "new.json"], "none.json"),
        (["show", mixed, "--device", "910Z"], "910Z"),
        (["show", tmp_path / "none.json"], "none.json"),
        (["show", broken], "cut short"),
        (["validate"], "1 or more tables"),
        (["validate", tmp_path / "none.json"], "none.json"),
        (["merge", mixed, "--out", other], "2 or more tables"),
        (["merge", mixed, broken, "--out", other], "broken.json"),
        (["merge", mixed, other], "--out"),
        (["diff", mixed], "B"),
        (["burn"], "prune"),
        ([], "prune"),
    ):
        code, out, err = run(*argv)
        assert code == 2 and out == "" and word in err and "Traceback" not in err, argv
    assert {path: path.read_bytes() for path in before} == before and not (tmp_path / "new.json").exists()


def test_help_names_the_commands(run, capsys):
    assert cli.main(["--help"]) == 0 and "npumodel table --help" in " ".join(capsys.readouterr().out.split())
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in ("show", "validate", "merge", "diff", "prune"))
