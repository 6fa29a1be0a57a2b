"""Adams-Bashforth-Moulton methods: an explicit prediction, corrected once by the implicit formula of the same order.

P: z* = z_n + h Σ b_i f_{n+1-i} (Adams-Bashforth). E: f* = f(z*, l_{n+1}).
C: z_{n+1} = z_n + h (β_0 f* + Σ β_i f_{n+1-i}) (Adams-Moulton). E: f_{n+1} = f(z_{n+1}, l_{n+1}), which PEC leaves out.
(Hairer, Nørsett & Wanner 1993, III.1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from solvers.base import Evaluator, State, Step, combine
from solvers.explicit import ExplicitRungeKutta
from solvers.multistep import (
    STARTERS,
    History,
    adams_weights,
    check_method,
    check_order,
    find_starter,
    is_even,
    nodes_with,
    relative,
    start,
)

Weights = tuple[tuple[float, ...], tuple[float, ...]]  # of the prediction, of the correction


@dataclass(frozen=True)
class PredictorCorrector:
    """Adams-Bashforth of order p predicts, Adams-Moulton of order p corrects: p - 1 earlier increments are remembered.

    ``order``: 2 to 8. Weights come from the actual points, on an even grid they are the classical ones. The first
    p - 1 steps of a piece are taken by ``starter``, a Runge-Kutta method of at least order p. All Adams methods are
    zero-stable: their ρ(ζ) = ζ^p - ζ^(p-1) has the roots 1 and 0.

    Raises ValueError: another order, a starter of lower order.
    """

    order: int
    starter: ExplicitRungeKutta | str | None = field(default=None, kw_only=True)
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _even: Weights = field(init=False, repr=False, compare=False)

    suffix: ClassVar[str]

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint", "checkpoint_recursive", "adjoint")

    def __post_init__(self) -> None:
        check_order(self.order, 2, max(STARTERS))
        starter = find_starter(self.starter, self.order)
        nodes, places = nodes_with(starter, 0.0, 1.0)
        put = object.__setattr__
        put(self, "starter", starter)
        put(self, "nodes", nodes)
        put(self, "_places", places)
        put(self, "_even", self.weights([-float(i) for i in range(self.order)]))
        predict, (beta, *correct) = self._even
        check_method((1.0,), predict, 0.0, self.order)
        check_method((1.0,), correct, beta, self.order)

    @property
    def name(self) -> str:
        """abm2, abm2_pec, ..."""
        return f"abm{self.order}{self.suffix}"

    @property
    def n_history(self) -> int:
        """Earlier points a step needs, besides the current one."""
        return self.order - 1

    def init(self, memory: History | None) -> History:
        """An empty history: f may jump between pieces."""
        return History()

    def predict_and_correct(self, f: Evaluator, z: State, step: Step, now: History) -> tuple[State, State]:
        """z_{n+1}, and f at the prediction. ``now``: the current increment and order - 1 earlier ones."""
        offsets = relative(now.ls, step.h)
        predict, correct = self._even if is_even(offsets) else self.weights(offsets)
        k = f(combine(z, step.h, predict, now.ks), step.at[self.nodes.index(1.0)])
        return combine(z, step.h, correct, (k, *now.ks[: self.order - 1])), k

    def weights(self, offsets: Sequence[float]) -> Weights:
        """b_1 ... b_p and β_0 ... β_{p-1} for known points at ``offsets`` = (l_i - l_n) / h, of which there are p."""
        return adams_weights(offsets), adams_weights((1.0, *offsets[:-1]))


@dataclass(frozen=True)
class PECE(PredictorCorrector):
    """Predict, evaluate, correct, evaluate: two evaluations a step."""

    suffix = ""
    n_stages = 2

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece: the starter's for the first ones, then two a step."""
        first = min(n_steps, self.n_history)
        return self.starter.nfe(first) + 2 * (n_steps - first)

    def step(self, f: Evaluator, z: State, step: Step, memory: History) -> tuple[State, History]:
        """The state at step.l + step.h; the last evaluation is that at the start of the step after."""
        n = self.n_history
        if len(memory.ks) < n:
            new, k = start(self.starter, self._places, f, z, step)
            return new, memory.add(None, k, step.l, n)
        now = memory.add(None, f(z, step.at[self.nodes.index(0.0)]), step.l, n + 1)
        new, _ = self.predict_and_correct(f, z, step, now)
        return new, History((), now.ks[:n], now.ls[:n])

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of the recurrence for z' = λ z, z = h λ, highest first (see solvers.stability).

        ζ^p = (1 + z β_0) ζ^(p-1) + Σ (z² β_0 b_i + z β_i) ζ^(p-i).
        """
        b, (beta0, *beta) = self._even
        first, *rest = (-(z * z * beta0 * x + z * y) for x, y in zip(b, [*beta, 0.0], strict=True))
        return [1.0, first - 1.0 - z * beta0, *rest]


@dataclass(frozen=True)
class PEC(PredictorCorrector):
    """Predict, evaluate, correct: one evaluation a step, that at the prediction, which the history then holds.

    Half the work of PECE and the same order, but a smaller stability region.
    """

    suffix = "_pec"
    n_stages = 1

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece: the starter's, one more where it hands over, one a step."""
        first = min(n_steps, self.n_history)
        return self.starter.nfe(first) + n_steps - first + (n_steps > first)

    def step(self, f: Evaluator, z: State, step: Step, memory: History) -> tuple[State, History]:
        """The state at step.l + step.h. Once under way the history begins with f at the last prediction."""
        n = self.n_history
        if len(memory.ks) < n:
            new, k = start(self.starter, self._places, f, z, step)
            return new, memory.add(None, k, step.l, n)
        if len(memory.ks) == n:
            memory = History((), (f(z, step.at[self.nodes.index(0.0)]), *memory.ks), memory.ls)
        now = History((), memory.ks, (step.l, *memory.ls))
        new, k = self.predict_and_correct(f, z, step, now)
        return new, History((), (k, *now.ks[:n]), now.ls[:n])

    def characteristic(self, z: complex) -> list:
        """Coefficients in ζ of the recurrence for z' = λ z, z = h λ, highest first (see solvers.stability).

        With the predictions q: q_{n+1} = z_n + z Σ b_i q_{n+1-i} and z_{n+1} = z_n + z (β_0 q_{n+1} + Σ β_i q_{n+1-i}).
        The z_n of the first put into the second leave
        ζ^(p+1) = (1 + z b_1 + z β_0) ζ^p + Σ_{i=1}^p z (b_{i+1} - b_i + β_i) ζ^(p-i), where b_{p+1} = 0.
        """
        b, (beta0, *beta) = self._even
        rest = [-z * (after - x + y) for x, after, y in zip(b, [*b[1:], 0.0], [*beta, 0.0], strict=True)]
        return [1.0, -(1.0 + z * (b[0] + beta0)), *rest]


METHODS: dict[str, PredictorCorrector] = {
    method.name: method for kind in (PECE, PEC) for method in map(kind, range(2, 6))}
