"""Order stars: where a method grows faster than the exact solution."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.regions import Extent, check_resolution, plane_axes, plane_grid, read_extent
from odeformer.plots.style import COLORS, legend, styled
from solvers.base import Solver
from solvers.registry import get_solver
from solvers.stability import stability_function
from solvers.tableau import Tableau

EXTENT = (-5.0, 5.0, -5.0, 5.0)


@styled
def order_star(solver: str | Solver | Tableau, ax: Axes | None = None, *, extent: Extent = EXTENT,
               resolution: int = 401) -> Axes:
    """The order star {z = h λ : |R(z)| > |exp(z)|} of a method with a tableau: filled, with zeros and poles of R.

    At 0 a method of order p has p + 1 sectors of the star and p + 1 of its complement, each as wide as the others; a
    method is A-stable if and only if the star does not meet the imaginary axis and all poles lie to its right (Wanner,
    Hairer & Nørsett 1978; Hairer & Wanner 1996, IV.4).

    Raises ValueError: a method without a tableau; an extent or a resolution that is none.
    """
    r = stability_function(solver)
    check_resolution(resolution)
    extent = read_extent(extent)
    x, y = plane_grid(extent, resolution)
    excess = log_excess(r, x + 1j * y[:, None])
    ax = plane_axes(ax, (extent[1] - extent[0]) / (extent[3] - extent[2]))
    ax.contourf(x, y, excess, levels=[0.0, np.inf], colors=[COLORS[0]], alpha=0.25)
    ax.contour(x, y, excess, levels=[0.0], colors=[COLORS[0]], linewidths=0.9)
    solver = solver if isinstance(solver, Tableau) else get_solver(solver)
    zeros, poles = _zeros_and_poles(getattr(solver, "tableau", solver))
    _mark(ax, zeros, "o", "zeros of R", extent)
    _mark(ax, poles, "x", "poles of R", extent)
    ax.plot([], [], linestyle="none", marker="s", markersize=6, color=COLORS[0], alpha=0.4, markeredgewidth=0,
            label=f"{getattr(solver, 'name', 'tableau')}: |R| > |exp|")
    ax.set(xlim=extent[:2], ylim=extent[2:], xlabel="Re(h λ)", ylabel="Im(h λ)", aspect="equal")
    legend(ax)
    return ax


def log_excess(r: Any, z: np.ndarray) -> np.ndarray:
    """log |R(z)| - Re z, kept within ±30: 0 is the boundary of the star."""
    with np.errstate(divide="ignore"):
        return np.clip(np.nan_to_num(np.log(np.abs(r(z))) - z.real, nan=30.0, posinf=30.0, neginf=-30.0), -30, 30)


def _zeros_and_poles(tableau: Tableau) -> tuple[np.ndarray, np.ndarray]:
    """R(z) = det(I - z (A - 1 b)) / det(I - z A) (Hairer & Wanner 1996, IV.3.2); what cancels is neither."""
    n = tableau.n_stages
    a = np.array([[*row, *[0.0] * (n - len(row))] for row in tableau.a])
    zeros, poles = (_inverse_eigenvalues(matrix) for matrix in (a - np.array(tableau.b), a))
    kept = []
    for pole in poles:
        near = np.abs(zeros - pole) < 1e-6 * abs(pole)
        if near.any():
            zeros = np.delete(zeros, np.argmax(near))
        else:
            kept.append(pole)
    return zeros, np.array(kept, dtype=complex)


def _inverse_eigenvalues(matrix: np.ndarray) -> np.ndarray:
    """1 / λ for the eigenvalues that are not 0, to rounding: none where the matrix is nilpotent."""
    λ = np.linalg.eigvals(matrix).astype(complex)
    return 1 / λ[np.abs(λ) > 1e-3 * max(1.0, np.abs(matrix).max())]


def _mark(ax: Axes, points: np.ndarray, marker: str, label: str, extent: Extent) -> None:
    left, right, bottom, top = extent
    seen = points[(points.real > left) & (points.real < right) & (points.imag > bottom) & (points.imag < top)]
    if seen.size:
        ax.plot(seen.real, seen.imag, linestyle="none", marker=marker, markersize=4.5, color="black",
                markerfacecolor="white", markeredgewidth=1.0, label=label)
