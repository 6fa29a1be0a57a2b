"""Runge-Kutta methods whose coefficients are learned: as published, and families that keep their order in training.

They hold parameters, so they are modules, made anew by ``get_solver(name, **options)``: keep the one you get, hand
it to ``solve(..., solver=module)`` and its parameters to the optimizer. The state is still passed, never kept.
``order`` is that of the coefficients as they are now; only the families of this file keep it all through training.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from solvers.base import Evaluator, State, Step, add, tensors
from solvers.tableau import Tableau, order_of

Coefficients = tuple[tuple[tuple[Tensor, ...], ...], tuple[Tensor, ...]]  # a (strictly lower rows) and b


def times(w: Tensor, z: State) -> State:
    """w z for a 0-d coefficient, or one that broadcasts to z; in z's precision."""
    if isinstance(z, tuple):
        return tuple(times(w, x) for x in z)
    return z * w.to(z.dtype.to_real() if z.dtype.is_complex else z.dtype)


def plus(z: State, w: Tensor, k: State) -> State:
    """z + w k."""
    return add(z, 1.0, times(w, k))


class Learned(nn.Module):
    """What learned methods share. A solver as in ``base.Solver``, but with parameters, so not frozen."""

    name: str
    n_stages: int
    nodes: tuple[float, ...] = (0.0, 1.0)

    embedded_order = None
    is_implicit = False
    is_adaptive = False
    is_reversible = False
    gradients = ("backprop", "checkpoint")

    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def fresh(self, **options: Any) -> Learned:
        """A new module with these options changed and all parameters at their start.

        Raises ValueError for an option that the method has not.
        """
        known = list(inspect.signature(type(self).__init__).parameters)[1:]
        for option in options:
            if option not in known:
                raise ValueError(f"unknown option {option!r} for solver {self.name!r}; known: {', '.join(known)}")
        return type(self)(**{**self.options, **options})

    def attained_order(self) -> int:
        """The order of the coefficients as they are now (0: not consistent); reads them from the device."""
        raise NotImplementedError

    @property
    def order(self) -> int:
        """``attained_order()``."""
        return self.attained_order()

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps of one piece."""
        return n_steps * self.n_stages

    def init(self, memory: Any) -> Any:
        """One-step methods remember nothing."""
        return None

    def step(self, f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        """The state at step.l + step.h."""
        raise NotImplementedError


class LearnedRK2(Learned):
    """z' = z + h (γ_1 k_1 + γ_2 k_2), k_1 = f(z), k_2 = f(z + h k_1), both γ free (ODE Transformer, Li et al. 2022).

    As published γ starts at (1, 1): the weights sum to 2, so z' = z + 2 h f + O(h²) and the method is not consistent,
    order 0: it integrates 2 f. It has order 1 where γ_1 + γ_2 = 1, and order 2 at (1/2, 1/2), Heun's method.
    ``start``: the first value of γ.
    """

    name = "rk2_learned"
    n_stages = 2

    def __init__(self, start: tuple[float, float] = (1.0, 1.0)):
        super().__init__(start=start)
        if len(start) != 2:
            raise ValueError(f"start must hold two numbers, got {start!r}")
        self.gamma = nn.Parameter(torch.tensor([float(x) for x in start]))

    def attained_order(self) -> int:
        return order_of([[], [1.0]], self.gamma.tolist())

    def step(self, f: Evaluator, z: State, step: Step, memory: None) -> tuple[State, None]:
        k1 = f(z, step.at[0])
        k2 = f(add(z, step.h, k1), step.at[1])
        first, second = (step.h * self.gamma).unbind()
        return plus(plus(z, first, k1), second, k2), None


class GatedRK2(Learned):
    """z' = z + h (g k_1 + (1 - g) k_2) with g = sigmoid(W [k_1; k_2] + b), one number a token (Li et al. 2022).

    k_1 = f(z), k_2 = f(z + h k_1). The weights sum to 1, so the order is 1; it is 2 only where the gate is 1/2 for
    every token: Heun's method, where it starts (W = 0, b = 0). A gate of 1/2 + δ has the error h² δ f' f a step.
    ``d_model``: size of the state's last axis. Without it W stays 0 and the gate is one learned number for all tokens.
    """

    name = "rk2_gate"
    n_stages = 2

    def __init__(self, d_model: int | None = None):
        super().__init__(d_model=d_model)
        if d_model is not None and (isinstance(d_model, bool) or not isinstance(d_model, int) or d_model < 1):
            raise ValueError(f"d_model must be a positive int or None, got {d_model!r}")
        self.weight = None if d_model is None else nn.Parameter(torch.zeros(2, d_model))
        self.bias = nn.Parameter(torch.zeros(()))

    def attained_order(self) -> int:
        even = self.bias.item() == 0 and (self.weight is None or not self.weight.any().item())
        return 2 if even else 1

    def step(self, f: Evaluator, z: State, step: Step, memory: None) -> tuple[State, None]:
        k1 = f(z, step.at[0])
        k2 = f(add(z, step.h, k1), step.at[1])
        gate = torch.sigmoid(self._score(z, k1, k2))
        return plus(plus(z, step.h * gate, k1), step.h * (1 - gate), k2), None

    def _score(self, z: State, k1: State, k2: State) -> Tensor:
        if self.weight is None:
            return self.bias
        d_model = self.weight.shape[1]
        if isinstance(z, tuple) or z.dim() == 0 or z.shape[-1] != d_model or z.dtype.is_complex:
            shapes = [tuple(x.shape) for x in tensors(z)]
            raise ValueError(f"rk2_gate with d_model = {d_model} needs one real state whose last axis is {d_model}; "
                             f"got {shapes}")
        first, second = self.weight.to(z.dtype).unbind()
        return (k1 * first + k2 * second).sum(-1, keepdim=True) + self.bias


class ExponentialPC(Learned):
    """A predictor and a corrector with exponential-average weights (PCformer, Li et al. 2024).

    k_1 = f(z), k_2 = f(z + h k_1). Predictor: z* = z + h (α (1 - α) k_1 + α k_2). Corrector, the same average over the
    increments at hand: z' = z + h (γ (1 - γ) k_1 + γ f(z*)). Published: the predictor, and α = 1/2 to start with. There
    the weights sum to 1 - (1 - α)² = 0.75, so the method is not consistent, order 0: it integrates 0.75 f. Only at
    γ = 1 is it of order 1. (The published corrector sums over all earlier layers with free weights: see ``Dense``.)
    """

    name = "pc_ema"
    n_stages = 3

    def __init__(self, alpha: float = 0.5, gamma: float = 0.5):
        super().__init__(alpha=alpha, gamma=gamma)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        self.gamma = nn.Parameter(torch.tensor(float(gamma)))

    def attained_order(self) -> int:
        gamma = self.gamma.item()
        return 1 if abs(gamma * (2 - gamma) - 1) <= 1e-12 else 0

    def step(self, f: Evaluator, z: State, step: Step, memory: None) -> tuple[State, None]:
        start, end = step.at
        k1 = f(z, start)
        k2 = f(add(z, step.h, k1), end)
        predicted = self._average(z, step.h, self.alpha, k1, k2)
        return self._average(z, step.h, self.gamma, k1, f(predicted, end)), None

    @staticmethod
    def _average(z: State, h: float, weight: Tensor, older: State, newer: State) -> State:
        return plus(plus(z, h * weight * (1 - weight), older), h * weight, newer)


class Family(Learned):
    """Runge-Kutta methods of the order of their number of stages, for every value of the parameters.

    The order conditions leave the nodes c free (within limits), everything else follows from them in closed form
    (Kutta 1901; Hairer, Nørsett & Wanner 1993, II.1), in float64 whatever the dtype of the parameters (float32 where
    the device has no other). A free node is low + (high - low) sigmoid(θ + offset), over an interval that keeps clear
    of the singular points, so the coefficients stay bounded. f is called at depths that depend on θ, and gradients
    reach θ that way as well. ``start``: the named method at which the parameters begin, where θ = 0.
    """

    intervals: ClassVar[tuple[tuple[float, float], ...]]
    starts: ClassVar[dict[str, tuple[float, ...]]]

    def __init__(self, start: str):
        super().__init__(start=start)
        if start not in self.starts:
            raise ValueError(f"start must be one of {', '.join(self.starts)} for {self.name!r}, got {start!r}")
        shares = [(c - low) / (high - low) for c, (low, high) in zip(self.starts[start], self.intervals, strict=True)]
        self._offsets = [math.log(x / (1 - x)) for x in shares]
        self.theta = nn.Parameter(torch.zeros(len(shares)))

    def free_nodes(self) -> tuple[Tensor, ...]:
        """c_2, or c_2 and c_3, as 0-d tensors."""
        wide = torch.float32 if self.theta.device.type == "mps" else torch.float64
        thetas = self.theta.to(wide).unbind()
        return tuple(low + (high - low) * torch.sigmoid(theta + offset)
                     for (low, high), theta, offset in zip(self.intervals, thetas, self._offsets, strict=True))

    def coefficients(self, *free: Tensor) -> Coefficients:
        """a and b as 0-d tensors, from the free nodes."""
        raise NotImplementedError

    @property
    def tableau(self) -> Tableau:
        """The method as it is now, its order checked."""
        with torch.no_grad():
            a, b = self.coefficients(*self.free_nodes())
        return Tableau([[x.item() for x in row] for row in a], [x.item() for x in b], order=self.n_stages)

    def attained_order(self) -> int:
        return self.tableau.order

    def step(self, f: Evaluator, z: State, step: Step, memory: None) -> tuple[State, None]:
        free = self.free_nodes()
        a, b = self.coefficients(*free)
        first, last = step.at
        depths = [first, *(first + (c * (last - first)).to(first.dtype) for c in free), last]
        ks: list[State] = []
        for row, l in zip(a, depths, strict=False):
            y = z
            for weight, k in zip(row, ks, strict=True):
                y = plus(y, step.h * weight, k)
            ks.append(f(y, l))
        for weight, k in zip(b, ks, strict=True):
            z = plus(z, step.h * weight, k)
        return z, None


class RK2Family(Family):
    """Two stages, order 2: the one-parameter family with c_2 in (1/4, 1). ``start``: midpoint or ralston2."""

    name = "rk2_family"
    n_stages = 2
    intervals = ((0.25, 1.0),)
    starts: ClassVar = {"midpoint": (1 / 2,), "ralston2": (2 / 3,)}

    def __init__(self, start: str = "midpoint"):
        super().__init__(start)

    def coefficients(self, c2: Tensor) -> Coefficients:
        b2 = 1 / (2 * c2)
        return ((), (c2,)), (1 - b2, b2)


class RK3Family(Family):
    """Three stages, order 3: the two-parameter family with c_2 in (1/4, 0.6), c_3 in (0.65, 1).

    Singular at c_2 = 0, c_3 = 0, c_2 = c_3 and c_2 = 2/3. ``start``: ralston3 or heun3.
    """

    name = "rk3_family"
    n_stages = 3
    intervals = ((0.25, 0.6), (0.65, 1.0))
    starts: ClassVar = {"ralston3": (1 / 2, 3 / 4), "heun3": (1 / 3, 2 / 3)}

    def __init__(self, start: str = "ralston3"):
        super().__init__(start)

    def coefficients(self, c2: Tensor, c3: Tensor) -> Coefficients:
        b2 = (3 * c3 - 2) / (6 * c2 * (c3 - c2))
        b3 = (2 - 3 * c2) / (6 * c3 * (c3 - c2))
        a32 = 1 / (6 * b3 * c2)
        return ((), (c2,), (c3 - a32, a32)), (1 - b2 - b3, b2, b3)


class RK4Family(Family):
    """Four stages, order 4, c_4 = 1: the two-parameter family with c_2 in (1/4, 0.45), c_3 in (1/2, 3/4).

    Singular at c_2 = 0, 1/2, 1, at c_3 = 0, 1, at c_2 = c_3 and where b_4 = 0. ``start``: rk38. (The classical ``rk4``,
    c_2 = c_3 = 1/2, is a singular point, reachable only on a line of special cases.)
    """

    name = "rk4_family"
    n_stages = 4
    intervals = ((0.25, 0.45), (0.5, 0.75))
    starts: ClassVar = {"rk38": (1 / 3, 2 / 3)}

    def __init__(self, start: str = "rk38"):
        super().__init__(start)

    def coefficients(self, c2: Tensor, c3: Tensor) -> Coefficients:
        b2 = (2 * c3 - 1) / (12 * c2 * (c3 - c2) * (1 - c2))
        b3 = (1 - 2 * c2) / (12 * c3 * (c3 - c2) * (1 - c3))
        b4 = (6 * c2 * c3 - 4 * (c2 + c3) + 3) / (12 * (1 - c2) * (1 - c3))
        a32 = c3 * (c3 - c2) / (2 * c2 * (1 - 2 * c2))
        a43 = b3 * (1 - c3) / b4
        a42 = (b2 * (1 - c2) - b3 * a32) / b4
        return ((), (c2,), (c3 - a32, a32), (1 - a42 - a43, a42, a43)), (1 - b2 - b3 - b4, b2, b3, b4)


METHODS: dict[str, Learned] = {
    method.name: method
    for method in (LearnedRK2(), GatedRK2(), ExponentialPC(), RK2Family(), RK3Family(), RK4Family())}
