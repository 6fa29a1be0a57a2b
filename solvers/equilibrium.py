"""Equilibria of a flow: the state z* with f(z*) = 0, to which dz/dl = f(z) settles, found without integrating to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.base import Evaluator, SolverError, State, Work, depth_dtype, tensors
from solvers.checks import refuse_transforms
from solvers.gradients import Report
from solvers.grid import Piece
from solvers.implicit import ITERATED, resolution
from solvers.nonlinear import check_count, check_fraction
from solvers.root import differentiable_root
from solvers.stepsize import NOISY, bad_share, is_noisy, quiet, real_entries

ADVICE = ("f may have no equilibrium, or z + h f(z) may not contract towards it: lower h, raise window or "
          "max_iterations, or loosen rtol and atol")
PATIENCE = 5  # plain steps that may make a row's residual grow, one after the other, at first; then twice as many
DOUBT = 5  # iterations for each of them for which plain steps are then left aside


@dataclass
class Residual(Report):
    """``residual``: the largest root mean square of f(z*) over a row."""

    residual: float | None = None


class Found(NamedTuple):
    """What the search leaves behind, besides the state (as solvers.adaptive.Record)."""

    states: list[State]
    steps: list[float]
    errors: list[float]
    n_rejected: int
    n_steps: int
    report: Residual


@dataclass(frozen=True)
class Equilibrium:
    """The equilibrium f(z*) = 0 of dz/dl = f(z) (Bai, Kolter & Koltun 2019), by Anderson acceleration.

    With increments k_i = f(z_i), differences ΔZ and ΔK of the last ``window`` iterates and increments, and γ that
    makes |k_i - ΔK γ| least: z_{i+1} = z_i + h k_i - (ΔZ + h ΔK) γ (Walker & Ni 2011, type II). ``window=0`` is Euler's
    method run to rest. ``h``: the pseudo-time step, which is the damping β of Walker & Ni for the map z + f(z).

    A row whose residual grows forgets its earlier iterates and takes a plain step z + h f(z) (a restart: Fang & Saad
    2009), which helps where the slope of f varies much; if plain steps, too, only make it grow, it goes on without
    restarts after them for a while.

    Every row (the first axis of a state with two or more axes) has a γ and an end of its own, so rows do not move each
    other: a row rests once the root mean square of f(z) over its real entries is at most atol + rtol times that of z.
    Padding keeps what z0 holds there (0 where that is not finite).

    f must be one piece and must not depend on l: ``span`` only says where it is evaluated, at its start in the search
    and once more at its end, where z* must be at rest, too. Where f has several equilibria z0 chooses among them;
    otherwise z* does not depend on z0, and neither do gradients, unless f holds the input.

    ``gradient``: "backprop", through all iterations: exact, memory grows with them. "implicit", that of the equilibrium
    by the implicit function theorem: (∂f/∂z)ᵀ v = -∂L/∂z* solved by GMRES to the relative residual ``gradient_tol``
    (default: the resolution of f's arithmetic to the power 2/3), products counted in ``nfe_backward``; one evaluation
    is kept. "jacobian_free": that of one iteration at z* (Fung et al. 2022), cheap and approximate.

    The Solution's ``n_steps`` counts iterations, ``errors`` holds for each the worst row's residual over its tolerance,
    ``residual`` is the last one, absolute; nfe = n_steps + 1. ``save_at`` takes the ends of the span (z0 and z*).

    Raises SolverError where ``max_iterations`` or max_nfe do not suffice, and what does not stay finite; ValueError for
    a field in pieces or that depends on l, a span that needs a gradient, and depths inside the span.
    """

    window: int = 5
    h: float = 1.0
    max_iterations: int = 300
    gradient_tol: float | None = None
    name: str = field(default="equilibrium", kw_only=True)

    order = 0  # it does not follow the solution over the span
    n_stages = 1
    embedded_order = None
    is_implicit = False
    is_adaptive = True
    is_reversible = False
    to_equilibrium = True
    gradients = ("backprop", "implicit", "jacobian_free")

    def __post_init__(self) -> None:
        if self.window != 0 or isinstance(self.window, bool):
            check_count("window (0: none)", self.window)
        check_count("max_iterations", self.max_iterations)
        if isinstance(self.h, bool) or not isinstance(self.h, int | float) or not 0 < self.h < math.inf:
            raise ValueError(f"h must be a finite number above 0, got {self.h!r}")
        if self.gradient_tol is not None:
            check_fraction("gradient_tol", self.gradient_tol)

    def integrate(self, z: State, pieces: Sequence[Piece], save_at: Sequence[float], *, rtol: float, atol: float,
                  mask: Tensor | None, work: Work, gradient: str = "backprop") -> tuple[State, Found]:
        """The equilibrium, and how it was found."""
        ends = self._check(pieces, save_at)
        for x in tensors(z):
            refuse_transforms(x, ITERATED)
        real = real_entries(z, mask)
        if share := bad_share(z, real):
            raise SolverError(f"z0 is not finite ({share:.1%} of its entries)", l=ends[0], h=self.h, nfe=work.total,
                              advice="check the input and the embedding")
        flow = _Flow(self, pieces[0], Rows(quiet(z, real), real), rtol, atol)
        start, attach = flow.rows.start, ATTACH[gradient]
        if attach is None or not torch.is_grad_enabled():
            x = flow.search(start, flow(start))
            attach = None
        else:
            first = flow(start.detach())
            with torch.no_grad():
                x = flow.search(start.detach(), first.detach())
            attach = attach if first.requires_grad else None
        if attach is None:
            with torch.no_grad():
                flow.settle(x)
        else:
            x = attach(flow, x)
        last = flow.rows.unpack(flow.rows.tie(x))
        states = [z if l == ends[0] else last for l in save_at]
        n = len(flow.errors)
        return last, Found(states, [self.h] * n, flow.errors, 0, n, Residual(residual=flow.residual))

    def _check(self, pieces: Sequence[Piece], save_at: Sequence[float]) -> tuple[float, float]:
        """The ends of the span. Raises ValueError for what has no equilibrium, or no state at these depths."""
        ends = pieces[0].l0, pieces[-1].l1
        if len(pieces) > 1:
            raise ValueError(f"solver {self.name!r} needs a field that is the same at every depth, or there is no "
                             f"equilibrium; this one has {len(pieces)} pieces")
        if pieces[0].rescaled:
            raise ValueError(f"span must not require grad with solver {self.name!r}: an equilibrium does not depend on "
                             "it; detach it")
        if inside := [l for l in save_at if l not in ends]:
            raise ValueError(f"save_at must hold only ends of the span with solver {self.name!r}, which knows z0 and "
                             f"the equilibrium and no state in between; got {inside}")
        return ends

    def mix(self, xs: Sequence[Tensor], ks: Sequence[Tensor], known: Tensor) -> Tensor:
        """The next iterate (rows, n) from the last ones and their increments, newest last; ``known`` (rows,): how many
        of the differences between them a row may use."""
        x, k = xs[-1], ks[-1]
        if len(xs) == 1:
            return torch.add(x, k, alpha=self.h)
        age = torch.arange(len(xs) - 2, -1, -1, device=x.device)
        used = (age < known[:, None])[:, :, None]
        dx, dk = (torch.stack([b - a for a, b in pairwise(y)], 1) * used for y in (xs, ks))
        size = dk.detach().square().sum(2, keepdim=True).sqrt()  # (rows, m, 1)
        size = torch.where(size > 0, size, 1)
        dx, dk = dx / size, dk / size
        with torch.autocast(x.device.type, enabled=False):
            gram = dk @ dk.mT  # of columns of length 1; a little on the diagonal where they are (nearly) dependent
            ridge = 10 * torch.finfo(gram.dtype).eps * torch.eye(len(gram[0]), dtype=gram.dtype, device=gram.device)
            gamma = torch.linalg.solve_ex(gram + ridge, dk @ k[:, :, None])[0]
            return torch.add(x, k, alpha=self.h) - (torch.add(dx, dk, alpha=self.h).mT @ gamma)[:, :, 0]


class Rows:
    """A state as a real matrix (rows, n) and back; ``keep``: which entries are no padding, None where all are.

    A row is an entry of the first axis of a state with two or more axes, else the whole state.
    """

    def __init__(self, z: State, real: Sequence[Tensor | None]):
        self.like = tensors(z)
        self.is_tuple = isinstance(z, tuple)
        self.dtype = depth_dtype(z)
        counts = {x.shape[0] if x.dim() > 1 else 1 for x in self.like}
        self.n_rows = counts.pop() if len(counts) == 1 else 1
        self.shapes = [_real(x).shape for x in self.like]
        self.start = self.pack(z)
        self.keep = None
        if any(keep is not None for keep in real):
            masks = [torch.ones(x.shape, dtype=torch.bool, device=x.device) if keep is None else keep.expand(x.shape)
                     for x, keep in zip(self.like, real, strict=True)]
            masks = [keep[..., None].expand(shape) if x.is_complex() else keep
                     for x, keep, shape in zip(self.like, masks, self.shapes, strict=True)]
            self.keep = torch.cat([keep.reshape(self.n_rows, -1) for keep in masks], 1)

    def pack(self, z: State) -> Tensor:
        """The matrix of a state."""
        return torch.cat([_real(x).reshape(self.n_rows, -1).to(self.dtype) for x in tensors(z)], 1)

    def unpack(self, x: Tensor) -> State:
        """The state of a matrix."""
        parts = []
        sizes = [shape.numel() // self.n_rows for shape in self.shapes]
        for part, shape, like in zip(x.split(sizes, 1), self.shapes, self.like, strict=True):
            part = part.reshape(shape)
            parts.append((torch.view_as_complex(part) if like.is_complex() else part).to(like.dtype))
        return tuple(parts) if self.is_tuple else parts[0]

    def rest(self, k: Tensor) -> Tensor:
        """Increments, 0 at padding."""
        return k if self.keep is None else torch.where(self.keep, k, 0)

    def hold(self, x: Tensor) -> Tensor:
        """x with padding that is constant, so that no gradient (NaN perhaps) comes from what f makes of it."""
        return x if self.keep is None else torch.where(self.keep, x, self.start.detach())

    def tie(self, x: Tensor) -> Tensor:
        """x with z0 at padding; where z0 needs a gradient it gets one, 0 elsewhere."""
        if self.keep is not None:
            return torch.where(self.keep, x, self.start)
        return x + 0 * self.start if self.start.requires_grad and torch.is_grad_enabled() else x

    def rms(self, x: Tensor) -> Tensor:
        """(rows,): the root mean square over a row's real entries."""
        square = self.rest(x.detach()).square().sum(1)
        return (square / (x.shape[1] if self.keep is None else self.keep.sum(1).clamp(min=1))).sqrt()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


class _Flow:
    """f on the matrix of a state, and the search for where it vanishes."""

    def __init__(self, solver: Equilibrium, piece: Piece, rows: Rows, rtol: float, atol: float):
        self.solver, self.piece, self.rows, self.rtol, self.atol = solver, piece, rows, rtol, atol
        self.f = piece.f
        self.at = torch.tensor(piece.inside(rows.dtype), dtype=rows.dtype, device=rows.start.device).unbind()
        self.errors: list[float] = []
        self.residual = math.nan

    def __call__(self, x: Tensor, end: bool = False) -> Tensor:
        """f(x), shape (rows, n), at the first depth of the span or at its end."""
        work = self.f.work
        if work.nfe + self.f.weight > work.limit + 1e-6:
            raise self.failure(x, f"the search for an equilibrium needs more than max_nfe = {work.limit:g} "
                                  f"evaluations, {self.left()}", "raise max_nfe; " + ADVICE)
        k = self.rows.rest(self.rows.pack(self.f(self.rows.unpack(self.rows.hold(x)), self.at[end])))
        refuse_transforms(k, ITERATED)
        return k

    def measure(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float, float]:
        """(rows,): the residual and its ratio to the tolerance; the largest ratio and residual (one host read)."""
        size = self.rows.rms(k)
        ratio = size / (self.atol + self.rtol * self.rows.rms(x))
        ratio = torch.where(size == 0, 0, ratio)  # at rest at 0 with atol = 0
        return size, ratio, *torch.stack([ratio.amax(), size.amax()]).tolist()

    def search(self, x: Tensor, k: Tensor) -> Tensor:
        """From x, where f is k, to where every row is at rest."""
        solver, xs, ks, memory = self.solver, [], [], _Memory(self.rows.rms(k))
        for _ in range(solver.max_iterations):
            size, ratio, error, self.residual = self.measure(x, k)
            self.errors.append(error)
            if error <= 1:
                return x
            if not math.isfinite(self.residual):
                raise self.failure(x, f"f has become infinite or NaN in iteration {len(self.errors)} of the search for "
                                      "an equilibrium", ADVICE)
            xs, ks = ([*old, new][-solver.window - 1 :] for old, new in ((xs, x), (ks, k)))
            if len(self.errors) == solver.max_iterations:
                break
            x = torch.where((ratio <= 1)[:, None], x, solver.mix(xs, ks, memory.known(size)))  # rows at rest stay there
            k = self(x)
        raise self.failure(x, f"no equilibrium found, {self.left()}", ADVICE)

    def settle(self, x: Tensor) -> Tensor:
        """f(x) at the end of the span. Raises ValueError, SolverError where x is not at rest there, too."""
        k = self(x, end=True)
        _, _, error, residual = self.measure(x, k)
        if not error <= max(1.0, 2 * self.errors[-1]):
            if self.noisy(x):
                raise self.failure(x, f"a second evaluation at the equilibrium found |f(z)| = {residual:.3g}", NOISY)
            raise ValueError(f"f must not depend on l for solver {self.solver.name!r}: where |f(z, l)| is "
                             f"{self.residual:.3g} at l = {self.piece.l0:g}, it is {residual:.3g} at l = "
                             f"{self.piece.l1:g}")
        return k

    def left(self) -> str:
        """How far the search has come."""
        if not self.errors:
            return "none made"
        return (f"|f(z)| = {self.residual:.3g} in the worst row, {self.errors[-1]:.3g} times the tolerance, after "
                f"{len(self.errors)} iterations")

    def count(self) -> None:
        """A product with ∂f/∂z in backward."""
        self.f.work.nfe += self.f.weight

    def noisy(self, x: Tensor) -> bool:
        """Whether f differs between two evaluations at x."""
        probe, x = Evaluator(self.f.f, Work(), self.f.dtypes), x.detach()
        return is_noisy(lambda: self.rows.rest(self.rows.pack(probe(self.rows.unpack(x), self.at[0]))))

    def failure(self, x: Tensor, what: str, advice: str) -> SolverError:
        """A SolverError; it blames f where f is not a function of the state."""
        return SolverError(what, l=self.piece.l0, h=self.solver.h, nfe=self.f.work.total,
                           advice=NOISY if self.noisy(x) else advice)


class _Memory:
    """How far back each row remembers: to its last restart (see Equilibrium). All tensors have the shape (rows,)."""

    def __init__(self, size: Tensor):
        """``size``: residuals at the start."""
        self.last = size
        self.n = torch.zeros_like(size, dtype=torch.long)  # differences since the last restart
        self.failed, self.doubt = self.n, self.n  # plain steps in vain; iterations for which they are not trusted
        self.patience = torch.full_like(self.n, PATIENCE)

    def known(self, size: Tensor) -> Tensor:
        """Differences to earlier iterates that a row may use, now that its residual is ``size``."""
        grew, plain = size > self.last, self.n <= 1
        self.failed = torch.where(grew, self.failed + plain, 0)
        lost = (self.failed >= self.patience) & (self.doubt == 0)
        self.doubt = torch.where(lost, DOUBT * self.patience, (self.doubt - 1).clamp(min=0))
        self.patience, self.failed = torch.where(lost, 2 * self.patience, self.patience), self.failed * ~lost
        n = torch.where(grew & ~(plain & (self.doubt > 0)), 0, self.n)
        self.last, self.n = size, n + 1
        return n


def _implicit(flow: _Flow, x: Tensor) -> Tensor:
    """x with the derivative of the root of x = x + f(x)."""
    rows, tol = flow.rows, flow.solver.gradient_tol
    tol = resolution(flow.f, rows) ** (2 / 3) if tol is None else tol

    def g(y: Tensor) -> Tensor:
        k = flow.settle(y)
        return rows.hold(y + k)

    return differentiable_root(g, x, orders=1, tol=tol, count=flow.count, fail=lambda left: flow.failure(
        x, f"GMRES did not solve the linear system of the gradient (relative residual {left:.2g}, tol {tol:.2g})",
        'the derivative of f may be singular at the equilibrium; raise gradient_tol, or use gradient="jacobian_free"'))


def _jacobian_free(flow: _Flow, x: Tensor) -> Tensor:
    """x with the derivative of x + h f(x) at constant x."""
    k = flow.settle(x)
    return x + flow.solver.h * (k - k.detach())


# how the modes attach the derivative to an equilibrium found outside autograd; None: the search is recorded
ATTACH: dict[str, Callable[[_Flow, Tensor], Tensor] | None] = {
    "backprop": None,
    "implicit": _implicit,
    "jacobian_free": _jacobian_free,
}

METHODS = {"equilibrium": Equilibrium()}
