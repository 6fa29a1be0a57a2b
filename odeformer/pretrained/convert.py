"""``from_huggingface`` and ``to_huggingface``: the numbers of a checkpoint as a model of ours, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odeformer.depth import DepthConfig
from odeformer.models.base import to_be_filled
from odeformer.pretrained.families import family_of
from odeformer.pretrained.folder import read_folder, transformers
from odeformer.pretrained.rules import check_finite, check_keys, collect, fill

BLOCK_OPTIONS = ("coupling", "dropout", "dropout_per")
GIVEN = ("weights", "weights_options")  # by the checkpoint
DEPTH_OPTIONS = tuple(f.name for f in fields(DepthConfig) if f.name not in GIVEN)


def from_huggingface(model_or_folder: Any, *, architecture: str | None = None, ignore: Sequence[str] = (),
                     **options: Any) -> nn.Module:
    """Our model with the numbers of a transformers model, or of a folder that holds one; in evaluation mode.

    Under Euler with h = 1 and coupling "lie" (the defaults) it gives what the original gives: logits, or the final
    states where there is no head. Text models are called ``model(tokens, mask=)``, with ``token_types=`` where they
    have them; encoder-decoders ``model(source, target, source_mask=)``; Whisper ``model(features, tokens)``; image
    models ``model(images)``. Masks are bool, True = real token.

    ``options``: those of DepthConfig (solver, steps_per_layer, gradient, ...) but for weights, which the checkpoint
    gives, and ``coupling``, ``dropout``, ``dropout_per`` of BlockConfig. Dropout is 0 unless given, whatever it was.
    ``architecture``: for a folder, the transformers class to read it as, if not the one that its config.json names.
    ``ignore``: beginnings of names of tensors in a folder that are to be left out; the rest of it must be used, but
    for parts which checkpoints of a family usually hold beside it (a pooler beside a language model's head).
    ``model.config.origin`` says what was read and what was left out.

    Raises FileNotFoundError where there is no folder, ImportError without transformers, ValueError for a model type,
    class or setting that is not known, and for tensors that are not expected, missing, or not finite; all with their
    names.

    >>> from_huggingface("a/folder")
    Traceback (most recent call last):
    FileNotFoundError: there is no folder a/folder; models are read from disk, not fetched by their name
    """
    known = (*DEPTH_OPTIONS, *BLOCK_OPTIONS)
    for name in options:
        if name in GIVEN:
            raise ValueError(f"{name} is given by the checkpoint; got {options[name]!r}")
        if name not in known:
            raise ValueError(f"unknown option {name!r}; known: {', '.join(known)}")
    DepthConfig(**{name: value for name, value in options.items() if name in DEPTH_OPTIONS})  # refused before reading
    if isinstance(model_or_folder, str | Path):
        original, left_out = read_folder(Path(model_or_folder), architecture, ignore)
    else:
        original, left_out = as_transformers(model_or_folder), []
        if architecture is not None or ignore:
            raise ValueError("architecture and ignore are for a folder; a model has its class and its tensors")
    return convert(original, left_out, options)


def as_transformers(model: Any) -> Any:
    """The model. Raises TypeError unless it is one of transformers."""
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "model_type"):
        raise TypeError(f"model_or_folder must be a transformers model or a folder, got {type(model).__name__}; wrap() "
                        "takes other modules")
    return model


def convert(original: Any, left_out: Sequence[str], options: dict[str, Any]) -> nn.Module:
    """Our model of a transformers model."""
    name = type(original).__name__
    family = family_of(original.config.model_type, name)
    state = original.state_dict()
    origin = {"architecture": name, "left_out": sorted(left_out), "config": plain(original.config)}
    depth, block = ({key: value for key, value in options.items() if key in names}
                    for names in (DEPTH_OPTIONS, BLOCK_OPTIONS))
    with to_be_filled():
        model = family.make(original.config, name, state, depth, block, origin)
    rules = family.rules(model, original.config, name)
    check_keys(state, rules, name)
    check_finite(state, name)
    fill(model, state, rules)
    return model.eval()


def plain(config: Any) -> dict[str, Any]:
    """Their config as JSON values."""
    return json.loads(config.to_json_string(use_diff=False))


def to_huggingface(model: nn.Module) -> Any:
    """The transformers model that a model of ours was read from, with the numbers that ours has now; in evaluation
    mode. What was read and not changed comes back bit for bit.

    The solver stays behind: the original is Euler with h = 1.

    Raises ValueError for a model that was not made by ``from_huggingface``, or whose shape or sharing of weights has
    changed since.
    """
    origin = getattr(getattr(model, "config", None), "origin", None)
    if origin is None:
        raise ValueError("model must have come from from_huggingface (its config has no origin); save(folder) writes "
                         "models of our own")
    name = origin["architecture"]
    theirs = their_config(origin["config"])
    family = family_of(theirs.model_type, name)
    state_like = dict.fromkeys((r.theirs for r in family.rules(model, theirs, name)), torch.empty(0))
    with to_be_filled():
        check_same(family.make(theirs, name, state_like, {}, {}, origin).config, model.config)
    rules = family.rules(model, theirs, name)
    state = collect(model, rules)
    with torch.random.fork_rng(devices=[]):
        other = getattr(transformers(), name)(theirs, **family.arguments(model))
    check_keys(other.state_dict(), rules, name)
    for key, tensor in [*other.named_parameters(remove_duplicate=False), *other.named_buffers(remove_duplicate=False)]:
        if key in state:
            tensor.data = state[key]
    return other.eval()


def their_config(values: dict[str, Any]) -> Any:
    """Their config of its JSON values."""
    return transformers().AutoConfig.for_model(**values)


def check_same(wanted: Any, got: Any, path: str = "config") -> None:
    """Raises ValueError where a config has changed in more than how depth is integrated."""
    free = {"DepthConfig": DEPTH_OPTIONS, "BlockConfig": BLOCK_OPTIONS}.get(type(wanted).__name__, ())
    for f in fields(wanted):
        a, b = getattr(wanted, f.name), getattr(got, f.name)
        if f.name == "decoder_depth" and a is None:
            a = wanted.depth
            b = a if b is None else b
        if is_dataclass(a) and type(a) is type(b):
            check_same(a, b, f"{path}.{f.name}")
        elif f.name not in free and as_json(a) != as_json(b):
            raise ValueError(f"{path}.{f.name} must be as in the original, {a!r}, got {b!r}")


def as_json(value: Any) -> str:
    """For comparison: lists and tuples are the same."""
    return json.dumps(value, sort_keys=True, default=str)
