"""``odeformer generate``."""

from __future__ import annotations

import argparse

from odeformer.commands.parser import DEVICE
from odeformer.commands.saved import tokenizer_of, under

HELP = "write on from a prompt"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A model, a prompt, and how to go on."""
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
    parser.add_argument("--device", default="auto", help=DEVICE)


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Print prompt and continuation."""
    args = parser.parse_args(argv)
    import torch

    from odeformer.layout import PRECISIONS, lay_out
    from odeformer.models import Decoder, load
    from odeformer.processes import single_device

    device = single_device(args.device)
    model, tokenizer = load(args.folder).to(device), tokenizer_of(args.folder)
    if not isinstance(model, Decoder) or tokenizer is None:
        raise ValueError(f"{args.folder} must hold a decoder and its tokenizer.json, as `odeformer train` leaves them "
                         f"for text; it holds a {type(model).__name__}")
    if device.type == "cpu" and all(p.dtype in PRECISIONS for p in model.parameters()):
        lay_out(model)  # each new token is one row
    ids = tokenizer.encode(args.prompt)
    if not ids:
        raise ValueError("--prompt must not be empty")
    sampling = {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    if args.temperature > 0:
        sampling["generator"] = torch.Generator(device).manual_seed(args.seed)
    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, min(64, model.config.max_seq_len - len(ids)))
    text = under(model, args.solver).generate(torch.tensor([ids], device=device), max_new_tokens=max_new_tokens,
                                              temperature=args.temperature, stop_tokens=[tokenizer.stop],
                                              cache=args.cache, **sampling)
    print(tokenizer.decode(text[0].tolist()))
    return 0
