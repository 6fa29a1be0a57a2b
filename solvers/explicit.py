"""Explicit Runge-Kutta methods (eqs. 39-46): one step class, one table."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from solvers.base import Evaluator, State, Step, accumulate, add
from solvers.coefficients import EXPLICIT
from solvers.tableau import Tableau


@dataclass(frozen=True)
class ExplicitRungeKutta:
    """z' = z + h Σ b_i k_i with k_i = f(z + h Σ_{j<i} a_ij k_j, l + c_i h) (eqs. 39-40).

    Stages that the propagated solution does not need (an FSAL stage) are not evaluated: a fixed step costs
    ``tableau.n_evaluations`` evaluations of f.
    """

    tableau: Tableau
    name: str = "explicit_rk"
    nodes: tuple[float, ...] = field(init=False, repr=False)
    _rows: tuple = field(init=False, repr=False, compare=False)
    _weights: tuple = field(init=False, repr=False, compare=False)

    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint", "checkpoint_recursive", "adjoint")

    def __post_init__(self) -> None:
        t = self.tableau
        if not isinstance(t, Tableau):
            raise TypeError(f"tableau must be a solvers.Tableau, got {type(t).__name__}")
        if not t.is_explicit:
            raise ValueError("ExplicitRungeKutta needs a strictly lower triangular a; this tableau is implicit")
        n = t.n_evaluations
        nodes = tuple(sorted(set(t.c[:n])))
        put = object.__setattr__
        put(self, "nodes", nodes)
        put(self, "_rows", tuple((nodes.index(c), tuple((j, x) for j, x in enumerate(row) if x))
                                 for c, row in zip(t.c[:n], t.a[:n], strict=True)))
        put(self, "_weights", tuple((i, x) for i, x in enumerate(t.b[:n]) if x))

    @property
    def order(self) -> int:
        """Order of the propagated solution."""
        return self.tableau.order

    @property
    def embedded_order(self) -> int | None:
        """Order of the embedded solution, None where there is none."""
        return self.tableau.embedded_order

    @property
    def n_stages(self) -> int:
        """Rows of the tableau."""
        return self.tableau.n_stages

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece."""
        return n_steps * self.tableau.n_evaluations

    def init(self, memory: None) -> None:
        """One-step methods remember nothing."""
        return None

    def stages(self, f: Evaluator, z: State, step: Step) -> list[State]:
        """k_1 ... k_s."""
        h, at = step.h, step.at
        ks: list[State] = []
        for node, row in self._rows:
            ks.append(f(accumulate(z, h, row, ks) if row else z, at[node]))
        return ks

    def step(self, f: Evaluator, z: State, step: Step, memory: None) -> tuple[State, None]:
        """The state at step.l + step.h."""
        return accumulate(z, step.h, self._weights, self.stages(f, z, step)), None

    def finish(self, z: State, h: float, ks: list[State]) -> State:
        """z + h Σ b_i k_i."""
        return accumulate(z, h, self._weights, ks)

    def error(self, h: float, ks: list[State]) -> State:
        """h Σ (b_i - b_hat_i) k_i: the propagated solution less the embedded one, shaped like the state.

        ``ks`` holds every stage of the tableau. ``stages`` leaves out those that only the estimate needs (an FSAL
        stage, f at the end of the step, above all): append them first. Raises ValueError: no embedded row, or
        another number of stages.
        """
        t = self.tableau
        if t.b_hat is None:
            raise ValueError(f"{self.name} has no embedded row b_hat, so it gives no error estimate")
        if len(ks) != t.n_stages:
            raise ValueError(f"ks must hold all {t.n_stages} stages of {self.name}, those that only the error estimate "
                             f"needs included; got {len(ks)}")
        weights = [(h * (x - y), k) for x, y, k in zip(t.b, t.b_hat, ks, strict=True) if x != y]
        weight, k = weights[0] if weights else (0.0, ks[0])
        error = k * weight if isinstance(k, Tensor) else tuple(x * weight for x in k)
        for weight, k in weights[1:]:
            error = add(error, weight, k)
        return error


METHODS = {name: ExplicitRungeKutta(tableau, name) for name, tableau in EXPLICIT.items()}
