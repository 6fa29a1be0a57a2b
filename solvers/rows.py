"""States whose first axis is rows, each with numbers of its own (step sizes, fractions of a step)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from solvers.base import State, in_functorch, tensors


def on_host(x: Tensor) -> np.ndarray:
    """x as an array; one inside a torch.func transform, which has no memory of its own, by way of a list."""
    return np.array(x.tolist()) if in_functorch() else x.cpu().numpy()


def on_device(x: np.ndarray, like: State, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of x where that state is, in this dtype or its own."""
    return torch.from_numpy(x).to(tensors(like)[0].device, dtype, non_blocking=True, copy=True)


def column(values: Tensor, like: State) -> Tensor:
    """(..., rows) as (..., rows, 1, ..., 1), broadcastable against the tensors of that state."""
    return values.view(*values.shape, *[1] * (tensors(like)[0].dim() - 1))


def columns(values: Tensor, like: State) -> State:
    """For each tensor of that state the values as a column in its dtype."""
    values = column(values, like)
    return tuple(values.to(x.dtype) for x in like) if isinstance(like, tuple) else values.to(like.dtype)


def times(h: State, k: State) -> State:
    """h k, tensor by tensor."""
    return tuple(map(torch.mul, h, k)) if isinstance(k, tuple) else h * k


def polynomial(z0: State, z1: State, k0: State, k1: State, mid: State | None, x: Tensor) -> State:
    """The cubic Hermite polynomial of a step at the fraction x, a column, or the quartic through ``mid`` at x = 1/2;
    ``k0`` and ``k1`` are h times the increments at its ends."""
    if isinstance(z0, tuple):
        mids = [None] * len(z0) if mid is None else mid
        return tuple(polynomial(*parts, x) for parts in zip(z0, z1, k0, k1, mids, strict=True))
    x, d = x.to(z0.dtype), z1 - z0
    if mid is None:
        return z0 + x * (k0 + x * (3 * d - 2 * k0 - k1 + x * (k0 + k1 - 2 * d)))
    m = 16 * (mid - z0)
    return z0 + x * (k0 + x * (k1 - 4 * k0 - 5 * d + m + x * (
        5 * k0 - 3 * k1 + 14 * d - 2 * m + x * (2 * (k1 - k0) - 8 * d + m))))


def choose(rows: Tensor, new: State, old: State) -> State:
    """new in these rows (bool, a column), old in the others."""
    if isinstance(new, tuple):
        return tuple(choose(rows, x, y) for x, y in zip(new, old, strict=True))
    return torch.where(rows, new, old)


def take(x: State, rows: Tensor) -> State:
    """These rows (an index tensor)."""
    return tuple(y[rows] for y in x) if isinstance(x, tuple) else x[rows]


def in_order(parts: Sequence[tuple[np.ndarray, State]]) -> State:
    """The rows of all parts, each given with their numbers, in the order of these."""
    numbers, states = zip(*parts, strict=True)
    whole = (tuple(map(torch.cat, zip(*states, strict=True))) if isinstance(states[0], tuple) else torch.cat(states))
    return take(whole, on_device(np.concatenate(numbers).argsort(), whole))
