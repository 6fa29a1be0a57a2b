"""``wrap``: any residual stack as a vector field, its layers left where they are.

The layers stay the user's own modules; the field of layer l is f(z) = layer(z) - z, with the arguments (masks,
positions, ...) that the model around it passes. Euler with h = 1 is the original up to the rounding of
z + (layer(z) - z).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from torch import Tensor, nn

from odeformer.context import Context
from odeformer.depth import DepthConfig, integrate
from odeformer.depth_checks import check_causal, check_coupling
from odeformer.injection import check_equilibrium, inject
from odeformer.models.base import DepthModel
from odeformer.pretrained.rules import check_finite, listed
from odeformer.pretrained.stack import Call, find_stack
from odeformer.tables import at_least
from odeformer.weights import LayeredField

REFUSED = ("weights", "weights_options", "fusion", "fusion_options", "layer_drop", "layer_drop_per",
           "layer_drop_schedule")  # of DepthConfig: they change the layers or what is between them
OPTIONS = tuple(f.name for f in fields_of(DepthConfig) if f.name not in REFUSED)


@dataclass(frozen=True, kw_only=True)
class WrappedConfig:
    """``stack``: where the layers are in the model, "" where the model is the stack. ``n_layers``: calls of layers in a
    forward pass. ``causal``: whether no token sees a later one."""

    n_layers: int
    depth: DepthConfig = field(default_factory=DepthConfig)
    stack: str = ""
    causal: bool = False


class Whole:
    """A layer's field has no parts."""

    has_parts = False
    splitting = None


def wrap(model: nn.Module, *, stack: str | None = None, n_layers: int | None = None, causal: bool | None = None,
         **options: Any) -> Wrapped:
    """A residual stack under any solver: ``wrapped(...)`` is called as ``model(...)`` and gives what it gives.

    ``model``: an nn.ModuleList or nn.Sequential whose items map states to states of the same shape, called
    ``wrapped(z, *arguments, **arguments)`` with arguments for every layer; or any model that holds one and calls its
    items in turn, such as those of transformers. ``stack``: the path of that list, where the model has several.
    ``n_layers``: how often layers are called in a pass, if not each once (ALBERT's config says it). ``causal``: whether
    no token sees a later one, so that adaptive and implicit solvers are refused; None: whether an attention in the
    layers says ``is_causal``. ``options``: those of DepthConfig (solver, steps_per_layer, rtol, gradient, ...).

    The model is not changed; while ``wrapped`` runs, stand-ins are in the places of its layers, so it must not run in
    another thread meanwhile. Layers that give a tuple: the state is its first item. Where the others are more than
    None, a plain pass is made beside the solve to have them, n_layers evaluations that are not counted.
    A model that does more to the state between its layers is refused when it is called.

    Raises TypeError for no module; ValueError for a model without such a stack or with several, an unknown option, and
    weights that are not finite, with their names. Calling it raises ValueError for layers that change the state's
    shape, and where the model does not call its layers in turn.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, DepthModel):
        raise TypeError(f"{type(model).__name__} is integrated over depth already; use with_solver()")
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name!r}; known: {', '.join(OPTIONS)}")
    found = find_stack(model, stack)
    check_finite({key: x for key, x in model.named_parameters() if not x.is_meta}, type(model).__name__)
    if n_layers is not None:
        at_least("n_layers", n_layers, 1)
    if causal is None:
        causal = any(getattr(m, "is_causal", False) is True for m in found.layers.modules())
    config = WrappedConfig(n_layers=n_layers or found.n_calls, depth=DepthConfig(**options), stack=found.path,
                           causal=causal)
    return Wrapped(model, config)


class Wrapped(DepthModel):
    """What ``wrap`` makes. ``layers``: the user's own; ``model``: what they are in."""

    own_layers = False

    def __init__(self, model: nn.Module, config: WrappedConfig):
        nn.Module.__init__(self)
        self.training = model.training
        self.model, self.config, self.fusion = model, config, None
        self.solver = self._make_solver()

    @property
    def layers(self) -> nn.Module:
        """The list of layers."""
        return self.model.get_submodule(self.config.stack)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.config.causal

    def _make_solver(self) -> Any:
        depth, n = self.config.depth, self.config.n_layers
        shape = {"d_model": width} if (width := getattr(self._original_config, "hidden_size", None)) else {}
        solver = depth.make_solver(n_steps=depth.steps(n), **shape)
        self._check_solver(solver)
        return solver

    @property
    def _original_config(self) -> Any:
        return getattr(self.model, "config", None)

    def _check_solver(self, solver: Any) -> None:
        depth = self.config.depth
        check_causal(solver, self.config.causal)
        check_coupling(solver, Whole, depth.gradient)
        check_equilibrium(solver, depth, len(list(self.layers)))
        if depth.layer_drop:
            raise ValueError(f"layer_drop is not for wrapped layers, got {depth.layer_drop}")

    def _check_dropout(self) -> None:
        """Raises ValueError where dropout in the layers would be taken for the error of a step."""
        if not (self.training and (self.solver.is_adaptive or self.solver.is_implicit)):
            return
        found = [name for name, m in self.layers.named_modules() if isinstance(m, nn.Dropout) and m.p and m.training]
        if found:
            raise ValueError(f"solver {self.solver.name!r} cannot be used in training with dropout in wrapped layers, "
                             f"drawn anew at each evaluation: {listed(found)}; call eval() or take a fixed-step solver")

    def field_of(self, calls: list[Call]) -> Any:
        """The field of layers called in turn: one piece a layer, or one field where all calls are the same."""
        if all(call.same(calls[0]) for call in calls):
            return LayerField(calls[0])
        return LayeredField([(float(i), float(i + 1), LayerField(call)) for i, call in enumerate(calls)])

    def vector_field(self, z: Tensor, *arguments: Any, **named: Any) -> Any:
        """f(z, l), every layer being called with these arguments beside the state. That of a forward pass is its
        Solution's ``field``."""
        return self._field_from(self._calls(z, arguments, named), z)

    def _calls(self, z: Tensor, arguments: tuple, named: Mapping[str, Any]) -> list[Call]:
        layers = list(self.layers)
        return [Call(layers[i % len(layers)], (z, *arguments), dict(named), 0, i) for i in range(self.config.n_layers)]

    def begin(self, *arguments: Any, **named: Any) -> tuple[Tensor, Any]:
        """The state at l = 0 and the field for these arguments of the model, without a solve."""
        record = Pass(self, None)
        with suppress(Began):
            self._run(record, arguments, named)
        z = record.calls[0].state
        return z, self._field_from(record.calls, z)

    def forward(self, *arguments: Any, return_solution: bool = False, save_states: bool = True, **named: Any) -> Any:
        """What the model gives for these arguments; with ``return_solution`` also the Solution of its stack, with the
        state at every step unless ``save_states`` is False."""
        self._check_dropout()
        mask = named.get("attention_mask")
        save = return_solution and save_states
        if not self.config.stack:
            solution = self.evolve(*arguments, save=save, **named)
            return (solution.z, solution) if return_solution else solution.z
        record = Pass(self, lambda calls: self._integrate(calls, calls[0].state, mask, save))
        output = self._run(record, arguments, named)
        if record.solution is None:
            raise ValueError(f"the layers in {self.config.stack!r} were called {len(record.calls)} times in a forward "
                             f"pass and n_layers is {self.config.n_layers}; give n_layers= to wrap(), and switch layer "
                             "drop of the model itself off")
        return (output, record.solution) if return_solution else output

    def evolve(self, z: Tensor, *arguments: Any, save: bool = False, **named: Any) -> Any:
        """Integrate z from l = 0 to n_layers, every layer being called with these arguments beside it; a Solution."""
        return self._integrate(self._calls(z, arguments, named), z, None, save)

    def _integrate(self, calls: list[Call], z: Tensor, mask: Any, save: bool) -> Any:
        real = None
        if isinstance(mask, Tensor) and mask.shape == z.shape[:2]:
            real = mask.bool()  # keeps padding out of error norms; the layers have masks of their own
        context = Context(mask=real, causal=self.causal, training=self.training, holds_rows=True)
        return integrate(self._field_from(calls, z), z, self.solver, self.config.depth, self.config.n_layers, context,
                         save=save)

    def _field_from(self, calls: list[Call], z: Tensor) -> Any:
        """The field of calls for a state that starts as z."""
        f = self.field_of(calls)
        return inject(f, z) if self.config.depth.injection else f

    def _run(self, record: Pass, arguments: tuple, named: Mapping[str, Any]) -> Any:
        if not self.config.stack:
            record.calls[:] = self._calls(arguments[0], arguments[1:], named)
            raise Began
        named = self._plain_arguments(named)
        with standing_in(self.layers, record):
            return self.model(*arguments, **named)

    def _plain_arguments(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Without caches and collected states, which a solve's evaluations would fill. Raises ValueError for them."""
        config = self._original_config
        for name in ("output_hidden_states", "output_attentions"):
            if named.get(name) or (name not in named and getattr(config, name, None) is True):
                raise ValueError(f"{name} cannot be collected under a solver, which evaluates layers between states; "
                                 "return_solution=True gives the states")
        for name in ("past_key_values", "cache", "use_cache"):
            if named.get(name) not in (None, False):
                raise ValueError(f"{name} cannot be used by wrapped layers, which several evaluations would fill; "
                                 "from_huggingface gives a model whose cache knows them")
        known = inspect.signature(self.model.forward).parameters
        return {**named, "use_cache": False} if "use_cache" in known else dict(named)


class LayerField:
    """f(z) = layer(z) - z, with the arguments of a call."""

    def __init__(self, call: Call):
        self.call = call

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return self.call.state_after(z) - z


class Began(Exception):
    """All layers have been met."""


class Pass:
    """One forward pass of the model around the stack: notes the calls of its layers, and solves at the last one."""

    def __init__(self, wrapped: Wrapped, solve: Any):
        self.n_layers, self.solve = wrapped.config.n_layers, solve
        self.calls: list[Call] = []
        self.handed: Tensor | None = None  # the state that the last call gave back
        self.solution = None

    def __call__(self, layer: nn.Module, arguments: tuple, named: dict[str, Any]) -> Any:
        """What the layer would return, with the state at l = 0 in it, or in the last call that at l = n_layers."""
        call = Call.of(layer, arguments, named, len(self.calls))
        self.calls.append(call)
        number = len(self.calls)
        if call.state is not self.handed:
            if number > 1:
                raise ValueError(f"the model changes the state between layers {number - 2} and {number - 1}, which the "
                                 "field of a stack of layers does not know of")
            self.handed = call.state
        if number > self.n_layers:
            raise ValueError(f"layers were called more often than n_layers = {self.n_layers} in a forward pass; give "
                             "n_layers= to wrap()")
        first = self.calls[0]
        output = call.evaluate() if call is first or first.has_more else None
        if number < self.n_layers and first.has_more:
            self.handed = call.memo[1]
            return output
        if number < self.n_layers:
            return first.formed(call.state)
        if self.solve is None:
            raise Began
        self.solution = self.solve(self.calls)
        return (call if first.has_more else first).formed(self.solution.z)


class StandIn(nn.Module):
    """In a layer's place while a wrapped model runs: passes its calls on, and else is like it."""

    def __init__(self, layer: nn.Module, record: Pass):
        super().__init__()
        self.layer = layer
        self.record = record
        self.training = layer.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.record(self.layer, arguments, named)


@contextmanager
def standing_in(layers: nn.Module, record: Pass) -> Iterator[None]:
    """Stand-ins in the places of the layers."""
    original = dict(layers._modules)
    layers._modules.update({name: StandIn(layer, record) for name, layer in original.items()})
    try:
        yield
    finally:
        layers._modules.update(original)
