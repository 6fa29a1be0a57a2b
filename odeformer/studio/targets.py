"""What a report is about: solvers and models, given by name, by folder or as objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odeformer.models import Seq2Seq, load
from odeformer.models.base import DepthModel
from odeformer.pretrained import from_huggingface, wrap
from odeformer.pretrained.folder import is_huggingface
from solvers import SOLVERS, get_solver
from solvers.base import Solver


@dataclass(frozen=True)
class Target:
    """A ``solver`` or a ``model``, with what it is called; ``folder``: where the model was saved, or None."""

    name: str
    solver: Solver | None = None
    model: nn.Module | None = None
    folder: Path | None = None


def resolve(targets: Any) -> list[Target]:
    """Each target as what it names, in order; one alone may be given without a list.

    Raises ValueError for an empty list and for a name that is neither a solver nor a folder with a model, TypeError for
    another object; what reading a folder raises passes through.
    """
    if isinstance(targets, str | Path | nn.Module) or not isinstance(targets, Iterable):
        targets = [targets]
    found = [_resolve(target) for target in targets]
    if not found:
        raise ValueError("targets must name at least one solver or model")
    return _told_apart(found)


def _resolve(target: Any) -> Target:
    if isinstance(target, str) and target in SOLVERS:
        return Target(target, solver=get_solver(target))
    if isinstance(target, str | Path):
        return _of_folder(str(target), Path(target))
    if isinstance(target, nn.Module) and not hasattr(target, "is_adaptive"):
        known = isinstance(target, DepthModel | Seq2Seq)
        inner = getattr(target, "model", target) if known else target
        return Target(type(inner).__name__, model=target if known else wrap(target))
    if hasattr(target, "is_adaptive") and not isinstance(target, type):
        return Target(target.name, solver=target)
    raise TypeError(f"a target must be the name of a solver, a folder with a model, a solver or a model; got "
                    f"{type(target).__name__}")


def _of_folder(name: str, folder: Path) -> Target:
    if not folder.is_dir():
        near = get_close_matches(name, SOLVERS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown target {name!r}{hint}: it is no solver and no folder. A target is a folder with a "
                         "model, saved by model.save() or `odeformer train` or in Hugging Face's format, or one of the "
                         f"solvers {', '.join(sorted(SOLVERS))}")
    model = from_huggingface(folder) if is_huggingface(folder) else load(folder)
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model = model.float()  # diagnostics need the digits
    return Target(folder.resolve().name or name, model=model, folder=folder)


def _told_apart(found: list[Target]) -> list[Target]:
    """With numbers behind names that stand twice."""
    names = [target.name for target in found]
    seen: dict[str, int] = {}
    out = []
    for target in found:
        seen[target.name] = seen.get(target.name, 0) + 1
        several = names.count(target.name) > 1
        name = f"{target.name} ({seen[target.name]})" if several else target.name
        out.append(Target(name, target.solver, target.model, target.folder))
    return out
