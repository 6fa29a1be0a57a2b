"""SOLVERS: every method by name."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from solvers import adaptive, explicit, multistep, splitting
from solvers.base import Solver


def merge(*tables: dict[str, Any]) -> dict[str, Any]:
    """The tables as one. Raises ValueError on a name that stands twice."""
    merged: dict[str, Any] = {}
    for table in tables:
        if both := merged.keys() & table.keys():
            raise ValueError(f"solver names defined twice: {', '.join(sorted(both))}")
        merged |= table
    return merged


SOLVERS: dict[str, Solver] = merge(explicit.METHODS, multistep.METHODS, splitting.METHODS, adaptive.METHODS)


def get_solver(solver: str | Solver, **options: Any) -> Solver:
    """A solver by name, or the object itself, with options set.

    >>> get_solver("ab2", across_pieces=True).order
    2

    Raises ValueError for an unknown name or option (the message lists the known ones), TypeError for another type.
    """
    if isinstance(solver, str):
        if solver not in SOLVERS:
            near = get_close_matches(solver, SOLVERS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown solver {solver!r}{hint}; known: {', '.join(sorted(SOLVERS))}")
        solver = SOLVERS[solver]
    elif isinstance(solver, type) or not hasattr(solver, "is_adaptive"):
        raise TypeError(f"solver must be a name from SOLVERS or a solver object, got {solver!r}")
    if not options:
        return solver
    known = [f.name for f in fields(solver) if f.init]
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} for solver {solver.name!r}; known: {', '.join(known)}")
    return replace(solver, **options)
