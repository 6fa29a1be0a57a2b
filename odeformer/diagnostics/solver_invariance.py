"""How little final states depend on the solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.flow import fixed_solver, layer_ends, refined
from odeformer.diagnostics.trajectory import Trajectory
from odeformer.invariance import Invariance, invariance
from solvers import get_solver, solve


def solver_invariance(source: Any, read_out: Callable[[Tensor], Tensor], solvers: Sequence[Any] = ("euler", "midpoint",
                      "rk4"), *, reference: str = "rk4", steps_per_layer: int = 1) -> Invariance:
    """The trajectory's first states under several fixed-step solvers, weights held: see ``odeformer.invariance``.

    ``read_out``: final states -> outputs, such as ``model.read_out``. Its ``score`` is 1 where all end in the same
    states.
    """
    run = Trajectory.of(source)
    grid, states = refined(layer_ends(run), steps_per_layer), {}
    with torch.no_grad():
        for solver in solvers:
            name = get_solver(solver).name
            states[name] = solve(run.f, run.states[0], grid=grid, solver=fixed_solver(solver, run.f), mask=run.mask).z
        outputs = {name: read_out(z) for name, z in states.items()}
    return invariance(states, outputs, reference, run.mask)
