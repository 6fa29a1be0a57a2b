"""Functions of depth of which weights are made: θ(l) = Σ φ_k(l) θ_k. ``BASES[name](size, length)`` over [0, length]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from odeformer.tables import at_least, finite


class Basis:
    """``size`` functions on [0, ``length``], called with l of any shape: (..., size), in l's dtype.

    ``nodes``: ``size`` depths at which values determine the coefficients. ``constant``: the coefficients of the
    function 1. ``kinks``: inner depths at which a derivative jumps. Beyond the ends functions go on as they are.
    """

    least = 1

    def __init__(self, size: int, length: float):
        at_least("n_knots", size, self.least)
        self.size, self.length = size, finite("length", length, above=0)

    kinks: tuple[float, ...] = ()

    @property
    def nodes(self) -> tuple[float, ...]:
        """Chebyshev points (of the first kind), from left to right."""
        angles = np.pi * (np.arange(self.size) + 0.5) / self.size
        return tuple((self.length * (1 - np.cos(angles)) / 2).tolist())

    @property
    def constant(self) -> tuple[float, ...]:
        """The first function is 1."""
        return (1.0, *(0.0,) * (self.size - 1))

    def __call__(self, l: Tensor) -> Tensor:
        raise NotImplementedError

    def at(self, depths: Sequence[float]) -> Tensor:
        """Values at depths, (depths, size) in float64."""
        return self(torch.tensor(depths, dtype=torch.float64))


class PiecewisePolynomial(Basis):
    """Polynomials between equally spaced depths, from a table (intervals, size, degree + 1) of their coefficients."""

    def __init__(self, size: int, length: float):
        super().__init__(size, length)
        self.table = torch.from_numpy(self.coefficients())
        self.kinks = tuple(self.length * j / self.n_intervals for j in range(1, self.n_intervals))
        self._tables: dict[tuple, Tensor] = {}

    @property
    def n_intervals(self) -> int:
        """How many stretches of depth have a polynomial of their own."""
        return len(self.table)

    @property
    def constant(self) -> tuple[float, ...]:
        """The functions add up to 1."""
        return (1.0,) * self.size

    def coefficients(self) -> np.ndarray:
        """The table; powers rise, and count intervals from the left end of theirs."""
        raise NotImplementedError

    def __call__(self, l: Tensor) -> Tensor:
        key = l.dtype, l.device
        if key not in self._tables:
            self._tables[key] = self.table.to(l.device, l.dtype)
        table = self._tables[key]
        s = l * (self.n_intervals / self.length)
        interval = s.detach().floor().clamp(0, self.n_intervals - 1)
        rows = table.index_select(0, interval.long().reshape(-1)).reshape(*l.shape, *table.shape[1:])
        t = s - interval
        value = rows[..., -1]
        for power in reversed(range(table.shape[-1] - 1)):
            value = value * t.unsqueeze(-1) + rows[..., power]
        return value


class Linear(PiecewisePolynomial):
    """Interpolation on a straight line between ``size`` equally spaced knots, both ends among them."""

    least = 2

    def coefficients(self) -> np.ndarray:
        table = np.zeros((self.size - 1, self.size, 2))
        for j in range(self.size - 1):
            table[j, j] = 1, -1
            table[j, j + 1] = 0, 1
        return table

    @property
    def nodes(self) -> tuple[float, ...]:
        """The knots."""
        return tuple(self.length * k / (self.size - 1) for k in range(self.size))


class Spline(PiecewisePolynomial):
    """Cubic B-splines on size - 3 equal intervals, clamped at both ends (de Boor 1978): twice differentiable; the first
    and the last coefficient are the values at the ends."""

    least = 4
    degree = 3

    @property
    def points(self) -> np.ndarray:
        """The knot vector, in units of intervals."""
        inner = np.arange(self.size - self.degree + 1, dtype=float)
        return np.concatenate([[inner[0]] * self.degree, inner, [inner[-1]] * self.degree])

    def coefficients(self) -> np.ndarray:
        from scipy.interpolate import BSpline, PPoly

        n, ends = self.size - self.degree, slice(self.degree, self.size)
        table = np.zeros((n, self.size, self.degree + 1))
        for k in range(self.size):
            polynomials = PPoly.from_spline(BSpline(self.points, np.eye(self.size)[k], self.degree)).c
            table[:, k] = polynomials[::-1, ends].T
        return table

    @property
    def nodes(self) -> tuple[float, ...]:
        """Greville's abscissae: means of three neighbouring knots."""
        means = [float(self.points[k + 1 : k + 1 + self.degree].mean()) for k in range(self.size)]
        return tuple(self.length * mean / (self.size - self.degree) for mean in means)


class Fourier(Basis):
    """1, cos x, sin x, cos 2x, sin 2x, ... with x = 2π l / period; twice the length by default, so that the values at
    the two ends are free."""

    def __init__(self, size: int, length: float, *, period: float | None = None):
        super().__init__(size, length)
        self.period = 2 * self.length if period is None else finite("period", period, above=0)

    def __call__(self, l: Tensor) -> Tensor:
        x = l * (2 * torch.pi / self.period)
        functions = [torch.ones_like(l)]
        for k in range(1, self.size):
            functions.append(torch.sin(x * (k // 2)) if k % 2 == 0 else torch.cos(x * (k // 2 + 1)))
        return torch.stack(functions, -1)


class Chebyshev(Basis):
    """T_k(x), x = 2 l / length - 1: T_0 = 1, T_1 = x, T_k = 2 x T_{k-1} - T_{k-2}."""

    def __call__(self, l: Tensor) -> Tensor:
        x = l * (2 / self.length) - 1
        functions = [torch.ones_like(x), x]
        while len(functions) < self.size:
            functions.append(2 * x * functions[-1] - functions[-2])
        return torch.stack(functions[:self.size], -1)


class Layers(Basis):
    """Steps: function k is 1 in the layers whose block is k, else 0 (no basis of smooth weights; see refit)."""

    def __init__(self, blocks: Sequence[int]):
        super().__init__(max(blocks) + 1, len(blocks))
        self.blocks = tuple(blocks)
        self.kinks = tuple(float(i) for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1])

    @property
    def constant(self) -> tuple[float, ...]:
        """The functions add up to 1."""
        return (1.0,) * self.size

    def __call__(self, l: Tensor) -> Tensor:
        layer = l.floor().clamp(0, len(self.blocks) - 1).long()
        return torch.eye(self.size, dtype=l.dtype, device=l.device)[torch.tensor(self.blocks, device=l.device)[layer]]


BASES = {"linear": Linear, "spline": Spline, "fourier": Fourier, "chebyshev": Chebyshev}
