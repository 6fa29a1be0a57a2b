"""Adaptive Runge-Kutta methods in which every row of a batch has its own depth and its own step size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.adaptive import Record
from solvers.base import Evaluator, SolverError, State, VectorField, Work, depth_dtype, tensors
from solvers.engine import interpolates, middle_weights
from solvers.grid import Piece, Rescaled
from solvers.rows import choose, column, combine, join, polynomial, take
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
    _rows: tuple = field(init=False, repr=False, compare=False)
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
        object.__setattr__(self, "_rows", tuple(zip(t.c, t.a, strict=True)))
        object.__setattr__(self, "_error", tuple(x - y for x, y in zip(t.b, t.b_hat, strict=True)))

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
        log = _Log()
        real = real_entries(z, mask)
        if share := bad_share(z, real):
            raise SolverError(f"z0 is not finite ({share:.1%} of its entries)", l=pieces[0].l0, h=math.nan,
                              nfe=work.total, advice="check the input and the embedding")
        z = quiet(z, real)
        h = None if self.first_step is None else torch.full((n,), self.first_step, dtype=torch.float64,
                                                            device=tensors(z)[0].device)
        saved: list[State] = []
        for piece in pieces:
            last = piece is pieces[-1]
            sign = math.copysign(1.0, piece.l1 - piece.l0)
            mine = [l for l in save_at[len(saved):] if sign * (piece.l1 - l) > 0 or last]
            z, states, h = _Solve(self, piece, real, rtol, atol, log).run(z, mine, h)
            saved += states
        return z, Record(saved, *log.lists(n), log.n_rejected)

    def factor(self, error: Tensor, before: Tensor, retry: Tensor) -> Tensor:
        """By what step sizes change after scaled errors; ``before``: of the last accepted step; ``retry``: where the
        trial before was rejected.
        """
        k = error_order(self.tableau)
        ratio = error.clamp(min=1e-10)
        grown = self.safety * ratio ** (-(1 - 0.75 * self.beta) / k) * before.clamp(min=1e-4) ** (self.beta / k)
        grown = grown.clamp(self.min_factor, self.max_factor)
        grown = torch.where(retry, grown.clamp(max=1.0), grown)
        shrunk = (self.safety * ratio ** (-1 / k)).clamp(min=self.min_factor)
        return torch.where(error <= 1, grown, shrunk)


class _Batch(NamedTuple):
    """The rows under way: their numbers, states, increments, times, and the step sizes to try."""

    index: Tensor
    z: State
    k: State
    t: Tensor
    h: Tensor
    error: Tensor
    retry: Tensor

    def take(self, rows: Tensor) -> _Batch:
        """These rows only (a bool or an index tensor)."""
        return _Batch(*(take(x, rows) for x in self))


class _Log:
    """Accepted steps and errors, on the device until the solve is over; trial steps in vain."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.n_rejected = 0

    def add(self, index: Tensor, h: Tensor, error: Tensor) -> None:
        """A step of each of these rows."""
        self.parts.append((index, h, error))

    def lists(self, n_rows: int) -> tuple[list[list[float]], list[list[float]]]:
        """Steps and errors of each row."""
        steps: list[list[float]] = [[] for _ in range(n_rows)]
        errors: list[list[float]] = [[] for _ in range(n_rows)]
        columns = (torch.cat(column).tolist() for column in zip(*self.parts, strict=True))
        for row, h, error in zip(*columns, strict=True):
            steps[row].append(h)
            errors[row].append(error)
        return steps, errors


class _View:
    """The field of a piece, with the padding, for some of the rows; it counts, and stops at max_nfe."""

    def __init__(self, solve: _Solve, index: Tensor | None):
        f, self.solve, self.real = solve.piece.f, solve, solve.real
        if index is not None:
            f = Evaluator(_restrict(f.f, index), f.work, f.dtypes, f.weight)
            self.real = [None if keep is None else keep[index] for keep in solve.real]
        self.f = f

    def __call__(self, z: State, t: Tensor) -> State:
        work, clock = self.f.work, self.solve.clock
        if work.nfe + self.f.weight > work.limit + 1e-6:
            log = self.solve.log
            raise self.solve.failure(f"the solve needs more than max_nfe = {work.limit:g} evaluations "
                                     f"({log.n_rejected} steps rejected)", advice=MORE)
        k = quiet(self.f(z, column(clock.argument(t), tensors(z)[0])), self.real)
        ks = []
        for x, y in zip(tensors(z), tensors(k), strict=True):
            if y.is_complex() and not x.is_complex():
                raise TypeError(f"f must return a real increment for a real state, got {y.dtype} for {x.dtype}")
            ks.append((y if clock.sign > 0 else -y).to(x.dtype))
        return ks[0] if isinstance(z, Tensor) else tuple(ks)

    def norm(self, x: State, z: State, z1: State) -> Tensor:
        """(rows,): the norm of x over the tolerance at z and z1; infinite where x or z1 is not finite."""
        solve, norms = self.solve, []
        for e, before, after, keep in zip(tensors(x), tensors(z), tensors(z1), self.real, strict=True):
            rms = row_rms(e / (solve.atol + solve.rtol * torch.maximum(before.abs(), after.abs())), keep).double()
            finite = torch.isfinite(after) if keep is None else torch.isfinite(after) | ~keep
            norms.append(torch.where(finite.view(len(rms), -1).all(1), rms, math.inf))
        return torch.nan_to_num(torch.stack(norms).amax(0), nan=math.inf, posinf=math.inf)


class _Solve:
    """One piece: the rows are tried together, each with its own step, and leave when they reach the end."""

    def __init__(self, solver: PerSample, piece: Piece, real: list, rtol: float, atol: float, log: _Log):
        self.solver, self.piece, self.real, self.log = solver, piece, real, log
        self.rtol, self.atol = rtol, atol
        self.batch: _Batch | None = None

    def run(self, z: State, save_at: list[float], h: Tensor | None) -> tuple[State, list[State], Tensor]:
        """The state at the end, states at save_at, and the step sizes (in depth) to go on with."""
        self.clock = Clock(self.piece, depth_dtype(z), self.piece.f.work)
        self.view = _View(self, None)
        batch = self._begin(z, h)
        saves = _Saves(self.clock, [self.clock.time(l) for l in save_at], batch)
        done: list[_Batch] = []
        while len(batch.index):
            batch = self._try(batch, saves)
            running = batch.t < self.clock.stop
            left = int(running.sum())
            if left == 0 or (left < len(running) and self.solver.compact):
                done.append(batch.take(~running))
                batch = batch.take(running)
                self.view = _View(self, batch.index)
        whole = _Batch(*map(join, zip(*done, strict=True)))
        whole = whole.take(whole.index.argsort())
        return whole.z, saves.states(), whole.h * self.clock.unit

    def _begin(self, z: State, h: Tensor | None) -> _Batch:
        """All rows at the start of the piece, with their first steps."""
        x, clock = tensors(z)[0], self.clock
        index = torch.arange(len(x), device=x.device)
        t = torch.full((len(x),), clock.start, dtype=torch.float64, device=x.device)
        self.batch = batch = _Batch(index, z, z, t, torch.full_like(t, math.nan), torch.ones_like(t), t != t)
        k, length = self.view(z, t), clock.stop - clock.start
        if share := bad_share(k, self.view.real):
            raise self.failure(f"f is not finite at the start of the piece ({share:.1%} of its entries)",
                               advice="check the weights and the input")
        if h is None:
            with torch.no_grad():
                h = starting_step(lambda x: self.view.norm(x, z, z),
                                  lambda h: self.view(combine(z, h, (1.0,), (k,)), t + h), z, k, length,
                                  error_order(self.solver.tableau))
        else:
            h = h / clock.unit
        least = (2 * clock.floor(t)).clamp(max=length)
        return batch._replace(k=k, h=torch.maximum(h, least))

    def _try(self, batch: _Batch, saves: _Saves) -> _Batch:
        """One trial step of every row; those that pass advance."""
        solver, clock, self.batch = self.solver, self.clock, batch
        left, h = clock.stop - batch.t, batch.h.clamp(max=solver.max_step / clock.unit)
        used = torch.where(left <= h, left, torch.where(left < 2 * h, left / 2, h))  # no sliver at the end
        t1 = torch.where(left <= h, clock.stop, batch.t + used)
        z1, ks = self.step(self.view, batch, used, t1)
        running = left > 0
        error = torch.where(running, self._error(batch, z1, ks, used), 0.0)
        accept = error <= 1
        advance = bool(accept.all())
        if not advance:
            self._reject(batch, accept, used)
            if any(x.requires_grad for x in tensors(z1)) and bool(torch.isinf(error).any()):
                # a row that hit NaN would put NaN into the gradient of its neighbours: keep it out of the graph
                t1 = torch.where(accept, t1, batch.t)
                z1, ks = self.step(self.view, batch, torch.where(accept, used, 0.0), t1)
        moved = accept & running
        taken = batch.index, used * clock.scale, error
        self.log.add(*(taken if advance and solver.compact else (x[moved] for x in taken)))
        saves.add(self, batch, z1, ks, used, t1, moved)
        factor = solver.factor(error, batch.error, batch.retry)
        grown = torch.where(accept & (used < h), torch.maximum(h, used * factor), used * factor)
        z, k = (z1, ks[-1]) if advance else (choose(accept, z1, batch.z), choose(accept, ks[-1], batch.k))
        return _Batch(batch.index, z, k, torch.where(accept, t1, batch.t), torch.where(running, grown, batch.h),
                      torch.where(moved, error, batch.error), ~accept)

    def step(self, view: _View, batch: _Batch, h: Tensor, t1: Tensor) -> tuple[State, list[State]]:
        """The states after steps of h, which end at t1, and all increments, f at the end included."""
        ks, y = [batch.k], batch.z
        for c, row in self.solver._rows[1:]:
            y = combine(batch.z, h, row, ks)
            ks.append(view(y, t1 if c == 1 else batch.t + c * h))
        return y, ks

    def _error(self, batch: _Batch, z1: State, ks: list[State], h: Tensor) -> Tensor:
        with torch.no_grad():
            zero = tuple(map(torch.zeros_like, batch.z)) if isinstance(z1, tuple) else torch.zeros_like(z1)
            return self.view.norm(combine(zero, h, self.solver._error, ks), batch.z, z1)

    def _reject(self, batch: _Batch, accept: Tensor, used: Tensor) -> None:
        self.log.n_rejected += int((~accept).sum())
        stuck = ~accept & (used <= self.clock.floor(batch.t))
        if bool(stuck.any()):
            self.batch = batch._replace(h=used)
            raise self.failure("the step size fell below what l can resolve", stuck.nonzero()[0].item())

    def failure(self, what: str, row: int | None = None, advice: str = ADVICE) -> SolverError:
        """A SolverError for a row under way (the one with the smallest step); it blames f where f is noisy."""
        batch, f = self.batch, self.view.f
        probe = Evaluator(f.f, Work(), f.dtypes)
        if row is None:
            row = int(batch.h.argmin())
        noisy = is_noisy(lambda: probe(batch.z, column(self.clock.argument(batch.t), tensors(batch.z)[0])))
        l, h = self.clock.depth(batch.t[row]), float(batch.h[row]) * self.clock.scale
        return SolverError(f"{what} in row {batch.index[row].item()}", l=l, h=h, nfe=f.work.total,
                           advice=NOISY if noisy else advice)

    def between(self, batch: _Batch, z1: State, ks: list[State], h: Tensor, rows: Tensor, times: Tensor,
                which: Tensor) -> State:
        """The states of some rows (numbers may repeat) at times[which], inside the step."""
        tableau, at = self.solver.tableau, times[which]
        if interpolates(tableau):
            old, new, ks, h = batch.take(rows), take(z1, rows), [take(k, rows) for k in ks], h[rows]
            middle = middle_weights(tableau)
            mid = None if middle is None else combine(old.z, h, middle, ks)
            return polynomial(old.z, new, ks[0], ks[-1], mid, h, (at - old.t) / h)
        if self.solver.compact:
            old = batch.take(rows)
            return self.step(_View(self, old.index), old, at - old.t, at)[0]
        states, order = [], []
        for i in which.unique().tolist():  # all rows must be there: the others take a step of 0
            hit = which == i
            there = torch.zeros_like(batch.retry)
            there[rows[hit]] = True
            t1 = torch.where(there, times[i], batch.t)
            states.append(take(self.step(self.view, batch, t1 - batch.t, t1)[0], rows[hit]))
            order.append(hit.nonzero()[:, 0])
        return take(join(states), torch.cat(order).argsort())


class _Saves:
    """The states at save_at, gathered as rows pass."""

    def __init__(self, clock: Clock, times: list[float], batch: _Batch):
        self.times = clock.ticks(times, batch.t.device)
        at_start = [time <= float(batch.t[0]) for time in times]
        self.parts: list[list] = [[(batch.index, batch.z)] if first else [] for first in at_start]

    def add(self, solve: _Solve, batch: _Batch, z1: State, ks: list[State], h: Tensor, t1: Tensor,
            moved: Tensor) -> None:
        """Keep what lies in the step from batch.t to t1 of the rows that moved."""
        if not self.parts:
            return
        inside = moved[:, None] & (batch.t[:, None] < self.times) & (self.times < t1[:, None])
        ends = moved[:, None] & (self.times == t1[:, None])
        self._keep(batch, ends, lambda rows, which: take(z1, rows))
        self._keep(batch, inside, lambda rows, which: solve.between(batch, z1, ks, h, rows, self.times, which))

    def _keep(self, batch: _Batch, hit: Tensor, states: Callable[[Tensor, Tensor], State]) -> None:
        rows, which = hit.nonzero(as_tuple=True)
        if len(rows):
            found = states(rows, which)
            for i in which.unique().tolist():
                self.parts[i].append((batch.index[rows[which == i]], take(found, which == i)))

    def states(self) -> list[State]:
        """One state a depth, rows in order."""
        return [take(join([z for _, z in parts]), torch.cat([index for index, _ in parts]).argsort())
                for parts in self.parts]


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
