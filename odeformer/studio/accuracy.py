"""Sections on errors: of steps, of the whole, and on how much of a network is its solver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odeformer import diagnostics, plots
from odeformer.depth import SolverError
from odeformer.diagnostics import GlobalErrors, Invariance
from odeformer.studio.section import Section, Verdict
from odeformer.studio.stack import Stack
from odeformer.studio.words import graded, largest, listed, median, number, percent

PAIR = "dopri5"
LEVELS = (1, 2, 4, 8)
TURNS = {"lie": 1, "strang": 2}  # orders of splittings
PEERS = ("euler", "midpoint", "rk4")


def measure_local(stack: Stack) -> Tensor:
    """(steps, batch, tokens)."""
    return diagnostics.local_errors(stack.run, PAIR)


def draw_local(stack: Stack, found: Tensor) -> Any:
    row = found[:, 0]
    if not bool((row.nan_to_num(0.0) > 0).any()):
        return None
    return plots.local_errors(row, edges=list(stack.run.depths), label="local error ‖·‖ / ‖z‖")


def say_local(stack: Stack, found: Tensor) -> str:
    steps = torch.stack([torch.nanmedian(x) for x in found])
    typical, (value, i) = median(found), largest(steps)
    highest = float(found.nan_to_num(0.0).max())
    most, token = largest(found[:, 0].nan_to_num(0.0).amax(0))
    even = graded(highest / typical if typical else math.inf, (10, "spread evenly over depth and tokens"),
                  (100, "uneven"), otherwise="made by few steps and tokens")
    l = stack.run.depths
    return (f"A step of {PAIR} as long as the network's errs by {number(typical)} of the state's size in the median "
            f"and by {number(highest)} at most: the error is {even}. Hardest is the step from l = {number(l[i])} to "
            f"{number(l[i + 1])} (a median of {number(value)}), and of the first row token {token} (up to "
            f"{number(most)}).")


@dataclass(frozen=True, eq=False)
class Errors:
    """By solver, the model's first; ``own``: of the model's solver at its own steps, nan where it takes none of
    these."""

    found: Mapping[str, GlobalErrors]
    own: float
    per_layer: float
    order: float


def measure_global(stack: Stack) -> Errors:
    own = None if stack.chooses_steps else stack.solver
    name = None if own is None else own.name
    solvers = ({} if own is None else {name: own}) | {peer: peer for peer in PEERS if peer != name}
    per_layer = math.nan if own is None else 1 / stack.h
    whole = own is not None and per_layer >= 1 and abs(per_layer - round(per_layer)) < 1e-6
    levels = sorted({*LEVELS, *([round(per_layer)] if whole else [])})
    try:
        found = {label: diagnostics.global_errors(stack.few, solver, levels) for label, solver in solvers.items()}
    except SolverError as error:
        raise ValueError(f"the flow of f could not be integrated to compare with: {error}") from error
    first = next(iter(found.values()))
    at = median(first.errors[levels.index(round(per_layer))]) if whole else math.nan
    return Errors(found, at, per_layer, median(first.orders[-1]))


def draw_global(stack: Stack, found: Errors) -> Any:
    floor = torch.finfo(stack.run.states.dtype).eps
    curves = {}
    for name, x in found.found.items():
        errors = x.errors.nanmedian(1).values
        if bool((errors[errors.isfinite()] > floor).any()):
            curves[name] = (x.nfe, errors)
    if not curves:
        return None
    return plots.error_against_nfe(curves, orders=(1, 2, 4), error="relative error of the final state")


SMOOTH = ((0.05, "yes"), (0.3, "roughly"))  # by the error of the network's own steps
KINDS = ((0.05, "refining its steps would hardly change the network: its depth is a smooth ODE"),
         (0.3, "refining its steps changes the network noticeably: it is an ODE in outline only"))
NO_FLOW = "refining its steps makes another network of it: its layers are not steps of a flow"


def say_global(stack: Stack, found: Errors) -> str:
    name = next(iter(found.found))
    text = "" if math.isnan(found.own) else (
        f"With the steps that it takes, {name} ends {percent(found.own)} of the state's norm away from the flow of f: "
        f"{graded(found.own, *KINDS, otherwise=NO_FLOW)}. ")
    order = f"The observed order of {name} from the last two refinements is {number(found.order)}"
    if not stack.chooses_steps:
        nominal, bound = stack.solver.order, TURNS.get(stack.splitting, 1)
        turned = stack.turns and nominal > bound
        order += f" (the method's is {nominal}" + (f", and taking turns makes it {bound} at most)" if turned else ")")
        if found.order < 0.7 * (bound if turned else nominal):
            order += ": steps are not yet short enough for it to show"
    budget = max(found.found[name].nfe)
    error, label = min((float(x.errors[i].nanmedian()), label) for label, x in found.found.items()
                       for i, nfe in enumerate(x.nfe) if nfe <= budget)
    return f"{text}{order}. Within {number(budget)} evaluations {label} comes closest, to {percent(error)}."


def judge_global(stack: Stack, found: Errors) -> Verdict:
    question = "Is this depth a smooth ODE?"
    if math.isnan(found.own):
        return Verdict(question, "as its solver makes it", "the solver chooses its steps by their error")
    answer = graded(found.own, *SMOOTH, otherwise="no")
    return Verdict(question, answer, f"its own steps end {percent(found.own)} of the norm away from the flow",
                   {"yes": "good", "roughly": "warn", "no": "bad"}[answer])


def measure_invariance(stack: Stack) -> Invariance:
    read_out = stack.read_out if stack.read_out is not None else (lambda z: z)
    return diagnostics.solver_invariance(stack.run, read_out)


def say_invariance(stack: Stack, found: Invariance) -> str:
    far = max((x, name) for name, x in found.distances.items() if name != found.reference)
    kind = graded(found.score, (0.5, "another solver makes another network of it"),
                  (0.9, "it depends on its solver in part"), otherwise="it is nearly the same network under each")
    text = (f"The score is {number(found.score)}: {kind}. Farthest from {found.reference} ends {far[1]}, at "
            f"{percent(far[0])} of the norm of the states.")
    agreement = found.agreement.get(far[1])
    if stack.read_out is None:
        return text + " Outputs are no function of the final states alone, so predictions are not compared."
    return text + ("" if agreement is None else f" {percent(agreement)} of its predictions are the same.")


def judge_invariance(stack: Stack, found: Invariance) -> Verdict:
    grade = "bad" if found.score < 0.5 else "warn" if found.score < 0.9 else "good"
    answer = {"bad": "much", "warn": "in part", "good": "little"}[grade]
    names = listed([name for name in found.distances if name != found.reference])
    return Verdict("How much depends on the solver?", answer, f"invariance {number(found.score)} ({names} against "
                   f"{found.reference}, one step a layer)", grade)


def table_invariance(stack: Stack, found: Invariance) -> tuple[list[str], list[list[Any]]]:
    rows = [[name, found.distances[name], found.output_differences[name],
             None if found.agreement[name] is None else f"{100 * found.agreement[name]:.0f} %"]
            for name in found.distances]
    return ["solver", "distance of final states", "largest difference of an output", "equal predictions"], rows


SECTIONS = {
    "local": Section(
        "Local error", measure_local,
        f"How far one step of {PAIR}, as long as the network's, is off by its own estimate, for each token of the "
        "first row: bright cells are steps and tokens that are hard to integrate, and where a grid should be finer.",
        say_local, draw_local, code="plots.local_errors(diagnostics.local_errors(solution)[:, 0])"),
    "global": Section(
        "Global error and order", measure_global,
        "How far the final state is from the exact flow of f as steps are refined, weights held. A straight line of "
        "slope -p is a method of order p; where curves cross, the higher order begins to pay.",
        say_global, draw_global, judge_global, code="diagnostics.global_errors(solution, solver)"),
    "invariance": Section(
        "Solver invariance", measure_invariance,
        "The same weights under several solvers, one step a layer: how far final states end from the finest solver's "
        "(relative, at most 1) and how many predictions stay the same.",
        say_invariance, None, judge_invariance, table_invariance,
        code="diagnostics.solver_invariance(solution, model.read_out)"),
}
