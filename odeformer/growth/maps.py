"""How an axis grows: which old entry each new one is, by what it is multiplied, and what that does to its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from odeformer.tables import at_least, finite


def tile(weight: Tensor, k: int | tuple[int, int], rho: float | None = None) -> Tensor:
    """k x k tiles of W / ρ (eq. 47): W (..., d_out, d_in), leading axes kept, to (..., k d_out, k d_in).

    ``k``: an int, or one for d_out and one for d_in. ``rho``: None means k (that of d_in): then a map whose input is x
    repeated k times gives its old output repeated k times, and for one k the Frobenius norm stays the same. Another ρ
    multiplies that output by k / ρ and the norm likewise. A bias is repeated, not divided.

    Raises TypeError or ValueError for what is no floating-point matrix, k < 1, and ρ <= 0 or not finite.

    >>> tile(torch.tensor([[2.0]]), 2)
    tensor([[1., 1.],
            [1., 1.]])
    """
    if not isinstance(weight, Tensor) or not (weight.is_floating_point() or weight.is_complex()):
        raise TypeError(f"W must be a floating-point tensor, got {getattr(weight, 'dtype', type(weight).__name__)}")
    if weight.dim() < 2:
        raise ValueError(f"W must be a matrix (..., d_out, d_in), got the shape {tuple(weight.shape)}; a vector, such "
                         "as a bias, is repeated and not divided")
    pair = k if isinstance(k, tuple) else (k, k)
    if len(pair) != 2:
        raise ValueError(f"k must be an int, or one for d_out and one for d_in; got {k!r}")
    for value in pair:
        at_least("k", value, 1)
    rho = finite("rho", pair[1] if rho is None else rho, above=0)
    return weight.repeat(*[1] * (weight.dim() - 2), *pair) / rho


@dataclass(frozen=True, eq=False)
class Axis:
    """Entry j of a new axis is entry ``index[j]`` of an old one, of ``size`` entries, times ``value[j]``.

    ``gradient[j]``: the gradient of the new entry over that of the old one. As the function stays the same, the chain
    rule wants Σ value gradient = 1 over the copies of an entry. Tensors are int64 and float64, on the CPU.
    """

    index: Tensor
    value: Tensor
    gradient: Tensor
    size: int

    def within(self, inner: Axis) -> Axis:
        """The axis whose entries are pairs, this one's first: heads that hold coordinates."""
        index = self.index[:, None] * inner.size + inner.index
        value, gradient = self.value[:, None] * inner.value, self.gradient[:, None] * inner.gradient
        return Axis(index.flatten(), value.flatten(), gradient.flatten(), self.size * inner.size)

    def scaled(self, value: float, gradient: float) -> Axis:
        """The same with other factors."""
        return Axis(self.index, self.value * value, self.gradient * gradient, self.size)

    @cached_property
    def again(self) -> Tensor:
        """bool: entries that are copies of one that came before."""
        return again(self.index)


@dataclass(frozen=True, eq=False)
class Copies:
    """New units, unit j being a copy of unit ``index[j]`` among ``size`` old ones.

    What reads the units takes the part ``share[j]`` from j; the shares of an old unit's copies sum to 1, so that the
    sum read is the old one. What writes them is copied, and its gradient is what the readers' shares leave of it.
    """

    index: Tensor
    share: Tensor
    size: int

    @classmethod
    def make(cls, old: int, new: int, *, neighbours: bool = False, unequal: float = 0.0) -> Copies:
        """old units grown to new: 0 1 2 0 1 2, or with ``neighbours`` 0 0 1 1 2 2. ``unequal``: by how much of its
        size at most a share is off an even one, at random."""
        j = torch.arange(new)
        index = j * old // new if neighbours else j % old
        share = torch.ones(new, dtype=torch.float64)
        if unequal:
            share = 1 + unequal * (2 * torch.rand(new, dtype=torch.float64) - 1)
            share = torch.where(torch.bincount(index)[index] > 1, share, 1)
        totals = torch.zeros(old, dtype=torch.float64).index_add(0, index, share)
        return cls(index, share / totals[index], old)

    @property
    def reads(self) -> Axis:
        """The axis of a parameter over which the units are summed."""
        return Axis(self.index, self.share, torch.ones_like(self.share), self.size)

    @property
    def writes(self) -> Axis:
        """The axis of a parameter that makes the units."""
        return Axis(self.index, torch.ones_like(self.share), self.share, self.size)

    @property
    def ratio(self) -> float:
        """New units over old ones."""
        return len(self.index) / self.size

    @property
    def even(self) -> bool:
        """Whether every unit has as many copies."""
        return len(self.index) % self.size == 0

    @property
    def plain(self) -> bool:
        """Whether there is nothing but the old units."""
        return len(self.index) == self.size

    @property
    def matched(self) -> Axis:
        """For what meets copied units in a dot product over the square root of their number: q · k / sqrt(n) stays as
        it was where k is copied and q has this axis."""
        root = math.sqrt(self.ratio)
        return Axis(self.index, self.share * root, torch.full_like(self.share, 1 / root), self.size)


def again(index: Tensor) -> Tensor:
    """bool, shaped like index: whether its value came before.

    >>> again(torch.tensor([0, 1, 0, 2, 1]))
    tensor([False, False,  True, False,  True])
    """
    order = index.argsort(stable=True)
    ordered = index[order]
    repeated = torch.zeros_like(index, dtype=torch.bool)
    repeated[order[1:]] = ordered[1:] == ordered[:-1]
    return repeated
