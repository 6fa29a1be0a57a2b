"""A step as one compiled function: h and the depths go in as tensors, so that one graph holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.base import Evaluator, Solver, Step, raise_shape
from solvers.explicit import ExplicitRungeKutta
from solvers.splitting import Splitting


def is_followed() -> bool:
    """Whether what is evaluated is traced, or differentiated by what cannot look into a compiled function: torch.func
    and forward mode."""
    return (torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
            or forward_ad._current_level >= 0)


def has_one_form(solver: Solver) -> bool:
    """Whether all steps of the solver are the same operations, and none remembers the one before: explicit Runge-Kutta
    methods, and splitting methods made of them."""
    return isinstance(solver.base if isinstance(solver, Splitting) else solver, ExplicitRungeKutta)


def advance(solver: Solver, field: Any, z: Tensor, h: Tensor, at: Sequence[Tensor],
            dtype: torch.dtype | None) -> Tensor:
    """The state a step of h later; ``at``: the depths of the solver's nodes, ``dtype``: in which the field sees z.

    h f is integrated over a step of 1: multiplied by a tensor, not by a number for which the graph would be made.
    """
    return solver.step(_Scaled(field, h, dtype), z, Step(0.0, 1.0, tuple(at)), solver.init(None))[0]


class _Scaled:
    """h f(z, l) as a solver calls it."""

    def __init__(self, field: Any, h: Tensor, dtype: torch.dtype | None):
        self.field, self.h, self.dtype = field, h, dtype

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        k = self.field(z if self.dtype is None else z.to(self.dtype), l)
        if k.shape != z.shape:
            raise_shape(z, k)
        return k.to(z.dtype) * self.h

    @property
    def parts(self) -> tuple[_Scaled, ...]:
        """The parts of the field, or the field itself."""
        parts = getattr(self.field, "parts", None)
        return tuple(_Scaled(part, self.h, self.dtype) for part in parts) if parts else (self,)


class CompiledSteps:
    """A solver (see ``has_one_form``) whose step over fields with ``ready`` is a compiled function; others it takes as
    it would.

    ``compiled(function, z, *kind)``: the function compiled. ``field.ready(z)`` gives (what to trace, its kind): a field
    that holds as tensors all in which it differs from others of its kind.
    """

    def __init__(self, solver: Solver, compiled: Callable[..., Callable]):
        self.solver, self.compiled = solver, compiled
        self.sizes: dict[float, Tensor] = {}
        self.made: dict[tuple, tuple[Callable, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def step(self, f: Evaluator, z: Tensor, step: Step, memory: Any) -> tuple[Tensor, Any]:
        """The state at step.l + step.h."""
        if is_followed() or not hasattr(f.f, "ready"):
            return self.solver.step(f, z, step, memory)
        field, kind = f.f.ready(z)
        if kind not in self.made:
            self.made[kind] = self.compiled(advance, z, self.solver.name, *kind), self._evaluations(field)
        if step.h not in self.sizes:
            self.sizes[step.h] = z.new_full((), step.h)
        run, evaluations = self.made[kind]
        z = run(self.solver, field, z, self.sizes[step.h], step.at, f.dtypes and f.dtypes[0])
        f.work.nfe += f.weight * evaluations
        return z, None

    def _evaluations(self, field: Any) -> float:
        """Evaluations of the whole field in a step."""
        n_parts = len(getattr(field, "parts", None) or (field,))
        return self.solver.nfe(1, n_parts) if isinstance(self.solver, Splitting) else self.solver.nfe(1)
