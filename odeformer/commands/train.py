"""``odeformer train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odeformer.commands.parser import DEVICE
from odeformer.commands.saved import shown, tokenizer_of

HELP = "train a model on real images, text, translations or series"

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


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, and where to."""
    parser.add_argument("--out", help="folder for checkpoints, logs, results and model")
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML), such as another run's config.toml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the out folder, "
                        "with its settings; --steps may be larger where the schedule allows that")
    parser.add_argument("--stop-at", type=int, default=None, help="leave after this many updates, as a kill would")
    parser.add_argument("--device", default="auto", help=f"{DEVICE}; under torchrun each process has its own")
    parser.add_argument("--list-parameters", action="store_true", help="print every parameter with its kind, and "
                        "whether it is decayed, instead of training")
    for option, (_, words) in SHORT.items():
        parser.add_argument(option, help=words, metavar="VALUE")
    parser.epilog = EPILOG
    parser.more = setting_names


def setting_names() -> list[str]:
    """Every setting as an option."""
    from odeformer import settings

    return [f"--{name}" for name, _ in settings.listed()]


def chosen(args: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
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


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Train, as settings file and command line say; 130 where it was stopped."""
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
        return train_in(processes, args, options)


def train_in(processes: Any, args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Train, as this one of the processes; the first one writes and reports."""
    from odeformer import checkpoint, optim, recipes
    from odeformer.parallel import has_checkpoint, set_aside
    from odeformer.train import Trainer

    def prepare() -> Any:
        known = args.resume and has_checkpoint(Path(args.out)) if args.out else False
        return recipes.prepare(chosen(args, options), tokenizer_of(args.out) if known else None)

    found = prepare() if processes.first_here else None  # which fetches data that are not there yet
    processes.wait()
    prepared, say = found or prepare(), print if processes.main else (lambda *words, **where: None)
    model = prepared.model().to(processes.device)
    if args.list_parameters:
        say(optim.kinds_table(model))
        return 0
    trainer = Trainer(model, prepared.task, prepared.run.train, args.out, settings=prepared.described)
    if args.resume:
        say(f"resumed at step {trainer.step}" if trainer.resume() else f"nothing to resume in {args.out}: from step 0")
    elif has_checkpoint(trainer.out):
        say(f"{args.out} holds an earlier run, which is moved to {Path(args.out) / 'earlier'} (--resume would go on "
            "with it)", file=sys.stderr)
        processes.wait()
        if processes.main:
            set_aside(trainer.out)
        processes.wait()
    if processes.main:
        with checkpoint.explained(Path(args.out), checkpoint.ADVICE):
            describe(args.out, prepared)
    if not trainer.run(stop_at=args.stop_at):
        start = f"the checkpoint of step {trainer.saved}" if trainer.saved else "the start, as none was due yet"
        say(f"stopped at step {trainer.step}; go on with --resume, from {start}")
        return 130
    if processes.main:
        conclude(args.out, prepared, trainer)
    return 0


def describe(out: str, prepared: Any) -> None:
    """The settings and the tokenizer, into the folder of a run."""
    from odeformer import settings

    settings.write(out, prepared.run)
    if prepared.tokenizer is None:
        (Path(out) / "tokenizer.json").unlink(missing_ok=True)  # of an earlier run on text
    else:
        prepared.tokenizer.save(out)


def conclude(out: str, prepared: Any, trainer: Any) -> None:
    """Save the model, and say how good it is."""
    from odeformer import checkpoint

    with checkpoint.explained(Path(out), checkpoint.ADVICE):
        trainer.model.save(out)
    if trainer.step < prepared.run.train.steps:
        print(f"ended early at step {trainer.step}: no better {prepared.task.metric} since step {trainer.best.step}")
    scores = ", ".join(f"{name} {shown(value)}" for name, value in prepared.task.evaluate(trainer.model).items())
    print(f"test {scores}, model in {out}")


EPILOG = """several processes train one model: torchrun --nproc-per-node N -m odeformer.cli train ... (train.parallel);
every setting can be given as --table.key VALUE (written as in TOML)"""
RECIPE_HELP = """

data_options are those of the data set's function; task has valid (images, series: the share put aside to validate on)
and smoothing (translation); model has n_layers and the other fields of the model's config; tokenizer_options has
vocab_size (tokenizer = "bpe").
"""
