"""Curves over depth: any number that a diagnostic gives there, gradient norms, spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import depths_of, labelled, shaped
from odeformer.plots.style import COLORS, QUIET, axes, bands, grid, legend, looks, next_looks, plain_ticks, styled
from odeformer.tables import look_up

PARTS = {
    "real": (np.real, "Re λ (1 / layer)", "largest Re λ"),
    "imaginary": (np.imag, "Im λ (1 / layer)", "largest Im λ"),
    "modulus": (np.abs, "|λ| (1 / layer)", "spectral radius"),
}


@styled
def over_depth(values: Any, ax: Axes | None = None, *, depths: Any = None, label: str = "value",
               scale: str = "linear") -> Axes:
    """Numbers against depth: the median over all further axes (batch, tokens, heads, runs ...) as a line, their middle
    80 % shaded.

    values: {label: (points, ...)}, or one such array; nan is left out (padding). depths: (points,), the same for all;
    0, 1, ... if None. label: what the axis is called, with its unit. scale: "linear" or "log".

    Raises ValueError: shapes that do not fit; another scale; numbers that are not above 0 on a logarithmic axis.
    """
    if scale not in ("linear", "log"):
        raise ValueError(f"scale must be 'linear' or 'log', got {scale!r}")
    found = {}
    for name, entry in labelled(values).items():
        here = "values" if name is None else f"values[{name!r}]"
        y = shaped(here, entry, "points", more=True, missing=True)
        if scale == "log" and (y <= 0).any():
            raise ValueError(f"{here} must be above 0 for scale 'log'")
        found[name] = depths_of(depths, len(y), f"points of {here}"), y.reshape(len(y), -1)
    ax = axes(ax)
    ax.set_yscale(scale)
    grid(ax)
    for (name, (l, y)), look in zip(found.items(), next_looks(ax), strict=False):
        bands(ax, l, y, look, name)
    if scale == "log":
        plain_ticks(ax.yaxis, *ax.dataLim.intervaly)
    ax.set(xlabel="depth l (layers)", ylabel=label)
    legend(ax)
    return ax


@styled
def gradient_norms(norms: Any, ax: Axes | None = None, *, depths: Any = None,
                   label: str = "gradient norm ‖dE/dz(l)‖") -> Axes:
    """Norm of the gradient of a loss E with respect to the state at each depth, logarithmic (eqs. 15-16): level where
    depth passes gradients through, a straight slope where they vanish or explode.

    norms: {label: (points, ...)}, or one such array, above 0; see ``over_depth``.
    """
    return over_depth(norms, ax, depths=depths, label=label, scale="log")


@styled
def spectra(eigenvalues: Any, ax: Axes | None = None, *, depths: Any = None, part: str = "real",
            limits: Mapping[str, float] | None = None) -> Axes:
    """Eigenvalues of the field's Jacobian against depth: a dot each, and a line along the largest.

    eigenvalues: complex (layers, ...), nan where a layer has fewer. depths: (layers,); 0, 1, ... if None. part:
    "real" (the line is the spectral abscissa), "imaginary" or "modulus" (the spectral radius). limits: {label: value},
    dashed lines across, such as the ends of stability intervals over h.

    Raises ValueError: shapes that do not fit; another part; limits that are not finite.
    """
    take, name, line = look_up(PARTS, part, "part") if isinstance(part, str) else _no_part(part)
    λ = shaped("eigenvalues", eigenvalues, "layers", dtype=complex, more=True, missing=True).reshape(
        len(eigenvalues), -1)
    l = depths_of(depths, len(λ), "layers of eigenvalues")
    lines = {label: float(shaped(f"limits[{label!r}]", [value], "1")[0]) for label, value in (limits or {}).items()}
    values = take(np.where(np.isnan(λ), np.nan, λ))
    ax = axes(ax)
    grid(ax)
    there = ~np.isnan(λ)
    ax.scatter(np.broadcast_to(l[:, None], λ.shape)[there], values[there], s=45, marker="_", color=COLORS[5],
               alpha=0.7, linewidths=0.7, label="eigenvalues")
    largest = [row[ok].max() if ok.any() else np.nan for row, ok in zip(values, there, strict=True)]
    ax.plot(l, largest, color=COLORS[0], marker="o", label=line)
    ax.axhline(0, color=QUIET, linewidth=0.6, zorder=0.5)
    for (label, value), look in zip(lines.items(), looks(1), strict=False):
        ax.axhline(value, color=look.color, linestyle=look.line, linewidth=1.0, label=label)
    ax.set(xlabel="depth l (layers)", ylabel=name)
    legend(ax)
    return ax


def _no_part(part: Any) -> Any:
    raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
