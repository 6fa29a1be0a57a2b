"""The command ``odeformer``: a table of sub-commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from odeformer.commands import convert, estimate, evaluate, generate, solvers, stability, train
from odeformer.commands.parser import make_parser

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "stability": stability,
    "solvers": solvers,
    "convert": convert,
    "estimate": estimate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; errors in what the user gave come out as one line, with exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        _overview().parse_args(argv)  # help, or what is wrong
    name, command = argv[0], COMMANDS[argv[0]]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: print(f"odeformer {name}: {message}", file=sys.stderr)
            return command.run(make_parser(name, command), argv[1:]) or 0
    except BrokenPipeError:  # the reader left, as head does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except KeyboardInterrupt:
        print(f"odeformer {name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, ImportError, OSError, FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_numerical(error):
            raise
        print(f"odeformer {name}: {error}", file=sys.stderr)
        return 2


def _is_numerical(error: RuntimeError) -> bool:
    from odeformer.depth import SolverError

    return isinstance(error, SolverError)


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odeformer", description="Transformers whose depth is integrated by an ODE solver of your choice.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.HELP)
    return parser


if __name__ == "__main__":
    sys.exit(main())
