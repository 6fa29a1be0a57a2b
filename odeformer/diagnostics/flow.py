"""Stretches of a trajectory integrated anew: by the flow itself, or as a solver steps along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from odeformer.depth import taking_turns
from odeformer.diagnostics.trajectory import Trajectory
from solvers import get_solver, solve


def fixed_solver(solver: Any, f: Any) -> Any:
    """The solver as a model uses it on f, parts taking turns where the coupling says so. Raises ValueError for one that
    chooses its steps."""
    solver = get_solver(solver)
    if solver.is_adaptive or getattr(solver, "to_equilibrium", False):
        raise ValueError(f"solver {solver.name!r} chooses its own steps, and a fixed-step solver is needed here, such "
                         "as 'rk4'")
    return taking_turns(solver, f)


def stretch(run: Trajectory, grid: Sequence[float], solver: Any, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """z at the first depth of the grid -> z at the last, by a solver's steps between the depths of the grid."""
    grid = list(grid)
    return lambda z: solve(run.f, z, grid=grid, span=(grid[0], grid[-1]), solver=solver, mask=mask).z


def cuts(f: Any, start: float, stop: float) -> list[float]:
    """start, the ends of pieces of f between, and stop."""
    ends = [a for a, _, _ in getattr(f, "pieces", None) or ()]
    return [start, *(l for l in ends if start < l < stop), stop]


def refined(points: Sequence[float], n: int) -> list[float]:
    """n equal steps between neighbouring points."""
    fine = [a + (b - a) * i / n for a, b in pairwise(points) for i in range(n)]
    return [*fine, points[-1]]


def layer_ends(run: Trajectory) -> list[float]:
    """Ends of layers, both ends of the depth among them: of the pieces of f, else whole l."""
    start, stop = run.depths[0], run.depths[-1]
    if getattr(run.f, "pieces", None):
        return cuts(run.f, start, stop)
    return [start, *(float(l) for l in range(math.floor(start) + 1, math.ceil(stop))), stop]
