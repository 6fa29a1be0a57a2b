"""AdamW whose weight decay depends on what kind of parameter it is: matrices are decayed, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
PLACES = ("odeformer.positions", "odeformer.grid_positions")


@dataclass(frozen=True)
class Kind:
    """A kind of parameter: whether it is decayed, and ``has(path, module, parameter)``, the module being the one that
    holds it."""

    decayed: bool
    has: Callable[[tuple[str, ...], nn.Module, nn.Parameter], bool]


# The first one that has it. Decoupled weight decay: Loshchilov & Hutter 2019; on matrices only, as in GPT-2 and GPT-3
# training code: a gain has no reason to be near 0, nor has an embedding, whose rows seldom get a gradient.
KINDS = {
    "embedding": Kind(False, lambda path, module, p: isinstance(module, nn.Embedding)),
    "position": Kind(False, lambda path, module, p: type(module).__module__ in PLACES or path[-1].endswith("_table")),
    "norm": Kind(False, lambda path, module, p: isinstance(module, NORMS) or "placement" in path
                 or type(module).__module__ == "odeformer.norms"),
    "bias": Kind(False, lambda path, module, p: "bias" in path[-2:]),
    "coefficient": Kind(False, lambda path, module, p: "solver" in path and "correction" not in path),
    "vector": Kind(False, lambda path, module, p: p.dim() == 1),
    "scalar": Kind(False, lambda path, module, p: p.dim() == 0),
    "matrix": Kind(True, lambda path, module, p: True),
}


def kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter, by its name (a parameter with several names under the first)."""
    found = {}
    for name, parameter in model.named_parameters():
        path = tuple(name.split("."))
        module = model.get_submodule(".".join(path[:-1]))
        found[name] = next(kind for kind, entry in KINDS.items() if entry.has(path, module, parameter))
    return found


def kinds_table(model: nn.Module) -> str:
    """Every parameter with its shape, its kind and whether it is decayed, as text."""
    rows = [("parameter", "shape", "kind", "decayed")]
    for name, kind in kinds(model).items():
        shape = " x ".join(map(str, model.get_parameter(name).shape)) or "scalar"
        rows.append((name, shape, kind, "yes" if KINDS[kind].decayed else "no"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, one a kind; those that need no gradient are left out."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, kind in kinds(model).items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            found.setdefault(kind, []).append(parameter)
    return [{"params": parameters, "weight_decay": weight_decay if KINDS[kind].decayed else 0.0, "kind": kind}
            for kind, parameters in found.items()]


def adamw(model: nn.Module, *, learning_rate: float, weight_decay: float, betas: Iterable[float] = (0.9, 0.999),
          epsilon: float = 1e-8, foreach: bool | None = None) -> torch.optim.AdamW:
    """AdamW over those groups; ``foreach`` is torch's, None its own choice.

    Raises ValueError for a model in which no parameter needs a gradient.
    """
    parameters = groups(model, weight_decay)
    if not parameters:
        raise ValueError("model must have a parameter that needs a gradient, and all are frozen")
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=tuple(betas), eps=epsilon, foreach=foreach)
