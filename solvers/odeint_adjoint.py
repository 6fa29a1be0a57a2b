"""Drop-in for torchdiffeq's ``odeint_adjoint``: odeint with gradients by the continuous adjoint (Chen et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solvers.base import Solver, State, cast, depth_dtype, tensors
from solvers.checks import check_state
from solvers.odeint import CALLBACKS, DELEGATED, EVENTS, TimeFirst, check_t, odeint, read_method
from solvers.replay import Ambient, Captured, leaves_of


def odeint_adjoint(func: Callable[[Tensor, State], State], y0: State, t: Tensor, *, rtol: Any = 1e-7, atol: Any = 1e-9,
                   method: str | Solver | None = None, options: dict | None = None, event_fn: Callable | None = None,
                   adjoint_rtol: Any = None, adjoint_atol: Any = None, adjoint_method: str | Solver | None = None,
                   adjoint_options: dict | None = None, adjoint_params: Iterable[Tensor] | None = None) -> State:
    """As ``odeint``, but backward solves the adjoint ODE from each point of t to the one before: memory does not grow
    with the steps. The gradient is that of the exact flow, off by the error of the two solves.

    adjoint_rtol, adjoint_atol, adjoint_method, adjoint_options: as those without prefix, which they default to.
        ``adjoint_options["norm"]``: "seminorm" (the gradients of parameters out of the norm; Kidger et al. 2021) or a
        function of the tuple (t, y, adjoint of y, *parameters), each parameter's gradient flat.
    adjoint_params: what func depends on besides y and t. By default it is found: parameters of func and all that one
        evaluation at t[0] reaches, closed over or swapped in, leaves of autograd's graph or not. func need not be a
        module.

    Raises ValueError where an argument is wrong, or a tensor needs a gradient that cannot be got hold of; RuntimeError
    in backward where func depends on a tensor that is not among adjoint_params, and for second derivatives.
    """
    if event_fn is not None:
        raise ValueError(EVENTS)
    if adjoint_options is None and options and adjoint_method not in (None, method):
        raise ValueError("adjoint_options must be given where adjoint_method differs from method and options are given")
    check_state(y0)
    check_t(t)
    given = None if adjoint_params is None else list(adjoint_params)
    if given is not None:
        for x in given:
            if not isinstance(x, Tensor):
                raise TypeError(f"adjoint_params must hold tensors, got {type(x).__name__}")
        given = [x for x in given if x.requires_grad]
    field = TimeFirst(func)
    captured = Captured("odeint_adjoint", given)
    if given is None and torch.is_grad_enabled():
        z = y0 if isinstance(y0, Tensor) else tuple(y0)
        captured.search(field, z, t[0].detach().to(tensors(y0)[0].device, depth_dtype(y0)), [])
    back = dict(rtol=rtol if adjoint_rtol is None else adjoint_rtol,
                atol=atol if adjoint_atol is None else adjoint_atol,
                method=method if adjoint_method is None else adjoint_method,
                options=_backward_options(options, adjoint_options))
    adjoint = _Adjoint(field, y0, captured, back, options)
    outputs = _Solve.apply(adjoint, dict(rtol=rtol, atol=atol, method=method, options=options), t, *tensors(y0),
                           *captured.inputs)
    return outputs[0] if isinstance(y0, Tensor) else outputs


def _backward_options(options: dict | None, adjoint_options: dict | None) -> dict:
    if adjoint_options is not None:
        return dict(adjoint_options)
    return {name: value for name, value in (options or {}).items() if name != "norm"}


class _Solve(torch.autograd.Function):
    """The solve outside autograd; its gradients by the adjoint."""

    @staticmethod
    def forward(ctx: Any, adjoint: _Adjoint, how: dict, t: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        y0 = tuple(x.detach() for x in inputs[: adjoint.count])
        ys = tensors(odeint(adjoint.field.func, y0 if adjoint.is_tuple else y0[0], t.detach(), **how))
        ctx.adjoint = adjoint
        ctx.save_for_backward(t, *ys)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        t, *ys = ctx.saved_tensors
        return None, None, *ctx.adjoint.pull(t, ys, grads, ctx.needs_input_grad[2])


class _Adjoint:
    """Gradients of t, y0 and the captured inputs from those of the states."""

    def __init__(self, field: TimeFirst, y0: State, captured: Captured, how: dict, options: dict | None):
        self.field, self.captured, self.how = field, captured, how
        self.is_tuple, self.count = isinstance(y0, tuple), len(tensors(y0))
        self.dtypes = [x.dtype for x in tensors(y0)]
        self.ambient = Ambient(y0)
        self._set_norm(options)
        for name in CALLBACKS:  # torchdiffeq calls those with this ending during backward
            if hasattr(field.func, f"{name}_adjoint"):
                setattr(self, name, self._viewed(getattr(field.func, f"{name}_adjoint")))

    def pull(self, t: Tensor, ys: Sequence[Tensor], grads: Sequence[Tensor], to_t: bool) -> list[Tensor | None]:
        """The gradients of (t, *y0, *inputs)."""
        inputs, wide = self.captured.inputs, [_wide(x.dtype) for x in ys]
        grads = [g.to(dtype) for g, dtype in zip(grads, wide, strict=True)]
        a = [g[-1] for g in grads]
        gs = [torch.zeros(x.numel(), dtype=_wide(x.dtype), device=x.device) for x in inputs]
        times = torch.zeros_like(t) if to_t else None
        with self.captured.separate():
            for i in range(len(t) - 1, 0, -1):
                if to_t:
                    times[i] = self._along(t[i], ys, i, [g[i] for g in grads])
                state = (*(y[i].to(dtype) for y, dtype in zip(ys, wide, strict=True)), *a, *gs)
                state = [x[1] for x in odeint(self, state, torch.stack([t[i], t[i - 1]]).detach(), **self.how)]
                a, gs = state[self.count : 2 * self.count], state[2 * self.count :]
                if to_t and i == 1:
                    times[0] = -self._along(t[0], ys, 0, a)
                a = [x + g[i - 1] for x, g in zip(a, grads, strict=True)]
        first = [x.to(y.dtype) for x, y in zip(a, ys, strict=True)]
        return [times, *first, *(g.reshape(x.shape).to(x.dtype) for g, x in zip(gs, inputs, strict=True))]

    def __call__(self, t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """d(y, a, g)/dt = (f, -(∂f/∂y)ᵀ a, -(∂f/∂θ)ᵀ a)."""
        z, a, inputs = state[: self.count], state[self.count : 2 * self.count], self.captured.inputs
        leaves, z = leaves_of(self._seen(z))
        with torch.enable_grad(), self.ambient.restored():
            ks = tensors(self.field(z, t))
        pairs = [(k, x.to(k.dtype)) for k, x in zip(ks, a, strict=True) if k.requires_grad]
        pulled: Sequence[Tensor | None] = [None] * (len(leaves) + len(inputs))
        if pairs:
            outputs, cotangents = map(list, zip(*pairs, strict=True))
            self.captured.needed(outputs, leaves)
            pulled = torch.autograd.grad(outputs, [*leaves, *inputs], cotangents, allow_unused=True, retain_graph=True)
        rest = [torch.zeros_like(x) if g is None else -g.reshape(x.shape).to(x.dtype)
                for x, g in zip(state[self.count :], pulled, strict=True)]
        return (*(k.detach().to(x.dtype) for k, x in zip(ks, state, strict=False)), *rest)

    def _seen(self, z: Sequence[Tensor]) -> State:
        """The state as func has it."""
        z = cast(tuple(z), self.dtypes)
        return z if self.is_tuple else z[0]

    def _along(self, t: Tensor, ys: Sequence[Tensor], i: int, grads: Sequence[Tensor]) -> Tensor:
        """How the loss changes as the state moves along the flow at t[i]."""
        with self.ambient.restored():
            z = self._seen([y[i] for y in ys])
            ks = tensors(self.field(z, t.detach().to(depth_dtype(z))))
        return sum((k.conj() * g).sum().real if k.is_complex() else (k * g).sum()
                   for k, g in zip(ks, grads, strict=True)).to(t.dtype)

    def _set_norm(self, options: dict | None) -> None:
        """Give an adaptive backward method the norm that was asked for."""
        how = self.how["options"]
        method = self.how["method"] or "dopri5"
        adaptive = not (isinstance(method, str) and method in DELEGATED) and read_method(method).is_adaptive
        norm, state_norm = how.get("norm"), (options or {}).get("norm")
        if not adaptive or (norm is None and state_norm is None):
            return
        state_norm = state_norm or _row_norm
        if callable(norm):
            how["norm"] = self._viewed_norm(norm)
        elif norm in (None, "seminorm"):
            how["norm"] = self._mixed_norm(state_norm, norm is None)
        else:
            raise ValueError(f'adjoint_options["norm"] must be "seminorm" or callable, got {norm!r}')

    def _mixed_norm(self, state_norm: Callable, with_parameters: bool) -> Callable:
        def norm(x: tuple[Tensor, ...]) -> Tensor:
            states = [x[: self.count], x[self.count : 2 * self.count]]
            norms = [state_norm(z if self.is_tuple else z[0]) for z in states]
            if with_parameters:
                norms += [g.abs().square().mean().sqrt() for g in x[2 * self.count :]]
            return torch.stack([torch.as_tensor(value).double() for value in norms]).amax()

        return norm

    def _viewed_norm(self, norm: Callable) -> Callable:
        return lambda x: norm((x[0].abs().new_zeros(()), *x))

    def _viewed(self, callback: Callable) -> Callable:
        return lambda t, x, dt: callback(t, (x[0].abs().new_zeros(()), *x), dt)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def _row_norm(z: State) -> Tensor:
    """Maximum over rows of the root mean square over a row."""
    rows = [x.abs().square().flatten(1).mean(1) if x.dim() > 1 else x.abs().square().mean() for x in tensors(z)]
    return torch.stack([row.amax() for row in rows]).amax().sqrt()
