"""Eigenvalues of the field's Jacobian, and what they say about h λ, stiffness and larger steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from odeformer import diagnostics
from odeformer.diagnostics import Spectrum, Stability
from odeformer.studio.methods import evaluations
from odeformer.studio.stack import WHOLE, Stack
from odeformer.studio.words import counted
from solvers import SOLVERS, get_solver

LEADING = {"magnitude": 14, "left": 6, "right": 6}  # how many are looked for where not all are found
KRYLOV, RESTARTS, TOL = 34, 2, 1e-2
WHOLE_FIELD = "the whole field"
MOST = 0.95  # of decaying modes: the last few, nearly rotations, fade or grow too slowly to matter over a few layers
# methods that a model could take instead: one of each kind, and those with long intervals
CANDIDATES = ("euler", "ab2", "ab3", "midpoint", "kutta3", "ssprk43", "rk4", "ssprk104", "dopri54", "dopri853", "abm2",
              "leapfrog", "backward_euler", "trapezoid", "bdf2", "radau5")


@dataclass(frozen=True, eq=False)
class Modes:
    """``fields``: the Spectrum of the whole field, and of each sublayer where a step lets these take turns; ``solver``:
    the method whose region counts, or None; ``turns``."""

    fields: Mapping[str, Spectrum]
    solver: Any
    turns: bool
    flat: float = 1e-9  # modes whose |Re λ| is up to this share of the largest |λ| neither grow nor decay

    @property
    def whole(self) -> Spectrum:
        return self.fields[WHOLE_FIELD]

    @cached_property
    def stepped(self) -> dict[str, Stability]:
        """h λ of what the solver steps along: of each sublayer where they take turns, else of the whole field."""
        if self.solver is None:
            return {}
        names = [name for name in self.fields if name != WHOLE_FIELD] if self.turns else [WHOLE_FIELD]
        return {name: diagnostics.stability(self.fields[name], self.solver) for name in names}

    @property
    def what(self) -> str:
        """Which eigenvalues there are."""
        n = int((~self.whole.eigenvalues[0, 0].isnan()).sum())
        return f"all {counted(n, 'eigenvalue')}" if self.whole.whole else (
            f"the {n} leading eigenvalues found (largest modulus, leftmost, rightmost)")


def modes_of(stack: Stack) -> Modes:
    """Found once for a stack. Raises ValueError, with the number of bytes, where that does not fit into max_bytes."""
    if "modes" not in stack.memo:
        stack.memo["modes"] = _measured(stack)
    return stack.memo["modes"]


def _measured(stack: Stack) -> Modes:
    parts = {name: i for i, name in enumerate(stack.parts)} if stack.turns else {}
    fields = {WHOLE_FIELD: _spectrum(stack, None)} | {name: _spectrum(stack, i) for name, i in parts.items()}
    flat = max(1e-9, 10 * torch.finfo(stack.run.states.dtype).eps)  # below that it is rounding
    return Modes(fields, stack.method, stack.turns, flat)


def _spectrum(stack: Stack, part: int | None) -> Spectrum:
    options = {"at": stack.at, "part": part, "max_bytes": stack.limits.max_bytes}
    if stack.size <= WHOLE:
        found = diagnostics.spectrum(stack.few, None, **options)
    else:
        options |= {"krylov": KRYLOV, "max_restarts": RESTARTS, "tol": TOL, "seed": stack.limits.seed}
        found = _joined([diagnostics.spectrum(stack.few, n, which=which, **options) for which, n in LEADING.items()])
    if stack.chooses_steps:  # states are kept at layers, steps are the solver's
        found = replace(found, steps=(stack.h,) * len(found.steps))
    return found


def _joined(several: list[Spectrum]) -> Spectrum:
    """Each eigenvalue once."""
    values = torch.cat([x.eigenvalues for x in several], -1)
    residuals = torch.cat([x.residuals for x in several], -1)
    close = 1e-2 * values.abs().nan_to_num(0.0).amax(-1, keepdim=True)
    for i in range(1, values.shape[-1]):
        again = ((values[..., :i] - values[..., i:i + 1]).abs() <= close).any(-1)
        values[..., i] = torch.where(again, complex(math.nan, math.nan), values[..., i])
    residuals = torch.where(values.isnan(), math.nan, residuals)
    return replace(several[0], eigenvalues=values, residuals=residuals, whole=False)


def shares(modes: Modes, decaying: bool = False) -> torch.Tensor:
    """(sites + 1,): the share of the h λ that are inside, of all or of those that decay, at each site and over all; nan
    where there is none."""
    inside = total = 0
    for x in modes.stepped.values():
        λ = x.spectrum.eigenvalues
        there = λ.real < -modes.flat * λ.abs().nan_to_num(0.0).max() if decaying else ~λ.isnan()
        inside = inside + (x.stable & there).flatten(1).sum(1)
        total = total + there.flatten(1).sum(1)
    return torch.cat([inside / total, (inside.sum() / total.sum()).view(1)]).double()


def share(modes: Modes, decaying: bool = False) -> float:
    """Over all sites."""
    return float(shares(modes, decaying)[-1])


@dataclass(frozen=True, eq=False)
class Reach:
    """How far a method steps: ``h`` (sites,), the step up to which MOST of the decaying modes are inside its region,
    and ``strict``, up to which all are; ``evaluations``: of f a step (of an implicit method, a lower bound)."""

    name: str
    order: int
    evaluations: float
    implicit: bool
    h: torch.Tensor
    strict: torch.Tensor

    @property
    def smallest(self) -> float:
        return float(self.h.min())

    @property
    def cost(self) -> float:
        """Evaluations a layer at the smallest h; 0 where nothing limits it."""
        return self.evaluations / self.smallest if self.smallest else math.inf


def reaches(modes: Modes) -> list[Reach]:
    """Of the model's method and of CANDIDATES, for what the model steps along."""
    own = modes.solver
    methods = [get_solver(name) for name in CANDIDATES if name in SOLVERS]
    if own is not None and own.name not in CANDIDATES:
        methods.insert(0, own)
    fields = [modes.fields[name] for name in list(modes.stepped) or [WHOLE_FIELD]]
    found = []
    for method in methods:
        steps = torch.tensor([[_steps(method, row, modes.flat) for row in field.eigenvalues] for field in fields],
                             dtype=torch.float64).amin(0)
        found.append(Reach(method.name, method.order, evaluations(method), bool(method.is_implicit), *steps.unbind(1)))
    return found


def _steps(method: Any, λ: torch.Tensor, flat: float) -> tuple[float, float]:
    """The h up to which MOST and all decaying modes of a layer are inside: of each the way out along its ray, over
    |λ|."""
    λ = λ.flatten()
    λ = λ[~λ.isnan()].numpy()
    λ = λ[λ.real < -flat * np.abs(λ).max(initial=0)]
    if not len(λ):
        return math.inf, math.inf
    away = np.clip(np.abs(np.angle(λ)) - math.pi / 2, RAYS[0], RAYS[-1])
    steps = np.sort(np.interp(away, RAYS, ways_out(method)) / np.abs(λ))
    return float(steps[int((1 - MOST) * len(steps))]), float(steps[0])


# angles from the imaginary axis, closer to each other near it, where ways out change fastest
RAYS = math.pi / 2 * np.linspace(0.005, 1, 25) ** 2
_WAYS: dict[str, np.ndarray] = {}  # of the methods in SOLVERS


def ways_out(method: Any) -> np.ndarray:
    """How far from 0 a ray leaves the region for the first time, for RAYS; inf beyond 1e4."""
    known = SOLVERS.get(method.name) is method  # others of that name may have other coefficients
    if known and method.name in _WAYS:
        return _WAYS[method.name]
    λ = torch.from_numpy(np.exp(1j * (math.pi / 2 + RAYS))).view(-1, 1, 1)
    unit = Spectrum((0.0,) * len(RAYS), (1.0,) * len(RAYS), λ, torch.zeros(λ.shape), True)
    ways = diagnostics.stability(unit, method).largest_step.numpy()
    ways = np.where(ways < 1e-9, 0.0, ways)
    if known:
        _WAYS[method.name] = ways
    return ways
