"""How training went."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import pairs
from odeformer.plots.style import axes, bands, grid, legend, next_looks, plain_ticks, quantiles, styled
from odeformer.tables import finite


@styled
def training_curves(curves: Any, ax: Axes | None = None, *, smoothing: float = 0.0, scale: str = "log",
                    label: str = "loss (nats)") -> Axes:
    """Losses or scores against the step of training.

    curves: {label: (steps, values)}, or one such pair; values (points,), or (points, runs) for a median over runs with
    the middle 80 % shaded. nan is left out. smoothing: in [0, 1), the weight of the past in an exponential mean
    (Kingma & Ba 2015, with their correction for the start); the values themselves stay visible, faded. scale: "log" or
    "linear". label: what the axis is called, with its unit.

    Raises ValueError: pairs that are none; a smoothing or a scale that is none; values that are not above 0 on a
    logarithmic axis.
    """
    if scale not in ("linear", "log"):
        raise ValueError(f"scale must be 'linear' or 'log', got {scale!r}")
    if finite("smoothing", smoothing, least=0.0) >= 1:
        raise ValueError(f"smoothing must be below 1, got {smoothing}")
    found = {}
    for name, (x, y) in pairs("curves", curves, ("steps", "values"), missing=True).items():
        here = "curves" if name is None else f"curves[{name!r}]"
        if scale == "log" and (y <= 0).any():
            raise ValueError(f"values of {here} must be above 0 for scale 'log'")
        found[name] = x, np.where(np.isfinite(y), y, np.nan).reshape(len(x), -1)
    ax = axes(ax)
    ax.set_yscale(scale)
    grid(ax)
    for (name, (x, y)), look in zip(found.items(), next_looks(ax), strict=False):
        if smoothing:
            ax.plot(x, quantiles(y, (0.5,))[0], color=look.color, linewidth=0.5, alpha=0.35)
            y = exponential_mean(y, smoothing)
        bands(ax, x, y, look, name)
    if scale == "log":
        plain_ticks(ax.yaxis, *ax.dataLim.intervaly)
    ax.set(xlabel="training step", ylabel=label)
    legend(ax)
    return ax


def exponential_mean(y: np.ndarray, weight: float) -> np.ndarray:
    """Σ w^(n-k) y_k / Σ w^(n-k) over the numbers up to each row n that are not nan."""
    out, total, mass = np.empty_like(y), np.zeros(y.shape[1:]), np.zeros(y.shape[1:])
    for i, row in enumerate(y):
        there = ~np.isnan(row)
        total = weight * total + np.where(there, row, 0)
        mass = weight * mass + there
        out[i] = np.where(mass > 0, total / np.where(mass > 0, mass, 1), np.nan)
    return out
