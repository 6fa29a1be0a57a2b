"""torchdiffeq's adaptive Runge-Kutta loop, set up for a tableau of ours and checked before it is used.

The names used here are private to torchdiffeq; ``engine`` therefore takes one step with every new tableau and compares
it with the tableau itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from solvers.stepsize import error_order
from solvers.tableau import Tableau

# Weights of the state at the middle of a step of dopri5 and dopri54, exact to order 4 (Shampine 1986)
SHAMPINE_MIDDLE = (
    6025192743 / 30085553152 / 2, 0.0, 51252292925 / 65400821598 / 2, -2691868925 / 45128329728 / 2,
    187940372067 / 1594534317056 / 2, -1776094331 / 19743644256 / 2, 11237099 / 235043384 / 2)
SHAMPINE_A = ((), (1 / 5,), (3 / 40, 9 / 40), (44 / 45, -56 / 15, 32 / 9),
              (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
              (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
              (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84))


def middle_weights(tableau: Tableau) -> tuple[float, ...] | None:
    """Weights of the state at the middle of the step for quartic interpolation, None where none are known."""
    return SHAMPINE_MIDDLE if tableau.a == SHAMPINE_A else None


def interpolates(tableau: Tableau) -> bool:
    """Whether a polynomial through the step is as accurate as its error estimate: the cubic Hermite one up to an
    estimate of order 4, or a quartic with known weights. Other methods reach a depth inside a step by a shorter step
    from its start: evaluations are cheaper than states that miss the tolerance (torchdiffeq's dopri8 is off by 100
    times its tolerance between steps).
    """
    return error_order(tableau) <= 4 or middle_weights(tableau) is not None


@lru_cache(maxsize=64)
def engine(tableau: Tableau) -> type:
    """A subclass of torchdiffeq's adaptive Runge-Kutta solver that runs an FSAL tableau.

    Raises ImportError where torchdiffeq is missing, or does not take the step that the tableau says.
    """
    try:
        import torchdiffeq  # noqa: F401
    except ImportError as error:
        raise ImportError("adaptive methods need torchdiffeq: pip install torchdiffeq==0.2.5") from error
    try:
        made = _make(tableau)
        got = _one_step(made)
    except (AttributeError, TypeError, ImportError) as error:
        raise _mismatch(repr(error)) from error
    wanted = _reference_step(tableau)
    if not abs(got - wanted) <= 1e-12:
        raise _mismatch(f"one step gives {got!r}, the tableau {wanted!r}")
    return made


def _make(tableau: Tableau) -> type:
    from torchdiffeq._impl import rk_common

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    middle, exact = middle_weights(tableau), interpolates(tableau)

    class Engine(rk_common.RKAdaptiveStepsizeODESolver):
        order = error_order(tableau)

        def integrate(self, t: Tensor) -> list[Tensor]:
            self._before_integrate(t.detach())  # steps are constants; depths between them may move with the span
            return [self.y0, *map(self._advance, t[1:])]

        def _advance(self, next_t: Tensor) -> Tensor:
            while next_t > self.rk_state.t1:
                self.rk_state = self._adaptive_step(self.rk_state)
            last = self.rk_state
            if next_t == last.t1:
                return last.y1
            y0, y1, k, dt = last.interp_coeff
            if exact:
                return rk_common._interp_evaluate(self._fit(y0, y1, k, dt), last.t0, last.t1, next_t)
            f0 = k[..., 0]
            return rk_common._runge_kutta_step(self.func, y0, f0, last.t0, next_t - last.t0, next_t, self.tableau)[0]

        def _interp_fit(self, *step: Tensor) -> tuple[Tensor, ...]:
            return step  # fitted only where a depth within the step is asked for

        def _fit(self, y0: Tensor, y1: Tensor, k: Tensor, dt: Tensor) -> list[Tensor]:
            if middle is not None:
                return super()._interp_fit(y0, y1, k, dt)
            dt, f0, f1 = dt.type_as(y0), k[..., 0], k[..., -1]  # cubic Hermite
            d = y1 - y0
            return [y0, dt * f0, 3 * d - dt * (2 * f0 + f1), dt * (f0 + f1) - 2 * d]

    Engine.tableau = rk_common._ButcherTableau(
        alpha=row(tableau.c[1:]), beta=[row(r) for r in tableau.a[1:]], c_sol=row(tableau.b),
        c_error=row([x - y for x, y in zip(tableau.b, tableau.b_hat, strict=True)]))
    Engine.mid = row(middle or (0.0,))
    return Engine


class _Probe:
    """y' = (1 + t) y - y² / 10, with callbacks that are counted."""

    def __init__(self) -> None:
        self.n_tried = self.n_accepted = 0

    def __call__(self, t: Tensor, y: Tensor, *, perturb: object = None) -> Tensor:
        return (1 + t) * y - 0.1 * y * y

    def callback_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        self.n_tried += 1

    def callback_accept_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        self.n_accepted += 1

    def callback_reject_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
        raise AttributeError("rejected")


def _one_step(made: type) -> float:
    """One step from 0.5 to 0.75, cut there by step_t."""
    probe = _Probe()
    t = torch.tensor([0.5, 0.75], dtype=torch.float64)
    solver = made(probe, torch.ones(1, dtype=torch.float64), 1.0, 1.0, norm=lambda x: 0 * x.abs().max(),
                  first_step=0.5, step_t=t[1:])
    end = solver.integrate(t)[-1].item()
    if (probe.n_tried, probe.n_accepted) != (1, 1):
        raise AttributeError("the callbacks of a step were not called once each")
    return end


def _reference_step(tableau: Tableau) -> float:
    ks: list[float] = []
    for row, c in zip(tableau.a, tableau.c, strict=True):
        y = 1.0 + 0.25 * sum(x * k for x, k in zip(row, ks, strict=True))
        ks.append((1 + 0.5 + 0.25 * c) * y - 0.1 * y * y)
    return 1.0 + 0.25 * sum(x * k for x, k in zip(tableau.b, ks, strict=True))


def _mismatch(what: str) -> ImportError:
    import torchdiffeq

    return ImportError(f"torchdiffeq {getattr(torchdiffeq, '__version__', '')} does not run a tableau as the adaptive "
                       f"engine needs it ({what}); install torchdiffeq==0.2.5")
