"""States whose first axis is rows, each with numbers of its own (step sizes, fractions of a step)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solvers.base import State


def column(values: Tensor, like: Tensor) -> Tensor:
    """(rows,) as (rows, 1, ..., 1)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def combine(z: State, h: Tensor, weights: Sequence[float], ks: Sequence[State]) -> State:
    """z + h Σ w_i k_i with a step size for each row."""
    if isinstance(z, tuple):
        return tuple(combine(x, h, weights, k) for x, *k in zip(z, *ks, strict=True))
    h = column(h.to(z.dtype), z)
    for w, k in zip(weights, ks, strict=True):
        if w:
            z = torch.addcmul(z, h, k, value=w)
    return z


def polynomial(z0: State, z1: State, k0: State, k1: State, mid: State | None, h: Tensor, x: Tensor) -> State:
    """The cubic Hermite polynomial of a step at the fraction x, or the quartic through ``mid`` at x = 1/2."""
    if isinstance(z0, tuple):
        mids = [None] * len(z0) if mid is None else mid
        return tuple(polynomial(*parts, h, x) for parts in zip(z0, z1, k0, k1, mids, strict=True))
    h, x = (column(v.to(z0.dtype), z0) for v in (h, x))
    d, k0, k1 = z1 - z0, h * k0, h * k1
    if mid is None:
        return z0 + x * (k0 + x * (3 * d - 2 * k0 - k1 + x * (k0 + k1 - 2 * d)))
    m = 16 * (mid - z0)
    return z0 + x * (k0 + x * (k1 - 4 * k0 - 5 * d + m + x * (
        5 * k0 - 3 * k1 + 14 * d - 2 * m + x * (2 * (k1 - k0) - 8 * d + m))))


def choose(rows: Tensor, new: State, old: State) -> State:
    """new in these rows, old in the others."""
    if isinstance(new, tuple):
        return tuple(choose(rows, x, y) for x, y in zip(new, old, strict=True))
    return torch.where(column(rows, new), new, old)


def take(x: State, rows: Tensor) -> State:
    """These rows (a bool or an index tensor)."""
    return tuple(y[rows] for y in x) if isinstance(x, tuple) else x[rows]


def join(parts: Sequence[State]) -> State:
    """The rows of all parts, one after the other."""
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return torch.cat(tuple(parts))
