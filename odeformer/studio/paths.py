"""Sections on the paths of states and on how smooth depth is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odeformer import diagnostics, plots
from odeformer.diagnostics import IncrementScaling, WeightSmoothness
from odeformer.studio.section import Section, Verdict
from odeformer.studio.stack import Stack
from odeformer.studio.words import counted, graded, largest, listed, median, number, percent, times

SMALL, LARGE = 0.1, 0.5  # share of its size that a layer moves a state by


def by_site(x: Tensor) -> Tensor:
    """The median at each site, over what else there is."""
    return torch.stack([torch.nanmedian(row.double()) for row in x])


@dataclass(frozen=True)
class Steps:
    """``ratios`` (sites, parts, batch, tokens) and the medians (parts, sites)."""

    ratios: Tensor
    depths: list[float]

    @property
    def medians(self) -> Tensor:
        return torch.stack([by_site(self.ratios[:, i]) for i in range(self.ratios.shape[1])])


def measure_steps(stack: Stack) -> Steps:
    return Steps(diagnostics.effective_steps(stack.run), [float(site.l) for site in stack.run.sites()])


def draw_steps(stack: Stack, found: Steps) -> Any:
    names = stack.parts or ["the layer"]
    positive = found.ratios.nan_to_num(1.0).min() > 0
    return plots.over_depth({name: found.ratios[:, i] for i, name in enumerate(names)}, depths=found.depths,
                            label="‖f(z)‖ / ‖z‖ (1 / layer)", scale="log" if positive else "linear")


def say_steps(stack: Stack, found: Steps) -> str:
    names, medians = stack.parts or ["a layer"], found.medians
    typical = median(found.ratios)
    peaks = [(*largest(row), name) for row, name in zip(medians, names, strict=True)]
    parts = listed([f"{name} moves a state most at l = {number(found.depths[i])} (by {percent(value)} of its size a "
                    "layer)" for value, i, name in peaks])
    scale = graded(typical, (SMALL, "small, so that a step changes what f sees only a little"),
                   (LARGE, "neither small nor large"), otherwise="so large that a layer replaces much of the state")
    return f"The median is {percent(typical)} of a state's size a layer, {scale}; {parts}."


@dataclass(frozen=True)
class Directions:
    """``cosines`` and ``curvatures`` (steps - 1, batch, tokens), ``ratios`` (batch, tokens)."""

    cosines: Tensor
    curvatures: Tensor
    ratios: Tensor
    depths: list[float]


def measure_directions(stack: Stack) -> Directions:
    run = stack.run
    return Directions(diagnostics.update_cosines(run), diagnostics.curvatures(run), diagnostics.path_ratio(run),
                      list(run.depths[1:-1]))


def draw_directions(stack: Stack, found: Directions) -> Any:
    return plots.over_depth(found.cosines, depths=found.depths, label="cosine of successive updates")


def turning_back(found: Directions) -> float:
    """The share of tokens and steps with a cosine below 0."""
    there = ~found.cosines.isnan()
    return float((found.cosines < 0)[there].double().mean())


AGREE = ((-0.3, "successive updates undo each other: the path oscillates"),
         (0.3, "successive updates know little of each other"), (0.7, "successive updates agree in part"))


def say_directions(stack: Stack, found: Directions) -> str:
    typical, back = median(found.cosines), turning_back(found)
    kind = graded(typical, *AGREE, otherwise="successive updates point much the same way: a smooth path")
    return (f"The median cosine is {number(typical)}: {kind}. In {percent(back)} of all steps and tokens the path "
            f"turns back (a cosine below 0). Paths are {times(median(found.ratios))} as long as the straight line "
            "between their ends.")


def measure_curvature(stack: Stack) -> Directions:
    return measure_directions(stack)


def draw_curvature(stack: Stack, found: Directions) -> Any:
    finite = found.curvatures.masked_fill(~found.curvatures.isfinite(), torch.nan)
    return plots.over_depth(finite, depths=found.depths, label="curvature (1 / ‖z‖)")


def say_curvature(stack: Stack, found: Directions) -> str:
    rows = by_site(found.curvatures)
    value, i = largest(rows)
    lengths = stack.run.states.diff(dim=0).norm(dim=-1)[:-1]
    turn = median(found.curvatures * stack.run.real(lengths))
    bend = graded(turn, (0.3, "steps are short against the bends they follow"),
                  (1.2, "a step is as long as the bend it should follow"), otherwise="steps jump across the bends")
    radius = number(1 / value) if value else "∞"
    return (f"The sharpest bend is at l = {number(found.depths[i])}, a median curvature of {number(value)}, so a "
            f"circle of radius {radius}. Curvature times the length of a step has the median {number(turn)}: {bend}.")


def measure_weights(stack: Stack) -> WeightSmoothness:
    if stack.model is None:
        raise ValueError("there are no layers whose weights could be compared")
    return diagnostics.weight_smoothness(stack.model)


def changes(found: WeightSmoothness) -> Tensor:
    """(n_layers - 1, matrices)."""
    return torch.stack(list(found.changes.values()), 1)


def draw_weights(stack: Stack, found: WeightSmoothness) -> Any:
    x = changes(found)
    if not bool((x.nan_to_num(0.0) > 0).any()):
        return None
    ax = plots.over_depth({"change": x, "cosine": torch.stack(list(found.cosines.values()), 1)},
                          depths=[i + 1.0 for i in range(len(x))], label="between neighbouring layers")
    ax.axhline(2**0.5, color="0.6", linewidth=0.6, zorder=0.5)
    return ax


CHANGE = ((0.3, "weights change slowly with depth, as a limit in depth asks for"),
          (1.1, "neighbouring layers share part of their weights"))
INDEPENDENT = "neighbouring layers are about as different as independent ones (√2): weights are no smooth function of l"


def say_weights(stack: Stack, found: WeightSmoothness) -> str:
    x = changes(found)
    if not bool((x.nan_to_num(0.0) > 0).any()):
        return "All layers have the same weights: the field is autonomous, as smooth in l as can be."
    typical = median(x)
    value, i = largest(x.nanmean(0))
    most, at = largest(by_site(x))
    return (f"From layer to layer a matrix changes by {percent(typical)} of its norm in the median: "
            f"{graded(typical, *CHANGE, otherwise=INDEPENDENT)}. Most changes `{list(found.changes)[i]}` "
            f"({percent(value)}), and between layers {at} and {at + 1} ({percent(most)}).")


def judge_weights(stack: Stack, found: WeightSmoothness) -> Verdict:
    typical = median(changes(found).nan_to_num(0.0))
    answer = "one layer for all" if typical == 0 else graded(typical, (0.3, "yes"), (1.1, "in part"), otherwise="no")
    grade = graded(typical, (0.3, "good"), (1.1, "warn"), otherwise="bad")
    return Verdict("Are weights smooth in depth?", answer, f"a change of {percent(typical)} from layer to layer", grade)


@dataclass(frozen=True)
class Scalings:
    """Of the states, and of each matrix over layers, where these differ."""

    states: IncrementScaling
    weights: list[IncrementScaling]


def measure_limit(stack: Stack) -> Scalings:
    states, weights = diagnostics.increment_scaling(stack.run), []
    if stack.model is not None:
        rows = diagnostics.layer_weights(stack.model)
        if len(rows) > 3 and any(a is not b for a, b in zip(rows[0].values(), rows[1].values(), strict=True)):
            names = [name for name, x in rows[0].items() if x.dim() > 1]
            weights = [diagnostics.increment_scaling([row[name].detach() for row in rows]) for name in names]
    return Scalings(states, [x for x in weights if x.limit != "constant"])


def draw_limit(stack: Stack, found: Scalings) -> Any:
    states = found.states
    if states.limit == "constant":
        return None
    size = states.mean_squares / states.mean_squares[0]
    curves = {"states": size}
    if found.weights:
        curves["weights"] = torch.stack([x.mean_squares / x.mean_squares[0] for x in found.weights], 1)
    k = torch.tensor(states.lags, dtype=torch.float64)
    curves |= {"an ODE: k²": k**2, "an SDE: k": k}
    lags = {name: values for name, values in curves.items() if len(values) == len(k)}
    ax = plots.over_depth(lags, depths=list(states.lags), label="mean |z(i+k) - z(i)|², of that for k = 1", scale="log")
    ax.set_xlabel("lag k (steps)")
    return ax


LIMITS = {"ode": "as a differentiable path does, so an ODE fits",
          "sde": "as a Brownian path does, so an SDE fits better",
          "neither": "hardly at all, as values that know nothing of each other, so neither an ODE nor an SDE fits",
          "constant": "not at all: nothing moves"}


def say_limit(stack: Stack, found: Scalings) -> str:
    states = found.states
    text = (f"Increments of states grow with the exponent {number(states.exponent)} of the lag: {LIMITS[states.limit]}."
            if states.limit != "constant" else "States do not move.")
    if found.weights:
        exponents = torch.tensor([x.exponent for x in found.weights])
        names = [x.limit for x in found.weights]
        most = max(set(names), key=names.count)
        text += (f" Of the weights' {counted(len(names), 'matrix').replace('matrixs', 'matrices')} the median exponent "
                 f"is {number(median(exponents))}; {percent(names.count(most) / len(names))} grow {LIMITS[most]}.")
    return text + f" From {counted(len(stack.run.depths), 'point')} of depth this is a hint, not a proof."


def judge_limit(stack: Stack, found: Scalings) -> Verdict:
    names = {"ode": "an ODE", "sde": "an SDE", "neither": "neither", "constant": "nothing moves"}
    grade = {"ode": "good", "sde": "warn", "neither": "bad", "constant": ""}[found.states.limit]
    return Verdict("Which limit do the increments of states look like?", names[found.states.limit],
                   f"exponent {number(found.states.exponent)} (ODE 1, SDE 1/2)", grade)


def draw_paths(stack: Stack, found: Sequence[float]) -> Any:
    run = stack.run
    return plots.trajectories(run.states, depths=run.depths, mask=run.mask)


def measure_paths(stack: Stack) -> Sequence[float]:
    run = stack.run
    keep = torch.ones(run.states.shape[1:3], dtype=torch.bool) if run.mask is None else run.mask
    points = run.states[:, keep].flatten(0, 1).double().cpu()
    if min(points.shape) < 2:
        raise ValueError("two directions are needed to draw paths in a plane")
    return list(plots.principal_directions(points, min(3, *points.shape))[2])


def say_paths(stack: Stack, found: Sequence[float]) -> str:
    run = stack.run
    moved = run.real((run.states[-1] - run.states[0]).norm(dim=-1) / run.states[0].norm(dim=-1))
    grown = run.real(run.states[-1].norm(dim=-1) / run.states[0].norm(dim=-1))
    flat = "so the plane shows most of the movement" if sum(found[:2]) > 0.7 else "so much happens outside the plane"
    return (f"The two directions hold {percent(sum(found[:2]))} of the variance of all states, {flat}. A token ends "
            f"{times(median(moved))} its first norm away from where it began, and its norm is {times(median(grown))} "
            "what it was.")


SECTIONS = {
    "paths": Section(
        "Paths of states", measure_paths,
        "Each line is a token's state through depth, seen in the plane of largest variance; ○ is the embedding, ■ the "
        "final state. A flow makes smooth bundles; layers that have little to do with each other make zigzags.",
        say_paths, draw_paths, code="plots.trajectories(solution)"),
    "steps": Section(
        "Size of steps", measure_steps,
        "By what share of its own size a step of h = 1 moves a token's state, for each sublayer: the line is the "
        "median over tokens, the band their middle 80 %. Small values are what a smooth limit in depth needs.",
        say_steps, draw_steps, code="plots.over_depth(diagnostics.effective_steps(solution)[:, 0])"),
    "directions": Section(
        "Direction of successive updates", measure_directions,
        "The cosine of the angle between a token's update and its next one: 1 is a straight path, 0 updates that have "
        "nothing to do with each other, below 0 a path that turns back.",
        say_directions, draw_directions, code="plots.over_depth(diagnostics.update_cosines(solution))"),
    "curvature": Section(
        "Curvature of paths", measure_curvature,
        "One over the radius of the circle through three neighbouring states: 0 on a straight line. A solver's steps "
        "have to be short against the radius.",
        say_curvature, draw_curvature, code="plots.over_depth(diagnostics.curvatures(solution))"),
    "weights": Section(
        "Smoothness of weights", measure_weights,
        "How much a matrix differs from the same matrix of the next layer, relative to its norm, and the cosine "
        "between the two; the band is the middle 80 % of matrices. Independent layers give √2 (the grey line) and 0, a "
        "smooth function of depth a small change and 1.",
        say_weights, draw_weights, judge_weights,
        code="plots.over_depth(diagnostics.weight_smoothness(model).mean)"),
    "limit": Section(
        "ODE or SDE", measure_limit,
        "How the mean square of |z(i+k) - z(i)| grows with the lag k: like k² on a differentiable path, like k on a "
        "Brownian one, not at all where values are independent.",
        say_limit, draw_limit, judge_limit, code="diagnostics.increment_scaling(solution)"),
}
