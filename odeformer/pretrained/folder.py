"""A folder in Hugging Face's format, read by transformers and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from odeformer.pretrained.families import family_of
from odeformer.pretrained.rules import listed


def is_huggingface(source: Path) -> bool:
    """Whether a folder holds a model of Hugging Face; False: one of ours. Raises ValueError for any other."""
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{source} holds no config.json, so it is neither a model of ours nor one of Hugging "
                         "Face")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for key, answer in (("model_type", True), ("model", False)):
        if isinstance(values, Mapping) and key in values:
            return answer
    raise ValueError(f"{path} has neither model_type, as Hugging Face's have, nor model, as ours have")


def transformers() -> ModuleType:
    """The package. Raises ImportError that says what to install."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this needs transformers: pip install 'odeformer-depth[huggingface]'") from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what they would say is checked here."""
    logging = transformers().logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_folder(folder: Path, architecture: str | None = None, ignore: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """The transformers model in a folder, and the names of tensors there that were left out.

    Raises FileNotFoundError without a folder or its config.json, ValueError for tensors that are not expected, missing
    or of another shape, with their names.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; models are read from disk, not fetched by their name")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it is no model in Hugging Face's format")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if architecture is None:
        architecture = next(iter(values.get("architectures") or ()), None)
    if architecture is None:
        raise ValueError(f"{path} names no architectures; give architecture=, such as 'BertModel'")
    family = family_of(values.get("model_type"), architecture)
    with quiet():
        try:
            model, report = getattr(transformers(), architecture).from_pretrained(
                folder, output_loading_info=True, local_files_only=True)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
    unexpected = set(report["unexpected_keys"])
    left_out = {name for name in unexpected if name.startswith((*family.side, *ignore))}
    if unexpected - left_out:
        raise ValueError(f"{folder} has tensors that {architecture} does not use: {listed(unexpected - left_out)}; "
                         "ignore= leaves out those that begin with a given name")
    if missing := report["missing_keys"] or report["mismatched_keys"]:
        raise ValueError(f"{folder} lacks what {architecture} needs, or has it in another shape: "
                         f"{listed(map(str, missing))}")
    return model, sorted(left_out)
