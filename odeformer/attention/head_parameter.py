"""A number for each head, kept in its range: fixed, learned, or predicted for each query by a small network.

``head_parameter("sigma", 4.0, "learned", n_heads, head_dim)`` gives a module; called with the queries (batch, n_heads,
queries, head_dim) it returns what broadcasts to (batch, n_heads, queries, keys).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from odeformer.attention.pairs import fine
from odeformer.tables import look_up


class Range(NamedTuple):
    """Numbers between low and high; a fixed one may be at the ends where ``closed``.

    ``squash`` takes any real number inside, ``stretch`` is its inverse.
    """

    low: float
    high: float
    closed: bool
    squash: Callable[[Tensor], Tensor]
    stretch: Callable[[Tensor], Tensor]

    def check(self, name: str, values: Sequence[float], mode: str) -> None:
        """Raises TypeError or ValueError unless all values are numbers that the range has in that mode."""
        ends = self.closed and mode == "fixed"
        allowed = f"{'[' if ends else '('}{self.low:g}, {self.high:g}{']' if ends and self.high < math.inf else ')'}"
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, or one for each head, got {value!r}")
            inside = self.low < value < self.high or (ends and value in (self.low, self.high))
            if not inside or not math.isfinite(value):
                raise ValueError(f"{name} must be in {allowed} where {name}_mode is {mode!r}, got {value}")


RANGES = {
    "gamma": Range(0.0, math.inf, True, torch.exp, torch.log),
    "sigma": Range(0.0, math.inf, False, torch.exp, torch.log),
    "beta": Range(0.0, 1.0, True, torch.sigmoid, torch.logit),
}


class HeadNetwork(nn.Module):
    """w^T tanh(W q + b): a number for each query (Luong et al. 2015, eq. 9); the weights are those of all heads."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.hidden = nn.Linear(head_dim, head_dim)
        self.last = nn.Linear(head_dim, 1, bias=False)

    def forward(self, source: Tensor) -> Tensor:
        """(..., head_dim) -> (..., 1), at least float32."""
        x = self.last(torch.tanh(self.hidden(source)))
        return x.to(fine(x.dtype))


class Fixed(nn.Module):
    """The values given: a plain number where all heads have the same, which no change of dtype touches."""

    def __init__(self, start: Tensor, allowed: Range, head_dim: int):
        super().__init__()
        same = bool((start == start[0]).all())
        self.number = float(start[0]) if same else None
        self.register_buffer("value", None if same else start)

    def forward(self, source: Tensor) -> float | Tensor:
        """A number, or (1, n_heads, 1, 1)."""
        if self.number is not None:
            return self.number
        return self.value.to(fine(source.dtype)).view(1, -1, 1, 1)


class Learned(nn.Module):
    """squash(raw), with a parameter raw for each head; at the start the values given."""

    def __init__(self, start: Tensor, allowed: Range, head_dim: int):
        super().__init__()
        self.squash = allowed.squash
        self.raw = nn.Parameter(allowed.stretch(start).to(torch.get_default_dtype()))

    def forward(self, source: Tensor) -> Tensor:
        """(1, n_heads, 1, 1)."""
        return self.squash(self.raw.to(fine(self.raw.dtype)).view(1, -1, 1, 1))


class Predicted(Learned):
    """squash(raw + network(query)): another value for each query, around learned ones."""

    def __init__(self, start: Tensor, allowed: Range, head_dim: int):
        super().__init__(start, allowed, head_dim)
        self.network = HeadNetwork(head_dim)

    def forward(self, source: Tensor) -> Tensor:
        """(batch, n_heads, queries, 1)."""
        return self.squash(self.raw.to(fine(self.raw.dtype)).view(1, -1, 1, 1) + self.network(source))


MODES = {
    "fixed": Fixed,
    "learned": Learned,
    "predicted": Predicted,
}


def head_parameter(name: str, value: float | Sequence[float], mode: str, n_heads: int, head_dim: int) -> nn.Module:
    """The module for ``value``, one number for all heads or a sequence with one for each.

    ``name``: a key of RANGES. Raises ValueError for a value outside the range, a sequence of another length and an
    unknown mode; TypeError for what is no number.
    """
    kind = look_up(MODES, mode, f"{name}_mode")
    values = list(value) if isinstance(value, list | tuple) else [value] * n_heads
    if len(values) != n_heads:
        raise ValueError(f"{name} must have one value for each of n_heads = {n_heads}, got {len(values)}")
    RANGES[name].check(name, values, mode)
    return kind(torch.tensor(values, dtype=torch.float64), RANGES[name], head_dim)
