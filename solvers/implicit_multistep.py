"""Implicit linear multistep methods: backward differentiation formulas and Adams-Moulton, on the actual points.

The equation of a step is solved, and its solution differentiated, as in ``implicit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from torch import Tensor

from solvers.base import Evaluator, State, Step
from solvers.implicit import METHODS as RUNGE_KUTTA
from solvers.implicit import Flat, Implicit, ImplicitRungeKutta, weighted
from solvers.multistep import History, adams_weights, check_method, check_order, relative


@dataclass(frozen=True)
class ImplicitMultistep(Implicit):
    """What implicit multistep methods share: their start, and one equation a step, Z = base + h β f(z + Z, l + h).

    The first steps of a piece are taken by ``starter``, an implicit Runge-Kutta method of at least the same order, so
    that a stiff problem survives the start: ``radau5``, or ``gauss6`` for order 6, unless given. Weights come from the
    actual points of an uneven grid. ``nfe`` is None: evaluations depend on the values.

    Raises ValueError: an order out of range, a starter of lower order or an unknown one.
    """

    order: int
    starter: ImplicitRungeKutta | str | None = field(default=None, kw_only=True)
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    prefix: ClassVar[str]
    orders: ClassVar[tuple[int, int]]
    own_nodes: ClassVar[tuple[float, ...]]
    n_stages = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self.order, *self.orders)
        starter = ("radau5" if self.order <= 5 else "gauss6") if self.starter is None else self.starter
        if isinstance(starter, str):
            if starter not in RUNGE_KUTTA:
                raise ValueError(f"unknown starter {starter!r}; known: {', '.join(sorted(RUNGE_KUTTA))}")
            starter = RUNGE_KUTTA[starter]
        if not isinstance(starter, ImplicitRungeKutta):
            raise TypeError(f"starter must be a name or an ImplicitRungeKutta, got {type(starter).__name__}")
        if self.n_history and starter.order < self.order:
            raise ValueError(f"starter {starter.name} has order {starter.order}, below the method's {self.order}")
        others = starter.nodes if self.n_history else ()
        nodes = tuple(sorted({*self.own_nodes, *others}))
        put = object.__setattr__
        put(self, "starter", starter)
        put(self, "nodes", nodes)
        put(self, "_places", tuple(map(nodes.index, others)))

    @property
    def name(self) -> str:
        """bdf2, am3, ..."""
        return f"{self.prefix}{self.order}"

    @property
    def n_history(self) -> int:
        """Earlier points a step needs, besides the current one."""
        raise NotImplementedError

    def init(self, memory: History | None) -> History:
        """An empty history: f may jump between pieces."""
        return History()

    def look(self, f: Evaluator, z: State, step: Step, memory: History) -> History:
        """The history with what the method remembers of the current point."""
        raise NotImplementedError

    def equation(self, flat: Flat, step: Step, now: History) -> tuple[float, Tensor, Tensor]:
        """β, the base and a first guess of the increment Z."""
        raise NotImplementedError

    def advance(self, f: Evaluator, z: State, step: Step, memory: History, orders: int) -> tuple[State, History]:
        """The state at step.l + step.h, differentiable ``orders`` times."""
        n = self.n_history
        now = self.look(f, z, step, memory)
        memory = History(now.zs[:n], now.ks[:n], now.ls[:n])
        if len(now.ls) <= n:
            own = step._replace(at=tuple(step.at[i] for i in self._places))
            return self.starter.advance(f, z, own, None, orders)[0], memory
        flat = Flat(z)
        x = flat.pack(z)
        weight, base, guess = self.equation(flat, step, now)
        at = [step.at[self.nodes.index(1.0)]]
        (increment,) = self.solve_stages(f, flat, x, step, at, [[weight]], base[None], guess[None], orders)
        return flat.unpack(x + increment), memory


class BDF(ImplicitMultistep):
    """The polynomial through z_{n+1}, z_n, ..., z_{n+1-p} has the slope f at l_{n+1} (Curtiss & Hirschfelder 1952).

    Orders 1 (backward Euler) to 6; A-stable up to 2, then A(α)-stable with α = 86°, 73°, 52°, 18°. From order 7 on the
    formulas are not zero-stable. On a grid whose steps grow by a constant factor they are zero-stable up to the
    factors 2.41, 1.62, 1.28, 1.13 for orders 2 to 5: keep neighbouring steps well below that.
    """

    remembers_states = True  # so that splitting, which moves states in between, refuses it

    prefix = "bdf"
    orders = (1, 6)
    own_nodes = (1.0,)

    def __post_init__(self) -> None:
        check_order(self.order, 1, 20)
        a, beta = self.weights([-float(i) for i in range(self.order)])
        check_method(a, (), beta, self.order)
        super().__post_init__()

    @property
    def n_history(self) -> int:
        return self.order - 1

    def look(self, f: Evaluator, z: State, step: Step, memory: History) -> History:
        return memory.add(z, None, step.l, self.order)

    @staticmethod
    def weights(offsets: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """a and β of z_{n+1} = Σ a_i z_{n+1-i} + h β f_{n+1} for points at ``offsets`` = (l_i - l_n) / h.

        >>> BDF.weights([0.0, -1.0])
        ((1.3333333333333333, -0.3333333333333333), 0.6666666666666666)
        """
        beta = 1 / sum(1 / (1 - x) for x in offsets)
        return tuple(
            beta / (1 - x) * prod((1 - y) / (x - y) for j, y in enumerate(offsets) if j != i)
            for i, x in enumerate(offsets)), beta

    def equation(self, flat: Flat, step: Step, now: History) -> tuple[float, Tensor, Tensor]:
        offsets = relative(now.ls, step.h)
        a, beta = self.weights(offsets)
        x, *rest = map(flat.pack, now.zs)
        past = [y - x for y in rest]
        ahead = [prod((1 - y) / (x - y) for j, y in enumerate(offsets) if j != i) for i, x in enumerate(offsets)]
        return beta, weighted(x * 0, 1.0, a[1:], past), weighted(x * 0, 1.0, ahead[1:], past)

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of ρ(ζ) - z σ(ζ) at z = h λ, highest first (see solvers.stability)."""
        a, beta = self.weights([-float(i) for i in range(self.order)])
        return [1.0 - z * beta, *(-x for x in a)]


class AdamsMoulton(ImplicitMultistep):
    """z_{n+1} = z_n + h (β_0 f_{n+1} + Σ β_i f_{n+1-i}) with p - 1 known increments (Moulton 1926).

    Orders 2 (the trapezoidal rule) to 6. Only order 2 is A-stable: the real intervals of orders 3, 4, 5 are -6, -3,
    -90/49. Adams methods are zero-stable: their ρ(ζ) = ζ^k - ζ^(k-1) has the roots 1 and 0.
    """

    prefix = "am"
    orders = (2, 6)
    own_nodes = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        beta, *rest = adams_weights([1.0 - i for i in range(self.order)])
        check_method((1.0,), rest, beta, self.order)

    @property
    def n_history(self) -> int:
        return self.order - 2

    def look(self, f: Evaluator, z: State, step: Step, memory: History) -> History:
        return memory.add(None, f(z, step.at[self.nodes.index(0.0)]), step.l, self.order - 1)

    def equation(self, flat: Flat, step: Step, now: History) -> tuple[float, Tensor, Tensor]:
        offsets = relative(now.ls, step.h)
        beta, *rest = adams_weights((1.0, *offsets))
        ks = list(map(flat.pack, now.ks))
        zero = ks[0] * 0
        return beta, weighted(zero, step.h, rest, ks), weighted(zero, step.h, adams_weights(offsets), ks)

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of ρ(ζ) - z σ(ζ) at z = h λ, highest first (see solvers.stability)."""
        beta, first, *rest = adams_weights([1.0 - i for i in range(self.order)])
        return [1.0 - z * beta, -1.0 - z * first, *(-z * x for x in rest)]


METHODS: dict[str, ImplicitMultistep] = {
    method.name: method for method in (*map(BDF, range(1, 6)), *map(AdamsMoulton, range(2, 6)))}
