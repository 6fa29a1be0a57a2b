"""Splitting methods: the parts of a field take turns, each integrated by a base method (McLachlan & Quispel 2002)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from solvers.base import Evaluator, Solver, State, Step
from solvers.explicit import METHODS as RUNGE_KUTTA
from solvers.kept import kept
from solvers.tableau import Tableau

GRADIENTS = ("backprop", "checkpoint", "checkpoint_recursive", "adjoint")
Window = tuple[float, float]  # (from, to) as fractions of the step
WHOLE: Window = (0.0, 1.0)


@kept(length=lambda windows, nodes: len(windows) * len(nodes))
def _clocks(windows: tuple[Window, ...], nodes: tuple[float, ...]) -> tuple[tuple[float, ...], tuple]:
    """The nodes of a step of which a base method with ``nodes`` takes each window, and for each window which of them
    are its own; None: all of them."""
    depths = [[start + c * (stop - start) for c in nodes] for start, stop in windows]
    every = tuple(sorted({x for row in depths for x in row}))
    return every, tuple([None if window == WHOLE and len(row) == len(every) else tuple(map(every.index, row))
                         for window, row in zip(windows, depths, strict=True)])


@dataclass(frozen=True)
class Splitting:
    """For a field with ``parts`` f = f_1 + ... + f_m: each part in turn over its windows of the step.

    ``base`` is a name or a fixed-step solver; a class says which it takes where none is given. A field without parts
    is integrated by the base method over the same windows, as a field with one part. One part of m counts 1/m in NFE.

    Every part keeps its own clock: part i has been advanced to depth l_i when it is next called with l in
    [l_i, l_i + its window], whatever the others have done, and at the end of a step all clocks agree. So the parts may
    depend on l and the order holds: with l as one more component of the state that every part advances for itself, the
    composition is that of an autonomous field.

    Raises ValueError: an unknown or an adaptive base.
    """

    base: Solver | str | None = None
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _at: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    windows: ClassVar[tuple[Window, ...]]
    splitting_order: ClassVar[int]
    prefix: ClassVar[str]
    default: ClassVar[str]

    embedded_order = None
    is_adaptive = False
    is_reversible = False

    def __post_init__(self) -> None:
        base = self.default if self.base is None else self.base
        if isinstance(base, str):
            if base not in RUNGE_KUTTA:
                raise ValueError(f"unknown base {base!r}; known by name: {', '.join(sorted(RUNGE_KUTTA))} "
                                 "(other fixed-step solvers as objects)")
            base = RUNGE_KUTTA[base]
        if isinstance(base, type) or not hasattr(base, "is_adaptive"):
            raise TypeError(f"base must be a name or a solver object, got {base!r}")
        if getattr(base, "remembers_states", False):
            raise ValueError(f"base must not remember earlier states, which splitting moves in between; {base.name} "
                             "does (wrap the other way round for a reversible method: Reversible(LieTrotter(base)))")
        if base.is_adaptive:
            raise ValueError(f"base must be a fixed-step solver; {base.name} is adaptive")
        put = object.__setattr__
        put(self, "base", base)
        for name, value in zip(("nodes", "_at"), _clocks(self.windows, tuple(base.nodes)), strict=True):
            put(self, name, value)

    @property
    def name(self) -> str:
        """lie, strang, yoshida4 with the default base; lie(rk4), strang(ab2), ... with another."""
        return self.prefix if self.base.name == self.default else f"{self.prefix}({self.base.name})"

    @property
    def order(self) -> int:
        """Order for two or more parts; a base with memory does not see the other parts move, which leaves order 1."""
        one_step = getattr(self.base, "n_history", 0) == 0
        return min(self.base.order, self.splitting_order if one_step else 1)

    @property
    def n_stages(self) -> int:
        """Stages of the base method."""
        return self.base.n_stages

    @property
    def is_implicit(self) -> bool:
        """Whether the base method is."""
        return self.base.is_implicit

    @property
    def gradients(self) -> tuple[str, ...]:
        """Of the modes that a composition allows, those of the base method."""
        return tuple(mode for mode in GRADIENTS if mode in self.base.gradients)

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        """(part, window) in the order in which they act."""
        raise NotImplementedError

    def nfe(self, n_steps: int, n_parts: int = 2) -> float | None:
        """Evaluations in n_steps steps of one piece, one part of n_parts counting 1 / n_parts.

        None for a base method whose evaluations depend on the values (an implicit one).
        """
        if self.base.nfe is None:
            return None
        visits = [sum(part == i for part, _ in self.schedule(n_parts)) for i in range(n_parts)]
        inner = {"n_parts": 1} if isinstance(self.base, Splitting) else {}
        return sum(self.base.nfe(n_steps * v, **inner) for v in visits) / n_parts

    def init(self, memory: tuple | None) -> tuple | None:
        """One base memory a part, made at the first step."""
        return None if memory is None else tuple(map(self.base.init, memory))

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h."""
        parts, base = f.parts, self.base
        fresh = memory is None or len(memory) != len(parts)  # of a piece with other parts nothing can be remembered
        memories = [base.init(None) for _ in parts] if fresh else list(memory)
        l, h, at = step
        for part, window in self.schedule(len(parts)):
            inner, mine = step, self._at[window]
            if mine is not None:
                start, stop = self.windows[window]
                inner = Step(l + start * h, (stop - start) * h, tuple([at[i] for i in mine]))
            z, memories[part] = base.step(parts[part], z, inner, memories[part])
        return z, tuple(memories)


class LieTrotter(Splitting):
    """Each part over the whole step, one after the other: order 1 (Trotter 1959). Base ``euler`` unless given.

    With base ``euler``, h = 1 and the parts attention and feed-forward, a step is the textbook Transformer layer.
    """

    windows = ((0.0, 1.0),)
    splitting_order = 1
    prefix = "lie"
    default = "euler"

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        return [(part, 0) for part in range(n_parts)]


def _strang(n_parts: int, first: int) -> list[tuple[int, int]]:
    """The visits of a Strang step whose windows stand at ``first``: first half, second half, whole."""
    forth = [(part, first) for part in range(n_parts - 1)]
    back = [(part, first + 1) for part in reversed(range(n_parts - 1))]
    return [*forth, (n_parts - 1, first + 2), *back]


class Strang(Splitting):
    """Half a step of each part but the last, a whole one of the last, half steps back: order 2 (Strang 1968).

    Base ``midpoint`` unless given; a base of order 1 leaves order 1.
    """

    windows = ((0.0, 0.5), (0.5, 1.0), (0.0, 1.0))
    splitting_order = 2
    prefix = "strang"
    default = "midpoint"

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        return _strang(n_parts, 0)


W1 = 1 / (2 - 2 ** (1 / 3))  # w_1, then w_0 = 1 - 2 w_1 = -1.7024: the middle step runs backwards


def _halved(start: float, stop: float) -> tuple[Window, Window, Window]:
    middle = (start + stop) / 2
    return (start, middle), (middle, stop), (start, stop)


def _is_self_adjoint(tableau: Tableau | None) -> bool:
    """Whether a step of -h undoes a step of h: a_ij + a_{s+1-i, s+1-j} = b_j (Hairer, Nørsett & Wanner 1993, II.8)."""
    if tableau is None or tableau.is_explicit:
        return False
    turned = [row[::-1] for row in tableau.a[::-1]]
    return all(abs(x + y - b) < 1e-12 for row, other in zip(tableau.a, turned, strict=True)
               for x, y, b in zip(row, other, tableau.b, strict=True))


class Yoshida4(Splitting):
    """Strang steps of w_1 h, w_0 h, w_1 h with w_1 = 1 / (2 - 2^(1/3)), w_0 = 1 - 2 w_1: order 4 (Yoshida 1990).

    Base ``rk4`` unless given. As 2 w_1^3 + w_0^3 = 0 also cancels the leading error of a base of order 2, such a base
    gives order 3, and order 4 where it is its own adjoint, as the implicit midpoint rule is. The middle step runs
    backwards: f is called at depths from l - 0.35 h to l + 1.35 h, so the field must be smooth a little beyond the ends
    of its pieces, and what damps is undone in between, which suits oscillation rather than decay.
    """

    windows = (*_halved(0.0, W1), *_halved(W1, 1 - W1), *_halved(1 - W1, 1.0))
    splitting_order = 4
    prefix = "yoshida4"
    default = "rk4"

    @property
    def order(self) -> int:
        """Order for two or more parts."""
        if self.base.order != 2 or getattr(self.base, "n_history", 0) or self.base.is_reversible:
            return super().order  # reversible methods carry more than the state, which does not compose
        return 4 if _is_self_adjoint(getattr(self.base, "tableau", None)) else 3

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        return [visit for first in (0, 3, 6) for visit in _strang(n_parts, first)]


METHODS: dict[str, Splitting] = {method.name: method for method in (LieTrotter(), Strang(), Yoshida4())}
