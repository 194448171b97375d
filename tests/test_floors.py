"""Imports only go down: a module imports from the floors below its own, or from its own floor."""

import ast
import importlib.util
from pathlib import Path

import pytest

#: Bottom to top.
FLOORS = (
    {"relax", "units"},
    {"workload", "tile"},
    {"hardware"},
    {"attention"},
    {"model"},
    {"search"},
    {"api", "record", "plot", "demo", "report_text", "explain_text"}
    | {"commands", "table_commands", "cli", "__init__", "__main__"},
)
#: Beyond the order: the price never imports the numerics.
FORBIDDEN = {("model", "attention")}

ROOT = Path(importlib.util.find_spec("npumodel").origin).parent
MODULES = sorted(ROOT.rglob("*.py"))


def part(name):
    """ "npumodel.model.cost" -> "model"; the package itself -> "__init__"."""
    return (name.split(".") + ["__init__"])[1]


def imported(path):
    """Parts of npumodel that a file imports, wherever in it the import stands."""
    package = ".".join(path.relative_to(ROOT.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "npumodel" else [base]
        else:
            continue
        yield from (part(name) for name in names if name.split(".")[0] == "npumodel")


def level(name):
    return next((at for at, floor in enumerate(FLOORS) if name in floor), len(FLOORS) - 1)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path):
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert any(here in floor for floor in FLOORS), f"{here}: give it a place in FLOORS"
    for there in set(imported(path)) - {here}:
        assert level(there) <= level(here), f"{here} imports {there}, which is above it"
        assert (here, there) not in FORBIDDEN, f"{here} must not import {there}"


def test_the_test_sees_imports(tmp_path, monkeypatch):
    (tmp_path / "npumodel" / "model").mkdir(parents=True)
    file = tmp_path / "npumodel" / "model" / "x.py"
    hidden = "def f():\n    import npumodel.attention.forward"
    file.write_text(f"from ..search import auto\nfrom .. import api, nothing\n{hidden}\n")
    monkeypatch.setattr("test_floors.ROOT", tmp_path / "npumodel")
    assert set(imported(file)) == {"search", "api", "nothing", "attention"}
