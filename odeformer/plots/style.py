"""How figures look: made for print at the width of a column, told apart with any colour vision and without colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

# Okabe & Ito 2008: told apart with any colour vision; the line styles and markers tell them apart without colour
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", (0, (4, 1.5, 1, 1.5, 1, 1.5)), ":", (0, (7, 2)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FILL = 0.12  # opacity: overlapping regions stay visible
COLUMN = 3.3  # inches: the width of a column of a two-column page
QUIET = "0.6"  # axes through 0, grids, what is there for orientation
MISSING = "0.85"  # a place of a heat map without a number

STYLE = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "lines.linewidth": 1.3, "lines.markersize": 3.5, "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.width": 0.4, "ytick.minor.width": 0.4,
    "xtick.major.size": 3, "ytick.major.size": 3, "xtick.minor.size": 1.5, "ytick.minor.size": 1.5,
    "axes.axisbelow": True, "axes.formatter.use_mathtext": True, "axes.formatter.limits": (-3, 4),
}

styled = rc_context(STYLE)  # as a decorator: the style holds while the function draws, and nowhere else


class Look(NamedTuple):
    """Colour, line style and marker of one of several curves."""

    color: str
    line: Any
    marker: str


def looks(start: int = 0) -> Iterator[Look]:
    """Looks from the one numbered ``start`` on; after one round colours go with other lines and markers."""
    i = start
    while True:
        turn, place = divmod(i, len(COLORS))
        shifted = (place + turn) % len(LINES)
        yield Look(COLORS[place], LINES[shifted], MARKERS[shifted])
        i += 1


def next_looks(ax: Axes) -> Iterator[Look]:
    """Looks that axes have not used: what is drawn on them a second time looks different."""
    return looks(len(ax.get_legend_handles_labels()[1]))


def depth_colors() -> Colormap:
    """Dark to light as depth grows, in grey as in colour; without the end that is too light for white paper."""
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)), name="depth")


def heat_colors() -> Colormap:
    """For heat maps (Nuñez, Anderton & Renslow 2018): the same to all colour vision; grey where there is no number."""
    return colormaps["cividis"].with_extremes(bad=MISSING)


@styled
def figure(rows: int = 1, columns: int = 1, *, width: float = COLUMN, height: float | None = None,
           **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure in the style of this package and its axes, an array (rows, columns).

    ``width``, ``height``: inches; by default a column, and each panel 3/4 as high as wide. ``options``: those of
    matplotlib's ``Figure.subplots``. Made without pyplot, so that nothing stays open. For more text in the style, such
    as titles, work within ``matplotlib.rc_context(plots.STYLE)``.
    """
    height = 0.76 * rows * width / columns if height is None else height
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False, **options)


def axes(ax: Axes | None, height: float = 2.5, *, width: float = COLUMN, layout: str = "constrained") -> Axes:
    """The axes given, or those of a new figure. Raises TypeError for anything else."""
    if ax is None:
        return Figure(figsize=(width, height), layout=layout).add_subplot()
    if not isinstance(ax, Axes):
        raise TypeError(f"ax must be matplotlib Axes or None, got {type(ax).__name__}")
    return ax


def grid(ax: Axes) -> None:
    """Thin lines at the major ticks, beneath the data."""
    ax.grid(visible=True, color="0.9", linewidth=0.5)
    ax.set_axisbelow(True)


def legend(ax: Axes) -> Legend | None:
    """A legend below the axes, where it covers neither data nor title, in as many columns as fit; None if nothing is
    labelled. It replaces the one that is there."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        return None
    size = tick_size(ax)
    width = ax.get_position().width * ax.figure.bbox.width / ax.figure.dpi * 72
    entry = max(map(len, labels)) * 0.6 * size + 3.8 * size
    columns = min(len(labels), max(1, round(width / entry)))
    below = 17 + 1.25 * (size + ax.xaxis.label.get_fontsize())  # ticks, their labels, the axis label and what pads them
    return ax.legend(handles, labels, loc="upper left", ncols=columns, frameon=False, fontsize=size, borderaxespad=0,
                     handlelength=2.4, columnspacing=1.2, borderpad=0, handletextpad=0.5,
                     bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + ScaledTranslation(
                         0, -below / 72, ax.figure.dpi_scale_trans))


def tick_size(ax: Axes) -> float:
    """The size of the numbers at the ticks, in points."""
    return next((text.get_fontsize() for text in ax.xaxis.get_ticklabels()), STYLE["xtick.labelsize"])


def colorbar(ax: Axes, drawn: ScalarMappable, label: str, **options: Any) -> None:
    """What the colours mean, beside the axes."""
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02, aspect=25, **options)
    bar.set_label(label, fontsize=ax.yaxis.label.get_fontsize())
    bar.ax.tick_params(labelsize=tick_size(ax))
    bar.outline.set_linewidth(0.6)
    if isinstance(drawn.norm, LogNorm):
        plain_ticks(bar.ax.yaxis, drawn.norm.vmin, drawn.norm.vmax)


def plain_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks 1, 2, 5, 10, ... on a logarithmic axis over less than three decades, where powers of ten would be few."""
    fine = ((5, (1, 1.5, 2, 3, 5, 7)), (30, (1, 2, 5)), (1000, (1, 3)))  # up to which span, which multiples
    subs = next((subs for span, subs in fine if low > 0 and high < span * low), None)
    axis.set_major_locator(LogLocator(subs=subs or (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}") if subs else LogFormatterMathtext())
    if subs:
        axis.set_minor_formatter(NullFormatter())


def bands(ax: Axes, x: np.ndarray, y: np.ndarray, look: Look, label: str | None) -> None:
    """The median of y (points, n) over its second axis as a line, and the middle 80 % shaded; nan is left out.

    A row with nothing to show is a gap.
    """
    low, middle, high = quantiles(y, (0.1, 0.5, 0.9))
    ax.plot(x, middle, color=look.color, linestyle=look.line, marker=look.marker, markevery=max(1, len(x) // 8),
            label=label)
    if y.shape[1] > 1:
        ax.fill_between(x, low, high, color=look.color, alpha=FILL + 0.08, linewidth=0)


def quantiles(y: np.ndarray, which: tuple[float, ...]) -> np.ndarray:
    """(len(which), points): quantiles of each row's numbers that are not nan; nan for a row of none."""
    rows = [row[~np.isnan(row)] for row in y]
    return np.array([np.quantile(row, which) if row.size else np.full(len(which), np.nan) for row in rows]).T


