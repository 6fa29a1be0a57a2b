"""Solving y = g(y) for a real tensor y: fixed-point, Anderson and matrix-free Newton iterations.

Every method is called as ``method(g, y0, norm=, tol=, max_iterations=, count=)``. ``norm(change, y)`` is the relative
size of a change of y as a Python float; ``count()`` is called for each product with ∂g/∂y that does not call g.
They run under torch.no_grad(): solvers.root attaches the derivative.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.krylov import KRYLOV_DIM, gmres

Map = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor, Tensor], float]
Count = Callable[[], None]

TINY = 1e-2  # part of tol below which a residual alone ends Newton's iteration


def _uncounted() -> None:
    """Nobody counts."""


class Root(NamedTuple):
    """What an iteration arrives at. ``error``: the relative error it expects ``y`` to have, at most."""

    y: Tensor
    error: float
    n_iterations: int
    converged: bool


class Nonlinear(Protocol):
    """A way to solve y = g(y)."""

    name: str

    def __call__(self, g: Map, y: Tensor, *, norm: Norm, tol: float, max_iterations: int,
                 count: Count = _uncounted) -> Root: ...


def check_count(name: str, value: int) -> None:
    """Refuse what is not a positive int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_fraction(name: str, value: float) -> None:
    """Refuse what does not lie between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number between 0 and 1, got {value!r}")
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")


@dataclass(frozen=True)
class FixedPoint:
    """y <- g(y), which converges where g contracts: for a stage, where h times the Lipschitz constant of f is small.

    The error is estimated from the change and its rate θ: max(1, θ / (1 - θ)) |change| (Hairer & Wanner 1996, IV.8).
    """

    name: ClassVar[str] = "fixed_point"

    def __call__(self, g: Map, y: Tensor, *, norm: Norm, tol: float, max_iterations: int,
                 count: Count = _uncounted) -> Root:
        """The fixed point reached from y."""
        before = error = math.inf
        for i in range(1, max_iterations + 1):
            new = g(y)
            change, y = norm(new - y, new), new
            error = _expected(change, before)
            if error <= tol or not math.isfinite(change):
                return Root(y, error, i, error <= tol)
            before = change
        return Root(y, error, max_iterations, False)


def _expected(change: float, before: float) -> float:
    """The error left after a change, from its rate; a first change is taken at its word."""
    if change == 0 or before == math.inf:
        return change
    rate = change / before
    return change * max(1.0, rate / (1 - rate)) if rate < 1 else math.inf


@dataclass(frozen=True)
class Anderson:
    """Fixed-point iteration mixed over the last ``window`` changes so that the residual is least (Walker & Ni 2011).

    Oldest columns are dropped while the least-squares problem is ill-conditioned. On a linear g this is GMRES in
    disguise, so it converges on some problems where plain iteration does not; stiff ones still need Newton.
    """

    window: int = 5
    name: ClassVar[str] = "anderson"

    def __post_init__(self) -> None:
        check_count("window", self.window)

    def __call__(self, g: Map, y: Tensor, *, norm: Norm, tol: float, max_iterations: int,
                 count: Count = _uncounted) -> Root:
        """The fixed point reached from y."""
        keep = min(self.window, y.numel()) + 1
        limit = 0.1 * torch.finfo(y.dtype).eps ** -0.5
        values: list[Tensor] = []
        residuals: list[Tensor] = []
        error = math.inf
        for i in range(1, max_iterations + 1):
            value = g(y)
            residual = value - y
            error = norm(residual, value)
            if error <= tol or not math.isfinite(error):
                return Root(value, error, i, error <= tol)
            values, residuals = [*values, value][-keep:], [*residuals, residual][-keep:]
            y = self._mix(values, residuals, limit)
        return Root(y, error, max_iterations, False)

    def _mix(self, values: list[Tensor], residuals: list[Tensor], limit: float) -> Tensor:
        """The combination of g(y_i), weights summing to 1, whose combined residual is least."""
        new = values[-1]
        while len(values) > 1:
            columns = [(a - b).flatten() for a, b in zip(residuals[1:], residuals, strict=False)]
            q, r = torch.linalg.qr(torch.stack(columns, 1))
            size = torch.linalg.svdvals(r).tolist()
            if size[-1] * limit > size[0]:
                weights = torch.linalg.solve_triangular(r, (q.T @ residuals[-1].flatten())[:, None], upper=True)
                changes = zip(weights.flatten().tolist(), values[1:], values, strict=False)
                return new - sum(w * (a - b) for w, a, b in changes)
            values, residuals = values[1:], residuals[1:]
        return new


@dataclass(frozen=True)
class NewtonKrylov:
    """Newton's iteration on y - g(y) = 0, its systems solved by GMRES from products J v alone (Knoll & Keyes 2004).

    ``products``: how J v is formed. "reverse": from the graph of one call, differentiated twice; it calls g no more.
    "forward": by forward-mode derivatives, a call of g each; nothing is kept, but torch is slow at it where g is small.
    "difference": by difference quotients, a call of g each, for a g that has neither. ``linear_tol``: relative residual
    at which GMRES stops at first, later the square of the rate of convergence (Eisenstat & Walker 1996);
    ``krylov_dim``: products a Newton iteration may spend. A step that does not lower the residual is halved, at most
    five times.
    """

    products: str = "reverse"
    linear_tol: float = 1e-3
    krylov_dim: int = KRYLOV_DIM
    name: ClassVar[str] = "newton_krylov"

    def __post_init__(self) -> None:
        if self.products not in PRODUCTS:
            raise ValueError(f"products must be one of {', '.join(PRODUCTS)}, got {self.products!r}")
        check_fraction("linear_tol", self.linear_tol)
        check_count("krylov_dim", self.krylov_dim)

    def __call__(self, g: Map, y: Tensor, *, norm: Norm, tol: float, max_iterations: int,
                 count: Count = _uncounted) -> Root:
        """The root reached from y."""
        if torch.is_inference_mode_enabled() and self.products != "difference":
            raise ValueError("torch.inference_mode() knows no derivatives, which newton_krylov needs; use "
                             'torch.no_grad(), or nonlinear=NewtonKrylov(products="difference")')
        linearised, error, forcing = PRODUCTS[self.products], math.inf, self.linear_tol
        value, product = linearised(g, y, count)
        residual = value - y
        for i in range(1, max_iterations + 1):
            delta, left = gmres(lambda v, product=product: v - product(v), residual, tol=forcing, dim=self.krylov_dim)
            new = y + delta
            # A small step proves little where the linear residual is large: an error may hide in its soft directions.
            error = max(norm(delta, new), norm(left * residual, new) if left <= 1 else math.inf)
            if error <= tol or not math.isfinite(error):
                return Root(new, error, i, error <= tol)
            before, fraction, y = residual.norm().item(), 1.0, new
            value, product = linearised(g, y, count)
            residual = value - y
            while not residual.norm().item() <= (1 - 1e-4 * fraction) * before:
                if fraction < 1 / 16:
                    return Root(y, error, i, False)
                fraction /= 2
                y = new - (1 - fraction) * delta
                value, product = linearised(g, y, count)
                residual = value - y
            # Nor does a small residual, but a tiny one spares an iteration: the last step tells what M^-1 makes of it.
            small = norm(residual, y)
            if small * max(1.0, delta.norm().item() / before) <= TINY * tol:
                return Root(y, TINY * tol, i, True)
            rate = residual.norm().item() / before
            forcing = min(self.linear_tol, max(rate * rate, 0.1 * tol / small))
        return Root(y, error, max_iterations, False)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention in elementary operations: torch's fused kernels are differentiable once, backwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@cache
def _start_forward_mode() -> None:
    """torch warns of its own deprecated calls when forward mode is first used; not the caller's business."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def _by_reverse(g: Map, y: Tensor, count: Count) -> tuple[Tensor, Map]:
    leaf = y.detach().requires_grad_()
    with torch.enable_grad(), _plain_kernels():
        value = g(leaf)
    images: list[tuple[Tensor, Tensor]] = []  # u and J^T u, whose derivative in u is J: made when first asked for

    def product(v: Tensor) -> Tensor:
        count()
        with torch.enable_grad(), _told('"forward" or "difference"'):
            if not images:
                u = torch.zeros_like(value, requires_grad=True)
                (image,) = torch.autograd.grad(value, leaf, u, create_graph=True, materialize_grads=True)
                images.append((u, image))
            u, image = images[0]
            if not image.requires_grad:
                return torch.zeros_like(v)
            return torch.autograd.grad(image, u, v, retain_graph=True)[0]

    return value.detach(), (product if value.requires_grad else torch.zeros_like)


def _by_forward(g: Map, y: Tensor, count: Count) -> tuple[Tensor, Map]:
    _start_forward_mode()

    def product(v: Tensor) -> Tensor:
        with _plain_kernels(), forward_ad.dual_level():
            try:
                tangent = forward_ad.unpack_dual(g(forward_ad.make_dual(y, v))).tangent
            except NotImplementedError as error:
                raise _underivable('"reverse" or "difference"') from error
        return torch.zeros_like(y) if tangent is None else tangent

    return g(y), product


def _by_difference(g: Map, y: Tensor, count: Count) -> tuple[Tensor, Map]:
    value = g(y)

    def product(v: Tensor) -> Tensor:
        step = torch.finfo(y.dtype).eps ** 0.5 * (1 + y.norm().item()) / v.norm().item()
        return (g(y + step * v) - value) / step

    return value, product


@contextmanager
def _told(others: str) -> Iterator[None]:
    """torch's own messages about derivatives it does not have, with what to do about them."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _underivable(others) from error


def _underivable(others: str) -> NotImplementedError:
    return NotImplementedError("f has an operation without the derivatives that newton_krylov forms its products from; "
                               f"pass nonlinear=NewtonKrylov(products=...) with {others}")


# (g, y, count) -> g(y) and the map v -> J v
PRODUCTS: dict[str, Callable[[Map, Tensor, Count], tuple[Tensor, Map]]] = {
    "reverse": _by_reverse,
    "forward": _by_forward,
    "difference": _by_difference,
}


NONLINEAR: dict[str, Nonlinear] = {method.name: method for method in (FixedPoint(), Anderson(), NewtonKrylov())}


def get_nonlinear(method: str | Nonlinear) -> Nonlinear:
    """A method by name, or the object itself. Raises ValueError for an unknown name, TypeError for another type."""
    if isinstance(method, str):
        if method not in NONLINEAR:
            raise ValueError(f"unknown nonlinear method {method!r}; known: {', '.join(NONLINEAR)}")
        return NONLINEAR[method]
    if isinstance(method, type) or not callable(method) or not hasattr(method, "name"):
        raise TypeError(f"nonlinear must be a name ({', '.join(NONLINEAR)}) or an object like Anderson(window=3), "
                        f"got {method!r}")
    return method
