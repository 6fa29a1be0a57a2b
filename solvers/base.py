"""What every integrator is made of: the vector field, the step, the evaluator that counts, the error.

A vector field is any callable ``f(z, l)`` that returns the INCREMENT dz/dl, shaped like the state ``z``.
It may carry four attributes, all optional:

* ``parts``: a sequence of fields whose sum is f (used by splitting methods);
* ``pieces``: ``[(l0, l1, f_k), ...]``, increasing and adjoining: f is f_k between l0 and l1;
* ``breakpoints``: depths where f jumps;
* ``select(rows)``: gives the field restricted to some rows of the batch (for the per-sample engine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

State = Tensor | tuple[Tensor, ...]
VectorField = Callable[[State, Tensor], State]

HALF = (torch.float16, torch.bfloat16)


class SolverError(RuntimeError):
    """A numerical failure: what happened, at which depth ``l``, with which step ``h``, after ``nfe`` evaluations."""

    def __init__(self, what: str, *, l: float, h: float, nfe: float, advice: str):
        super().__init__(f"{what} at l = {l:.6g} (h = {h:.3g}, NFE = {nfe:g}): {advice}")
        self.l, self.h, self.nfe = l, h, nfe

    def __reduce__(self) -> tuple:
        """Between processes it stays what it is."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[SolverError], args: tuple, attributes: dict[str, Any]) -> SolverError:
    error = kind.__new__(kind, *args)
    error.args, error.__dict__ = args, dict(attributes)
    return error


class Step(NamedTuple):
    """One step from depth ``l`` to ``l + h``.

    ``at[i]`` is the depth of the solver's node i (``l + nodes[i] * h``) as a 0-d tensor on the state's device.
    ``l`` and ``h`` are Python floats, so that no step waits for the device.
    """

    l: float
    h: float
    at: tuple[Tensor, ...]


class Solver(Protocol):
    """A fixed-step method: a frozen object that holds coefficients; all state is passed.

    ``nodes`` are the depths within a step, as fractions of h, at which it evaluates f.
    ``init`` gives the memory with which a piece begins; a multistep method asked to do so hands it over unchanged.
    ``step`` returns the next state and the next memory. Optional: ``gradients``, the allowed gradient modes (backprop
    and checkpoint unless said); ``nfe(n_steps)``, the evaluations of f in n_steps steps of one piece, where they are
    known beforehand; ``remembers_states``, True where earlier states enter a step.
    """

    name: str
    order: int
    n_stages: int
    embedded_order: int | None
    is_implicit: bool
    is_adaptive: bool
    is_reversible: bool
    nodes: tuple[float, ...]

    def init(self, memory: Any) -> Any: ...

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]: ...


class Work:
    """Counts evaluations of the field; a part of m counts 1/m. Shared by all evaluators of one solve."""

    __slots__ = ("limit", "nfe")

    def __init__(self, limit: float = float("inf")):
        self.nfe = 0.0
        self.limit = limit

    @property
    def total(self) -> int | float:
        """Evaluations so far: an int where whole."""
        rounded = round(self.nfe, 6)
        return int(rounded) if rounded == int(rounded) else rounded


class Evaluator:
    """The field as solvers call it: counted, and checked to return what the state looks like.

    ``dtypes`` is set where the state is carried in float32 for a half-precision field: z is then cast to it on the
    way in, and torch's type promotion brings the increment back.
    """

    __slots__ = ("_parts", "dtypes", "f", "weight", "work")

    def __init__(self, f: VectorField, work: Work, dtypes: tuple[torch.dtype, ...] | None = None, weight: float = 1.0):
        self.f, self.work, self.dtypes, self.weight = f, work, dtypes, weight
        self._parts: tuple[Evaluator, ...] | None = None

    def __call__(self, z: State, l: Tensor) -> State:
        work = self.work
        work.nfe += self.weight
        if work.nfe > work.limit + 1e-6:
            raise SolverError(
                f"the solve needs more than max_nfe = {work.limit:g} evaluations", l=float(l), h=float("nan"),
                nfe=work.total - self.weight, advice="raise max_nfe, take fewer steps, or loosen rtol and atol")
        k = self.f(z, l) if self.dtypes is None else self.f(cast(z, self.dtypes), l)
        if isinstance(z, Tensor):
            try:
                fits = k.shape == z.shape
            except AttributeError:
                fits = False
            if not fits:
                raise_shape(z, k)
            if k.dtype is not z.dtype:
                k = fit(k, z)
        elif not isinstance(k, tuple) or [getattr(x, "shape", None) for x in k] != [x.shape for x in z]:
            raise_shape(z, k)
        else:
            k = tuple(fit(x, y) for x, y in zip(k, z, strict=True))
        return k

    @property
    def parts(self) -> tuple[Evaluator, ...]:
        """Evaluators of the field's parts, each counting 1/m; the field itself where it has none."""
        if self._parts is None:
            parts = getattr(self.f, "parts", None)
            self._parts = tuple([Evaluator(part, self.work, self.dtypes, self.weight / len(parts))
                                 for part in parts]) if parts else (self,)
        return self._parts


def fit(k: Tensor, z: Tensor) -> Tensor:
    """An increment that leaves z its dtype: wider ones are cast; half precision is left to type promotion."""
    if k.dtype is z.dtype or k.dtype in HALF:
        return k
    if k.is_complex() and not z.is_complex():
        raise TypeError(f"f must not return a complex increment ({k.dtype}) for a real state ({z.dtype})")
    return k.to(z.dtype)


def raise_shape(z: State, k: Any) -> None:
    """Refuse an increment that does not look like the state (others would broadcast it)."""
    def shapes(x: Any) -> Any:
        if isinstance(x, Tensor):
            return tuple(x.shape)
        return f"a {type(x).__name__} of {[shapes(y) for y in x]}" if isinstance(x, list | tuple) else type(x).__name__

    error = ValueError if isinstance(k, Tensor | tuple) else TypeError
    raise error(f"f must return an increment shaped like the state: z is {shapes(z)}, f(z, l) is {shapes(k)}")


def cast(z: State, dtypes: Sequence[torch.dtype]) -> State:
    """z with each tensor in its dtype."""
    if isinstance(z, Tensor):
        return z.to(dtypes[0])
    return tuple(x.to(dtype) for x, dtype in zip(z, dtypes, strict=True))


def add(z: State, alpha: float, k: State) -> State:
    """z + alpha k: one fused operation a tensor; alpha a Python float, so that nothing is sent to the device."""
    if isinstance(z, Tensor):
        return torch.add(z, k, alpha=alpha)
    return tuple(torch.add(x, y, alpha=alpha) for x, y in zip(z, k, strict=True))


def accumulate(z: State, h: float, terms: Sequence[tuple[int, float]], ks: Sequence[State]) -> State:
    """z + h Σ w k_i over the terms (i, w): one new tensor, to which all but the first term are added in place."""
    if isinstance(z, tuple):
        return tuple(accumulate(x, h, terms, column) for x, *column in zip(z, *ks, strict=True))
    if len(terms) > 1 and in_functorch():  # whose in-place operations do not broadcast
        for i, w in terms:
            z = torch.add(z, ks[i], alpha=h * w)
        return z
    y = None
    for i, w in terms:
        y = torch.add(z, ks[i], alpha=h * w) if y is None else y.add_(ks[i], alpha=h * w)
    return z if y is None else y


def in_functorch() -> bool:
    """Inside a torch.func transform."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def combine(z: State, h: float, weights: Sequence[float], ks: Sequence[State]) -> State:
    """z + h Σ w_i k_i, skipping zero weights."""
    return accumulate(z, h, [(i, w) for i, w in enumerate(weights) if w], ks)


def tensors(z: State) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return (z,) if isinstance(z, Tensor) else z


def depth_dtype(z: State) -> torch.dtype:
    """The dtype of l for a state: float32 where z is half precision, else z's (the real one of a complex z)."""
    dtype = torch.float32
    for x in tensors(z):
        real = x.dtype.to_real() if x.dtype.is_complex else x.dtype
        dtype = torch.promote_types(dtype, real)
    return dtype
