"""Implicit Runge-Kutta: orders, stability, stiff problems against scipy, solves, gradients, failures."""

import cmath
import math
import weakref

import pytest
import torch
from convergence import DIFFERENTIABLE, assert_order

from solvers import SolverError, Tableau, get_solver, solve
from solvers.implicit import METHODS, ImplicitRungeKutta
from solvers.nonlinear import NONLINEAR, Anderson, NewtonKrylov

G = 1 - 1 / math.sqrt(2)
MODES = ("backprop", "implicit")
ORDERS = {"backward_euler": 1, "implicit_midpoint": 2, "trapezoid": 2, "sdirk2": 2, "tr_bdf2": 2, "gauss4": 4,
          "gauss6": 6, "radau3": 3, "radau5": 5}

# Stability functions as published (Hairer & Wanner 1996, IV.3 and IV.5-6; Alexander 1977; Bank et al. 1985)
STABILITY = {
    "backward_euler": lambda z: 1 / (1 - z),
    "implicit_midpoint": lambda z: (1 + z / 2) / (1 - z / 2),
    "trapezoid": lambda z: (1 + z / 2) / (1 - z / 2),
    "sdirk2": lambda z: (1 + (1 - 2 * G) * z) / (1 - G * z) ** 2,
    "tr_bdf2": lambda z: (1 + (1 - 2 * G) * z) / (1 - G * z) ** 2,
    "gauss4": lambda z: (1 + z / 2 + z**2 / 12) / (1 - z / 2 + z**2 / 12),
    "gauss6": lambda z: (1 + z / 2 + z**2 / 10 + z**3 / 120) / (1 - z / 2 + z**2 / 10 - z**3 / 120),
    "radau3": lambda z: (1 + z / 3) / (1 - 2 * z / 3 + z**2 / 6),
    "radau5": lambda z: (1 + 2 * z / 5 + z**2 / 20) / (1 - 3 * z / 5 + 3 * z**2 / 20 - z**3 / 60),
}
L_STABLE = ("backward_euler", "sdirk2", "tr_bdf2", "radau3", "radau5")
CONSERVING = ("implicit_midpoint", "gauss4", "gauss6")


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def bend(z, l):
    """Non-linear, non-autonomous, of Lipschitz constant about 2."""
    return torch.sin(2 * z) * z.flip(-1) + l


class Linear:
    """z w, sin of it, and a constant that f closes over."""

    def __init__(self):
        self.w = double([0.3, -1.0], [0.8, 0.1]).requires_grad_()
        self.b = double(0.2, -0.4).requires_grad_()

    def __call__(self, z, l):
        return torch.sin(z @ self.w) * z.flip(-1) + l * self.b


def stiff(z, l):
    """Prothero & Robinson 1974: z = cos l, approached at the rate 1e6."""
    return -1e6 * (z - torch.cos(l)) - torch.sin(l)


def solver(name, **options):
    return get_solver(METHODS[name], **options)


def test_the_table_is_complete_and_registered():
    assert {name: method.order for name, method in METHODS.items()} == ORDERS
    for name, method in METHODS.items():
        assert get_solver(name) is method and method.name == name
        assert method.is_implicit and not method.is_adaptive and method.nfe is None


@pytest.mark.parametrize("name", METHODS)
def test_the_order_is_the_stated_one(name):
    # an eighth of the usual steps: the error constants of implicit methods are small, and the stages solved to 1e-13
    finer = {1: 0.15, 2: 0.12, 3: 0.15, 4: 0.12, 5: 0.12, 6: 0.08}[ORDERS[name]]
    assert_order(solver(name, tol=1e-13), ORDERS[name], problems=DIFFERENTIABLE, finer=finer)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("z", [-0.7 + 0.2j, 1.3j, -40 + 9j, -1e5 + 0j])
def test_one_step_of_the_linear_equation_is_the_published_stability_function(name, z):
    state = torch.tensor([1 + 0j], dtype=torch.complex128)
    got = solve(lambda y, l: z * y, state, span=(0.0, 1.0), solver=solver(name, tol=1e-13), n_steps=1).z.item()
    assert cmath.isclose(got, STABILITY[name](z), rel_tol=1e-11, abs_tol=1e-10)
    assert cmath.isclose(METHODS[name].tableau.stability(z), STABILITY[name](z), rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_stable_problem_stays_so_at_any_step_and_an_l_stable_method_damps_it(name):
    z = solve(lambda y, l: -1e8 * y, double(1.0), solver=name, n_steps=1).z.abs().item()
    assert z < 1e-6 if name in L_STABLE else 0.999 < z < 1 + 1e-6


@pytest.mark.parametrize("name", L_STABLE)
def test_a_stiff_transient_is_gone_after_few_steps(name):
    z = solve(stiff, double(2.0), solver=name, n_steps=10).z.item()
    assert abs(z - math.cos(1)) < 1e-7  # the global error is divided by h times the rate, 1e5


@pytest.mark.parametrize("name", METHODS)
def test_every_method_follows_a_stiff_solution_from_its_start(name):
    z = solve(stiff, double(1.0), solver=name, n_steps=10).z.item()
    assert abs(z - math.cos(1)) < (1e-3 if name in CONSERVING else 1e-6)  # stage order alone acts: h^2, h^3 / 10, ...


def test_van_der_pol_agrees_with_scipy():
    from scipy.integrate import solve_ivp

    mu = 100.0

    def field(l, z):
        return [z[1], mu * (1 - z[0] ** 2) * z[1] - z[0]]

    reference = solve_ivp(field, (0, 40), [2.0, 0.0], method="Radau", rtol=1e-9, atol=1e-12).y[:, -1]

    def f(z, l):
        x, y = z.unbind(-1)
        return torch.stack([y, mu * (1 - x * x) * y - x], -1)

    got = solve(f, double(2.0, 0.0), span=(0.0, 40.0), solver="radau5", n_steps=40).z
    torch.testing.assert_close(got, torch.from_numpy(reference), rtol=1e-7, atol=1e-9)  # its own error; no tuning


def test_robertson_agrees_with_scipy_and_keeps_its_mass():
    from scipy.integrate import solve_ivp

    def rates(a, b, c):
        forth, back, pair = 0.04 * a, 1e4 * b * c, 3e7 * b * b
        return back - forth, forth - back - pair, pair

    reference = solve_ivp(lambda l, z: rates(*z), (0, 40), [1.0, 0.0, 0.0], method="Radau", rtol=1e-9, atol=1e-14)

    def f(z, l):
        return torch.stack(rates(*z.unbind(-1)), -1)

    grid = [0.0, *(40 * 2.0 ** (i - 30) for i in range(31))]
    got = solve(f, double(1.0, 0.0, 0.0), grid=grid, solver="radau5").z
    torch.testing.assert_close(got, torch.from_numpy(reference.y[:, -1]), rtol=1e-4, atol=1e-11)  # steps double
    assert abs(got.sum().item() - 1) < 1e-9


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("nonlinear", [*NONLINEAR, Anderson(window=2), NewtonKrylov(products="difference")])
def test_every_nonlinear_solve_reaches_the_same_state(name, nonlinear):
    z = double([1.0, 0.3], [-0.5, 1.2])
    wanted = solve(bend, z, span=(0.0, 0.25), solver=solver(name, tol=1e-13), n_steps=2).z
    got = solve(bend, z, span=(0.0, 0.25), solver=solver(name, tol=1e-12, nonlinear=nonlinear), n_steps=2).z
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)  # 2 steps, at most 3 stages of 1e-12 each, enlarged


@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-9])
def test_the_tolerance_bounds_the_error_of_the_solves(tol):
    z = double(1.0, 0.3)
    wanted = solve(bend, z, solver=solver("gauss4", tol=1e-13), n_steps=4).z
    for nonlinear in NONLINEAR:
        got = solve(bend, z, solver=solver("gauss4", tol=tol, nonlinear=nonlinear), n_steps=4)
        assert (got.z - wanted).abs().max() < 20 * tol  # four steps, each allowed tol and enlarging it by e^(2 h)


@pytest.mark.parametrize("name", METHODS)
def test_a_zero_field_is_the_identity_bit_for_bit(name):
    z = torch.randn(3, 4)
    with torch.no_grad():
        solution = solve(lambda z, l: torch.zeros_like(z), z, solver=name, n_steps=3)
    assert torch.equal(solution.z, z)
    assert solution.nfe == 3 * METHODS[name].n_stages  # nothing to iterate


@pytest.mark.parametrize("name", METHODS)
def test_a_solve_back_returns_to_the_start(name):
    z = double(0.4, -0.3)
    there = solve(bend, z, span=(0.0, 0.5), solver=name, n_steps=8).z
    back = solve(bend, there, span=(0.5, 0.0), solver=name, n_steps=8).z
    assert (back - z).abs().max() < (0.1 if ORDERS[name] == 1 else 1e-3)  # their errors there and back, h = 1 / 16


@pytest.mark.parametrize("name", ["implicit_midpoint", "trapezoid", "gauss4", "gauss6"])
def test_a_symmetric_method_returns_to_the_tolerance(name):
    z = double(0.4, -0.3)
    there = solve(bend, z, span=(0.0, 1.0), solver=name, n_steps=3).z
    assert (solve(bend, there, span=(1.0, 0.0), solver=name, n_steps=3).z - z).abs().max() < 1e-9


@pytest.mark.parametrize("name", METHODS)
def test_a_tuple_state_is_its_tensors_side_by_side(name):
    z = double([1.0, 0.3], [-0.5, 2.0])

    def f(z, l):
        x, y = z
        both = bend(torch.cat([x, y.view(1, 2)]), l)
        return both[:1], both[1]

    x, y = solve(f, (z[:1], z[1]), solver=solver(name, tol=1e-13), n_steps=4).z
    wanted = solve(bend, z, solver=solver(name, tol=1e-13), n_steps=4).z
    torch.testing.assert_close(torch.cat([x, y[None]]), wanted, rtol=0, atol=1e-12)


def test_a_tuple_of_dtypes_keeps_them():
    z = (torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.complex64))
    solution = solve(lambda z, l: tuple(-x for x in z), z, solver="radau5", n_steps=4)
    for got, start in zip(solution.z, z, strict=True):
        assert got.dtype == start.dtype
        torch.testing.assert_close(got, start * math.exp(-1), rtol=1e-6, atol=0)  # float32


@pytest.mark.parametrize("name", CONSERVING)
def test_a_symplectic_method_keeps_the_energy_of_the_oscillator(name):
    # quadratic invariants are kept exactly (Cooper 1987), whatever the step; h = 1 here
    def turn(z, l):
        return torch.stack([z[1], -z[0]])

    solution = solve(turn, double(1.0, 0.5), span=(0.0, 30.0), n_steps=30, solver=solver(name, tol=1e-13),
                     save_at="steps")
    assert (solution.states.square().sum(1) - 1.25).abs().max() < 1e-11  # 30 solves to 1e-13
    assert solve(turn, double(1.0, 0.5), span=(0.0, 30.0), n_steps=30, solver="radau3").z.square().sum() < 1.0


def test_states_saved_on_the_way_do_not_change_the_solve():
    plain = solve(bend, double(1.0, 0.3), solver="tr_bdf2", n_steps=4).z
    saved = solve(bend, double(1.0, 0.3), solver="tr_bdf2", n_steps=4, save_at=[0.1, 0.5, 1.0])
    assert torch.equal(saved.z, plain) and torch.equal(saved.states[-1], plain)


def test_a_field_that_jumps_is_integrated_piece_by_piece():
    def f(z, l):
        return torch.where(l < 0.5, -z, 2 * z)

    got = solve(f, double(1.0), solver="gauss4", n_steps=16, breakpoints=[0.5]).z.item()
    assert abs(got - math.exp(0.5)) < 1e-6


# ---- precision


@pytest.mark.parametrize("name", METHODS)
def test_float32_arrives_near_float64(name):
    z = torch.tensor([[1.0, 0.3], [-0.5, 2.0]])
    wanted = solve(bend, z.double(), solver=name, n_steps=8).z
    got = solve(bend, z, solver=name, n_steps=8).z
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-4)  # 8 steps of tol 2.4e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_field_converges_to_its_own_resolution(dtype):
    z = torch.tensor([[1.0, 0.3], [-0.5, 2.0]])
    wanted = solve(bend, z, solver="radau5", n_steps=8).z
    solution = solve(lambda z, l: bend(z, l.to(z.dtype)), z.to(dtype), solver="radau5", n_steps=8)
    assert solution.z.dtype == dtype and solution.nfe < 8 * 50
    assert (solution.z.float() - wanted).abs().max() < 8 * torch.finfo(dtype).eps ** (2 / 3)


def test_autocast_loosens_the_default_tolerance_and_needs_no_autocast_in_backward():
    layer = torch.nn.Linear(8, 8)
    z = torch.randn(4, 8)
    exact = solve(lambda z, l: torch.tanh(layer(z)), z, solver="gauss4", n_steps=2).z
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = solve(lambda z, l: torch.tanh(layer(z)), z, solver="gauss4", n_steps=2, gradient="implicit")
    assert solution.z.dtype == torch.float32 and (solution.z - exact).abs().max() < 0.05  # bf16: 2^-8 an evaluation
    solution.z.sum().backward()
    rough, layer.weight.grad = layer.weight.grad, None
    exact.sum().backward()
    assert (rough - layer.weight.grad).norm() < 0.05 * layer.weight.grad.norm()


def test_a_row_does_not_move_another_by_more_than_the_tolerance():
    alone = solve(bend, double([0.4, -0.3]), solver="radau5", n_steps=4).z
    beside = solve(bend, double([0.4, -0.3], [400.0, 300.0]), solver="radau5", n_steps=4).z[:1]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-9)  # not 400 times the tolerance 3.7e-11
    still = double([1.0], [0.0])  # the field of the second row, which is large, is zero: it needs no iteration
    rough = solver("implicit_midpoint", nonlinear="fixed_point", tol=1e-4)
    alone = solve(lambda z, l: -z, double([0.4]), solver=rough, n_steps=1).z
    beside = solve(lambda z, l: -z * still, double([0.4], [4e6]), solver=rough, n_steps=1).z[:1]
    assert torch.equal(beside, alone)


# ---- gradients


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("name", METHODS)
def test_gradcheck_in_the_state_and_in_what_f_closes_over(name, gradient):
    field = Linear()
    z = double(1.0, 0.5).requires_grad_()

    def final(z, w, b):
        field.w, field.b = w, b
        return solve(field, z, span=(0.0, 0.5), solver=solver(name, tol=1e-13), n_steps=1, gradient=gradient).z

    assert torch.autograd.gradcheck(final, (z, field.w, field.b), fast_mode=True)


@pytest.mark.parametrize("name", ["trapezoid", "sdirk2", "radau3"])
def test_backprop_has_second_derivatives_and_implicit_refuses_them(name):
    field = Linear()
    z = double(1.0, 0.5).requires_grad_()

    def final(z, w, gradient="backprop"):
        field.w = w
        return solve(field, z, span=(0.0, 0.5), solver=solver(name, tol=1e-13), n_steps=1, gradient=gradient).z

    assert torch.autograd.gradgradcheck(final, (z, field.w))
    with pytest.raises(RuntimeError, match='first derivatives only; take gradient="backprop"'):
        torch.autograd.grad(final(z, field.w, "implicit").sum(), z, create_graph=True)


def unrolled(f, z, h, n_steps, a, b, c, iterations=60):
    """The same Runge-Kutta steps by plain fixed-point iterations in torch, all of them on the graph."""
    at = torch.tensor(0.0, dtype=torch.float64).new_tensor
    for n in range(n_steps):
        ks = [torch.zeros_like(z) for _ in b]
        for _ in range(iterations):
            ks = [f(z + h * sum(x * k for x, k in zip(row, ks, strict=True)), at(h * (n + x)))
                  for row, x in zip(a, c, strict=True)]
        z = z + h * sum(x * k for x, k in zip(b, ks, strict=True))
    return z


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_that_of_unrolled_iterations(name, gradient):
    field, z, t = Linear(), double([1.0, 2.0], [0.3, -0.2]).requires_grad_(), METHODS[name].tableau
    wanted_z = unrolled(field, z, 0.25, 2, t.a, t.b, t.c)
    wanted = torch.autograd.grad(wanted_z.square().sum(), (z, field.w, field.b))
    solution = solve(field, z, span=(0.0, 0.5), solver=solver(name, tol=1e-13), n_steps=2, gradient=gradient)
    torch.testing.assert_close(solution.z, wanted_z, rtol=0, atol=1e-12)
    got = torch.autograd.grad(solution.z.square().sum(), (z, field.w, field.b))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    assert solution.nfe_backward > 0  # the products of the linear solves are counted


@pytest.mark.parametrize("nonlinear", NONLINEAR)
def test_the_gradient_does_not_depend_on_the_nonlinear_method(nonlinear):
    field, z = Linear(), double(1.0, 0.5)
    grads = []
    for method in ("newton_krylov", nonlinear):
        solve(field, z, solver=solver("gauss4", nonlinear=method, tol=1e-12), n_steps=4).z.sum().backward()
        grads.append((field.w.grad, field.b.grad))
        field.w.grad = field.b.grad = None
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gradient", MODES)
def test_the_gradient_of_a_stiff_solve_is_that_of_the_stability_function(gradient):
    rate = double(-1e6).requires_grad_()
    z = solve(lambda z, l: rate * z, double(1.0), span=(0.0, 1e-5), solver="radau3", n_steps=1, gradient=gradient).z
    z.backward()
    x = double(-10.0).requires_grad_()
    (wanted,) = torch.autograd.grad(STABILITY["radau3"](x), x)
    assert math.isclose(rate.grad.item(), wanted.item() * 1e-5, rel_tol=1e-9)


def test_gradients_reach_the_ends_of_the_span():
    ends = tuple(torch.tensor(l, dtype=torch.float64, requires_grad=True) for l in (0.2, 1.1))
    z = solve(lambda z, l: l * z, double(1.0), span=ends, solver=solver("gauss6", tol=1e-13), n_steps=16).z
    got = torch.autograd.grad(z.sum(), ends)
    wanted = math.exp((1.1**2 - 0.2**2) / 2)  # of exp((b^2 - a^2) / 2)
    assert math.isclose(got[0].item(), -0.2 * wanted, rel_tol=1e-8)
    assert math.isclose(got[1].item(), 1.1 * wanted, rel_tol=1e-8)


def kept_bytes(gradient, **options):
    """What a solve has saved for backward and still holds when it is over, and its NFE."""
    alive = weakref.WeakSet()

    class Kept:
        def __init__(self, x):
            self.x = x

    def pack(x):
        kept = Kept(x)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        solution = solve(Linear(), double(1.0, 0.5), solver=solver("gauss4", **options), n_steps=2, gradient=gradient)
    return sum(kept.x.numel() * kept.x.element_size() for kept in alive), solution.nfe


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("nonlinear", NONLINEAR)
def test_what_is_kept_for_backward_does_not_grow_with_the_iterations(gradient, nonlinear):
    few, n_few = kept_bytes(gradient, nonlinear=nonlinear, tol=1e-2)
    many, n_many = kept_bytes(gradient, nonlinear=nonlinear, tol=1e-13)
    assert n_many > 1.5 * n_few and many == few > 0


def test_implicit_keeps_about_half_of_what_backprop_keeps():
    assert kept_bytes("implicit")[0] < 0.65 * kept_bytes("backprop")[0]


def test_nothing_is_recorded_where_nothing_requires_grad():
    z = double(1.0, 0.3)
    looked = solve(bend, z, solver="radau5", n_steps=2)
    assert not looked.z.requires_grad
    with torch.no_grad():
        plain = solve(bend, z, solver="radau5", n_steps=2)
        assert not solve(Linear(), z.clone().requires_grad_(), solver="radau5", n_steps=2).z.requires_grad
    assert torch.equal(plain.z, looked.z)
    z.requires_grad_()
    once, twice = (solve(bend, z, solver="radau5", n_steps=2, gradient=mode) for mode in ("implicit", "backprop"))
    assert once.z.requires_grad and torch.equal(once.z, plain.z) and torch.equal(twice.z, plain.z)
    # six stages: looking whether f requires grad, or recording, costs an evaluation each
    assert [solution.nfe - plain.nfe for solution in (looked, once, twice)] == [6, 6, 12]


@pytest.mark.parametrize("transform", [
    lambda f, z: torch.vmap(f)(z),
    lambda f, z: torch.func.jvp(f, (z,), (z,)),
    lambda f, z: torch.func.vjp(f, z),
])
def test_function_transforms_are_refused_with_the_reason(transform):
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        transform(lambda z: solve(bend, z, solver="trapezoid", n_steps=2).z, double([1.0, 0.3], [-0.5, 2.0]))


def test_forward_mode_derivatives_are_refused_with_the_reason():
    from torch.autograd import forward_ad

    z = double(1.0, 0.3)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        solve(bend, forward_ad.make_dual(z, z), solver=solver("sdirk2", nonlinear="fixed_point"), n_steps=2)


def test_checkpoint_and_adjoint_are_not_on_offer_by_mistake():
    with pytest.raises(ValueError, match="gradient must be one of backprop, implicit for solver 'radau5'"):
        solve(bend, double(1.0, 0.3), solver="radau5", n_steps=2, gradient="checkpoint")
    with pytest.raises(ValueError, match="gradient must be one of"):
        solve(bend, double(1.0, 0.3), solver="rk4", n_steps=2, gradient="implicit")


# ---- failures


@pytest.mark.parametrize("nonlinear", NONLINEAR)
def test_a_solve_that_does_not_converge_says_what_where_and_what_to_try(nonlinear):
    # backward Euler with h = 1 for z' = z^2 + 1 has the complex roots of z = z0 + z^2 + 1
    with pytest.raises(SolverError) as caught:
        solve(lambda z, l: z * z + 1, double(1.0), span=(2.0, 3.0), n_steps=1,
              solver=solver("backward_euler", nonlinear=nonlinear, max_iterations=6))
    error, text = caught.value, str(caught.value)
    assert error.l == 2.0 and error.h == 1.0 and 1 <= error.nfe <= 6 * 9
    for part in (nonlinear, "relative error", "iterations", "tol 3.7e-11", "take more steps", "raise max_iterations"):
        assert part in text
    assert ("newton_krylov" in text.split("take more steps")[1]) == (nonlinear != "newton_krylov")


def test_too_few_iterations_are_an_error_not_a_rough_answer():
    z = double(1.0, 0.3)
    assert solve(bend, z, solver=solver("gauss4", max_iterations=30), n_steps=4).n_steps == 4
    with pytest.raises(SolverError, match="after 2 iterations"):
        solve(bend, z, solver=solver("gauss4", max_iterations=2), n_steps=4)


@pytest.mark.parametrize("nonlinear", ["fixed_point", "anderson"])
def test_a_contraction_method_on_a_stiff_problem_fails_with_the_way_out(nonlinear):
    with pytest.raises(SolverError, match='nonlinear="newton_krylov"'):
        solve(stiff, double([2.0, 1.0], [0.0, 1.0]), solver=solver("radau5", nonlinear=nonlinear), n_steps=10)


def test_max_nfe_bounds_the_iterations():
    for limit in (2, 10, 13, 25, 40):
        with pytest.raises(SolverError, match=f"max_nfe = {limit}") as caught, torch.no_grad():
            solve(bend, double(1.0, 0.3), solver="radau5", n_steps=100, max_nfe=limit)
        assert caught.value.nfe == limit


@pytest.mark.parametrize("name", METHODS)
def test_a_field_that_is_not_finite_fails_within_bounded_work(name):
    with pytest.raises(SolverError) as caught:
        solve(lambda z, l: z * math.nan, double(1.0, 0.3), solver=name, n_steps=100)
    assert caught.value.nfe <= 10


def test_what_f_raises_comes_through_unchanged():
    def f(z, l):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        solve(f, double(1.0), solver="radau5", n_steps=2)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: solver("radau5", nonlinear="newton"), ValueError, "unknown nonlinear method 'newton'"),
    (lambda: solver("radau5", tol=0.0), ValueError, "tol must lie between 0 and 1, got 0.0"),
    (lambda: solver("radau5", tol="fine"), TypeError, "tol must be a number"),
    (lambda: solver("radau5", max_iterations=0), ValueError, "max_iterations must be at least 1, got 0"),
    (lambda: solver("radau5", max_iterations=1.5), TypeError, "max_iterations must be an int"),
    (lambda: solver("radau5", window=3), ValueError, "unknown option 'window' for solver 'radau5'; known: .*nonlinear"),
    (lambda: ImplicitRungeKutta(Tableau([[], [0.5]], [0, 1])), ValueError, "use ExplicitRungeKutta"),
    (lambda: ImplicitRungeKutta([[1]]), TypeError, "tableau must be a solvers.Tableau, got list"),
    (lambda: ImplicitRungeKutta(Tableau([[0.5, 0.5], [0.5, 0.5]], [0.5, 0.5])), ValueError, "stages 1 to 2 .*singular"),
])
def test_bad_options_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_tableau_of_the_user_is_solved_in_the_smallest_blocks():
    # Lobatto IIIA of order 4: an explicit first stage, then two that depend on one another
    lobatto = ImplicitRungeKutta(Tableau([[0, 0, 0], [5 / 24, 1 / 3, -1 / 24], [1 / 6, 2 / 3, 1 / 6]],
                                         [1 / 6, 2 / 3, 1 / 6], order=4), tol=1e-13)
    assert [(block.stop, block.inverse is None) for block in lobatto._blocks] == [(1, True), (3, False)]
    assert [(block.start, block.stop) for block in METHODS["sdirk2"]._blocks] == [(0, 1), (1, 2)]
    assert [(block.start, block.stop) for block in METHODS["radau5"]._blocks] == [(0, 3)]
    assert_order(lobatto, 4, problems=DIFFERENTIABLE, finer=0.12)
