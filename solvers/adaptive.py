"""Adaptive Runge-Kutta methods. torchdiffeq is the engine; the tableaus, the norm and the bounds on work are ours.

torchdiffeq takes the last stage of every tableau for f at the end of the step. That holds for FSAL tableaus only, so
each is completed to FSAL before the engine sees it (its own ``adaptive_heun`` and ``fehlberg2`` are not: their real
stability interval shrinks from 2 to 1.05).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.base import SolverError, State, Work, depth_dtype, tensors
from solvers.coefficients import ADAPTIVE
from solvers.grid import Piece
from solvers.tableau import Tableau


class Record(NamedTuple):
    """What an adaptive solve leaves behind, besides the state."""

    states: list[State]
    steps: list[float]
    errors: list[float]
    n_rejected: int


@dataclass(frozen=True)
class Adaptive:
    """An embedded Runge-Kutta pair with step size control by torchdiffeq.

    A step is accepted where the norm of (error estimate / (atol + rtol max(|z|, |z'|))) is at most 1. The norm is the
    maximum over rows (the first axis of a state with two or more axes) of the root mean square over a row's real
    entries, so that neither padding nor batch-mates hide an error.
    """

    tableau: Tableau
    name: str = "adaptive"
    _engine_tableau: Tableau = field(init=False, repr=False, compare=False)

    is_implicit = False
    is_adaptive = True
    is_reversible = False
    gradients = ("backprop",)

    def __post_init__(self) -> None:
        if self.tableau.b_hat is None:
            raise ValueError("an adaptive method needs a tableau with an embedded row b_hat")
        if not self.tableau.is_explicit:
            raise ValueError("the adaptive engine runs explicit tableaus; this one is implicit")
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
        """The state at the end of the last piece; states at ``save_at`` (ordered along the span) by interpolation."""
        record = _Recorder(work)
        saved: list[State] = []
        pack, unpack = _packer(z)
        norm = _row_norm(unpack, mask)
        _check_start(z, mask, pieces[0].l0)
        y, first_step = pack(z), None
        for piece in pieces:
            last = piece is pieces[-1]
            sign = math.copysign(1.0, piece.l1 - piece.l0)
            mine = [l for l in save_at[len(saved):] if sign * (piece.l1 - l) > 0 or last]
            y, states, first_step = self._piece(y, piece, mine, first_step, unpack, pack, norm, record, rtol, atol)
            saved += [unpack(state) for state in states]
        return unpack(y), Record(saved, record.lengths(), record.errors, record.n_rejected)

    def _piece(self, y, piece, save_at, first_step, unpack, pack, norm, record, rtol, atol):
        start, stop = piece.start, piece.stop
        sign = math.copysign(1.0, stop - start)
        function = _Function(piece, sign, unpack, pack, norm, record, depth_dtype(y))
        times = [sign * start, *(sign * piece.local(l) for l in save_at), sign * stop]
        distinct = sorted(set(times))
        engine = _engine(self._engine_tableau, self.name)(
            function, y, rtol, atol, norm=function.norm, first_step=first_step, dtype=torch.float64,
            step_t=torch.tensor([sign * stop], dtype=torch.float64, device=y.device))
        try:
            solution = engine.integrate(torch.tensor(distinct, dtype=torch.float64, device=y.device))
        except AssertionError as error:
            if function.raised is error:
                raise
            raise function.failure("the step size fell below what l can resolve") from error
        states = [solution[distinct.index(t)] for t in times[1:-1]]
        return solution[-1], states, (None if piece.rescaled else engine.rk_state.dt)


class _Recorder:
    """Accepted steps, their scaled errors, rejections; step sizes stay on the device until the solve is over."""

    def __init__(self, work: Work):
        self.work = work
        self.taken: list[tuple[Tensor, float]] = []
        self.ratios: list[Tensor] = []
        self.n_rejected = 0

    def lengths(self) -> list[float]:
        """Accepted h, in units of l."""
        if not self.taken:
            return []
        hs = torch.stack([dt for dt, _ in self.taken]).tolist()
        return [h * scale for h, (_, scale) in zip(hs, self.taken, strict=True)]

    @property
    def errors(self) -> list[float]:
        """Scaled error of each accepted step (at most 1)."""
        return torch.stack(self.ratios).tolist() if self.ratios else []


class _Function:
    """The field as torchdiffeq calls it: time runs upwards, the state is one tensor, callbacks watch the steps."""

    def __init__(self, piece: Piece, sign: float, unpack: Callable, pack: Callable, norm: Callable,
                 record: _Recorder, dtype: torch.dtype):
        self.piece, self.sign, self.unpack, self.pack, self.record = piece, sign, unpack, pack, record
        self.row_norm, self.dtype = norm, dtype
        self.scale = (piece.l1 - piece.l0) if piece.rescaled else sign
        self.inside = sorted(piece.inside(dtype)) if piece.nudge != (False, False) else None
        self.floor = 8 * torch.finfo(dtype).eps * max(abs(piece.start), abs(piece.stop))
        self.t = self.dt = self.ratio = None
        self.raised: BaseException | None = None

    def __call__(self, t: Tensor, y: Tensor, *, perturb: object = None) -> Tensor:
        l = t.to(self.dtype) * self.sign
        if self.inside is not None:
            l = l.clamp(*self.inside)
        try:
            k = self.pack(self.piece.f(self.unpack(y), l)).to(y.dtype)
        except Exception as error:
            self.raised = error
            raise
        if self.t is None:
            self.t = t
            if not torch.isfinite(k).all():
                raise self.failure("f is not finite at the start of the piece", "check the weights and the input")
        return k if self.sign > 0 else -k

    def norm(self, x: Tensor) -> Tensor:
        """The error norm; NaN becomes infinite, so that a trial step that hits one is rejected and retried."""
        with torch.no_grad():
            self.ratio = torch.nan_to_num(self.row_norm(x), nan=math.inf, posinf=math.inf)
        return self.ratio

    def callback_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """About to try a step."""
        self.t, self.dt = t0, dt

    def callback_accept_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """A step was accepted."""
        self.record.taken.append((dt.detach(), self.scale))
        self.record.ratios.append(self.ratio)

    def callback_reject_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        """A step was rejected: fail before the engine shrinks it to nothing."""
        self.record.n_rejected += 1
        self.t, self.dt = t0, dt
        if float(dt) <= self.floor:
            raise self.failure("the step size fell below what l can resolve")

    def failure(self, what: str, advice: str | None = None) -> SolverError:
        """A SolverError for the step under way."""
        t = 0.0 if self.t is None else float(self.t)
        l = self.piece.l0 + t * (self.piece.l1 - self.piece.l0) if self.piece.rescaled else self.sign * t
        h = math.nan if self.dt is None else float(self.dt) * self.scale
        return SolverError(what, l=l, h=h, nfe=self.record.work.total, advice=advice or (
            "f may have a pole or a jump there, be stiff, or be noisier than rtol (low precision, dropout): end the "
            "span before it, name the jump in breakpoints, loosen rtol and atol, or use a float64 state"))


def _packer(z: State) -> tuple[Callable, Callable]:
    """State to one tensor and back (a tuple becomes one flat tensor, as torchdiffeq has it)."""
    if isinstance(z, Tensor):
        return lambda y: y, lambda y: y
    shapes = [x.shape for x in z]
    sizes = [x.numel() for x in z]

    def unpack(y: Tensor) -> State:
        return tuple(x.view(shape) for x, shape in zip(y.split(sizes), shapes, strict=True))

    return lambda y: torch.cat([x.reshape(-1) for x in y]), unpack


def _row_norm(unpack: Callable, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Maximum over rows of the RMS over the row's real entries."""

    def rms(x: Tensor) -> Tensor:
        square = x.abs().square()
        if x.dim() < 2:
            return square.mean().sqrt()
        if mask is None:
            return square.flatten(1).mean(1).amax().sqrt()
        real = mask.expand(x.shape[:-1]).unsqueeze(-1)
        count = real.flatten(1).sum(1).clamp(min=1) * x.shape[-1]
        return (square.masked_fill(~real, 0).flatten(1).sum(1) / count).amax().sqrt()

    def norm(y: Tensor) -> Tensor:
        ratios = [rms(x) for x in tensors(unpack(y))]
        return ratios[0] if len(ratios) == 1 else torch.stack(ratios).amax()

    return norm


def _check_start(z: State, mask: Tensor | None, l: float) -> None:
    for x in tensors(z):
        bad = ~torch.isfinite(x)
        if mask is not None and x.dim() >= 2:
            bad &= mask.expand(x.shape[:-1]).unsqueeze(-1)
        if bad.any():
            raise SolverError(f"z0 is not finite ({bad.float().mean().item():.1%} of its entries)", l=l, h=math.nan,
                              nfe=0, advice="check the input and the embedding")


@lru_cache(maxsize=None)
def _engine(tableau: Tableau, name: str) -> type:
    """A subclass of torchdiffeq's adaptive Runge-Kutta solver for a tableau, checked once against that tableau."""
    from torchdiffeq._impl import dopri5, dopri8, rk_common

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    # Weights of the state at the middle of the step, for torchdiffeq's quartic interpolation where it has good ones.
    middles = {"dopri5": dopri5.Dopri5Solver.mid, "dopri8": dopri8.Dopri8Solver.mid}
    b, b_hat, a = tableau.b, tableau.b_hat, tableau.a

    class Engine(rk_common.RKAdaptiveStepsizeODESolver):
        order = tableau.embedded_order + 1

        def _interp_fit(self, y0: Tensor, y1: Tensor, k: Tensor, dt: Tensor) -> list[Tensor]:
            if name in middles:
                return super()._interp_fit(y0, y1, k, dt)
            dt, f0, f1 = dt.type_as(y0), k[..., 0], k[..., -1]  # cubic Hermite
            d = y1 - y0
            return [y0, dt * f0, 3 * d - dt * (2 * f0 + f1), dt * (f0 + f1) - 2 * d, torch.zeros_like(y0)]

    Engine.tableau = rk_common._ButcherTableau(
        alpha=row(tableau.c[1:]), beta=[row(r) for r in a[1:]], c_sol=row(b),
        c_error=row([x - y for x, y in zip(b, b_hat, strict=True)]))
    Engine.mid = middles.get(name, torch.zeros(len(b), dtype=torch.float64))
    _self_check(Engine, tableau)
    return Engine


def _self_check(engine: type, tableau: Tableau) -> None:
    """One step of z' = z by the engine must be R(h): its private names may change between releases."""

    class Linear:
        callback_step = callback_accept_step = callback_reject_step = staticmethod(lambda t0, y0, dt: None)

        def __call__(self, t: Tensor, y: Tensor, *, perturb: object = None) -> Tensor:
            return y

    one = torch.ones(1, dtype=torch.float64)
    end = torch.tensor([0.0, 0.25], dtype=torch.float64)
    solver = engine(Linear(), one, 1.0, 1.0, norm=lambda x: x.abs().max(), first_step=0.5, step_t=end[1:])
    got, wanted = solver.integrate(end)[-1].item(), float(tableau.stability(0.25).real)
    if abs(got - wanted) > 1e-12:
        import torchdiffeq

        raise ImportError(f"torchdiffeq {torchdiffeq.__version__} does not run the tableau as given (one step of "
                          f"z' = z gives {got!r}, not {wanted!r}); install torchdiffeq==0.2.5")


METHODS = {name: Adaptive(tableau, name) for name, tableau in ADAPTIVE.items()}
