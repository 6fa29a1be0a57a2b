"""Where an integrator steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import labelled, shaped
from odeformer.plots.style import axes, grid, legend, next_looks, plain_ticks, styled


@styled
def step_sizes(solutions: Any, ax: Axes | None = None, *, start: float = 0.0, rejected: Any = None) -> Axes:
    """Step sizes over depth: a stair as wide as each step, |h| on a logarithmic axis, a dot where each begins.

    solutions: {label: Solution}, or one; accepted steps h (steps,) do as well, and a list of those for each row (as a
    per-sample solve leaves them) gives a stair a row. start: the depth at which steps begin that come without a
    Solution. rejected: {label: (l, h)} or one pair of arrays, trial steps in vain, drawn as crosses; a Solution has
    their number only, which stands in its label.

    Raises ValueError: steps that are none or 0, or turn back; a label of ``rejected`` that is not among the solutions.
    """
    entries = labelled(solutions)
    trials = dict(rejected) if isinstance(rejected, Mapping) else {} if rejected is None else {None: rejected}
    for label in trials:
        if label not in entries:
            raise ValueError(f"rejected must be for some of {', '.join(map(str, entries))}; got {label!r}")
    rows = {label: _stairs(label, entry, start) for label, entry in entries.items()}
    ax = axes(ax)
    ax.set_yscale("log")
    grid(ax)
    for (label, stairs), look in zip(rows.items(), next_looks(ax), strict=False):
        many = len(stairs) > 1
        for i, (edges, h) in enumerate(stairs):
            ax.plot(edges, np.append(h, h[-1]), drawstyle="steps-post", color=look.color, linestyle=look.line,
                    linewidth=0.6 if many else 1.1, alpha=0.6 if many else 1.0,
                    label=_name(label, entries[label]) if i == 0 else None)
            ax.plot(edges[:-1], h, linestyle="none", marker=look.marker, color=look.color,
                    markersize=2.5 if len(h) <= 60 else 1.2)
        if label in trials:
            l, h = (shaped("rejected", x, "steps") for x in trials[label])
            ax.plot(l, np.abs(h), linestyle="none", marker="x", color=look.color, markersize=5, label="rejected")
    plain_ticks(ax.yaxis, *ax.dataLim.intervaly)
    ax.set(xlabel="depth l (layers)", ylabel="step size |h| (layers)")
    legend(ax)
    return ax


def _stairs(label: str | None, entry: Any, start: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """(edges, |h|) of each row."""
    name = "steps" if label is None else f"steps of {label!r}"
    steps = entry.steps if hasattr(entry, "steps") else entry
    nested = isinstance(steps, list | tuple) and len(steps) > 0 and isinstance(steps[0], list | tuple)
    rows = []
    for row in steps if nested else [steps]:
        h = shaped(name, row, "steps")
        if not ((h > 0).all() or (h < 0).all()):
            raise ValueError(f"{name} must be all positive or all negative")
        begin = float(entry.l) - h.sum() if hasattr(entry, "l") and hasattr(entry, "steps") else start
        rows.append((begin + np.concatenate([[0.0], np.cumsum(h)]), np.abs(h)))
    return rows


def _name(label: str | None, entry: Any) -> str | None:
    count = getattr(entry, "n_rejected", 0)
    if not count:
        return label
    return f"{count} rejected" if label is None else f"{label} ({count} rejected)"
