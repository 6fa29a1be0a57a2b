"""``odeformer evaluate``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odeformer.commands.parser import DEVICE, parsed
from odeformer.commands.saved import shown, solver_of, tokenizer_of, under

HELP = "scores of a trained model under any solvers"
EVALUATE = """Scores of a trained model on test data, under any solvers. Two or more are compared as well:
distance: mean over samples of |z - z_ref| / |z_ref|, at most 1 a sample, z being the final state and z_ref that of the
reference; agreement: the share of equal predictions. Solver invariance is 1 - the mean distance of the solvers other
than the reference: 1 where all end in the same states."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """A model, data and solvers."""
    parser.description = EVALUATE
    parser.add_argument("folder", help="where the model was saved")
    parser.add_argument("--data", default=None, help="data set (the one of the run that left the model; options as "
                        "--data_options.KEY VALUE)")
    parser.add_argument("--solvers", nargs="+", default=None, metavar="SOLVER",
                        help="solvers to compare, as NAME or NAME:STEPS (the model's own if left out)")
    parser.add_argument("--reference", default=None, metavar="SOLVER",
                        help="the solver that the others are compared with (the one of most NFE if left out)")
    parser.add_argument("--samples", type=int, default=64, help="test samples on which solvers are compared")
    parser.add_argument("--device", default="auto", help=DEVICE)


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Print the scores."""
    args, options = parsed(parser, argv)
    from odeformer import recipes, settings
    from odeformer.data import DATA
    from odeformer.models import load
    from odeformer.processes import single_device
    from odeformer.tables import at_least

    at_least("samples", args.samples, 1)
    model = load(args.folder).to(single_device(args.device))
    path = Path(args.folder) / settings.FILE
    trained = settings.read(path) if path.is_file() else {}
    settings.check_keys(options, ["data_options"], "")
    name = args.data or trained.get("data", settings.DEFAULTS["data"])
    same = trained if name == trained.get("data") else {}
    chosen = recipes.data_options(name, settings.merged(same.get("data_options", {}), options.get("data_options", {})))
    task = recipes.task_of(model, DATA[name](**chosen), tokenizer_of(args.folder), same.get("task"))
    specs = list(dict.fromkeys([*(args.solvers or [None]), *([args.reference] if args.reference else [])]))
    table(task, {spec: under(model, spec) for spec in specs}, args)
    return 0


def table(task: Any, models: Mapping[str | None, Any], args: argparse.Namespace) -> None:
    """A line a solver, then what the comparison says."""
    import torch

    from odeformer.invariance import invariance
    from odeformer.tasks import device_of, to_device

    split = "test"
    device = device_of(next(iter(models.values())))
    batch = to_device(task.batch(torch.arange(min(args.samples, task.splits[split])), split), device)
    states, outputs, lines, signatures = {}, {}, [], {}
    with torch.no_grad():
        passes = {spec: task.forward(model, batch) for spec, model in models.items()}
    for spec, (output, solution) in passes.items():
        states[spec], outputs[spec] = solution.z, output
        scores = task.evaluate(models[spec])
        signatures |= {name: value for name, value in scores.items() if isinstance(value, str)}
        scores = {name: value for name, value in scores.items() if not isinstance(value, str)}
        lines.append([solver_of(models[spec]), f"{solution.n_steps}", f"{solution.nfe:g}",
                      *map(shown, scores.values())])
    head = ["solver", "steps", "NFE", *scores]
    reference = args.reference or max(passes, key=lambda spec: passes[spec][1].nfe)
    found = invariance(states, outputs, reference, task.real(batch)) if len(passes) > 1 else None
    if found is not None:
        head += ["distance", "agreement"]
        for line, spec in zip(lines, passes, strict=True):
            share = found.agreement[spec]
            line += [f"{found.distances[spec]:.4f}", "" if share is None else f"{share:.4f}"]
    widths = [16, 6, 6, *(max(9, len(title) + 2) for title in head[3:])]
    for line in [head, *lines]:
        print(line[0].ljust(widths[0]) + "".join(x.rjust(width) for x, width in zip(line[1:], widths[1:], strict=True)))
    for name, value in signatures.items():
        print(f"{name}: {value}")
    if found is not None:
        print(f"solver invariance {found.score:.4f} on {len(states[reference])} test samples, against {reference} "
              f"(NFE {passes[reference][1].nfe:g}); largest output difference "
              f"{max(found.output_differences.values()):.4g}")
