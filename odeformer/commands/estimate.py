"""``odeformer estimate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from odeformer.commands.parser import parsed

HELP = "time and memory of a model before it is run"
ESTIMATE = """Parameters, NFE, multiply-adds, time and memory of a forward pass, of a training step and of writing a
token, in float32 on this machine's CPU. Nothing of the model is run: its operations are counted and priced by what the
machine does, which is measured first (some ten seconds). CONFIG is a settings file as `odeformer train` takes, whose
data are read for their sizes, or the folder of a saved model."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """A model and sizes."""
    parser.description = ESTIMATE
    parser.add_argument("config", metavar="CONFIG", help="settings file (TOML), further settings as --table.key VALUE; "
                        "or the folder of a saved model")
    parser.add_argument("--batch-size", type=int, default=None, metavar="N",
                        help="examples at a time (those of the settings, else 1)")
    parser.add_argument("--tokens", type=int, default=None, metavar="N",
                        help="tokens of a text, or points of a series (as many as the model reads)")
    parser.add_argument("--machine", default=None, metavar="FILE", help="measurements of a machine: read from there, "
                        "or written where there are none")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="of torch (torch's own choice)")


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Print the estimate."""
    args, options = parsed(parser, argv)
    import torch

    from odeformer.estimate import check_fixed, estimate
    from odeformer.tables import at_least
    from odeformer.tracing import on_nothing
    from odeformer.workload import inputs

    if args.threads is not None:
        at_least("threads", args.threads, 1)
        torch.set_num_threads(args.threads)
    make, batch, accumulate = chosen(Path(args.config), options)
    if args.batch_size is not None:
        batch, accumulate = args.batch_size, 1
    at_least("batch-size", batch, 1)
    with on_nothing():  # before a machine is measured
        model = make()
        check_fixed(model)
        inputs(model, batch, args.tokens)
    sizes = {"batch": batch, "n_tokens": args.tokens, "accumulate": accumulate}
    print(estimate(make, machine(args.machine), **sizes))
    return 0


def chosen(path: Path, options: Mapping[str, Any]) -> tuple[Callable[[], Any], int, int]:
    """What makes the model, the batch size and the parts of a batch. Raises ValueError for what is not estimated."""
    from odeformer import recipes, settings

    if path.is_dir():
        if options:
            raise ValueError(f"--{next(iter(options))}... is for a settings file, and {path} is a folder")
        run = settings.read(path / settings.FILE).get("train", {}) if (path / settings.FILE).is_file() else {}
        return of_folder(path), run.get("batch_size", 1), run.get("accumulate", 1)
    prepared = recipes.prepare(settings.merged(settings.read(path), options))
    train = prepared.run.train
    for name, plain in (("autocast", "none"), ("regularize", {})):
        if getattr(train, name) != plain:
            raise ValueError(f"train.{name} must be {plain or 'empty'} to be estimated, got {getattr(train, name)!r}")
    return lambda: prepared.kind(prepared.config), train.batch_size, train.accumulate


def of_folder(folder: Path) -> Callable[[], Any]:
    """What makes a model like the one in a folder. Raises FileNotFoundError or ValueError where there is none."""
    from odeformer.models.store import CONFIGS, MODELS, from_dict
    from odeformer.tables import look_up

    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; a saved model has one")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind, config = look_up(MODELS, stored["model"], "model"), from_dict(CONFIGS[stored["model"]], stored["config"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a model's config: {error}") from error
    return lambda: kind(config)


def machine(path: str | None) -> Any:
    """Measurements from a file, or of this machine; these are written where a file is named and not there."""
    from odeformer.machine import Machine, measure

    if path is not None and Path(path).is_file():
        return Machine.load(path)
    print("measuring this machine ...", file=sys.stderr)
    found = measure()
    if path is not None:
        found.save(path)
    return found
