"""Roots of y = g(y) against closed forms, dense linear algebra and scipy; the derivative of a root."""

import math

import pytest
import torch

from solvers.krylov import gmres
from solvers.nonlinear import NONLINEAR, PRODUCTS, Anderson, FixedPoint, NewtonKrylov, get_nonlinear
from solvers.root import differentiable_root

DOTTIE = 0.739085133215160641655312087674  # cos y = y


def biggest(change, y):
    """A norm: the largest change, relative to the largest entry."""
    part, whole = change.abs().max().item(), y.abs().max().item()
    return part / whole if part else part


@torch.no_grad()
def solve(method, g, y, tol=1e-12, max_iterations=200):
    return get_nonlinear(method)(g, y, norm=biggest, tol=tol, max_iterations=max_iterations)


class Counted:
    """g, and how often it was called."""

    def __init__(self, g):
        self.g, self.calls = g, 0

    def __call__(self, y):
        self.calls += 1
        return self.g(y)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def matrix(n, size, seed=0):
    """A random (n, n) matrix of spectral norm ``size``."""
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return a * size / torch.linalg.matrix_norm(a, 2)


@pytest.mark.parametrize("name", NONLINEAR)
def test_every_method_finds_the_root_of_a_contraction(name):
    root = solve(name, torch.cos, double(0.2))
    assert root.converged and root.error <= 1e-12 and 1 < root.n_iterations < 100
    assert abs(root.y.item() - DOTTIE) < 2e-12  # tol


@pytest.mark.parametrize("name", NONLINEAR)
def test_every_method_agrees_with_scipy_on_a_coupled_system(name):
    from scipy.optimize import root as scipy_root

    a, b = matrix(6, 0.8), torch.linspace(-1, 1, 6, dtype=torch.float64)
    wanted = scipy_root(lambda y: y - (torch.sin(a @ torch.from_numpy(y)) + b).numpy(), b.numpy(), tol=1e-13).x
    got = solve(name, lambda y: torch.sin(a @ y) + b, torch.zeros(6, dtype=torch.float64)).y
    torch.testing.assert_close(got, torch.from_numpy(wanted), rtol=0, atol=1e-11)  # scipy's own tolerance leaves 1e-13


@pytest.mark.parametrize("name", NONLINEAR)
def test_the_shape_of_y_does_not_matter(name):
    a, y = matrix(6, 0.5), torch.ones(6, dtype=torch.float64)
    flat = solve(name, lambda y: torch.cos(a @ y), y).y
    shaped = solve(name, lambda y: torch.cos(a @ y.flatten()).view(2, 3), y.view(2, 3)).y
    torch.testing.assert_close(shaped.flatten(), flat, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_root_to_start_with_is_kept_bit_for_bit(name):
    root = solve(name, lambda y: 0 * y, torch.zeros(3, dtype=torch.float64))
    assert root.converged and root.y.abs().max() == 0


def test_only_newton_solves_a_stiff_system():
    a, b = -1000 * torch.eye(4, dtype=torch.float64) + matrix(4, 30.0), torch.ones(4, dtype=torch.float64)
    wanted = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - a, b)
    root = solve("newton_krylov", lambda y: a @ y + b, torch.zeros_like(b))
    assert root.converged
    torch.testing.assert_close(root.y, wanted, rtol=1e-10, atol=0)
    assert not solve("fixed_point", lambda y: a @ y + b, torch.zeros_like(b)).converged


def test_anderson_solves_a_linear_system_that_expands_and_takes_fewer_calls_on_a_slow_contraction():
    expanding, b = matrix(4, 3.0), torch.ones(4, dtype=torch.float64)
    root = solve(Anderson(window=4), lambda y: expanding @ y + b, torch.zeros_like(b), max_iterations=30)
    assert root.converged  # Walker & Ni 2011: on a linear map it is GMRES, which needs no contraction
    torch.testing.assert_close(root.y, torch.linalg.solve(torch.eye(4, dtype=torch.float64) - expanding, b), rtol=1e-9,
                               atol=0)
    assert not solve("fixed_point", lambda y: expanding @ y + b, torch.zeros_like(b), max_iterations=30).converged
    slow = torch.diag(torch.linspace(-0.95, 0.95, 8, dtype=torch.float64))
    counts = {}
    for method in (Anderson(), FixedPoint()):
        g = Counted(lambda y: slow @ y + 1)
        assert solve(method, g, torch.zeros(8, dtype=torch.float64), max_iterations=1000).converged
        counts[method.name] = g.calls
    assert counts["anderson"] * 5 < counts["fixed_point"]


def test_anderson_drops_columns_that_add_nothing():
    # eight copies of one expanding equation: all residuals are parallel, one column is left, which is the secant method
    root = solve("anderson", lambda y: 2 * torch.cos(y), torch.ones(8, dtype=torch.float64), max_iterations=12)
    assert root.converged and (root.y - 2 * torch.cos(root.y)).abs().max() < 1e-11
    assert (root.y - 1.029866529322259).abs().max() < 1e-11


def test_a_window_larger_than_the_system_is_cut_down_to_it():
    assert abs(solve(Anderson(window=20), torch.cos, double(0.2)).y.item() - DOTTIE) < 2e-12


def test_the_fixed_point_error_is_not_taken_from_a_slow_change_alone():
    root = solve("fixed_point", lambda y: 0.99 * y + 0.01, double(0.0), tol=1e-6, max_iterations=5000)
    assert root.converged and abs(root.y.item() - 1) < 1.2e-6  # the last change is 100 times smaller than the error


def test_newton_halves_a_step_that_overshoots():
    # y - g(y) = arctan(y - 1): the full Newton step diverges where |y - 1| > 1.3917
    root = solve("newton_krylov", lambda y: y - torch.atan(y - 1), double(11.0))
    assert root.converged and abs(root.y.item() - 1) < 1e-12


def test_newton_recovers_from_a_trial_step_that_is_not_finite():
    root = solve("newton_krylov", lambda y: y - torch.log(y), double(2.9))  # the full step lands at y < 0
    assert root.converged and abs(root.y.item() - 1) < 1e-12


@pytest.mark.parametrize("name", NONLINEAR)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_ends_the_iteration_at_once(name, bad):
    g = Counted(lambda y: y * bad)
    assert not solve(name, g, double(1.0)).converged
    assert g.calls <= 3


@pytest.mark.parametrize("name", NONLINEAR)
def test_an_equation_without_a_root_ends_within_the_iterations_allowed(name):
    g = Counted(lambda y: y + 1 + y * y)
    root = solve(name, g, double(0.3), max_iterations=7)
    assert not root.converged and root.error > 1e-12 and root.n_iterations <= 7
    assert g.calls <= 7 * 9  # a product, six trial steps and a value each, at most


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_with_the_jacobian(name):
    a = matrix(5, 2.0)
    y, v = torch.linspace(-1, 1, 5, dtype=torch.float64), torch.linspace(2, 1, 5, dtype=torch.float64)
    g, counted = Counted(lambda y: torch.sin(a @ y)), []
    with torch.no_grad():
        value, product = PRODUCTS[name](g, y, lambda: counted.append(1))
        assert torch.equal(value, torch.sin(a @ y)) and not value.requires_grad
        got = product(v), product(2 * v)
    wanted = torch.cos(a @ y) * (a @ v)
    rtol = 1e-6 if name == "difference" else 1e-13  # the square root of eps is 1.5e-8
    torch.testing.assert_close(got, (wanted, 2 * wanted), rtol=rtol, atol=0)
    assert g.calls + len(counted) == 3  # a product costs a call, or is counted


@pytest.mark.parametrize("products", PRODUCTS)
def test_newton_converges_with_either_product(products):
    a = -50 * torch.eye(6, dtype=torch.float64) + matrix(6, 20.0)
    root = solve(NewtonKrylov(products=products), lambda y: a @ torch.tanh(y) + 1, torch.zeros(6, dtype=torch.float64))
    assert root.converged and (a @ torch.tanh(root.y) + 1 - root.y).abs().max() < 1e-10


class Once(torch.autograd.Function):
    """x / 2, differentiable backwards and once only."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v):
        return v / 2


@pytest.mark.parametrize(("products", "others"), [("reverse", "forward"), ("forward", "reverse")])
def test_an_operation_without_the_derivatives_is_refused_with_the_cure(products, others):
    with pytest.raises(NotImplementedError, match=rf'products=\.\.\.\) with "{others}" or "difference"'):
        solve(NewtonKrylov(products=products), lambda y: Once.apply(y) + 1, double(0.0))
    root = solve(NewtonKrylov(products="difference"), lambda y: Once.apply(y) + 1, double(0.0))
    assert abs(root.y.item() - 2) < 1e-12


def test_inference_mode_is_refused_where_derivatives_are_needed():
    for products in ("reverse", "forward"):
        with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode\(\) knows no derivatives"):
            solve(NewtonKrylov(products=products), torch.cos, double(0.2))
    for method in (NewtonKrylov(products="difference"), "anderson", "fixed_point"):
        with torch.inference_mode():
            assert abs(solve(method, torch.cos, double(0.2)).y.item() - DOTTIE) < 2e-12


@pytest.mark.parametrize("products", PRODUCTS)
def test_fused_attention_and_encoder_layers_pass(products):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        root = solve(NewtonKrylov(products=products), lambda y: 0.3 * torch.tanh(layer(y)) + x, x)
        assert root.converged and (0.3 * torch.tanh(layer(root.y)) + x - root.y).abs().max() < 1e-11
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("n", [1, 2, 7, 25])
def test_gmres_agrees_with_a_dense_solve(n):
    a, b = torch.eye(n, dtype=torch.float64) + matrix(n, 3.0), torch.linspace(1, 2, n, dtype=torch.float64)
    apply = Counted(lambda v: a @ v)
    x, left = gmres(apply, b, tol=1e-13, dim=30)
    assert left <= 1e-13 and apply.calls <= n
    torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-9, atol=1e-9)  # times the condition of a


def test_gmres_stops_when_the_krylov_space_is_exhausted_and_restarts_where_asked():
    b = torch.linspace(1, 2, 40, dtype=torch.float64)
    apply = Counted(lambda v: 3 * v)
    x, left = gmres(apply, b, tol=1e-15, dim=30)
    assert apply.calls == 1 and left <= 1e-15
    torch.testing.assert_close(x, b / 3, rtol=1e-15, atol=0)
    spread = torch.linspace(1, 100, 40, dtype=torch.float64)
    assert gmres(lambda v: spread * v, b, tol=1e-10, dim=5)[1] > 1e-3
    x, left = gmres(lambda v: spread * v, b, tol=1e-10, dim=5, restarts=200)
    assert left <= 1e-10
    torch.testing.assert_close(x, b / spread, rtol=1e-8, atol=0)


def test_gmres_says_so_where_there_is_no_solution():
    singular = torch.diag(double(1.0, 2.0, 0.0))
    x, left = gmres(lambda v: singular @ v, double(1.0, 1.0, 1.0), tol=1e-10, dim=10)
    assert torch.isfinite(x).all() and abs(left - 1 / math.sqrt(3)) < 1e-6  # the part of b out of reach
    assert math.isnan(gmres(lambda v: v * math.nan, double(1.0), tol=1e-3, dim=3)[1])
    assert gmres(lambda v: v, double(0.0, 0.0), tol=1e-3, dim=3)[1] == 0


def rooted(theta, orders, tol=1e-14):
    """The root of y = sin(a y) / 2 + theta, and a list that counts products."""
    a, products = matrix(3, 1.5), []

    def g(y):
        return 0.5 * torch.sin(a @ y) + theta

    with torch.no_grad():
        y = solve("newton_krylov", g, torch.zeros(3, dtype=torch.float64)).y
    return differentiable_root(g, y, orders=orders, tol=tol, count=lambda: products.append(1),
                               fail=lambda left: ArithmeticError(f"left {left}")), a, products


@pytest.mark.parametrize("orders", [1, 2])
def test_the_derivative_of_a_root_is_that_of_the_implicit_function_theorem(orders):
    theta = double(0.3, -0.2, 0.7).requires_grad_()
    y, a, products = rooted(theta, orders)
    jacobian = 0.5 * torch.cos(a @ y.detach())[:, None] * a
    v = double(1.0, 2.0, -1.0)
    (got,) = torch.autograd.grad(y, theta, v)
    wanted = torch.linalg.solve((torch.eye(3, dtype=torch.float64) - jacobian).T, v)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    assert 1 <= len(products) <= 3  # GMRES in three dimensions, and nothing for the correction that only adds an order


def test_second_derivatives_are_exact_and_third_ones_refused():
    theta = double(0.3, -0.2, 0.7).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda theta: rooted(theta, 2)[0], (theta,))
    with pytest.raises(RuntimeError, match='gradient="backprop" for second ones'):
        torch.autograd.grad(rooted(theta, 1)[0].sum(), theta, create_graph=True)
    for power in (1, 3):  # the gradient handed in is a constant, or depends on theta
        (first,) = torch.autograd.grad((rooted(theta, 2)[0] ** power).sum(), theta, create_graph=True)
        with pytest.raises(RuntimeError, match="not third ones"):
            torch.autograd.grad(first.sum(), theta, create_graph=True)


def test_a_linear_system_that_is_not_solved_in_backward_is_an_error():
    b = torch.ones(3, dtype=torch.float64, requires_grad=True)
    a = torch.diag(double(1.0, 0.5, 0.25))  # I - a is singular

    y = differentiable_root(lambda y: a @ y + b, torch.zeros(3, dtype=torch.float64), orders=1, tol=1e-10,
                            count=lambda: None, fail=lambda left: ArithmeticError(f"left {left:.3f}"))
    with pytest.raises(ArithmeticError, match=r"left 0\.577"):
        y.sum().backward()


def test_the_derivative_takes_any_size_and_passes_what_is_not_finite():
    grads = {}
    for size in (1.0, 1e-200, 1e200, math.inf, math.nan):  # a loss scaler tries sizes that overflow
        theta = double(0.3, -0.2, 0.7).requires_grad_()
        (grads[size],) = torch.autograd.grad(rooted(theta, 2)[0], theta, double(1.0, 2.0, -1.0) * size)
    for size in (1e-200, 1e200):
        torch.testing.assert_close(grads[size] / size, grads[1.0], rtol=1e-12, atol=0)
    assert grads[math.inf].isnan().all() and grads[math.nan].isnan().all()


def test_nothing_is_left_on_the_leaf_of_the_recorded_graph():
    theta = double(0.3, -0.2, 0.7).requires_grad_()
    y, _, _ = rooted(theta, 1)
    leaf = y.grad_fn.inverse.leaf
    y.sum().backward()
    assert leaf.grad is None and theta.grad is not None


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: get_nonlinear("newton"), ValueError, "unknown nonlinear method 'newton'; known: fixed_point, anderson, "),
    (lambda: get_nonlinear(Anderson), TypeError, "nonlinear must be a name"),
    (lambda: get_nonlinear(3), TypeError, "nonlinear must be a name"),
    (lambda: Anderson(window=0), ValueError, "window must be at least 1, got 0"),
    (lambda: Anderson(window=2.5), TypeError, "window must be an int"),
    (lambda: NewtonKrylov(products="exact"), ValueError, "products must be one of reverse, .*got 'exact'"),
    (lambda: NewtonKrylov(linear_tol=2.0), ValueError, "linear_tol must lie between 0 and 1, got 2.0"),
    (lambda: NewtonKrylov(linear_tol="small"), TypeError, "linear_tol must be a number"),
    (lambda: NewtonKrylov(krylov_dim=0), ValueError, "krylov_dim must be at least 1"),
])
def test_bad_options_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
