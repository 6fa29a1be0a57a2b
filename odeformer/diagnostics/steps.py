"""How states move: the size, the direction and the bending of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.trajectory import Trajectory


def effective_steps(source: Any, *, at: str | Sequence[float] = "layers") -> Tensor:
    """|f_i(z, l)| / |z| of each sublayer i: by what share of its size a step of h = 1 moves a token.

    (sites, parts, batch, tokens), nan at padding; one part where f has none. Norms over d_model; unit 1 / l. Small
    values are what a smooth limit in depth needs: with all below 1 / n_layers the state keeps its size to first order
    (Veit et al. 2016 and Jastrzębski et al. 2018 measure this ratio in ResNets). At "layers" all sublayers are taken at
    the state with which the layer begins.
    """
    run = Trajectory.of(source)
    rows = []
    for site in run.sites(at):
        parts = getattr(site.f, "parts", None) or (site.f,)
        with torch.no_grad():
            sizes = [part(site.z, site.l).norm(dim=-1) for part in parts]
        rows.append(torch.stack([run.real(size / site.z.norm(dim=-1)) for size in sizes]))
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"layers must have the same number of parts, got {sorted({len(row) for row in rows})}")
    return torch.stack(rows)


def update_cosines(source: Any) -> Tensor:
    """cos of the angle between successive updates z_{n+1} - z_n and z_{n+2} - z_{n+1} of a token.

    (steps - 1, batch, tokens), in [-1, 1], nan at padding and where a token stands still. Near 1: a smooth path; near
    0: updates that know nothing of each other; below 0: a path that oscillates, as explicit methods do beyond their
    stability region. (Cosines between updates of residual blocks: Jastrzębski et al. 2018; Greff et al. 2017.)
    Raises ValueError for fewer than two steps.
    """
    run = Trajectory.of(source)
    first, second = _pairs(run)
    size = first.norm(dim=-1) * second.norm(dim=-1)
    return run.real(((first * second).sum(-1) / size).clamp(-1, 1))


def curvatures(source: Any) -> Tensor:
    """Curvature of a token's path at each inner state: 1 / radius of the circle through it and its two neighbours.

    (steps - 1, batch, tokens), nan at padding and where a token stands still. Unit 1 / |z|, by Menger 1930:
    2 sin(angle between the two updates) / |z_{n+2} - z_n|; exact for states on a circle, 0 on a straight line, inf
    where the path turns back on itself. Raises ValueError for fewer than two steps.
    """
    run = Trajectory.of(source)
    first, second = (x / x.norm(dim=-1, keepdim=True) for x in _pairs(run))
    cosine = (first * second).sum(-1, keepdim=True)
    sine = (second - cosine * first).norm(dim=-1)  # without 1 - cos², which rounding would spoil on straight paths
    return run.real(2 * sine / (run.states[2:] - run.states[:-2]).norm(dim=-1))


def path_ratio(source: Any) -> Tensor:
    """Length of a token's path over the distance between its ends: at least 1, and 1 for a straight line.

    (batch, tokens), nan at padding; no unit (the tortuosity of the path).
    """
    run = Trajectory.of(source)
    length = run.states.diff(dim=0).norm(dim=-1).sum(0)
    return run.real(length / (run.states[-1] - run.states[0]).norm(dim=-1))


def _pairs(run: Trajectory) -> tuple[Tensor, Tensor]:
    """Each update with the next."""
    updates = run.states.diff(dim=0)
    if len(updates) < 2:
        raise ValueError("two steps are needed to compare successive updates, and the trajectory has one; take more "
                         "layers, or steps_per_layer=2")
    return updates[:-1], updates[1:]
