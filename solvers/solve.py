"""solve(f, z0, ...) -> Solution: the one loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from solvers.adjoint import AdaptiveAdjoint, FixedAdjoint, warn_if_coarse
from solvers.base import HALF, Solver, State, VectorField, Work, cast, tensors
from solvers.checks import check_amounts, check_finite, check_gradient, check_mask, check_state, is_traced, zeroed
from solvers.gradients import GRADIENTS, Halving, Report, Reversal, Stepwise
from solvers.grid import Piece, make_pieces, place, read_grid, read_points, read_span
from solvers.jumps import warn_of_jump
from solvers.march import make_legs, march
from solvers.registry import get_solver

# gradient modes that take over a solve of fixed steps; those of GRADIENTS wrap its step
WHOLE: dict[str, type[Stepwise]] = {mode.mode: mode for mode in (Halving, Reversal, FixedAdjoint)}

UNIT = (0.0, 1.0)
MAX_NFE = 10_000  # default bound on an adaptive solve


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solve returns.

    ``z``: the final state, dtype of z0; ``l``: the final depth. ``states``, ``depths``: the saved states, stacked
    along a new first axis (a tuple of stacks for a tuple state), and where they belong. ``nfe``: evaluations of f in
    the solve; ``nfe_backward``: those made during backward so far. ``steps``: accepted h. ``n_rejected``: steps
    tried in vain. ``errors``: for adaptive methods the scaled error estimate of each accepted step (at most 1).
    On the way to an equilibrium a step is an iteration, and its error the residual over the tolerance.
    After a per-sample solve ``steps`` and ``errors`` hold a list for each row, and ``n_steps`` is that of the longest.
    """

    z: State
    l: float
    states: State | None
    depths: list[float] | None
    nfe: int | float
    n_steps: int
    steps: list[float]
    n_rejected: int = 0
    errors: list[float] = field(default_factory=list)
    _work: Work | None = field(default=None, repr=False, compare=False)
    _report: Report | None = field(default=None, repr=False, compare=False)

    @property
    def nfe_backward(self) -> int | float:
        """Evaluations of f made during backward, so far."""
        return self._work.total - self.nfe

    @property
    def reconstruction_error(self) -> float | None:
        """After backward with gradient "reversible" or "adjoint": by how much of its size the state missed its start on
        the way back (the worst piece); None otherwise."""
        return None if self._report is None else self._report.reconstruction_error

    @property
    def residual(self) -> float | None:
        """After a solve to an equilibrium: the root mean square of f(z) in the row where it is largest."""
        return getattr(self._report, "residual", None)


def solve(f: VectorField, z0: State, *, span: tuple = UNIT, solver: str | Solver = "rk4", n_steps: int | None = None,
          grid: Sequence[float] | Tensor | None = None, rtol: float | None = None, atol: float | None = None,
          save_at: Sequence[float] | Tensor | str | None = None, gradient: str = "backprop",
          mask: Tensor | None = None, max_nfe: int | None = None, params: Sequence[Tensor] | None = None,
          breakpoints: Sequence[float] | None = None) -> Solution:
    """Integrate dz/dl = f(z, l) from span[0] to span[1] (eq. 36).

    f: returns the increment, shaped like z; l is a 0-d tensor on z's device. It may carry ``parts``, ``pieces`` and
        ``breakpoints`` (see solvers.base).
    z0: a floating-point tensor, or a tuple of them. A half-precision state is carried in float32 between
        evaluations (many small updates vanish in bf16); f sees it in z0's dtype and the result comes back in it.
    span: two numbers or 0-d tensors (gradients reach tensors); may run backwards.
    solver: a name from SOLVERS or an object.
    n_steps: equal steps (fixed-step solvers); over pieces, a multiple of their number. grid: depth points instead,
        both ends included, every boundary between pieces among them.
    rtol, atol: tolerances (adaptive solvers; default 1e-3 and 1e-6, coarser for half precision).
    save_at: depths at which to keep the state, or "steps" for every grid point of a fixed-step solve. Between steps
        a fixed-step solve interpolates by cubic Hermite polynomials (two more evaluations an interval that needs it).
    gradient: "backprop" (autograd, exact); "checkpoint" (exact, keeps one state a step), "checkpoint_recursive" (exact,
        about log2(n) states), "reversible" (reversible methods: exact up to rounding, keeps no states; see
        ``Solution.reconstruction_error``), "implicit" (implicit methods, equilibrium); "jacobian_free" (equilibrium,
        approximate); "adjoint" (of the continuous problem, keeps no states; warns on a coarse fixed grid). Second
        derivatives: backprop and checkpoint.
    mask: bool, broadcastable to z without its last axis, True = real; others are out of every norm and check
        (implicit methods start them at 0 and solve for them too).
    max_nfe: bound on the evaluations (adaptive default 10,000; an adaptive adjoint may use as many again in backward).
    params: all tensors that f depends on, for gradient modes that work outside autograd. They find them from f's first
        evaluation of each piece otherwise (closed over, non-leaf, swapped in by functional_call), or raise.

    Raises TypeError or ValueError for wrong arguments, SolverError where the numbers fail; what f raises comes
    through unchanged.

    >>> solve(lambda z, l: -z, torch.ones(1, dtype=torch.float64), span=(0.0, 2.0), n_steps=8).nfe
    32
    """
    solver = get_solver(solver)
    if not callable(f) and not getattr(f, "pieces", None):
        raise TypeError(f"f must be callable as f(z, l), got {type(f).__name__}")
    dtypes = check_state(z0)
    if grid is not None:
        grid = read_grid(grid)
        span = (grid[0], grid[-1]) if span is UNIT else span
    ends = read_span(span)
    params = check_gradient(solver, gradient, params)
    check_amounts(solver, ends, n_steps, grid, rtol, atol, max_nfe)
    check_mask(mask, z0)
    half = any(dtype in HALF for dtype in dtypes)
    z = cast(z0, [torch.float32 if d in HALF else d for d in dtypes]) if half else z0
    default = MAX_NFE if solver.is_adaptive else math.inf
    work = Work(default if max_nfe is None else max_nfe)
    if solver.is_implicit:  # whose equations take the whole state together
        z = zeroed(z, mask)
        if not is_traced(z):
            check_finite(z, z0, mask, ends[0], 0.0, work)
    pieces = make_pieces(f, span, ends, breakpoints, work, dtypes if half else None)
    _check_span(solver, pieces)
    nodes = getattr(solver, "nodes", (0.0,))
    if (min(nodes) < 0 or max(nodes) > 1) and any(piece.nudge != (False, False) for piece in pieces):
        raise ValueError(f"breakpoints rule out {solver.name!r}, which evaluates f beyond its steps, where f jumps; "
                         "give f as pieces, or take another solver")
    # the modes that take over the whole solve have nothing to do where no gradient is wanted
    to_root = getattr(solver, "to_equilibrium", False)  # which is differentiated by the solver itself
    whole = gradient not in GRADIENTS and torch.is_grad_enabled() and not to_root
    if whole and is_traced(z):
        raise ValueError(f"gradient={gradient!r} works outside autograd and cannot be traced (torch.compile, "
                         'torch.func, CUDA graphs); use "backprop"')
    if solver.is_adaptive:
        depths = _read_save_at(save_at, ends, None)
        _check_saved(gradient, pieces, depths)
        tolerances = _tolerances(rtol, atol, z0)
        own = {"gradient": gradient} if to_root else {}
        z, states, taken, report = _adapt(solver, pieces, z, depths or (), tolerances, mask, work, whole, params, **own)
        if not to_root:
            warn_of_jump(pieces, z0, taken["steps"], taken["n_rejected"], mask)
    else:
        placed = place(pieces, n_steps, grid)
        depths = _read_save_at(save_at, ends, placed)
        _check_saved(gradient, pieces, depths)
        legs = make_legs(pieces, placed, solver.nodes, depths or (), z)
        report = None
        if whole:
            if gradient == "adjoint":
                warn_if_coarse(solver, placed)
            mode = WHOLE[gradient](solver, legs, z, params, mask, work)
            (z, states), report = mode.run(z), mode.report
        else:
            advance = GRADIENTS[gradient](solver) if gradient in GRADIENTS else solver.step
            z, states = march(advance, solver, legs, z)
        taken = {"n_steps": len(legs), "steps": [leg.l1 - leg.l0 for leg in legs]}
        if not is_traced(z):
            check_finite(z, z0, mask, ends[1], taken["steps"][-1], work)
    nfe, work.limit = work.total, math.inf
    if half:
        z, states = cast(z, dtypes), [cast(state, dtypes) for state in states]
    return Solution(z, ends[1], None if depths is None else _stack(states), depths, nfe, **taken, _work=work,
                    _report=report)


def _adapt(solver: Solver, pieces: list[Piece], z: State, depths: Sequence[float], tolerances: tuple[float, float],
           mask: Tensor | None, work: Work, whole: bool,
           params: Sequence[Tensor] | None, **own: Any) -> tuple[State, list[State], dict, Report | None]:
    """An adaptive solve; ``whole``: its gradient is the adjoint's. ``own``: what the solver is told beside."""
    rtol, atol = tolerances
    if whole:
        adjoint = AdaptiveAdjoint(solver, pieces, z, params, mask, work, depths, rtol, atol)
        (z, states), record, report = adjoint.run(z), adjoint.record, adjoint.report
    else:
        z, record = solver.integrate(z, pieces, depths, rtol=rtol, atol=atol, mask=mask, work=work, **own)
        states, report = record.states, getattr(record, "report", None)
    taken = {name: getattr(record, name) for name in ("n_steps", "steps", "n_rejected", "errors")}
    return z, states, taken, report


def _check_span(solver: Solver, pieces: list[Piece]) -> None:
    """Increments carried from a piece with moving ends to one without would mix units of l."""
    if getattr(solver, "across_pieces", False) and len(pieces) > 1 and any(piece.rescaled for piece in pieces):
        raise ValueError(f"span cannot get gradients from {solver.name!r}, which carries increments across pieces of f "
                         f"(there are {len(pieces)}): detach span, or take another solver")


def _check_saved(gradient: str, pieces: list[Piece], depths: list[float] | None) -> None:
    """The adjoint has no term for a state whose place within a moving piece moves."""
    if gradient != "adjoint" or depths is None:
        return
    for piece in pieces:
        inside = [l for l in depths if piece.rescaled and (l - piece.l0) * (l - piece.l1) < 0]
        if inside:
            raise ValueError("save_at inside a piece whose end needs gradients is not for gradient='adjoint': "
                             f"{inside} between {piece.l0} and {piece.l1}; detach span, or take gradient='backprop'")


def _stack(states: list[State]) -> State:
    if isinstance(states[0], Tensor):
        return torch.stack(states)
    return tuple(map(torch.stack, zip(*states, strict=True)))


def _tolerances(rtol: float | None, atol: float | None, z0: State) -> tuple[float, float]:
    """Defaults: 1e-3 and 1e-6, but never below four times the resolution of f's arithmetic."""
    kinds = [x.dtype for x in tensors(z0)]
    device = tensors(z0)[0].device.type
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    resolution = max(torch.finfo(kind).eps for kind in kinds)
    default = max(1e-3, 4 * resolution)
    return default if rtol is None else rtol, default * 1e-3 if atol is None else atol


def _read_save_at(save_at: Any, ends: tuple[float, float],
                  placed: Sequence[Sequence[float]] | None) -> list[float] | None:
    """Depths to save at, ordered along the span; None where nothing was asked for."""
    if save_at is None:
        return None
    if isinstance(save_at, str):
        if save_at != "steps" or placed is None:
            raise ValueError(f"save_at must be depths, or 'steps' with a fixed-step solver; got {save_at!r}")
        return [placed[0][0], *(l for points in placed for l in points[1:])]
    depths = read_points("save_at", save_at)
    if not depths:
        raise ValueError("save_at must hold at least one depth")
    low, high = sorted(ends)
    outside = [l for l in depths if not low <= l <= high]
    if outside:
        raise ValueError(f"save_at must lie within span {ends}; got {outside}")
    forward = ends[1] > ends[0]
    if any((y < x) if forward else (y > x) for x, y in pairwise(depths)):
        raise ValueError(f"save_at must run along span {ends}; got {depths}")
    return depths
