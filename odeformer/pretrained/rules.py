"""Which tensor of theirs is which of ours: a list of rules, read in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Same:
    """One tensor is one tensor."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Ours, of theirs."""
        return [theirs]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs, of ours."""
        return ours[0]


class Transposed(Same):
    """A matrix (in, out), as GPT-2 stores it."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return [theirs.T]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].T


@dataclass(frozen=True)
class Fused(Same):
    """``n`` equal matrices, transposed, or biases of ours beside one another in the last axis."""

    n: int

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return [part.T if part.dim() > 1 else part for part in theirs.chunk(self.n, -1)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.T if part.dim() > 1 else part for part in ours], -1)


@dataclass(frozen=True)
class Reshaped(Same):
    """The same numbers in ``shape`` there, in ``ours`` here."""

    shape: tuple[int, ...]
    ours: tuple[int, ...]

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return [theirs.reshape(self.ours)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].reshape(self.shape)


@dataclass(frozen=True)
class ClassAndPatches(Same):
    """Positions (1, 1 + patches, d_model) are one of a class token and a table (rows, columns, d_model)."""

    side: int

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return [theirs[0, 0], theirs[0, 1:].unflatten(0, (self.side, self.side))]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.cat([ours[0][None], ours[1].flatten(0, 1)])[None]


SAME, TRANSPOSED = Same(), Transposed()


@dataclass(frozen=True)
class Rule:
    """A tensor of theirs and the tensors of ours that hold its numbers."""

    theirs: str
    ours: tuple[str, ...]
    shape: Same = SAME


def rule(theirs: str, *ours: str, shape: Same = SAME) -> Rule:
    """A rule for single tensors."""
    return Rule(theirs, ours, shape)


def modules(model: nn.Module, pairs: Iterable[tuple[str, str]], prefix: str = "") -> list[Rule]:
    """Rules for modules (theirs, ours) whose parameters have the same names, those that ours has; ``prefix`` stands
    before their names."""
    return [Rule(f"{prefix}{theirs}.{name}", (f"{ours}.{name}",))
            for theirs, ours in pairs for name, _ in model.get_submodule(ours).named_parameters(recurse=False)]


def layers(n: int, pairs: Iterable[tuple[str, str]], theirs: str, ours: str) -> list[tuple[str, str]]:
    """Pairs of names inside a layer, for n layers; ``theirs`` and ``ours``: where layer i is, with {i} for i."""
    pairs = list(pairs)
    return [(f"{theirs.format(i=i)}.{a}", f"{ours.format(i=i)}.{b}") for i in range(n) for a, b in pairs]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def listed(names: Iterable[str]) -> str:
    """Names for a message, at most ten of them."""
    names = sorted(names)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError that names the tensors which hold NaN or infinity."""
    broken = [name for name, x in state.items() if x.is_floating_point() and not x.isfinite().all()]
    if broken:
        raise ValueError(f"{what} must have finite weights, got NaN or infinity in {listed(broken)}")


def check_keys(state: Iterable[str], rules: Sequence[Rule], what: str) -> None:
    """Raises ValueError that names the tensors which no rule knows, and those that are missing."""
    known, state = {r.theirs for r in rules}, set(state)
    if unexpected := state - known:
        raise ValueError(f"{what} has tensors that it should not have: {listed(unexpected)}")
    if missing := known - state:
        raise ValueError(f"{what} lacks the tensors {listed(missing)}")


def fill(model: nn.Module, state: Mapping[str, Tensor], rules: Sequence[Rule]) -> None:
    """Give a model of ours the numbers of theirs, bit for bit and in their dtype.

    Raises ValueError where a shape differs, where tensors of theirs that are one of ours have different numbers, or a
    tensor of ours is in no rule.
    """
    ours, filled = tensors(model), {}
    for r in rules:
        for name, part in zip(r.ours, r.shape.split(state[r.theirs].detach()), strict=True):
            if ours[name].shape != part.shape:
                raise ValueError(f"{r.theirs} must have the numbers for {name} {tuple(ours[name].shape)}, got "
                                 f"{tuple(state[r.theirs].shape)}")
            first = filled.setdefault(id(ours[name]), r.theirs)
            if first != r.theirs and not torch.equal(ours[name], part):
                raise ValueError(f"{first} and {r.theirs} must have the same numbers, they are one tensor in ours")
            ours[name].data = part.clone(memory_format=torch.contiguous_format)
    left = [name for name, x in ours.items() if id(x) not in filled and not name.startswith(("solver.", "fusion."))]
    if left:
        raise ValueError(f"no tensor was given for {listed(left)}")


def collect(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Their tensors, of a model of ours."""
    ours = tensors(model)
    return {r.theirs: r.shape.join([ours[name].detach() for name in r.ours]).clone(
        memory_format=torch.contiguous_format) for r in rules}


def only(config: Any, **allowed: Any) -> None:
    """Raises ValueError unless their config has these values (a tuple: one of them), where it has them at all."""
    for name, values in allowed.items():
        values = values if isinstance(values, tuple) else (values,)
        value = getattr(config, name, values[0])
        if value not in values:
            raise ValueError(f"{name} must be {' or '.join(map(repr, values))} for a model of type "
                             f"{config.model_type!r} to be read, got {value!r}")


ACTIVATIONS = {"gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu",
               "swish": "silu"}  # theirs -> ours


def activation(config: Any, name: str) -> str:
    """Our name of an activation in their config. Raises ValueError for one that we do not have."""
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)}, got {value!r}")
    return ACTIVATIONS[value]
