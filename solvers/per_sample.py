"""Adaptive Runge-Kutta methods in which every row of a batch has its own depth and its own step size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solvers.adaptive import Record
from solvers.base import (
    Evaluator,
    SolverError,
    State,
    VectorField,
    Work,
    accumulate,
    add,
    combine,
    depth_dtype,
    tensors,
)
from solvers.engine import interpolates, middle_weights
from solvers.grid import Piece, Rescaled
from solvers.row_steps import Batch, Log, Saves, Trial
from solvers.rows import choose, column, columns, in_order, on_device, on_host, polynomial, take, times
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


@dataclass(frozen=True)
class PerSample:
    """An embedded Runge-Kutta pair with a step size for each row: ``get_solver("dopri54", per_sample=True)``.

    The rows are the first axis of the state; every tensor of a tuple state has it, and as many axes as the others.
    f is called with l of shape (rows, 1, ..., 1), broadcastable against z, and must treat rows alike and apart: then
    a row's steps and its result are those it has when it is solved alone. One evaluation is one call of f, for however
    many rows. A row that fails ends the solve.

    Rows that have reached the end of a piece leave the batch, so f sees fewer rows than z0 has. A field that holds
    tensors with a batch axis (conditioning, a mask) offers ``f.select(rows)``, rows an index tensor, which returns
    the field for these rows; or else ``compact=False`` keeps every row in every evaluation.

    A row's step is accepted where the root mean square of (error estimate / (atol + rtol max(|z|, |z'|))) over its
    real entries is at most 1 (over a tuple state the largest). PI control: the next step is h times
    safety · error^(-(1 - 0.75 beta) / k) · (error of the step before)^(beta / k), within min_factor and max_factor,
    where the estimate goes with h^k (Hairer, Nørsett & Wanner 1993, II.4: their DOPRI5 has beta = 0.04 k). After a
    rejection it does not grow. Steps are constants to the gradient. Depths inside a step (save_at) are reached as in
    Adaptive.
    """

    tableau: Tableau
    name: str = "per_sample"
    compact: bool = field(default=True, kw_only=True)
    first_step: float | None = field(default=None, kw_only=True)
    max_step: float = field(default=math.inf, kw_only=True)
    safety: float = field(default=0.9, kw_only=True)
    min_factor: float = field(default=0.2, kw_only=True)
    max_factor: float = field(default=10.0, kw_only=True)
    beta: float = field(default=0.2, kw_only=True)
    _stages: tuple = field(init=False, repr=False, compare=False)
    _error: tuple = field(init=False, repr=False, compare=False)

    is_implicit = False
    is_adaptive = True
    is_reversible = False
    gradients = ("backprop",)

    def __post_init__(self) -> None:
        check_pair(self.tableau)
        check_control(self, ("first_step", "max_step", "safety", "min_factor", "max_factor"), ("beta",))
        if not isinstance(self.compact, bool):
            raise TypeError(f"compact must be a bool, got {self.compact!r}")
        t = self.tableau.with_fsal()
        object.__setattr__(self, "_stages", tuple((c, _terms(row)) for c, row in zip(t.c[1:], t.a[1:], strict=True)))
        object.__setattr__(self, "_error", _terms([x - y for x, y in zip(t.b, t.b_hat, strict=True)]))

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
        """The state at the end of the last piece; states at ``save_at``; steps and errors in a list for each row.

        Raises SolverError (it names rows); ValueError for a state without a common first axis.
        """
        n = _count_rows(z)
        log = Log()
        real = real_entries(z, mask)
        if share := bad_share(z, real):
            raise SolverError(f"z0 is not finite ({share:.1%} of its entries)", l=pieces[0].l0, h=math.nan,
                              nfe=work.total, advice="check the input and the embedding")
        z = quiet(z, real)
        h = None if self.first_step is None else np.full(n, self.first_step)
        saved: list[State] = []
        for piece in pieces:
            last = piece is pieces[-1]
            sign = math.copysign(1.0, piece.l1 - piece.l0)
            mine = [l for l in save_at[len(saved):] if sign * (piece.l1 - l) > 0 or last]
            z, states, h = _Solve(self, piece, real, rtol, atol, log).run(z, mine, h)
            saved += states
        return z, Record(saved, *log.lists(n), log.n_rejected)

    def factor(self, error: np.ndarray, before: np.ndarray, retry: np.ndarray) -> np.ndarray:
        """By what step sizes change after scaled errors; ``before``: of the last accepted step; ``retry``: where the
        trial before was rejected.
        """
        k, passed = error_order(self.tableau), error <= 1.0
        own = np.maximum(error, 1e-10) ** ((0.75 * self.beta * passed - 1) / k)
        last = np.maximum(before, 1e-4) ** (self.beta * passed / k)
        grown = np.minimum(self.safety * own * last, self.max_factor)
        return np.maximum(np.where(retry, np.minimum(grown, 1.0), grown), self.min_factor)


class _View:
    """The field of a piece, with the padding, for some of the rows; it counts, and stops at max_nfe."""

    def __init__(self, solve: _Solve, index: Tensor | None):
        f, self.solve, self.real = solve.piece.f, solve, solve.real
        if index is not None:
            f = Evaluator(_restrict(f.f, index), f.work, f.dtypes, f.weight)
            self.real = [None if keep is None else keep[index] for keep in solve.real]
        self.f = f

    def __call__(self, z: State, l: Tensor) -> State:
        work = self.f.work
        if work.nfe + self.f.weight > work.limit + 1e-6:
            log = self.solve.log
            raise self.solve.failure(f"the solve needs more than max_nfe = {work.limit:g} evaluations "
                                     f"({log.n_rejected} steps rejected)", advice=MORE)
        return quiet(self.f(z, l), self.real)

    def norm(self, x: State, z: State, z1: State) -> Tensor:
        """(rows,): the norm of x over the tolerance at z and z1; not finite where x or z1 is not."""
        solve, norms = self.solve, []
        for e, before, after, keep in zip(tensors(x), tensors(z), tensors(z1), self.real, strict=True):
            scale = torch.add(solve.atol, torch.maximum(before.abs(), after.abs()), alpha=solve.rtol)
            norms.append(row_rms(e / scale + (scale - scale), keep).double())  # scale - scale is 0, or NaN
        return reduce(torch.maximum, norms)


class _Solve:
    """One piece: the rows are tried together, each with its own step, and leave when they reach the end."""

    def __init__(self, solver: PerSample, piece: Piece, real: list, rtol: float, atol: float, log: Log):
        self.solver, self.piece, self.real, self.log = solver, piece, real, log
        self.rtol, self.atol = rtol, torch.tensor(atol, dtype=torch.float64)  # so that one operation takes both
        self.batch: Batch | None = None

    def run(self, z: State, save_at: list[float], h: np.ndarray | None) -> tuple[State, list[State], np.ndarray]:
        """The state at the end, states at save_at, and the step sizes (in depth) to go on with."""
        self.clock = Clock(self.piece, depth_dtype(z), self.piece.f.work)
        self.view = _View(self, None)
        self.zero = z.new_zeros(()) if isinstance(z, Tensor) else tuple(x.new_zeros(()) for x in z)
        batch = self._begin(z, h)
        ticks = [self.clock.time(l) for l in save_at]
        self.ticks, saves = self.clock.ticks(ticks, tensors(z)[0].device), Saves(ticks, batch)
        h, done, left = np.empty_like(batch.h), [], len(batch.index)
        while left:
            batch = self._try(batch, saves)
            running = batch.t < self.clock.stop
            left = np.count_nonzero(running)
            if left == 0 or (left < len(running) and self.solver.compact):
                ended = np.flatnonzero(~running)
                done.append((batch.index[ended], take(batch.z, on_device(ended, z))))
                h[batch.index] = batch.h
                if left:
                    batch = batch.take(np.flatnonzero(running))
                    self.view = _View(self, on_device(batch.index, z))
        return in_order(done), saves.states(), h * self.clock.unit

    def _begin(self, z: State, h: np.ndarray | None) -> Batch:
        """All rows at the start of the piece, with their first steps."""
        clock, n = self.clock, len(tensors(z)[0])
        start = np.full(n, clock.start)
        self.batch = batch = Batch(z, z, np.arange(n), start, np.full(n, math.nan), np.ones(n), np.zeros(n, bool))
        t = on_device(start, z)
        k, length = self.view(z, self.depth(t, z)), clock.stop - clock.start
        if share := bad_share(k, self.view.real):
            raise self.failure(f"f is not finite at the start of the piece ({share:.1%} of its entries)",
                               advice="check the weights and the input")

        def probe(h: Tensor) -> State:
            return self.view(add(z, clock.sign, times(columns(h, z), k)), self.depth(t + h, z))

        if h is None:
            with torch.no_grad():
                h = on_host(starting_step(lambda x: self.view.norm(x, z, z), probe, z, k, length,
                                          error_order(self.solver.tableau)))
        else:
            h = h / clock.unit
        return batch._replace(k=k, h=np.maximum(h, np.minimum(2 * clock.floor(start), length)))

    def depth(self, t: Tensor, z: State) -> Tensor:
        """What f is called with at these times of the rows."""
        return column(self.clock.argument(t), z)

    def _try(self, batch: Batch, saves: Saves) -> Batch:
        """One trial step of every row; those that pass advance."""
        solver, clock, self.batch = self.solver, self.clock, batch
        left, h = clock.stop - batch.t, np.minimum(batch.h, solver.max_step / clock.unit)
        last = left <= h
        used = np.where(last, left, np.minimum(h, left / 2))  # no sliver at the end
        t1 = np.where(last, clock.stop, batch.t + used)
        trial = self._step(batch, used, t1)
        error = self._error(batch, trial)
        accept = error <= 1.0
        moved, z, k = accept & (used > 0.0), trial.z, trial.k
        if np.count_nonzero(moved) < len(moved):
            self._reject(batch, accept, used)
            if any(x.requires_grad for x in tensors(z)) and np.isinf(error).any():
                # a row that hit NaN would put NaN into the gradient of its neighbours: keep it out of the graph
                trial = self._step(batch, np.where(accept, used, 0.0), np.where(accept, t1, batch.t))
            new = column(on_device(moved, z), z)
            z, k = choose(new, trial.z, batch.z), choose(new, trial.k, batch.k)
        self.log.parts.append((batch.index, used * clock.scale, error))
        saves.add(batch, trial, accept, self.between)
        grown = used * solver.factor(error, batch.error, batch.retry)
        grown = np.where(accept & (used < h), np.maximum(h, grown), grown)
        return Batch(z, k, batch.index, np.where(accept, t1, batch.t), grown, np.where(accept, error, batch.error),
                      ~accept)

    def _step(self, batch: Batch, h: np.ndarray, t1: np.ndarray) -> Trial:
        plan = on_device(np.array(self.plan(batch.t, h, t1)), batch.z, self.clock.dtype)
        return Trial(h, t1, *self.step(self.view, batch.z, batch.k, plan))

    def plan(self, t: Any, h: Any, t1: Any) -> list:
        """Of steps from t to t1 the sizes h, signed as depth runs, and the depths of all stages but the first; arrays
        or tensors."""
        clock = self.clock
        return [clock.sign * h, *(clock.local(t1 if c == 1 else t + c * h) for c, _ in self.solver._stages)]

    def step(self, view: _View, z: State, k: State, plan: Tensor) -> tuple[State, State, list[State]]:
        """The states after steps of that plan, f there, and h times the increments of all stages."""
        h, y = columns(plan[0], z), z
        ks = [times(h, k)]
        for l, (_, terms) in zip(column(plan[1:], z).unbind(), self.solver._stages, strict=True):
            y = accumulate(z, 1.0, terms, ks)
            k = view(y, l)
            ks.append(times(h, k))
        return y, k, ks

    def _error(self, batch: Batch, trial: Trial) -> np.ndarray:
        with torch.no_grad():
            error = accumulate(self.zero, 1.0, self.solver._error, trial.ks)
            error = np.fmin(on_host(self.view.norm(error, batch.z, trial.z)), np.inf)
        error[trial.h == 0.0] = 0.0  # rows that have ended and must stay
        return error

    def _reject(self, batch: Batch, accept: np.ndarray, used: np.ndarray) -> None:
        self.log.n_rejected += int(np.count_nonzero(~accept))
        stuck = ~accept & (used <= self.clock.floor(batch.t))
        if stuck.any():
            self.batch = batch._replace(h=used)
            raise self.failure("the step size fell below what l can resolve", int(stuck.argmax()))

    def failure(self, what: str, row: int | None = None, advice: str = ADVICE) -> SolverError:
        """A SolverError for a row under way (the one with the smallest step); it blames f where f is noisy."""
        batch, f = self.batch, self.view.f
        probe = Evaluator(f.f, Work(), f.dtypes)
        if row is None:
            row = int(batch.h.argmin())
        noisy = is_noisy(lambda: probe(batch.z, self.depth(on_device(batch.t, batch.z), batch.z)))
        l, h = self.clock.depth(batch.t[row]), float(batch.h[row]) * self.clock.scale
        return SolverError(f"{what} in row {batch.index[row]}", l=l, h=h, nfe=f.work.total,
                           advice=NOISY if noisy else advice)

    def between(self, batch: Batch, trial: Trial, rows: np.ndarray, which: np.ndarray) -> State:
        """The states of some rows (numbers may repeat) at self.ticks[which], inside the step."""
        tableau, there, t = self.solver.tableau, on_device(rows, batch.z), on_device(batch.t, batch.z)
        at, old = self.ticks[on_device(which, batch.z)], t[there]
        if interpolates(tableau):
            z, z1, *ks = (take(x, there) for x in (batch.z, trial.z, *trial.ks))
            middle = middle_weights(tableau)
            mid = None if middle is None else combine(z, 1.0, middle, ks)
            x = (at - old) / on_device(trial.h[rows], z)
            return polynomial(z, z1, ks[0], ks[-1], mid, column(x, z))
        if self.solver.compact:
            view = _View(self, on_device(batch.index[rows], batch.z))
            return self.step(view, take(batch.z, there), take(batch.k, there), self._stacked(old, at))[0]
        parts = []
        for i in np.unique(which):  # all rows must be there: the others take a step of 0
            hit = np.flatnonzero(which == i)
            there = on_device(rows[hit], batch.z)
            plan = self._stacked(t, t.index_put((there,), self.ticks[i]))
            parts.append((hit, take(self.step(self.view, batch.z, batch.k, plan)[0], there)))
        return in_order(parts)

    def _stacked(self, t: Tensor, t1: Tensor) -> Tensor:
        return torch.stack(self.plan(t, t1 - t, t1)).to(self.clock.dtype)


def _count_rows(z: State) -> int:
    shapes = [tuple(x.shape) for x in tensors(z)]
    if any(not shape or shape[0] != shapes[0][0] or len(shape) != len(shapes[0]) for shape in shapes):
        raise ValueError(f"a per-sample solve needs a first axis of rows, and as many axes in every tensor of a tuple "
                         f"state; got {shapes}")
    return shapes[0][0]


def _restrict(f: VectorField, index: Tensor) -> VectorField:
    """f for some rows: what its ``select`` returns, f itself where it has none."""
    if isinstance(f, Rescaled):
        return Rescaled(_restrict(f.f, index), f.a, f.b)
    select = getattr(f, "select", None)
    return f if select is None else select(index)


def _terms(weights: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The weights that are not 0, each with its place."""
    return tuple((i, w) for i, w in enumerate(weights) if w)
