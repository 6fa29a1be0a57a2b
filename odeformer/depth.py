"""Integrates a model's field over depth. The only file here that imports solvers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import solvers
from odeformer.blocks import LayeredField
from odeformer.context import Context
from odeformer.fusion import FUSIONS, Fusion
from odeformer.layer_drop import DRAWS, SCHEDULES
from odeformer.routing import RoutingLog, RoutingReport, Withheld
from odeformer.tables import at_least, check_kinds, finite, look_up, probability
from odeformer.weights import WEIGHTS
from solvers import Solution, SolverError, solve
from solvers.base import HALF
from solvers.calibrate import ErrorProfile
from solvers.compiled import CompiledSteps, has_one_form
from solvers.grid import read_grid
from solvers.imex import ImexRungeKutta
from solvers.learned import Learned
from solvers.multistep import STARTERS, multistep_order
from solvers.per_sample import PerSample
from solvers.splitting import Splitting

__all__ = ["DepthConfig", "ErrorProfile", "ImexRungeKutta", "PerSample", "Solution", "SolverError", "integrate",
           "solve"]

TAKES_PARTS = (Splitting, ImexRungeKutta)  # solvers that treat a field's parts by themselves
TRACKED = ("backprop", "checkpoint")  # gradient modes in which what a field computes beside its increment has a graph
AMOUNTS = {"steps_per_layer": 1, "n_steps": None, "grid": None}  # says how many steps to take, if not as here
SPLITTINGS = {"lie": solvers.LieTrotter, "strang": solvers.Strang}


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """How depth is integrated.

    ``solver``: a name from SOLVERS or a solver object; ``solver_options`` go to it. ``steps_per_layer``: equal steps a
    layer; ``n_steps``: their total number instead, where weights do not jump between layers; ``grid``: the depths of
    all steps instead, from 0 to n_layers (see ``calibrate``). ``rtol``, ``atol``: for adaptive solvers. ``weights``: a
    key of WEIGHTS. ``gradient``: a gradient mode of solve().

    ``steer``: in training depth ends at n_layers + a random number within ± steer, drawn for each forward pass (STEER
    of Ghosh et al. 2020, which smooths the dynamics near the end); below 1.

    ``injection``: dz/dl = f(z, l) + z0 - z, z0 the state at l = 0, with any solver; "equilibrium" needs it, or its end
    would not depend on the input.

    ``fusion``: a key of FUSIONS, what a layer's output is made of beside its increment (eqs. 23-30). Layers are then
    solved one by one: an adaptive solver chooses its first step anew in each, a multistep method starts anew, gradient
    modes act within a layer (its ends are kept), and the finiteness of the state is read once a layer.

    ``layer_drop``: the probability 1 - ρ with which a layer is dropped in training; in evaluation its increment is
    multiplied by ρ (eq. 31). ``layer_drop_per``: "sample", each row of a batch drops its own layers, or "batch".
    ``layer_drop_schedule``: "constant", or "linear", layer i of L with the probability layer_drop * i / L. Weights that
    are smooth in l become one piece a layer.
    """

    solver: Any = "euler"
    steps_per_layer: int = 1
    n_steps: int | None = None
    grid: Sequence[float] | None = None
    weights: str | type = "piecewise"
    gradient: str = "backprop"
    rtol: float | None = None
    atol: float | None = None
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    weights_options: Mapping[str, Any] = field(default_factory=dict)
    fusion: str | type | None = None
    fusion_options: Mapping[str, Any] = field(default_factory=dict)
    layer_drop: float = 0.0
    layer_drop_per: str = "sample"
    layer_drop_schedule: str = "constant"
    steer: float = 0.0
    injection: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least("steps_per_layer", self.steps_per_layer, 1)
        if self.n_steps is not None:
            at_least("n_steps", self.n_steps, 1)
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(read_grid(self.grid)))
        given = {name: getattr(self, name) for name, default in AMOUNTS.items() if getattr(self, name) != default}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} must not both be given; got {', '.join(map(str, given.values()))}")
        probability("steer", self.steer)
        look_up(WEIGHTS, self.weights, "weights")
        if self.fusion is not None:
            look_up(FUSIONS, self.fusion, "fusion")
        elif self.fusion_options:
            raise ValueError(f"fusion_options are for a fusion, and fusion is None; got {dict(self.fusion_options)}")
        probability("layer_drop", self.layer_drop)
        for name, table in (("layer_drop_per", DRAWS), ("layer_drop_schedule", SCHEDULES)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in table:
                raise ValueError(f"{name} must be one of {', '.join(table)}, got {getattr(self, name)!r}")
        solver = self.make_solver()
        for name in given:
            if solver.is_adaptive:
                raise ValueError(f"{name} is for fixed-step solvers; {solver.name!r} chooses its steps from rtol and "
                                 "atol")
        if self.gradient not in solver.gradients:  # solve() refuses what the coupling then rules out
            raise ValueError(f"gradient must be one of {', '.join(solver.gradients)} for solver {solver.name!r}, got "
                             f"{self.gradient!r}")
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not solver.is_adaptive:
                raise ValueError(f"{name} is for adaptive solvers; {solver.name!r} takes fixed steps")
            if value is not None:
                finite(name, value, least=0)

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
        if self.grid is not None:
            return len(self.grid) - 1
        return self.n_steps or n_layers * self.steps_per_layer


def integrate(f: Any, z: Tensor, solver: Any, config: DepthConfig, n_layers: int, context: Context, *,
              save: bool = False, fusion: Fusion | None = None) -> Solution:
    """Take z (batch, tokens, d_model) from l = 0 to l = n_layers with ``solver``, which ``config.make_solver()`` made.

    A coupling that splits (lie, strang) wraps a fixed-step solver, unless that takes a field's parts by itself
    (``strang``, ``imex_euler``). Adaptive solvers, and those that remember earlier states (``leapfrog``, ``bdf2``,
    ``dense``), which a splitting would move in between, integrate the sum of the parts, to which splitting converges
    as h goes to 0.
    ``save`` keeps the state at every step (adaptive: at every layer). ``fusion`` acts between layers (see DepthConfig);
    the Solution is then a FusedSolution, whose states at whole l are those after fusion.
    """
    amounts = ({"rtol": config.rtol, "atol": config.atol} if solver.is_adaptive else
               {"n_steps": config.steps(n_layers)} if config.grid is None else {"grid": config.grid})
    if fusion is not None and fusion.acts:
        solution = _integrate_fused(f, z, solver, config, n_layers, context, save, fusion, amounts)
    else:
        end = n_layers
        if config.steer and context.training:
            if torch.compiler.is_compiling():
                raise ValueError("steer draws the end of depth for each pass, which torch.compile would freeze; "
                                 "compile the model without it")
            end += config.steer * (2 * torch.rand(()).item() - 1)
            if pieces := getattr(f, "pieces", None):
                f = LayeredField([*pieces[:-1], (pieces[-1][0], end, pieces[-1][2])])
            if config.grid is not None:
                amounts = {"grid": [*config.grid[:-1], end]}
        solution = _solve(f, z, (0, end), solver, context, config.gradient, save, amounts)
    return _with_routing(solution, f, context, config.gradient)


def _solve(f: Any, z: Tensor, span: tuple[float, float], solver: Any, context: Context, gradient: str, save: bool,
           amounts: Mapping[str, Any]) -> Solution:
    """A solve over depth from span[0] to span[1]."""
    save_at, kinks = None, None
    if solver.is_adaptive:
        kinks = [l for l in getattr(f, "kinks", ()) if span[0] < l < span[1]] or None
        save_at = [*range(math.ceil(span[0]), math.ceil(span[1])), span[1]] if save else None
        if save and getattr(solver, "to_equilibrium", False):  # which has no states in between
            save_at = span
        if context.by_row and getattr(solver, "compact", False):  # rows that have arrived stay, and change nothing
            solver = replace(solver, compact=False)
    else:
        save_at = "steps" if save else None
        solver = taking_turns(solver, f)
        if context.routing.step is not None:
            solver = _StepCounter(solver, context.routing)
        elif _steps_compile(solver, context, gradient):
            solver = CompiledSteps(solver, context.compiled)
    return solve(f, z, span=tuple(map(float, span)), solver=solver, mask=context.mask, gradient=gradient,
                 save_at=save_at, breakpoints=kinks, **amounts)


def _steps_compile(solver: Any, context: Context, gradient: str) -> bool:
    """Whether whole steps are compiled: autograd goes through them, and nothing is drawn within one."""
    redrawn = context.training and context.dropout_per == "evaluation"
    return (context.compiled is not None and has_one_form(solver) and not redrawn
            and (gradient == "backprop" or not torch.is_grad_enabled()))


@dataclass(frozen=True, eq=False)
class DepthSolution(Solution):
    """A model's Solution. ``losses``: "balance" and "router_z" of its experts, averaged over evaluations and layers;
    empty where there are none. ``routing``: what its routers did, layer by layer, or None. ``field``: the f(z, l) that
    was integrated, with its masks and frozen draws. ``mask``: (batch, tokens), True = real, or None."""

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    routing: RoutingReport | None = None
    mask: Tensor | None = field(default=None, repr=False)
    field: Any = field(default=None, repr=False)


def _with_routing(solution: Solution, f: Any, context: Context, gradient: str) -> DepthSolution:
    """The solution with its field and with what the routers reported."""
    report = RoutingReport.of(context.routing.records)
    losses = {} if report is None else report.losses
    if losses and torch.is_grad_enabled() and gradient not in TRACKED:
        losses = Withheld(f"would have no gradient under gradient={gradient!r}, which evaluates the field outside "
                          f"autograd; take gradient={' or '.join(map(repr, TRACKED))}")
    kind = type(solution) if isinstance(solution, DepthSolution) else DepthSolution
    return kind(**vars(solution) | {"losses": losses, "routing": report, "mask": context.mask, "field": f})


class _StepCounter:
    """A solver that tells the routers where its steps begin."""

    def __init__(self, solver: Any, log: RoutingLog):
        self.solver, self.log = solver, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def step(self, *args: Any) -> Any:
        self.log.step += 1
        return self.solver.step(*args)


@dataclass(frozen=True, eq=False)
class FusedSolution(DepthSolution):
    """The solutions of layers that were solved one by one, as one.

    ``states`` at whole l are those after fusion; ``layers``: the Solution of each layer, its z before fusion.
    """

    layers: tuple[Solution, ...] = ()


@dataclass(frozen=True)
class _Together:
    """The work and the reports of several solutions."""

    solutions: tuple[Solution, ...]

    @property
    def total(self) -> float:
        """Evaluations so far, backward included."""
        return _whole(sum(part.nfe + part.nfe_backward for part in self.solutions))

    @property
    def reconstruction_error(self) -> float | None:
        """The largest."""
        errors = [part.reconstruction_error for part in self.solutions]
        return max((error for error in errors if error is not None), default=None)


def _whole(amount: float) -> int | float:
    """An int where whole."""
    rounded = round(amount, 6)
    return int(rounded) if rounded == int(rounded) else rounded


def _integrate_fused(f: Any, z: Tensor, solver: Any, config: DepthConfig, n_layers: int, context: Context,
                     save: bool, fusion: Fusion, amounts: Mapping[str, Any]) -> FusedSolution:
    """Layer by layer, with the fusion between them."""
    dtype = z.dtype
    if dtype in HALF:  # the state stays float32 between layers, too; as in solve(), f sees it in its own dtype
        f, z = _InDtype(f, dtype), z.float()
        if solver.is_adaptive:
            coarse = max(1e-3, 4 * torch.finfo(dtype).eps)  # the default tolerances of solve()
            amounts = {"rtol": coarse if config.rtol is None else config.rtol,
                       "atol": coarse * 1e-3 if config.atol is None else config.atol}
    if not solver.is_adaptive:
        amounts = {"n_steps": amounts["n_steps"] // n_layers}
    starter = starter_of(fusion, solver)
    states, increments, layers, asides, saved = [z], [], [], [], [z]
    for layer in range(n_layers):
        start, span = fusion.start(layer, states), (layer, layer + 1)
        inside = save and not solver.is_adaptive
        part = _solve(f, start, span, solver, context, config.gradient, inside, amounts)
        z, increment = fusion.finish(layer, start, part.z, increments, states, context)
        if starter is not None and layer in fusion.late:
            asides.append(part)
            gradient = config.gradient if config.gradient in starter.gradients else "backprop"  # exact all the same
            part = _solve(f, start, span, starter, context, gradient, inside, amounts)
            z = part.z
        layers.append(part)
        if save:
            saved += [*(part.states[1:-1] if inside else ()), z]
        states = [z, *states][:fusion.n_states]
        increments = [increment, *increments][:fusion.n_increments - 1]
    return _merge(layers, asides, z.to(dtype), [state.to(dtype) for state in saved] if save else None)


def _merge(layers: list[Solution], asides: list[Solution], z: Tensor, saved: list[Tensor] | None) -> FusedSolution:
    """One Solution of those of the layers; ``saved``: the states at its depths."""
    depths = None
    if saved is not None:
        depths = [0.0, *(l for i, part in enumerate(layers) for l in (part.depths or (i, float(i + 1)))[1:])]
    by_row = bool(layers[0].steps) and isinstance(layers[0].steps[0], list)  # a per-sample solve
    steps, errors = ([list(chain(*row)) for row in zip(*lists, strict=True)] if by_row else list(chain(*lists))
                     for lists in ([part.steps for part in layers], [part.errors for part in layers]))
    together = _Together((*layers, *asides))
    return FusedSolution(
        z=z, l=layers[-1].l, states=None if saved is None else torch.stack(saved), depths=depths,
        nfe=_whole(sum(part.nfe for part in together.solutions)),
        n_steps=max(map(len, steps)) if by_row else sum(part.n_steps for part in layers), steps=steps,
        n_rejected=sum(part.n_rejected for part in layers), errors=errors, layers=tuple(layers), _work=together,
        _report=together)


def starter_of(fusion: Fusion, solver: Any) -> Any:
    """What takes the layers for which a fixed fusion has too little history; None: the solver itself does."""
    if not fusion.late:
        return None
    if fusion.starter is not None:
        return solvers.get_solver(fusion.starter)
    if isinstance(solver, Learned):
        return None
    order = multistep_order(fusion.a, fusion.b)
    if order <= solver.order:
        return None
    if order not in STARTERS:
        raise ValueError(f"starter must be given for weights of order {order}: a solver of at least that order")
    return solvers.get_solver(STARTERS[order])


class _InDtype:
    """A field that is given the state in its own dtype, and the pieces and parts of it."""

    def __init__(self, f: Any, dtype: torch.dtype):
        self.f, self.dtype = f, dtype
        self.splitting = getattr(f, "splitting", None)
        pieces, parts = getattr(f, "pieces", None), getattr(f, "parts", None)
        self.pieces = pieces and [(a, b, _InDtype(piece, dtype)) for a, b, piece in pieces]
        self.parts = parts and tuple(_InDtype(part, dtype) for part in parts)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return self.f(z.to(self.dtype), l)


def split(solver: Any, splitting: type[Splitting]) -> Any:
    """The solver with a field's parts taking turns, where it allows that (see ``integrate``).

    A reversible wrapper stays outside, so that it still reverses; a hypersolver, so that it corrects the whole step.
    """
    if hasattr(solver, "rebased"):
        return solver.rebased(split(solver.base, splitting))
    if isinstance(solver, solvers.Reversible):
        return replace(solver, base=split(solver.base, splitting), name=None)
    if isinstance(solver, TAKES_PARTS) or getattr(solver, "remembers_states", False):
        return solver
    return splitting(solver)


def taking_turns(solver: Any, f: Any) -> Any:
    """The fixed-step solver as it integrates f: with f's parts taking turns where the coupling says so."""
    pieces = getattr(f, "pieces", None)
    splitting = getattr(pieces[0][2] if pieces else f, "splitting", None)
    return solver if splitting is None else split(solver, SPLITTINGS[splitting])
