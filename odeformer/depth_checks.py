"""What of a model's config does not go together; each says so in a sentence when the model is made."""

from __future__ import annotations

from typing import Any

from odeformer.depth import (
    SPLITTINGS,
    TRACKED,
    DepthConfig,
    ImexRungeKutta,
    PerSample,
    split,
    starter_of,
)
from odeformer.fusion import Fusion
from odeformer.tables import look_up
from odeformer.weights import WEIGHTS


def check_causal(solver: Any, causal: bool) -> None:
    """Raises ValueError for an adaptive or implicit solver in a causal model."""
    if causal and (solver.is_adaptive or solver.is_implicit):
        kind, chosen = (("adaptive", "step sizes chosen from") if solver.is_adaptive else
                        ("implicit", "iterations that stop at an error measured over"))
        raise ValueError(f"solver {solver.name!r} is {kind} and this model is causal: {chosen} a whole sequence let "
                         "later tokens move earlier outputs. Use an explicit fixed-step solver, such as 'rk4'")


def check_coupling(solver: Any, coupling: Any, gradient: str) -> None:
    """Raises ValueError where the coupling leaves an IMEX solver no parts, or splits the solver and that rules out the
    gradient mode."""
    if isinstance(solver, ImexRungeKutta) and not getattr(coupling, "has_parts", True):
        raise ValueError(f"solver {solver.name!r} needs a field with two parts, and this coupling makes one of them; "
                         "couplings 'lie', 'strang' and 'parallel' keep them")
    splitting = getattr(coupling, "splitting", None)
    if solver.is_adaptive or splitting is None:
        return
    chosen = split(solver, SPLITTINGS[splitting])
    if gradient not in chosen.gradients:
        raise ValueError(f"gradient must be one of {', '.join(chosen.gradients)} for solver {solver.name!r} under "
                         f"coupling {splitting!r}, got {gradient!r}; couplings 'parallel' and 'composed' do not split")


def check_fusion(fusion: Fusion | None, solver: Any, config: DepthConfig, n_layers: int) -> None:
    """Raises ValueError for what cannot be done layer by layer: a solver whose history runs across layers, a number of
    steps that is not the same in each; and for layer drop under a fusion that has no state to leave as it was."""
    fused = fusion is not None and fusion.acts
    by_steps = not solver.is_adaptive and config.grid is None
    if (fused or config.layer_drop) and by_steps and config.steps(n_layers) % n_layers:
        raise ValueError(f"n_steps must be a multiple of n_layers = {n_layers} with "
                         f"{'fusion' if fused else 'layer_drop'}, which acts by layers; got {config.steps(n_layers)}")
    if not fused:
        return
    base = solver
    while base is not None:
        if getattr(base, "across_pieces", False):
            raise ValueError(f"fusion cannot be combined with solver {solver.name!r}, whose history runs across layers "
                             "(it is a fusion itself), while a fusion changes the state between them")
        base = getattr(base, "base", None)
    if config.layer_drop and not fusion.form.drops_layers:
        raise ValueError(f"layer_drop needs a layer that leaves the state as it was when it is dropped, and under the "
                         f"form 'input' a layer's output is the norm of its increment alone; got {config.layer_drop}")
    starter = starter_of(fusion, solver)
    if starter is not None and (starter.is_adaptive or starter.is_implicit or solver.is_adaptive):
        raise ValueError("starter must be an explicit fixed-step solver, beside another fixed-step solver; got "
                         f"{starter.name!r} beside {solver.name!r}")


def check_depth(solver: Any, config: DepthConfig, fusion: Fusion | None, n_layers: int) -> None:
    """Raises ValueError for a grid or a random end that the layers do not allow, and for a solver that puts each row at
    its own depth, where weights are functions of depth."""
    by_layer = getattr(look_up(WEIGHTS, config.weights, "weights"), "by_layer", True)
    if isinstance(solver, PerSample) and not by_layer:
        raise ValueError(f"solver {solver.name!r} with per_sample has each row at a depth of its own, and weights that "
                         "are functions of l would differ from row to row; take it without per_sample (its error norm "
                         "is that of the worst row), or weights that are constant in a layer")
    for name, given in (("grid", config.grid is not None), ("steer", config.steer > 0)):
        if given and fusion is not None and fusion.acts:
            raise ValueError(f"{name} cannot be combined with fusion, which acts by whole layers")
    if config.grid is None:
        return
    if config.steer >= config.grid[-1] - config.grid[-2]:
        raise ValueError(f"steer must be below the last step of the grid, {config.grid[-1] - config.grid[-2]:g}, which "
                         f"it shortens; got {config.steer}")
    if (config.grid[0], config.grid[-1]) != (0, n_layers):
        raise ValueError(f"grid must go from 0 to n_layers = {n_layers}, got {config.grid}")
    one_piece = not by_layer or config.weights == "shared"
    missing = [l for l in range(1, n_layers) if l not in config.grid]
    if missing and (config.layer_drop or not one_piece):
        raise ValueError(f"grid must hold every whole l where layers differ or are dropped; {missing} are not in "
                         f"{config.grid}")


def check_rows(solver: Any, drawn: bool) -> None:
    """Raises ValueError where rows leave the batch for which random factors were ``drawn``."""
    if drawn and getattr(solver, "compact", False):
        raise ValueError(f"solver {solver.name!r} takes finished rows out of the batch, where dropout and layer_drop "
                         "have drawn for all of them; give solver_options={'compact': False}")


def check_dropout(solver: Any, dropout: float, dropout_per: str, gradient: str) -> None:
    """Raises ValueError where dropout drawn anew at each evaluation has no meaning."""
    if not dropout or dropout_per == "solve":
        return
    reasons = {f"the adaptive solver {solver.name!r}, which takes noise for errors of its steps": solver.is_adaptive,
               f"the implicit solver {solver.name!r}, whose iterations would never settle": solver.is_implicit,
               "gradient='adjoint', that of a flow, which noise does not have": gradient == "adjoint"}
    for what, found in reasons.items():
        if found:
            raise ValueError(f"dropout_per='evaluation' cannot be used with {what}; take dropout_per='solve'")


def check_routing(solver: Any, routing: Any, gradient: str) -> None:
    """Raises ValueError where experts are to be chosen once a step and steps are not simply taken one by one."""
    if routing == "step" and (solver.is_adaptive or gradient not in TRACKED):
        what = f"adaptive solver {solver.name!r}, which takes steps back" if solver.is_adaptive else (
            f"gradient={gradient!r}, which takes steps again in another order")
        raise ValueError(f"routing='step' cannot be used with {what}; take routing='solve' or 'evaluation'")
