"""The gradient of a loss with respect to the state, against depth (eqs. 15-16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.flow import cuts, fixed_solver, layer_ends, stretch
from odeformer.diagnostics.trajectory import Trajectory, bar


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """``norms`` (points, batch, tokens): |dE/dz| over d_model at ``depths``, unit of the loss / |z|, nan at padding."""

    depths: tuple[float, ...]
    norms: Tensor

    @property
    def rows(self) -> Tensor:
        """The norm over a row's tokens, (points, batch)."""
        return self.norms.nan_to_num(0.0).square().sum(-1).sqrt()


def gradient_norms(source: Any, loss: Callable[[Tensor], Tensor], solver: Any = "euler", *, at: str = "layers",
                   progress: bool = False) -> GradientNorms:
    """|dE/dz^l| for E = loss(final state), at each depth: what eqs. 15 (post-norm) and 16 (pre-norm) are about.

    ``loss``: final states (batch, tokens, d_model) -> a number, such as
    ``lambda z: cross_entropy(model.read_out(z).flatten(0, 1), targets.flatten())``. ``solver``: the fixed-step one of
    the model (``model.solver``), which takes the trajectory's steps again from its first state, parts taking turns as
    they did. ``at``: "layers", or "steps", every state; a solver with a memory starts anew at each of these depths.
    The gradient goes from each point to the last by the chain rule, a stretch at a time: one stretch's graph is kept.
    Raises ValueError where the loss is no single number, and TypeError where it is no tensor.
    """
    if at not in ("layers", "steps"):
        raise ValueError(f"at must be 'layers' or 'steps', got {at!r}")
    run = Trajectory.of(source)
    method = fixed_solver(solver, run.f)
    points = layer_ends(run) if at == "layers" else list(run.depths)
    maps = []
    for a, b in pairwise(points):
        inner = {l for l in (*run.depths, *cuts(run.f, a, b)) if a < l < b}
        maps.append(stretch(run, [a, *sorted(inner), b], method, run.mask))
    z = [run.states[0]]
    with torch.no_grad():
        for push in maps:
            z.append(push(z[-1]))
    with torch.enable_grad():
        end = z[-1].detach().requires_grad_()
        value = loss(end)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss must give a 0-d tensor, got {type(value).__name__}")
        if value.numel() != 1:
            raise ValueError(f"loss must give one number, got the shape {tuple(value.shape)}")
        (g,) = torch.autograd.grad(value, end)
        norms = [g.norm(dim=-1)]
        for push, state in bar(list(zip(reversed(maps), reversed(z[:-1]), strict=True)), progress, "gradients"):
            state = state.detach().requires_grad_()
            (g,) = torch.autograd.grad(push(state), state, g)
            norms.append(g.norm(dim=-1))
    return GradientNorms(tuple(points), run.real(torch.stack(norms[::-1])))
