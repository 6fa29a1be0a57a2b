"""Reversible methods: their formulas, orders and costs, and that a step undone is the step not taken."""

import math

import numpy as np
import pytest
import torch
from convergence import assert_order, error, orbit, orbit_exact, perturbed

from solvers import SOLVERS, ExplicitRungeKutta, LieTrotter, LinearMultistep, Reversible, Tableau, get_solver, solve
from solvers.base import Evaluator, Work
from solvers.grid import Piece, make_steps
from solvers.implicit import METHODS as IMPLICIT

REVERSIBLE = {name: solver for name, solver in SOLVERS.items() if solver.is_reversible}
Z0 = torch.tensor([0.5, 1.0], dtype=torch.float64)


def pair(z, l):
    x, y = z
    return torch.sin(y) + l, -x * y[..., :1]


def walk(solver, f, z, points, dtype=torch.float64):
    """Every (state, memory, step) of a solve, by the solver's own step."""
    evaluator = Evaluator(f, Work())
    piece = Piece(points[0], points[-1], evaluator, (False, False), False)
    memory, trail = solver.init(None), []
    for step in make_steps([piece], [points], solver.nodes, dtype, torch.device("cpu"))[0]:
        after, left = solver.step(evaluator, z, step, memory)
        trail.append((z, memory, step))
        z, memory = after, left
    return z, memory, trail, evaluator


def distance(x, y):
    pairs = zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]
    return max((a - b).abs().max().item() for a, b in pairs)


def test_the_table_holds_every_family():
    assert {"leapfrog", "reversible_heun", "alf", "momentum", "revnet", "reversible_midpoint"} <= set(REVERSIBLE)
    assert all(solver.name == name for name, solver in REVERSIBLE.items())


@pytest.mark.parametrize("name", REVERSIBLE)
@pytest.mark.parametrize("points", [perturbed(0.0, 2.0, 24), perturbed(1.0, -0.5, 24)], ids=["forth", "back"])
def test_reversing_every_step_returns_each_state(name, points):
    for f, z in ((orbit, Z0), (pair, (torch.randn(3, 2).double(), torch.randn(3, 4).double()[..., :2]))):
        solver = REVERSIBLE[name]
        z, memory, trail, evaluator = walk(solver, f, z, points)
        for before, _, step in reversed(trail):
            z, memory = solver.reverse(evaluator, z, step, memory)
            # rounding (1e-16) times the growth on the way back: for momentum 0.9^-24 = 13 times, with γ / (1 - γ)
            assert distance(z, before) < 1e-12


@pytest.mark.parametrize("name", REVERSIBLE)
@pytest.mark.parametrize("even", [True, False])
def test_order_is_as_stated(name, even):
    solver = REVERSIBLE[name]
    if name != "momentum":
        assert_order(solver, solver.order, even=even)
        return
    # v trails f by 9 steps, so order 1 shows on fine grids only: 18 / n of the span
    coarse, fine = (error("orbit", solver, n, even=even, span=(0.0, 1.0)) for n in (1024, 2048))
    assert abs(math.log2(coarse / fine) - solver.order) < 0.05
    euler = error("orbit", "euler", 2048, span=(0.0, 1.0))
    assert 10 < error("orbit", solver, 2048, span=(0.0, 1.0)) / euler < 25  # (1 + γ) / (1 - γ) = 19


def test_the_wrapper_has_the_order_of_its_base():
    for base in ("euler", "heun2", "kutta3", ExplicitRungeKutta(Tableau([[], [0.5]], [0, 1]))):
        solver = Reversible(base)
        assert solver.order == get_solver(base).order
        assert_order(solver, solver.order)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_nfe_is_as_documented(name):
    solver = REVERSIBLE[name]
    for n in (1, 2, 7):
        calls = []

        def f(z, l, calls=calls):
            calls.append(l)
            return orbit(z, l)

        assert solve(f, Z0, solver=solver, n_steps=n).nfe == solver.nfe(n) == len(calls)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_a_field_of_zeros_is_the_identity(name):
    z = (Z0, torch.randn(2, 3))
    after = solve(lambda z, l: tuple(map(torch.zeros_like, z)), z, solver=name, n_steps=5).z
    assert all(torch.equal(x, y) for x, y in zip(z, after, strict=True))


@pytest.mark.parametrize("name", REVERSIBLE)
def test_solving_back_in_depth_returns(name):
    n = 512 if name == "momentum" else 64
    there = solve(orbit, Z0, span=(0.0, 1.0), solver=name, n_steps=n).z
    back = solve(orbit, there, span=(1.0, 0.0), solver=name, n_steps=n).z
    assert distance(back, Z0) < (0.1 if name == "momentum" else 1e-2)  # the truncation error of two solves


# --- formulas, written again in numpy -------------------------------------------------------------------------------

def field(z, l):
    x, y = z
    return np.array([-y * l + 0.3 * x * y, x - 0.2 * y * y])


def torch_field(z, l):
    x, y = z.unbind(-1)
    return torch.stack([-y * l + 0.3 * x * y, x - 0.2 * y * y], -1)


def leapfrog(z, h, n):
    past, z = z, z + h * field(z + h / 2 * field(z, 0.0), h / 2)
    for i in range(1, n):
        past, z = z, past + 2 * h * field(z, i * h)
    return z


def reversible_heun(z, h, n):
    w = z
    for i in range(n):
        new = 2 * z - w + h * field(w, i * h)
        z, w = z + h / 2 * (field(w, i * h) + field(new, (i + 1) * h)), new
    return z


def alf(z, h, n):
    v = field(z, 0.0)
    for i in range(n):
        half = z + v * h / 2
        v = 2 * field(half, (i + 0.5) * h) - v
        z = half + v * h / 2
    return z


def momentum(z, h, n):
    v = field(z, 0.0)
    for i in range(n):
        v = 0.9 * v + 0.1 * field(z, i * h)
        z = z + h * v
    return z


def revnet(z, h, n):
    x = y = z
    for i in range(n):
        x = x + h * field(y, i * h)
        y = y + h * field(x, (i + 1) * h)
    return (x + y) / 2


def reversible_midpoint(z, h, n):
    def psi(z, l, h):
        return h * field(z + h / 2 * field(z, l), l + h / 2)

    y = z
    for i in range(n):
        y = 0.999 * y + 0.001 * z + psi(z, i * h, h)
        z = z - psi(y, (i + 1) * h, -h)
    return y


@pytest.mark.parametrize("formula", [leapfrog, reversible_heun, alf, momentum, revnet, reversible_midpoint])
def test_steps_follow_the_published_formula(formula):
    wanted = formula(np.array([0.5, 1.0]), 0.1, 12)
    assert np.abs(solve(torch_field, Z0, span=(0.0, 1.2), solver=formula.__name__, n_steps=12).z.numpy()
                  - wanted).max() < 1e-14 * 100


def test_leapfrog_and_momentum_are_the_two_step_methods_they_are_said_to_be():
    for name, method in (("leapfrog", LinearMultistep([0, 1], [2], starter="midpoint")),
                         ("momentum", LinearMultistep([1.9, -0.9], [0.1], starter="euler"))):
        ours, theirs = (solve(orbit, Z0, solver=solver, n_steps=20).z for solver in (name, method))
        assert distance(ours, theirs) < 1e-13
        z = 0.1 + 0.3j
        assert np.allclose(np.roots(get_solver(name).characteristic(z)), np.roots(method.characteristic(z)))


def test_leapfrog_crosses_pieces_only_where_asked():
    def f(z, l):
        return torch.sin(z) + l

    f.breakpoints = (0.5,)
    assert solve(f, Z0, solver="leapfrog", n_steps=8).nfe == 10
    across = solve(f, Z0, solver=get_solver("leapfrog", across_pieces=True), n_steps=8)
    assert across.nfe == 9
    f.breakpoints = None
    assert distance(across.z, solve(f, Z0, solver="leapfrog", n_steps=8).z) < 1e-15


def test_any_one_step_method_can_be_the_base():
    for base in (LieTrotter("midpoint"), IMPLICIT["implicit_midpoint"], "verner65"):
        solver = Reversible(base, coupling=0.99)
        z, memory, trail, evaluator = walk(solver, orbit, Z0, perturbed(0.0, 1.0, 4))
        assert distance(z, orbit_exact(1.0)) < (0.4 if solver.order == 1 else 5e-2)
        for before, _, step in reversed(trail):
            z, memory = solver.reverse(evaluator, z, step, memory)
            assert distance(z, before) < 1e-9  # the implicit stages are solved to 4e-11


def test_a_base_with_learned_coefficients_learns_through_the_reversal():
    solver = Reversible(get_solver("rk2_family").fresh().double())
    z0, got = Z0.clone().requires_grad_(), []
    for gradient in ("backprop", "reversible", "checkpoint_recursive"):
        z = solve(orbit, z0, solver=solver, n_steps=8, gradient=gradient).z
        got.append(torch.autograd.grad(z.square().sum(), [z0, *solver.base.parameters()]))
    assert all(g.abs().max() > 0 for g in got[0])
    assert all(torch.allclose(x, y, rtol=1e-12) for other in got[1:] for x, y in zip(got[0], other, strict=True))


def test_other_bases_and_options_out_of_range_are_refused():
    for base, word in (("ab2", "multistep"), ("dopri5", "adaptive"), ("alf", "reversible itself"),
                       ("nosuch", "unknown solver")):
        with pytest.raises(ValueError, match=word):
            Reversible(base)
    for coupling in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="coupling must lie above 0"):
            Reversible("rk4", coupling)
    with pytest.raises(ValueError, match="gamma must lie between 0 and 1"):
        get_solver("momentum", gamma=1.0)
    with pytest.raises(ValueError, match="reconstruction_bound must be above 0"):
        get_solver("alf", reconstruction_bound=0)
    assert Reversible("midpoint").name == "reversible(midpoint)"


def test_a_bf16_state_reverses_badly_so_solve_carries_float32():
    """Leapfrog over 96 steps stepped in bf16 comes back several percent off; in float32 to rounding."""
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) * 0.5

    def f(z, l):
        return torch.tanh(z @ weight.to(z.dtype))

    z0 = torch.randn(4, 8)
    solver, off = REVERSIBLE["leapfrog"], {}
    for dtype in (torch.bfloat16, torch.float32):
        z, memory, trail, evaluator = walk(solver, f, z0.to(dtype), [4 * i / 96 for i in range(97)], torch.float32)
        for *_, step in reversed(trail):
            z, memory = solver.reverse(evaluator, z, step, memory)
        off[dtype] = distance(z.float(), z0) / z0.abs().max().item()
    assert off[torch.bfloat16] > 0.02 and off[torch.float32] < 1e-3
    solution = solve(f, z0.bfloat16().requires_grad_(), span=(0.0, 4.0), solver=solver, n_steps=96,
                     gradient="reversible")
    solution.z.float().square().sum().backward()
    assert solution.reconstruction_error < 1e-3
