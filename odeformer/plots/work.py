"""Error and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import pairs
from odeformer.plots.style import axes, grid, legend, next_looks, plain_ticks, styled
from odeformer.tables import at_least


@styled
def error_against_nfe(curves: Any, ax: Axes | None = None, *, orders: Iterable[int] = (),
                      error: str = "error of the final state") -> Axes:
    """Error against NFE (evaluations of the whole field), both logarithmic: a method of order p falls by NFE^-p.

    curves: {label: (nfe, error)}, or one such pair; each of one length. An error of 0, an infinite or a missing one
    has no place on the axis and is left out. orders: grey lines of these slopes, from the upper left. error: what the
    axis is called; name the norm, and that it is relative if it is.

    Raises ValueError: pairs that are none, NFE that is not positive, a negative error, nothing left to draw.
    """
    ax = _log_axes(ax)
    drawn = _draw(ax, "curves", curves, ("nfe", "error"), swapped=False)
    _slopes(ax, drawn, orders)
    ax.set(xlabel="NFE", ylabel=error)
    legend(ax)
    return ax


@styled
def work_precision(curves: Any, ax: Axes | None = None, *, work: str = "NFE",
                   error: str = "error of the final state") -> Axes:
    """Work against precision, both logarithmic, finer to the right: what a method asks for an error (Hairer, Nørsett &
    Wanner 1993, II.10). The lowest curve is the cheapest.

    curves: {label: (work, error)}, or one such pair; see ``error_against_nfe``. work: what it is and its unit, such as
    "NFE" or "time (s)".

    Raises ValueError: pairs that are none, work that is not positive, a negative error, nothing left to draw.
    """
    ax = _log_axes(ax)
    _draw(ax, "curves", curves, ("work", "error"), swapped=True)
    if not ax.xaxis_inverted():
        ax.invert_xaxis()
    ax.set(xlabel=f"{error} (finer to the right)", ylabel=work)
    legend(ax)
    return ax


def _log_axes(ax: Axes | None) -> Axes:
    ax = axes(ax, 2.7)
    ax.set(xscale="log", yscale="log")
    grid(ax)
    return ax


def _draw(ax: Axes, name: str, curves: Any, parts: tuple[str, str], *, swapped: bool) -> list[np.ndarray]:
    """A line a curve; returns the points (n, 2) of each as (cost, error)."""
    found = []
    for (label, (cost, error)), look in zip(pairs(name, curves, parts, missing=True).items(), next_looks(ax),
                                            strict=False):
        here = name if label is None else f"{name}[{label!r}]"
        if error.ndim != 1:
            raise ValueError(f"{parts[1]} of {here} must have the shape (points), got {error.shape}")
        if (cost <= 0).any() or (error < 0).any():
            raise ValueError(f"{parts[0]} of {here} must be positive and {parts[1]} not negative")
        there = np.isfinite(error) & (error > 0)
        points = np.stack([cost, error], 1)[there]
        if not there.any():
            raise ValueError(f"{parts[1]} of {here} must hold a finite number above 0")
        found.append(points)
        x, y = points.T[::-1] if swapped else points.T
        ax.plot(x, y, color=look.color, linestyle=look.line, marker=look.marker, label=label)
    plain_ticks(ax.xaxis, *ax.dataLim.intervalx)
    plain_ticks(ax.yaxis, *ax.dataLim.intervaly)
    return found


def _slopes(ax: Axes, drawn: list[np.ndarray], orders: Iterable[int]) -> None:
    """A line a slope through the corner that has the smallest NFE and the largest error there, within the view."""
    points = np.concatenate(drawn)
    first, last = points[:, 0].min(), points[:, 0].max()
    top, bottom = points[:, 1].max(), points[:, 1].min()
    for order in orders:
        at_least("orders", order, 1)
        end = min(last, first * (top / bottom) ** (1 / order)) if top > bottom else last
        if end <= first:
            continue
        y = top * (np.array([first, end]) / first) ** -float(order)
        ax.plot([first, end], y, color="0.75", linewidth=0.7, zorder=0.9)
        ax.annotate(f"order {order}", (end, y[1]), color="0.45", fontsize=6, xytext=(0, 2), ha="right", va="bottom",
                    textcoords="offset points")
