"""An optimiser for a grown model that goes on where the old one's was."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.growth.lineage import Origin, tensors

# what torch.optim keeps of a parameter, and to which power of the gradient it is proportional
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1, "square_avg": 2, "grad_avg": 1,
          "sum": 2, "exp_inf": 1}
OTHERS = {torch.optim.RMSprop: {"momentum_buffer": 0}}  # there of gradients over their roots of squares
COUNTS = ("step", "mu_product")  # of the whole parameter


def grow_optimizer(optimizer: torch.optim.Optimizer, old_model: nn.Module,
                   new_model: nn.Module) -> torch.optim.Optimizer:
    """An optimiser of the same kind and settings for ``new_model``, which ``widen`` or ``deepen`` made of
    ``old_model``, with the state that ``optimizer`` has of its parameters.

    Moments grow as gradients do: the gradient of a weight whose unit was copied is the old one times the share by which
    the copy is read (1 / k for even ones), that of a weight that was divided by k is the old one. exp_avg is multiplied
    by that factor, exp_avg_sq by its square, steps stay: what the moments would be, had the wider model, with the
    weights that it has now, seen the same batches. So it is exactly for ``widen`` (with ``unequal`` not for d_model,
    where a norm mixes the gradients of features; with ``noise`` approximately). Adam divides by the root of the second
    moment, so it moves copies as much as it moved the one, and reads of copies k times as much in sum as before: with
    many copies take a smaller learning rate. ``deepen``: copies of a layer get its moments, mixtures mixed ones; a
    layer inserted by "zero" starts without any.

    Each parameter goes to the group of the one that it comes from. Frozen and left-out ones stay out.

    Raises ValueError where new_model was not made of old_model, the optimiser holds other parameters than old_model's
    or keeps what is not known to grow (known: the momenta and squares of torch.optim's SGD, RMSprop, Adagrad, Adam and
    its kin).
    """
    lineage = getattr(new_model, "lineage", None)
    if lineage is None:
        raise ValueError("new_model must be what widen or deepen returned, in this process; saving does not keep where "
                         "parameters came from")
    old = tensors(old_model)
    if any(name not in old for origin in lineage.values() for name, _ in origin.sources):
        raise ValueError("new_model was not made of old_model")
    names = {id(p): name for name, p in old_model.named_parameters()}
    where, strange = {}, 0
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            strange += id(p) not in names
            where[names.get(id(p))] = number
    if strange:
        raise ValueError(f"optimizer holds {strange} parameters that are not old_model's")
    groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    kept: list[tuple[Tensor, Origin]] = []
    for name, p in new_model.named_parameters():
        origin = lineage[name]
        if origin.sources[0][0] in where:
            groups[where[origin.sources[0][0]]].append(p)
            kept.append((p, origin))
    new, powers = _like(optimizer, groups), POWERS | OTHERS.get(type(optimizer), {})
    for p, origin in kept:
        state = _state([optimizer.state.get(old[name], {}) for name, _ in origin.sources], origin, powers)
        if state:
            new.state[p] = state
    return new


def _like(optimizer: torch.optim.Optimizer, groups: list[list[Tensor]]) -> torch.optim.Optimizer:
    """The same kind, with the same settings, for other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    options = [{name: value for name, value in group.items() if name not in ("params", "param_names")}
               for group in optimizer.param_groups]
    filled = [{"params": params, **given} for params, given in zip(groups, options, strict=True)]
    return type(optimizer)(filled, **defaults)


def _state(states: list[Mapping[str, Any]], origin: Origin, powers: Mapping[str, int]) -> dict[str, Any]:
    """The state of a new parameter from those of its sources; empty where one of them has none."""
    if not origin.carried or not all(states):
        return {}
    grown = {}
    for key, value in states[0].items():
        if key in COUNTS or value is None:
            grown[key] = value.clone() if isinstance(value, Tensor) else value
        elif key in powers:
            by_name = {name: state[key] for (name, _), state in zip(origin.sources, states, strict=True)}
            grown[key] = origin.moment(by_name, powers[key])
        else:
            raise ValueError(f"optimizer keeps {key!r} of its parameters, which growth does not know; known: "
                             f"{', '.join((*COUNTS, *powers))}")
    return grown
