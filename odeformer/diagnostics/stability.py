"""h λ of a trajectory against a solver's stability region, and stiffness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odeformer.diagnostics.spectrum import Spectrum, spectrum
from odeformer.diagnostics.trajectory import Trajectory
from solvers import get_solver
from solvers.stability import is_stable

FLAT = 1e-9  # eigenvalues with |Re λ| up to this share of the largest |λ| neither grow nor decay


@dataclass(frozen=True, eq=False)
class Stability:
    """``points``: h λ (sites, batch, n) complex; ``stable``: bool, whether each is in the region; ``share`` (sites,):
    the share inside; ``decaying_share`` (sites,): the share inside of those with Re λ < 0, nan where none decays.
    Modes that grow by themselves (Re λ > 0) are outside near 0 whatever h is, and rightly so; a decaying mode outside
    is one that the solver makes grow. ``largest_step`` (sites,): the h up to which all decaying modes are inside."""

    solver: str
    spectrum: Spectrum
    points: Tensor
    stable: Tensor
    share: Tensor
    decaying_share: Tensor
    largest_step: Tensor


def stability(source: Any, solver: Any, n: int | None = 10, **options: Any) -> Stability:
    """The eigenvalues of df/dz, times the step taken there, in the solver's stability region.

    ``source``: a Solution, a Trajectory or a Spectrum. ``n``, ``options``: those of ``spectrum``; the shares are of the
    eigenvalues that were asked for, None for all. Linear stability says what a step does to small differences while J
    is about constant over it (Hairer & Wanner 1996, IV.2). Of a splitting method the base's region is taken, as each
    part is a field of its own (``part=i``). Raises ValueError for a solver without a region.
    """
    found = source if isinstance(source, Spectrum) else spectrum(source, n, **options)
    solver = get_solver(solver)
    if not hasattr(solver, "tableau") and not hasattr(solver, "characteristic"):
        solver = getattr(solver, "base", solver)  # of a splitting method, the one that steps along the parts
    λ = found.eigenvalues.numpy()
    steps = np.array(found.steps)
    there = np.isfinite(λ)
    points = np.where(there, λ, 0) * steps[:, None, None]
    stable = is_stable(solver, points) & there
    decaying = there & (λ.real < -FLAT * np.abs(np.where(there, λ, 0)).max(initial=0))
    largest = [_largest_step(solver, row[chosen]) for row, chosen in zip(λ, decaying, strict=True)]
    return Stability(solver.name, found, torch.from_numpy(np.where(there, points, np.nan)), torch.from_numpy(stable),
                     _share(stable, there), _share(stable, decaying), torch.tensor(largest, dtype=torch.float64))


def _share(chosen: np.ndarray, among: np.ndarray) -> Tensor:
    chosen, among = (torch.from_numpy(x).flatten(1).sum(1).double() for x in (chosen & among, among))
    return chosen / among


def _largest_step(solver: Any, λ: np.ndarray) -> float:
    """The first h at which some h λ leaves the region: scanned outwards, then bisected; inf if none does."""
    if not λ.size:
        return math.inf
    scale = np.abs(λ).max()
    λ = λ / scale

    def inside(h: np.ndarray) -> np.ndarray:
        return is_stable(solver, np.multiply.outer(h, λ)).all(-1)

    steps = np.geomspace(1e-3, 1e4, 1400)
    bad = ~np.concatenate([inside(chunk) for chunk in np.array_split(steps, 14)])
    if not bad.any():
        return math.inf
    i = int(np.argmax(bad))
    low, high = (steps[i - 1] if i else 0.0), steps[i]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(np.array([middle]))[0] else (low, middle)
    return float(low / scale)


def stiffness_ratio(source: Any, n: int | None = None, **options: Any) -> Tensor:
    """max |Re λ| / min |Re λ| over the eigenvalues of df/dz with Re λ < 0 (Lambert 1991): (sites, batch), no unit.

    nan where nothing decays. ``source``: a Solution, a Trajectory or a Spectrum. ``n`` None takes all eigenvalues,
    from dense Jacobians; fewer give a lower bound.
    """
    found = source if isinstance(source, Spectrum) else spectrum(source, n, **options)
    λ = found.eigenvalues
    scale = λ.abs().nan_to_num(0.0).amax(-1, keepdim=True)
    decay = torch.where(λ.real < -FLAT * scale, -λ.real, torch.nan)
    high, low = decay.nan_to_num(-math.inf).amax(-1), decay.nan_to_num(math.inf).amin(-1)
    return torch.where(high > 0, high / low, torch.nan)


def stiffness_index(source: Any, **options: Any) -> Tensor:
    """-min Re λ times the length of depth still to go: (sites, batch), no unit. About how many Euler steps stability
    alone asks for, twice over; well above the number of layers the field is stiff. 0 where nothing decays.

    ``options``: those of ``spectrum``.
    """
    path = Trajectory.of(source)
    found = spectrum(path, 1, which="left", **options)
    left = torch.tensor([path.depths[-1] - l for l in found.depths], dtype=torch.float64)
    return (-found.eigenvalues.real.squeeze(-1)).clamp(min=0) * left.unsqueeze(1)
