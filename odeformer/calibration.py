"""A fixed grid of steps for a model, from sample data: as good as adaptive steps, and without looking at what it is
then used on, so that causal models stay causal and batch-mates apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odeformer.depth import ErrorProfile, solve, taking_turns
from odeformer.generate import evaluating
from odeformer.models.parts import check_model, parts_of
from odeformer.tables import at_least, finite

MOST = 512  # steps a layer, at which the search for a target error ends


@dataclass(frozen=True)
class Calibration:
    """``model``: the given one with ``grid`` in its DepthConfig, where save() keeps it. ``nfe``: of a pass. ``error``:
    how far final states of the sample are from exact integration, relative, the worst row; ``uniform_error``: the same
    for equal steps at this NFE (nan where layers do not divide them). Of a Seq2Seq the numbers of both parts, and
    ``grid`` is a pair."""

    model: nn.Module
    grid: Any
    nfe: Any
    error: Any
    uniform_error: Any


def calibrate(model: nn.Module, *inputs: Any, error: float | None = None, nfe: int | None = None,
              **options: Any) -> Calibration:
    """The model on a grid that gives its fixed-step solver equal errors in all steps, from the sample ``inputs`` (what
    the model is called with; ``options``: keyword arguments of that call, such as mask).

    Give a target: ``nfe`` evaluations a pass at most, or ``error``, the relative error of final states of the sample,
    for which the fewest steps are sought. One adaptive run on the sample says where errors arise; it may see whole
    sequences, as it is made once and beforehand. The sample must not be what a causal model is then judged on; when
    generating, the prompt alone will do: ``calibrate(model, prompt, nfe=12).model.generate(prompt, ...)``.
    The coupling's splitting error, if there is one, counts as error.

    Raises ValueError for a solver that chooses its steps or evaluates f beyond them, for both targets or none, for an
    nfe too small for one step a layer, and for an error that 512 steps a layer do not reach.
    """
    if (error is None) == (nfe is None):
        raise ValueError(f"one of error and nfe must be given, got error = {error!r}, nfe = {nfe!r}")
    if error is not None:
        finite("error", error, above=0)
    else:
        at_least("nfe", nfe, 1)
    check_model(model)
    if "return_solution" in options:
        raise TypeError("return_solution is not an option of calibrate, which asks for the Solution itself")
    parts = parts_of(model)
    for part in parts.values():
        solver = part.solver
        if solver.is_adaptive or getattr(solver, "to_equilibrium", False):
            raise ValueError(f"solver {solver.name!r} chooses its own steps; calibrate a model with a fixed-step one, "
                             "such as with_solver('rk4')")
    with evaluating(model):
        _, solution = model(*inputs, return_solution=True, **options)
        done = {name: _calibrate(part, getattr(solution, name) if name else solution, error, nfe)
                for name, part in parts.items()}
    for name, result in done.items():
        depth = parts[name].config.depth
        which = {"part": name} if name else {}
        model = model.with_solver(depth.solver, grid=result["grid"], **depth.solver_options, **which)
    if "" in done:
        return Calibration(model, **done[""])
    return Calibration(model, **{key: tuple(result[key] for result in done.values()) for key in done["encoder"]})


def _calibrate(model: nn.Module, solution: Any, error: float | None, nfe: int | None) -> dict[str, Any]:
    run = _Run(model, solution)
    n = run.steps_for(nfe) if nfe is not None else run.fewest(error)
    grid = run.grid(n)
    return {"grid": tuple(grid), "nfe": run.solve(grid=grid).nfe, "error": run.error(grid=grid),
            "uniform_error": run.error(n_steps=n) if n % run.n_pieces == 0 else math.nan}


class _Run:
    """Solves of one field from one sample."""

    def __init__(self, model: nn.Module, solution: Any):
        if solution.states is None or solution.field is None:
            raise ValueError("model must give a Solution with states")
        self.f, self.z0, self.mask = solution.field, solution.states[0], solution.mask
        self.n_layers, self.name = model.config.n_layers, model.solver.name
        self.solver = taking_turns(model.solver, self.f)
        self.n_pieces = len(getattr(self.f, "pieces", None) or (1,))
        self.kinks = list(getattr(self.f, "kinks", ())) or None
        resolution = torch.finfo(self.z0.dtype).eps
        self.exact = solve(self.f, self.z0, span=(0.0, self.n_layers), solver="dopri8", mask=self.mask,
                           breakpoints=self.kinks, rtol=max(1e-8, 20 * resolution), atol=max(1e-8, 20 * resolution)).z
        self.profiles = [ErrorProfile.of(self.f, self.z0, span=(0.0, self.n_layers), solver="dopri5", mask=self.mask,
                                         rtol=None, atol=None, fine=True, breakpoints=at, max_nfe=None)
                         for at in ([self.kinks, None] if self.kinks else [None])]

    def solve(self, **amounts: Any) -> Any:
        """With the model's solver."""
        return solve(self.f, self.z0, span=(0.0, self.n_layers), solver=self.solver, mask=self.mask, **amounts)

    def error(self, **amounts: Any) -> float:
        """|z - exact| / |exact| of the worst row."""
        z = self.solve(**amounts).z
        real = torch.ones_like(z[..., :1]) if self.mask is None else self.mask.unsqueeze(-1).to(z.dtype)
        off, size = (((x * real).flatten(1).norm(dim=1)) for x in (z - self.exact, self.exact))
        return torch.where(size > 0, off / size, off).max().item()  # a row of padding alone stands still

    def grid(self, n: int) -> list[float]:
        """n steps with equal errors; kinks of θ(l) are among their ends where there are steps enough."""
        profile = next((p for p in self.profiles if len(p.cells) <= n), self.profiles[-1])
        return profile.grid(n)

    def steps_for(self, nfe: int) -> int:
        """The most steps that take no more than nfe evaluations."""
        n, one = self.n_pieces, self.solve(n_steps=self.n_pieces).nfe
        if one > nfe:
            raise ValueError(f"nfe must be at least {one:g}, what one step of {self.name!r} in each of {self.n_pieces} "
                             f"pieces of depth takes; got {nfe}")
        low, high = n, max(n + 1, nfe + 1)  # no step of any method is free
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.solve(grid=self.grid(middle)).nfe <= nfe else (low, middle)
        return low

    def fewest(self, error: float) -> int:
        """The fewest steps with at most this error: by doubling, then halving the gap."""
        low, high = self.n_pieces - 1, self.n_pieces
        while not self.error(grid=self.grid(high)) <= error:
            low, high = high, 2 * high
            if high > MOST * self.n_layers:
                left = self.error(grid=self.grid(low))
                raise ValueError(f"error {error:g} is not reached by {self.name!r} in {MOST} steps a layer (it is "
                                 f"{left:.2g} at {low} steps): ask for less, take a solver of higher order, or a state "
                                 "in float64")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.error(grid=self.grid(middle)) <= error else (middle, high)
        return high

