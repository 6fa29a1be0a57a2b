"""The derivative of a root of y = g(y) by the implicit function theorem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.krylov import gmres
from solvers.nonlinear import Count, Map

RESTARTS = 20  # of GMRES, which no outer iteration starts again here


def differentiable_root(g: Map, y: Tensor, *, orders: int, tol: float, count: Count,
                        fail: Callable[[float], Exception]) -> Tensor:
    """The root y of y = g(y) with its derivative in everything that g closes over, by the implicit function theorem.

    Each recorded correction y + M^-1 (g(y) - y), M = I - ∂g/∂y held constant, has the value y and makes one more
    order of the derivative exact; ``orders`` (1 or 2) of them are recorded, at one call of g each. M^-T is applied in
    backward by GMRES to the relative residual ``tol``; ``count`` is called for each product with ∂g/∂y, and ``fail``
    (given the residual left) makes the exception where GMRES does not converge.
    """
    leaf = y.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(_forget)
    value = g(leaf)
    inverse = _Inverse(value, leaf, orders, tol, count, fail)
    root = _Correction.apply(value, leaf, inverse, True)
    for _ in range(orders - 1):
        root = _Correction.apply(g(root), root, inverse, False)
    return root


def _forget(leaf: Tensor) -> None:
    leaf.grad = None


@dataclass(frozen=True, eq=False)
class _Inverse:
    """M^-1 and M^-T for M = I - ∂g/∂y, from the recorded graph of value = g(leaf)."""

    value: Tensor
    leaf: Tensor
    orders: int
    tol: float
    count: Count
    fail: Callable[[float], Exception]

    def solve(self, b: Tensor, transposed: bool) -> Tensor:
        """M^-T b where transposed, else M^-1 b; NaN where b is not finite, as autograd has it."""
        size = b.abs().max().item()
        if size == 0 or not math.isfinite(size):
            return torch.full_like(b, 0.0 if size == 0 else math.nan)
        product = self._transposed if transposed else self._product
        with torch.no_grad():
            x, left = gmres(lambda v: v - product(v), b / size, tol=self.tol, restarts=RESTARTS)
        if not left <= self.tol:
            raise self.fail(left)
        return x * size

    def _transposed(self, v: Tensor) -> Tensor:
        self.count()
        return torch.autograd.grad(self.value, self.leaf, v, retain_graph=True, materialize_grads=True)[0]

    def _product(self, v: Tensor) -> Tensor:
        """J v as the derivative of u -> J^T u: the recorded graph will do, f is not called again."""
        self.count()
        with torch.enable_grad():
            u = torch.zeros_like(v, requires_grad=True)
            (image,) = torch.autograd.grad(self.value, self.leaf, u, create_graph=True, materialize_grads=True)
        if not image.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(image, u, v, retain_graph=True)[0]

    def check(self, derivative: int) -> None:
        """Refuse what would be incomplete: called where a further derivative of this one is being prepared."""
        if torch.is_grad_enabled() and derivative >= self.orders:
            raise RuntimeError(
                'gradient="implicit" gives first derivatives only; take gradient="backprop" for second ones'
                if self.orders == 1 else "implicit solvers have first and second derivatives, not third ones")


class _Correction(torch.autograd.Function):
    """y + M^-1 (value - y), whose value is y since value = g(y)."""

    @staticmethod
    def forward(ctx, value: Tensor, y: Tensor, inverse: _Inverse, first: bool) -> Tensor:
        ctx.inverse, ctx.first = inverse, first
        ctx.save_for_backward(*(() if first else (value, y)))
        return y.detach().clone()

    @staticmethod
    def backward(ctx, v: Tensor):
        ctx.inverse.check(1)
        if torch.is_grad_enabled():
            w = _Solve.apply(v, ctx.inverse, True, 2)
            return w, None if ctx.first else v - w, None, None
        w = ctx.inverse.solve(v, True)
        if ctx.first:
            return w, None, None, None
        # v - w = -J^T w: formed as autograd is about to form J^T w, so that the two cancel and the correction before,
        # which only second derivatives need, receives zero.
        value, y = ctx.saved_tensors
        return w, -torch.autograd.grad(value, y, w, retain_graph=True, materialize_grads=True)[0], None, None


class _Solve(torch.autograd.Function):
    """M^-T b or M^-1 b as a linear map of b."""

    @staticmethod
    def forward(ctx, b: Tensor, inverse: _Inverse, transposed: bool, derivative: int) -> Tensor:
        ctx.inverse, ctx.transposed, ctx.derivative = inverse, transposed, derivative
        return inverse.solve(b, transposed)

    @staticmethod
    def backward(ctx, v: Tensor):
        ctx.inverse.check(ctx.derivative)
        return ctx.inverse.solve(v, not ctx.transposed), None, None, None
