"""What every test runs under: no silent rank promotion, no deadline (compiling takes long), no outside settings."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
settings.register_profile("npumodel", deadline=None)
settings.load_profile("npumodel")


@pytest.fixture
def compile_fast(request):
    """For tests that compile many calls and use each for a few numbers. Slow tests run what users run."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not request.node.get_closest_marker("slow"))
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forgets compiled calls before their memory maps reach 65,530, what Linux allows a process (vm.max_map_count): XLA
    on CPUs keeps dozens to a compiled call, and beyond the limit the process is killed."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NPUMODEL_")]:
        monkeypatch.delenv(name)
