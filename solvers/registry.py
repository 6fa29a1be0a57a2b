"""SOLVERS: every method by name."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from solvers import (
    adaptive,
    dense,
    equilibrium,
    explicit,
    hypersolver,
    imex,
    implicit,
    implicit_multistep,
    learned,
    multistep,
    predictor_corrector,
    reversible,
    splitting,
)
from solvers.adaptive import Adaptive
from solvers.base import Solver
from solvers.learned import Learned
from solvers.per_sample import PerSample

ENGINES = {"adaptive": Adaptive, "per_sample": PerSample}  # options of get_solver that ask for step size control


def merge(*tables: dict[str, Any]) -> dict[str, Any]:
    """The tables as one. Raises ValueError on a name that stands twice."""
    merged: dict[str, Any] = {}
    for table in tables:
        if both := merged.keys() & table.keys():
            raise ValueError(f"solver names defined twice: {', '.join(sorted(both))}")
        merged |= table
    return merged


SOLVERS: dict[str, Solver] = merge(explicit.METHODS, multistep.METHODS, predictor_corrector.METHODS,
                                   implicit_multistep.METHODS, splitting.METHODS, reversible.METHODS,
                                   implicit.METHODS, imex.METHODS, adaptive.METHODS,
                                   learned.METHODS, dense.METHODS, equilibrium.METHODS, hypersolver.METHODS)


def get_solver(solver: str | Solver, **options: Any) -> Solver:
    """A solver by name, or the object itself, with options set.

    ``adaptive=True`` or ``per_sample=True`` gives the form with step size control of a method with an embedded row,
    with one step size for the batch or with one for each row. A method with learned coefficients is made anew by name,
    with parameters of its own; an object that holds some is returned as it is.

    >>> get_solver("ab2", across_pieces=True).order
    2
    >>> get_solver("tsit54", per_sample=True, beta=0.1).is_adaptive
    True

    Raises ValueError for an unknown name or option (the message lists the known ones), TypeError for another type.
    """
    by_name = isinstance(solver, str)
    if by_name:
        if solver not in SOLVERS:
            near = get_close_matches(solver, SOLVERS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown solver {solver!r}{hint}; known: {', '.join(sorted(SOLVERS))}")
        solver = SOLVERS[solver]
    elif isinstance(solver, type) or not hasattr(solver, "is_adaptive"):
        raise TypeError(f"solver must be a name from SOLVERS or a solver object, got {solver!r}")
    if not options and not (by_name and isinstance(solver, Learned)):
        return solver
    solver, options = _with_engine(solver, options)
    if isinstance(solver, Learned) and by_name:
        return solver.fresh(**options)
    if not options:
        return solver
    if isinstance(solver, Learned):
        raise ValueError(f"options of {solver.name!r} are set when it is made: get_solver({solver.name!r}, "
                         f"{', '.join(f'{key}=...' for key in options)})")
    known = [f.name for f in fields(solver) if f.init]
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} for solver {solver.name!r}; known: {', '.join(known)}")
    return replace(solver, **options)


def _with_engine(solver: Solver, options: dict[str, Any]) -> tuple[Solver, dict[str, Any]]:
    """The solver under the engine that the options ask for, and the other options."""
    asked = {key: options[key] for key in ENGINES if key in options}
    for key, value in asked.items():
        if not isinstance(value, bool):
            raise TypeError(f"{key} must be a bool, got {value!r}")
    if all(asked.get(key) for key in ENGINES):
        raise ValueError(f"give one of {', '.join(ENGINES)}, not both")
    for key, engine in ENGINES.items():
        if asked.get(key) and not isinstance(solver, engine):
            tableau = getattr(solver, "tableau", None)
            if not _is_pair(tableau):
                pairs = [name for name, other in SOLVERS.items() if _is_pair(getattr(other, "tableau", None))]
                raise ValueError(f"{key} needs an explicit method with an embedded row, which {solver.name!r} has not; "
                                 f"those that have: {', '.join(sorted(pairs))}")
            solver = engine(tableau, solver.name)
    return solver, {key: value for key, value in options.items() if key not in asked}


def _is_pair(tableau: Any) -> bool:
    return getattr(tableau, "b_hat", None) is not None and tableau.is_explicit
