"""solve(f, z0, ...) -> Solution: the one loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from solvers.base import HALF, Evaluator, Solver, SolverError, State, Step, VectorField, Work, cast, depth_dtype, tensors
from solvers.gradients import GRADIENTS
from solvers.grid import Piece, make_pieces, make_steps, place, read_grid, read_points, read_span
from solvers.registry import get_solver

UNIT = (0.0, 1.0)
MAX_NFE = 10_000  # default bound on an adaptive solve


@dataclass(frozen=True)
class Solution:
    """What a solve returns.

    ``z``: the final state, dtype of z0; ``l``: the final depth. ``states``, ``depths``: the saved states, stacked
    along a new first axis (a tuple of stacks for a tuple state), and where they belong. ``nfe``: evaluations of f in
    the solve; ``nfe_backward``: those made during backward so far. ``steps``: accepted h. ``n_rejected``: steps
    tried in vain. ``errors``: for adaptive methods the scaled error estimate of each accepted step (at most 1).
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

    @property
    def nfe_backward(self) -> int | float:
        """Evaluations of f made during backward, so far."""
        return self._work.total - self.nfe


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
    gradient: "backprop" or "checkpoint".
    mask: bool, broadcastable to z without its last axis, True = real; others are out of every norm and check.
    max_nfe: bound on the evaluations (adaptive default 10,000). params: tensors that f depends on (unused by
        "backprop").

    Raises TypeError or ValueError for wrong arguments, SolverError where the numbers fail; what f raises comes
    through unchanged.

    >>> solve(lambda z, l: -z, torch.ones(1, dtype=torch.float64), span=(0.0, 2.0), n_steps=8).nfe
    32
    """
    solver = get_solver(solver)
    dtypes = _check_state(z0)
    if grid is not None:
        grid = read_grid(grid)
        span = (grid[0], grid[-1]) if span is UNIT else span
    ends = read_span(span)
    if gradient not in solver.gradients:
        raise ValueError(f"gradient must be one of {', '.join(solver.gradients)} for solver {solver.name!r}, "
                         f"got {gradient!r}")
    _check_amounts(solver, ends, n_steps, grid, rtol, atol, max_nfe, gradient, params)
    _check_mask(mask, z0)
    half = any(dtype in HALF for dtype in dtypes)
    z = cast(z0, [torch.float32 if d in HALF else d for d in dtypes]) if half else z0
    default = MAX_NFE if solver.is_adaptive else math.inf
    work = Work(default if max_nfe is None else max_nfe)
    pieces = make_pieces(f, span, ends, breakpoints, work, dtypes if half else None)
    if solver.is_adaptive:
        depths = _read_save_at(save_at, ends, None)
        rtol, atol = _tolerances(rtol, atol, z0)
        z, record = solver.integrate(z, pieces, depths or (), rtol=rtol, atol=atol, mask=mask, work=work)
        states, steps = record.states, record.steps
        extra = {"n_rejected": record.n_rejected, "errors": record.errors}
    else:
        placed = place(pieces, n_steps, grid)
        depths = _read_save_at(save_at, ends, placed)
        z, states, steps = _march(solver, gradient, pieces, placed, z, depths)
        extra = {}
        if not _is_traced(z):
            _check_finite(z, z0, mask, ends[1], steps[-1], work)
    nfe, work.limit = work.total, math.inf
    if half:
        z, states = cast(z, dtypes), [cast(state, dtypes) for state in states]
    return Solution(z, ends[1], None if depths is None else _stack(states), depths, nfe, len(steps), steps,
                    _work=work, **extra)


def _march(solver: Solver, gradient: str, pieces: list[Piece], placed: list[list[float]], z: State,
           save_at: list[float] | None) -> tuple[State, list[State], list[float]]:
    """Fixed steps through the pieces: the final state, the saved states, the step sizes."""
    advance = GRADIENTS[gradient](solver)
    dtype, device = depth_dtype(z), tensors(z)[0].device
    wanted = save_at or []
    states: list[State] = []
    sizes: list[float] = []
    memory = None
    for piece, points in zip(pieces, placed, strict=True):
        memory = solver.init(memory)
        for i, step in enumerate(make_steps(piece, points, solver.nodes, dtype, device)):
            before = z
            z, memory = advance(piece.f, z, step, memory)
            sizes.append(points[i + 1] - points[i])
            if len(states) < len(wanted):
                states += _saved(piece, before, z, step, points[i], points[i + 1], wanted[len(states):])
    return z, states, sizes


def _saved(piece: Piece, before: State, after: State, step: Step, l0: float, l1: float,
           wanted: list[float]) -> list[State]:
    """States at those wanted depths that lie in [l0, l1]: an end itself, or cubic Hermite interpolation inside."""
    states: list[State] = []
    slopes = None
    near = 1e-9 * abs(l1 - l0)
    for l in wanted:
        if abs(l - l1) <= near:
            states.append(after)
        elif abs(l - l0) <= near:
            states.append(before)
        elif (l - l0) * (l - l1) < 0:
            if slopes is None:
                at = [torch.as_tensor(x, dtype=step.at[0].dtype, device=step.at[0].device)
                      for x in _inside(piece, (step.l, step.l + step.h), step.at[0].dtype)]
                slopes = piece.f(before, at[0]), piece.f(after, at[1])
            states.append(_hermite(before, after, *slopes, step.h, (l - l0) / (l1 - l0)))
        else:
            break
    return states


def _inside(piece: Piece, ends: tuple[float, float], dtype: torch.dtype) -> list[float]:
    low, high = sorted(piece.inside(dtype))
    return [min(max(x, low), high) for x in ends]


def _hermite(z0: State, z1: State, k0: State, k1: State, h: float, x: float) -> State:
    """The cubic through z0, z1 with slopes k0, k1, at the fraction x of the step (error O(h^4))."""
    if isinstance(z0, tuple):
        return tuple(_hermite(*parts, h, x) for parts in zip(z0, z1, k0, k1, strict=True))
    y = 1 - x
    return (1 + 2 * x) * y * y * z0 + x * x * (3 - 2 * x) * z1 + h * x * y * (y * k0 - x * k1)


def _stack(states: list[State]) -> State:
    if isinstance(states[0], Tensor):
        return torch.stack(states)
    return tuple(map(torch.stack, zip(*states, strict=True)))


def _is_traced(z: State) -> bool:
    """Inside torch.compile, a functorch transform or a CUDA graph capture, where no value can be read."""
    if torch.compiler.is_compiling():
        return True
    x = tensors(z)[0]
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or (
        x.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_finite(z: State, z0: State, mask: Tensor | None, l: float, h: float, work: Work) -> None:
    """The one host read of a fixed-step solve."""
    with torch.no_grad():
        total = sum(_real(x, mask).sum() for x in tensors(z))
        if math.isfinite(abs(total.item())) or all(bool(torch.isfinite(_real(x, mask)).all()) for x in tensors(z)):
            return
        share = [(~torch.isfinite(_real(x, mask))).float().mean().item() for x in tensors(z0)]
    if max(share):
        raise SolverError(f"z0 was not finite ({max(share):.1%} of its entries), so the state is not", l=l, h=h,
                          nfe=work.total, advice="check the input and the embedding")
    raise SolverError("the state has become infinite or NaN", l=l, h=h, nfe=work.total, advice=(
        "h times the largest eigenvalue of f may lie outside the method's stability region, or f has a pole: take "
        "more steps, an adaptive solver, or save_at='steps' on a shorter span to see where it starts"))


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None or x.dim() < 2 else x.masked_fill(~mask.expand(x.shape[:-1]).unsqueeze(-1), 0)


def _check_state(z0: Any) -> tuple[torch.dtype, ...]:
    if not isinstance(z0, Tensor) and not (isinstance(z0, tuple) and z0 and all(isinstance(x, Tensor) for x in z0)):
        raise TypeError(f"z0 must be a tensor or a non-empty tuple of tensors, got {type(z0).__name__}")
    for x in tensors(z0):
        if not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"z0 must be floating point, got {x.dtype}")
        if x.numel() == 0:
            raise ValueError(f"z0 must not be empty, got shape {tuple(x.shape)}")
    return tuple(x.dtype for x in tensors(z0))


def _check_amounts(solver: Solver, ends: tuple[float, float], n_steps: Any, grid: list[float] | None, rtol: Any,
                   atol: Any, max_nfe: Any, gradient: str, params: Any) -> None:
    for name, value in (("n_steps", n_steps), ("max_nfe", max_nfe)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if solver.is_adaptive:
        for name, value in (("n_steps", n_steps), ("grid", grid)):
            if value is not None:
                raise ValueError(f"{name} is for fixed-step solvers; {solver.name!r} chooses its steps from rtol and atol")
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        if rtol == 0 and atol == 0:
            raise ValueError("rtol and atol must not both be 0")
        return
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            raise ValueError(f"{name} is for adaptive solvers; {solver.name!r} takes fixed steps (n_steps or grid)")
    if n_steps is None and grid is None:
        raise ValueError(f"n_steps or grid must be given for the fixed-step solver {solver.name!r}")
    if grid is not None:
        if n_steps is not None and n_steps != len(grid) - 1:
            raise ValueError(f"n_steps = {n_steps} contradicts grid, which has {len(grid) - 1} steps; give one of them")
        if any(abs(x - y) > 1e-12 * max(1.0, abs(y)) for x, y in zip((grid[0], grid[-1]), ends, strict=True)):
            raise ValueError(f"grid must run from span[0] to span[1]; grid has ({grid[0]}, {grid[-1]}), span is {ends}")
    if params is not None and gradient == "backprop":
        raise ValueError('params is for gradient modes that cannot find them by themselves; "backprop" does')


def _check_mask(mask: Tensor | None, z0: State) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = real), got {getattr(mask, 'dtype', type(mask).__name__)}")
    for x in tensors(z0):
        try:
            fits = torch.broadcast_shapes(mask.shape, x.shape[:-1]) == x.shape[:-1]
        except RuntimeError:
            fits = False
        if x.dim() >= 2 and not fits:
            raise ValueError(f"mask must broadcast to z without its last axis, {tuple(x.shape[:-1])}; "
                             f"got {tuple(mask.shape)}")


def _tolerances(rtol: float | None, atol: float | None, z0: State) -> tuple[float, float]:
    """Defaults: 1e-3 and 1e-6, but never below four times the resolution of f's arithmetic."""
    kinds = [x.dtype for x in tensors(z0)]
    device = tensors(z0)[0].device.type
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    resolution = max(torch.finfo(kind).eps for kind in kinds)
    default = max(1e-3, 4 * resolution)
    return default if rtol is None else rtol, default * 1e-3 if atol is None else atol


def _read_save_at(save_at: Any, ends: tuple[float, float], placed: list[list[float]] | None) -> list[float] | None:
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
    if any((y < x) if forward else (y > x) for x, y in zip(depths, depths[1:], strict=False)):
        raise ValueError(f"save_at must run along span {ends}; got {depths}")
    return depths
