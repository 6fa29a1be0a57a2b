"""The command ``odeformer``. Nothing heavy is imported until a sub-command runs."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; errors in what the user gave come out as one line, with exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        _overview().parse_args(argv)  # help, or what is wrong
    name, command = argv[0], COMMANDS[argv[0]]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: print(f"odeformer {name}: {message}", file=sys.stderr)
            return command.run(command.parser(name), argv[1:]) or 0
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
        commands.add_parser(name, help=command.help)
    return parser


class _Parser(argparse.ArgumentParser):
    """Guesses what an unknown option meant; ``more``: further options, with a dot in their names."""

    more: Callable[[], Sequence[str]] = staticmethod(tuple)

    def error(self, message: str) -> Any:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized") and unknown.startswith("--"):
            short = {name.rpartition(".")[2].replace("_", "-"): name for name in self.more()}
            known = {name[2:]: name for name in self._option_string_actions if name.startswith("--")}
            near = get_close_matches(unknown[2:], [*short, *known], 1)
            message += f" (did you mean {(short | known)[near[0]]}?)" if near else ""
        super().error(message)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, but not "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


@dataclass(frozen=True)
class Command:
    """A sub-command: ``arguments`` adds them to a parser, ``run`` takes that and what was given."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.ArgumentParser, list[str]], int | None]

    def parser(self, name: str) -> argparse.ArgumentParser:
        parser = _Parser(prog=f"odeformer {name}", description=self.help[0].upper() + self.help[1:] + ".",
                         formatter_class=_Help, allow_abbrev=False)
        self.arguments(parser)
        return parser


# short names of settings of a run: option -> (setting, help)
SHORT = {
    "--data": ("data", "data set (digits)"),
    "--tokenizer": ("tokenizer", "bytes or bpe, for text"),
    "--steps": ("train.steps", "updates (400)"),
    "--seed": ("train.seed", "seed of the weights and of the data order (0)"),
    "--solver": ("depth.solver", "a name from `odeformer solvers` (euler)"),
    "--depth-steps": ("depth.n_steps", "solver steps over the whole depth"),
    "--rtol": ("depth.rtol", "relative tolerance of an adaptive solver"),
    "--weights": ("depth.weights", "weights over depth: shared, piecewise, ... (shared)"),
    "--coupling": ("block.coupling", "how a step treats attention and feed-forward (lie)"),
    "--layers": ("model.n_layers", "depth, in layers (4)"),
    "--d-model": ("block.d_model", "width (32)"),
    "--heads": ("block.n_heads", "attention heads (4)"),
    "--dropout": ("block.dropout", "dropout on each sublayer's output (0)"),
    "--length": ("model.max_seq_len", "tokens that a model of text reads at once (128, in translation 64)"),
    "--batch-size": ("train.batch_size", "images, windows of text, pairs or series an update (64)"),
    "--learning-rate": ("train.learning_rate", "peak learning rate (0.002)"),
    "--checkpoint-every": ("train.checkpoint_every", "updates between checkpoints (50)"),
}


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", help="folder for checkpoints, logs, results and model")
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML), such as another run's config.toml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the out folder, "
                        "with its settings; --steps may be larger where the schedule allows that")
    parser.add_argument("--stop-at", type=int, default=None, help="leave after this many updates, as a kill would")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto: a GPU where there is one; under "
                        "torchrun each process has its own")
    parser.add_argument("--list-parameters", action="store_true", help="print every parameter with its kind, and "
                        "whether it is decayed, instead of training")
    for option, (_, words) in SHORT.items():
        parser.add_argument(option, help=words, metavar="VALUE")
    parser.epilog = EPILOG
    parser.more = _setting_names


def _setting_names() -> list[str]:
    from odeformer import settings

    return [f"--{name}" for name, _ in settings.listed()]


def _settings(args: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings file (on --resume by default that of the run), under what the command line says."""
    from odeformer import settings

    path = args.config
    if path is None and args.resume and (Path(args.out) / settings.FILE).is_file():
        path = Path(args.out) / settings.FILE
    values = {} if path is None else settings.read(path)
    for option, (key, _) in SHORT.items():
        text = getattr(args, option[2:].replace("-", "_"))
        if text is not None:
            values = settings.merged(values, settings.nested(key, settings.parsed(text)))
    return settings.merged(values, options)


def _train(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    from odeformer import settings

    if {"-h", "--help"} & {*argv}:
        parser.epilog += ", with these defaults:\n\n" + "\n".join(
            f"  --{name:<34} {default}".rstrip() for name, default in settings.listed()) + RECIPE_HELP
    argv, options = settings.dotted(argv)
    args = parser.parse_args(argv)
    if args.out is None and not args.list_parameters:
        parser.error("the following arguments are required: --out")

    from odeformer.processes import joined

    with joined(args.device) as processes:
        return _train_in(processes, args, options)


def _train_in(processes: Any, args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Train, as this one of the processes; the first one writes and reports."""
    from odeformer import checkpoint, optim, recipes
    from odeformer.parallel import has_checkpoint, set_aside
    from odeformer.train import Trainer

    def prepare() -> Any:
        known = args.resume and has_checkpoint(Path(args.out)) if args.out else False
        return recipes.prepare(_settings(args, options), _tokenizer(args.out) if known else None)

    run = prepare() if processes.first_here else None  # which fetches data that are not there yet
    processes.wait()
    run, say = run or prepare(), print if processes.main else (lambda *words, **where: None)
    model = run.model().to(processes.device)
    if args.list_parameters:
        say(optim.kinds_table(model))
        return 0
    trainer = Trainer(model, run.task, run.run.train, args.out, settings=run.described)
    if args.resume:
        found = trainer.resume()
        say(f"resumed at step {trainer.step}" if found else f"nothing to resume in {args.out}: from step 0")
    elif has_checkpoint(trainer.out):
        say(f"{args.out} holds an earlier run, which is moved to {Path(args.out) / 'earlier'} (--resume would go on "
            "with it)", file=sys.stderr)
        processes.wait()
        if processes.main:
            set_aside(trainer.out)
        processes.wait()
    if processes.main:
        with checkpoint.explained(Path(args.out), checkpoint.ADVICE):
            _describe(args.out, run)
    if not trainer.run(stop_at=args.stop_at):
        start = f"the checkpoint of step {trainer.saved}" if trainer.saved else "the start, as none was due yet"
        say(f"stopped at step {trainer.step}; go on with --resume, from {start}")
        return 130
    if processes.main:
        _conclude(args.out, run, trainer)
    return 0


def _describe(out: str, run: Any) -> None:
    """The settings and the tokenizer, into the folder of a run."""
    from odeformer import settings

    settings.write(out, run.run)
    if run.tokenizer is None:
        (Path(out) / "tokenizer.json").unlink(missing_ok=True)  # of an earlier run on text
    else:
        run.tokenizer.save(out)


def _conclude(out: str, run: Any, trainer: Any) -> None:
    """Save the model, and say how good it is."""
    from odeformer import checkpoint

    with checkpoint.explained(Path(out), checkpoint.ADVICE):
        trainer.model.save(out)
    if trainer.step < run.run.train.steps:
        print(f"ended early at step {trainer.step}: no better {run.task.metric} since step {trainer.best.step}")
    scores = ", ".join(f"{name} {_shown(value)}" for name, value in run.task.evaluate(trainer.model).items())
    print(f"test {scores}, model in {out}")


EPILOG = """several processes train one model: torchrun --nproc-per-node N -m odeformer.cli train ... (train.parallel);
every setting can be given as --table.key VALUE (written as in TOML)"""
RECIPE_HELP = """

data_options are those of the data set's function; task has valid (images, series: the share put aside to validate on)
and smoothing (translation); model has n_layers and the other fields of the model's config; tokenizer_options has
vocab_size (tokenizer = "bpe").
"""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = EVALUATE
    parser.add_argument("folder", help="where the model was saved")
    parser.add_argument("--data", default=None, help="data set (the one of the run that left the model; options as "
                        "--data_options.KEY VALUE)")
    parser.add_argument("--solvers", nargs="+", default=None, metavar="SOLVER",
                        help="solvers to compare, as NAME or NAME:STEPS (the model's own if left out)")
    parser.add_argument("--reference", default=None, metavar="SOLVER",
                        help="the solver that the others are compared with (the one of most NFE if left out)")
    parser.add_argument("--samples", type=int, default=64, help="test samples on which solvers are compared")


EVALUATE = """Scores of a trained model on test data, under any solvers. Two or more are compared as well:
distance: mean over samples of |z - z_ref| / |z_ref|, at most 1 a sample, z being the final state and z_ref that of the
reference; agreement: the share of equal predictions. Solver invariance is 1 - the mean distance of the solvers other
than the reference: 1 where all end in the same states."""


def _evaluate(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    from odeformer import settings

    argv, options = settings.dotted(argv)
    args = parser.parse_args(argv)
    from odeformer import recipes
    from odeformer.data import DATA
    from odeformer.models import load
    from odeformer.tables import at_least

    at_least("samples", args.samples, 1)
    model = load(args.folder)
    path = Path(args.folder) / settings.FILE
    run = settings.read(path) if path.is_file() else {}
    settings.check_keys(options, ["data_options"], "")
    name = args.data or run.get("data", settings.DEFAULTS["data"])
    same = run if name == run.get("data") else {}
    chosen = recipes.data_options(name, settings.merged(same.get("data_options", {}), options.get("data_options", {})))
    task = recipes.task_of(model, DATA[name](**chosen), _tokenizer(args.folder), same.get("task"))
    specs = list(dict.fromkeys([*(args.solvers or [None]), *([args.reference] if args.reference else [])]))
    _table(task, {spec: _under(model, spec) for spec in specs}, args)
    return 0


def _table(task: Any, models: Mapping[str | None, Any], args: argparse.Namespace) -> None:
    """A line a solver, then what the comparison says."""
    import torch

    from odeformer.invariance import invariance

    split = "test"
    batch = task.batch(torch.arange(min(args.samples, task.splits[split])), split)
    states, outputs, lines, signatures = {}, {}, [], {}
    with torch.no_grad():
        passes = {spec: task.forward(model, batch) for spec, model in models.items()}
    for spec, (output, solution) in passes.items():
        states[spec], outputs[spec] = solution.z, output
        scores = task.evaluate(models[spec])
        signatures |= {name: value for name, value in scores.items() if isinstance(value, str)}
        scores = {name: value for name, value in scores.items() if not isinstance(value, str)}
        lines.append([_name(models[spec]), f"{solution.n_steps}", f"{solution.nfe:g}", *map(_shown, scores.values())])
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


def _name(model: Any) -> str:
    """The solver of a model."""
    solver = model.config.depth.solver
    return solver if isinstance(solver, str) else solver.name


def _under(model: Any, spec: str | None) -> Any:
    """The model under a solver given as NAME or NAME:STEPS; its own if None."""
    if spec is None:
        return model
    name, colon, steps = spec.partition(":")
    if colon and not steps.isdigit():
        raise ValueError(f"solvers are given as NAME or NAME:STEPS, got {spec!r}")
    return model.with_solver(name, **({"n_steps": int(steps)} if steps else {}))


def _tokenizer(folder: str | None) -> Any:
    """The tokenizer saved beside a model, or None."""
    from odeformer.tokenizers import load_tokenizer

    return load_tokenizer(folder) if folder and (Path(folder) / "tokenizer.json").is_file() else None


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="where the model was saved")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=None,
                        help="tokens to write at most (64, or what the model has positions for)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k most likely tokens only")
    parser.add_argument("--top-p", type=float, default=None, help="draw from the likeliest of this share")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--solver", default=None, metavar="SOLVER",
                        help="another solver, as NAME or NAME:STEPS (the model's own if left out)")
    parser.add_argument("--cache", default="exact", help="cache policy: exact, first_stage or window")


def _generate(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    import torch

    from odeformer.models import Decoder, load

    model, tokenizer = load(args.folder), _tokenizer(args.folder)
    if not isinstance(model, Decoder) or tokenizer is None:
        raise ValueError(f"{args.folder} must hold a decoder and its tokenizer.json, as `odeformer train` leaves them "
                         f"for text; it holds a {type(model).__name__}")
    ids = tokenizer.encode(args.prompt)
    if not ids:
        raise ValueError("--prompt must not be empty")
    sampling = {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    if args.temperature > 0:
        sampling["generator"] = torch.Generator().manual_seed(args.seed)
    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, min(64, model.config.max_seq_len - len(ids)))
    text = _under(model, args.solver).generate(torch.tensor([ids]), max_new_tokens=max_new_tokens,
                                               temperature=args.temperature, stop_tokens=[tokenizer.stop],
                                               cache=args.cache, **sampling)
    print(tokenizer.decode(text[0].tolist()))
    return 0


def _stability_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--solver", nargs="+", default=["rk4"], help="one or more names from `odeformer solvers`")
    parser.add_argument("--out", default="stability.png", help="picture to write (.png, .svg or .pdf)")


def _stability(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    args = parser.parse_args(argv)
    from odeformer import plots

    plots.save(plots.stability_regions(args.solver), args.out)
    print(f"wrote {args.out}")
    return 0


def _solvers(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    parser.parse_args(argv)
    from solvers import SOLVERS

    print(f"{'name':<18}{'order':>6}{'stages':>8}{'embedded':>10}  kind")
    for name, solver in SOLVERS.items():
        kinds = [kind for kind in ("adaptive", "implicit", "reversible") if getattr(solver, f"is_{kind}")]
        embedded = "" if solver.embedded_order is None else solver.embedded_order
        print(f"{name:<18}{solver.order:>6}{solver.n_stages:>8}{embedded:>10}  {', '.join(kinds) or 'fixed step'}")
    return 0


COMMANDS = {
    "train": Command("train a model on real images, text, translations or series", _train_arguments, _train),
    "evaluate": Command("scores of a trained model under any solvers", _evaluate_arguments, _evaluate),
    "generate": Command("write on from a prompt", _generate_arguments, _generate),
    "stability": Command("draw stability regions", _stability_arguments, _stability),
    "solvers": Command("list the solvers", lambda parser: None, _solvers),
}

if __name__ == "__main__":
    sys.exit(main())
