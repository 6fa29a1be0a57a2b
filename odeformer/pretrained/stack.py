"""The list of layers inside a model, and how the model calls them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

LOOKED_FOR = ("an nn.ModuleList or nn.Sequential whose items are of one class, have parts of their own, and are in no "
              "other such list")
LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Stack:
    """``path`` of the list in the model, ``n_calls`` of its items in a forward pass."""

    path: str
    layers: nn.Module
    n_calls: int


def find_stack(model: nn.Module, path: str | None = None) -> Stack:
    """The list of layers. Raises ValueError where there is none, or several and no path."""
    if isinstance(model, LISTS):
        if path:
            raise ValueError(f"stack is for a model that holds a list of layers, and model is one; got {path!r}")
        return Stack("", model, checked(model, "model"))
    if path is not None:
        return of_path(model, path)
    found = candidates(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no residual stack: looked for {LOOKED_FOR}; stack= names another "
                         "list")
    longest = [name for name in found if len(model.get_submodule(name)) > 1] or found
    if len(longest) > 1:
        raise ValueError(f"{type(model).__name__} has several stacks of layers: {', '.join(longest)}; choose one with "
                         "stack=")
    return of_path(model, longest[0])


def of_path(model: nn.Module, path: str) -> Stack:
    """The list at a path."""
    try:
        layers = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"stack must be the path of a list of layers, got {path!r}: {error}") from error
    if not isinstance(layers, LISTS) or not path:
        raise ValueError(f"stack must be the path of an nn.ModuleList or nn.Sequential, got {path!r}, "
                         f"{type(layers).__name__}")
    n = checked(layers, path)
    config = getattr(model, "config", None)
    if hasattr(config, "num_hidden_groups"):  # ALBERT: groups of layers take turns
        n = config.num_hidden_layers
    return Stack(path, layers, n)


def checked(layers: nn.Module, name: str) -> int:
    """How many items. Raises ValueError where there is none."""
    if not len(layers):
        raise ValueError(f"{name} must hold layers, got an empty {type(layers).__name__}")
    return len(layers)


def candidates(model: nn.Module) -> list[str]:
    """Paths of lists that look like stacks of layers."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, LISTS) and len(module) and not inside:
            alike = len({type(item) for item in module}) == 1
            if alike and next(module[0].children(), None) is not None:
                found.append(name)
    return found


STATES = ("hidden_states", "x", "src", "tgt", "input", "inputs", "z")  # what layers call the state


@dataclass(eq=False)
class Call:
    """One call of a layer. The state is the first argument (``key`` 0) or the one of the name ``key``.

    ``number``: which call of the pass. ``form``: the type of what the layer gives and what is in it beside the state;
    None for a tensor alone. ``memo``: a state and what came out for it, used once.
    """

    layer: nn.Module
    arguments: tuple
    named: dict[str, Any]
    key: int | str
    number: int
    form: tuple[type, tuple] | None = field(default=None, repr=False)
    memo: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, layer: nn.Module, arguments: tuple, named: dict[str, Any], number: int) -> Call:
        """A call. Raises ValueError where none of its arguments is a state."""
        known = [*inspect.signature(layer.forward).parameters][:1]
        keys = [0] if arguments and isinstance(arguments[0], Tensor) else []
        keys += [name for name in (*STATES, *known) if isinstance(named.get(name), Tensor)]
        if keys:
            call = cls(layer, arguments, named, keys[0], number)
            if call.state.is_nested:
                raise ValueError("the state must not be a nested tensor; nn.TransformerEncoder makes none with "
                                 "enable_nested_tensor=False")
            return call
        raise ValueError(f"layer {number} ({type(layer).__name__}) must be called with the state, a tensor, as its "
                         f"first argument or by one of the names {', '.join(STATES)}")

    @property
    def state(self) -> Tensor:
        """The one that it was made with."""
        return self.arguments[0] if self.key == 0 else self.named[self.key]

    def same(self, other: Call) -> bool:
        """Whether another call has the same layer and arguments but for the state."""
        if self.layer is not other.layer or self.key != other.key or self.named.keys() != other.named.keys():
            return False
        mine = [*self.arguments[self.key == 0:], *(self.named[k] for k in self.named if k != self.key)]
        others = [*other.arguments[self.key == 0:], *(other.named[k] for k in self.named if k != self.key)]
        return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))

    def evaluate(self) -> Any:
        """What the layer gives for the state it was called with; the field's first evaluation there has it, too."""
        output = self.layer(*self.arguments, **self.named)
        if isinstance(output, tuple | list):
            self.form = type(output), tuple(output[1:])
        self.memo = self.state, self.checked(self.state, output)
        return output

    @property
    def has_more(self) -> bool:
        """Whether the layer gave more than the state."""
        return self.form is not None and any(x is not None for x in self.form[1])

    def formed(self, z: Tensor) -> Any:
        """z in the form in which the layer gave a state."""
        return z if self.form is None else self.form[0]((z, *self.form[1]))

    def state_after(self, z: Tensor) -> Tensor:
        """The layer's state for z."""
        if self.memo is not None and z is self.memo[0]:
            (_, y), self.memo = self.memo, None
            return y
        if self.key == 0:
            return self.checked(z, self.layer(z, *self.arguments[1:], **self.named))
        return self.checked(z, self.layer(*self.arguments, **{**self.named, self.key: z}))

    def checked(self, z: Tensor, output: Any) -> Tensor:
        """The state in what the layer gave for z. Raises ValueError where it has another shape, or is no tensor."""
        y = output[0] if isinstance(output, tuple | list) and output else output
        layer = f"layer {self.number} ({type(self.layer).__name__})"
        if not isinstance(y, Tensor):
            raise ValueError(f"{layer} must give a state, a tensor or a tuple that begins with one, got "
                             f"{type(y).__name__}")
        if y.shape != z.shape:
            raise ValueError(f"{layer} must keep the state's shape {tuple(z.shape)}, got {tuple(y.shape)}: these "
                             "layers are no residual stack")
        return y
