"""What the tests of the gradient modes share: a small field, a loss that weighs every entry, gradients of solves."""

import math
import weakref

import pytest
import torch
from torch import nn

from solvers import SOLVERS, solve

EXACT = ("checkpoint", "checkpoint_recursive", "reversible")
# one solver a family; all reversible ones
FIXED = ["euler", "rk4", "ab3", "abm3", *(name for name, solver in SOLVERS.items() if solver.is_reversible)]
PAIRS = [(name, mode) for name in FIXED for mode in SOLVERS[name].gradients if mode in EXACT]
ADJOINT = pytest.mark.filterwarnings('ignore:gradient="adjoint" gives')


class Net(nn.Module):
    """A small non-autonomous, non-linear field."""

    def __init__(self, width=3, hidden=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, z, l):
        return 0.8 * self.down(torch.tanh(self.up(z) * (1 + l)))


def net(**options):
    torch.manual_seed(3)
    return Net(**options).double()


def state(*shape):
    return torch.linspace(-1.0, 1.0, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()


def loss_of(solution):
    """Weighs every entry of the final and saved states differently."""
    total = 0.0
    for x in (solution.z, solution.states):
        for y in x if isinstance(x, tuple) else () if x is None else (x,):
            total = total + (y * torch.linspace(0.5, 1.5, y.numel()).to(y).reshape(y.shape)).sum() + y.square().sum()
    return total


def gradients(f, z0, inputs, **options):
    solution = solve(f, z0, **options)
    return solution, torch.autograd.grad(loss_of(solution), inputs, allow_unused=True)


def gradients_of_square(f, z0, inputs, **options):
    solution = solve(f, z0, **options)
    z = torch.view_as_real(solution.z)[..., 0] if solution.z.is_complex() else solution.z
    return solution, torch.autograd.grad(z.square().sum(), inputs, allow_unused=True)


def difference(xs, ys):
    """Largest difference over the largest entry, of the worst tensor."""
    worst = 0.0
    for x, y in zip(xs, ys, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            worst = max(worst, ((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).item())
    return worst


def saved_bytes(run):
    """Bytes that ``run`` has kept for backward at its end, each storage once and parameters apart."""
    kept = []

    class Saved:
        def __init__(self, x):
            self.x = x

    def pack(x):
        saved = Saved(x)
        if not isinstance(x, nn.Parameter):
            kept.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.x):
        result = run()
    storages = [ref().x.untyped_storage() for ref in kept if ref() is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()), result
