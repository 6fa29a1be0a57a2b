"""python -m benchmarks run NAME | plot NAME | report | readme | list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runner, store
from odeformer.files import write_atomically

README = Path(__file__).parent.parent / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; wrong names come out as one line, with exit status 2, Ctrl-C as 130."""
    args = parser().parse_args(argv)
    try:
        COMMANDS[args.command](args)
    except (ValueError, OSError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what was measured is kept: go on with --resume", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description="Measured claims: tables and plots.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure, print the table, write results and plot")
    run.add_argument("name", metavar="NAME", help="a name from `list`")
    run.add_argument("--preset", default="quick",
                     help="quick (minutes on two cores), cpu (longer) or, where there is one, gpu (default: quick)")
    run.add_argument("--seeds", type=int, default=None, help="seeds a configuration (default: the preset's)")
    run.add_argument("--resume", action="store_true", help="keep the rows of an earlier run that was stopped")
    plot = commands.add_parser("plot", help="draw the plot of results that are there")
    plot.add_argument("name", metavar="NAME", help="a name from `list`")
    report = commands.add_parser("report", help="all results that are there, as one HTML file")
    report.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    commands.add_parser("readme", help="put the results' tables into README.md")
    commands.add_parser("list", help="what there is, and which results are there")
    return made


def run(args: argparse.Namespace) -> None:
    """Measure and draw."""
    if args.seeds is not None and args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {args.seeds}")
    runner.plot(args.name, runner.run(args.name, preset=args.preset, seeds=args.seeds, resume=args.resume))


def report(args: argparse.Namespace) -> None:
    """Write the HTML file."""
    from benchmarks.report import write

    print(f"wrote {write(args.out)}")


def readme(args: argparse.Namespace) -> None:
    """Fill the README's blocks."""
    from benchmarks.tables import fill

    text = fill(README.read_text(encoding="utf-8"))
    write_atomically(README, lambda beside: beside.write_text(text, encoding="utf-8"))


def listed(args: argparse.Namespace) -> None:
    """A line a benchmark: its name, what it measures, and of which preset there are results."""
    for name, what in runner.BENCHMARKS.items():
        path = store.path_of(name)
        rows = store.read_rows(path) if path.exists() else []
        there = f" [{rows[0]['run']['preset']}, {rows[0]['run']['date']}]" if rows else ""
        print(f"{name:<20}{what}{there}")


COMMANDS = {"run": run, "plot": lambda args: runner.plot(args.name), "report": report, "readme": readme,
            "list": listed}

if __name__ == "__main__":
    sys.exit(main())
