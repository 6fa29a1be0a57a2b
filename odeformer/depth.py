"""Integrates a model's field over depth. The only file here that imports solvers."""

from __future__ import annotations

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
        if self.gradient not in solver.gradients:  # solve() refuses what the coupling then rules out
            raise ValueError(f"gradient must be one of {', '.join(solver.gradients)} for solver {solver.name!r}, got "
                             f"{self.gradient!r}")
        for name in ("rtol", "atol"):
            if getattr(self, name) is not None and not solver.is_adaptive:
                raise ValueError(f"{name} is for adaptive solvers; {solver.name!r} takes fixed steps")

    def make_solver(self) -> Any:
        """The solver, with its options. One with learned coefficients is a module, made anew."""
        return solvers.get_solver(self.solver, **self.solver_options)


def integrate(f: Any, z: Tensor, solver: Any, config: DepthConfig, n_layers: int, context: Context, *,
              save: bool = False) -> Solution:
    """Take z (batch, tokens, d_model) from l = 0 to l = n_layers with ``solver``, which ``config.make_solver()`` made.

    A coupling that splits (lie, strang) wraps a fixed-step solver, unless that splits by itself (``strang``,
    ``imex_euler``); an adaptive one integrates the sum of the parts, to which splitting converges as h goes to 0.
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
    n_steps = config.n_steps or n_layers * config.steps_per_layer
    return solvers.solve(f, z, span=span, solver=solver, n_steps=n_steps, mask=context.mask, gradient=config.gradient,
                         save_at="steps" if save else None)


def split(solver: Any, splitting: type[Splitting]) -> Any:
    """The solver with a field's parts taking turns; a reversible wrapper stays outside, so that it still reverses."""
    if isinstance(solver, TAKES_PARTS):
        return solver
    if isinstance(solver, solvers.Reversible):
        return replace(solver, base=split(solver.base, splitting), name=None)
    return splitting(solver)


def _splitting(f: Any) -> str | None:
    pieces = getattr(f, "pieces", None)
    return getattr(pieces[0][2] if pieces else f, "splitting", None)
