"""``odeformer stability``."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "report on the stability of solvers and models"
STABILITY = """A report on solvers and models in one HTML file; or, where OUT is a picture (.png, .svg, .pdf), the
stability regions of solvers."""
REPORT = (".html", ".htm")
# limits of a report: option -> help
LIMITS = {
    "samples": "rows of made-up or test input that models are looked at with",
    "max-tokens": "tokens of such a row",
    "max-layers": "layers at which Jacobians are taken",
    "seed": "seed of what is drawn",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Solvers, models, and a file."""
    parser.description = STABILITY
    parser.add_argument("targets", nargs="*", metavar="MODEL_OR_METHOD",
                        help="names from `odeformer solvers`, and folders of models, saved here or in the format of "
                        "Hugging Face")
    parser.add_argument("--solver", nargs="+", default=None, metavar="METHOD",
                        help="solvers, in place of targets (rk4)")
    parser.add_argument("--out", default=None, metavar="OUT",
                        help="file to write (stability.html for targets, else stability.png)")
    for name, words in LIMITS.items():
        parser.add_argument(f"--{name}", type=int, default=None, metavar="N", help=f"of a report: {words}")


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Write the report or the picture."""
    args = parser.parse_args(argv)
    if args.targets and args.solver:
        raise ValueError("give solvers either as targets or with --solver, not both")
    targets = args.targets or args.solver or ["rk4"]
    out = args.out or ("stability.html" if args.targets else "stability.png")
    given = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in LIMITS}
    given = {name: value for name, value in given.items() if value is not None}
    if Path(out).suffix.lower() in REPORT:
        from odeformer.studio import stability_report

        stability_report(targets, out, progress=True, **given)
    else:
        from odeformer import plots

        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} is for a report, and {out} is no .html")
        plots.save(plots.stability_regions(targets), out)
    print(f"wrote {out}")
    return 0
