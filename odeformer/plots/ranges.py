"""Numerical ranges: how far a field of a non-normal Jacobian can push, beyond what eigenvalues tell."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from odeformer.plots.arrays import depths_of, shaped
from odeformer.plots.regions import plane_axes
from odeformer.plots.style import colorbar, depth_colors, legend, styled


@styled
def numerical_ranges(points: Any, ax: Axes | None = None, *, eigenvalues: Any = None, depths: Any = None) -> Axes:
    """Boundaries of numerical ranges W(J) = {x* J x : |x| = 1}, one for each layer and coloured by depth, with the
    eigenvalues, which lie inside. The rightmost point is the largest rate at which a difference can grow at first; the
    rightmost eigenvalue, that in the long run (Trefethen & Embree 2005, ch. 17).

    points: complex (layers, angles), each row the boundary in order. eigenvalues: complex (layers, ...), nan where a
    layer has fewer. depths: (layers,); 0, 1, ... if None.

    Raises ValueError: shapes that do not fit, fewer than three points to a boundary.
    """
    w = shaped("points", points, "layers, angles", dtype=complex)
    if w.shape[1] < 3:
        raise ValueError(f"points must have at least three angles to a layer, got {w.shape[1]}")
    l = depths_of(depths, len(w), "layers of points")
    λ = None if eigenvalues is None else _eigenvalues(eigenvalues, len(w))
    closed = np.concatenate([w, w[:, :1]], axis=1)
    ax = plane_axes(ax, 1.0, room=0.55)
    lines = LineCollection(np.stack([closed.real, closed.imag], axis=2), cmap=depth_colors(), linewidths=1.2, zorder=4)
    lines.set_array(l)
    ax.add_collection(lines)
    colorbar(ax, lines, "depth l (layers)")
    if λ is not None:
        there = ~np.isnan(λ)
        at = np.broadcast_to(l[:, None], λ.shape)[there]
        ax.scatter(λ[there].real, λ[there].imag, c=at, cmap=depth_colors(), norm=lines.norm, s=8, linewidths=0.2,
                   edgecolors="white", zorder=3, label="eigenvalues λ")
    ax.autoscale_view()
    ax.set(xlabel="Re (1 / layer)", ylabel="Im (1 / layer)", aspect="equal")
    legend(ax)
    return ax


def _eigenvalues(eigenvalues: Any, n: int) -> np.ndarray:
    """(layers, n). Raises ValueError for another number of layers."""
    λ = shaped("eigenvalues", eigenvalues, "layers", dtype=complex, more=True, missing=True)
    if len(λ) != n:
        raise ValueError(f"eigenvalues must be those of {n} layers, as many as points has; got {len(λ)}")
    return λ.reshape(n, -1)
