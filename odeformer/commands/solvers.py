"""``odeformer solvers``."""

from __future__ import annotations

import argparse

HELP = "list the solvers"


def arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Print the table."""
    parser.parse_args(argv)
    from solvers import SOLVERS

    print(f"{'name':<18}{'order':>6}{'stages':>8}{'embedded':>10}  kind")
    for name, solver in SOLVERS.items():
        kinds = [kind for kind in ("adaptive", "implicit", "reversible") if getattr(solver, f"is_{kind}")]
        embedded = "" if solver.embedded_order is None else solver.embedded_order
        print(f"{name:<18}{solver.order:>6}{solver.n_stages:>8}{embedded:>10}  {', '.join(kinds) or 'fixed step'}")
    return 0
