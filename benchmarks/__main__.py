"""python -m benchmarks run NAME | plot NAME | readme | list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runner
from odeformer.files import write_atomically


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; wrong names come out as one line, with exit status 2, Ctrl-C as 130."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measured claims: tables and plots.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure, print the table, write results and plot")
    run.add_argument("name", metavar="NAME", help="a name from `list`")
    run.add_argument("--preset", default="quick",
                     help="quick (minutes on two cores), cpu (longer) or, where there is one, gpu (default: quick)")
    run.add_argument("--seeds", type=int, default=None, help="seeds a configuration (default: the preset's)")
    run.add_argument("--resume", action="store_true", help="keep the rows of an earlier run that was stopped")
    plot = commands.add_parser("plot", help="draw the plot of results that are there")
    plot.add_argument("name", metavar="NAME", help="a name from `list`")
    commands.add_parser("readme", help="put the results' tables into README.md")
    commands.add_parser("list", help="what there is")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            for name, what in runner.BENCHMARKS.items():
                print(f"{name:<18}{what}")
            return 0
        if args.command == "readme":
            readme = Path(__file__).parent.parent / "README.md"
            text = runner.fill(readme.read_text(encoding="utf-8"))
            write_atomically(readme, lambda beside: beside.write_text(text, encoding="utf-8"))
            return 0
        if args.command == "run":
            if args.seeds is not None and args.seeds < 1:
                raise ValueError(f"--seeds must be at least 1, got {args.seeds}")
            runner.run(args.name, preset=args.preset, seeds=args.seeds, resume=args.resume)
        runner.plot(args.name)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what was measured is kept: go on with --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
