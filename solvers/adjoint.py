"""The continuous adjoint: the gradient of the exact flow, by solving an ODE for it backwards (Chen et al. 2018).

With a = ∂L/∂z: da/dl = -(∂f/∂z)ᵀ a and dL/dθ = ∫ (∂f/∂θ)ᵀ a dl. The state is integrated backwards beside them, so
memory does not grow with the steps. The result is the gradient of the continuous problem: it differs from that of what
was computed by the error of the solve.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.base import Evaluator, Solver, SolverError, State, Work, depth_dtype, tensors
from solvers.gradients import Grads, Stepwise, Whole
from solvers.grid import Piece, make_steps
from solvers.march import Leg
from solvers.replay import leaves_of, parts_of

FINE = 1000  # steps a piece, to the power of the order, from which a fixed grid counts as fine


def warn_if_coarse(solver: Solver, placed: Sequence[Sequence[float]]) -> None:
    """Warn where a piece has fewer than 1000^(1 / order) steps: 1000 of order 1, 32 of order 2, 10 of 3, 6 of 4."""
    n_steps, order = min(len(points) - 1 for points in placed), max(solver.order, 1)
    if n_steps**order < FINE:
        warnings.warn(
            'gradient="adjoint" gives the gradient of the continuous problem, not of what was computed: on a grid as '
            f"coarse as {n_steps} steps of {solver.name!r} a piece they may differ by percents. "
            'gradient="checkpoint" gives the exact one', UserWarning, stacklevel=3)


class Stretch(NamedTuple):
    """A piece as the adjoint walks it: its depth points, and which saved states give a gradient at some of them."""

    piece: Piece
    points: list[float]
    saved: dict[float, list[int]]


def make_stretches(pieces: Sequence[Piece], placed: Sequence[Sequence[float]], wanted: Sequence[float], grads: Grads,
                   dtype: torch.dtype) -> list[Stretch]:
    """Stretches whose points include the depths of saved states (a grid point that l cannot tell from one serves).

    ``grads``: of the final state, then of the saved ones; those without are left out.
    """
    stretches, taken, count = [], 0, len(grads) // (1 + len(wanted))
    for piece, points in zip(pieces, placed, strict=True):
        sign = math.copysign(1.0, piece.l1 - piece.l0)
        near = max(1e-9 * abs(piece.l1 - piece.l0), 4 * torch.finfo(dtype).eps * max(abs(piece.l0), abs(piece.l1)))
        saved: dict[float, list[int]] = {}
        while taken < len(wanted) and sign * (wanted[taken] - piece.l1) <= near:
            l, taken = wanted[taken], taken + 1
            if any(g is not None for g in grads[taken * count : (taken + 1) * count]):
                at = min([*points, *saved], key=lambda x, l=l: abs(x - l))
                saved.setdefault(at if abs(at - l) <= near else l, []).append(taken - 1)
        stretches.append(Stretch(piece, sorted({*points, *saved}, reverse=sign < 0), saved))
    return stretches


class _Late(Exception):
    """f turned out to depend on more inputs than it had shown."""

    def __init__(self, indices: list[int]):
        self.indices = indices


class Augmented:
    """d(z, a, g)/dl = (f, -(∂f/∂z)ᵀ a, -(∂f/∂θ)ᵀ a) on the flat tuple (*z, *a, *g); g has a vector for each input θ."""

    def __init__(self, whole: Whole, f: Evaluator, indices: Sequence[int], part: bool = False):
        self.whole, self.f, self.indices = whole, f, indices
        parts = () if part or f.parts[0] is f else f.parts
        self.parts = tuple(Augmented(whole, f, indices, True) for f in parts) or None

    def __call__(self, state: tuple[Tensor, ...], l: Tensor) -> tuple[Tensor, ...]:
        whole, count = self.whole, (len(state) - len(self.indices)) // 2
        z, a = state[:count], state[count : 2 * count]
        leaves, z = leaves_of(z if whole.is_tuple else z[0])
        with torch.enable_grad(), whole.ambient.restored():
            ks = tensors(self.f(z, l))
        pairs = [(k, x.to(k.dtype)) for k, x in zip(ks, a, strict=True) if k.requires_grad]
        pulled: Sequence[Tensor | None] = [None] * (len(leaves) + len(self.indices))
        if pairs:
            outputs, cotangents = map(list, zip(*pairs, strict=True))
            if late := [i for i in whole.captured.needed(outputs, leaves) if i not in self.indices]:
                raise _Late(late)
            pulled = torch.autograd.grad(outputs, [*leaves, *(whole.captured.inputs[i] for i in self.indices)],
                                         cotangents, allow_unused=True, retain_graph=True)
        rest = [torch.zeros_like(x) if g is None else -g.reshape(x.shape).to(x.dtype)
                for x, g in zip(state[count:], pulled, strict=True)]
        return (*(k.detach() for k in ks), *rest)


# (stretch, depth points backwards, field, state) -> the state at the last of the points
Integrate = Callable[[Stretch, list[float], Augmented, tuple[Tensor, ...]], tuple[Tensor, ...]]


def pull_back(whole: Whole, stretches: Sequence[Stretch], starts: Sequence[State], end: State, grads: Grads,
              integrate: Integrate) -> Grads:
    """Gradients of z0 from those of the final state and the saved ones; ``starts``: the state where each piece begins.

    The adjoint is linear, so it is solved for gradients of size 1: tolerances then mean the same for them as for z.
    Raises SolverError where the state that comes back at the start of a piece is off by more than its size.
    """
    count = len(tensors(end))
    scale = torch.stack([g.abs().amax() for g in grads if g is not None]).amax()
    scale = torch.where(scale > 0, scale, 1.0)
    grads = [None if g is None else g / scale.to(g.abs().dtype) for g in grads]
    a = [torch.zeros_like(x) if g is None else g.to(x.dtype) for x, g in zip(tensors(end), grads, strict=False)]
    errors = []
    for stretch, start in zip(reversed(stretches), reversed(starts), strict=True):
        found = stretch.piece.f.f.found
        while True:
            try:
                z, a_start, g = _through(whole, stretch, tensors(end), a, grads[count:], found, integrate)
                break
            except _Late as late:
                found += late.indices
        whole.add_grads(found, [(x * scale.to(x.abs().dtype)).reshape(whole.captured.inputs[i].shape)
                                for i, x in zip(found, g, strict=True)])
        errors.append(whole.distance(z if whole.is_tuple else z[0], start, end))
        end, a = start, a_start
    error = whole.report.reconstruction_error = torch.stack(errors).amax().item()
    if not error <= 1:
        first = stretches[0].piece
        raise SolverError(f"going back, the state came out {error:.2g} times its size away from where it started, so "
                          "the adjoint is meaningless", l=first.l0, h=first.l1 - first.l0, nfe=whole.work.total,
                          advice='f contracts too strongly to be solved backwards: use gradient="checkpoint" or '
                                 '"backprop", more steps or tighter tolerances')
    return [x * scale.to(x.abs().dtype) for x in a]


def _through(whole: Whole, stretch: Stretch, z: Sequence[Tensor], a: Sequence[Tensor], to_saved: Grads,
             indices: Sequence[int], integrate: Integrate) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """(z, a, g) at the start of a stretch; a jumps where a state was saved."""
    inputs, count = [whole.captured.inputs[i] for i in indices], len(z)
    g = [torch.zeros(x.numel(), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in inputs]
    field, state, run = Augmented(whole, stretch.piece.f, indices), (*z, *a, *g), []
    for l in reversed(stretch.points):
        run.append(l)
        if l in stretch.saved or l == stretch.points[0]:
            if len(run) > 1:
                state = integrate(stretch, run, field, state)
            state = list(state)
            for number in stretch.saved.get(l, ()):
                for i, jump in enumerate(to_saved[number * count : (number + 1) * count], count):
                    state[i] = state[i] if jump is None else state[i] + jump
            state, run = tuple(state), [l]
    return state[:count], list(state[count : 2 * count]), list(state[2 * count :])


def _backwards(piece: Piece, run: list[float], field: Augmented) -> Piece:
    """The part of a piece that a run of depth points covers, in the units in which its field takes l."""
    nudge = (piece.nudge[1] and run[0] == piece.l1, piece.nudge[0] and run[-1] == piece.l0)
    return Piece(piece.local(run[0]), piece.local(run[-1]), Evaluator(field, Work()), nudge, False)


class FixedAdjoint(Stepwise):
    """The adjoint by the same method on the same grid, with depths of saved states added to it.

    The state where each piece begins is kept. Random numbers are those that the step had when it was taken.
    """

    mode = "adjoint"

    def forward(self, z: State) -> tuple[State, list[State], list[Tensor]]:
        memory, states, starts = None, [], []
        for leg in self.legs:
            if leg.starts:
                starts.append(z)
            z, memory, saved = self.take(leg, z, memory)
            states += saved
        return z, states, parts_of((starts, z))

    def pull(self, kept: Sequence[Tensor], grads: Grads) -> Grads:
        *starts, end = _states(kept, self.is_tuple, len(self.pieces) + 1)
        legs: dict[int, list[Leg]] = {}
        for leg in self.legs:
            legs.setdefault(id(leg.piece), []).append(leg)
        placed = [[legs[id(piece)][0].l0, *(leg.l1 for leg in legs[id(piece)])] for piece in self.pieces]
        wanted = [l for leg in self.legs for l in leg.wanted]
        self.dtype, self.device = depth_dtype(end), tensors(end)[0].device
        stretches = make_stretches(self.pieces, placed, wanted, grads, self.dtype)
        return pull_back(self, stretches, starts, end, grads, self._integrate)

    def _integrate(self, stretch: Stretch, run: list[float], field: Augmented,
                   state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        piece = _backwards(stretch.piece, run, field)
        steps = make_steps([piece], [[stretch.piece.local(l) for l in run]], self.solver.nodes, self.dtype,
                           self.device)[0]
        memory = self.solver.init(None)
        for step, l1, l0 in zip(steps, run, run[1:], strict=False):
            with self.tape.replay(self._mirrored((l0 + l1) / 2)):
                state, memory = self.solver.step(piece.f, state, step, memory)
        return state

    def _mirrored(self, l: float) -> Any:
        """The evaluations of the step that depth l lies in, last first."""
        if not self.tape.random:
            return ()
        sign = math.copysign(1.0, self.legs[0].l1 - self.legs[0].l0)
        span = self.spans[bisect_right(self.legs, sign * l, key=lambda leg: sign * leg.l0) - 1]
        return chain(reversed(range(span.start, span.start + span.n_step)), repeat(span.start))


class AdaptiveAdjoint(Whole):
    """The adjoint by the same adaptive method and tolerances, the state where each piece begins being kept.

    Raises ValueError for a field that draws random numbers anew at each evaluation: its adjoint is not defined.
    """

    mode = "adjoint"

    def __init__(self, solver: Solver, pieces: Sequence[Piece], z: State, params: Sequence[Tensor] | None,
                 mask: Tensor | None, work: Work, wanted: Sequence[float], rtol: float, atol: float):
        super().__init__(solver, pieces, z, params, mask, work)
        self.wanted, self.rtol, self.atol, self.limit = wanted, rtol, atol, work.limit

    def forward(self, z: State) -> tuple[State, list[State], list[Tensor]]:
        sign = math.copysign(1.0, self.pieces[0].l1 - self.pieces[0].l0)
        inner = [piece.l0 for piece in self.pieces[1:]]
        depths = sorted([*((l, True) for l in self.wanted), *((l, False) for l in inner)], key=lambda x: sign * x[0])
        end, self.record = self.solver.integrate(z, self.pieces, [l for l, _ in depths], rtol=self.rtol, atol=self.atol,
                                                 mask=self.mask, work=self.work)
        states = [x for x, (_, asked) in zip(self.record.states, depths, strict=True) if asked]
        starts = [z, *(x for x, (_, asked) in zip(self.record.states, depths, strict=True) if not asked)]
        firsts = [*(piece.f.f.first for piece in self.pieces), len(self.tape.marks)]
        if any(self.tape.redrawn(*ends) for ends in pairwise(firsts)):
            raise ValueError('gradient="adjoint" needs an f that is a function of z and l: draw its random numbers '
                             'once a solve, call eval(), or use gradient="backprop"')
        self.record = self.record._replace(states=[])
        return end, states, parts_of((starts, end))

    def pull(self, kept: Sequence[Tensor], grads: Grads) -> Grads:
        *starts, end = _states(kept, self.is_tuple, len(self.pieces) + 1)
        if not all(bool(torch.isfinite(g).all()) for g in grads if g is not None):  # a loss scale that was too large
            self.grads = [torch.full_like(x, math.nan) for x in self.captured.inputs]
            return [torch.full_like(x, math.nan) for x in tensors(end)]
        stretches = make_stretches(self.pieces, [(piece.l0, piece.l1) for piece in self.pieces], self.wanted, grads,
                                   depth_dtype(end))
        self.work.limit = self.work.nfe + self.limit
        try:
            return pull_back(self, stretches, starts, end, grads, self._integrate)
        finally:
            self.work.limit = math.inf

    def _integrate(self, stretch: Stretch, run: list[float], field: Augmented,
                   state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        solver = self.solver
        if solver.norm is not None:
            solver = replace(solver, norm=lambda x: self._norm(x, len(field.indices)))
        with self.tape.replay(repeat(stretch.piece.f.f.first)):
            return solver.integrate(state, [_backwards(stretch.piece, run, field)], (), rtol=self.rtol, atol=self.atol,
                                    mask=self.mask, work=self.work)[0]

    def _norm(self, state: tuple[Tensor, ...], n_inputs: int) -> Tensor:
        """The user's norm of z and of a, and the root mean square of each g: the largest."""
        count = (len(state) - n_inputs) // 2
        parts = [x if self.is_tuple else x[0] for x in (state[:count], state[count : 2 * count])]
        norms = [*map(self.solver.norm, parts), *(x.abs().square().mean().sqrt() for x in state[2 * count :])]
        return torch.stack([torch.as_tensor(x).double() for x in norms]).amax()


def _states(flat: Sequence[Tensor], is_tuple: bool, n: int) -> list[State]:
    """n states from their tensors."""
    count = len(flat) // n
    states = [tuple(flat[i * count : (i + 1) * count]) for i in range(n)]
    return states if is_tuple else [x[0] for x in states]
