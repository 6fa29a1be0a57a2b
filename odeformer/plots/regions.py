"""Stability regions, and eigenvalues over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import depths_of, shaped
from odeformer.plots.style import COLUMN, FILL, QUIET, axes, colorbar, depth_colors, legend, next_looks, styled
from solvers.base import Solver
from solvers.registry import get_solver
from solvers.stability import growth_factor, imaginary_interval, real_interval

UNBOUNDED = 8.0  # half width of the view where a region has no end to scale it by
Extent = tuple[float, float, float, float]


@styled
def stability_regions(solvers: str | Solver | Iterable[str | Solver], ax: Axes | None = None, *,
                      eigenvalues: Any = None, depths: Any = None, extent: Extent | None = None,
                      resolution: int = 241) -> Axes:
    """The stability regions of methods in the plane of h λ: filled, bounded where growth_factor is 1, labelled by name.

    solvers: one method or several, names or objects. eigenvalues: complex h λ (array or tensor) to draw over them.
    depths: where they belong, one for each entry of their first axis (layers, ...): they are coloured by it, and nan
    among them is left out (a layer may have fewer). extent: (left, right, bottom, top); by default around the regions
    and the eigenvalues. resolution: points along the longer side. A region without interior (leapfrog's is a part of
    the imaginary axis) is drawn as a thick line.

    Raises ValueError: no solver, one that has no stability region, an extent or eigenvalues that are no such thing.
    """
    methods = [get_solver(s) for s in ([solvers] if isinstance(solvers, str) or hasattr(solvers, "name") else solvers)]
    if not methods:
        raise ValueError("solvers must name at least one method")
    points, at = _read_eigenvalues(eigenvalues, depths)
    check_resolution(resolution)
    left, right, bottom, top = _view(methods, points) if extent is None else read_extent(extent)
    ax = plane_axes(ax, (right - left) / (top - bottom), room=0.55 if at is not None else 0.0)
    x, y = plane_grid((left, right, bottom, top), resolution)
    for method, look in zip(methods, next_looks(ax), strict=False):
        _draw_region(ax, method, x, y, look.color, look.line)
    if points is not None:
        _draw_eigenvalues(ax, points, at)
    ax.set(xlim=(left, right), ylim=(bottom, top), xlabel="Re(h λ)", ylabel="Im(h λ)", aspect="equal")
    legend(ax)
    return ax


def _draw_region(ax: Axes, method: Solver, x: np.ndarray, y: np.ndarray, color: str, line: Any) -> None:
    growth = np.minimum(growth_factor(method, x + 1j * y[:, None]), 2.0)  # no poles for the contour to trip over
    width = 1.4
    if (growth < 1 - 1e-9).any():
        ax.contourf(x, y, growth, levels=[0.0, 1.0], colors=[color], alpha=FILL)
        if growth.max() > 1:
            ax.contour(x, y, growth, levels=[1.0], colors=[color], linestyles=[line], linewidths=width, zorder=4)
    else:
        across, up = max(real_interval(method), x[0]), min(imaginary_interval(method), max(abs(y)))
        line, width = "-", 3.0
        for ends in (([across, 0], [0, 0]), ([0, 0], [-up, up])):
            ax.plot(*ends, color=color, linestyle=line, linewidth=width, solid_capstyle="butt", zorder=4)
    ax.plot([], [], color=color, linestyle=line, linewidth=width, label=method.name)


def _draw_eigenvalues(ax: Axes, points: np.ndarray, at: np.ndarray | None) -> None:
    look = {"color": "black"} if at is None else {"c": at, "cmap": depth_colors()}
    size = {"s": 13, "linewidths": 0.4} if len(points) <= 300 else {"s": 5, "linewidths": 0.1}
    dots = ax.scatter(points.real, points.imag, edgecolors="white", zorder=3, **size,
                      label="eigenvalues h λ", **look)
    if at is not None:
        colorbar(ax, dots, "depth l (layers)")


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


def _read_eigenvalues(eigenvalues: Any, depths: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The points and, where ``depths`` are given, the depth of each."""
    if eigenvalues is None:
        if depths is not None:
            raise ValueError("depths are those of eigenvalues, and there are none")
        return None, None
    if depths is None:
        return shaped("eigenvalues", np.ravel(_listed(eigenvalues)), "points", dtype=complex), None
    values = shaped("eigenvalues", eigenvalues, "layers", dtype=complex, more=True, missing=True)
    at = depths_of(depths, len(values), "layers of eigenvalues")
    values = values.reshape(len(values), -1)
    there = ~np.isnan(values)
    return values[there], np.broadcast_to(at[:, None], values.shape)[there]


def _listed(values: Any) -> Any:
    return values.detach().cpu().resolve_conj().resolve_neg().numpy() if hasattr(values, "detach") else values


def plane_axes(ax: Axes | None, shape: float, room: float = 0.0) -> Axes:
    """The axes given, or new ones for a plot of the plane of that width by height, with axes through 0.

    room: inches that a colour bar takes of the width.
    """
    width = COLUMN - 0.6 - room
    ax = axes(ax, min(max(width / shape, 1.2), 3.6) + 0.9, layout="compressed")
    for side in (ax.axhline, ax.axvline):
        side(0, color=QUIET, linewidth=0.6, zorder=0.5)
    return ax


def plane_grid(extent: Extent, resolution: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates x and y of a grid over the plane, ``resolution`` points along the longer side."""
    left, right, bottom, top = extent
    scale = (resolution - 1) / max(right - left, top - bottom)
    return (np.linspace(left, right, max(2, round((right - left) * scale) + 1)),
            np.linspace(bottom, top, max(2, round((top - bottom) * scale) + 1)))


def check_resolution(resolution: int) -> None:
    """Raises ValueError unless it is an int of at least 2."""
    if isinstance(resolution, bool) or not isinstance(resolution, int) or resolution < 2:
        raise ValueError(f"resolution must be an int of at least 2, got {resolution!r}")


def read_extent(extent: Extent) -> Extent:
    """The four sides as floats. Raises ValueError for what is no box."""
    sides = tuple(map(float, extent))
    if not (len(sides) == 4 and all(map(math.isfinite, sides)) and sides[0] < sides[1] and sides[2] < sides[3]):
        raise ValueError(f"extent must be (left, right, bottom, top) with left < right and bottom < top; got {extent}")
    return sides
