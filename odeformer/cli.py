"""The command ``odeformer``. Nothing heavy is imported until a sub-command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; errors in what the user gave come out as one line, with exit status 2."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # the reader left, as head does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except (ValueError, TypeError, ImportError, OSError, FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_numerical(error):
            raise
        print(f"odeformer {args.command}: {error}", file=sys.stderr)
        return 2


def _is_numerical(error: RuntimeError) -> bool:
    from odeformer.depth import SolverError

    return isinstance(error, SolverError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odeformer", description="Transformers whose depth is integrated by an ODE solver of your choice.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model on real images or text", formatter_class=_Help)
    train.set_defaults(run=_train)
    train.add_argument("--data", default="digits", help="data set")
    train.add_argument("--out", required=True, help="folder for checkpoint, results and model")
    train.add_argument("--steps", type=int, default=400, help="updates")
    train.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data order")
    train.add_argument("--solver", default="euler", help="a name from `odeformer solvers`")
    train.add_argument("--depth-steps", type=int, default=None, help="solver steps over the whole depth")
    train.add_argument("--rtol", type=float, default=None, help="relative tolerance of an adaptive solver")
    train.add_argument("--weights", default="shared", help="weights over depth: shared or piecewise")
    train.add_argument("--coupling", default="lie", help="how a step treats attention and feed-forward")
    train.add_argument("--layers", type=int, default=4, help="depth, in layers")
    train.add_argument("--d-model", type=int, default=32, help="width")
    train.add_argument("--heads", type=int, default=4, help="attention heads")
    train.add_argument("--dropout", type=float, default=0.0, help="dropout on each sublayer's output")
    train.add_argument("--length", type=int, default=128, help="bytes that a language model reads at once")
    train.add_argument("--batch-size", type=int, default=64, help="images or windows of text an update")
    train.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    train.add_argument("--checkpoint-every", type=int, default=50, help="updates between checkpoints")
    train.add_argument("--stop-at", type=int, default=None, help="leave after this many updates, as a kill would")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in the out folder")

    evaluate = commands.add_parser("evaluate", help="accuracy of a trained model under any solvers",
                                   formatter_class=_Help)
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("folder", help="where the model was saved")
    evaluate.add_argument("--data", default="digits", help="data set")
    evaluate.add_argument("--solvers", nargs="+", default=None, metavar="SOLVER",
                          help="solvers to compare, as NAME or NAME:STEPS (the model's own if left out)")

    generate = commands.add_parser("generate", help="write on from a prompt", formatter_class=_Help)
    generate.set_defaults(run=_generate)
    generate.add_argument("folder", help="where the model was saved")
    generate.add_argument("--prompt", required=True, help="the text to go on from")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="tokens to write at most")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    generate.add_argument("--top-k", type=int, default=None, help="draw from the k most likely tokens only")
    generate.add_argument("--top-p", type=float, default=None, help="draw from the likeliest of this share")
    generate.add_argument("--seed", type=int, default=0, help="seed of the draws")
    generate.add_argument("--solver", default=None, metavar="SOLVER",
                          help="another solver, as NAME or NAME:STEPS (the model's own if left out)")
    generate.add_argument("--cache", default="exact", help="cache policy: exact, first_stage or window")

    stability = commands.add_parser("stability", help="draw stability regions", formatter_class=_Help)
    stability.set_defaults(run=_stability)
    stability.add_argument("--solver", nargs="+", default=["rk4"], help="one or more names from `odeformer solvers`")
    stability.add_argument("--out", default="stability.png", help="picture to write (.png, .svg or .pdf)")

    commands.add_parser("solvers", help="list the solvers").set_defaults(run=_solvers)
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not "(default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _train(args: argparse.Namespace) -> int:
    import torch

    from odeformer.block import BlockConfig
    from odeformer.data import DATA
    from odeformer.depth import DepthConfig
    from odeformer.recipes import recipe
    from odeformer.tables import look_up
    from odeformer.train import TrainConfig, Trainer

    data = look_up(DATA, args.data, "data")()
    depth = DepthConfig(solver=args.solver, n_steps=args.depth_steps, weights=args.weights, rtol=args.rtol)
    block = BlockConfig(args.d_model, args.heads, coupling=args.coupling, dropout=args.dropout)
    chosen = recipe(data, block, depth, args.layers, args.length)
    torch.manual_seed(args.seed)
    model = chosen.kind(chosen.config)
    config = TrainConfig(steps=args.steps, seed=args.seed, batch_size=args.batch_size,
                         learning_rate=args.learning_rate, checkpoint_every=args.checkpoint_every)
    trainer = Trainer(model, chosen.task, config, args.out)
    if (Path(args.out) / "checkpoint.pt").exists() and not args.resume:
        print(f"{args.out} holds an earlier run, which this one replaces (--resume would go on with it)",
              file=sys.stderr)
    if args.resume:
        found = trainer.resume()
        print(f"resumed at step {trainer.step}" if found else f"nothing to resume in {args.out}: from step 0")
    if not trainer.run(stop_at=args.stop_at):
        print(f"stopped at step {trainer.step}; go on with --resume")
        return 130
    model.save(args.out)
    if chosen.tokenizer is None:
        (Path(args.out) / "tokenizer.json").unlink(missing_ok=True)  # of an earlier run on text
    else:
        chosen.tokenizer.save(args.out)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in chosen.task.evaluate(model).items())
    print(f"test {scores}, model in {args.out}")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    import torch

    from odeformer.data import DATA
    from odeformer.models import load
    from odeformer.recipes import task_of
    from odeformer.tables import look_up

    model, data = load(args.folder), look_up(DATA, args.data, "data")()
    task = task_of(model, data, _tokenizer(args.folder))
    models = [_under(model, spec) for spec in args.solvers or [None]]
    for i, chosen in enumerate(models):
        with torch.no_grad():
            _, solution = task.loss(chosen, task.batch(torch.arange(min(16, task.n_train))))
        scores = task.evaluate(chosen)
        if i == 0:
            print(f"{'solver':<16}{'steps':>6}{'NFE':>6}" + "".join(f"{name:>{len(name) + 2}}" for name in scores))
        print(f"{chosen.config.depth.solver:<16}{solution.n_steps:>6}{solution.nfe:>6}"
              + "".join(f"{value:>{len(name) + 2}.4f}" for name, value in scores.items()))
    return 0


def _under(model: Any, spec: str | None) -> Any:
    """The model under a solver given as NAME or NAME:STEPS; its own if None."""
    if spec is None:
        return model
    name, colon, steps = spec.partition(":")
    if colon and not steps.isdigit():
        raise ValueError(f"solvers are given as NAME or NAME:STEPS, got {spec!r}")
    return model.with_solver(name, **({"n_steps": int(steps)} if steps else {}))


def _tokenizer(folder: str) -> Any:
    """The tokenizer saved beside a model, or None."""
    from odeformer.tokenizers import load_tokenizer

    return load_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None


def _generate(args: argparse.Namespace) -> int:
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
    text = _under(model, args.solver).generate(torch.tensor([ids]), max_new_tokens=args.max_new_tokens,
                                               temperature=args.temperature, stop_tokens=[tokenizer.stop],
                                               cache=args.cache, **sampling)
    print(tokenizer.decode(text[0].tolist()))
    return 0


def _stability(args: argparse.Namespace) -> int:
    from odeformer import plots

    plots.save(plots.stability_regions(args.solver), args.out)
    print(f"wrote {args.out}")
    return 0


def _solvers(args: argparse.Namespace) -> int:
    from solvers import SOLVERS

    print(f"{'name':<18}{'order':>6}{'stages':>8}{'embedded':>10}  kind")
    for name, solver in SOLVERS.items():
        kinds = [kind for kind in ("adaptive", "implicit", "reversible") if getattr(solver, f"is_{kind}")]
        embedded = "" if solver.embedded_order is None else solver.embedded_order
        print(f"{name:<18}{solver.order:>6}{solver.n_stages:>8}{embedded:>10}  {', '.join(kinds) or 'fixed step'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
