"""The part of a report on solvers: their stability regions side by side, intervals, order and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from odeformer import plots
from odeformer.page import Page
from odeformer.studio.words import listed, number
from solvers.base import Solver
from solvers.stability import imaginary_interval, is_stable, real_interval

COLUMNS = ["method", "order", "stages", "kind", "real interval", "imaginary interval", "evaluations a step",
           "real interval / evaluation", "imaginary interval / evaluation"]


def has_region(solver: Solver) -> bool:
    """Whether it has a stability region in the plane of one h λ."""
    try:
        is_stable(solver, -0.1)
    except (ValueError, TypeError):
        return False
    return True


def evaluations(solver: Solver) -> float:
    """Of f a step, once it is under way: an FSAL stage is not one; of an implicit method its stages, a lower bound."""
    count = getattr(solver, "nfe", None)
    if count is not None:
        return count(101) - count(100)
    tableau = getattr(solver, "tableau", None)
    return solver.n_stages - (tableau is not None and tableau.is_fsal and not solver.is_implicit)


def row(solver: Solver) -> list[Any]:
    """A line of the table."""
    kind = "implicit" if solver.is_implicit else "adaptive" if solver.is_adaptive else "explicit"
    start = [solver.name, solver.order, solver.n_stages, kind]
    if not has_region(solver):
        return [*start, None, None, evaluations(solver), None, None]
    real, imaginary = abs(real_interval(solver)), imaginary_interval(solver)
    n = evaluations(solver)
    per = [x / n if math.isfinite(x) and not solver.is_implicit else None for x in (real, imaginary)]
    return [*start, real, imaginary, n, *per]


def write(page: Page, solvers: Sequence[Solver]) -> None:
    """Regions, the table, and what they say."""
    page.heading("Solvers" if len(solvers) > 1 else f"Solver {solvers[0].name}")
    page.paragraph("The stability region of a method is where h λ may lie for z' = λ z to stay bounded over ever more "
                   "steps: the unit disc of its amplification factor, or for methods over several steps the root "
                   "condition. The real interval says how fast a decay it follows at a step h, the imaginary interval "
                   "how fast a rotation.")
    drawn = [solver for solver in solvers if has_region(solver)]
    rows = [row(solver) for solver in solvers]
    if drawn:
        names = ", ".join(repr(solver.name) for solver in drawn)
        page.figure(plots.stability_regions(drawn), f"Stability regions of {listed([x.name for x in drawn])}; shaded "
                    "is inside.", f"plots.stability_regions([{names}])")
    page.table(COLUMNS, rows, "Intervals are lengths from 0 along the axis, in h λ; a blank: the method has no region "
               "in the plane of one h λ. Evaluations of an implicit method are a lower bound.")
    page.paragraph(say(solvers, rows))


def say(solvers: Sequence[Solver], rows: Sequence[Sequence[Any]]) -> str:
    """What the table says."""
    known = [r for r in rows if r[4] is not None]
    text = []
    explicit = [r for r in known if r[3] != "implicit"]
    if len(explicit) > 1:
        far, cheap = max(explicit, key=lambda r: r[4]), max(explicit, key=lambda r: r[7])
        text.append(f"Of the explicit methods {far[0]} reaches farthest along the real axis, to {number(-far[4])}, and "
                    f"{cheap[0]} for the evaluations it takes ({number(cheap[7])} each).")
    for r in explicit if len(explicit) == 1 else []:
        text.append(f"{r[0]} is stable down to h λ = {number(-r[4])} on the real axis: a decay of rate λ allows steps "
                    f"up to {number(r[4])} / |λ|.")
    turning = [r[0] for r in known if r[5] > 0]
    still = [r[0] for r in known if not r[5] > 0]
    if turning:
        text.append(f"Rotations stay bounded under {listed(turning)}"
                    + (f", and grow at any step under {listed(still)}." if still else "."))
    elif still:
        text.append(f"Rotations grow at any step under {listed(still)}.")
    unbounded = [r[0] for r in known if math.isinf(r[4])]
    if unbounded:
        text.append(f"{listed(unbounded)} {'is' if len(unbounded) == 1 else 'are'} stable along the whole negative "
                    "axis: no decay is too fast, accuracy alone limits the step.")
    missing = [solver.name for solver in solvers if not has_region(solver)]
    if missing:
        text.append(f"{listed(missing)} {'has' if len(missing) == 1 else 'have'} no region in the plane of one h λ: "
                    "parts of f that are treated one by one, or learned coefficients, are not described by one λ.")
    return " ".join(text)
