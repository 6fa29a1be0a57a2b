"""What a solve outside autograd must know to be done again: what f depends on, random numbers, the autocast state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from solvers.base import State, VectorField, tensors
from solvers.grid import Rescaled

PLAIN = (type(None), bool, int, float, str)


class Plain:
    """A base for objects without tensors that a solver's memory may hold."""

    __slots__ = ()


def parts_of(x: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts: a solver's memory. Raises TypeError for other objects."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple | list | dict):
        return [y for item in (x.values() if isinstance(x, dict) else x) for y in parts_of(item)]
    if not isinstance(x, (*PLAIN, Plain)):
        raise TypeError("a solver's memory may hold tensors and numbers in tuples, lists and dicts, and objects that "
                        f"derive from Plain; got {type(x).__name__}")
    return []


def rebuilt(x: Any, new: Iterator[Tensor]) -> Any:
    """x with its tensors replaced, in the order of ``parts_of``."""
    if isinstance(x, Tensor):
        return next(new)
    if isinstance(x, tuple | list):
        items = [rebuilt(item, new) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return {key: rebuilt(item, new) for key, item in x.items()}
    return x


def detached(k: Any) -> Any:
    """An increment without its graph; anything that is none as it is."""
    if isinstance(k, tuple):
        return tuple(map(detached, k))
    return k.detach() if isinstance(k, Tensor) else k


def leaves_of(x: Any) -> tuple[list[Tensor], Any]:
    """Fresh autograd leaves for the tensors of x, and x made of them."""
    leaves = [y.detach().requires_grad_(y.is_floating_point() or y.is_complex()) for y in parts_of(x)]
    return leaves, rebuilt(x, iter(leaves))


class Ambient:
    """The autocast state under which a solve was run.

    Weights cast under ``no_grad`` must not be found in autocast's cache by evaluations that need gradients, so the
    cache is left alone.
    """

    def __init__(self, z: State):
        kinds = {"cpu", tensors(z)[0].device.type}
        self.kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Evaluate f as in the solve."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.kinds:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class Tape:
    """The state of the random number generators before each evaluation of f; nothing where f draws no numbers.

    A state is kept once however many evaluations share it, so memory grows with the evaluations only where each draws
    anew (5 kB on a CPU, 16 bytes on a GPU).
    """

    def __init__(self, z: State):
        self.devices = sorted({str(x.device) for x in tensors(z) if x.device.type != "cpu"})
        self.marks: list[tuple[Tensor, ...]] = []
        self.random = False
        self._queue: Iterator[int] | None = None

    def visit(self) -> None:
        """Before an evaluation: remember the generators, or set them as they were."""
        if self._queue is None:
            self.marks.append(self._now())
        elif self.random:
            evaluation = next(self._queue, None)
            if evaluation is None:
                raise RuntimeError("a step that is done again evaluates f more often than it did, so its random "
                                   "numbers are unknown")
            self._set(self.marks[evaluation])

    def finish(self) -> None:
        """After the solve: find out whether random numbers were drawn."""
        if self.marks:
            self.random = self._now() is not self.marks[0]

    @contextmanager
    def replay(self, evaluations: Iterable[int]) -> Iterator[None]:
        """What is evaluated inside draws the numbers of these evaluations, in this order."""
        self._queue = iter(evaluations)
        try:
            yield
        finally:
            self._queue = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the generators as they were found."""
        before = self._now() if self.random else ()
        try:
            yield
        finally:
            if before:
                self._set(before)

    def redrawn(self, start: int, stop: int) -> bool:
        """Whether numbers were drawn after the first of the evaluations start ... stop - 1."""
        later = [*self.marks[start + 1 : stop], self.marks[stop] if stop < len(self.marks) else self._now()]
        return any(mark is not later[0] for mark in later)

    def _now(self) -> tuple[Tensor, ...]:
        now = (torch.get_rng_state(),
               *(torch.get_device_module(device).get_rng_state(device) for device in self.devices))
        last = self.marks[-1] if self.marks else None
        return last if last and all(map(torch.equal, last, now)) else now

    def _set(self, mark: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(mark[0])
        for device, state in zip(self.devices, mark[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


class _Watch(TorchFunctionMode):
    """Collects tensors older than ``marker`` that autograd follows through and torch functions are given."""

    def __init__(self, marker: int):
        super().__init__()
        self.marker, self.seen = marker, []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._look((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _look(self, x: Any) -> None:
        if isinstance(x, Tensor):
            if x.grad_fn is not None and x.grad_fn._sequence_nr() < self.marker:
                self.seen.append(x)
        elif isinstance(x, tuple | list | dict):
            for item in x.values() if isinstance(x, dict) else x:
                self._look(item)


def _unseen() -> AbstractContextManager:
    """A graph that is only looked at: hooks that count or move what is saved for backward are left out, where set."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None)(True)
    return nullcontext() if hooks is None else saved_tensors_hooks(lambda x: x, lambda x: x)


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Compiled functions run as they were written: what they are given can be watched, nothing is compiled for it."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Captured:
    """The tensors that f depends on besides its arguments: what autograd reaches from one evaluation of each piece.

    Parameters of modules that f holds are among the inputs too, since f may come to use them only later (a router that
    picks another expert). ``given``: the user's ``params``, which are then taken instead.

    Raises ValueError: a tensor that needs a gradient but cannot be got hold of, or that has a backward hook.
    """

    def __init__(self, mode: str, given: Sequence[Tensor] | None):
        self.mode, self.given = mode, given is not None
        self.inputs: list[Tensor] = []
        self._index: dict[tuple, int] = {}
        self._nodes: list[Any] = []  # kept alive, so that the id of a node stays its own
        for tensor in given or ():
            self._check(tensor)
            self.add(tensor)

    def add(self, tensor: Tensor) -> int:
        """The index of a tensor among the inputs, which it joins where it is new."""
        key = (id(tensor),) if tensor.grad_fn is None else (id(tensor.grad_fn), tensor.output_nr)
        if key not in self._index:
            self._index[key] = len(self.inputs)
            self.inputs.append(tensor)
            self._nodes.append(tensor.grad_fn)
        return self._index[key]

    def search(self, f: VectorField, z: State, l: Tensor, found: list[int]) -> Any:
        """f(z, l), with what it depends on added to the inputs and to ``found``."""
        leaves, z = leaves_of(z)
        with torch.enable_grad():
            marker = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # nodes are numbered as made
            with _unseen(), _not_compiled(), _Watch(marker) as watch:
                k = f(z, l)
        outputs = [x for x in (k if isinstance(k, tuple) else (k,)) if isinstance(x, Tensor)]
        seen = {(id(x.grad_fn), x.output_nr): x for x in (*watch.seen, *outputs) if x.grad_fn is not None}
        for node, number in self._frontier(outputs, leaves, marker):
            tensor = node.variable if _is_leaf(node) else seen.get((id(node), number))
            if tensor is None:
                raise ValueError(f"gradient={self.mode!r} cannot reach a tensor that f depends on, made by "
                                 f"{node.name()}: name it in params=(...), or make it inside f")
            self._check(tensor)
            if (index := self.add(tensor)) not in found:
                found.append(index)
        for parameter in _parameters(f):
            self.add(parameter)
        return k

    def needed(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int]:
        """The inputs that these outputs of f depend on. Raises RuntimeError for a tensor that is not among them."""
        found = []
        for node, number in self._frontier(outputs, leaves, None):
            key = (id(node.variable),) if _is_leaf(node) else (id(node), number)
            if key not in self._index and _is_inner(node.variable):
                continue
            if key not in self._index:
                raise RuntimeError(
                    f"gradient={self.mode!r}: f depends on {_name(node.variable)}, which is not among "
                    f"{'params' if self.given else 'what its first evaluation depended on'}, so its gradient would be "
                    "lost; name all that f depends on in params=(...)")
            found.append(self._index[key])
            self._check(self.inputs[found[-1]])
        return sorted(set(found))

    def _check(self, tensor: Tensor) -> None:
        if tensor._backward_hooks:
            raise ValueError(f"gradient={self.mode!r} would call the hook of {_name(tensor)} once an evaluation: use "
                             "register_post_accumulate_grad_hook, or another gradient mode")

    def _frontier(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], marker: int | None) -> list[tuple]:
        """Where the graph of the outputs ends: known inputs, unknown leaves, and nodes older than ``marker``."""
        own = set(map(id, leaves))
        stack = [(x.grad_fn, x.output_nr) for x in outputs if x.grad_fn is not None]
        if direct := [x for x in outputs if x.grad_fn is None and x.requires_grad and id(x) not in own]:
            stack += [torch.autograd.graph.get_gradient_edge(x)[:2] for x in direct]
        visited, ends, nodes = set(), {}, []
        while stack:
            node, number = stack.pop()
            if _is_leaf(node):
                if id(node.variable) not in own:
                    ends[id(node), 0] = (node, 0)
            elif (id(node), number) in self._index or (marker is not None and node._sequence_nr() < marker):
                ends[id(node), number] = (node, number)
            elif id(node) not in visited:
                visited.add(id(node))
                stack += [edge for edge in node.next_functions if edge[0] is not None]
            nodes.append(node)  # alive until the walk is over
        return list(ends.values())

    @contextmanager
    def separate(self) -> Iterator[None]:
        """Where one input was made from another, keep the gradient of the first from reaching the second through it.

        autograd carries it on outside, once.
        """
        handles = [x.grad_fn.register_prehook(partial(_without, number=x.output_nr))
                   for x in self.inputs if x.grad_fn is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _without(grads: tuple[Tensor | None, ...], number: int) -> tuple[Tensor | None, ...]:
    return tuple(torch.zeros_like(g) if i == number and g is not None else g for i, g in enumerate(grads))


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_inner(leaf: Tensor) -> bool:
    """Made within a step: the unknown of an implicit stage, which takes no gradient (see solvers.nonlinear)."""
    return bool(leaf._post_accumulate_grad_hooks) and not isinstance(leaf, nn.Parameter)


def _name(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _parameters(f: Any) -> Iterator[nn.Parameter]:
    """Parameters, those that need a gradient, of the modules that f is, closes over or holds."""
    visited: set[int] = set()
    stack = [(f, 0)]
    while stack:
        x, depth = stack.pop()
        if id(x) in visited or depth > 6:
            continue
        visited.add(id(x))
        if isinstance(x, nn.Module):
            yield from (p for p in x.parameters() if p.requires_grad)
        elif isinstance(x, FunctionType):
            cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
            stack += [(y, depth + 1) for y in (*cells, *(x.__defaults__ or ()))]
        elif isinstance(x, MethodType):
            stack += [(x.__self__, depth + 1)]
        elif isinstance(x, partial):
            stack += [(y, depth + 1) for y in (x.func, *x.args, *x.keywords.values())]
        elif isinstance(x, tuple | list | dict):
            stack += [(y, depth + 1) for y in (x.values() if isinstance(x, dict) else x)]
        elif callable(x) and not isinstance(x, type):
            stack += [(y, depth + 1) for y in getattr(x, "__dict__", {}).values()]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class Recorded:
    """A field as the one it wraps, with its random numbers on a tape and what it depends on in ``found``.

    ``first``: the number of its first evaluation.
    """

    def __init__(self, f: VectorField, tape: Tape, captured: Captured, found: list[int]):
        self.f, self.tape, self.captured, self.found = f, tape, captured, found
        self.first: int | None = None
        self._searched = captured.given

    def __call__(self, z: State, l: Tensor) -> State:
        if self.first is None:
            self.first = len(self.tape.marks)
        self.tape.visit()
        if self._searched:
            k = self.f(z, l)
        else:
            self._searched = True
            k = self.captured.search(self.f, z, l, self.found)
        return k if torch.is_grad_enabled() else detached(k)  # f may have made a graph of its own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        f = self.__dict__["f"]
        return getattr(f.f if isinstance(f, Rescaled) else f, name)

    @property
    def parts(self) -> tuple[Recorded, ...] | None:
        """The parts of f, recorded."""
        parts = getattr(self.f, "parts", None)
        return tuple(Recorded(part, self.tape, self.captured, self.found) for part in parts) if parts else None
