"""Implicit-explicit pairs: order and coupling conditions, stiff parts, gradients, refusals."""

import math

import pytest
import torch
from convergence import DIFFERENTIABLE, Field, bend_formula, slope, turn_formula

from solvers import SolverError, Tableau, get_solver, solve
from solvers.imex import METHODS, ImexRungeKutta, pair_order

ORDERS = {"imex_euler": 1, "ars222": 2, "ars443": 3}


class Parts:
    """The sum of its parts."""

    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, z, l):
        return sum(part(z, l) for part in self.parts)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def scalar(slow, stiff):
    """z' = slow z + stiff z."""
    return Parts(lambda z, l: slow * z, lambda z, l: stiff * z)


def bend(z, l):
    return torch.sin(2 * z) * z.flip(-1) + l


def swap(z, l):
    return torch.cos(z.flip(-1)) - l * z


def solver(name, **options):
    return get_solver(METHODS[name], **options)


def test_the_table_is_complete_and_registered():
    assert {name: method.order for name, method in METHODS.items()} == ORDERS
    for name, method in METHODS.items():
        assert get_solver(name) is method and method.is_implicit and method.nfe is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_order_is_the_stated_one_whichever_part_is_implicit(name, swapped):
    formulas = (bend_formula, turn_formula) if swapped else (turn_formula, bend_formula)
    problems = {"orbit": (Field(*formulas, differentiable=True), DIFFERENTIABLE["orbit"][1])}
    measured = slope("orbit", solver(name, tol=1e-12), ORDERS[name], finer=0.4, problems=problems)
    assert abs(measured - ORDERS[name]) < 0.2


@pytest.mark.parametrize("name", METHODS)
def test_each_half_alone_is_its_tableau(name):
    method, z, h = METHODS[name], double(1.0), 0.3
    explicit = solve(scalar(-1.7, 0.0), z, span=(0.0, h), solver=name, n_steps=1).z.item()
    assert math.isclose(explicit, method.explicit.stability(-1.7 * h).real, rel_tol=1e-12)
    implicit = solve(scalar(0.0, -1.7), z, span=(0.0, h), solver=name, n_steps=1).z.item()
    assert math.isclose(implicit, method.implicit.stability(-1.7 * h).real, rel_tol=1e-9)


def test_imex_euler_is_one_explicit_and_one_implicit_euler_step():
    # z1 = (z0 + h a z0) / (1 - h b)
    got = solve(scalar(0.4, -3.0), double(2.0), solver="imex_euler", n_steps=1).z.item()
    assert math.isclose(got, 2.0 * 1.4 / 4.0, rel_tol=1e-10)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stiffness", [-1e4, -1e8])
def test_a_stiff_linear_part_is_damped_whatever_the_step(name, stiffness):
    z = solve(scalar(1.0, stiffness), double(1.0), span=(0.0, 20.0), solver=name, n_steps=20).z.abs().item()
    assert z < 1e-4  # h λ = -1e4 and -1e8: L-stable


@pytest.mark.parametrize("name", METHODS)
def test_a_stiff_relaxation_is_followed(name):
    # z = cos l solves it; the slow part moves, the stiff one pulls at the rate 1e6
    f = Parts(lambda z, l: -torch.sin(l) + 0.0 * z, lambda z, l: -1e6 * (z - torch.cos(l)))
    z = solve(f, double(3.0), span=(0.0, 1.0), solver=solver(name, tol=1e-12), n_steps=10).z.item()
    assert abs(z - math.cos(1)) < 2e-6  # the slow part of a step, h sin l, divided by h times the rate


@pytest.mark.parametrize("name", METHODS)
def test_a_diffusion_that_no_explicit_step_could_take_agrees_with_the_exact_solution(name):
    n = 16
    k = torch.arange(1, n + 1, dtype=torch.float64)
    x = k / (n + 1)
    operator = (n + 1) ** 2 * (torch.diag(torch.ones(n - 1), 1) + torch.diag(torch.ones(n - 1), -1)
                               - 2 * torch.eye(n)).double()
    rate = -4 * (n + 1) ** 2 * math.sin(math.pi / (2 * (n + 1))) ** 2  # of the lowest mode; the highest is -1146
    f = Parts(lambda z, l: 8.0 * z, lambda z, l: z @ operator)
    z = solve(f, torch.sin(math.pi * x), span=(0.0, 0.5), solver=name, n_steps=20).z
    exact = torch.sin(math.pi * x) * math.exp((8.0 + rate) * 0.5)
    tolerance = {1: 0.2, 2: 2e-2, 3: 2e-3}[ORDERS[name]]
    assert ((z - exact).norm() / exact.norm()).item() < tolerance


@pytest.mark.parametrize("name", METHODS)
def test_evaluations_of_the_slow_part_are_those_of_the_explicit_tableau(name):
    calls = []
    f = Parts(lambda z, l: calls.append(1) or bend(z, l), swap)
    with torch.no_grad():
        solution = solve(f, double(0.4, -0.3), solver=name, n_steps=5)
    assert len(calls) == 5 * METHODS[name].explicit.n_evaluations
    assert solution.nfe > len(calls) / 2  # a part counts one half, products included


@pytest.mark.parametrize("name", METHODS)
def test_a_zero_field_is_the_identity_and_a_solve_back_returns(name):
    z = torch.randn(3, 4)
    zero = Parts(lambda z, l: torch.zeros_like(z), lambda z, l: torch.zeros_like(z))
    assert torch.equal(solve(zero, z, solver=name, n_steps=3).z, z)
    start = double(0.4, -0.3)
    there = solve(Parts(bend, swap), start, span=(0.0, 0.5), solver=name, n_steps=16).z
    back = solve(Parts(bend, swap), there, span=(0.5, 0.0), solver=name, n_steps=16).z
    assert (back - start).abs().max() < {1: 0.1, 2: 5e-3, 3: 5e-4}[ORDERS[name]]  # the errors there and back


def test_a_tuple_state_is_its_tensors_side_by_side():
    def both(part):
        return lambda z, l: part(torch.cat(z), l).split([1, 1])

    def summed(z, l):
        return tuple(x + y for x, y in zip(both(bend)(z, l), both(swap)(z, l), strict=True))

    summed.parts = (both(bend), both(swap))
    z = double(0.4, -0.3)
    got = solve(summed, (z[:1], z[1:]), solver="ars222", n_steps=4).z
    torch.testing.assert_close(torch.cat(got), solve(Parts(bend, swap), z, solver="ars222", n_steps=4).z, rtol=0,
                               atol=1e-13)


@pytest.mark.parametrize("gradient", ["backprop", "implicit"])
@pytest.mark.parametrize("name", METHODS)
def test_gradcheck_in_the_state_and_in_both_parts(name, gradient):
    z, slow, stiff = (x.requires_grad_() for x in (double(0.4, -0.3), double(0.7, -0.2), double(-1.5, 0.3)))

    def final(z, slow, stiff):
        f = Parts(lambda z, l: torch.sin(slow * z.flip(-1)), lambda z, l: torch.tanh(stiff * z) - l * z)
        return solve(f, z, span=(0.0, 0.5), solver=solver(name, tol=1e-13), n_steps=2, gradient=gradient).z

    assert torch.autograd.gradcheck(final, (z, slow, stiff), fast_mode=True)
    if gradient == "backprop":
        assert torch.autograd.gradgradcheck(final, (z, slow, stiff), fast_mode=True)


@pytest.mark.parametrize(("f", "got"), [(bend, "none"), (Parts(bend, swap, bend), "3")])
def test_a_field_without_two_parts_is_refused(f, got):
    with pytest.raises(ValueError, match=rf"ars222 needs a field with two parts, f\.parts = \(slow, stiff\).*{got}"):
        solve(f, double(0.4, -0.3), solver="ars222", n_steps=2)


def test_a_stiff_part_that_cannot_be_solved_is_an_error():
    f = Parts(lambda z, l: 0 * z, lambda z, l: z * z + 1)  # z = z0 + z^2 + 1 has no real root
    with pytest.raises(SolverError, match="newton_krylov did not solve a stage"):
        solve(f, double(1.0), solver="imex_euler", n_steps=1)


def test_pairs_of_tableaus_are_checked_for_their_coupling():
    # either alone has order 2 (explicit midpoint, implicit midpoint padded), but the depths of the stages differ
    explicit = Tableau([[], [1.0]], [0.5, 0.5])  # Heun: c = (0, 1)
    implicit = Tableau([[0.25, 0], [0.5, 0.25]], [0.5, 0.5])  # Crouzeix & Raviart's type: c = (1/4, 3/4)
    assert explicit.order == implicit.order == 2 and pair_order(explicit, implicit) == 2
    wrong = Tableau([[0.5, 0], [0.5, 0.5]], [1.0, 0.0])  # order 2 through its first stage alone: c = (1/2, 1)
    assert wrong.order == 2 and pair_order(explicit, wrong) == 1


@pytest.mark.parametrize(("explicit", "implicit", "error", "message"), [
    (Tableau([[1]], [1]), Tableau([[1]], [1]), ValueError, "explicit must be an explicit tableau"),
    (Tableau([[]], [1]), Tableau([[]], [1]), ValueError, "implicit must be a diagonally implicit tableau"),
    (Tableau([[], [1]], [1, 0]), Tableau([[5 / 12, -1 / 12], [3 / 4, 1 / 4]], [3 / 4, 1 / 4]), ValueError,
     "implicit must be a diagonally implicit tableau"),
    (Tableau([[], [1]], [1, 0]), Tableau([[1]], [1]), ValueError, "as many stages; got 2 and 1"),
    ([[]], Tableau([[1]], [1]), TypeError, "explicit must be a solvers.Tableau, got list"),
])
def test_tableaus_of_the_wrong_kind_are_refused(explicit, implicit, error, message):
    with pytest.raises(error, match=message):
        ImexRungeKutta(explicit, implicit)
