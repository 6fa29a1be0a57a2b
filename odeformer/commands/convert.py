"""``odeformer convert``: a model between Hugging Face's format and ours, checked on the way."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odeformer.commands.parser import parsed

HELP = "a Hugging Face folder to one of ours, or back"
CONVERT = """A model in Hugging Face's format to one of ours, or one of ours that was read from there back; which way is
found from SOURCE. The folder that was written is read again and compared with the original, layer by layer, on one
made-up input; the exit status is 1 where a layer differs. Back, the solver stays behind: the original is Euler with one
step a layer."""
TOKENS, BATCH = 16, 2  # of the input on which both are compared
TOLERANCE = {"torch.float64": 1e-9, "torch.float32": 1e-5, "torch.float16": 1e-2, "torch.bfloat16": 5e-2}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Two folders."""
    parser.description = CONVERT
    parser.add_argument("source", metavar="SOURCE", help="folder of a model, in either format")
    parser.add_argument("out", metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("--solver", default=None, help="solver of our model (euler); further options of how depth is "
                        "integrated as --depth.KEY VALUE, such as --depth.steps_per_layer 2")
    parser.add_argument("--architecture", default=None, metavar="CLASS", help="the transformers class to read a folder "
                        "of Hugging Face as, if not the one that it names")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="PREFIX", help="leave out tensors of a folder of "
                        "Hugging Face whose names begin so")


def run(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Convert, compare, print; 1 where a layer differs."""
    args, options = parsed(parser, argv)
    from odeformer import settings

    settings.check_keys(options, ["depth"], "")
    depth = settings.merged(options.get("depth", {}), {} if args.solver is None else {"solver": args.solver})
    from odeformer.pretrained.folder import is_huggingface

    to_ours = is_huggingface(Path(args.source))
    given = {"--solver and --depth": depth, "--architecture": args.architecture, "--ignore": args.ignore}
    for name, value in given.items():
        if value and not to_ours:
            raise ValueError(f"{name} is for reading a folder of Hugging Face, and {args.source} holds a model of ours")
    with new_folder(Path(args.out)) as folder:
        if to_ours:
            report = read(args.source, folder, args.architecture, args.ignore, depth_options(depth))
        else:
            report = write(args.source, folder)
    print(f"wrote {args.out}, {'a model of ours' if to_ours else 'in the format of Hugging Face'}")
    print(f"largest difference of the outputs {report.rows[-1].difference:.3g} of {report.rows[-1].size:.3g}; first "
          f"layer that differs: {report.first_differing or 'none'} (tolerance {report.tolerance:g})")
    return 0 if report.first_differing is None else 1


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place at the end; nothing is left of it where something fails.

    Raises ValueError where ``out`` is there and not an empty folder.
    """
    import shutil

    empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if not empty and (out.exists() or out.is_symlink()):
        raise ValueError(f"OUT must be a new or empty folder, and {out} is there")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        beside.mkdir()
        yield beside
        if empty:
            out.rmdir()
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def depth_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of how depth is integrated. Raises ValueError for unknown ones and other types."""
    from odeformer.depth import DepthConfig
    from odeformer.pretrained.convert import DEPTH_OPTIONS
    from odeformer.settings import checked_options

    return checked_options(DepthConfig, values, DEPTH_OPTIONS, "depth")


def read(source: str, folder: Path, architecture: str | None, ignore: Any, options: Mapping[str, Any]) -> Any:
    """A Hugging Face folder as a folder of ours; the parity report of what was written, under Euler."""
    from odeformer.models import load
    from odeformer.pretrained import from_huggingface
    from odeformer.pretrained.folder import read_folder

    names = {"architecture": architecture, "ignore": ignore}
    chosen = from_huggingface(source, **names, **options)
    (from_huggingface(source, **names) if options else chosen).save(folder)
    report = compared(load(folder), read_folder(Path(source), architecture, ignore)[0])
    if options:
        chosen.save(folder)  # the same numbers
    return report


def write(source: str, folder: Path) -> Any:
    """A folder of ours as a Hugging Face folder; the parity report of what was written. Raises ValueError where it
    does not hold the numbers of ours bit for bit."""
    import torch

    from odeformer.models import load
    from odeformer.pretrained import from_huggingface, to_huggingface
    from odeformer.pretrained.folder import quiet, read_folder

    model = load(source)
    theirs = to_huggingface(model)
    with quiet():
        theirs.save_pretrained(folder)
    again, left_out = read_folder(folder)
    back = from_huggingface(again)
    kept = back.state_dict()
    ours = {name: x for name, x in model.state_dict().items() if name in kept}
    changed = [name for name, x in kept.items() if name not in ours or x.dtype != ours[name].dtype
               or not torch.equal(x, ours[name])]
    if changed or left_out:
        raise ValueError(f"what was written does not hold what {source} does: {', '.join([*changed, *left_out])}")
    return compared(back, again)


def compared(ours: Any, theirs: Any) -> Any:
    """The parity report of both on a made-up input."""
    from odeformer.pretrained import parity_report

    dtype = next(theirs.parameters()).dtype
    return parity_report(ours, theirs, *inputs(ours, theirs), tolerance=TOLERANCE[str(dtype)])


def inputs(ours: Any, theirs: Any) -> list[Any]:
    """An input for a model read from Hugging Face: ids that are no special tokens, images, or features and ids."""
    import torch

    dtype, config = next(theirs.parameters()).dtype, ours.config
    generator = torch.Generator().manual_seed(0)
    special = {value for name, value in theirs.config.to_dict().items() if name.endswith("_token_id")}

    def ids(text: Any) -> Any:
        known = torch.tensor([i for i in range(text.vocab_size) if i not in special] or [0])
        return known[torch.randint(len(known), (BATCH, min(TOKENS, text.max_seq_len)), generator=generator)]

    def numbers(*shape: int) -> Any:
        return torch.randn(BATCH, *shape, generator=generator).to(dtype)

    if hasattr(config, "image_size"):
        return [numbers(config.channels, config.image_size, config.image_size)]
    if not hasattr(ours, "decoder"):
        return [ids(config)]
    features = numbers(config.n_mels, config.max_frames) if hasattr(config, "n_mels") else ids(ours.encoder.config)
    return [features, ids(ours.decoder.config)]
