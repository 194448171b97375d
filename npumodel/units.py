"""How numbers are printed: SI prefixes for people. Inside the package everything is plain SI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def seconds(value: float) -> str:
    """Three digits and a prefix: 0.00123 -> "1.23 ms"."""
    for unit, name in _TIMES:
        if abs(value) >= 0.9995 * unit:
            return f"{_three(value / unit)} {name}"
    return f"{_three(value / 1e-9)} ns" if value else "0 s"


def milliseconds(value: float) -> str:
    """Always in ms, as the article prints it: at least two decimals, and three digits. 1.234e-3 -> "1.23ms"."""
    value *= 1e3
    return f"{value:.{_decimals(value, 2)}f}ms"


def size(value: float) -> str:
    """Bytes: 65536 -> "64 KiB", 100 -> "100 B"."""
    for unit, name in _BYTES:
        if value >= unit:
            return f"{_three(value / unit)} {name}"
    return f"{value:.0f} B"


def percent(share: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


#: How a number of a device is printed, by how its name ends; the first that fits.
_OF_A_DEVICE = {
    "_bytes": size,
    "_hz": lambda value: f"{value / 1e9:.4g} GHz",
    "_bytes_per_s": lambda value: f"{value / 1e9:.4g} GB/s",
    "_s": seconds,
    "": lambda value: f"{value:.4g}",
}


def number(name: str, value: float) -> str:
    """A number of a device, by its name: ("l1_bytes", 524288) -> "512 KiB"."""
    show = next(form for end, form in _OF_A_DEVICE.items() if name.endswith(end))
    return show(float(value))


def columns(cells: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: two spaces before and between; the first `left` columns to the left, the others to the
    right."""
    lines = list(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ([*map(str.ljust, c[:left], widths), *map(str.rjust, c[left:], widths[left:])] for c in lines)
    return ["  " + "  ".join(text).rstrip() for text in texts]


def _three(value: float) -> str:
    """Three digits, no trailing zeros after the point, never an exponent below a million."""
    text = f"{value:.{_decimals(value, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimals(value: float, least: int) -> int:
    """Decimals that show three digits of `value`, `least` or more and nine at most."""
    if not value or not math.isfinite(value):
        return least
    return min(max(least, 2 - math.floor(math.log10(abs(value)))), 9)
