"""What every test runs under: no silent rank promotion, no deadline (compiling takes long), no outside settings."""

import gc
import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(100_000, 10, 10)  # JAX makes many objects where it traces, and few are garbage: a fifth of the time
settings.register_profile("npumodel", deadline=None)
settings.load_profile("npumodel")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The default run compiles many calls and uses each for a few numbers; slow tests run what users run."""
    jax.config.update("jax_disable_most_optimizations", item.get_closest_marker("slow") is None)


@pytest.fixture
def compiled_as_for_users():
    """For tests of the default run that are about what the compiler makes of a call."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


_compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compiled.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forgets compiled calls before their memory maps reach 65,530, what Linux allows a process (vm.max_map_count): XLA
    on CPUs keeps dozens to a compiled call, and beyond the limit the process is killed. Counted after tests that have
    compiled something, since counting takes long when there are many."""
    yield
    if _compiled:
        _compiled.clear()
        maps = Path("/proc/self/maps")
        if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
            jax.clear_caches()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NPUMODEL_")]:
        monkeypatch.delenv(name)
