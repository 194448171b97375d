"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


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


def test_example_has_twelve_lines():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code and len([line for line in code[1].splitlines() if line]) == 11 + 1
