"""Explicit linear multistep methods (eq. 37): z_{n+1} = Σ a_i z_{n+1-i} + h Σ b_i f_{n+1-i}, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from solvers.base import Evaluator, State, Step, add, combine
from solvers.explicit import METHODS as RUNGE_KUTTA
from solvers.explicit import ExplicitRungeKutta

STARTERS = {1: "euler", 2: "midpoint", 3: "kutta3", 4: "rk4", 5: "butcher5", 6: "butcher6", 7: "verner76",
            8: "dopri853"}


class History(NamedTuple):
    """What a multistep method remembers, newest first: states, increments, and the depths they belong to."""

    zs: tuple[State, ...] = ()
    ks: tuple[State, ...] = ()
    ls: tuple[float, ...] = ()

    def add(self, z: State | None, k: State | None, l: float, n: int) -> History:
        """The history with one more point, at most n of them. None: a method that has no use for z, or for k."""
        return History(() if z is None else (z, *self.zs)[:n], () if k is None else (k, *self.ks)[:n],
                       (l, *self.ls)[:n])


def find_starter(starter: ExplicitRungeKutta | str | None, order: int) -> ExplicitRungeKutta:
    """The Runge-Kutta method that takes the first steps; it must not lower the order.

    Raises ValueError: an unknown name, or a method of lower order; TypeError: something else.
    """
    if starter is None:
        if order not in STARTERS:
            raise ValueError(f"starter must be given for order {order}: an ExplicitRungeKutta of at least that order")
        starter = STARTERS[order]
    if isinstance(starter, str):
        if starter not in RUNGE_KUTTA:
            raise ValueError(f"unknown starter {starter!r}; known: {', '.join(sorted(RUNGE_KUTTA))}")
        starter = RUNGE_KUTTA[starter]
    if not isinstance(starter, ExplicitRungeKutta):
        raise TypeError(f"starter must be a name or an ExplicitRungeKutta, got {type(starter).__name__}")
    if starter.order < order:
        raise ValueError(f"starter {starter.name} has order {starter.order}, below the method's {order}")
    return starter


def nodes_with(starter: ExplicitRungeKutta, *own: float) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The nodes of a method that evaluates at its ``own`` and at its starter's, and where the starter's stand."""
    nodes = tuple(sorted({*own, *starter.nodes}))
    return nodes, tuple(map(nodes.index, starter.nodes))


def start(starter: ExplicitRungeKutta, places: tuple[int, ...], f: Evaluator, z: State, step: Step) -> \
        tuple[State, State]:
    """A step by the starter: the next state, and f at the beginning of the step."""
    own = step._replace(at=tuple(step.at[i] for i in places))
    ks = starter.stages(f, z, own)
    return starter.finish(z, step.h, ks), ks[0]


@dataclass(frozen=True)
class LinearMultistep:
    """An explicit linear multistep method with given coefficients, newest first (eq. 37).

    ``a`` weighs states z_n, z_{n-1}, ...; ``b`` weighs h f_n, h f_{n-1}, ...  ``LinearMultistep([1], [3/2, -1/2])``
    is ``ab2``. The first steps of a piece are taken by ``starter``, a Runge-Kutta method of at least the same order.
    History ends at a piece boundary, where f jumps, unless ``across_pieces`` asks for it to be carried on (which is
    what dense layer fusion does, at the price of order 1; not for gradients to ``span``, which rescale pieces).

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
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint", "checkpoint_recursive", "adjoint")
    n_stages = 1

    def __post_init__(self) -> None:
        a, b = tuple(self.a), tuple(self.b)
        if not a or not b:
            raise ValueError(f"a and b must each hold at least one coefficient; got a = {a}, b = {b}")
        order = multistep_order(a, b)
        if order == 0:
            raise ValueError(f"not consistent: a must sum to 1 and Σ b_i = 1 + Σ (i - 1) a_i; got a = {a}, b = {b}")
        check_zero_stable(a)
        starter = find_starter(self.starter, order)
        nodes, places = nodes_with(starter, 0.0)
        put = object.__setattr__
        put(self, "a", tuple(map(float, a)))
        put(self, "b", tuple(map(float, b)))
        put(self, "order", order)
        put(self, "starter", starter)
        put(self, "nodes", nodes)
        put(self, "_places", places)

    @property
    def remembers_states(self) -> bool:
        """Whether earlier states, not increments alone, enter a step (splitting refuses such a base)."""
        return len(self.a) > 1

    @property
    def n_history(self) -> int:
        """Earlier points a step needs, besides the current one."""
        return max(len(self.a), len(self.b)) - 1

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece: the starter's for the first ones, then one a step."""
        first = min(n_steps, self.n_history)
        return self.starter.nfe(first) + n_steps - first

    def init(self, memory: History | None) -> History:
        """An empty history, or the one of the piece before where ``across_pieces`` is set."""
        return memory if self.across_pieces and memory is not None else History()

    def step(self, f: Evaluator, z: State, step: Step, memory: History) -> tuple[State, History]:
        """The state at step.l + step.h."""
        n, remembered = self.n_history, None if len(self.a) == 1 else z
        if len(memory.ks) < n:
            new, k = start(self.starter, self._places, f, z, step)
            return new, memory.add(remembered, k, step.l, n)
        k = f(z, step.at[self.nodes.index(0.0)])
        now = memory.add(remembered, k, step.l, n + 1)
        new = z if self.a[0] == 1.0 else _scale(self.a[0], z)
        for weight, state in zip(self.a[1:], now.zs[1:], strict=False):
            if weight:
                new = add(new, weight, state)
        weights = self._weights(now.ls, step.h)
        new = combine(new, step.h, weights, now.ks[: len(weights)])
        return new, History(now.zs[:n], now.ks[:n], now.ls[:n])

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of ρ(ζ) - z σ(ζ) at z = h λ, highest first (see solvers.stability)."""
        n = self.n_history + 1
        a, b = (row + (0.0,) * (n - len(row)) for row in (self.a, tuple(map(float, self.b))))
        return [1.0, *(-(x + z * y) for x, y in zip(a, b, strict=True))]

    def _weights(self, ls: tuple[float, ...], h: float) -> tuple[float, ...]:
        offsets = relative(ls, h)
        if is_even(offsets):
            return self.b
        if self.a != (1.0,) or self.order != len(self.b):
            raise ValueError(f"{self.name} needs equal steps: its coefficients hold for an even grid only")
        return adams_weights(offsets)


def relative(ls: tuple[float, ...], h: float) -> tuple[float, ...]:
    """(l_i - l_n) / h for depths l_n, l_{n-1}, ..."""
    return tuple((l - ls[0]) / h for l in ls)


def is_even(offsets: tuple[float, ...]) -> bool:
    """Whether the points are 0, -1, -2, ... up to rounding."""
    return all(abs(x + i) < 1e-9 for i, x in enumerate(offsets))


def _scale(weight: float, z: State) -> State:
    return tuple(x * weight for x in z) if isinstance(z, tuple) else z * weight


def adams_weights(offsets: Sequence[float]) -> tuple[float, ...]:
    """∫_0^1 L_i(x) dx of the Lagrange polynomials through ``offsets`` = (l_i - l_n) / h.

    The weights of Adams methods on the actual points (Hairer, Nørsett & Wanner 1993, III.5): Adams-Bashforth with the
    points 0, -1, ..., Adams-Moulton where the new point, 1, is among them.

    >>> adams_weights((0.0, -1.0)), adams_weights((1.0, 0.0))
    ((1.5, -0.5), (0.5, 0.5))
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


def multistep_order(a: Sequence[float], b: Sequence[float], implicit: float = 0) -> int:
    """The largest p for which a method is exact on polynomials of degree p (the points being 0, -1, -2, ...).

    ``implicit``: the weight of h f_{n+1}.
    """
    def exact(q: int) -> bool:
        terms = [x * (-i) ** q for i, x in enumerate(a)]
        if q:
            terms += [q * x * (-i) ** (q - 1) for i, x in enumerate(b)]
            terms.append(q * implicit)
        return abs(float(sum(terms) - 1)) <= 1e-12 * max(1.0, float(sum(map(abs, terms))))

    if not (exact(0) and exact(1)):
        return 0
    order = 1
    while order < len(a) + len(b) + 1 and exact(order + 1):
        order += 1
    return order


def check_zero_stable(a: Sequence[float]) -> None:
    """Raise ValueError unless the roots of ζ^p - Σ a_i ζ^{p-i} lie in the unit circle, simple ones on it."""
    import numpy as np

    roots = np.roots([1.0, *(-float(x) for x in a)])
    on_circle = [r for r in roots if abs(r) > 1 - 1e-6]
    multiple = any(abs(r - s) < 1e-4 for i, r in enumerate(on_circle) for s in on_circle[:i])
    if max(abs(roots)) > 1 + 1e-9 or multiple:
        raise ValueError(f"not zero-stable: the roots of ζ^{len(a)} - Σ a_i ζ^({len(a)} - i) have moduli "
                         f"{', '.join(f'{abs(r):.4g}' for r in sorted(roots, key=abs, reverse=True))}; none may pass "
                         f"1, and those on the unit circle must be simple")


def check_method(a: Sequence[float], b: Sequence[float], implicit: float, order: int) -> None:
    """Raise ValueError unless a derived method is zero-stable and of its order (on an even grid)."""
    check_zero_stable(a)
    if (found := multistep_order(a, b, implicit)) != order:
        raise ValueError(f"the coefficients give order {found}, not {order}")


def check_order(order: int, low: int, high: int) -> None:
    """Refuse what is not an int from low to high."""
    if isinstance(order, bool) or not isinstance(order, int):
        raise TypeError(f"order must be an int, got {order!r}")
    if not low <= order <= high:
        raise ValueError(f"order must be from {low} to {high}, got {order}")


# Bashforth & Adams 1883
ADAMS_BASHFORTH = {
    "ab1": [1],
    "ab2": [3 / 2, -1 / 2],
    "ab3": [23 / 12, -16 / 12, 5 / 12],
    "ab4": [55 / 24, -59 / 24, 37 / 24, -9 / 24],
    "ab5": [1901 / 720, -2774 / 720, 2616 / 720, -1274 / 720, 251 / 720],
}

METHODS: dict[str, LinearMultistep] = {name: LinearMultistep([1], b, name) for name, b in ADAMS_BASHFORTH.items()}
