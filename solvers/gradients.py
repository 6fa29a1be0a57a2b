"""Gradient modes: how a solve is differentiated.

The modes of GRADIENTS wrap the step of a fixed-step solver, and autograd does the rest. The others (Halving and
Reversal here, the adjoints in solvers.adjoint) run the solve outside autograd and pull gradients back by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from solvers.base import Evaluator, Solver, SolverError, State, Step, Work, tensors
from solvers.checks import real
from solvers.grid import Piece
from solvers.march import Advance, Leg, take
from solvers.replay import Ambient, Captured, Recorded, Tape, leaves_of, parts_of, rebuilt

Grads = list[Tensor | None]


def backprop(solver: Solver) -> Advance:
    """Autograd through every operation: exact, memory grows with every evaluation."""
    return solver.step


def checkpoint(solver: Solver) -> Advance:
    """Each step is computed again in backward: exact, one state a step is kept; randomness is replayed."""

    def advance(f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        if not torch.is_grad_enabled():
            return solver.step(f, z, step, memory)
        taken = (z, step, memory)
        skeleton = rebuilt(taken, repeat(torch.empty(0)))  # so that nothing but autograd keeps the tensors

        def run(*parts: Tensor) -> tuple[State, Any]:
            return solver.step(f, *rebuilt(skeleton, iter(parts)))

        return recompute(run, *parts_of(taken), use_reentrant=False)

    return advance


def implicit(solver: Solver) -> Advance:
    """Implicit function theorem at the solution of each step: one evaluation a stage is kept, iterations are not."""
    return solver.implicit_step


GRADIENTS: dict[str, Callable[[Solver], Advance]] = {"backprop": backprop, "checkpoint": checkpoint,
                                                     "implicit": implicit}


@dataclass
class Report:
    """What a backward pass found out. ``reconstruction_error``: largest relative error of a state that was recomputed
    backwards, against the one that was kept."""

    reconstruction_error: float | None = None


class Whole:
    """A solve that runs outside autograd and pulls gradients back by itself, to z0 and all that f depends on.

    A subclass gives ``forward(z) -> (z, states, tensors to keep)`` and ``pull(kept, grads) -> grads of z0``, which adds
    the gradients of ``captured.inputs`` to ``self.grads``. Randomness and autocast are replayed.
    """

    mode: str

    def __init__(self, solver: Solver, pieces: Sequence[Piece], z: State, params: Sequence[Tensor] | None,
                 mask: Tensor | None, work: Work):
        self.solver, self.mask, self.work = solver, mask, work
        self.is_tuple = isinstance(z, tuple)
        self.ambient, self.tape = Ambient(z), Tape(z)
        ends = [x for piece in pieces if piece.rescaled for x in piece.ends
                if isinstance(x, Tensor) and x.requires_grad]
        if params is not None:
            params = [*(x for x in params if x.requires_grad), *ends]
        self.captured = Captured(self.mode, params)
        for method in (solver, getattr(solver, "base", None)):
            for x in method.parameters() if isinstance(method, nn.Module) else ():  # learned coefficients
                if x.requires_grad:
                    self.captured.add(x)
        self.report = Report()
        self.grads: Grads = []
        self.pieces = [self._record(piece) for piece in pieces]

    def _record(self, piece: Piece) -> Piece:
        f = piece.f
        found = list(range(len(self.captured.inputs)))
        return piece._replace(f=Evaluator(Recorded(f.f, self.tape, self.captured, found), f.work, f.dtypes, f.weight))

    def run(self, z0: State) -> tuple[State, list[State]]:
        """The final state and the saved ones, with gradients."""
        with torch.no_grad(), self.ambient.restored():
            z, states, kept = self.forward(rebuilt(z0, (x.detach() for x in tensors(z0))))
        self.tape.finish()
        outputs = _Pull.apply(self, kept, parts_of((z, states)), *tensors(z0), *self.captured.inputs)
        return rebuilt((z, states), iter(outputs))

    def forward(self, z: State) -> tuple[State, list[State], list[Tensor]]:
        raise NotImplementedError

    def pull(self, kept: Sequence[Tensor], grads: Grads) -> Grads:
        raise NotImplementedError

    def distance(self, z: State, true: State, other: State) -> Tensor:
        """Largest entry of z - true over the largest of true and other, padding apart: the worst tensor's."""
        ratios = []
        for x, y, w in zip(tensors(z), tensors(true), tensors(other), strict=True):
            size = torch.maximum(real(y, self.mask).abs().amax(), real(w, self.mask).abs().amax())
            ratios.append(real(x - y, self.mask).abs().amax() / size.clamp(min=torch.finfo(size.dtype).tiny))
        return torch.stack(ratios).amax()

    def add_grads(self, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add to the gradients of these inputs (in float32 where they are half precision)."""
        for i, g in zip(indices, grads, strict=True):
            if g is not None:
                g = g.to(torch.promote_types(g.dtype, torch.float32))
                self.grads[i] = g if self.grads[i] is None else self.grads[i] + g


class _Pull(torch.autograd.Function):
    """Stands for a whole solve in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, whole: Whole, kept: list[Tensor], outputs: list[Tensor],
                *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.whole, ctx.versions = whole, [x._version for x in whole.captured.inputs]
        ctx.anchors = inputs
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole: Whole = ctx.whole
        inputs = whole.captured.inputs
        if ctx.versions != [x._version for x in inputs]:
            raise RuntimeError("a tensor that f depends on was changed in place between the solve and backward()")
        whole.grads = [None] * len(inputs)
        with torch.no_grad(), whole.tape.aside(), whole.captured.separate():
            first = whole.pull(ctx.saved_tensors, list(grads))
        rest = [None if g is None else g.to(x.dtype) for g, x in zip(whole.grads, inputs, strict=True)]
        whole.grads = []
        result = [*first, *rest]
        if torch.is_grad_enabled():  # create_graph=True
            result = [None if g is None else _Once.apply(g, whole.mode, *ctx.anchors) for g in result]
        return (None, None, None, *result)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again: tied to what it was taken for, so that autograd comes by here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str, *anchors: Tensor) -> Tensor:
        ctx.mode = mode
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(f'gradient="{ctx.mode}" gives first derivatives only; take gradient="backprop" or '
                           '"checkpoint" for second ones')


class Span:
    """Which evaluations of f, by number, belong to a leg: ``start ... start + n_step`` the step's, the rest (for
    states between steps) up to ``stop``."""

    __slots__ = ("n_step", "start", "stop")

    def __init__(self, start: int, n_step: int, stop: int):
        self.start, self.n_step, self.stop = start, n_step, stop


class Stepwise(Whole):
    """A solve of fixed steps, pulled back a step at a time."""

    def __init__(self, solver: Solver, legs: Sequence[Leg], z: State, params: Sequence[Tensor] | None,
                 mask: Tensor | None, work: Work):
        pieces = list({id(leg.piece): leg.piece for leg in legs}.values())
        super().__init__(solver, pieces, z, params, mask, work)
        recorded = {id(old): new for old, new in zip(pieces, self.pieces, strict=True)}
        self.legs = [leg._replace(piece=recorded[id(leg.piece)]) for leg in legs]
        self.spans: list[Span] = []

    def take(self, leg: Leg, z: State, memory: Any) -> tuple[State, Any, list[State]]:
        """One leg of the forward solve, with its evaluations numbered."""
        start, counts = len(self.tape.marks), []

        def advance(*args: Any) -> tuple[State, Any]:
            result = self.solver.step(*args)
            counts.append(len(self.tape.marks) - start)
            return result

        result = take(advance, self.solver, leg, z, memory)
        self.spans.append(Span(start, counts[0], len(self.tape.marks)))
        return result

    def again(self, i: int, z: State, memory: Any) -> tuple[State, Any]:
        """Step i as it was, without a graph and without saved states."""
        leg, span = self.legs[i]._replace(wanted=[]), self.spans[i]
        with self.ambient.restored(), self.tape.replay(range(span.start, span.start + span.n_step)):
            return take(self.solver.step, self.solver, leg, z, memory)[:2]

    def pull_leg(self, i: int, z: State, memory: Any, to_state: Grads, to_memory: Grads | None,
                 to_saved: Grads) -> tuple[Grads, Grads]:
        """Gradients of the state and memory before leg i from those after it (None: none) and of its saved states."""
        leg, span = self.legs[i], self.spans[i]
        leaves, (z, memory) = leaves_of((z, memory))
        with torch.enable_grad(), self.ambient.restored(), self.tape.replay(range(span.start, span.stop)):
            after, left, saved = take(self.solver.step, self.solver, leg, z, memory)
        outputs = parts_of((after, left, saved))
        if to_memory is None:
            to_memory = [None] * len(parts_of(left))
        pairs = [(x, g) for x, g in zip(outputs, [*to_state, *to_memory, *to_saved], strict=True)
                 if g is not None and x.requires_grad]
        pulled: dict[int, Tensor | None] = {}
        if pairs:
            outputs, cotangents = map(list, zip(*pairs, strict=True))
            needed = self.captured.needed(outputs, leaves)
            wanted = [j for j, x in enumerate(leaves) if x.requires_grad]
            grads = torch.autograd.grad(
                outputs, [*(leaves[j] for j in wanted), *(self.captured.inputs[j] for j in needed)], cotangents,
                allow_unused=True, retain_graph=True)
            pulled = dict(zip(wanted, grads, strict=False))
            self.add_grads(needed, grads[len(wanted):])
        to_leaves = [pulled.get(j) for j in range(len(leaves))]
        return to_leaves[: len(to_state)], to_leaves[len(to_state):]

    def split(self, grads: Grads) -> tuple[Grads, list[Grads]]:
        """The gradients of the final state, and those of each leg's saved states."""
        per = len(grads) // (1 + sum(len(leg.wanted) for leg in self.legs))
        final, rest = grads[:per], iter(grads[per:])
        return final, [[next(rest) for _ in range(per * len(leg.wanted))] for leg in self.legs]


class Halving(Stepwise):
    """Recursive checkpointing: exact, and nothing but z0 is kept.

    Backward runs to the middle, pulls the second half back, then the first, each in the same way: about log2(n) states
    are held at a time, and n + (n / 2) log2(n) steps done again.
    """

    mode = "checkpoint_recursive"

    def forward(self, z: State) -> tuple[State, list[State], list[Tensor]]:
        kept, memory, states = parts_of(z), None, []
        for leg in self.legs:
            z, memory, saved = self.take(leg, z, memory)
            states += saved
        return z, states, kept

    def pull(self, kept: Sequence[Tensor], grads: Grads) -> Grads:
        z0 = tuple(kept) if self.is_tuple else kept[0]
        final, saved = self.split(grads)
        return self._pull(0, len(self.legs), z0, None, final, None, saved)[0]

    def _pull(self, start: int, stop: int, z: State, memory: Any, to_state: Grads, to_memory: Grads | None,
              saved: list[Grads]) -> tuple[Grads, Grads]:
        """Gradients of the state and memory before leg ``start`` from those after leg ``stop - 1``."""
        if stop - start == 1:
            return self.pull_leg(start, z, memory, to_state, to_memory, saved[start])
        middle = (start + stop) // 2
        z_middle, memory_middle = z, memory
        for i in range(start, middle):
            z_middle, memory_middle = self.again(i, z_middle, memory_middle)
        to_state, to_memory = self._pull(middle, stop, z_middle, memory_middle, to_state, to_memory, saved)
        del z_middle, memory_middle
        return self._pull(start, middle, z, memory, to_state, to_memory, saved)


class Reversal(Stepwise):
    """Backward reconstructs each state from the next: exact up to rounding, memory does not grow with the steps.

    The state and memory at the end are kept, and those at the end of a piece where the method starts afresh in the
    next. What comes back at each such point is compared with what was kept: the largest relative difference (largest
    entry over largest entry) goes to ``report``. Raises SolverError where it passes ``solver.reconstruction_bound``.
    """

    mode = "reversible"

    def forward(self, z: State) -> tuple[State, list[State], list[Tensor]]:
        z0, memory, states, restarts = z, None, [], {}
        for i, leg in enumerate(self.legs):
            if leg.starts and memory is not None and self.solver.init(memory) is not memory:
                restarts[i] = (z, memory)
            z, memory, saved = self.take(leg, z, memory)
            states += saved
        kept = (z0, list(restarts.values()), (z, memory))
        self.restarts, self.skeleton = list(restarts), rebuilt(kept, repeat(torch.empty(0)))
        return z, states, parts_of(kept)

    def pull(self, kept: Sequence[Tensor], grads: Grads) -> Grads:
        z0, restarts, (z, memory) = rebuilt(self.skeleton, iter(kept))
        known = {0: (z0, None)} | dict(zip(self.restarts, restarts, strict=True))
        to_state, saved = self.split(grads)
        to_memory, errors, end = None, [], z
        for i in reversed(range(len(self.legs))):
            z, memory = self._reverse(i, z, memory)
            if i in known:
                errors.append(self.distance(z, known[i][0], end))
                z, memory = known[i]
            to_state, to_memory = self.pull_leg(i, z, memory, to_state, to_memory, saved[i])
        self._judge(torch.stack(errors).amax().item())
        return to_state

    def _reverse(self, i: int, z: State, memory: Any) -> tuple[State, Any]:
        """The state and memory before step i; each evaluation of f with the random numbers it had."""
        leg, span = self.legs[i], self.spans[i]
        order = [span.start + j if j >= 0 else self.spans[i - 1].start + self.spans[i - 1].n_step + j
                 for j in self.solver.replay_order(span.n_step)]
        with self.ambient.restored(), self.tape.replay(order):
            return self.solver.reverse(leg.piece.f, z, leg.step, memory)

    def _judge(self, error: float) -> None:
        self.report.reconstruction_error = error
        bound, first = self.solver.reconstruction_bound, self.legs[0]
        if not error <= bound:
            raise SolverError(
                f"going back, {self.solver.name!r} missed the state it came from by {error:.2g} of its size (bound "
                f"{bound:g}), so gradients are wrong", l=first.l0, h=first.l1 - first.l0, nfe=self.work.total,
                advice='use a float64 state, fewer steps, a method that loses less, gradient="checkpoint", or raise '
                       "reconstruction_bound")
