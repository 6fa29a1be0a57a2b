"""Algebraically reversible methods: a step can be undone exactly, up to rounding, without solving equations.

With ``gradient="reversible"`` backward reconstructs the states instead of keeping them. Rounding is amplified where the
inverse of a step stretches; what that amounted to is measured (``Solution.reconstruction_error``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from solvers.base import Evaluator, Solver, State, Step, add
from solvers.explicit import METHODS as RUNGE_KUTTA
from solvers.explicit import ExplicitRungeKutta
from solvers.replay import Plain, parts_of

MIDPOINT: ExplicitRungeKutta = RUNGE_KUTTA["midpoint"]


@dataclass(frozen=True, kw_only=True)
class ReversibleMethod:
    """What reversible methods share.

    ``reverse(f, z, step, memory)`` undoes ``step``: from the state and memory after it to those before it.
    ``replay_order(n)`` names the evaluations that it repeats, in its order, by their number among the n that the step
    made (-1: the last one of the step before), so that random numbers can be replayed.
    ``reconstruction_bound``: largest relative error of a reconstructed state that ``gradient="reversible"`` accepts.
    """

    reconstruction_bound: float = 1e-2

    order: ClassVar[int]
    n_stages: ClassVar[int]
    nodes: ClassVar[tuple[float, ...]]

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = True
    gradients = ("backprop", "checkpoint", "checkpoint_recursive", "adjoint", "reversible")

    def __post_init__(self) -> None:
        if not self.reconstruction_bound > 0:
            raise ValueError(f"reconstruction_bound must be above 0, got {self.reconstruction_bound}")

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece."""
        raise NotImplementedError

    def init(self, memory: Any) -> Any:
        """A piece begins with an empty memory."""
        return None

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h."""
        raise NotImplementedError

    def reverse(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l and the memory with which the step was taken."""
        raise NotImplementedError

    def replay_order(self, n: int) -> tuple[int, ...]:
        """The step's evaluations, in the order in which ``reverse`` makes them."""
        return tuple(range(n))


class Lengths(Plain):
    """The lengths of the steps of a piece so far, newest first: a linked list."""

    __slots__ = ("before", "h")

    def __init__(self, h: float, before: Lengths | None):
        self.h, self.before = h, before


class Past(NamedTuple):
    """The state before the last step, and the lengths of the steps."""

    z: State
    lengths: Lengths


@dataclass(frozen=True, kw_only=True)
class Leapfrog(ReversibleMethod):
    """The two-step midpoint rule z_{n+1} = z_{n-1} + 2 h f(z_n): order 2, one evaluation a step.

    On an uneven grid, r = h_n / h_{n-1}: z_{n+1} = (1 - r²) z_n + r² z_{n-1} + h_n (1 + r) f(z_n), again of order 2.
    The explicit midpoint rule takes the first step of a piece, or of the span with ``across_pieces`` (which leaves
    order 1 where f jumps). Stable for h λ within ±i only: where f dissipates, z_n and z_{n+1} drift apart.
    """

    remembers_states = True  # so that splitting, which moves states in between, refuses it

    name: str = "leapfrog"
    across_pieces: bool = False

    order = 2
    n_stages = 1
    nodes = MIDPOINT.nodes

    def nfe(self, n_steps: int) -> int:
        """Two evaluations for the first step, one for each other."""
        return n_steps + 1

    def init(self, memory: Past | None) -> Past | None:
        """Nothing, or what the piece before leaves where ``across_pieces`` is set."""
        return memory if self.across_pieces else None

    def step(self, f: Evaluator, z: State, step: Step, memory: Past | None) -> tuple[State, Past]:
        if memory is None:
            return MIDPOINT.step(f, z, step, None)[0], Past(z, Lengths(step.h, None))
        k, r = f(z, step.at[0]), step.h / memory.lengths.h
        new = add(memory.z, 2 * step.h, k) if abs(r - 1) < 1e-9 else add(
            add(z, r * r, add(memory.z, -1.0, z)), step.h * (1 + r), k)
        return new, Past(z, Lengths(step.h, memory.lengths))

    def reverse(self, f: Evaluator, z: State, step: Step, memory: Past) -> tuple[State, Past | None]:
        """z_n is in the memory; z_{n-1} follows from z_{n+1}, z_n and f(z_n)."""
        last, before = memory.z, memory.lengths.before
        if before is None:
            return last, None
        k, r = f(last, step.at[0]), step.h / before.h
        if abs(r - 1) < 1e-9:
            return last, Past(add(z, -2 * step.h, k), before)
        return last, Past(add(add(last, 1 / (r * r), add(z, -1.0, last)), -step.h * (1 + r) / (r * r), k), before)

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of ζ² - 2 z ζ - 1 at z = h λ, highest first (see solvers.stability)."""
        return [1.0, -2 * z, -1.0]


@dataclass(frozen=True, kw_only=True)
class ReversibleHeun(ReversibleMethod):
    """Reversible Heun (Kidger, Foster, Li & Lyons 2021): order 2, one evaluation a step and one a piece.

    w' = 2 z - w + h f(w, l),  z' = z + h/2 (f(w, l) + f(w', l + h)); w starts as z.
    """

    remembers_states = True  # so that splitting, which moves states in between, refuses it

    name: str = "reversible_heun"

    order = 2
    n_stages = 2
    nodes = (0.0, 1.0)

    def nfe(self, n_steps: int) -> int:
        """One evaluation a step, and one at the start."""
        return n_steps + 1

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        h = step.h
        w, k = (z, f(z, step.at[0])) if memory is None else memory
        w = add(add(z, 1.0, add(z, -1.0, w)), h, k)
        k1 = f(w, step.at[1])
        return add(add(z, h / 2, k), h / 2, k1), (w, k1)

    def reverse(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        w, k1 = memory
        h = step.h
        w = add(add(z, 1.0, add(z, -1.0, w)), -h, k1)
        k = f(w, step.at[0])
        return add(add(z, -h / 2, k1), -h / 2, k), (w, k)

    def replay_order(self, n: int) -> tuple[int, ...]:
        """f(w, l) was the last evaluation of the step before; in the first step of a piece its own first one."""
        return (0,) if n == 2 else (-1,)


@dataclass(frozen=True, kw_only=True)
class AsynchronousLeapfrog(ReversibleMethod):
    """Asynchronous leapfrog (Mutze 2013; MALI, Zhuang et al. 2021): order 2, one evaluation a step and one a piece.

    x = z + h/2 v,  v' = 2 f(x, l + h/2) - v,  z' = x + h/2 v'; v starts as f(z, l).
    """

    name: str = "alf"

    order = 2
    n_stages = 1
    nodes = (0.0, 0.5)

    def nfe(self, n_steps: int) -> int:
        """One evaluation a step, and one at the start."""
        return n_steps + 1

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        v = f(z, step.at[0]) if memory is None else memory
        x = add(z, step.h / 2, v)
        u = f(x, step.at[1])
        v = add(u, 1.0, add(u, -1.0, v))
        return add(x, step.h / 2, v), v

    def reverse(self, f: Evaluator, z: State, step: Step, memory: State) -> tuple[State, State]:
        x = add(z, -step.h / 2, memory)
        u = f(x, step.at[1])
        v = add(u, 1.0, add(u, -1.0, memory))
        return add(x, -step.h / 2, v), v

    def replay_order(self, n: int) -> tuple[int, ...]:
        """f at the middle of the step; the f that v starts from is not needed again."""
        return (n - 1,)


@dataclass(frozen=True, kw_only=True)
class Momentum(ReversibleMethod):
    """Momentum residual networks (Sander, Ablin, Blondel & Peyré 2021): v' = γ v + (1 - γ) f(z, l),  z' = z + h v'.

    The two-step method z_{n+1} = (1 + γ) z_n - γ z_{n-1} + h (1 - γ) f_n. Order 1 for fixed γ < 1, with an error
    constant (1 + γ) / (1 - γ) times Euler's, 19 times for γ = 0.9: v trails f by about γ / (1 - γ) steps, and the order
    shows only where that is short against the scale of f. Where 1 - γ goes to 0 with h it solves ε z'' + z' = f
    instead, ε = h γ / (1 - γ), which is order 0 for z' = f. v starts as f(z0), which makes the first step Euler's (the
    paper starts from 0), and goes on across pieces. Going back multiplies rounding by 1 / γ a step.
    """

    name: str = "momentum"
    gamma: float = 0.9

    order = 1
    n_stages = 1
    nodes = (0.0,)
    across_pieces = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must lie between 0 and 1, got {self.gamma}")

    def nfe(self, n_steps: int) -> int:
        """One evaluation a step."""
        return n_steps

    def init(self, memory: State | None) -> State | None:
        """The velocity goes on across pieces."""
        return memory

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        k = f(z, step.at[0])
        v = k if memory is None else add(k, self.gamma, add(memory, -1.0, k))
        return add(z, step.h, v), v

    def reverse(self, f: Evaluator, z: State, step: Step, memory: State) -> tuple[State, State]:
        z = add(z, -step.h, memory)
        k = f(z, step.at[0])
        return z, add(k, 1 / self.gamma, add(memory, -1.0, k))

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of ζ² - (1 + γ + (1 - γ) z) ζ + γ at z = h λ, highest first (see solvers.stability)."""
        return [1.0, -(1 + self.gamma + (1 - self.gamma) * z), self.gamma]


@dataclass(frozen=True, kw_only=True)
class RevNet(ReversibleMethod):
    """Coupled steps (RevNet, Gomez et al. 2017) on a doubled state: x' = x + h f(y, l),  y' = y + h f(x', l + h).

    The state is the mean of x and y, which start equal: order 2 (x and y alone are of order 1), two evaluations a step.
    The memory is half their difference, of size O(h); it goes on across pieces.
    """

    name: str = "revnet"

    order = 2
    n_stages = 2
    nodes = (0.0, 1.0)

    def nfe(self, n_steps: int) -> int:
        """Two evaluations a step."""
        return 2 * n_steps

    def init(self, memory: State | None) -> State | None:
        """The difference goes on across pieces."""
        return memory

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        x, y = (z, z) if memory is None else (add(z, 1.0, memory), add(z, -1.0, memory))
        x = add(x, step.h, f(y, step.at[0]))
        y = add(y, step.h, f(x, step.at[1]))
        return _mean(x, y)

    def reverse(self, f: Evaluator, z: State, step: Step, memory: State) -> tuple[State, State]:
        x, y = add(z, 1.0, memory), add(z, -1.0, memory)
        y = add(y, -step.h, f(x, step.at[1]))
        x = add(x, -step.h, f(y, step.at[0]))
        return _mean(x, y)

    def replay_order(self, n: int) -> tuple[int, ...]:
        """f(x') first, then f(y)."""
        return (1, 0)


def _mean(x: State, y: State) -> tuple[State, State]:
    """(x + y) / 2 and (x - y) / 2."""
    half = tuple(0.5 * a for a in add(x, -1.0, y)) if isinstance(x, tuple) else 0.5 * add(x, -1.0, y)
    return add(x, -1.0, half), half


@dataclass(frozen=True)
class Reversible(ReversibleMethod):
    """Any one-step method made reversible (McCallum & Foster 2024), of the same order, at twice its evaluations.

    With Φ_h a step of ``base`` and Ψ_h(z) = Φ_h(z) - z:
    z' = λ z + (1 - λ) w + Ψ_h(w, l),  w' = w - Ψ_{-h}(z', l + h); w starts as z and goes on across pieces.

    ``base``: a name or a solver. ``coupling`` λ: at most 1; the closer to it the less rounding grows on the way back
    (by 1 / λ a step) and the smaller the stability region. The state should be float32 or better.
    """

    remembers_states = True  # so that splitting, which moves states in between, refuses it

    base: Solver | str
    coupling: float = 0.999
    name: str | None = field(default=None, kw_only=True)
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _at: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.coupling <= 1:
            raise ValueError(f"coupling must lie above 0 and be at most 1, got {self.coupling}")
        base = _base(self.base)
        depths = (base.nodes, tuple(1 - c for c in base.nodes))
        nodes = tuple(sorted({x for row in depths for x in row}))
        put = object.__setattr__
        put(self, "base", base)
        put(self, "name", self.name or f"reversible({base.name})")
        put(self, "nodes", nodes)
        put(self, "_at", tuple(tuple(nodes.index(x) for x in row) for row in depths))

    @property
    def order(self) -> int:
        """The order of the base method."""
        return self.base.order

    @property
    def n_stages(self) -> int:
        """Stages of the base method, there and back."""
        return 2 * self.base.n_stages

    @property
    def is_implicit(self) -> bool:
        """Whether the base method is."""
        return self.base.is_implicit

    @property
    def gradients(self) -> tuple[str, ...]:
        """All modes; with an implicit base those that go through its step."""
        return ("backprop", "reversible") if self.is_implicit else ReversibleMethod.gradients

    @property
    def nfe(self) -> Callable[[int], float] | None:
        """n_steps -> twice the evaluations of the base method; None where those depend on the values."""
        return None if self.base.nfe is None else lambda n_steps: 2 * self.base.nfe(n_steps)

    def init(self, memory: State | None) -> State | None:
        """The companion state goes on across pieces."""
        return memory

    def step(self, f: Evaluator, z: State, step: Step, memory: State | None) -> tuple[State, State]:
        w = z if memory is None else memory
        new = self._forth(f, w, step)
        if memory is not None:
            new = add(new, self.coupling, add(z, -1.0, w))
        return new, add(w, 1.0, add(new, -1.0, self._back(f, new, step)))

    def reverse(self, f: Evaluator, z: State, step: Step, memory: State) -> tuple[State, State]:
        w = add(memory, -1.0, add(z, -1.0, self._back(f, z, step)))
        return add(w, 1 / self.coupling, add(z, -1.0, self._forth(f, w, step))), w

    def replay_order(self, n: int) -> tuple[int, ...]:
        """First the second half of the evaluations, then the first half."""
        return (*range(n // 2, n), *range(n // 2))

    def _forth(self, f: Evaluator, z: State, step: Step) -> State:
        return self._take(f, z, Step(step.l, step.h, tuple(step.at[i] for i in self._at[0])))

    def _back(self, f: Evaluator, z: State, step: Step) -> State:
        return self._take(f, z, Step(step.l + step.h, -step.h, tuple(step.at[i] for i in self._at[1])))

    def _take(self, f: Evaluator, z: State, step: Step) -> State:
        z, memory = self.base.step(f, z, step, self.base.init(None))
        if memory is not None and parts_of(memory):
            raise ValueError(f"Reversible needs a one-step base; {self.base.name} remembers earlier steps")
        return z


def _base(base: Solver | str) -> Solver:
    """A one-step method by name, or the object itself. Raises ValueError for any other."""
    if isinstance(base, str) and base in RUNGE_KUTTA:
        return RUNGE_KUTTA[base]
    from solvers.registry import get_solver

    base = get_solver(base)
    if base.is_adaptive or base.is_reversible or getattr(base, "n_history", 0):
        kind = "adaptive" if base.is_adaptive else "reversible itself" if base.is_reversible else "a multistep method"
        raise ValueError(f"Reversible needs a one-step method of fixed steps as its base; {base.name} is {kind}")
    return base


METHODS: dict[str, ReversibleMethod] = {
    "leapfrog": Leapfrog(),
    "reversible_heun": ReversibleHeun(),
    "alf": AsynchronousLeapfrog(),
    "momentum": Momentum(),
    "revnet": RevNet(),
    "reversible_midpoint": Reversible("midpoint", name="reversible_midpoint"),
    "reversible_rk4": Reversible("rk4", name="reversible_rk4"),
}
