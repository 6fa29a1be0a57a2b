"""A fixed grid from an adaptive run: steps where the error of equal steps would be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.base import Solver, State, VectorField, Work, tensors
from solvers.checks import check_state
from solvers.grid import make_pieces, read_span
from solvers.registry import get_solver
from solvers.solve import solve
from solvers.stepsize import error_order

SHARE = 0.1  # of the mean density, which is added everywhere: no step is longer than 1 + 1 / SHARE mean ones


class _Cell(NamedTuple):
    """An accepted step: where it ends, and how many steps of equal error would fill it (up to a factor of all)."""

    stop: float
    weight: float


def calibrate_grid(f: VectorField, z0: State, *, span: tuple, n_steps: int | None = None, rtol: float | None = None,
                   atol: float | None = None, solver: str | Solver = "dopri5", mask: Tensor | None = None,
                   breakpoints: Sequence[float] | None = None, max_nfe: int | None = None) -> list[float]:
    """Depth points for ``solve(..., grid=grid)`` with a fixed-step method, from an adaptive run on sample states.

    With ``n_steps``: n_steps + 1 points that give each step the same error. A step of h at l has the error e(l) h^k,
    where k goes with the adaptive pair's estimate (5 for dopri5, which suits methods of order 4): so the density of
    points is e^(1/k), read from the run's accepted steps, plus a tenth of its mean. Without: the points of the run.
    Every depth where f jumps is among them; an end of ``span`` is hit exactly, and depth may run backwards.
    Equal local errors pay where errors last (oscillations, orbits, a burst of fast rotation: 40 to 600 times closer
    than equal steps with rk4). Where f contracts until the end, errors made early are forgotten, and equal steps may
    well be better at the end of the span.

    rtol, atol: of the run; by default those of solve() for its points, and 1e-6 and 1e-9 for n_steps (coarser where
    f's arithmetic is). solver: an adaptive one. mask, breakpoints, max_nfe: as in solve(). The grid must not be taken
    from the sequences that it is then used on where later tokens must not change earlier ones.

    Raises ValueError for n_steps below the number of pieces of f, or a solver that is not adaptive; what solve() does.

    >>> calibrate_grid(lambda z, l: -z, torch.ones(1), span=(0.0, 1.0), n_steps=2)[::2]
    [0.0, 1.0]
    """
    check_steps(n_steps)
    fine = n_steps is not None and rtol is None and atol is None
    profile = ErrorProfile.of(f, z0, span=span, rtol=rtol, atol=atol, fine=fine, solver=solver, mask=mask,
                              breakpoints=breakpoints, max_nfe=max_nfe)
    return profile.points if n_steps is None else profile.grid(n_steps)


def check_steps(n_steps: Any) -> None:
    """Raises ValueError unless n_steps is None or an int of at least 1."""
    if n_steps is not None and (isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1):
        raise ValueError(f"n_steps must be an int of at least 1, got {n_steps!r}")


@dataclass(frozen=True)
class ErrorProfile:
    """Where an adaptive run found errors to arise: ``cells``, its accepted steps in each piece of f."""

    start: float
    starts: tuple[float, ...]
    cells: tuple[list[_Cell], ...]

    @classmethod
    def of(cls, f: VectorField, z0: State, *, span: tuple, rtol: float | None, atol: float | None, fine: bool,
           solver: str | Solver, mask: Tensor | None, breakpoints: Sequence[float] | None,
           max_nfe: int | None) -> ErrorProfile:
        """From a run; ``fine``: with tolerances that resolve the errors, in place of those of solve()."""
        solver = get_solver(solver)
        if not solver.is_adaptive or solver.embedded_order is None:
            raise ValueError(f"solver must be adaptive and estimate its error; {solver.name!r} does not. Known: "
                             "dopri5, bosh3, ..., and get_solver(name, adaptive=True)")
        check_state(z0)
        if fine:
            rtol, atol = _fine(z0)
        ends = read_span(span)
        with torch.no_grad():
            pieces = [(piece.l0, piece.l1) for piece in make_pieces(f, ends, ends, breakpoints, Work(), None)]
            run = solve(f, z0, span=ends, solver=solver, rtol=rtol, atol=atol, mask=mask, breakpoints=breakpoints,
                        max_nfe=max_nfe)
        if any(isinstance(h, list) for h in run.steps):
            raise ValueError("solver must take one step for all rows; a per-sample solver gives a grid for each row")
        return cls(ends[0], tuple(l for l, _ in pieces),
                   tuple(_cells(run.steps, run.errors, pieces, error_order(solver.tableau))))

    @property
    def points(self) -> list[float]:
        """The steps of the run."""
        return [self.start, *(cell.stop for row in self.cells for cell in row)]

    def grid(self, n_steps: int) -> list[float]:
        """n_steps + 1 points with equal errors between them."""
        check_steps(n_steps)
        if n_steps < len(self.cells):
            raise ValueError(f"n_steps must be at least the number of pieces of f ({len(self.cells)}), got {n_steps}")
        counts = _share_out(n_steps, [sum(cell.weight for cell in row) for row in self.cells])
        grid = [self.start]
        for start, row, n in zip(self.starts, self.cells, counts, strict=True):
            grid += _invert(start, row, n)
        return grid


def _fine(z0: State) -> tuple[float, float]:
    """Tolerances that resolve where the error is."""
    kinds, device = [x.dtype for x in tensors(z0)], tensors(z0)[0].device.type
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    rtol = max(1e-6, *(20 * torch.finfo(kind).eps for kind in kinds))
    return rtol, 1e-3 * rtol


def _cells(steps: Sequence[float], errors: Sequence[float], pieces: Sequence[tuple[float, float]],
           power: int) -> list[list[_Cell]]:
    """The accepted steps of each piece. Steps add up to the ends of pieces but for rounding."""
    length = sum(map(abs, steps))
    mean = sum(error ** (1 / power) for error in errors) / length
    rows: list[list[_Cell]] = [[] for _ in pieces]
    i, l = 0, pieces[0][0]
    for h, error in zip(steps, errors, strict=True):
        l += h
        ends = abs(l - pieces[i][1]) <= 1e-9 * length
        if ends:
            l = pieces[i][1]
        rows[i].append(_Cell(l, error ** (1 / power) + abs(h) * (SHARE * mean if mean else 1.0)))
        i += ends and i < len(pieces) - 1
    return rows


def _share_out(n: int, weights: Sequence[float]) -> list[int]:
    """n as whole numbers of at least 1, in proportion to weights (largest quotients first; Webster 1832)."""
    counts = [1] * len(weights)
    for _ in range(n - len(weights)):
        i = max(range(len(weights)), key=lambda i: weights[i] / (2 * counts[i] + 1))
        counts[i] += 1
    return counts


def _invert(start: float, cells: Sequence[_Cell], n: int) -> list[float]:
    """n points after ``start``, the last at the end of the last cell, with equal weight between neighbours."""
    total = math.fsum(cell.weight for cell in cells)
    points, passed, left, k = [], 0.0, start, 1
    for cell in cells:
        while k < n and total * k / n <= passed + cell.weight:
            points.append(left + (cell.stop - left) * (total * k / n - passed) / cell.weight)
            k += 1
        passed, left = passed + cell.weight, cell.stop
    return [*points, cells[-1].stop]
