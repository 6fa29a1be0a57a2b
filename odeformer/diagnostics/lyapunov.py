"""Finite-time Lyapunov exponents along depth: how fast small differences of states grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.flow import cuts, fixed_solver, refined, stretch
from odeformer.diagnostics.linearize import SPARE, elementary
from odeformer.diagnostics.trajectory import MAX_BYTES, Trajectory, bar, check_bytes
from odeformer.tables import at_least
from solvers import get_solver

Maps = list[Callable[[Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Lyapunov:
    """``exponents`` (batch, n), or (batch, tokens, n) by token, unit 1 / l, nan where there is no such direction;
    ``growth`` (intervals, *exponents): log growth in each interval between ``depths``, whose sum over the length of
    depth is the exponents."""

    depths: tuple[float, ...]
    exponents: Tensor
    growth: Tensor


def lyapunov(source: Any, n: int = 4, *, solver: Any = None, n_steps: int = 4, sweeps: int = 0, by_token: bool = False,
             start: Tensor | None = None, vectorize: bool = True, max_bytes: int = MAX_BYTES, progress: bool = False,
             seed: int = 0) -> Lyapunov:
    """The exponents of n directions, which are carried along the trajectory and made orthonormal after each of its
    intervals: the mean of log R_ii of these QR decompositions (Benettin et al. 1980; Shimada & Nagashima 1979).

    ``solver`` None: of the flow of f, by rk4 with ``n_steps`` steps in an interval. A fixed-step solver (the model's:
    ``model.solver``): of what that solver makes of it, one step in an interval, the layers as the network has them; one
    with a memory starts anew in each. A discrete step h of a mode λ counts log |R(h λ)| / h, the flow Re λ.

    Over a finite depth exponents depend on the first directions. ``start`` (n, *state) gives them; random by ``seed``
    otherwise. ``sweeps``: so often they go forward and, by the adjoint, back (subspace iteration): they turn to those
    that grow most over the whole depth, and the exponents to log σ_i / depth, σ_i the largest singular values of the
    Jacobian of final by first states.

    ``by_token``: the first directions are within one token, for each token: how what begins there grows in the whole
    row. That takes tokens times the work.

    Columns go through f together, by torch.vmap as many as fit into max_bytes; one by one where ``vectorize`` is False.
    Raises ValueError, with the number of bytes, where the directions do not fit.
    """
    at_least("n", n, 1)
    at_least("n_steps", n_steps, 1)
    at_least("sweeps", sweeps, 0)
    run = Trajectory.of(source)
    z = run.states[0]
    groups = z.shape[1] if by_token else 1
    check_bytes(3 * groups * n * z.numel() * z.element_size(), max_bytes, f"{groups * n} directions of {z.numel()} "
                "numbers and their copies", "pass fewer rows, a smaller n or by_token=False")
    chunk = max(1, max_bytes // (SPARE * z.numel() * z.element_size())) if vectorize else 1
    maps = _maps(run, solver, n_steps)
    v, _ = _orthonormal(_start(run, n, by_token, start, seed), z)
    total = len(maps) * (2 * sweeps + 1)
    ticks = iter(bar(range(total), progress, "Lyapunov"))  # it ends, and the bar with it, at the last one
    for _ in range(sweeps):
        for push, state in zip(maps, run.states, strict=False):
            next(ticks)
            v, _ = _orthonormal(_forward(push, state, v, chunk), z)
        for push, state in zip(reversed(maps), run.states[:-1].flip(0), strict=True):
            next(ticks)
            v, _ = _orthonormal(_backward(push, state, v), z)
        v = _within(v, run, by_token)
    growth = []
    for push, state in zip(maps, run.states, strict=False):
        next(ticks)
        v, r = _orthonormal(_forward(push, state, v, chunk), z)
        growth.append(r.diagonal(dim1=-2, dim2=-1).abs().double().log())
    next(ticks, None)
    growth = _there(torch.stack(growth).transpose(1, 2), run, by_token)
    return Lyapunov(run.depths, growth.sum(0) / (run.depths[-1] - run.depths[0]), growth)


def _maps(run: Trajectory, solver: Any, n_steps: int) -> Maps:
    """The map of each interval of the trajectory."""
    method, n = (get_solver("rk4"), n_steps) if solver is None else (fixed_solver(solver, run.f), 1)
    return [stretch(run, refined(cuts(run.f, a, b), n), method, run.mask)
            for a, b in pairwise(run.depths)]


def _start(run: Trajectory, n: int, by_token: bool, start: Tensor | None, seed: int) -> Tensor:
    """First directions (groups, n, batch, tokens, d_model), 0 at padding."""
    z = run.states[0]
    groups = z.shape[1] if by_token else 1
    if start is not None:
        if start.shape != (n, *z.shape) or by_token:
            raise ValueError(f"start must have the shape (n, batch, tokens, d_model) = {(n, *z.shape)}, without "
                             f"by_token; got {tuple(start.shape)}")
        return run.real(start.to(z), 0.0).unsqueeze(0)
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(groups, n, *z.shape, generator=generator, dtype=torch.float64).to(z)
    return _within(run.real(v, 0.0), run, by_token)


def _within(v: Tensor, run: Trajectory, by_token: bool) -> Tensor:
    """Directions of each group within its token."""
    if not by_token:
        return v
    tokens = v.shape[-2]
    return v * torch.eye(tokens, dtype=v.dtype, device=v.device).view(tokens, 1, 1, tokens, 1)


def _orthonormal(v: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Q, shaped like v (groups, n, batch, tokens, d_model), and R (groups, batch, n, n)."""
    columns = v.flatten(3).permute(0, 2, 3, 1)
    width = min(columns.shape[-2:])
    q, r = torch.linalg.qr(columns)
    if width < v.shape[1]:
        q = torch.nn.functional.pad(q, (0, v.shape[1] - width))
        r = torch.nn.functional.pad(r, (0, 0, 0, v.shape[1] - width))
    return q.permute(0, 3, 1, 2).reshape(v.shape), r


def _forward(push: Callable, z: Tensor, v: Tensor, chunk: int) -> Tensor:
    """DΦ(z) v for all columns."""
    columns = v.flatten(0, 1)

    def one(x: Tensor) -> Tensor:
        return torch.func.jvp(push, (z,), (x,))[1]

    with elementary(), torch.enable_grad():
        if chunk == 1:
            moved = torch.stack([one(x).detach() for x in columns])
        else:
            moved = torch.cat([torch.func.vmap(one)(x).detach() for x in columns.split(chunk)])
    return moved.view_as(v)


def _backward(push: Callable, z: Tensor, v: Tensor) -> Tensor:
    """DΦ(z)^T v for all columns."""
    with elementary(), torch.enable_grad():
        z = z.clone().requires_grad_()
        end = push(z)
        back = [torch.autograd.grad(end, z, x, retain_graph=True)[0] for x in v.flatten(0, 1)]
    return torch.stack(back).view_as(v)


def _there(x: Tensor, run: Trajectory, by_token: bool) -> Tensor:
    """x (intervals, batch, groups, n) as (intervals, batch[, tokens], n), nan where a row has no such direction."""
    width = run.states.shape[3]
    dims = run.n_tokens * width if not by_token else torch.full_like(run.n_tokens, width)
    exists = torch.arange(x.shape[-1], device=x.device) < dims.view(-1, 1)
    x = torch.where(exists.unsqueeze(1), x, torch.nan)
    if not by_token:
        return x.squeeze(2)
    return x if run.mask is None else x.masked_fill(~run.mask.unsqueeze(-1), torch.nan)
