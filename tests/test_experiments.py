"""The experiments run, at their smallest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.mark.slow
def test_bench_attention(tmp_path):
    file = tmp_path / "bench.json"
    command = [sys.executable, EXPERIMENTS / "bench_attention.py", "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(file.read_text())["rows"]
    assert {row["case"]["name"] for row in rows} == {"main", "gqa", "window", "decode"}
    assert {"npumodel", "naive jnp", "jax.nn"} <= {row["name"] for row in rows}
    assert all(row["error"] < 1e-4 for row in rows), rows


@pytest.mark.slow
def test_bench_model(tmp_path):
    file = tmp_path / "bench.json"
    command = [sys.executable, EXPERIMENTS / "bench_model.py", "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    kinds = {row["what"] for row in found["rows"]}
    assert kinds == {"evaluations/s", "cost + gradient/s", "tune, warm", "tune, cold process"}
    assert all(row["value"] > 0 for row in found["rows"]), found
    assert [count["compilations"] for count in found["compilations"]] == [1], found


@pytest.mark.slow
def test_bench_search(tmp_path):
    file = tmp_path / "bench.json"
    command = [sys.executable, EXPERIMENTS / "bench_search.py", "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert {"coordinate", "annealing", "evolution", "random", "rule", "cann"} == set(found["gaps"])
    pairs = [pair for pairs in found["gaps"].values() for pair in pairs]
    assert len(pairs) == 3 * 6 and all(gap >= 0 and share <= 0.02 for gap, share in pairs)
    assert max(gap for gap, _ in found["gaps"]["coordinate"]) <= 0.05 and len(found["whole"]) == 3
