"""Paths of states: projected, and over the field that moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from torch import Tensor

from odeformer.plots.arrays import depths_of, read, shaped, states_of
from odeformer.plots.regions import Extent, check_resolution, plane_grid, read_extent
from odeformer.plots.style import axes, colorbar, depth_colors, grid, legend, styled

CHUNK = 64  # states at which the field is evaluated at once


def principal_directions(x: Any, n: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean (d,), directions (n, d), shares (n,)) of points x (points, d): the n directions of the largest variance,
    orthonormal, and the share of the variance that each has (Pearson 1901). Each direction's largest entry is positive.

    Raises ValueError for fewer than n points or coordinates.
    """
    x = shaped("x", x, "points, d")
    if min(x.shape) < n:
        raise ValueError(f"{n} principal directions need at least {n} points and coordinates, got {x.shape}")
    mean = x.mean(0)
    _, sizes, directions = np.linalg.svd(x - mean, full_matrices=False)
    directions = directions[:n]
    signs = np.sign(directions[np.arange(n), np.abs(directions).argmax(1)])
    total = (sizes**2).sum()
    return mean, directions * signs[:, None], sizes[:n] ** 2 / (total if total > 0 else 1.0)


@styled
def trajectories(states: Any, ax: Axes | None = None, *, depths: Any = None, mask: Any = None) -> Axes:
    """Paths of tokens through depth, projected onto the two principal directions of all states together, coloured by
    depth; ○ where a path begins, ■ where it ends.

    states: a Solution with states, or (points, ..., d_model) with any axes between, such as batch and tokens; d_model
    at least 2. depths: (points,); those of the Solution, or 0, 1, ... if None. mask: bool, shaped like the axes
    between, True = real; padding is neither drawn nor projected.

    Raises ValueError: states of fewer than two points or coordinates, not finite at real tokens; depths or a mask that
    do not fit.
    """
    found, own = states_of(states)
    z, at = _paths(found, own if depths is None else depths, mask)
    mean, directions, shares = principal_directions(z.reshape(-1, z.shape[-1]))
    ax = axes(ax, 2.6)
    grid(ax)
    _draw_paths(ax, (z - mean) @ directions.T, at)
    ax.set(xlabel=f"PC 1 ({shares[0]:.0%} of the variance)", ylabel=f"PC 2 ({shares[1]:.0%})")
    ax.autoscale_view()
    legend(ax)
    return ax


@styled
def phase_portrait(f: Any, ax: Axes | None = None, *, states: Any = None, origin: Any = None, directions: Any = None,
                   l: float = 0.0, extent: Extent | None = None, resolution: int = 17) -> Axes:
    """The field f(z, l) on a plane through the space of states: arrows along its part in the plane, coloured by that
    part's norm; and paths of states, projected onto the plane.

    f: z (n, *shape) -> the increment, shaped like z; l is a 0-d tensor. states: a Solution with states, or (points,
    paths, *shape). origin (*shape): where the plane passes through, the mean of the states if None. directions
    (2, *shape): what spans it (made orthonormal, the first kept); the principal directions of the states if None.
    l: the depth at which f is evaluated. extent: (left, right, bottom, top) in the plane's coordinates; by default
    around the states. resolution: arrows along the longer side. A path leaves the plane, and the arrows are f in it:
    they need not be tangent where the rest of the state is not that of the origin.

    Raises ValueError: neither states nor both an origin and directions; shapes that do not fit; directions that are
    parallel; a field that is not finite there or returns another shape.
    """
    check_resolution(resolution)
    z, at, like = _plane_states(states)
    centre, plane, like = _plane(z, origin, directions, like)
    points = None if z is None else (z.reshape(*z.shape[:2], -1) - centre) @ plane.T
    if extent is None:
        extent = _around(points) if points is not None else (-1.0, 1.0, -1.0, 1.0)
    x, y = plane_grid(read_extent(extent), resolution)
    u, v = _field_on_plane(f, centre, plane, x, y, l, like)
    ax = axes(ax, 2.7)
    speed = np.hypot(u, v)
    with np.errstate(invalid="ignore", divide="ignore"):
        arrows = ax.quiver(x, y, np.nan_to_num(u / speed), np.nan_to_num(v / speed), speed, cmap=depth_colors(),
                           pivot="middle", scale=1.25 * len(x), width=0.0045, zorder=1)
    bright = np.quantile(speed, 0.95)  # a few fast places must not make all others look alike
    arrows.set_clim(0, bright or 1.0)
    colorbar(ax, arrows, "‖f(z, l)‖ in the plane (1 / layer)", extend="max" if speed.max() > bright else "neither")
    if points is not None:
        _draw_paths(ax, points, at, plain=True)
    ax.set(xlim=extent[:2], ylim=extent[2:], xlabel="along direction 1", ylabel="along direction 2")
    legend(ax)
    return ax


def _paths(states: Any, depths: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """(points, paths, d_model) without padding, and the depths."""
    z = read("states", states)
    if z.ndim < 2 or len(z) < 2 or z.shape[-1] < 2 or 0 in z.shape:
        raise ValueError("states must have the shape (points, ..., d_model) with at least two points and d_model of at "
                         f"least 2, got {z.shape}")
    inner = z.shape[1:-1]
    if mask is not None:
        keep = read("mask", mask, bool)
        if keep.shape != inner or not keep.any():
            raise ValueError(f"mask must be bool with the shape {inner} and True somewhere, got {keep.shape}")
        z = z[:, keep]
    z = z.reshape(len(z), -1, z.shape[-1])
    if not np.isfinite(z).all():
        raise ValueError("states must be finite at real tokens; mask tells which are")
    return z, depths_of(depths, len(z), "points of states")


def _draw_paths(ax: Axes, xy: np.ndarray, depths: np.ndarray, *, plain: bool = False) -> None:
    """Paths (points, paths, 2): coloured by depth, or plain black."""
    many = xy.shape[1] > 60
    segments = np.stack([xy[:-1], xy[1:]], axis=2).transpose(1, 0, 2, 3).reshape(-1, 2, 2)
    lines = LineCollection(segments, linewidths=0.5 if many else 1.0, zorder=2, capstyle="round",
                           colors="black" if plain else None, cmap=None if plain else depth_colors())
    if not plain:
        lines.set_array(np.tile((depths[:-1] + depths[1:]) / 2, xy.shape[1]))
        lines.set_clim(min(depths), max(depths))
    ax.add_collection(lines)
    size = 2.0 if many else 3.5
    ends = (("o", "white", 0), ("s", "black", -1))
    for marker, face, end in ends:
        ax.plot(*xy[end].T, linestyle="none", marker=marker, markersize=size, color="black", markerfacecolor=face,
                markeredgewidth=0.6, zorder=3, label=f"l = {depths[end]:g}")
    if not plain:
        colorbar(ax, lines, "depth l (layers)")


def _plane_states(source: Any) -> tuple[np.ndarray | None, np.ndarray | None, Tensor | None]:
    """(states, depths, a tensor of their dtype and device), of nothing where there are none."""
    if source is None:
        return None, None, None
    found, own = states_of(source)
    z = shaped("states", found, "points, paths, d", more=True)
    return z, depths_of(own, len(z), "points of states"), found if isinstance(found, Tensor) else None


def _plane(z: np.ndarray | None, origin: Any, directions: Any,
           like: Tensor | None) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """(origin (d,), orthonormal directions (2, d), a tensor of the shape, dtype and device of a state)."""
    if z is None and (origin is None or directions is None):
        raise ValueError("a plane needs states, or both origin and directions")
    centre = z.mean((0, 1)) if origin is None else shaped("origin", origin, "d", more=True)
    if z is not None and centre.shape != z.shape[2:]:
        raise ValueError(f"origin must have the shape of a state, {z.shape[2:]}, got {centre.shape}")
    if directions is None:
        plane = principal_directions(z.reshape(-1, centre.size))[1]
    else:
        plane = shaped("directions", directions, "2, d", more=True)
        if plane.shape != (2, *centre.shape):
            raise ValueError(f"directions must have the shape {(2, *centre.shape)}, got {plane.shape}")
        plane = _orthonormal(plane.reshape(2, -1))
    like = next((x for x in (like, origin) if isinstance(x, Tensor)), torch.zeros((), dtype=torch.float64))
    return centre.ravel(), plane, like.new_zeros(centre.shape)


def _orthonormal(plane: np.ndarray) -> np.ndarray:
    first, second = plane
    if np.linalg.matrix_rank(plane) < 2:
        raise ValueError("directions must not be parallel, nor 0")
    first = first / np.linalg.norm(first)
    second = second - (second @ first) * first
    return np.stack([first, second / np.linalg.norm(second)])


def _around(points: np.ndarray) -> Extent:
    low, high = points.min((0, 1)), points.max((0, 1))
    margin = 0.15 * np.maximum(high - low, 0.2 * (high - low).max() or 1.0)
    (left, bottom), (right, top) = low - margin, high + margin
    return float(left), float(right), float(bottom), float(top)


def _field_on_plane(f: Any, centre: np.ndarray, plane: np.ndarray, x: np.ndarray, y: np.ndarray, l: float,
                    like: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The two coordinates of f in the plane, each (y, x)."""
    across, up = np.meshgrid(x, y)
    places = centre + across.reshape(-1, 1) * plane[0] + up.reshape(-1, 1) * plane[1]
    z = torch.from_numpy(places).to(like).reshape(-1, *like.shape)
    depth = like.new_tensor(float(l))
    rows = []
    with torch.no_grad():
        for chunk in z.split(CHUNK):
            k = f(chunk, depth)
            if getattr(k, "shape", None) != chunk.shape:
                raise ValueError(f"f must return an increment shaped like its state, {tuple(chunk.shape)}, got "
                                 f"{tuple(getattr(k, 'shape', ())) or type(k).__name__}")
            k = read("f(z, l)", k).reshape(len(chunk), -1)
            if not np.isfinite(k).all():
                raise ValueError("f must be finite on the plane; choose a smaller extent")
            rows.append(k @ plane.T)
    found = np.concatenate(rows)
    return found[:, 0].reshape(across.shape), found[:, 1].reshape(across.shape)
