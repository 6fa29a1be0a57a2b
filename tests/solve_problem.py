"""What the tests of solve() share: a field, a start, and a field that counts its calls."""

import torch

from solvers import SOLVERS
from solvers.learned import Learned

FIXED = {name: solver for name, solver in SOLVERS.items() if not solver.is_adaptive}
EXPLICIT = {name: solver for name, solver in FIXED.items() if not solver.is_implicit}
F64 = torch.float64


def coupled(z, l):
    """x' = l x + y, y' = l y - x^2 / 4: not autonomous, not linear, its parts do not commute."""
    x, y = z[..., 0], z[..., 1]
    return torch.stack([l * x + y, l * y - x * x / 4], -1)


def half_coupled(z, l):
    return coupled(z, l) / 2


coupled.parts = (half_coupled, half_coupled)  # for methods that need two


def start(dtype=F64):
    return torch.tensor([0.7, -0.4], dtype=dtype)


class Counted:
    """A field that counts its own calls and keeps the depths."""

    def __init__(self, f):
        self.f, self.depths = f, []

    def __call__(self, z, l):
        self.depths.append(l.item())
        return self.f(z, l)


LEAN = [name for name, solver in EXPLICIT.items() if not isinstance(solver, Learned)]
