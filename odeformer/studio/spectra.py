"""Sections on eigenvalues: h λ in the stability region, over depth, stiffness, larger steps, non-normality."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from odeformer import diagnostics, plots
from odeformer.studio.modes import Modes, Reach, modes_of, reaches, share, shares
from odeformer.studio.section import Section, Verdict
from odeformer.studio.stack import Stack
from odeformer.studio.words import counted, graded, largest, listed, median, number, percent, times
from solvers.stability import real_interval

MANY = 300


def light(ax: Any) -> Any:
    """Many dots as a picture within the figure: thousands of vector marks make a page slow."""
    for dots in ax.collections:
        if len(dots.get_offsets()) > MANY:
            dots.set_rasterized(True)
    return ax


def draw_region(stack: Stack, modes: Modes) -> Any:
    """h λ of what is stepped along, over the region of the solver; of the whole field over Euler's where that has
    none."""
    if modes.solver is None:
        points = modes.whole.eigenvalues * torch.tensor(modes.whole.steps).view(-1, 1, 1)
        return light(plots.stability_regions("euler", eigenvalues=points, depths=modes.whole.depths))
    stepped = list(modes.stepped.values())
    points = torch.cat([x.points.flatten(1) for x in stepped], 1)
    return light(plots.stability_regions(modes.solver, eigenvalues=points, depths=stepped[0].spectrum.depths))


def say_region(stack: Stack, modes: Modes) -> str:
    if modes.solver is None:
        return (f"The solver, {stack.solver.name}, has no stability region in the plane of one h λ; Euler's is drawn "
                f"for comparison. Shown are {modes.what} a row of the whole field.")
    inside, decaying = share(modes), share(modes, decaying=True)
    by_layer = shares(modes, decaying=True)[:-1].nan_to_num(1.0)
    worst, at = by_layer.min(), int(by_layer.argmin())
    turns = (f" Sublayers take turns in a step, so these are the eigenvalues of {listed(list(modes.stepped))} by "
             "themselves." if modes.turns else "")
    where = (f" Most are outside at l = {number(modes.whole.depths[at])}, where {percent(float(worst))} of the "
             "decaying modes are inside." if worst < 1 else "")
    growing = 1 - inside if not math.isnan(inside) else math.nan
    rest = (f" {percent(growing)} are outside, of which most grow by themselves (Re λ > 0), as they should: the solver "
            "follows the field." if growing > 0 and decaying > 0.999 else "")
    modes_that = ("No mode decays." if math.isnan(decaying) else
                  f"Of the modes that decay (Re λ < 0) {percent(decaying)} are inside, so the solver "
                  f"{'damps all of them' if decaying > 0.9999 else 'makes the others grow'}.")
    unseen = "" if modes.whole.whole else " Eigenvalues that were not looked for lie between these."
    return (f"At h = {number(stack.h)}, {percent(inside)} of {modes.what} a row and layer are inside the region of "
            f"{modes.solver.name}. {modes_that}{where}{rest}{turns}{unseen}")


def judge_region(stack: Stack, modes: Modes) -> Verdict:
    question = "Is h λ inside the region of its solver?"
    if modes.solver is None:
        return Verdict(question, "it has no region", f"{stack.solver.name} has none in the plane of one h λ")
    decaying = share(modes, decaying=True)
    if math.isnan(decaying):
        return Verdict(question, "nothing decays", f"{percent(share(modes))} of all modes inside")
    answer = "yes" if decaying > 0.9999 else "mostly" if decaying >= 0.95 else "no"
    which = "" if modes.whole.whole else "leading "
    return Verdict(question, answer, f"{percent(decaying)} of the {which}decaying modes inside {modes.solver.name}'s "
                   f"region at h = {number(stack.h)}", {"yes": "good", "mostly": "warn", "no": "bad"}[answer])


def draw_spectra(stack: Stack, modes: Modes) -> Any:
    limits = {}
    if modes.solver is not None and math.isfinite(end := real_interval(modes.solver)) and end:
        limits = {f"end of {modes.solver.name}'s interval / h": end / stack.h}
    return light(plots.spectra(modes.whole.eigenvalues, depths=modes.whole.depths, limits=limits))


def say_spectra(stack: Stack, modes: Modes) -> str:
    λ = modes.whole.eigenvalues
    left, right = (getattr(torch.nan_to_num(λ.real, sign * -math.inf).flatten(1), end)(-1)
                   for sign, end in ((-1, "amin"), (1, "amax")))
    i, j = int(left.argmin()), int(right.argmax())
    there = ~λ.isnan()
    turning = float((λ.imag.abs() > λ.real.abs())[there].double().mean())
    growing = float((λ.real > modes.flat * λ.abs().nan_to_num(0.0).max())[there].double().mean())
    kind = graded(turning, (0.1, "the field is mostly one of growth and decay"),
                  (0.5, "the field turns as well as it grows and decays"), otherwise="the field mostly turns")
    return (f"Real parts run from {number(left[i])} (at l = {number(modes.whole.depths[i])}) to {number(right[j])} (at "
            f"l = {number(modes.whole.depths[j])}). {percent(growing)} of the modes grow (Re λ > 0). "
            f"{percent(turning)} have a larger imaginary than real part, so {kind}.")


@dataclass(frozen=True, eq=False)
class Stiffness:
    """``index`` (sites, batch), ``ratio`` (sites, batch), ``whole``: whether the ratio is that of all eigenvalues."""

    index: Tensor
    ratio: Tensor
    depths: tuple[float, ...]
    whole: bool
    n_steps: float


def stiffness(stack: Stack, modes: Modes) -> Stiffness:
    found = modes.whole
    end = stack.run.depths[-1]
    left = torch.tensor([end - l for l in found.depths], dtype=torch.float64).view(-1, 1)
    index = (-found.eigenvalues.real.nan_to_num(math.inf).amin(-1)).clamp(min=0) * left
    λ = found.eigenvalues
    slow = λ.real.abs() < modes.flat * λ.abs().nan_to_num(0.0).max()
    ratio = diagnostics.stiffness_ratio(replace(found, eigenvalues=λ.masked_fill(slow, complex(math.nan, math.nan))))
    return Stiffness(index, ratio, found.depths, found.whole, stack.length / stack.h)


def draw_stiffness(stack: Stack, found: Stiffness) -> Any:
    curves = {"index": found.index}
    if found.whole and not bool(found.ratio.isnan().all()):
        curves["ratio"] = found.ratio
    if all(bool((x.nan_to_num(1.0) > 0).all()) for x in curves.values()):
        return plots.over_depth(curves, depths=found.depths, label="stiffness (no unit)", scale="log")
    return plots.over_depth(curves, depths=found.depths, label="stiffness (no unit)")


STIFF = ((0.5, "not stiff"), (1.0, "mildly stiff"), (10.0, "stiff"))


def degree(found: Stiffness) -> str:
    """In words, by the Euler steps that stability asks for over the steps taken."""
    return graded(float(found.index.max()) / 2 / found.n_steps, *STIFF, otherwise="very stiff")


def say_stiffness(stack: Stack, found: Stiffness) -> str:
    words = degree(found)
    value, i = largest(found.index.amax(-1))
    ratio = float(found.ratio.nan_to_num(-math.inf).max())
    compared = (f"Decay rates differ by up to {times(ratio)}{'' if found.whole else ' at least'} within a layer."
                if ratio > 0 else "No mode decays.")
    return (f"The index is largest at l = {number(found.depths[i])}, {number(value)}: stability alone asks Euler for "
            f"about {number(math.ceil(value / 2))} steps from there on, and the solver takes {number(found.n_steps)} "
            f"over the whole depth. For the steps it takes this depth is {words}. {compared}")


def judge_stiffness(stack: Stack, found: Stiffness) -> Verdict:
    words = degree(found)
    grade = {"not stiff": "good", "mildly stiff": "good", "stiff": "warn"}.get(words, "bad")
    return Verdict("How stiff is it?", words, f"index {number(float(found.index.max()))} against "
                   f"{counted(round(found.n_steps), 'step')}", grade)


def draw_reach(stack: Stack, found: list[Reach]) -> Any:
    shown = [x for x in found if bool(x.h.isfinite().all()) and bool((x.h > 0).all())]
    own = [x for x in shown if x is own_of(stack, found)]
    shown = [*own, *sorted((x for x in shown if x not in own), key=lambda x: -x.smallest)][:6]
    return plots.over_depth({x.name: x.h for x in shown}, depths=stack.at, label="largest stable h (layers)",
                            scale="log") if shown else None


def own_of(stack: Stack, found: list[Reach]) -> Reach:
    """The model's method; Euler where that has no region."""
    names = [x.name for x in found]
    return found[names.index(getattr(stack.method, "name", "euler"))]


def table_reach(stack: Stack, found: list[Reach]) -> tuple[list[str], list[list[Any]]]:
    columns = ["method", "order", "evaluations a step", "largest stable h (layers)", "evaluations a layer at that h",
               "h for all modes", "note"]
    own = own_of(stack, found)
    rows = [[x.name, x.order, x.evaluations, x.smallest, None if x.implicit or x.smallest == math.inf else x.cost,
             float(x.strict.min()), "the model's" if x is own and stack.method is not None else
             "implicit: more evaluations, to solve" if x.implicit else ""] for x in found]
    return columns, rows


def explicit_ones(found: list[Reach]) -> list[Reach]:
    return [x for x in found if not x.implicit]


def say_reach(stack: Stack, found: list[Reach]) -> str:
    own, explicit = own_of(stack, found), explicit_ones(found)
    if all(math.isinf(x.smallest) for x in explicit):
        return "No mode decays, so no method is bound by stability here: accuracy alone limits the step."
    ahead = sorted((x for x in explicit if x.smallest > 1.05 * own.smallest), key=lambda x: -x.smallest)
    used = (f"is used at {number(stack.h)}, within that" if own.smallest >= stack.h else
            f"is used at {number(stack.h)}, beyond that")
    longer = (f"Bigger steps could take {listed([f'{x.name} (h up to {number(x.smallest)})' for x in ahead[:4]])}"
              if ahead else "No other explicit method among these could take bigger steps")
    best = min(explicit, key=lambda x: x.cost)
    saving = (f"that is {own.name} itself, {number(own.cost)}" if best is own else
              f"{best.name} needs {number(best.cost)} where {own.name} needs {number(own.cost)}")
    return (f"{own.name[0].upper()}{own.name[1:]} keeps 95 % of the decaying modes of each layer inside up to h = "
            f"{number(own.smallest)} and {used}. {longer}. The fewest evaluations a layer that stability allows: "
            f"{saving}. Methods with ∞ are bound by accuracy alone.")


def judge_reach(stack: Stack, found: list[Reach]) -> Verdict:
    question = "Which solver could take bigger steps?"
    own, explicit = own_of(stack, found), explicit_ones(found)
    if all(math.isinf(x.smallest) for x in explicit):
        return Verdict(question, "any", "no mode decays: accuracy alone limits h")
    best, cheapest = max(explicit, key=lambda x: x.smallest), min(explicit, key=lambda x: x.cost)
    answer = best.name if best.smallest > 1.05 * own.smallest else "none that is explicit"
    return Verdict(question, answer, f"h up to {number(best.smallest)} against {own.name}'s {number(own.smallest)}; "
                   f"fewest evaluations a layer: {cheapest.name}, {number(cheapest.cost)}")


@dataclass(frozen=True, eq=False)
class Growth:
    """(sites, batch) each: the logarithmic norm, the spectral norm, the secant estimate, non-normality; ``abscissa``:
    the largest Re λ."""

    log_norm: Tensor
    norm: Tensor
    secant: Tensor
    non_normality: Tensor
    abscissa: Tensor
    depths: tuple[float, ...]


def growth(stack: Stack, modes: Modes) -> Growth:
    options = {"at": stack.at, "max_bytes": stack.limits.max_bytes, "tol": 1e-3, "max_restarts": 6,
               "seed": stack.limits.seed}
    few, seed = stack.few, stack.limits.seed
    λ = modes.whole.eigenvalues
    return Growth(diagnostics.log_norm(few, **options), diagnostics.spectral_norm(few, **options),
                  diagnostics.secant_lipschitz(few, at=stack.at, seed=seed),
                  diagnostics.non_normality(few, 8, at=stack.at, seed=seed),
                  λ.real.nan_to_num(-math.inf).amax(-1), modes.whole.depths)


def draw_growth(stack: Stack, found: Growth) -> Any:
    return plots.over_depth({"norm ‖J‖": found.norm, "secant": found.secant, "log norm μ": found.log_norm,
                             "largest Re λ": found.abscissa}, depths=found.depths, label="rate (1 / layer)")


def say_growth(stack: Stack, found: Growth) -> str:
    apart = found.log_norm - found.abscissa
    value, i = largest(apart.amax(-1))
    normal = median(found.non_normality)
    kind = graded(normal, (0.1, "near normal"), (0.5, "moderately non-normal"), otherwise="far from normal")
    if value > 0.25 * float(found.norm.max()):
        kind += " in the mean of all directions, and eigenvalues alone mislead about the worst"
    μ, at = largest(found.log_norm.amax(-1))
    seen = "about those of" if float(found.secant.max()) > 0.5 * float(found.norm.max()) else "well below those of"
    contracts = ("the field contracts everywhere it was looked at" if μ < 0 else
                 f"two states can part at the rate {number(μ)} at l = {number(found.depths[at])}")
    return (f"The Lipschitz constant of f is at least {number(float(found.norm.max()))} and {contracts}. At l = "
            f"{number(found.depths[i])} a difference can grow at first {number(value)} a layer faster than any "
            f"eigenvalue says. Non-normality has the median {number(normal)} (0: normal, at most √2): {kind}. Finite "
            f"differences of 10 % of the state's size see slopes of {number(float(found.secant.max()))}, "
            f"{seen} the Jacobian's worst direction.")


SECTIONS = {
    "region": Section(
        "h λ over the stability region", modes_of,
        "Each dot is an eigenvalue λ of df/dz at one layer times the step h, coloured by depth. Inside the shaded "
        "region the solver lets small differences along it fade or stay; outside it makes them grow. Modes with Re λ > "
        "0 grow by themselves and belong outside.",
        say_region, draw_region, judge_region,
        code="plots.stability_regions(solver, eigenvalues=diagnostics.stability(solution, solver, None).points)"),
    "spectra": Section(
        "Spectra over depth", modes_of,
        "The real parts of the eigenvalues of df/dz at each layer: below 0 differences fade, above 0 they grow. The "
        "dashed line is where a decaying mode leaves the solver's interval at the step it takes.",
        say_spectra, draw_spectra, code="plots.spectra(diagnostics.spectrum(solution, None).eigenvalues)"),
    "stiffness": Section(
        "Stiffness", lambda stack: stiffness(stack, modes_of(stack)),
        "The index is the fastest decay rate times the depth still to go, half of which is the number of Euler steps "
        "that stability asks for; the ratio is that of the fastest to the slowest decay rate. Stiff means that "
        "stability, not accuracy, dictates the step of an explicit method.",
        say_stiffness, draw_stiffness, judge_stiffness, code="diagnostics.stiffness_index(solution)"),
    "reach": Section(
        "Which solver could take bigger steps", lambda stack: reaches(modes_of(stack)),
        "For each method the step up to which 95 % of the decaying modes of a layer are inside its region (the last "
        "few, nearly rotations, change too slowly to matter over a few layers), and what it costs: evaluations of f a "
        "layer at that step. This is stability alone; accuracy may ask for less.",
        say_reach, draw_reach, judge_reach, table_reach,
        code="diagnostics.stability(solution, 'rk4', None).largest_step"),
    "growth": Section(
        "Lipschitz constants and non-normality", lambda stack: growth(stack, modes_of(stack)),
        "‖J‖ bounds how fast f can change, μ how fast two states can part at first, the largest Re λ how fast they "
        "part in the long run. Where μ lies far above Re λ the Jacobian is not normal, and small differences can grow "
        "before they fade.",
        say_growth, draw_growth, code="plots.over_depth({'μ': diagnostics.log_norm(solution)})"),
}
