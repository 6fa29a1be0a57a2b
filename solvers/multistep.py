"""Linear multistep methods (eq. 37): z_{n+1} = Σ a_i z_{n+1-i} + h Σ b_i f_{n+1-i}, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from solvers.base import Evaluator, State, Step, add
from solvers.explicit import METHODS as RUNGE_KUTTA
from solvers.explicit import ExplicitRungeKutta

STARTERS = {1: "euler", 2: "midpoint", 3: "kutta3", 4: "rk4", 5: "butcher5"}


class History(NamedTuple):
    """What a multistep method remembers, newest first: states, increments, and the depths they belong to."""

    zs: tuple[State, ...] = ()
    ks: tuple[State, ...] = ()
    ls: tuple[float, ...] = ()

    def add(self, z: State, k: State, l: float, n: int) -> History:
        """The history with one more point, at most n of them."""
        return History((z, *self.zs)[:n], (k, *self.ks)[:n], (l, *self.ls)[:n])


@dataclass(frozen=True)
class LinearMultistep:
    """An explicit linear multistep method with given coefficients, newest first (eq. 37).

    ``a`` weighs states z_n, z_{n-1}, ...; ``b`` weighs h f_n, h f_{n-1}, ...  ``LinearMultistep([1], [3/2, -1/2])``
    is ``ab2``. The first steps of a piece are taken by ``starter``, a Runge-Kutta method of at least the same order.
    History ends at a piece boundary, where f jumps, unless ``across_pieces`` asks for it to be carried on (which is
    what dense layer fusion does, at the price of order 1).

    Adams methods (a = [1]) take their weights from the actual points of an uneven grid; other methods refuse one.

    Raises ValueError: not consistent (order 0), or not zero-stable (Dahlquist 1956: a root of ζ^p - Σ a_i ζ^{p-i}
    outside the unit circle, or a multiple one on it).
    """

    a: Sequence[float]
    b: Sequence[float]
    name: str = "linear_multistep"
    across_pieces: bool = False
    starter: ExplicitRungeKutta | str | None = None
    order: int = field(init=False)
    nodes: tuple[float, ...] = field(init=False, repr=False)

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint")
    n_stages = 1

    def __post_init__(self) -> None:
        a, b = tuple(self.a), tuple(self.b)
        if not a or not b:
            raise ValueError(f"a and b must each hold at least one coefficient; got a = {a}, b = {b}")
        order = _order(a, b)
        if order == 0:
            raise ValueError(f"not consistent: a must sum to 1 and Σ b_i = 1 + Σ (i - 1) a_i; got a = {a}, b = {b}")
        _check_zero_stable(a)
        starter = self.starter
        if starter is None:
            starter = RUNGE_KUTTA[STARTERS[min(order, max(STARTERS))]]
        elif isinstance(starter, str):
            if starter not in RUNGE_KUTTA:
                raise ValueError(f"unknown starter {starter!r}; known: {', '.join(sorted(RUNGE_KUTTA))}")
            starter = RUNGE_KUTTA[starter]
        if starter.order < order:
            raise ValueError(f"starter {starter.name} has order {starter.order}, below the method's {order}")
        put = object.__setattr__
        put(self, "a", tuple(map(float, a)))
        put(self, "b", tuple(map(float, b)))
        put(self, "order", order)
        put(self, "starter", starter)
        put(self, "nodes", starter.nodes)

    @property
    def n_history(self) -> int:
        """Earlier points a step needs, besides the current one."""
        return max(len(self.a), len(self.b)) - 1

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece: the starter's for the first ones, then one a step."""
        start = min(n_steps, self.n_history)
        return self.starter.nfe(start) + n_steps - start

    def init(self, memory: History | None) -> History:
        """An empty history, or the one of the piece before where ``across_pieces`` is set."""
        return memory if self.across_pieces and memory is not None else History()

    def step(self, f: Evaluator, z: State, step: Step, memory: History) -> tuple[State, History]:
        """The state at step.l + step.h."""
        n = self.n_history
        if len(memory.ks) < n:
            ks = self.starter.stages(f, z, step)
            return self.starter.finish(z, step.h, ks), memory.add(z, ks[0], step.l, n)
        k = f(z, step.at[0])
        now = memory.add(z, k, step.l, n + 1)
        new = z if self.a == (1.0,) else _scale(self.a[0], z)
        for weight, state in zip(self.a[1:], now.zs[1:], strict=False):
            if weight:
                new = add(new, weight, state)
        for weight, increment in zip(self._weights(now.ls, step.h), now.ks, strict=False):
            if weight:
                new = add(new, step.h * weight, increment)
        return new, History(now.zs[:n], now.ks[:n], now.ls[:n])

    def _weights(self, ls: tuple[float, ...], h: float) -> tuple[float, ...]:
        offsets = tuple((l - ls[0]) / h for l in ls)
        if all(abs(x + i) < 1e-9 for i, x in enumerate(offsets)):
            return self.b
        if self.a != (1.0,) or self.order != len(self.b):
            raise ValueError(f"{self.name} needs equal steps: its coefficients hold for an even grid only")
        return adams_weights(offsets)


def _scale(weight: float, z: State) -> State:
    return tuple(x * weight for x in z) if isinstance(z, tuple) else z * weight


@lru_cache(maxsize=4096)
def adams_weights(offsets: tuple[float, ...]) -> tuple[float, ...]:
    """∫_0^1 L_i(x) dx of the Lagrange polynomials through ``offsets`` = (l_i - l_n) / h, newest (0) first.

    Adams-Bashforth weights on the actual points (Hairer, Nørsett & Wanner 1993, III.5).

    >>> adams_weights((0.0, -1.0))
    (1.5, -0.5)
    """
    weights = []
    for i, x in enumerate(offsets):
        poly, scale = [1.0], 1.0  # Π_{j != i} (t - x_j), coefficients from low to high
        for j, other in enumerate(offsets):
            if j != i:
                poly = [low - other * high for low, high in zip([0.0, *poly], [*poly, 0.0], strict=True)]
                scale *= x - other
        weights.append(sum(c / (k + 1) for k, c in enumerate(poly)) / scale)
    return tuple(weights)


def _order(a: Sequence[float], b: Sequence[float]) -> int:
    """The largest p for which the method is exact on polynomials of degree p (the points being 0, -1, -2, ...)."""
    def exact(q: int) -> bool:
        terms = [Fraction(x) * (-i) ** q for i, x in enumerate(a)]
        if q:
            terms += [q * Fraction(x) * (-i) ** (q - 1) for i, x in enumerate(b)]
        return abs(float(sum(terms) - 1)) <= 1e-12 * max(1.0, float(sum(map(abs, terms))))

    if not (exact(0) and exact(1)):
        return 0
    order = 1
    while order < len(a) + len(b) and exact(order + 1):
        order += 1
    return order


def _check_zero_stable(a: Sequence[float]) -> None:
    import numpy as np

    roots = np.roots([1.0, *(-float(x) for x in a)])
    on_circle = [r for r in roots if abs(r) > 1 - 1e-6]
    multiple = any(abs(r - s) < 1e-4 for i, r in enumerate(on_circle) for s in on_circle[:i])
    if max(abs(roots)) > 1 + 1e-9 or multiple:
        raise ValueError(f"not zero-stable: the roots of ζ^{len(a)} - Σ a_i ζ^({len(a)} - i) have moduli "
                         f"{', '.join(f'{abs(r):.4g}' for r in sorted(roots, key=abs, reverse=True))}; none may pass "
                         f"1, and those on the unit circle must be simple")


# Bashforth & Adams 1883
ADAMS_BASHFORTH = {
    "ab2": [3 / 2, -1 / 2],
    "ab3": [23 / 12, -16 / 12, 5 / 12],
    "ab4": [55 / 24, -59 / 24, 37 / 24, -9 / 24],
    "ab5": [1901 / 720, -2774 / 720, 2616 / 720, -1274 / 720, 251 / 720],
}

METHODS = {name: LinearMultistep([1], b, name) for name, b in ADAMS_BASHFORTH.items()}
