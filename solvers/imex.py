"""Implicit-explicit Runge-Kutta methods for f = f_slow + f_stiff: one step class, one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod, sqrt

import torch

from solvers.base import Evaluator, State, Step
from solvers.implicit import Flat, Implicit, weighted
from solvers.tableau import Tableau, Tree, density, trees

Coloured = tuple[int, tuple["Coloured", ...]]  # the colour of the root, the branches


@dataclass(frozen=True)
class ImexRungeKutta(Implicit):
    """An explicit tableau for the first of f's two ``parts`` and a diagonally implicit one for the second, stiff, part.

    Z_i = h Σ_{j<i} a^E_ij f_1(z + Z_j) + h Σ_{j<=i} a^I_ij f_2(z + Z_j), each part at its own depths. Only f_2
    stands in the nonlinear equations, so h has to resolve f_1 alone (Ascher, Ruuth & Spiteri 1997). A part counts 1/2
    in NFE.

    Raises ValueError: tableaus of different length or of the wrong kind; in ``step``, an f without exactly two parts.
    """

    explicit: Tableau
    implicit: Tableau
    name: str = "imex_rk"
    order: int = field(init=False)
    nodes: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, tableau in (("explicit", self.explicit), ("implicit", self.implicit)):
            if not isinstance(tableau, Tableau):
                raise TypeError(f"{name} must be a solvers.Tableau, got {type(tableau).__name__}")
        a = self.implicit.a
        if not self.explicit.is_explicit:
            raise ValueError("explicit must be an explicit tableau")
        if self.implicit.is_explicit or any(x for i, row in enumerate(a) for x in row[i + 1 :]):
            raise ValueError("implicit must be a diagonally implicit tableau: full rows, zero above the diagonal")
        if len(a) != self.explicit.n_stages:
            raise ValueError("explicit and implicit must have as many stages; got "
                             f"{self.explicit.n_stages} and {len(a)}")
        object.__setattr__(self, "order", pair_order(self.explicit, self.implicit))
        object.__setattr__(self, "nodes", tuple(sorted({*self.explicit.c, *self.implicit.c})))

    @property
    def n_stages(self) -> int:
        """Rows of the tableaus."""
        return self.implicit.n_stages

    def advance(self, f: Evaluator, z: State, step: Step, memory: None, orders: int) -> tuple[State, None]:
        """The state at step.l + step.h, differentiable ``orders`` times."""
        if len(f.parts) != 2:
            raise ValueError(f"{self.name} needs a field with two parts, f.parts = (slow, stiff); f has "
                             f"{len(f.parts) if len(f.parts) > 1 else 'none'}")
        slow, stiff = f.parts
        flat = Flat(z)
        x = flat.pack(z)
        y = zero = torch.zeros_like(x)
        slows: list[torch.Tensor] = []  # h f_1 of the stages
        stiffs: list[torch.Tensor] = []  # h f_2
        for i, (row, row_stiff) in enumerate(zip(self.explicit.a, self.implicit.a, strict=True)):
            base = weighted(weighted(zero, 1.0, row, slows), 1.0, row_stiff[:i], stiffs)
            depth_slow, depth_stiff = (step.at[self.nodes.index(t.c[i])] for t in (self.explicit, self.implicit))
            if diagonal := row_stiff[i]:
                y = self.solve_stages(stiff, flat, x, step, [depth_stiff], [[diagonal]], base[None], y[None], orders)[0]
                stiffs.append((y - base) / diagonal)
            else:
                y = base
                stiffs.append(self._increment(self.implicit, i, stiff, flat, x + y, depth_stiff, step.h))
            slows.append(self._increment(self.explicit, i, slow, flat, x + y, depth_slow, step.h))
        new = weighted(weighted(x, 1.0, self.explicit.b, slows), 1.0, self.implicit.b, stiffs)
        return flat.unpack(new), None

    @staticmethod
    def _increment(tableau: Tableau, i: int, f: Evaluator, flat: Flat, x: torch.Tensor, at: torch.Tensor,
                   h: float) -> torch.Tensor:
        """h f(x), or zero where the tableau has no use for stage i."""
        if not tableau.b[i] and not any(row[i] for row in tableau.a[i + 1 :]):
            return torch.zeros_like(x)
        return h * flat.pack(f(flat.unpack(x), at))


def pair_order(explicit: Tableau, implicit: Tableau) -> int:
    """The order of the pair: the conditions of every rooted tree with its nodes coloured in all ways, at most order 4.

    Either tableau of order p is not enough from order 3 on, because the parts couple (Araújo, Murua & Sanz-Serna 1997).
    """
    n = explicit.n_stages
    a = ([[*row, *[0.0] * (n - len(row))] for row in explicit.a], implicit.a)
    b = (explicit.b, implicit.b)

    def phi(tree: Coloured) -> list[float]:
        factors = [[sum(x * y for x, y in zip(row, phi(branch), strict=True)) for row in a[branch[0]]]
                   for branch in tree[1]]
        return [prod(factor[i] for factor in factors) for i in range(n)]

    def holds(tree: Tree) -> bool:
        sums = (sum(x * y for x, y in zip(b[t[0]], phi(t), strict=True)) for t in _colourings(tree))
        return all(abs(total * density(tree) - 1) < 1e-11 for total in sums)

    order = 0
    while order < 4 and all(map(holds, trees(order + 1))):
        order += 1
    return order


def _colourings(tree: Tree) -> Iterator[Coloured]:
    for colour in (0, 1):
        for branches in product(*map(list, map(_colourings, tree))):
            yield colour, branches


_gamma = 1 - 1 / sqrt(2)
_delta = 1 - 1 / (2 * _gamma)

# Ascher, Ruuth & Spiteri 1997: forward-backward Euler (1,1,1), and the L-stable pairs (2,2,2) and (4,4,3)
METHODS: dict[str, ImexRungeKutta] = {
    "imex_euler": ImexRungeKutta(
        Tableau([[], [1]], [1, 0]),
        Tableau([[0, 0], [0, 1]], [0, 1]), "imex_euler"),
    "ars222": ImexRungeKutta(
        Tableau([[], [_gamma], [_delta, 1 - _delta]], [_delta, 1 - _delta, 0]),
        Tableau([[0, 0, 0], [0, _gamma, 0], [0, 1 - _gamma, _gamma]], [0, 1 - _gamma, _gamma]), "ars222"),
    "ars443": ImexRungeKutta(
        Tableau([[], [1 / 2], [11 / 18, 1 / 18], [5 / 6, -5 / 6, 1 / 2], [1 / 4, 7 / 4, 3 / 4, -7 / 4]],
                [1 / 4, 7 / 4, 3 / 4, -7 / 4, 0]),
        Tableau([[0, 0, 0, 0, 0], [0, 1 / 2, 0, 0, 0], [0, 1 / 6, 1 / 2, 0, 0], [0, -1 / 2, 1 / 2, 1 / 2, 0],
                 [0, 3 / 2, -3 / 2, 1 / 2, 1 / 2]], [0, 3 / 2, -3 / 2, 1 / 2, 1 / 2]), "ars443"),
}
