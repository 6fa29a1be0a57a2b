"""Implicit Runge-Kutta methods: one step class over blocks of stages, one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.base import Evaluator, SolverError, State, Step, depth_dtype, tensors
from solvers.checks import refuse_transforms
from solvers.nonlinear import Nonlinear, check_count, check_fraction, get_nonlinear
from solvers.root import differentiable_root
from solvers.tableau import Tableau

ITERATED = "implicit solvers, which iterate until the values suffice"

Rows = Sequence[Sequence[float]]


class Flat:
    """A state as one real vector and back (complex entries count twice; a tuple is laid end to end)."""

    def __init__(self, z: State):
        self.like = tensors(z)
        self.is_tuple = isinstance(z, tuple)
        self.dtype = depth_dtype(z)
        self.shapes = [x.shape for x in map(_real, self.like)]
        self.sizes = [prod(shape) for shape in self.shapes]

    def pack(self, z: State) -> Tensor:
        """The vector (n,) of a state."""
        return torch.cat([_real(x.to(like.dtype)).reshape(-1).to(self.dtype)
                          for x, like in zip(tensors(z), self.like, strict=True)])

    def unpack(self, x: Tensor) -> State:
        """The state of a vector."""
        parts = []
        for part, shape, like in zip(x.split(self.sizes), self.shapes, self.like, strict=True):
            part = part.view(shape)
            parts.append((torch.view_as_complex(part) if like.is_complex() else part).to(like.dtype))
        return tuple(parts) if self.is_tuple else parts[0]

    def rows(self, x: Tensor) -> Tensor:
        """(s, n) -> (s, rows): the root mean square of each row (the first axis of a tensor with two or more axes)."""
        parts = []
        for part, like in zip(x.split(self.sizes, 1), self.like, strict=True):
            part = part.reshape(len(x), like.shape[0] if like.dim() > 1 else 1, -1)
            parts.append(part.square().mean(2).sqrt())
        return torch.cat(parts, 1)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


@dataclass(frozen=True, kw_only=True)
class Implicit:
    """What implicit methods share: how their nonlinear equations are solved, and how the solution is differentiated.

    ``nonlinear``: a name from NONLINEAR or an object. ``newton_krylov`` is the one for stiff problems; ``fixed_point``
    and ``anderson`` need h times the Lipschitz constant of f to be small, and then cost less. ``tol``: error allowed in
    the stages, relative to a row of the state (the root mean square over it; default: the resolution of f's arithmetic
    to the power 2/3, 3.7e-11 in float64, 2.4e-5 in float32). ``max_iterations``: of one solve.

    NFE depends on the values, so ``nfe`` is None. Each product of ∂f/∂z with a vector counts as one evaluation,
    those of the backward pass in ``nfe_backward``. The stages are solved outside autograd and differentiated by the
    implicit function theorem, to the tolerance ``tol``, for z, the parameters of f and whatever f closes over:
    memory does not grow with the iterations. ``gradient="implicit"`` records one evaluation a stage and gives first
    derivatives; ``"backprop"`` records two and gives second ones as well; a further derivative is an error. Where z
    does not require grad, an evaluation a stage is spent on finding out whether f does; under torch.no_grad() none is.

    Raises SolverError where a solve does not converge. f must not redraw its randomness between evaluations. The
    iterations are chosen by values: torch.func transforms and forward-mode derivatives are refused, and it is f that is
    worth compiling, not the solve.
    """

    nonlinear: str | Nonlinear = "newton_krylov"
    tol: float | None = None
    max_iterations: int = 50

    embedded_order = None
    is_implicit = True
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "implicit")
    nfe = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nonlinear", get_nonlinear(self.nonlinear))
        if self.tol is not None:
            check_fraction("tol", self.tol)
        check_count("max_iterations", self.max_iterations)

    def init(self, memory: None) -> None:
        """One-step methods remember nothing."""
        return None

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h, twice differentiable."""
        return self.advance(f, z, step, memory, 2)

    def implicit_step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h, once differentiable (``gradient="implicit"``)."""
        return self.advance(f, z, step, memory, 1)

    def advance(self, f: Evaluator, z: State, step: Step, memory: Any, orders: int) -> tuple[State, Any]:
        """The state at step.l + step.h, differentiable ``orders`` times."""
        raise NotImplementedError

    def solve_stages(self, f: Evaluator, flat: Flat, z: Tensor, step: Step, at: Sequence[Tensor], a: Rows,
                     base: Tensor, guess: Tensor, orders: int) -> Tensor:
        """The increments Z_i = base_i + h Σ_j a_ij f(z + Z_j, at_j), shape (s, n), found from ``guess``.

        z: the packed state (n,); base, guess: (s, n). ``orders`` derivatives are attached where anything in the
        equation requires grad (0: the result is constant).
        """
        refuse_transforms(z, ITERATED)
        g = _Stages(f, flat, z, step, at, a, base)
        tracked = orders > 0 and torch.is_grad_enabled() and (
            z.requires_grad or base.requires_grad or g(guess).requires_grad)
        tol = resolution(f, flat) ** (2 / 3) if self.tol is None else self.tol
        with torch.no_grad():
            root = self.nonlinear(g, guess.detach(), norm=g.norm, tol=tol, max_iterations=self.max_iterations,
                                  count=g.count)
        refuse_transforms(root.y, ITERATED)
        if not root.converged:
            raise g.error(f"{self.nonlinear.name} did not solve a stage (relative error {root.error:.2g} after "
                          f"{root.n_iterations} iterations, tol {tol:.2g})", _advice(self.nonlinear.name))
        if not tracked:
            return root.y
        return differentiable_root(g, root.y, orders=orders, tol=tol, count=g.count, fail=lambda left: g.error(
            f"GMRES did not solve the linear system of the gradient (relative residual {left:.2g}, tol {tol:.2g})",
            "take more steps or loosen tol"))


@dataclass(frozen=True, eq=False)
class _Stages:
    """The map Z -> base + h a f(z + Z, at) of ``solve_stages``, on (s, n)."""

    f: Evaluator
    flat: Flat
    z: Tensor
    step: Step
    at: Sequence[Tensor]
    a: Rows
    base: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        flat = self.flat
        ks = [flat.pack(self.f(flat.unpack(self.z + x), l)) for x, l in zip(y, self.at, strict=True)]
        return torch.stack([weighted(b, self.step.h, row, ks) for b, row in zip(self.base, self.a, strict=True)])

    def norm(self, change: Tensor, y: Tensor) -> float:
        """The size of a change relative to the state it is added to, in the row where it is largest."""
        part, whole = self.flat.rows(change), self.flat.rows(self.z[None]) + self.flat.rows(y)
        return torch.where(part == 0, part, part / whole).amax().item()

    def count(self) -> None:
        """One product with ∂f/∂z a stage, bounded as evaluations are."""
        work = self.f.work
        work.nfe += self.f.weight * len(self.a)
        if work.nfe > work.limit + 1e-6:
            work.nfe = work.limit
            raise self.error(f"the solve needs more than max_nfe = {work.limit:g} evaluations",
                             "raise max_nfe, take fewer steps, or loosen tol")

    def error(self, what: str, advice: str) -> SolverError:
        """A SolverError for the step under way."""
        return SolverError(what, l=self.step.l, h=self.step.h, nfe=self.f.work.total, advice=advice)


def _advice(name: str) -> str:
    other = 'nonlinear="newton_krylov", which does not need h times the Lipschitz constant of f to be small'
    return ("take more steps, raise max_iterations, loosen tol, or " +
            ("NewtonKrylov(krylov_dim=...) with more products an iteration" if name == "newton_krylov" else other))


def resolution(f: Evaluator, flat: Flat) -> float:
    """The relative resolution of the coarsest arithmetic that f runs in."""
    kinds = [x.dtype for x in flat.like] + list(f.dtypes or ())
    device = flat.like[0].device.type
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(kind).eps for kind in kinds)


def weighted(x: Tensor, h: float, weights: Sequence[float], ks: Sequence[Tensor]) -> Tensor:
    """x + h Σ w_i k_i, skipping zero weights."""
    for w, k in zip(weights, ks, strict=True):
        if w:
            x = torch.add(x, k, alpha=h * w)
    return x


class Block(NamedTuple):
    """Stages ``start`` to ``stop`` that depend on one another; ``inverse`` of their square of a, None if explicit."""

    start: int
    stop: int
    inverse: Rows | None


@dataclass(frozen=True)
class ImplicitRungeKutta(Implicit):
    """z' = z + h Σ b_i k_i with k_i = f(z + h Σ_j a_ij k_j, l + c_i h), a with entries on or above the diagonal.

    Stages are solved in the smallest blocks that do not depend on later ones: an explicit first stage is evaluated,
    a diagonally implicit method solves stage by stage, a full tableau all stages together. The unknowns are the
    increments Z_i = h Σ_j a_ij k_j; the k_i follow from them without another evaluation of f, which would multiply
    what error is left in Z_i by the stiffness (Hairer & Wanner 1996, IV.8).

    Raises ValueError: an explicit tableau, or a block whose square of a is singular.
    """

    tableau: Tableau
    name: str = "implicit_rk"
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _blocks: tuple[Block, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tableau, Tableau):
            raise TypeError(f"tableau must be a solvers.Tableau, got {type(self.tableau).__name__}")
        if self.tableau.is_explicit:
            raise ValueError("ImplicitRungeKutta needs a tableau with entries on or above the diagonal of a; this one "
                             "is explicit: use ExplicitRungeKutta")
        object.__setattr__(self, "nodes", tuple(sorted(set(self.tableau.c))))
        object.__setattr__(self, "_blocks", tuple(_blocks(self.tableau.a)))

    @property
    def order(self) -> int:
        """Order of the propagated solution."""
        return self.tableau.order

    @property
    def n_stages(self) -> int:
        """Rows of the tableau."""
        return self.tableau.n_stages

    def advance(self, f: Evaluator, z: State, step: Step, memory: None, orders: int) -> tuple[State, None]:
        """The state at step.l + step.h, differentiable ``orders`` times."""
        flat = Flat(z)
        x = flat.pack(z)
        at = [step.at[self.nodes.index(c)] for c in self.tableau.c]
        increments: list[Tensor] = []  # h k_i
        guess = torch.zeros_like(x)
        for start, stop, inverse in self._blocks:
            rows = self.tableau.a[start:stop]
            base = [weighted(torch.zeros_like(x), 1.0, row[:start], increments) for row in rows]
            if inverse is None:
                k = flat.pack(f(flat.unpack(x + base[0]), at[start]))
                increments.append(step.h * k)
                continue
            stages = self.solve_stages(f, flat, x, step, at[start:stop], [row[start:stop] for row in rows],
                                       torch.stack(base), guess.repeat(stop - start, 1), orders)
            guess = stages[-1]
            rests = [y - b for y, b in zip(stages, base, strict=True)]
            increments += [weighted(torch.zeros_like(x), 1.0, row, rests) for row in inverse]
        return flat.unpack(weighted(x, 1.0, self.tableau.b, increments)), None


def _blocks(a: Rows) -> Iterator[Block]:
    import numpy as np

    start = 0
    for stop in range(1, len(a) + 1):
        if any(x for row in a[:stop] for x in row[stop:]):
            continue
        square = np.array([row[start:stop] for row in a[start:stop]])
        if not square.any() and stop == start + 1:
            yield Block(start, stop, None)
        elif np.linalg.cond(square) > 1e12:
            raise ValueError(f"stages {start + 1} to {stop} depend on one another through a singular part of a, from "
                             "which their increments do not follow")
        else:
            yield Block(start, stop, tuple(map(tuple, np.linalg.inv(square).tolist())))
        start = stop


_half, _gamma = Fraction(1, 2), 1 - 1 / sqrt(2)
_r3, _r6, _r15 = sqrt(3), sqrt(6), sqrt(15)

TABLEAUS: dict[str, Tableau] = {
    # Euler; L-stable
    "backward_euler": Tableau([[1]], [1], c=[1], order=1),
    # Gauss-Legendre of one stage; A-stable, symplectic
    "implicit_midpoint": Tableau([[_half]], [1], c=[_half], order=2),
    # Crank & Nicolson 1947, Lobatto IIIA of two stages; A-stable
    "trapezoid": Tableau([[0, 0], [_half, _half]], [_half, _half], c=[0, 1], order=2),
    # Alexander 1977; L-stable, stiffly accurate
    "sdirk2": Tableau([[_gamma, 0], [1 - _gamma, _gamma]], [1 - _gamma, _gamma], c=[_gamma, 1], order=2),
    # Bank et al. 1985 as a Runge-Kutta method (Hosea & Shampine 1996); L-stable, stiffly accurate
    "tr_bdf2": Tableau([[0, 0, 0], [_gamma, _gamma, 0], [sqrt(2) / 4, sqrt(2) / 4, _gamma]],
                       [sqrt(2) / 4, sqrt(2) / 4, _gamma], c=[0, 2 * _gamma, 1], order=2),
    # Hammer & Hollingsworth 1955, Gauss-Legendre of two stages; A-stable, symplectic
    "gauss4": Tableau([[1 / 4, 1 / 4 - _r3 / 6], [1 / 4 + _r3 / 6, 1 / 4]], [1 / 2, 1 / 2],
                      c=[1 / 2 - _r3 / 6, 1 / 2 + _r3 / 6], order=4),
    # Kuntzmann 1961, Butcher 1964, Gauss-Legendre of three stages; A-stable, symplectic
    "gauss6": Tableau([[5 / 36, 2 / 9 - _r15 / 15, 5 / 36 - _r15 / 30],
                       [5 / 36 + _r15 / 24, 2 / 9, 5 / 36 - _r15 / 24],
                       [5 / 36 + _r15 / 30, 2 / 9 + _r15 / 15, 5 / 36]], [5 / 18, 4 / 9, 5 / 18],
                      c=[1 / 2 - _r15 / 10, 1 / 2, 1 / 2 + _r15 / 10], order=6),
    # Ehle 1969, Axelsson 1969, Radau IIA of two and three stages; L-stable, stiffly accurate
    "radau3": Tableau([[Fraction(5, 12), Fraction(-1, 12)], [Fraction(3, 4), Fraction(1, 4)]],
                      [Fraction(3, 4), Fraction(1, 4)], c=[Fraction(1, 3), 1], order=3),
    "radau5": Tableau([[(88 - 7 * _r6) / 360, (296 - 169 * _r6) / 1800, (-2 + 3 * _r6) / 225],
                       [(296 + 169 * _r6) / 1800, (88 + 7 * _r6) / 360, (-2 - 3 * _r6) / 225],
                       [(16 - _r6) / 36, (16 + _r6) / 36, 1 / 9]], [(16 - _r6) / 36, (16 + _r6) / 36, 1 / 9],
                      c=[(4 - _r6) / 10, (4 + _r6) / 10, 1], order=5),
}

METHODS: dict[str, ImplicitRungeKutta] = {name: ImplicitRungeKutta(tableau, name) for name, tableau in TABLEAUS.items()}
