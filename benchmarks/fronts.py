"""Pareto fronts of a study: its score against each of its costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

COSTS = {"nfe": "NFE of a forward pass", "seconds": "CPU time of an update (s)", "parameters": "parameters"}


@dataclass(frozen=True, kw_only=True)
class Fronts:
    """``score``: what a row measured, ``label`` its name and unit, ``higher``: whether more is better; ``series``: the
    factor that has a colour; ``panel``: the factor of which each value has a figure of its own."""

    score: str
    label: str
    higher: bool
    series: str = "solver"
    panel: str | None = None

    def figures(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str, Figure]]:
        """(what it shows, the figure): means over seeds, a point a configuration."""
        from odeformer.plots import pareto

        rows = [row for row in rows if row.get(self.score) is not None]
        for value in dict.fromkeys(self._factor(row, self.panel) for row in rows):
            mine = [row for row in rows if self._factor(row, self.panel) == value]
            figure = Figure(figsize=(11, 3.6), layout="constrained")
            for i, (axes, (cost, name)) in enumerate(zip(figure.subplots(1, len(COSTS)), COSTS.items(), strict=True)):
                pareto(self._points(mine, cost), axes, cost=name, score=self.label, maximise=self.higher)
                if i and axes.get_legend():
                    axes.get_legend().remove()
            yield f"{self.label} against cost" + (f", {value}" if value else ""), figure

    def _factor(self, row: dict[str, Any], name: str | None) -> Any:
        return "" if name is None else row["case"].get(name, row.get(name))

    def _points(self, rows: list[dict[str, Any]], cost: str) -> dict[str, tuple[list[float], list[float]]]:
        """{series: (costs, scores)}; a case with many rows, one for each solver and number of steps, has as many
        configurations."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            case = {name: value for name, value in row["case"].items() if name != "seed"}
            groups.setdefault((str(self._factor(row, self.series)), repr((case, row.get("steps")))), []).append(row)
        points: dict[str, tuple[list[float], list[float]]] = {}
        for (series, _), group in groups.items():
            x, y = points.setdefault(series, ([], []))
            x.append(mean(row[cost] for row in group))
            y.append(mean(row[self.score] for row in group))
        return points
