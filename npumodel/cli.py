"""The command line's door: exit codes and messages. `commands` has the commands.

0 done, 1 the user's script failed or a check of a table found something, 2 a mistake that the message explains,
130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from npumodel import __version__

#: Packages that come with an extra.
_EXTRAS = {"tyro": "cli", "rich": "cli", "matplotlib": "plot"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never a traceback for a mistake of the user's."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:
        print(f"npumodel {__version__}")
        return 0
    warnings.formatwarning = lambda message, *_, **__: f"npumodel: {message}\n"
    try:
        from npumodel import commands

        return commands.run(argv)
    except ModuleNotFoundError as error:
        return _missing(error)
    except BrokenPipeError:  # the reader has gone (`npumodel devices | head -1`): say nothing more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"npumodel: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("npumodel: interrupted; what was saved before stays", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # not through the interpreter's end: a compilation may still be running, and would crash it


def _missing(error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    print(f'npumodel: this needs {package}; pip install "npumodel[{_EXTRAS[package]}]"', file=sys.stderr)
    return 2
