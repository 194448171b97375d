"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import npumodel as npu

README = Path(__file__).parents[1] / "README.md"


def snippet_with(word):
    return next(code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if word in code)


@pytest.mark.slow
def test_the_example_of_hints_runs():
    names = {"npu": npu}
    exec(compile(snippet_with("npu.hints"), str(README), "exec"), names)
    assert 0 < names["worth"].next_loads < names["worth"].lengths < names["worth"].padded


@pytest.mark.slow
def test_example_prints_what_the_readme_says():
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    said = re.search(r"```text\n(.*?)```", text, re.S)
    assert code and said
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code[1], str(README), "exec"), {})
    assert printed.getvalue() == said[1]


def test_the_attention_example_runs():
    example = snippet_with("segments")
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 2, 24, 8))
    names = {"npu": npu, "q": q, "k": k, "v": v, "bias": jnp.zeros((1, 2, 24, 24)), "sinks": jnp.zeros(2)}
    names |= {"lengths": jnp.array([20, 24]), "segments": jnp.zeros((2, 24), int), "key": jax.random.key(1)}
    exec(compile(example, str(README), "exec"), names)
    assert names["out"].shape == q.shape and names["lse"].shape == q.shape[:3]


def test_example_has_twelve_lines():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code and len([line for line in code[1].splitlines() if line]) == 11 + 1
