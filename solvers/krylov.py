"""GMRES: linear systems from products with the matrix alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

KRYLOV_DIM = 30


def gmres(apply: Callable[[Tensor], Tensor], b: Tensor, *, tol: float, dim: int = KRYLOV_DIM,
          restarts: int = 1) -> tuple[Tensor, float]:
    """x with |b - A x| <= tol |b|, where ``apply(v)`` is A v (Saad & Schultz 1986), and the relative residual attained.

    At most ``dim`` products (and vectors kept) a cycle and ``restarts`` cycles; the residual returned is above tol
    where that was not enough, and NaN where a product was not finite.
    """
    size = b.norm().item()
    if size == 0 or not math.isfinite(size):
        return torch.zeros_like(b), 0.0 if size == 0 else math.nan
    x, left = _cycle(apply, b, tol * size, dim)
    for _ in range(restarts - 1):
        if not left > tol * size:
            break
        dx, left = _cycle(apply, b - apply(x), tol * size, dim)
        x = x + dx
    return x, left / size


def _cycle(apply: Callable[[Tensor], Tensor], b: Tensor, target: float, dim: int) -> tuple[Tensor, float]:
    """One cycle of GMRES from zero: Arnoldi with the Gram-Schmidt sweep done twice, Givens rotations on the host."""
    dim = min(dim, b.numel())
    left = b.norm().item()
    basis = b.new_empty(dim + 1, b.numel())
    basis[0] = b.flatten() / left
    rhs, columns, rotations = [left], [], []
    while len(columns) < dim and left > target:
        j = len(columns) + 1
        w = apply(basis[j - 1].view_as(b)).flatten()
        known = basis[:j]
        first = known @ w
        w = w - first @ known
        second = known @ w
        w = w - second @ known
        *column, below = torch.cat([first + second, w.norm().view(1)]).tolist()
        scale = math.hypot(*column, below)
        if not math.isfinite(scale):
            return torch.zeros_like(b), math.nan
        if below > torch.finfo(b.dtype).eps * scale:
            basis[j] = w / below
        else:
            below = 0.0  # the Krylov space is exhausted: the solution lies in it
        for k, (c, s) in enumerate(rotations):
            column[k], column[k + 1] = c * column[k] + s * column[k + 1], c * column[k + 1] - s * column[k]
        pivot = math.hypot(column[-1], below)
        if pivot <= torch.finfo(b.dtype).eps * scale:
            break  # A is singular on the space
        rotations.append((column[-1] / pivot, below / pivot))
        column[-1] = pivot
        columns.append(column)
        rhs[-1:] = [rotations[-1][0] * rhs[-1], -rotations[-1][1] * rhs[-1]]
        left = abs(rhs[-1])
        if below == 0:
            break
    weights: list[float] = []
    for i in reversed(range(len(columns))):  # back substitution
        known = sum(columns[j][i] * w for j, w in zip(reversed(range(len(columns))), weights, strict=False))
        weights.append((rhs[i] - known) / columns[i][i])
    x = torch.zeros_like(b).flatten()
    for i, w in enumerate(reversed(weights)):
        x = torch.add(x, basis[i], alpha=w)
    return x.view_as(b), left
