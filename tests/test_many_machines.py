"""Tuning over several devices and several processes gives the same bits as on one device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Prints every number of the results; with arguments (address, count, number) as one of several processes.
SCRIPT = """
import sys
import jax
if len(sys.argv) > 1:
    jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
import npumodel as npu
lengths = (64, 1, 333, 1000, 77)
shapes = [npu.AttentionShape(2, 8, n, 64, kv_heads=2, kv_len=1000, causal=n > 64) for n in lengths]
results = npu.tune(shapes, "ascend910b2", max_evals=3000)
print("devices", jax.local_device_count(), "processes", jax.process_count())
for r in results:
    print(r.shape.label, r.tile.label, r.seconds.hex(), r.default.seconds.hex(), r.evals, sorted(r.rejected.items()))
"""


def start(*arguments, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process):
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error[-3000:]
    return [line for line in out.splitlines() if not line.startswith("[Gloo]")]  # its greeting


@pytest.fixture(scope="module")
def alone():
    return printed(start())


@pytest.mark.slow
def test_eight_devices(alone):
    first, *rest = printed(start(devices=8))
    assert first == "devices 8 processes 1" and alone[0] == "devices 1 processes 1"
    assert rest == alone[1:] and len(rest) == 5


@pytest.mark.slow
def test_two_processes(alone):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    both = [start(address, 2, number) for number in range(2)]
    for lines in map(printed, both):
        assert lines[0] == "devices 1 processes 2" and lines[1:] == alone[1:]
