"""Integrates a model's field over depth. The only file here that imports solvers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

import solvers
from odeformer.context import Context
from odeformer.tables import at_least, look_up
from odeformer.weights import WEIGHTS
from solvers import Solution, SolverError
from solvers.imex import ImexRungeKutta
from solvers.learned import Learned
from solvers.splitting import Splitting

__all__ = ["DepthConfig", "Solution", "SolverError", "integrate"]

TAKES_PARTS = (Splitting, ImexRungeKutta)  # solvers that treat a field's parts by themselves
SPLITTINGS = {"lie": solvers.LieTrotter, "strang": solvers.Strang}


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """How depth is integrated.

    ``solver``: a name from SOLVERS or a solver object; ``solver_options`` go to it. ``steps_per_layer``: equal steps a
    layer; ``n_steps``: their total number instead, where weights do not jump between layers. ``rtol``, ``atol``: for
    adaptive solvers. ``weights``: a key of WEIGHTS. ``gradient``: a gradient mode of solve().
    """

    solver: Any = "euler"
    steps_per_layer: int = 1
    n_steps: int | None = None
    weights: str | type = "piecewise"
    gradient: str = "backprop"
    rtol: float | None = None
    atol: float | None = None
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    weights_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("steps_per_layer", self.steps_per_layer, 1)
        if self.n_steps is not None:
            at_least("n_steps", self.n_steps, 1)
            if self.steps_per_layer != 1:
                raise ValueError(f"n_steps and steps_per_layer must not both be given; got {self.n_steps} and "
                                 f"{self.steps_per_layer}")
        look_up(WEIGHTS, self.weights, "weights")
        solver = self.make_solver()
        for name, default in (("steps_per_layer", 1), ("n_steps", None)):
            if solver.is_adaptive and getattr(self, name) != default:
                raise ValueError(f"{name} is for fixed-step solvers; {solver.name!r} chooses its steps from rtol and "
                                 "atol")
        if self.gradient not in solver.gradients:  # solve() refuses what the coupling then rules out
            raise ValueError(f"gradient must be one of {', '.join(solver.gradients)} for solver {solver.name!r}, got "
                             f"{self.gradient!r}")
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not solver.is_adaptive:
                raise ValueError(f"{name} is for adaptive solvers; {solver.name!r} takes fixed steps")
            if value is not None and not (isinstance(value, int | float) and value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")

    def make_solver(self, **shape: int) -> Any:
        """The solver, with its options. One with learned coefficients is a module, made anew.

        ``shape``: the model's d_model and number of steps, for learned solvers that have such options.
        """
        options = dict(self.solver_options)
        if isinstance(self.solver, str) and isinstance(solvers.SOLVERS.get(self.solver), Learned):
            known = inspect.signature(type(solvers.SOLVERS[self.solver])).parameters
            options = {name: value for name, value in shape.items() if name in known} | options
        return solvers.get_solver(self.solver, **options)

    def steps(self, n_layers: int) -> int:
        """Steps of a fixed-step solve over n_layers."""
        return self.n_steps or n_layers * self.steps_per_layer


def integrate(f: Any, z: Tensor, solver: Any, config: DepthConfig, n_layers: int, context: Context, *,
              save: bool = False) -> Solution:
    """Take z (batch, tokens, d_model) from l = 0 to l = n_layers with ``solver``, which ``config.make_solver()`` made.

    A coupling that splits (lie, strang) wraps a fixed-step solver, unless that takes a field's parts by itself
    (``strang``, ``imex_euler``). Adaptive solvers, and those that remember earlier states (``leapfrog``, ``bdf2``,
    ``dense``), which a splitting would move in between, integrate the sum of the parts, to which splitting converges
    as h goes to 0.
    ``save`` keeps the state at every step (adaptive: at every layer).

    Raises ValueError for an adaptive or implicit solver in a causal model.
    """
    span = (0.0, float(n_layers))
    if context.causal and (solver.is_adaptive or solver.is_implicit):
        kind, chosen = (("adaptive", "step sizes chosen from") if solver.is_adaptive else
                        ("implicit", "iterations that stop at an error measured over"))
        raise ValueError(f"solver {solver.name!r} is {kind} and this model is causal: {chosen} a whole sequence let "
                         "later tokens move earlier outputs. Use an explicit fixed-step solver, such as 'rk4'")
    if solver.is_adaptive:
        return solvers.solve(f, z, span=span, solver=solver, rtol=config.rtol, atol=config.atol, mask=context.mask,
                             gradient=config.gradient, save_at=range(n_layers + 1) if save else None)
    splitting = _splitting(f)
    if splitting is not None:
        solver = split(solver, SPLITTINGS[splitting])
    return solvers.solve(f, z, span=span, solver=solver, n_steps=config.steps(n_layers), mask=context.mask,
                         gradient=config.gradient, save_at="steps" if save else None)


def split(solver: Any, splitting: type[Splitting]) -> Any:
    """The solver with a field's parts taking turns, where it allows that (see ``integrate``).

    A reversible wrapper stays outside, so that it still reverses.
    """
    if isinstance(solver, solvers.Reversible):
        return replace(solver, base=split(solver.base, splitting), name=None)
    if isinstance(solver, TAKES_PARTS) or getattr(solver, "remembers_states", False):
        return solver
    return splitting(solver)


def check_coupling(solver: Any, coupling: Any, gradient: str) -> None:
    """Raises ValueError where the coupling splits the solver and that rules out the gradient mode."""
    splitting = getattr(coupling, "splitting", None)
    if solver.is_adaptive or splitting is None:
        return
    chosen = split(solver, SPLITTINGS[splitting])
    if gradient not in chosen.gradients:
        raise ValueError(f"gradient must be one of {', '.join(chosen.gradients)} for solver {solver.name!r} under "
                         f"coupling {splitting!r}, got {gradient!r}; couplings 'parallel' and 'composed' do not split")


def _splitting(f: Any) -> str | None:
    pieces = getattr(f, "pieces", None)
    return getattr(pieces[0][2] if pieces else f, "splitting", None)
