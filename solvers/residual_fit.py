"""Fitting a hypersolver: its correction learns the residuals of a fine solve (Poli et al. 2020, residual fitting)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.base import HALF, Solver, State, VectorField, Work, cast, depth_dtype, tensors
from solvers.checks import check_state
from solvers.grid import make_pieces, place, read_grid, read_span, uniform
from solvers.hypersolver import Corrected, Correction, Hypersolver, as_base, check_positive, clock, moved
from solvers.march import make_legs, take

Samples = Sequence[tuple[VectorField, State]]


@dataclass(frozen=True)
class Fit:
    """How a fit went. ``base_error``, ``error``: local error of a step (root mean square over entries) of the base
    method and of the fitted one, on states that were held out. ``losses``: mean square of R - g over that of R, update
    by update. ``n_rows``, ``n_held_out``: rows learned from, and held out."""

    base_error: float
    error: float
    losses: tuple[float, ...]
    n_rows: int
    n_held_out: int


class Rows(NamedTuple):
    """States, ψ and residuals, (n, d) each; the depth (n,) and the step size (n, 1) of each row."""

    z: Tensor
    slope: Tensor
    residual: Tensor
    l: Tensor
    h: Tensor

    def pick(self, index: Any) -> Rows:
        """Some of them."""
        return Rows(*(x[index] for x in self))


def fit_hypersolver(solver: Corrected | Hypersolver, samples: Samples, *, span: tuple[float, float] = (0.0, 1.0),
                    n_steps: int | Sequence[int] | None = None, grid: Sequence[float] | None = None,
                    fine: str | Solver = "rk4", substeps: int = 10, updates: int = 1000, batch_size: int = 512,
                    learning_rate: float = 1e-2, seed: int = 0, progress: bool = True) -> Fit:
    """Train g on the residuals R = (z(l + h) - z - h ψ) / h^(p+1) of a fine solve (Poli et al. 2020, residual fitting).

    ``samples``: pairs (f, z0); every f is left as it is. A ``fine`` method takes ``substeps`` steps in each of the
    ``n_steps`` over the span (several numbers: h is learned, too) or of those of a ``grid``, R is measured along its
    course, and Adam minimises the mean square of R - g over what the first four fifths of each sample's rows gave. The
    last fifth is held out.

    R is a small difference divided by a power of h: in float32 rounding blurs it for a base of order 2 or more and many
    steps; measure it on float64 states and fields then.

    Raises ValueError: f = 0 or too few rows, residuals that are 0 or not finite, numbers that are not positive ints,
    n_steps and grid both or neither.
    """
    method = solver.method if isinstance(solver, Hypersolver) else solver
    if (n_steps is None) == (grid is None):
        raise ValueError(f"one of n_steps and grid must be given, got {n_steps} and {grid}")
    counts = [] if n_steps is None else [n_steps] if isinstance(n_steps, int) else list(n_steps)
    for name, value in (*(("n_steps", n) for n in counts), ("substeps", substeps), ("updates", updates),
                        ("batch_size", batch_size)):
        check_positive(name, value)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate!r}")
    amounts = [(n, None) for n in counts] if grid is None else [(None, read_grid(grid))]
    span, fine = read_span(span if grid is None else (amounts[0][1][0], amounts[0][1][-1])), as_base(fine)
    with torch.no_grad():
        parts = [halves(part) for f, z0 in samples for amount in amounts
                 for part in transitions(method, f, z0, span, amount, fine, substeps)]
        if not parts:
            raise ValueError("samples must hold at least one pair (f, z0), got none")
        train, held_out = (Rows(*map(torch.cat, zip(*side, strict=True))) for side in zip(*parts, strict=True))
        check_rows(train, held_out, method.order, max(torch.finfo(depth_dtype(z0)).eps for _, z0 in samples))
    losses = train_correction(method.correction, train, updates, batch_size, learning_rate, seed, progress)
    with torch.no_grad():
        power = held_out.h ** (method.order + 1)
        errors = [(power * (held_out.residual - g)).square().mean().sqrt().item()
                  for g in (0.0, _outputs(method.correction, held_out))]
    return Fit(*errors, losses, len(train.z), len(held_out.z))


def transitions(method: Corrected, f: VectorField, z0: State, span: tuple[float, float],
                amount: tuple[int | None, list[float] | None], fine: Solver, substeps: int) -> Iterator[Rows]:
    """The rows of each step along a fine solve."""
    dtypes = check_state(z0)
    half = any(dtype in HALF for dtype in dtypes)
    z = cast(z0, [torch.float32 if d in HALF else d for d in dtypes]) if half else z0
    pieces = make_pieces(f, span, span, None, Work(), dtypes if half else None)
    placed = place(pieces, *amount)
    refined = [[points[0], *(x for a, b in pairwise(points) for x in uniform(a, b, substeps)[1:])] for points in placed]
    between, memory = iter(make_legs(pieces, refined, fine.nodes, (), z)), None
    for leg in make_legs(pieces, placed, method.nodes, (), z):
        start, (l, h) = z, clock(leg.piece.f, leg.step, method.nodes)
        coarse, _ = method.base.step(leg.piece.f, start, leg.step, method.base.init(None))
        for _ in range(substeps):
            z, memory, _ = take(fine.step, fine, next(between), z, memory)
        for before, after, true in zip(*map(tensors, (start, coarse, z)), strict=True):
            yield as_rows(method, before, (after - before) / h, (true - after) / h ** (method.order + 1), l, h)


def as_rows(method: Corrected, z: Tensor, slope: Tensor, residual: Tensor, l: Tensor, h: float) -> Rows:
    """The rows that f moves, in the precision of the correction's parameters."""
    g = method.correction
    keep = moved(slope).squeeze(-1) if slope.dim() else moved(slope)
    z, slope, residual = (g.rows(x[keep]).reshape(-1, g.size or 1).to(g.out) for x in (z, slope, residual))
    return Rows(z, slope, residual, l.to(g.out).expand(len(z)), z.new_full((len(z), 1), h))


def halves(rows: Rows) -> tuple[Rows, Rows]:
    """The first four fifths, and the rest."""
    n = len(rows.z) - len(rows.z) // 5
    return rows.pick(slice(n)), rows.pick(slice(n, None))


def check_rows(train: Rows, held_out: Rows, order: int, eps: float) -> None:
    """Raises ValueError for residuals from which nothing can be learned; ``eps``: the resolution of the states."""
    if not len(held_out.z):
        raise ValueError(f"samples must give at least five rows that f moves in a step, to learn from four and hold "
                         f"out one; got {len(train.z)} in all")
    if not torch.isfinite(train.residual).all():
        raise ValueError("the residuals are not finite: take more n_steps, more substeps, or another fine method")
    error = (train.residual * train.h ** (order + 1)).abs().max()
    if error <= 8 * eps * train.z.abs().max():
        raise ValueError(f"the base method errs by no more than rounding ({error.item():.1g}), and there is nothing to "
                         "learn")


def train_correction(g: Correction, rows: Rows, updates: int, batch_size: int, learning_rate: float, seed: int,
                     progress: bool) -> tuple[float, ...]:
    """Adam on the mean square of R - g over that of R; the step of the optimizer falls to 0 along a half cosine.

    Columns are scaled to a root mean square of 1 meanwhile, and the weights with them.
    """
    from tqdm import tqdm

    sizes = [x.square().mean(0).sqrt() for x in (rows.z, rows.slope)]
    sizes = [torch.where(size > 0, size, 1) for size in sizes]
    unit = rows.residual.square().mean().sqrt()
    scaled = rows._replace(z=rows.z / sizes[0], slope=rows.slope / sizes[1], residual=rows.residual / unit)
    if g.out.any():  # learn on from where it is; a fresh one has its hidden weights drawn for scaled columns
        g.rescale(*sizes, unit)
    optimizer = torch.optim.Adam(g.parameters(), lr=learning_rate)
    generator, losses = torch.Generator().manual_seed(seed), []
    try:
        with torch.enable_grad(), tqdm(range(updates), desc="fit hypersolver", disable=not progress) as bar:
            for update in bar:
                batch = scaled
                if len(rows.z) > batch_size:
                    index = torch.randint(len(rows.z), (batch_size,), generator=generator, device="cpu")
                    batch = scaled.pick(index.to(rows.z.device))
                optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * update / updates)) / 2
                loss = (batch.residual - _outputs(g, batch)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    finally:
        g.rescale(*(1 / size for size in sizes), 1 / unit)
        optimizer.zero_grad()
    return tuple(torch.stack(losses).tolist())


def _outputs(g: Correction, rows: Rows) -> Tensor:
    return g(rows.z, rows.slope, rows.l, rows.h)
