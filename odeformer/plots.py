"""What the project draws. A function takes matplotlib Axes, draws on them and returns them; without, it makes a figure.

Figures are made without pyplot: no window, no display, no global state. ``save`` writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from solvers.base import Solver
from solvers.registry import get_solver
from solvers.stability import growth_factor, imaginary_interval, real_interval

# Okabe & Ito 2008: told apart with any colour vision; the line styles tell them apart without colour
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", (0, (4, 1.5, 1, 1.5, 1, 1.5)), ":", (0, (7, 2)), (0, (1, 1)))
FILL = 0.12  # opacity: overlapping regions stay visible
UNBOUNDED = 8.0  # half width of the view where a region has no end to scale it by
Extent = tuple[float, float, float, float]


def stability_regions(solvers: str | Solver | Iterable[str | Solver], ax: Axes | None = None, *,
                      eigenvalues: Any = None, extent: Extent | None = None, resolution: int = 241) -> Axes:
    """The stability regions of methods in the plane of h λ: filled, bounded where growth_factor is 1, labelled by name.

    solvers: one method or several, names or objects. eigenvalues: complex h λ (array or tensor) to draw over them.
    extent: (left, right, bottom, top); by default around the regions and the eigenvalues. resolution: points along
    the longer side. A region without interior (leapfrog's is a part of the imaginary axis) is drawn as a thick line.

    Raises ValueError: no solver, one that has no stability region, an extent or eigenvalues that are no such thing.
    """
    methods = [get_solver(s) for s in ([solvers] if isinstance(solvers, str) or hasattr(solvers, "name") else solvers)]
    if not methods:
        raise ValueError("solvers must name at least one method")
    points = None if eigenvalues is None else _read_eigenvalues(eigenvalues)
    if isinstance(resolution, bool) or not isinstance(resolution, int) or resolution < 2:
        raise ValueError(f"resolution must be an int of at least 2, got {resolution!r}")
    left, right, bottom, top = _view(methods, points) if extent is None else _read_extent(extent)
    ax = _axes(ax, (right - left) / (top - bottom))
    scale = (resolution - 1) / max(right - left, top - bottom)
    x = np.linspace(left, right, max(2, round((right - left) * scale) + 1))
    y = np.linspace(bottom, top, max(2, round((top - bottom) * scale) + 1))
    for side in (ax.axhline, ax.axvline):
        side(0, color="0.6", linewidth=0.8, zorder=0.5)
    styles = _styles(len(ax.get_legend_handles_labels()[1]))
    for method, (color, line) in zip(methods, styles, strict=False):
        _draw_region(ax, method, x, y, color, line)
    if points is not None:
        ax.scatter(points.real, points.imag, s=18, color="black", edgecolors="white", linewidths=0.6, zorder=3,
                   label="eigenvalues h λ")
    ax.set(xlim=(left, right), ylim=(bottom, top), xlabel="Re(h λ)", ylabel="Im(h λ)", aspect="equal")
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, frameon=False, handlelength=3.0)
    return ax


def save(figure: Figure | Axes, path: str | os.PathLike) -> Path:
    """Write a figure, or the one that axes are on, in the format of the suffix of ``path``; returns the path.

    It is written beside and renamed, so that no reader meets half a file. Raises ValueError for a suffix that is no
    format, TypeError for anything but a figure or axes.
    """
    if not isinstance(figure, Figure | Axes):
        raise TypeError(f"figure must be a matplotlib Figure or Axes, got {type(figure).__name__}")
    while not isinstance(figure, Figure):  # axes may be on a part of a figure
        figure = figure.figure
    path = Path(path)
    suffix, known = path.suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if suffix not in known:
        formats = ", ".join(f".{name}" for name in sorted(known))
        raise ValueError(f"path must end in one of {formats}; got {path.name!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in a folder that exists; {path.parent} does not")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(beside, format=suffix, dpi=200, bbox_inches="tight")  # labels beside axes are part of it
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _draw_region(ax: Axes, method: Solver, x: np.ndarray, y: np.ndarray, color: str, line: Any) -> None:
    growth = np.minimum(growth_factor(method, x + 1j * y[:, None]), 2.0)  # no poles for the contour to trip over
    width = 1.6
    if (growth < 1 - 1e-9).any():
        ax.contourf(x, y, growth, levels=[0.0, 1.0], colors=[color], alpha=FILL)
        if growth.max() > 1:
            ax.contour(x, y, growth, levels=[1.0], colors=[color], linestyles=[line], linewidths=width)
    else:
        across, up = max(real_interval(method), x[0]), min(imaginary_interval(method), max(abs(y)))
        line, width = "-", 3.0
        for ends in (([across, 0], [0, 0]), ([0, 0], [-up, up])):
            ax.plot(*ends, color=color, linestyle=line, linewidth=width, solid_capstyle="butt")
    ax.plot([], [], color=color, linestyle=line, linewidth=width, label=method.name)


def _styles(start: int) -> Iterator[tuple[str, Any]]:
    """Colours with line styles, from the one numbered ``start`` on; after one round the pairs change."""
    i = start
    while True:
        turn, place = divmod(i, len(COLORS))
        yield COLORS[place], LINES[(place + turn) % len(LINES)]
        i += 1


def _view(methods: list[Solver], points: np.ndarray | None) -> Extent:
    """A box around the regions (from a coarse grid, scaled by the intervals), the origin and the points."""
    boxes = [_box(method) for method in methods]
    if points is not None and points.size:
        boxes.append((points.real.min(), points.real.max(), points.imag.min(), points.imag.max()))
    left, right, bottom, top = (pick(side) for pick, side in zip((min, max, min, max), zip(*boxes, strict=True),
                                                                 strict=True))
    left, right, bottom, top = min(left, 0.0), max(right, 0.0), min(bottom, 0.0), max(top, 0.0)
    margin = 0.08 * max(right - left, top - bottom)
    return float(left - margin), float(right + margin), float(bottom - margin), float(top + margin)


def _box(method: Solver) -> Extent:
    ends = [-real_interval(method), imaginary_interval(method)]
    if math.inf in ends:
        return -UNBOUNDED, UNBOUNDED, -UNBOUNDED, UNBOUNDED
    size = 2 * max(ends) or UNBOUNDED
    axis = np.linspace(-size, size, 81)
    stable = growth_factor(method, axis + 1j * axis[:, None]) <= 1 + 1e-9
    rows, columns = axis[stable.any(axis=1)], axis[stable.any(axis=0)]
    return columns.min(), columns.max(), rows.min(), rows.max()


def _axes(ax: Axes | None, shape: float) -> Axes:
    """The axes given, or new ones with room for a plot of that width by height, and for the legend beside it."""
    if ax is None:
        width = 4.0 * min(max(shape, 0.4), 2.0) + 2.6
        return Figure(figsize=(width, 4.6), layout="compressed").add_subplot()
    if not isinstance(ax, Axes):
        raise TypeError(f"ax must be matplotlib Axes or None, got {type(ax).__name__}")
    return ax


def _read_eigenvalues(eigenvalues: Any) -> np.ndarray:
    if hasattr(eigenvalues, "detach"):
        eigenvalues = eigenvalues.detach().cpu().resolve_conj().resolve_neg().numpy()
    points = np.asarray(eigenvalues, dtype=complex).ravel()
    if not np.isfinite(points).all():
        raise ValueError("eigenvalues must be finite")
    return points


def _read_extent(extent: Extent) -> Extent:
    sides = tuple(map(float, extent))
    if not (len(sides) == 4 and all(map(math.isfinite, sides)) and sides[0] < sides[1] and sides[2] < sides[3]):
        raise ValueError(f"extent must be (left, right, bottom, top) with left < right and bottom < top; got {extent}")
    return sides
