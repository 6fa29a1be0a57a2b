"""What several test files measure orders with: two problems with closed-form solutions, and the slope of the error.

``shear`` is linear and non-autonomous: x' = l x + y, y' = l y. ``orbit`` is non-linear and non-autonomous, its two
parts do not commute, and the forcing is chosen so that z(l) = (sin(3 l / 2) + 1 / 2, cos l) solves it: a Runge-Kutta
method with a shifted c, or a rule that is right for linear equations only, shows its true order here.
"""

from __future__ import annotations

import math

import torch

from solvers import solve


def shear_exact(l):
    return torch.tensor([1.0 + l, 1.0], dtype=torch.float64) * math.exp(l * l / 2)


def orbit_exact(l):
    return torch.tensor([math.sin(1.5 * l) + 0.5, math.cos(l)], dtype=torch.float64)


def shear_formula(x, y, l, m):
    return l * x + y, l * y


def turn_formula(x, y, l, m):
    return -l * y + 0.5 * x, (1 + l) * x


def bend_formula(x, y, l, m):
    s, c = m.sin(1.5 * l) + 0.5, m.cos(l)
    return (x * y - s * c + l * c - 0.5 * s + 1.5 * m.cos(1.5 * l),
            m.sin(x) - m.sin(s) - (1 + l) * s - m.sin(l))


class Field:
    """The sum of formulas as a field with parts; on tensors (``differentiable``), or on floats, which is faster."""

    def __init__(self, *formulas, differentiable=False):
        self.formulas, self.differentiable = formulas, differentiable
        if len(formulas) > 1:
            self.parts = tuple(Field(formula, differentiable=differentiable) for formula in formulas)

    def __call__(self, z, l):
        if self.differentiable:
            x, y = z.unbind(-1)
            values = [formula(x, y, l, torch) for formula in self.formulas]
            return torch.stack([sum(column) for column in zip(*values, strict=True)], -1)
        x, y = z.tolist()
        values = [formula(x, y, l.item(), math) for formula in self.formulas]
        return torch.tensor([sum(column) for column in zip(*values, strict=True)], dtype=z.dtype)


shear, orbit = Field(shear_formula, differentiable=True), Field(turn_formula, bend_formula, differentiable=True)
PROBLEMS = {"shear": (Field(shear_formula), shear_exact), "orbit": (Field(turn_formula, bend_formula), orbit_exact)}
DIFFERENTIABLE = {"shear": (shear, shear_exact), "orbit": (orbit, orbit_exact)}


def perturbed(l0: float, l1: float, n: int) -> list[float]:
    """n steps of uneven length, a smooth map of an even grid times a ripple: neighbouring steps differ by up to 20 %.

    Halving every step keeps the shape, so that the slope of the error is the order.
    """
    def warp(x):
        return x + 0.1 * math.sin(2 * math.pi * x) / (2 * math.pi)

    points = [warp((i + 0.04 * (-1) ** i * (0 < i < n)) / n) for i in range(n + 1)]
    return [l0 + (l1 - l0) * x for x in points[:-1]] + [l1]


def error(problem: str, solver, n: int, *, even: bool = True, span=(0.0, 1.0), problems=PROBLEMS) -> float:
    """Largest error at the end of the span after n steps, in float64."""
    f, exact = problems[problem]
    steps = {"n_steps": n} if even else {"grid": perturbed(*span, n)}
    z = solve(f, exact(span[0]), span=span, solver=solver, **steps).z
    return (z - exact(span[1])).abs().max().item()


# order: (end of the span, n): where n and 2 n steps are in the asymptotic range, and 2 n steps above rounding
PLAN = {
    "shear": {1: (2, 128), 2: (2, 64), 3: (2, 64), 4: (2, 64), 5: (2, 64), 6: (4, 256), 7: (4, 90), 8: (3, 36)},
    "orbit": {1: (2, 128), 2: (2, 64), 3: (2, 64), 4: (2, 64), 5: (2, 64), 6: (4, 64), 7: (4, 64), 8: (5, 32)},
}


def slope(problem: str, solver, order: int, *, even: bool = True, finer: float = 1, problems=PROBLEMS) -> float:
    """log2 of the ratio of the errors after n and after 2 n steps: the order, for methods of about that order."""
    end, n = PLAN[problem][order]
    n = int(n * finer)
    coarse, fine = (error(problem, solver, m, even=even, span=(0.0, float(end)), problems=problems) for m in (n, 2 * n))
    return math.log2(coarse / fine)


def assert_order(solver, order: int, *, even: bool = True, finer: float = 1, within: float = 0.2,
                 problems=PROBLEMS) -> None:
    """Neither problem shows a lower order, and one of them shows no higher one. ``finer``: times the usual steps."""
    slopes = {name: slope(name, solver, order, even=even, finer=finer, problems=problems) for name in problems}
    assert abs(min(slopes.values()) - order) < within, slopes
