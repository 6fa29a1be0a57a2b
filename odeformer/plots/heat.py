"""Heat maps: attention, and local errors by token and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from odeformer.plots.arrays import depths_of, shaped
from odeformer.plots.style import axes, colorbar, heat_colors, styled
from odeformer.tables import at_least

RASTER = 4000  # cells from which on a heat map is an image within a vector file


@styled
def attention_entropy(entropy: Any, ax: Axes | None = None, *, n_keys: int | None = None) -> Axes:
    """Entropy of attention by layer and head: low where a head looks at few tokens, log(n_keys) where it looks at all
    alike.

    entropy: (layers, heads) in nats, means over queries; nan where there is none. n_keys: keys that a query sees, by
    which the colours end at log(n_keys); at the largest entropy if None.

    Raises ValueError: another shape, a negative entropy, one above log(n_keys).
    """
    values = shaped("entropy", entropy, "layers, heads", missing=True)
    top = np.nanmax(values, initial=0.0)
    if n_keys is not None:
        at_least("n_keys", n_keys, 2)
        if top > np.log(n_keys) * (1 + 1e-5):
            raise ValueError(f"entropy must be at most log(n_keys) = {np.log(n_keys):.4g}, got {top:.4g}")
        top = np.log(n_keys)
    if (values < -1e-6).any():
        raise ValueError("entropy must not be negative")
    ax = axes(ax, 2.3)
    _heat(ax, values.T, np.arange(len(values) + 1) - 0.5, Normalize(0, top or 1.0), "entropy (nats)")
    ax.set(xlabel="layer", ylabel="head")
    return ax


@styled
def attention_map(weights: Any, ax: Axes | None = None, *, tokens: Sequence[str] | None = None) -> Axes:
    """Attention of one head: which keys (across) each query (down, the first on top) looks at.

    weights: (queries, keys), rows that sum to 1; nan where nothing may be seen, drawn grey. tokens: names of keys,
    and of queries where they are as many, for the ticks.

    Raises ValueError: another shape, negative weights, a number of names that is not that of the keys.
    """
    values = shaped("weights", weights, "queries, keys", missing=True)
    if (values < 0).any():
        raise ValueError("weights must not be negative")
    if tokens is not None and len(tokens) != values.shape[1]:
        raise ValueError(f"tokens must be {values.shape[1]} names, one for each key; got {len(tokens)}")
    ax = axes(ax, 2.8, layout="compressed")
    top = np.nanmax(values, initial=0.0)
    _heat(ax, values, np.arange(values.shape[1] + 1) - 0.5, Normalize(0, top or 1.0), "attention weight")
    ax.set(xlabel="key", ylabel="query", aspect="equal", ylim=(len(values) - 0.5, -0.5))
    if tokens is not None:
        ax.set_xticks(range(len(tokens)), tokens, rotation=90)
        if len(values) == len(tokens):
            ax.set_yticks(range(len(tokens)), tokens)
    return ax


@styled
def local_errors(errors: Any, ax: Axes | None = None, *, edges: Any = None,
                 label: str = "local error") -> Axes:
    """Local error of each token in each step: logarithmic colours, so that the steps and tokens that cost accuracy
    stand out.

    errors: (steps, tokens), not negative; nan (padding) and exact 0 are drawn grey. edges: (steps + 1,) the depths
    between which the steps run; 0, 1, ... if None: one step a layer. label: the colour bar's, with the norm.

    Raises ValueError: another shape, a negative error, edges that do not fit, nothing above 0.
    """
    values = shaped("errors", errors, "steps, tokens", missing=True)
    if (values < 0).any():
        raise ValueError("errors must not be negative")
    if not (values > 0).any():
        raise ValueError("errors must hold a number above 0: logarithmic colours have no place for 0")
    edges = depths_of(edges, len(values) + 1, "ends of steps")
    values = np.where(values > 0, values, np.nan)
    low, high = np.nanmin(values), np.nanmax(values)
    ax = axes(ax, 2.5)
    _heat(ax, values.T, edges, LogNorm(low, high if high > low else low * 10), label)
    ax.set(xlabel="depth l (layers)", ylabel="token")
    ax.set_xlim(min(edges), max(edges))
    return ax


def _heat(ax: Axes, values: np.ndarray, edges: np.ndarray, norm: Normalize, label: str) -> None:
    """Cells (rows, columns): rows around whole numbers, columns between edges."""
    rows = np.arange(len(values) + 1) - 0.5
    cells = ax.pcolormesh(edges, rows, np.ma.masked_invalid(values), norm=norm, cmap=heat_colors(),
                          rasterized=values.size >= RASTER)
    ax.set_facecolor(heat_colors().get_bad())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    colorbar(ax, cells, label)
