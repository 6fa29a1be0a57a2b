"""Splitting methods: the parts of a field take turns, each integrated by a base method (Strang 1968; McLachlan & Quispel 2002)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from solvers.base import Evaluator, Solver, State, Step
from solvers.explicit import METHODS as RUNGE_KUTTA

Window = tuple[float, float]  # (from, to) as fractions of the step


@dataclass(frozen=True)
class Splitting:
    """For a field with ``parts`` f = f_1 + ... + f_m: each part in turn over its windows of the step.

    Every part keeps its own depth, so l-dependent parts keep the order too. ``base`` is a name or a fixed-step
    solver. A field without parts is integrated by the base method alone. One part of m counts 1/m in NFE.
    """

    base: Solver | str = "euler"
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _at: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    windows: ClassVar[tuple[Window, ...]]
    splitting_order: ClassVar[int]
    prefix: ClassVar[str]

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint")

    def __post_init__(self) -> None:
        base = self.base
        if isinstance(base, str):
            if base not in RUNGE_KUTTA:
                raise ValueError(f"unknown base {base!r}; known by name: {', '.join(sorted(RUNGE_KUTTA))} "
                                 "(other fixed-step solvers as objects)")
            base = RUNGE_KUTTA[base]
        if base.is_adaptive:
            raise ValueError(f"base must be a fixed-step solver; {base.name} is adaptive")
        depths = [[start + c * (stop - start) for c in base.nodes] for start, stop in self.windows]
        nodes = tuple(sorted({x for row in depths for x in row}))
        put = object.__setattr__
        put(self, "base", base)
        put(self, "nodes", nodes)
        put(self, "_at", tuple(tuple(nodes.index(x) for x in row) for row in depths))

    @property
    def name(self) -> str:
        """lie(euler), strang(midpoint), ..."""
        return f"{self.prefix}({self.base.name})"

    @property
    def order(self) -> int:
        """Order for two or more parts; a base with memory does not see the other parts move, which leaves order 1."""
        one_step = getattr(self.base, "n_history", 0) == 0
        return min(self.base.order, self.splitting_order if one_step else 1)

    @property
    def n_stages(self) -> int:
        """Stages of the base method."""
        return self.base.n_stages

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        """(part, window) in the order in which they act."""
        raise NotImplementedError

    def nfe(self, n_steps: int, n_parts: int = 2) -> float:
        """Evaluations in n_steps steps of one piece, one part of n_parts counting 1 / n_parts."""
        if n_parts == 1:
            return self.base.nfe(n_steps)
        visits = [sum(part == i for part, _ in self.schedule(n_parts)) for i in range(n_parts)]
        return sum(self.base.nfe(n_steps * v) for v in visits) / n_parts

    def init(self, memory: tuple | None) -> tuple | None:
        """One base memory a part, made at the first step."""
        return None if memory is None else tuple(map(self.base.init, memory))

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h."""
        parts = f.parts
        memories = [self.base.init(None) for _ in parts] if memory is None else list(memory)
        l, h, at = step
        for part, window in self.schedule(len(parts)):
            start, stop = self.windows[window]
            inner = Step(l + start * h, (stop - start) * h, tuple(at[i] for i in self._at[window]))
            z, memories[part] = self.base.step(parts[part], z, inner, memories[part])
        return z, tuple(memories)


class LieTrotter(Splitting):
    """Each part over the whole step, one after the other: order 1 (Trotter 1959).

    With base ``euler``, h = 1 and the parts attention and feed-forward, a step is the textbook Transformer layer.
    """

    windows = ((0.0, 1.0),)
    splitting_order = 1
    prefix = "lie"

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        return [(part, 0) for part in range(n_parts)]


class Strang(Splitting):
    """Half a step of each part but the last, a whole one of the last, half steps back: order 2 (Strang 1968)."""

    windows = ((0.0, 0.5), (0.5, 1.0), (0.0, 1.0))
    splitting_order = 2
    prefix = "strang"

    def schedule(self, n_parts: int) -> list[tuple[int, int]]:
        forth = [(part, 0) for part in range(n_parts - 1)]
        back = [(part, 1) for part in reversed(range(n_parts - 1))]
        return [*forth, (n_parts - 1, 2), *back]


METHODS: dict[str, Splitting] = {}
