"""The experiments run, at their smallest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def quick(script, folder):
    """What a benchmark writes at its smallest."""
    file = folder / "bench.json"
    command = [sys.executable, EXPERIMENTS / script, "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())


@pytest.mark.slow
def test_bench_attention(tmp_path):
    rows = quick("bench_attention.py", tmp_path)["rows"]
    assert {row["case"]["name"] for row in rows} == {"main", "gqa", "window", "decode"}
    assert {"npumodel", "naive jnp", "jax.nn"} <= {row["name"] for row in rows}
    assert all(row["error"] < 1e-4 for row in rows), rows


@pytest.mark.slow
def test_bench_model(tmp_path):
    found = quick("bench_model.py", tmp_path)
    kinds = {row["what"] for row in found["rows"]}
    assert kinds == {"evaluations/s", "cost + gradient/s", "tune, warm", "tune, cold process"}
    assert all(row["value"] > 0 for row in found["rows"]), found
    assert [count["compilations"] for count in found["compilations"]] == [1], found


@pytest.mark.slow
def test_bench_search(tmp_path):
    found = quick("bench_search.py", tmp_path)
    assert {"coordinate", "annealing", "evolution", "random", "rule", "cann"} == set(found["gaps"])
    pairs = [pair for pairs in found["gaps"].values() for pair in pairs]
    assert len(pairs) == 3 * 6 and all(gap >= 0 and share <= 0.02 for gap, share in pairs)
    assert max(gap for gap, _ in found["gaps"]["coordinate"]) <= 0.05 and len(found["whole"]) == 3
