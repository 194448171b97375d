"""Pictures. Every function draws into `ax` (a new one if None) and returns it. Needs matplotlib: "npumodel[plot]"."""

from __future__ import annotations

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patheffects import Normal, Stroke

from npumodel.hardware import DeviceSpec
from npumodel.search.rules import DEFAULT
from npumodel.search.space import exact_seconds, lattice, legal
from npumodel.search.tuner import TuneResult
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape


class Surface(NamedTuple):
    """Cost over block sizes: block_q [rows], block_kv [columns], seconds [rows, columns]; nan: the tile is illegal."""

    block_q: np.ndarray
    block_kv: np.ndarray
    seconds: np.ndarray


def surface(shape: AttentionShape, device: DeviceSpec, like: TileConfig = DEFAULT) -> Surface:
    """Exact price of every pair of block sizes of the search space, all other knobs as in `like`."""
    q, kv = np.array(lattice(shape.q_len)), np.array(lattice(shape.kv_len))
    rows, columns = (grid.ravel() for grid in np.meshgrid(q, kv, indexing="ij"))
    tiles = like.replace(block_q=rows, block_kv=columns)
    seconds = np.where(legal([shape], tiles, device), exact_seconds([shape], tiles, device), np.nan)
    return Surface(q, kv, seconds.reshape(q.size, kv.size))


def cost_map(costs: Surface, ax: Axes | None = None) -> Axes:
    """Heat map of milliseconds over block_kv (right) and block_q (up), both in log2; illegal tiles are hatched."""
    ax = _axes(ax)
    values = np.ma.masked_invalid(costs.seconds * 1e3)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    norm = LogNorm(values.min(), values.max()) if values.count() else None
    mesh = ax.pcolormesh(_edges(costs.block_kv), _edges(costs.block_q), values, norm=norm, cmap="viridis")
    ax.patch.set(facecolor="0.92", edgecolor="0.6", hatch="////")
    ax.figure.colorbar(mesh, ax=ax, label="predicted time, ms")
    ax.set(xlabel="block_kv (key rows of a step)", ylabel="block_q (query rows of a task)")
    return ax


def descent(result: TuneResult, ax: Axes | None = None) -> Axes:
    """Where each start of the descent went, the one that ended best in red; nothing without a history."""
    ax = _axes(ax)
    if result.history is None:
        return ax
    knobs = np.concatenate([result.history.knobs, result.history.end[None]])  # [steps + 1, starts, 8]
    best = int(np.argmin(result.history.seconds[-1])) if len(result.history.seconds) else 0
    for start in [*(i for i in range(knobs.shape[1]) if i != best), best]:
        colour, width = ("red", 1.8) if start == best else ("white", 0.8)
        line = {"color": colour, "path_effects": [Stroke(linewidth=width + 0.8, foreground="0.35"), Normal()]}
        ax.plot(knobs[:, start, 1], knobs[:, start, 0], linewidth=width, **line)
        ax.plot(knobs[0, start, 1], knobs[0, start, 0], ".", **line)
    return ax


def tile_map(result: TuneResult, ax: Axes | None = None) -> Axes:
    """The cost over tile sizes (other knobs as learned), the descent if there was one; default, rule-of-thumb, learned
    tile."""
    tile = result.tile
    ax = descent(result, cost_map(surface(result.shape, result.device, tile), ax))
    marks = [
        ("default", result.default.tile, "s", 10, "black"),
        ("rule of thumb", result.rule.tile, "D", 6, "0.7"),
        ("learned", tile, "*", 16, "orange"),
    ]
    for name, at, marker, size, colour in marks:
        style = {"markersize": size, "color": colour, "markeredgecolor": "white", "linestyle": "none"}
        ax.plot(at.block_kv, at.block_q, marker, label=f"{name}: {at.label}", **style)
    others = tile.label.partition(" ")[2] or "all other knobs at their defaults"
    ax.set_title(f"{result.shape.label} on {result.device.name}\n{others}")
    ax.legend(loc="upper right", fontsize="small")
    return ax


def _axes(ax: Axes | None) -> Axes:
    return plt.subplots(figsize=(8, 6), layout="constrained")[1] if ax is None else ax


def _edges(sizes: np.ndarray) -> np.ndarray:
    """Borders of the cells around sizes [n]: geometric means of neighbours, and as far again at both ends. [n + 1]."""
    log = np.log2(sizes)
    if log.size == 1:
        return 2.0 ** (log[0] + np.array([-0.5, 0.5]))
    middle = (log[1:] + log[:-1]) / 2
    return 2.0 ** np.concatenate([[2 * log[0] - middle[0]], middle, [2 * log[-1] - middle[-1]]])
