"""Where each parameter of a grown model comes from, and how it is made of what was there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from odeformer.growth.maps import Axis


@dataclass(frozen=True, eq=False)
class Origin:
    """A new parameter is Σ weight * old over ``sources`` (name, weight), grown along ``axes`` (None: as it is), times
    ``value``.

    ``gradient``: its gradient over that of the sources, beside what the axes say. ``carried``: whether the optimiser's
    state of the sources is of use to it.
    """

    sources: tuple[tuple[str, float], ...]
    axes: tuple[Axis | None, ...] = ()
    value: float = 1.0
    gradient: float = 1.0
    carried: bool = True

    def grown(self, old: Mapping[str, Tensor]) -> Tensor:
        """The new parameter."""
        return self._made(old, "value", 1)

    def moment(self, old: Mapping[str, Tensor], power: int) -> Tensor:
        """What an optimiser keeps of the parameter, something of the size of a gradient to this power."""
        return self._made(old, "gradient", power)

    def _made(self, old: Mapping[str, Tensor], factor: str, power: int) -> Tensor:
        (name, weight), *rest = self.sources
        total = old[name].detach()
        total = total.clone() if weight == 1 else total * weight
        for name, weight in rest:
            total = total + old[name].detach() * weight
        for at, axis in enumerate(self.axes):
            if axis is not None:
                total = _along(total, at, axis.index, getattr(axis, factor) ** power)
        scale = getattr(self, factor) ** power
        return total if scale == 1 else total * scale


def _along(x: Tensor, at: int, index: Tensor, factor: Tensor) -> Tensor:
    x = x.index_select(at, index.to(x.device))
    if (factor == 1).all():
        return x
    wide = torch.promote_types(x.dtype, torch.float32)  # halves rounded once
    return (x.to(wide) * factor.to(x.device, wide).view(-1, *[1] * (x.dim() - 1 - at))).to(x.dtype)


Lineage = dict[str, Origin]


def joined(parts: Mapping[str, Lineage], new: nn.Module) -> Lineage:
    """The lineage of a model made of models, path -> theirs; of tied parameters the one name that it has."""
    found = {}
    for path, lineage in parts.items():
        for name, origin in lineage.items():
            sources = tuple((f"{path}{source}", weight) for source, weight in origin.sources)
            found[f"{path}{name}"] = replace(origin, sources=sources)
    return {name: origin for name, origin in found.items() if name in tensors(new)}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill(new: nn.Module, old: nn.Module, lineage: Lineage) -> None:
    """Give ``new`` what the lineage says. Raises ValueError where that leaves out a parameter of either, or
    does not fit.

    Buffers that are not mentioned are copied where their shape is the same. ``new.lineage`` keeps what was said, for
    ``grow_optimizer``.
    """
    before = tensors(old)
    used = {name for origin in lineage.values() for name, _ in origin.sources}
    for name, _ in old.named_parameters():
        if name not in used:
            raise ValueError(f"model has a parameter {name!r} for which growth has no rule")
    for name, module, key in _places(new):
        here = getattr(module, key)
        origin = lineage.get(name)
        if origin is None and not isinstance(here, nn.Parameter) and name in before:
            origin = Origin(((name, 1.0),))
        if origin is None:
            raise ValueError(f"the new model has a parameter {name!r} for which growth has no rule")
        made = origin.grown(before)
        if made.shape != here.shape:
            raise ValueError(f"growth makes {name!r} of the shape {tuple(made.shape)}, and the new model has "
                             f"{tuple(here.shape)}")
        if isinstance(here, nn.Parameter):
            here.data = made
            here.requires_grad_(before[origin.sources[0][0]].requires_grad)
        else:
            setattr(module, key, made)
    new.lineage = lineage


def _places(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name, module, attribute) of every parameter and buffer, each once."""
    found = []
    for name in tensors(model):
        path, _, key = name.rpartition(".")
        found.append((name, model.get_submodule(path), key))
    return found
