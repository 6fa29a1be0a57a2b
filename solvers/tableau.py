"""Butcher tableaus that check themselves, with order conditions from rooted trees (Butcher 1963).

A method of s stages reads k_i = f(z + h Σ_j a_ij k_j, l + c_i h), z' = z + h Σ_i b_i k_i. It has order p when
Σ_i b_i Φ_i(t) = 1 / γ(t) for every rooted tree t of at most p nodes (Hairer, Nørsett & Wanner 1993, II.2).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from numbers import Rational

MAX_ORDER = 8  # conditions are checked up to here: 200 trees

Tree = tuple["Tree", ...]  # a rooted tree is the sorted tuple of its branches


@cache
def trees(order: int) -> tuple[Tree, ...]:
    """All rooted trees with ``order`` nodes.

    >>> [len(trees(p)) for p in range(1, 9)]
    [1, 1, 2, 4, 9, 20, 48, 115]
    """
    if order == 1:
        return ((),)
    return tuple(sorted({grown for tree in trees(order - 1) for grown in _with_leaf(tree)}))


def _with_leaf(tree: Tree) -> Iterator[Tree]:
    yield tuple(sorted((*tree, ())))
    for i, branch in enumerate(tree):
        for grown in _with_leaf(branch):
            yield tuple(sorted((*tree[:i], grown, *tree[i + 1 :])))


def size(tree: Tree) -> int:
    """Number of nodes."""
    return 1 + sum(map(size, tree))


def density(tree: Tree) -> int:
    """γ(t): the number of nodes times the densities of the branches."""
    return size(tree) * math.prod(map(density, tree))


@cache
def _catalogue() -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """All trees up to MAX_ORDER, small ones first: (places of the branches in this catalogue, size, density)."""
    listed = [tree for order in range(1, MAX_ORDER + 1) for tree in trees(order)]
    place = {tree: i for i, tree in enumerate(listed)}
    return tuple((tuple(place[branch] for branch in tree), size(tree), density(tree)) for tree in listed)


def order_of(a: Sequence[Sequence], b: Sequence) -> int:
    """The order of (a, b), at most 8, by rooted trees; in exact arithmetic where every coefficient is rational."""
    return orders_of(a, b)[0]


def orders_of(a: Sequence[Sequence], *weights: Sequence) -> list[int]:
    """The order of (a, b) for each b in ``weights``; the elementary weights Φ(t) are computed once for all of them."""
    exact = all(isinstance(x, Rational) for row in (*weights, *a) for x in row)
    d = 1
    if exact:  # integers over common denominators: no fractions are reduced on the way
        a, d = _integers(a)
    tests = [_condition(b, d, exact) for b in weights]
    orders = [MAX_ORDER] * len(weights)
    sparse = [[(j, x) for j, x in enumerate(row) if x] for row in a]
    grown: list[list] = []  # a Φ(t): the factor that t gives as a branch
    for branches, nodes, gamma in _catalogue():
        phi = list(map(math.prod, zip(*(grown[i] for i in branches), strict=True))) if branches else [1] * len(a)
        if nodes < MAX_ORDER:
            grown.append([sum([x * phi[j] for j, x in row]) for row in sparse])
        for i, holds in enumerate(tests):
            if orders[i] >= nodes and not holds(phi, nodes, gamma):
                orders[i] = nodes - 1
        if max(orders) < nodes:
            break
    return orders


def _integers(rows: Sequence[Sequence[Rational]]) -> tuple[list[list[int]], int]:
    d = math.lcm(*(x.denominator for row in rows for x in row))
    return [[x.numerator * (d // x.denominator) for x in row] for row in rows], d


def _condition(b: Sequence, d: int, exact: bool) -> Callable[[list, int, int], bool]:
    """γ(t) Σ_i b_i Φ_i(t) = 1, where Φ is over d^(size - 1) if exact."""
    if exact:
        (b,), e = _integers([b])

    def holds(phi: list, nodes: int, gamma: int) -> bool:
        terms = list(map(operator.mul, b, phi))
        if exact:
            return sum(terms) * gamma == e * d ** (nodes - 1)
        scale = max(1.0, sum(map(abs, terms)) * gamma)
        return abs(sum(terms) * gamma - 1.0) <= 1e-11 * scale

    return holds


@dataclass(frozen=True)
class Tableau:
    """A Butcher tableau (a, b), checked when built.

    ``a``: ragged strictly lower rows for an explicit method (``[[], [0.5]]``), or full rows for an implicit one.
    ``b``: weights of the propagated solution. ``b_hat``: weights of the embedded one. ``c`` follows from ``a``;
    if given it must equal the row sums. ``order``: if given, the order (a, b) must at least attain. Coefficients may
    be floats, ints or Fractions; the order conditions are checked exactly where all of them are rational.

    Raises ValueError: shapes that do not fit, a non-finite entry, c that is not the row sums of a, weights that do
    not sum to 1 (inconsistent), an order that the coefficients do not have.

    >>> Tableau([[], [0.5]], [0, 1]).order
    2
    """

    a: Sequence[Sequence[float]]
    b: Sequence[float]
    c: Sequence[float] | None = field(default=None, kw_only=True)
    b_hat: Sequence[float] | None = field(default=None, kw_only=True)
    order: int | None = field(default=None, kw_only=True)
    embedded_order: int | None = field(default=None, init=False)
    exact: bool = field(default=False, init=False)
    is_explicit: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        rows, b = [list(row) for row in self.a], list(self.b)
        b_hat = None if self.b_hat is None else list(self.b_hat)
        n = len(b)
        explicit = all(len(row) == i for i, row in enumerate(rows))
        if n == 0 or len(rows) != n or not (explicit or all(len(row) == n for row in rows)):
            raise ValueError(f"a must have one row a stage ({n} from b), strictly lower and ragged ([[], [0.5]]) or "
                             f"full; got rows of length {[len(row) for row in rows]}")
        if not explicit and all(row[j] == 0 for i, row in enumerate(rows) for j in range(i, n)):
            explicit, rows = True, [row[:i] for i, row in enumerate(rows)]
        if b_hat is not None and len(b_hat) != n:
            raise ValueError(f"b_hat must have as many entries as b ({n}); got {len(b_hat)}")
        entries = [x for row in rows for x in row] + b + (b_hat or [])
        if not all(math.isfinite(x) for x in entries):
            raise ValueError("a, b and b_hat must be finite numbers")
        self._check_nodes(rows)
        order, *embedded = orders_of(rows, b, *([] if b_hat is None else [b_hat]))
        if order == 0:
            raise ValueError(f"b must sum to 1, or the method is not consistent; it sums to {float(sum(b)):.12g}")
        if self.order is not None and order < self.order:
            raise ValueError(f"the coefficients give order {order}, not the stated order {self.order}")
        embedded = embedded[0] if embedded else None
        if embedded == 0:
            raise ValueError(f"b_hat must sum to 1; it sums to {float(sum(b_hat)):.12g}")
        put = object.__setattr__
        put(self, "exact", all(isinstance(x, Rational) for x in entries))
        put(self, "c", tuple(float(sum(row)) for row in rows))
        put(self, "a", tuple(tuple(map(float, row)) for row in rows))
        put(self, "b", tuple(map(float, b)))
        put(self, "b_hat", None if b_hat is None else tuple(map(float, b_hat)))
        put(self, "order", order)
        put(self, "embedded_order", embedded)
        put(self, "is_explicit", explicit)

    def _check_nodes(self, rows: list[list]) -> None:
        if self.c is None:
            return
        if len(self.c) != len(rows):
            raise ValueError(f"c must have one entry a stage ({len(rows)}); got {len(self.c)}")
        for i, (node, row) in enumerate(zip(self.c, rows, strict=True)):
            if not abs(float(node) - float(sum(row))) <= 1e-12 * max(1.0, sum(abs(float(x)) for x in row)):
                raise ValueError(f"c must equal the row sums of a: c[{i}] = {float(node):.12g}, "
                                 f"a[{i}] sums to {float(sum(row)):.12g}")

    @classmethod
    def parse(cls, text: str, *, order: int | None = None) -> Tableau:
        """A tableau as it is printed in books: rows ``c | a ...``, a rule, then ``| b`` and perhaps ``| b_hat``.

        >>> Tableau.parse('''
        ... 0   |
        ... 1/2 | 1/2
        ... ----+----
        ...     | 0 1''').c
        (0.0, 0.5)
        """
        head, foot = [], []
        lines = head
        for line in filter(str.strip, text.splitlines()):
            if set(line.strip()) <= set("-+"):
                lines = foot
                continue
            left, _, right = line.partition("|")
            lines.append((left.strip(), [Fraction(x) for x in right.split()]))
        return cls([row for _, row in head], foot[0][1], c=[Fraction(c) for c, _ in head],
                   b_hat=foot[1][1] if len(foot) > 1 else None, order=order)

    @property
    def n_stages(self) -> int:
        """Number of rows."""
        return len(self.b)

    @property
    def is_fsal(self) -> bool:
        """First same as last: the last stage is f at the end of the step, so it serves the next step too."""
        last = self.a[-1] if not self.is_explicit else (*self.a[-1], 0.0)
        return self.n_stages > 1 and tuple(last) == self.b

    @property
    def n_evaluations(self) -> int:
        """Evaluations that z' needs: stages up to the last with a non-zero weight (an FSAL stage is not among them)."""
        return max(i for i, weight in enumerate(self.b) if weight) + 1

    def with_fsal(self) -> Tableau:
        """The same method with f at the end of the step as an extra last stage, where it has none."""
        if self.is_fsal:
            return self
        if not self.is_explicit:
            raise ValueError("with_fsal completes explicit tableaus only")
        b_hat = None if self.b_hat is None else (*self.b_hat, 0.0)
        return Tableau((*self.a, self.b), (*self.b, 0.0), b_hat=b_hat)

    def stability(self, z: complex) -> complex:
        """R(z) of z' = λ z, z = h λ (a number or an array).

        R(z) = 1 + z b (I - z a)^-1 1: for an explicit tableau the polynomial with coefficients b a^k 1, for an
        implicit one a quotient of determinants (Hairer & Wanner 1996, IV.3).
        """
        import numpy as np

        z = np.asarray(z)
        if self.is_explicit:
            powers, v = [1.0], [1.0] * self.n_stages
            for _ in range(self.n_stages):
                powers.append(sum(w * x for w, x in zip(self.b, v, strict=True)))
                v = [sum(x * y for x, y in zip(row, v, strict=False)) for row in self.a]
            return np.polyval(powers[::-1], z)
        a, b, one = np.array(self.a), np.array(self.b), np.ones(self.n_stages)
        za, identity = z[..., None, None] * a, np.eye(self.n_stages)
        return np.linalg.det(identity - za + z[..., None, None] * np.outer(one, b)) / np.linalg.det(identity - za)
