"""Deepening seen as the refinement of a grid: how far the output is from where it goes with ever more layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from odeformer.growth.deepening import deepen
from odeformer.tables import at_least


@dataclass(frozen=True)
class Refinement:
    """``n_layers`` of the models, each twice that of the one before (of a Seq2Seq: of its encoder). ``changes``: the
    root mean square change of the final state from each to the next, over that state's own. ``orders``: log2 of how
    much smaller a change is than the one before: the observed order, as far as it is asymptotic."""

    n_layers: tuple[int, ...]
    changes: tuple[float, ...]
    orders: tuple[float, ...]

    @property
    def error(self) -> float:
        """The truncation error of the first model, relative: its change, and the rest that follows at the last observed
        order (Richardson). Infinite where nothing converges."""
        if not self.changes[0]:
            return 0.0
        order = self.orders[-1]
        return self.changes[0] / (1 - 2.0**-order) if order > 0 else math.inf


@torch.no_grad()
def refinement_error(model: nn.Module, *inputs: Any, times: int = 3, **named: Any) -> Refinement:
    """Deepen by scheme "refine" to 2, 4, ..., 2^times as many layers, and say how the final state changes.

    What the layers are is then one flow, ever better resolved, so the changes are truncation errors: they shrink with
    the order of the solver (and of the coupling: 1 for lie, 2 for strang). ``inputs`` and ``named``: those of a call of
    the model. Evaluation mode; the model stays as it is.

    Raises ValueError for times < 2, for an adaptive solver, and where ``deepen`` does.
    """
    at_least("times", times, 2)
    parts = [part for part in (getattr(model, "encoder", None), getattr(model, "decoder", None), model)
             if hasattr(part, "solver")]
    for part in parts:
        if part.solver.is_adaptive:
            raise ValueError(f"solver {part.solver.name!r} is adaptive: it chooses its steps by their error, not by "
                             "the number of layers; take a fixed-step solver (with_solver)")
    sizes, n = [model.config.n_layers], model.config.n_layers
    states = [_state(model, inputs, named)]
    for k in range(1, times + 1):
        part = _refined(model, 2**k)
        states.append(_state(part, inputs, named))
        sizes.append(n * 2**k)
    changes = tuple(((b - a).square().mean() / a.square().mean()).sqrt().item() for a, b in pairwise(states))
    orders = tuple(math.log2(a / b) if a and b else math.inf for a, b in pairwise(changes))
    return Refinement(tuple(sizes), changes, orders)


def _refined(model: nn.Module, factor: int) -> nn.Module:
    if not hasattr(model, "decoder"):
        return deepen(model, scheme="refine", n_layers=factor * model.config.n_layers)
    for part in ("encoder", "decoder"):
        n_layers = factor * getattr(model, part).config.n_layers
        model = deepen(model, scheme="refine", n_layers=n_layers, part=part)
    return model


def _state(model: nn.Module, inputs: tuple, named: dict) -> torch.Tensor:
    """The final state in float64, in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        _, solution = model(*inputs, **named, return_solution=True, save_states=False)
    finally:
        for module in training:
            module.training = True
    return solution.z.double()
