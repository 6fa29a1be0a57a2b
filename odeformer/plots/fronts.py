"""What is worth its cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from odeformer.plots.arrays import pairs, shaped
from odeformer.plots.style import QUIET, axes, grid, legend, next_looks, plain_ticks, styled


def pareto_front(cost: Any, score: Any, *, maximise: bool = True) -> np.ndarray:
    """Which points no other dominates: bool (points,).

    One point dominates another if it costs no more and scores no worse, and one of the two is strictly better. Equal
    points stand or fall together.

    >>> pareto_front([1, 2, 3, 3], [0.5, 0.4, 0.9, 0.8])
    array([ True, False,  True, False])

    Raises ValueError for arrays that are not finite or not equally long.
    """
    cost, score = shaped("cost", cost, "points"), shaped("score", score, "points")
    if len(cost) != len(score):
        raise ValueError(f"cost and score must be equally long, got {len(cost)} and {len(score)}")
    score = score if maximise else -score
    costs, group = np.unique(cost, return_inverse=True)
    best = np.full(len(costs), -np.inf)  # of each cost
    np.maximum.at(best, group, score)
    cheaper = np.concatenate([[-np.inf], np.maximum.accumulate(best)[:-1]])
    return (score == best[group]) & (score > cheaper[group])


@styled
def pareto(points: Any, ax: Axes | None = None, *, cost: str = "NFE", score: str = "accuracy",
           maximise: bool = True) -> Axes:
    """Scores against cost, the Pareto front of all points together as a step line; dominated points are faded.

    points: {label: (cost, score)}, or one such pair. The step line gives the best score that a cost allows. cost,
    score: what the axes are called, with units ("NFE", "time (s)", "parameters"; "accuracy", "perplexity"). maximise:
    whether a higher score is better. Costs that span a factor of 10 or more get a logarithmic axis.

    Raises ValueError: pairs that are none, not finite.
    """
    found = pairs("points", points, ("cost", "score"))
    for label, (_, y) in found.items():
        if y.ndim != 1:
            raise ValueError(f"score of points[{label!r}] must have the shape (points), got {y.shape}")
    x, y = (np.concatenate(parts) for parts in zip(*found.values(), strict=True))
    front = pareto_front(x, y, maximise=maximise)
    ax = axes(ax, 2.7)
    grid(ax)
    if x.min() > 0 and x.max() / x.min() >= 10:
        ax.set_xscale("log")
    start = 0
    for (label, (cost_here, score_here)), look in zip(found.items(), next_looks(ax), strict=False):
        on = front[start:start + len(cost_here)]
        start += len(cost_here)
        dots = {"linestyle": "none", "marker": look.marker, "color": look.color}
        ax.plot(cost_here[~on], score_here[~on], alpha=0.5, markerfacecolor="white", **dots)
        ax.plot(cost_here[on], score_here[on], markersize=5, label=label, zorder=3, **dots)
    order = np.argsort(x[front], kind="stable")
    ends = np.append(x[front][order], x.max()), np.append(y[front][order], y[front][order][-1])
    ax.plot(*ends, drawstyle="steps-post", color=QUIET, linewidth=1.0, zorder=1, label="Pareto front")
    if ax.get_xscale() == "log":
        plain_ticks(ax.xaxis, *ax.dataLim.intervalx)
    ax.set(xlabel=cost, ylabel=score)
    legend(ax)
    return ax
