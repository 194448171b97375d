"""What a program asks for: every executed `flash_attention` call, once per distinct call, with a count and a price."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from npumodel import api, hardware
from npumodel.hardware import DeviceSpec
from npumodel.model.estimate import Cost, estimate
from npumodel.report_text import Priced, warnings
from npumodel.search.auto import by_model
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One distinct call: its shape (with dtype and mask), the tile and who chose it, how often, the name of the device
    that it was planned for (None: the host), and the arguments that a price leaves out."""

    shape: AttentionShape
    tile: TileConfig
    source: str
    device: str | None
    count: int = 1
    unpriced: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple:
        """What tells it from other calls."""
        return self.shape, self.tile, self.device, self.unpriced


class Recording:
    """Calls in order of their first appearance. `add` may be called from any thread."""

    def __init__(self):
        self._found: dict[tuple, Recorded] = {}
        self._lock = threading.Lock()

    def add(self, call: Recorded):
        with self._lock:
            old = self._found.get(call.identity)
            new = call if old is None else dataclasses.replace(old, count=old.count + call.count)
            self._found[call.identity] = new

    def heard(self, call: api.Call):
        """A listener of `api`."""
        tile, source = call.resolved.tile, call.resolved.source
        self.add(Recorded(call.shape, tile, source, call.device_name, unpriced=call.unpriced))

    @property
    def calls(self) -> list[Recorded]:
        with self._lock:
            return list(self._found.values())


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record every call that is executed inside the `with`, in any thread, jitted or not."""
    found = Recording()
    listener = found.heard
    api.listeners.append(listener)
    try:
        yield found
    finally:
        jax.effects_barrier()  # jitted calls report while they run
        api.listeners.remove(listener)


def run_script(script: str | os.PathLike[str], args: Sequence[str] = ()) -> tuple[Recording, int]:
    """Run a script as `python SCRIPT ARGS` would, and record its calls.

    Returns what was recorded until its end, and its exit code: that of its SystemExit, 1 after an exception (printed
    on stderr as Python does), 130 after Ctrl-C.
    Raises FileNotFoundError if there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise FileNotFoundError(f"script: expected a Python file, got {str(script)!r}: there is no such file")
    with recording() as found, _as_program(path, args):
        code = _run(path)
    return found, code


@contextlib.contextmanager
def _as_program(path: Path, args: Sequence[str]) -> Iterator[None]:
    """sys.argv and sys.path as the script expects them."""
    argv, folders = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path[0:0] = [str(path.resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, folders


def _run(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop)
    except (Exception, KeyboardInterrupt) as error:
        sys.stdout.flush()
        traceback.print_exception(error.with_traceback(_of_script(error, path)))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return int(stop.code or 0)
    print(stop.code, file=sys.stderr)
    return 1


def _of_script(error: BaseException, path: Path):
    """The traceback from the script's own first line on, without the frames that run it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(path):
        frames = frames.tb_next
    return frames


# Prices ------------------------------------------------------------------------------------------------------------


def priced(
    calls: Sequence[Recorded], spec: DeviceSpec, level: Any = None, batch: int | None = None, heads: int | None = None
) -> list[Priced]:
    """Price recorded calls, each on the device that it was planned for (`spec`, if that was the host).

    level   a tile level for all calls, instead of the tile that each ran with
    batch, heads  sizes for all calls, instead of their own; calls that become equal are counted together

    Raises ValueError for heads that a call's kv heads do not divide, and for a tile that does not fit.
    """
    together = Recording()
    for call in calls:
        together.add(_planned(call, spec, level, batch, heads))
    return [_price(call, spec) for call in together.calls]


def _planned(call: Recorded, spec: DeviceSpec, level: Any, batch: int | None, heads: int | None) -> Recorded:
    """The call as it is to be priced: a tile that was found by "auto" is looked up again for another size or device."""
    shape, device = resized(call.shape, batch, heads), call.device or spec.name
    if level is None and (shape, device) != (call.shape, call.device) and call.source.startswith("auto"):
        level = "auto"
    if level is None:
        return dataclasses.replace(call, shape=shape, device=device)
    found = api.resolve(shape, spec_of(device, spec), level)
    return dataclasses.replace(call, shape=shape, tile=found.tile, source=found.source, device=device)


def resized(shape: AttentionShape, batch: int | None = None, heads: int | None = None) -> AttentionShape:
    """The shape with another batch and number of query heads; as many query heads share a kv head as before."""
    for name, size in (("batch", batch), ("heads", heads)):
        if size is not None and size < 1:
            raise ValueError(f"{name}: expected a positive integer, got {size}")
    group, heads = shape.q_heads // shape.kv_heads, heads or shape.q_heads
    if heads % group:
        raise ValueError(f"heads: expected a multiple of {group}, the query heads that share a kv head, got {heads}")
    return dataclasses.replace(shape, batch=batch or shape.batch, q_heads=heads, kv_heads=heads // group)


def spec_of(name: str, spec: DeviceSpec) -> DeviceSpec:
    """The device of this name: `spec` if it is the one (it may come from a file), else a shipped one."""
    return spec if name == spec.name else hardware.device(name)


def _price(call: Recorded, spec: DeviceSpec) -> Priced:
    spec = spec_of(call.device or spec.name, spec)
    cost = estimate(call.shape, spec, call.tile)
    result = Priced(cost, call.source, call.count, unpriced=call.unpriced)
    return dataclasses.replace(result, better=_better(cost, spec)) if warnings(result) else result


def _better(cost: Cost, spec: DeviceSpec) -> Cost | None:
    """The price of the tile that "auto" would take, from the tables or by the model, if it is cheaper."""
    found = [api.resolve(cost.shape, spec), *by_model([cost.shape], spec)]
    tiles = dict.fromkeys(one.tile for one in found if one.tile != cost.tile)
    costs = [estimate(cost.shape, spec, tile) for tile in tiles]
    best = min(costs, key=lambda one: one.seconds, default=cost)
    return best if best.seconds < cost.seconds else None
