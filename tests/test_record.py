"""Recording: what a script executes is found once per distinct call, and the script runs as it would alone."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

import npumodel as npu
from npumodel import api, record, report_text

SETUP = """
import jax, jax.numpy as jnp
import npumodel as npu
def qkv(length, heads=2, dtype="float32"):
    return [jnp.ones((1, heads, length, 32), dtype)] * 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a script into a folder of its own and run it on a device: (calls, exit code)."""

    def runner(body, *args):
        script = tmp_path / "script.py"
        script.write_text(SETUP + textwrap.dedent(body))
        with npu.target("ascend910b2"):
            found, code = record.run_script(script, args)
        return found.calls, code

    return runner


def test_eager_and_jitted_calls_are_counted_once_per_distinct_call(run):
    calls, code = run("""
        attend = jax.jit(npu.flash_attention)
        for _ in range(3):
            attend(*qkv(64))
        npu.flash_attention(*qkv(64))
        npu.flash_attention(*qkv(65))
        npu.flash_attention(*qkv(64, dtype="float16"))
        npu.flash_attention(*qkv(64), is_causal=True)
    """)
    assert code == 0
    seen = [(call.shape.label, call.count) for call in calls]
    assert seen == [
        ("B1 N2 S64 D32 float32", 4),
        ("B1 N2 S65 D32 float32", 1),
        ("B1 N2 S64 D32 float16", 1),
        ("B1 N2 S64 D32 float32 causal", 1),
    ]
    assert {call.device for call in calls} == {"ascend910b2"}
    assert all(call.source for call in calls)


def test_what_a_price_leaves_out_tells_calls_apart_and_is_said(run):
    calls, _ = run("""
        x = qkv(64, dtype="float16")
        npu.flash_attention(*x)
        npu.flash_attention(*x, kv_lengths=[9], causal_offset=3, is_causal=True)
        npu.flash_attention(*x, kv_lengths=[8], causal_offset=3, is_causal=True)
        npu.flash_attention(*x, window=(9, -1), softcap=3.0)
    """)
    left_out = ("causal_offset", "kv_lengths")
    assert [(call.count, call.unpriced) for call in calls] == [(1, ()), (2, left_out), (1, ())]
    assert calls[2].shape.label.endswith("WL9 float16 softcap")
    prices = record.priced(calls, npu.device("ascend910b2"))
    assert "price leaves out" not in report_text.table(prices[0])
    assert report_text.table(prices[1]).endswith("note: the price leaves out causal_offset, kv_lengths")
    assert report_text.as_dict(prices[1])["unpriced"] == ["causal_offset", "kv_lengths"]


def test_tiles_tell_calls_apart(run):
    calls, _ = run("""
        npu.flash_attention(*qkv(64), tile_level=npu.TileConfig(16, 32))
        npu.flash_attention(*qkv(64), tile_level=npu.TileConfig(32, 32))
    """)
    assert [call.tile.label for call in calls] == ["16x32", "32x32"]


def test_the_innermost_target_counts(run):
    calls, _ = run("""
        with npu.target("article"):
            npu.flash_attention(*qkv(64), tile_level="32x32")
        npu.flash_attention(*qkv(64), tile_level="32x32")
    """)
    assert [call.device for call in calls] == ["article", "ascend910b2"]


def test_calls_of_functions_that_are_traced_but_not_run_are_not_counted(run):
    calls, _ = run("jax.jit(npu.flash_attention).lower(*qkv(64))")
    assert calls == []


def test_a_script_sees_its_name_arguments_and_folder(run, tmp_path, capsys):
    (tmp_path / "neighbour.py").write_text("value = 42")
    _, code = run("import sys, neighbour; print(__name__, sys.argv[1:], __file__, neighbour.value)", "--scale", "2")
    out = capsys.readouterr().out
    assert code == 0 and out.startswith("__main__ ['--scale', '2']") and out.endswith("script.py 42\n")


def test_nothing_is_left_behind(run):
    import sys

    before = list(sys.argv), list(sys.path), list(api.listeners), sys.modules["__main__"]
    run("import sys; sys.argv = []; sys.path.append('x'); raise ValueError")
    assert before == (list(sys.argv), list(sys.path), list(api.listeners), sys.modules["__main__"])


def test_a_failing_script_keeps_what_it_did(run, capsys):
    calls, code = run("""
        npu.flash_attention(*qkv(64))
        def inner():
            raise RuntimeError("broken here")
        inner()
    """)
    err = capsys.readouterr().err
    assert code == 1 and len(calls) == 1
    assert "RuntimeError: broken here" in err and "in inner" in err and "runpy" not in err


def test_a_script_with_a_syntax_error(run, capsys):
    assert run("x = (") == ([], 1)
    err = capsys.readouterr().err
    assert "SyntaxError" in err and "runpy" not in err


@pytest.mark.parametrize(
    "code, expected", [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit('sorry')", 1)]
)
def test_exit_codes(run, capsys, code, expected):
    assert run(f"import sys; {code}")[1] == expected
    assert capsys.readouterr().err == ("sorry\n" if "sorry" in code else "")


def test_keyboard_interrupt(run):
    calls, code = run("npu.flash_attention(*qkv(64)); raise KeyboardInterrupt")
    assert len(calls) == 1 and code == 130


def test_a_missing_script():
    with pytest.raises(FileNotFoundError, match="nothing.py"):
        record.run_script("nothing.py")


def test_recording_without_a_script():
    q = jnp.ones((1, 1, 32, 32))
    with record.recording() as found:
        jax.jit(npu.flash_attention)(q, q, q)
    npu.flash_attention(q, q, q)  # after the end: not heard
    assert [call.count for call in found.calls] == [1]
