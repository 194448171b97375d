"""What a program asks for: every executed `flash_attention` call, once per distinct call, with a count."""

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

from npumodel import api
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One distinct call: its shape (with dtype and mask), the tile and who chose it, the device's name, how often."""

    shape: AttentionShape
    tile: TileConfig
    source: str
    device: str
    count: int = 1

    @property
    def identity(self) -> tuple[AttentionShape, TileConfig, str]:
        """What tells it from other calls."""
        return self.shape, self.tile, self.device


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

    def heard(self, call: Any):
        """A listener of `api`."""
        self.add(Recorded(call.shape, call.resolved.tile, call.resolved.source, call.device_name))

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
