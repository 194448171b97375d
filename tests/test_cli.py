"""The command line: what it prints, where, and with which exit code."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import npumodel as npu
from npumodel import cli, commands, hardware, record, report_text, units
from npumodel.model import chrome
from npumodel.model.estimate import estimate
from npumodel.record import Recorded
from npumodel.report_text import Priced

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "experiments" / "flash_attention_bench.py"
SHAPE = npu.AttentionShape.parse("B1,N2,S64,D32")
SCRIPT = """
import sys
import jax, jax.numpy as jnp
import npumodel as npu
print("script says", sys.argv[1:])
q = jnp.ones((1, 2, 64, 32), "float16")
attend = jax.jit(lambda q: npu.flash_attention(q, q, q, tile_level="32x64"))
for _ in range(3):
    attend(q)
npu.flash_attention(q, q, q, tile_level="16x16")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def runner(*argv):
        capsys.readouterr()
        code = cli.main([str(word) for word in argv])
        return (code, *capsys.readouterr())

    return runner


@pytest.fixture(scope="module")
def cost():
    return estimate(SHAPE, npu.device("ascend910b2"), npu.TileConfig(32, 64))


def strict(text):
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def is_mistake(result, *words):
    """Exit code 2, nothing on stdout, one message on stderr, no traceback."""
    code, out, err = result
    assert code == 2 and out == "" and "Traceback" not in err
    for word in words:
        assert word in err


# Texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, text",
    [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (999.96e-6, "1 ms"), (5e-7, "500 ns"), (0, "0 s"), (1e-12, "0.001 ns")],
)
def test_seconds(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(1.234e-3, "1.23ms"), (0.5e-3, "0.500ms"), (1.2, "1200.00ms"), (3.21e-6, "0.00321ms"), (0, "0.00ms")],
)
def test_milliseconds(value, text):
    assert units.milliseconds(value) == text


def test_sizes():
    assert [units.size(n) for n in (100, 65536, 192 * 2**20, 1.5 * 2**30)] == ["100 B", "64 KiB", "192 MiB", "1.5 GiB"]


def test_the_table_has_the_form_of_the_article(cost):
    header, *rows, total = report_text.table(Priced(cost, "auto: table", 3)).splitlines()
    assert header == "flash_attention  B1 N2 S64 D32 float16  tile 32x64 (auto: table)  on ascend910b2"
    titles = ["[MatMul(Q,K)] tensor_core", "[Softmax    ] vector_core", "[MatMul(P,V)] tensor_core"]
    for title, row in zip(titles, rows, strict=True):
        assert re.fullmatch(re.escape(title) + r": \d+\.\d+ms \| dma_wait: \d+\.\d+ms", row)
    assert re.fullmatch(r"total \d+\.\d+ms \| launch share [\d.]+ % \| L1 miss rate [\d.]+ % \| count 3", total)


def slow(cost, seconds):
    """The same price, twice `seconds`, with a softmax that waits so long."""
    stages = [dataclasses.replace(s, dma_wait=seconds if s.name == "softmax" else 0.0) for s in cost.stages]
    return dataclasses.replace(cost, stages=tuple(stages), seconds=2 * seconds)


def test_no_warning_below_half_a_millisecond(cost):
    assert report_text.warnings(Priced(slow(cost, 0.5e-3), "explicit")) == []


def test_a_long_wait_is_a_warning_that_names_the_tile_and_a_better_one(cost):
    late = slow(cost, 0.6e-3)
    (alone,) = report_text.warnings(Priced(late, "explicit"))
    assert "tile 32x64" in alone and "Softmax 0.600ms" in alone and "no cheaper tile" in alone
    better = dataclasses.replace(late, tile=npu.TileConfig(64, 64), seconds=0.6e-3)
    (warning,) = report_text.warnings(Priced(late, "explicit", better=better))
    assert "tile 64x64 is predicted 2.00x as fast (0.600ms)" in warning


def test_the_dearest_call_comes_first(cost):
    dear = dataclasses.replace(cost, seconds=5 * cost.seconds, tile=npu.TileConfig(16, 16))
    text = report_text.tables([Priced(cost, "explicit", 4), Priced(dear, "explicit", 1)])
    assert text.index("tile 16x16") < text.index("tile 32x64")
    assert text.endswith("5 calls, 2 distinct, " + units.milliseconds(9 * cost.seconds) + " in all")


# Commands ----------------------------------------------------------------------------------------------------------


def test_devices(run):
    code, out, _ = run("devices")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == npu.devices()
    code, out, _ = run("devices", "ascend910b2")
    assert code == 0
    for field, (_, source, confidence) in hardware.provenance("ascend910b2").items():
        assert re.search(rf"^{re.escape(field)} .* {confidence} .*{re.escape(source)}$", out, re.MULTILINE)


def test_version(run):
    assert run("--version") == (0, f"npumodel {npu.__version__}\n", "")


def test_estimate(run, cost):
    code, out, _ = run("estimate", "--shape", "B1,N2,S64,D32", "--tile", "32x64")
    header = "flash_attention  B1 N2 S64 D32 float16  tile 32x64 (explicit)  on ascend910b2"
    assert code == 0 and out.splitlines()[0] == header
    code, out, _ = run("estimate", "--shape", "B1,N2,S64,D32", "--tile", "32x64", "--json")
    found = strict(out)
    assert code == 0 and found["seconds"] == cost.seconds and found["tile"]["block_kv"] == 64
    assert sum(found["breakdown"].values()) == pytest.approx(cost.seconds, rel=1e-5)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["estimate", "--shape", "B4,N32"], "S, D missing"),
        (["estimate", "--shape", "B1,N1,S64,D32", "--device", "ascend999"], "ascend910b2"),
        (["estimate", "--shape", "B1,N1,S64,D32", "--device", "no/such.toml"], "no/such.toml"),
        (["estimate", "--shape", "B1,N1,S64,D32", "--tile", "huge"], "'huge'"),
        (["estimate", "--shape", "B1,N1,S4096,D128", "--tile", "4096x4096"], "does not fit"),
        (["devices", "ascend999"], "ascend910b2"),
        (["trace", "no_such_script.py"], "no_such_script.py"),
        (["tune", "--shape", "B1,N1,S64,D32", "--strategy", "luck"], "luck"),
        (["estimate"], "--shape"),
        (["fly"], "estimate"),
        ([], "estimate"),
    ],
)
def test_mistakes_are_explained(run, argv, word):
    is_mistake(run(*argv), word)


def test_trace(run, script):
    code, out, _ = run("trace", script, "--", "--scale", "2")
    assert code == 0
    said, *tables, total = out.strip().split("\n\n")
    assert said == "script says ['--scale', '2']"
    headers = [table.splitlines()[0] for table in tables]
    form = "flash_attention  B1 N2 S64 D32 float16  tile {} (explicit)  on ascend910b2"
    assert sorted(headers) == [form.format("16x16"), form.format("32x64")]
    assert {re.search(r"count (\d)", table)[1] for table in tables} == {"1", "3"}
    assert total.startswith("4 calls, 2 distinct, ")


def test_trace_as_json_leaves_stdout_to_it(run, script, cost):
    code, out, err = run("trace", script, "--json")
    found = strict(out)
    assert code == 0 and "script says" in err
    by_tile = {call["tile"]["block_q"]: call for call in found["calls"]}
    assert by_tile[32]["count"] == 3 and by_tile[32]["seconds"] == cost.seconds
    assert [op["title"] for op in by_tile[32]["ops"]] == ["MatMul(Q,K)", "Softmax", "MatMul(P,V)"]
    assert found["seconds"] == pytest.approx(sum(call["count"] * call["seconds"] for call in found["calls"]))


def test_trace_prices_the_full_call(run, script):
    code, out, _ = run("trace", script, "--json", "--batch", 4, "--heads", 32)
    assert code == 0
    assert {call["label"] for call in strict(out)["calls"]} == {"B4 N32 S64 D32 float16"}


def test_trace_with_one_tile_for_all(run, script):
    code, out, _ = run("trace", script, "--json", "--tile-level", "64x64")
    (call,) = strict(out)["calls"]
    assert (call["tile"]["block_q"], call["tile_source"], call["count"]) == (64, "explicit", 4)


def test_trace_writes_a_chrome_trace(run, script, tmp_path):
    script.write_text(SCRIPT + "\nimport os, tempfile; os.chdir(tempfile.gettempdir())\n")
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        code, _, err = run("trace", script, "--chrome", "trace.json")
    finally:
        os.chdir(here)
    text = (tmp_path / "trace.json").read_text()
    assert code == 0 and "trace.json" in err and chrome.problems(text) == []
    document = json.loads(text)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(document["otherData"]["calls"]) == 2 and {s["args"]["call"] for s in slices} == {0, 1}
    for number, call in enumerate(document["otherData"]["calls"]):
        ends = [s["ts"] + s["dur"] for s in slices if s["args"]["call"] == number]
        assert max(ends) == pytest.approx(call["start_us"] + call["shown_us"])
        assert call["shown_us"] <= call["predicted_us"] * 1.001


def test_trace_of_a_failing_script(run, script):
    script.write_text(SCRIPT + "\nraise RuntimeError('broken')\n")
    code, out, err = run("trace", script)
    assert code == 1 and "RuntimeError: broken" in err and "4 calls, 2 distinct" in out


def test_trace_of_a_script_that_exits(run, script):
    script.write_text("import sys; sys.exit(3)")
    assert run("trace", script) == (3, "\nno flash_attention call was made\n", "")


def test_heads_keep_their_groups():
    grouped = npu.AttentionShape.parse("B1,N8,KV2,S64,D32")
    assert record.resized(grouped, 4, 32) == npu.AttentionShape.parse("B4,N32,KV8,S64,D32")
    assert record.resized(grouped) == grouped
    with pytest.raises(ValueError, match="multiple of 4"):
        record.resized(grouped, heads=6)


def test_an_auto_tile_is_looked_up_again_for_the_full_call(monkeypatch):
    spec, asked = npu.device("ascend910b2"), []
    answer = record.api.resolve(SHAPE, spec, "64x64")
    monkeypatch.setattr(record.api, "resolve", lambda shape, spec, level="auto": asked.append((shape, level)) or answer)
    calls = [Recorded(SHAPE, npu.TileConfig(32, 64), source, spec.name) for source in ("auto: model", "level: small")]
    found = [record._planned(call, spec, None, 4, None) for call in calls]
    assert [call.tile.label for call in found] == ["64x64", "32x64"]
    assert asked == [(record.resized(SHAPE, 4), "auto")]


def test_tune_saves_and_merges(run, tmp_path):
    out = tmp_path / "tables" / "table.json"
    code, text, _ = run("tune", "--shape", "B1,N2,S64,D32", "B1,N2,S48,D32", "--strategy", "exhaustive", "--out", out)
    assert code == 0 and text.count("learned") == 2 and "gap to the exhaustive optimum 0.00 %" in text
    assert len(npu.TileTable.load(out)) == 2
    code, text, _ = run("tune", "--shape", "B1,N2,S32,D32", "--strategy", "exhaustive", "--out", out)
    assert code == 0 and "3 row(s) in all" in text and str(out) in text
    with npu.use_table(out):
        code, text, _ = run("estimate", "--shape", "B1,N2,S32,D32")
    assert code == 0 and "(auto: table)" in text


def test_a_progress_bar_on_a_terminal_only(monkeypatch, capsys):
    with commands._progress("x") as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with commands._progress("x") as progress:
        progress(1, 2, 0.5)
    assert capsys.readouterr().out == ""


# As a program ------------------------------------------------------------------------------------------------------


def program(*argv, code=None):
    """Run `python -m npumodel`, or some code, in another process."""
    command = ["-m", "npumodel", *argv] if code is None else ["-c", code, *argv]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_python_m():
    done = program("devices")
    assert done.returncode == 0 and "ascend910b2" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("package, extra", [("tyro", "cli"), ("matplotlib", "plot")])
def test_a_missing_extra_prints_the_cure(package, extra):
    block = f"import sys; sys.modules[{package!r}] = None; from npumodel.cli import main; sys.exit(main(['demo']))"
    done = program(code=block)
    assert done.returncode == 2 and done.stdout == "" and f'pip install "npumodel[{extra}]"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_library_needs_no_extra():
    code = "import sys, npumodel, npumodel.cli; print(*{'tyro', 'rich', 'matplotlib'} & set(sys.modules))"
    assert program(code=code).stdout == "\n"


def test_a_reader_that_goes_away():
    pipe = f"{sys.executable} -m npumodel devices ascend910b2 | head -n 1"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stderr == "" and done.stdout.startswith("ascend910b2")


@pytest.mark.slow
def test_the_bench_is_traced(run):
    code, out, _ = run("trace", BENCH, "--batch", 4, "--heads", 32, "--", "--heads", 1)
    assert code == 0 and "B4 N32 S4097 D128" in out and "distinct" in out


@pytest.mark.slow
def test_demo(run, tmp_path):
    code, out, err = run("demo", "--out", tmp_path)
    assert code == 0 and "largest error" in out and "auto: table" in out
    assert chrome.problems((tmp_path / "trace.json").read_text()) == []
    assert len(npu.TileTable.load(tmp_path / "table.json")) == 1
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
