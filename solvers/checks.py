"""Arguments and results of solve(), checked at the border."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.base import Solver, SolverError, State, Work, tensors


def is_traced(z: State) -> bool:
    """Inside torch.compile, a functorch transform or a CUDA graph capture, where no value can be read."""
    if torch.compiler.is_compiling():
        return True
    return any([torch._C._functorch.is_functorch_wrapped_tensor(x) or
                (x.is_cuda and torch.cuda.is_current_stream_capturing()) for x in tensors(z)])


def refuse_transforms(x: Tensor, whom: str, instead: str = "torch.autograd") -> None:
    """Raises NotImplementedError within torch.func transforms and forward-mode derivatives of x."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError("neither torch.func transforms nor forward-mode derivatives pass through "
                                  f"{whom}; use {instead}")


def real(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with padding set to 0."""
    return x if mask is None or x.dim() < 2 else x.masked_fill(~mask.expand(x.shape[:-1]).unsqueeze(-1), 0)


def zeroed(z: State, mask: Tensor | None) -> State:
    """A state with padding set to 0."""
    return real(z, mask) if isinstance(z, Tensor) else tuple(real(x, mask) for x in z)


def check_finite(z: State, z0: State, mask: Tensor | None, l: float, h: float, work: Work) -> None:
    """The one host read of a fixed-step solve."""
    if isinstance(z, Tensor) and math.isfinite(abs(z.sum().item())):  # as padding is, too, as a rule
        return
    with torch.no_grad():
        total = sum(real(x, mask).sum() for x in tensors(z))
        if math.isfinite(abs(total.item())) or all(bool(torch.isfinite(real(x, mask)).all()) for x in tensors(z)):
            return
        share = [(~torch.isfinite(real(x, mask))).float().mean().item() for x in tensors(z0)]
    if max(share):
        raise SolverError(f"z0 was not finite ({max(share):.1%} of its entries), so the state is not", l=l, h=h,
                          nfe=work.total, advice="check the input and the embedding")
    raise SolverError("the state has become infinite or NaN", l=l, h=h, nfe=work.total, advice=(
        "h times the largest eigenvalue of f may lie outside the method's stability region, or f has a pole: take "
        "more steps, an adaptive solver, or save_at='steps' on a shorter span to see where it starts"))


def check_state(z0: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of z0."""
    if not isinstance(z0, Tensor) and not (isinstance(z0, tuple) and z0 and all(isinstance(x, Tensor) for x in z0)):
        raise TypeError(f"z0 must be a tensor or a non-empty tuple of tensors, got {type(z0).__name__}")
    for x in tensors(z0):
        if not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"z0 must be floating point, got {x.dtype}")
        if x.numel() == 0:
            raise ValueError(f"z0 must not be empty, got shape {tuple(x.shape)}")
    return tuple(x.dtype for x in tensors(z0))


def check_amounts(solver: Solver, ends: tuple[float, float], n_steps: Any, grid: list[float] | None, rtol: Any,
                  atol: Any, max_nfe: Any) -> None:
    """Steps for a fixed-step solver, tolerances for an adaptive one."""
    for name, value in (("n_steps", n_steps), ("max_nfe", max_nfe)):
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if solver.is_adaptive:
        for name, value in (("n_steps", n_steps), ("grid", grid)):
            if value is not None:
                raise ValueError(f"{name} is for fixed-step solvers; {solver.name!r} chooses its steps from rtol and "
                                 "atol")
        for name, value in (("rtol", rtol), ("atol", atol)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        if rtol == 0 and atol == 0:
            raise ValueError("rtol and atol must not both be 0")
        return
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            raise ValueError(f"{name} is for adaptive solvers; {solver.name!r} takes fixed steps (n_steps or grid)")
    if n_steps is None and grid is None:
        raise ValueError(f"n_steps or grid must be given for the fixed-step solver {solver.name!r}")
    if grid is not None:
        if n_steps is not None and n_steps != len(grid) - 1:
            raise ValueError(f"n_steps = {n_steps} contradicts grid, which has {len(grid) - 1} steps; give one of them")
        if any(abs(x - y) > 1e-12 * max(1.0, abs(y)) for x, y in zip((grid[0], grid[-1]), ends, strict=True)):
            raise ValueError(f"grid must run from span[0] to span[1]; grid has ({grid[0]}, {grid[-1]}), span is {ends}")


def check_gradient(solver: Solver, gradient: Any, params: Any) -> tuple[Tensor, ...] | None:
    """A gradient mode that the solver has; ``params`` as a tuple."""
    allowed = getattr(solver, "gradients", ("backprop", "checkpoint"))
    if gradient not in allowed:
        raise ValueError(f"gradient must be one of {', '.join(allowed)} for solver {solver.name!r}, "
                         f"got {gradient!r}")
    if params is None:
        return None
    if gradient == "backprop":
        raise ValueError('params is for gradient modes that cannot find them by themselves; "backprop" does')
    params = (params,) if isinstance(params, Tensor) else tuple(params)
    for x in params:
        if not isinstance(x, Tensor):
            raise TypeError(f"params must hold tensors, got {type(x).__name__}")
    return params


def check_mask(mask: Tensor | None, z0: State) -> None:
    """Bool, and broadcastable to z without its last axis."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True = real), got {getattr(mask, 'dtype', type(mask).__name__)}")
    for x in tensors(z0):
        if mask.shape == x.shape[:-1]:
            continue
        try:
            fits = torch.broadcast_shapes(mask.shape, x.shape[:-1]) == x.shape[:-1]
        except RuntimeError:
            fits = False
        if x.dim() >= 2 and not fits:
            raise ValueError(f"mask must broadcast to z without its last axis, {tuple(x.shape[:-1])}; "
                             f"got {tuple(mask.shape)}")
