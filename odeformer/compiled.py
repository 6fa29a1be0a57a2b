"""Compiled depth: one step of one layer is compiled, once, and serves every layer, every step and every depth.

A solve that torch.compile has unrolled over its steps takes a minute to compile and must be compiled again for another
depth. Here the compiled function is a step of a layer (``solvers.compiled.advance``) or an evaluation of its field
(``evaluate``): parameters, l and h go in as tensors and nothing that goes in says which layer it is, so that what was
compiled for the first layer holds for all. What has no fixed form stays outside, as it is written: the loop over steps,
Newton iterations, the choice of a step size, random draws, experts, passes with a key/value cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from odeformer.attention.pairs import needs_rules
from odeformer.block import Part, RoutedSublayer, Sublayer
from odeformer.context import Context, dropped


class Compiled:
    """What ``model.compile()`` leaves on a model: the compiled functions, each made when it is first called.

    ``options``: those of torch.compile. Unless they say otherwise each function must be one graph (``fullgraph``), and
    on a CPU inductor writes the calls between its kernels in C++ (``cpp_wrapper``), which is where the time of small
    states goes. Copies of a model share what is compiled; a pickled one compiles anew.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = {"fullgraph": True, **options}
        self.functions: dict[tuple, Callable] = {}

    def __deepcopy__(self, memo: dict) -> Compiled:
        return self

    def __reduce__(self) -> tuple:
        return Compiled, (self.options,)

    def __call__(self, function: FunctionType, z: Tensor, *kind: Any) -> Callable:
        """The function, compiled for states like z and for a ``kind`` of arguments.

        Each kind has a function of its own: torch looks through all that it has compiled of a function at each call,
        and stops at 8 (``torch._dynamo.config.recompile_limit``).
        """
        key = function, z.device.type, torch.is_grad_enabled(), *kind
        if key not in self.functions:
            code = function.__code__.replace()  # by which torch keeps what it compiles
            own = FunctionType(code, function.__globals__, function.__name__)
            self.functions[key] = torch.compile(own, **self._options(z.device))
        return self.functions[key]

    def _options(self, device: torch.device) -> dict[str, Any]:
        told = self.options.keys() & {"mode", "options"} or self.options.get("backend", "inductor") != "inductor"
        return self.options if told or device.type != "cpu" else self.options | {"options": {"cpp_wrapper": True}}

    def field(self, coupling: Callable, sublayers: Iterable[Sublayer], context: Context, layer: int) -> Any:
        """The field of a layer in a forward pass, compiled as a whole, or in parts where one of them is routed."""
        plain = [Part(sublayer, context, layer) for sublayer in sublayers]
        if context.cache is not None:
            return coupling(plain)
        parts = [None if is_routed(part) else anonymous(part) for part in plain]
        if None not in parts:
            return CompiledField(self, coupling(parts), parts)
        return coupling([routed if part is None else CompiledField(self, part, (part,))
                         for routed, part in zip(plain, parts, strict=True)])

    def smooth(self, part: Any) -> Any:
        """A sublayer with weights that are functions of l, as a compiled field."""
        return part if is_routed(part) or part.context.cache is not None else CompiledPart(self, part)


def is_routed(part: Part) -> bool:
    """Whether the part is a layer of experts, which reports to the forward pass and keeps choices for all of it."""
    return isinstance(part.sublayer, RoutedSublayer)


def anonymous(part: Any) -> Part:
    """A part in which nothing says of which layer it is."""
    drawn = part.context.keep is not None or (part.context.training and part.sublayer.dropout)
    return DrawnPart(part) if drawn else Part(part.sublayer, part.context)


@dataclass
class _LayerContext(Context):
    """A Context as one sublayer of one layer sees it, with the ``drawn`` mask of its dropout."""

    drawn: Tensor | None = None

    def drop(self, site: Any, layer: int, p: float, x: Tensor) -> Tensor:
        return x if self.drawn is None else dropped(x, self.drawn, p)


class DrawnPart(Part):
    """A sublayer in training with dropout, or in a layer that may be dropped: what it is told of that is tensors."""

    def __init__(self, part: Any):
        super().__init__(part.sublayer, _LayerContext(**vars(part.context) | {"keep": None}))
        self.whole, self.number = part.context, part.layer

    def draw(self, z: Tensor) -> None:
        """What is random, or a number that differs between layers, for an evaluation at a state like z."""
        if self.whole.keep is not None and self.context.keep is None:
            factor = self.whole.keep[self.number]
            self.context.keep = (factor if isinstance(factor, Tensor) else z.new_full((), factor),)
        if self.whole.training and self.sublayer.dropout:
            self.context.drawn = self.whole.kept(self.sublayer, self.number, self.sublayer.dropout, z)


def evaluate(field: Any, z: Tensor, l: Tensor) -> Tensor:
    """dz/dl."""
    return field(z, l)


def evaluate_with(part: Part, weights: dict[str, Tensor], z: Tensor) -> Tensor:
    """dz/dl of a sublayer with these weights."""
    return functional_call(part.sublayer, weights, (z, part.context, part.layer))


def is_followed() -> bool:
    """Whether an evaluation is traced, or differentiated by what cannot look into a compiled function."""
    return torch.compiler.is_compiling() or needs_rules()


def kind_of(part: Part) -> tuple:
    """In what parts differ that a graph of one does not hold for the other, beside shapes."""
    context = part.context
    return type(part.sublayer), context.training, context.mask is None, context.memory_mask is None


class CompiledField:
    """A layer's field, or a part of it, whose evaluation is a compiled function."""

    def __init__(self, compiled: Compiled, field: Any, parts: Sequence[Part]):
        self.compiled, self.field = compiled, field
        self.drawn = [part for part in parts if isinstance(part, DrawnPart)]
        self.kind = len(parts), *kind_of(parts[0])
        self.splitting = getattr(field, "splitting", None)
        own = getattr(field, "parts", None)
        self.parts = own and tuple(CompiledField(compiled, part, (part,)) for part in own)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        field, kind = self.ready(z)
        if is_followed():
            return field(z, l)
        return self.compiled(evaluate, z, *kind)(field, z, l)

    def ready(self, z: Tensor) -> tuple[Any, tuple]:
        """What to trace for a state like z, with all that is random drawn; and its kind."""
        for part in self.drawn:
            part.draw(z)
        return self.field, self.kind


def plain(x: Tensor) -> Tensor:
    """A weight as any other tensor: at a knot it may be the parameter itself, for which torch would compile anew."""
    if not isinstance(x, nn.Parameter):
        return x
    return x.view_as(x) if torch.is_grad_enabled() else x.detach()


class CompiledPart:
    """A sublayer with weights that are functions of l: they are made outside of the compiled function, once a depth."""

    def __init__(self, compiled: Compiled, part: Any):
        self.compiled, self.weights = compiled, part.weights
        self.part = anonymous(part)
        self.kind = kind_of(self.part)

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        if isinstance(self.part, DrawnPart):
            self.part.draw(z)
        weights = {name: plain(x) for name, x in self.weights(l).items()}
        call = evaluate_with if is_followed() else self.compiled(evaluate_with, z, *self.kind)
        return call(self.part, weights, z)
