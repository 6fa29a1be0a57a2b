"""Errors of steps: of each by an embedded pair, and of whole solves against a fine reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.flow import fixed_solver, layer_ends, refined
from odeformer.diagnostics.trajectory import Trajectory, bar
from odeformer.tables import at_least
from solvers import get_solver, solve


def local_errors(source: Any, solver: Any = "dopri5", *, at: str | Sequence[float] = "steps",
                 part: int | None = None, progress: bool = False) -> Tensor:
    """The embedded estimate of the error of one step, relative, at each site and token: h |Σ (b_i - b̂_i) k_i| / |z|.

    (sites, batch, tokens), no unit, nan at padding; norms over d_model. ``solver``: one with an embedded pair (dopri5,
    bosh3, ...); k_i its stages over the step h that the trajectory takes from that state, cut at the end of the layer.
    It says where depth is hard to integrate (Hairer, Nørsett & Wanner 1993, II.4). Raises ValueError for a solver
    without a pair.
    """
    run = Trajectory.of(source)
    solver = get_solver(solver)
    tableau = getattr(solver, "tableau", None)
    if getattr(tableau, "b_hat", None) is None or not tableau.is_explicit:
        raise ValueError(f"solver must be explicit with an embedded pair, such as 'dopri5' or 'bosh3'; "
                         f"{solver.name!r} is not")
    ends, rows = layer_ends(run), []
    for site in bar(run.sites(at, part=part), progress, "local errors"):
        l = float(site.l)
        h = min(site.h, next(end for end in ends if end > l) - l)
        ks: list[Tensor] = []
        with torch.no_grad():
            for row, c in zip(tableau.a, tableau.c, strict=True):
                z = sum((h * a * k for a, k in zip(row, ks, strict=False) if a), site.z)
                ks.append(site.f(z, run.depth(l + c * h)))
        off = sum((b - b_hat) * k for b, b_hat, k in zip(tableau.b, tableau.b_hat, ks, strict=True))
        rows.append(run.real(abs(h) * off.norm(dim=-1) / site.z.norm(dim=-1)))
    return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class GlobalErrors:
    """``errors`` (levels, batch): |z - z_ref| / |z_ref| of final states over real tokens, for ``steps_per_layer``
    (levels,) at ``nfe`` (levels,) evaluations; ``orders`` (levels - 1, batch): log(e_i / e_{i+1}) over the log of the
    ratio of steps, the observed order of convergence."""

    solver: str
    steps_per_layer: tuple[int, ...]
    nfe: tuple[float, ...]
    errors: Tensor
    orders: Tensor


def global_errors(source: Any, solver: Any, steps_per_layer: Sequence[int] = (1, 2, 4, 8), *,
                  reference: str | int = "dopri8", progress: bool = False) -> GlobalErrors:
    """The error of a fixed-step solver at the end of depth, for ever more equal steps in each layer, weights held.

    All from the trajectory's first state. ``reference``: an adaptive solver, run at tolerances near rounding, or a
    number of steps a layer of the solver itself. Where the coupling makes parts take turns (lie, strang), so they do
    here, and the order is that of the whole. Orders near rounding (in float32, about 1e-6) mean nothing. Raises
    ValueError for a solver that chooses its steps.
    """
    levels = list(steps_per_layer)
    for k in levels:
        at_least("steps_per_layer", k, 1)
    if levels != sorted(set(levels)) or not levels:
        raise ValueError(f"steps_per_layer must increase, got {levels}")
    run = Trajectory.of(source)
    method, ends = fixed_solver(solver, run.f), layer_ends(run)
    kinks = [l for l in getattr(run.f, "kinks", ()) if ends[0] < l < ends[-1]] or None
    with torch.no_grad():
        exact = _reference(run, method, ends, kinks, reference)
        solutions = [solve(run.f, run.states[0], grid=refined(ends, k), solver=method, mask=run.mask)
                     for k in bar(levels, progress, "global errors")]
    size = _row_norm(run, exact)
    errors = torch.stack([_row_norm(run, solution.z - exact) / size for solution in solutions])
    ratios = torch.tensor([math.log(b / a) for a, b in pairwise(levels)], dtype=torch.float64)
    orders = (errors[:-1] / errors[1:]).log() / ratios.view(-1, 1).to(errors.device)
    return GlobalErrors(get_solver(solver).name, tuple(levels), tuple(solution.nfe for solution in solutions), errors,
                        orders)


def _reference(run: Trajectory, method: Any, ends: list[float], kinks: list[float] | None, reference: Any) -> Tensor:
    if not isinstance(reference, str):
        at_least("reference", reference, 2)
        return solve(run.f, run.states[0], grid=refined(ends, reference), solver=method, mask=run.mask).z
    tolerance = max(1e-10, 20 * torch.finfo(run.states.dtype).eps)
    return solve(run.f, run.states[0], span=(ends[0], ends[-1]), solver=reference, rtol=tolerance, atol=tolerance,
                 mask=run.mask, breakpoints=kinks).z


def _row_norm(run: Trajectory, z: Tensor) -> Tensor:
    """|z| of each row over its real tokens, float64 (batch,)."""
    return run.real(z, 0.0).double().flatten(1).norm(dim=1)
