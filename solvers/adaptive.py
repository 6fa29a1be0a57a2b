"""Adaptive Runge-Kutta methods. torchdiffeq is the engine; the tableaus, the norm and the bounds on work are ours.

torchdiffeq takes the last stage of every tableau for f at the end of the step. That holds for FSAL tableaus only, so
each is completed to FSAL before the engine sees it (its own ``adaptive_heun`` and ``fehlberg2`` are not: their real
stability interval shrinks from 2 to 1.05).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.base import Evaluator, SolverError, State, Work, depth_dtype, tensors
from solvers.checks import refuse_transforms
from solvers.coefficients import ADAPTIVE
from solvers.engine import engine
from solvers.grid import Piece, Rescaled
from solvers.stepsize import (
    ADVICE,
    MORE,
    NOISY,
    Clock,
    bad_share,
    check_control,
    check_pair,
    error_order,
    is_noisy,
    quiet,
    real_entries,
    row_rms,
    starting_step,
)
from solvers.tableau import Tableau

TRANSFORMS = "adaptive solvers with one step size for the whole batch", "torch.autograd, or per_sample=True"


class Record(NamedTuple):
    """What an adaptive solve leaves behind, besides the state.

    ``steps``, ``errors``: one number an accepted step; in a per-sample solve a list of those for each row.
    ``n_rejected``: trial steps in vain, over all rows.
    """

    states: list[State]
    steps: list[float] | list[list[float]]
    errors: list[float] | list[list[float]]
    n_rejected: int

    @property
    def n_steps(self) -> int:
        """Accepted steps; in a per-sample solve those of the row that took most."""
        rows = [row for row in self.steps if isinstance(row, list)]
        return max(map(len, rows)) if rows else len(self.steps)


@dataclass(frozen=True)
class Adaptive:
    """An embedded Runge-Kutta pair with step size control by torchdiffeq: ``Adaptive(EXPLICIT["tsit54"], "tsit54")``.

    A step is accepted where the norm of (error estimate / (atol + rtol max(|z|, |z'|))) is at most 1. The norm is the
    maximum over rows (the first axis of a state with two or more axes) of the root mean square over a row's real
    entries, so that neither padding nor batch-mates hide an error; ``norm`` (state -> 0-d tensor) replaces it.
    Padding that is not finite, in z0 or in an increment, counts as 0.

    ``first_step`` (chosen from f where None), ``min_step`` (accepted whatever its error), ``max_step`` in units of l;
    ``safety``, ``min_factor``, ``max_factor``: a step follows the last by a factor within these bounds.

    Depths inside a step (save_at) come from an interpolant as accurate as the error estimate, else from a shorter step
    of the same method: n_stages evaluations each. The steps, and so the final state, do not depend on save_at.
    A field that draws new randomness at each evaluation makes every step look inaccurate: the solve ends at max_nfe
    and says so.
    """

    tableau: Tableau
    name: str = "adaptive"
    norm: Callable[[State], Tensor] | None = field(default=None, kw_only=True)
    first_step: float | None = field(default=None, kw_only=True)
    min_step: float = field(default=0.0, kw_only=True)
    max_step: float = field(default=math.inf, kw_only=True)
    safety: float = field(default=0.9, kw_only=True)
    min_factor: float = field(default=0.2, kw_only=True)
    max_factor: float = field(default=10.0, kw_only=True)
    _engine_tableau: Tableau = field(init=False, repr=False, compare=False)

    is_implicit = False
    is_adaptive = True
    is_reversible = False
    gradients = ("backprop", "adjoint")

    def __post_init__(self) -> None:
        check_pair(self.tableau)
        check_control(self, ("first_step", "max_step", "safety", "min_factor", "max_factor"), ("min_step",))
        if self.norm is not None and not callable(self.norm):
            raise TypeError(f"norm must be a function from a state to a 0-d tensor, got {type(self.norm).__name__}")
        object.__setattr__(self, "_engine_tableau", self.tableau.with_fsal())

    @property
    def order(self) -> int:
        """Order of the propagated solution."""
        return self.tableau.order

    @property
    def embedded_order(self) -> int:
        """Order of the embedded solution."""
        return self.tableau.embedded_order

    @property
    def n_stages(self) -> int:
        """Stages of the published tableau."""
        return self.tableau.n_stages

    def integrate(self, z: State, pieces: Sequence[Piece], save_at: Sequence[float], *, rtol: float, atol: float,
                  mask: Tensor | None, work: Work) -> tuple[State, Record]:
        """The state at the end of the last piece; states at ``save_at`` (ordered along the span).

        Two evaluations choose the first step (one if it is given), one begins each further piece, then n_stages - 1 a
        trial step of an FSAL tableau and n_stages of another. Raises SolverError; ValueError for a norm beside a mask.
        """
        for x in tensors(z):
            refuse_transforms(x, *TRANSFORMS)
        run = _Run(self, z, mask, rtol, atol, work)
        y, h = run.begin(z, pieces[0].l0), self.first_step
        saved: list[State] = []
        for piece in pieces:
            last = piece is pieces[-1]
            sign = math.copysign(1.0, piece.l1 - piece.l0)
            mine = [l for l in save_at[len(saved):] if sign * (piece.l1 - l) > 0 or last]
            y, states, h = self._piece(run, piece, y, mine, h)
            saved += [run.unpack(state) for state in states]
        return run.unpack(y), Record(saved, run.lengths(), run.errors(), run.n_rejected)

    def _piece(self, run: _Run, piece: Piece, y: Tensor, save_at: list[float],
               h: Any) -> tuple[Tensor, list[Tensor], Tensor]:
        """The state at the end of a piece, those at save_at, and the step size to go on with."""
        function = _Function(run, piece)
        first_step = function.begin(y, h)
        clock = function.clock
        times = [clock.time(l) for l in save_at]
        distinct = sorted({clock.start, *times, clock.stop})
        ticks = clock.ticks(distinct, y.device)
        stepper = engine(self._engine_tableau)(
            function, y, run.rtol, run.atol, norm=function.norm, first_step=first_step, step_t=ticks[-1:].detach(),
            min_step=self.min_step / clock.unit, max_step=self.max_step / clock.unit, safety=self.safety,
            ifactor=self.max_factor, dfactor=self.min_factor, dtype=torch.float64)
        try:
            states = stepper.integrate(ticks)
        except AssertionError as error:
            if function.raised is error:
                raise
            overflow = "non-finite" in str(error)
            raise function.failure("the state has become infinite or NaN" if overflow else
                                   "the step size fell below what l can resolve") from error
        # the last step was cut at the end of the piece: the size it had before is the better guess
        h = torch.maximum(function.dt, stepper.rk_state.dt) * clock.unit
        return states[-1], [states[distinct.index(t)] for t in times], h


class _Run:
    """What the pieces of one solve share: packing, the norm, tolerances, and what was done so far."""

    def __init__(self, solver: Adaptive, z: State, mask: Tensor | None, rtol: Any, atol: Any, work: Work):
        if mask is not None and solver.norm is not None:
            raise ValueError("norm and mask must not both be given: a norm of your own sees the whole state")
        self.solver, self.rtol, self.atol, self.work = solver, rtol, atol, work
        self.pack, self.unpack = _packer(z)
        self.real = real_entries(z, mask)
        self.dtype = depth_dtype(z)
        self.taken: list[tuple[Tensor, float]] = []  # on the device until the solve is over
        self.ratios: list[Tensor] = []
        self.n_rejected = 0

    def begin(self, z: State, l: float) -> Tensor:
        """The packed state. Raises SolverError where it is not finite."""
        if share := bad_share(z, self.real):
            raise SolverError(f"z0 is not finite ({share:.1%} of its entries)", l=l, h=math.nan, nfe=self.work.total,
                              advice="check the input and the embedding")
        return self.pack(quiet(z, self.real))

    def norm(self, y: Tensor) -> Tensor:
        """The error norm of a packed state."""
        if self.solver.norm is not None:
            return torch.as_tensor(self.solver.norm(self.unpack(y)))
        norms = [row_rms(x, keep).amax() if x.dim() > 1 else x.abs().square().mean().sqrt()
                 for x, keep in zip(tensors(self.unpack(y)), self.real, strict=True)]
        return norms[0] if len(norms) == 1 else torch.stack(norms).amax()

    def lengths(self) -> list[float]:
        """Accepted h, in units of l."""
        if not self.taken:
            return []
        hs = torch.stack([dt for dt, _ in self.taken]).tolist()
        return [h * scale for h, (_, scale) in zip(hs, self.taken, strict=True)]

    def errors(self) -> list[float]:
        """Scaled error of each accepted step (at most 1, unless min_step forced it)."""
        return torch.stack(self.ratios).tolist() if self.ratios else []


class _Function:
    """The field of a piece as torchdiffeq calls it: time runs upwards, the state is one tensor, callbacks watch."""

    def __init__(self, run: _Run, piece: Piece):
        self.run, self.piece, self.clock = run, piece, Clock(piece, run.dtype, run.work)
        self.field = piece.f.f.f if isinstance(piece.f.f, Rescaled) else piece.f.f
        self.t, self.y = self.clock.start, None
        self.dt: Tensor | None = None
        self.ratio: Tensor | None = None
        self.first: Tensor | None = None
        self.raised: BaseException | None = None

    def begin(self, y: Tensor, h: Any) -> Tensor:
        """The first step; f at the start is kept for the engine. Raises SolverError where f is not finite there."""
        self.y, clock, run = y, self.clock, self.run
        t = torch.tensor(clock.start, dtype=torch.float64, device=y.device)
        k, length = self(t, y), clock.stop - clock.start
        refuse_transforms(k, *TRANSFORMS)
        if share := bad_share(run.unpack(k), run.real):
            raise self.failure(f"f is not finite at the start of the piece ({share:.1%} of its entries)",
                               "check the weights and the input")
        if h is None:
            with torch.no_grad():
                scale = run.atol + run.rtol * y.abs()
                h = starting_step(lambda x: self.norm(x / scale), lambda h: self(t + h, y + h.to(y.dtype) * k), y, k,
                                  length, error_order(run.solver.tableau))
        else:
            h = torch.as_tensor(h, dtype=torch.float64, device=y.device) / clock.unit
        self.first = k
        return h.double().clamp(min=min(2 * clock.floor(clock.start), length))

    def __call__(self, t: Tensor, y: Tensor, *, perturb: object = None) -> Tensor:
        if self.first is not None:
            k, self.first = self.first, None
            return k
        work = self.run.work
        if work.nfe + self.piece.f.weight > work.limit + 1e-6:
            raise self.failure(f"the solve needs more than max_nfe = {work.limit:g} evaluations "
                               f"({len(self.run.taken)} steps taken, {self.run.n_rejected} rejected)", MORE)
        try:
            k = self.piece.f(self.run.unpack(y), self.clock.argument(t.real if t.is_complex() else t))
        except Exception as error:
            self.raised = error
            raise
        k = self.run.pack(quiet(k, self.run.real))
        if k.is_complex() and not y.is_complex():
            raise TypeError(f"f must return a real increment for a real state, got {k.dtype} for {y.dtype}")
        k = k.to(y.dtype)
        return k if self.clock.sign > 0 else -k

    def norm(self, x: Tensor) -> Tensor:
        """The error norm; NaN becomes infinite, so that a trial step that hits one is rejected and retried."""
        with torch.no_grad():
            self.ratio = torch.nan_to_num(self.run.norm(x), nan=math.inf, posinf=math.inf)
        return self.ratio

    def callback_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """About to try a step."""
        self.t, self.y, self.dt = t0, y0, dt
        self._tell("callback_step", t0, y0, dt)

    def callback_accept_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """A step was accepted."""
        self.run.taken.append((dt.detach(), self.clock.scale))
        self.run.ratios.append(self.ratio)
        self._tell("callback_accept_step", t0, y0, dt)

    def callback_reject_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """A step was rejected: fail before the engine shrinks it to nothing."""
        self.run.n_rejected += 1
        self.dt = dt
        if float(dt) <= float(self.clock.floor(t0)):
            raise self.failure("the step size fell below what l can resolve")
        self._tell("callback_reject_step", t0, y0, dt)

    def _tell(self, event: str, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """Call torchdiffeq's callback of that name where the field has one, with (l, z, h)."""
        callback = getattr(self.field, event, None)
        if callback is not None:
            l = torch.as_tensor(self.clock.depth(t0), dtype=self.run.dtype, device=y0.device)
            callback(l, self.run.unpack(y0), (dt * self.clock.scale).to(self.run.dtype))

    def failure(self, what: str, advice: str = ADVICE) -> SolverError:
        """A SolverError for the step under way; it blames f where f is not a function of its arguments."""
        run, f = self.run, Evaluator(self.piece.f.f, Work(), self.piece.f.dtypes)
        h = math.nan if self.dt is None else float(self.dt) * self.clock.scale
        t = torch.as_tensor(self.t, dtype=torch.float64, device=self.y.device)
        noisy = is_noisy(lambda: quiet(f(run.unpack(self.y), self.clock.argument(t)), run.real))
        return SolverError(what, l=self.clock.depth(self.t), h=h, nfe=run.work.total, advice=NOISY if noisy else advice)


def _packer(z: State) -> tuple[Callable, Callable]:
    """State to one tensor and back (a tuple becomes one flat tensor, as torchdiffeq has it)."""
    if isinstance(z, Tensor):
        return lambda y: y, lambda y: y
    shapes, dtypes = [x.shape for x in z], [x.dtype for x in z]
    sizes = [x.numel() for x in z]

    def unpack(y: Tensor) -> State:
        parts = [x.view(shape) for x, shape in zip(y.split(sizes), shapes, strict=True)]
        return tuple((x if dtype.is_complex or not x.is_complex() else x.real).to(dtype)
                     for x, dtype in zip(parts, dtypes, strict=True))

    return lambda y: torch.cat([x.reshape(-1) for x in y]), unpack


METHODS = {name: Adaptive(tableau, name) for name, tableau in ADAPTIVE.items()}
