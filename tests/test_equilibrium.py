"""Equilibrium depth (Bai, Kolter & Koltun 2019): z* with f(z*) = 0, and its gradient."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import root
from torch import nn

from solvers import SOLVERS, Equilibrium, LieTrotter, SolverError, get_solver, solve

F64 = torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-14}
MODES = ("backprop", "implicit")


def matrix(n, size=0.9, dtype=F64):
    """A with |A + I| = size (spectral norm): z + A z + b contracts."""
    m = torch.randn(n, n, dtype=dtype)
    return size * m / torch.linalg.matrix_norm(m, 2) - torch.eye(n, dtype=dtype)


class Net(nn.Module):
    """f(z) = tanh(W z + U x) - z, row by row, which contracts for |W| < 1."""

    def __init__(self, n=6, x=None):
        super().__init__()
        self.w, self.u = (nn.Parameter(a * torch.randn(n, n, dtype=F64) / n**0.5) for a in (0.5, 1.0))
        self.x = torch.randn(3, n, dtype=F64) if x is None else x
        self.calls = []

    def forward(self, z, l):
        self.calls.append(z.detach().clone())
        return torch.tanh(z @ self.w.T + self.x @ self.u.T) - z


def words_of(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --- where it ends ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (torch.float32, 1e-6), (torch.complex128, 1e-12)])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_a_linear_field_comes_to_rest_at_its_closed_form(window, dtype, tol):
    a, b = matrix(7, dtype=dtype), torch.randn(4, 7, dtype=dtype)
    solution = solve(lambda z, l: z @ a.T + b, torch.randn(4, 7, dtype=dtype), rtol=tol, atol=tol * 1e-2,
                     solver=Equilibrium(window=window, max_iterations=1000))
    exact = -torch.linalg.solve(a, b.T).T
    assert solution.z.dtype == dtype
    assert (solution.z - exact).abs().max() < 100 * tol
    assert solution.nfe == solution.n_steps + 1 and len(solution.errors) == len(solution.steps) == solution.n_steps
    assert solution.errors[-1] <= 1 < solution.errors[-2]
    left = (solution.z @ a.T + b).abs().square().mean(1).sqrt().max().item()
    per_real = 2**0.5 if dtype.is_complex else 1  # real and imaginary parts are entries of their own
    assert solution.residual == pytest.approx(left / per_real, rel=1e-3, abs=1e-7 * tol)


def test_the_cosine_comes_to_rest_at_the_dottie_number():
    z = solve(lambda z, l: torch.cos(z) - z, torch.zeros(1, dtype=F64), solver="equilibrium", **TIGHT).z
    assert abs(z.item() - 0.7390851332151607) < 1e-12


@pytest.mark.parametrize("method", ["hybr", "anderson", "broyden1"])
def test_scipy_finds_the_same_root(method):
    f = Net()
    z = solve(f, torch.zeros(3, 6, dtype=F64), solver="equilibrium", **TIGHT).z
    w, drive = f.w.detach().numpy(), (f.x @ f.u.T).detach().numpy()
    for row, d in zip(z.detach().numpy(), drive, strict=True):
        found = root(lambda y, d=d: np.tanh(w @ y + d) - y, np.zeros(6), method=method, tol=1e-11)
        assert found.success and np.abs(found.x - row).max() < 1e-9


def test_integrating_for_long_ends_at_the_same_state():
    f = Net()
    z0 = torch.zeros(3, 6, dtype=F64)
    settled = solve(f, z0, solver="dopri5", span=(0.0, 60.0), rtol=1e-10, atol=1e-12).z
    assert (solve(f, z0, solver="equilibrium", **TIGHT).z - settled).abs().max() < 1e-8


def test_a_tuple_ends_where_its_parts_laid_side_by_side_do():
    f = Net()

    def split(z, l):
        return tuple(f(torch.cat(z, 1), l).split([2, 4], 1))

    whole = solve(f, torch.zeros(3, 6, dtype=F64), solver="equilibrium", **TIGHT)
    x, y = (torch.zeros(3, n, dtype=F64) for n in (2, 4))
    parts = solve(split, (x, y), solver="equilibrium", **TIGHT)
    assert (torch.cat(parts.z, 1) - whole.z).abs().max() < 1e-12 and parts.nfe == whole.nfe
    uneven = solve(lambda z, l: (1 - z[0], z[0].sum() - z[1]), (torch.zeros(2, 2), torch.zeros(())),
                   solver="equilibrium")
    assert (uneven.z[0] - 1).abs().max() < 1e-3 and abs(uneven.z[1] - 4) < 1e-2


def test_iterates_are_those_of_anderson_type_ii():
    """Walker & Ni 2011, section 2, with damping: γ by numpy's least squares, row by row."""
    f, h, window = Net(), 0.7, 3
    solve(f, torch.zeros(3, 6, dtype=F64), solver=Equilibrium(window=window, h=h), rtol=1e-6)
    calls = [z.numpy() for z in f.calls[:8]]
    ks = [f(torch.tensor(z), None).detach().numpy() for z in calls]
    for i in range(1, len(calls)):
        for row in range(3):
            z, k = [x[row] for x in calls[:i]][-window - 1 :], [x[row] for x in ks[:i]][-window - 1 :]
            wanted = z[-1] + h * k[-1]
            if i > 1:
                dz, dk = (np.stack([b - a for a, b in pairwise(x)], 1) for x in (z, k))
                wanted -= (dz + h * dk) @ np.linalg.lstsq(dk, k[-1], rcond=None)[0]
            assert np.abs(calls[i][row] - wanted).max() < 1e-7


def test_without_a_window_it_is_eulers_method_run_to_rest():
    f = Net()
    solve(f, torch.zeros(3, 6, dtype=F64), solver=Equilibrium(window=0, h=0.5), rtol=1e-2)
    calls = torch.stack(f.calls[:4])
    euler = solve(f, torch.zeros(3, 6, dtype=F64), solver="euler", span=(0.0, 1.5), n_steps=3, save_at="steps").states
    assert (calls - euler).abs().max() < 1e-12


def test_with_a_wide_window_a_linear_field_takes_n_iterations():
    """Anderson's method is then GMRES in disguise (Walker & Ni 2011, theorem 2.2): n + 1 steps after the first."""
    a, b = torch.diag(torch.tensor([-1.9, -1.2, -0.8, -0.4], dtype=F64)), torch.ones(1, 4, dtype=F64)
    for window, fewest, most in ((4, 6, 7), (0, 30, 400)):
        solution = solve(lambda z, l: z @ a.T + b, torch.zeros(1, 4, dtype=F64), rtol=1e-9, atol=0.0,
                         solver=Equilibrium(window=window, max_iterations=400))
        assert (solution.z + torch.linalg.solve(a, b.T).T).abs().max() < 1e-8
        assert fewest <= solution.n_steps <= most


def test_a_linear_field_from_which_plain_steps_run_away_is_solved_all_the_same():
    a, b = torch.diag(torch.tensor([-3.0, -2.5, 0.5, 2.0], dtype=F64)), torch.ones(1, 4, dtype=F64)
    exact = -torch.linalg.solve(a, b.T).T
    solution = solve(lambda z, l: z @ a.T + b, torch.zeros(1, 4, dtype=F64), solver="equilibrium", rtol=1e-9)
    assert (solution.z - exact).abs().max() < 1e-7 and solution.n_steps <= 16
    with pytest.raises(SolverError, match="no equilibrium found"):
        solve(lambda z, l: z @ a.T + b, torch.zeros(1, 4, dtype=F64), solver=Equilibrium(window=0))


def test_a_row_whose_residual_grows_starts_again_with_a_plain_step_until_those_are_not_trusted():
    """z³ + z = 1, where z + f(z) runs away: Anderson's step is given another chance after five plain ones in vain."""
    calls = []

    def f(z, l):
        calls.append(z.clone())
        return 1 - z - z**3

    z = solve(f, 0.3 * torch.arange(5, dtype=F64)[None], solver="equilibrium", rtol=1e-10, atol=1e-12).z
    assert (z - 0.6823278038280193).abs().max() < 1e-8
    calls = torch.cat(calls)
    ks = 1 - calls - calls**3
    grew = [i for i in range(1, 12) if ks[i].norm() > ks[i - 1].norm()]
    assert grew == [1, 2, 3, 4, 5]
    plain = [(calls[i + 1] - calls[i] - ks[i]).abs().max().item() < 1e-12 for i in grew]
    assert plain == [True] * 4 + [False]


def test_a_state_at_rest_is_left_alone():
    z0 = torch.randn(2, 3)
    solution = solve(lambda z, l: torch.zeros_like(z), z0, solver="equilibrium", save_at=[0.0, 1.0])
    assert torch.equal(solution.z, z0) and (solution.nfe, solution.n_steps, solution.residual) == (2, 1, 0.0)
    assert torch.equal(solution.states, torch.stack([z0, z0])) and solution.depths == [0.0, 1.0]


def test_half_precision_is_searched_in_float32():
    a, b = matrix(5, 0.5, torch.float32), torch.randn(2, 5)
    solution = solve(lambda z, l: z @ a.to(z.dtype).T + b.to(z.dtype), torch.zeros(2, 5, dtype=torch.bfloat16),
                     solver="equilibrium")
    assert solution.z.dtype == torch.bfloat16
    assert (solution.z.float() + torch.linalg.solve(a, b.T).T).abs().max() < 0.2


@pytest.mark.parametrize("mode", Equilibrium.gradients)
def test_under_autocast_only_the_field_is_coarse(mode):
    layer, b = nn.Linear(8, 8), torch.randn(3, 8)
    nn.init.orthogonal_(layer.weight, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = solve(lambda z, l: layer(z) + b - z, torch.zeros(3, 8), solver="equilibrium", gradient=mode)
    exact = torch.linalg.solve(torch.eye(8) - layer.weight, (layer.bias + b).T).T
    assert solution.z.dtype == torch.float32 and (solution.z - exact).abs().max() < 0.2  # rtol is 0.03
    (got,) = torch.autograd.grad(solution.z.sum(), layer.bias)
    wanted = 3 * torch.linalg.solve(torch.eye(8) - layer.weight.T, torch.ones(8))
    assert mode == "jacobian_free" or (got - wanted).norm() < 0.1 * wanted.norm()


# --- rows and padding ------------------------------------------------------------------------------------------------

def test_batch_mates_do_not_matter():
    """Some rows need 5 iterations and some 40, and each ends as it does alone."""
    rates = torch.tensor([0.05, 0.5, 0.9], dtype=F64)[:, None]
    w = torch.randn(8, 8, dtype=F64)
    w, x = w / torch.linalg.matrix_norm(w, 2), torch.randn(3, 8, dtype=F64)

    def field(rows):
        return lambda z, l: torch.tanh(rates[rows] * (z @ w.T) + x[rows]) - z

    together = solve(field([0, 1, 2]), torch.zeros(3, 8, dtype=F64), solver="equilibrium", rtol=1e-8)
    alone = [solve(field([i]), torch.zeros(1, 8, dtype=F64), solver="equilibrium", rtol=1e-8) for i in range(3)]
    assert (together.z - torch.cat([s.z for s in alone])).abs().max() < 1e-12
    counts = [s.n_steps for s in alone]
    assert counts[0] < counts[1] < counts[2] == together.n_steps


def test_a_row_at_rest_moves_on_where_others_pull_it_away():
    """Rows that do depend on each other: the first would be at rest at the start."""
    def f(z, l):
        return torch.stack([z[1] - z[0], 1 - z[1]])

    z = solve(f, torch.zeros(2, 1, dtype=F64), solver="equilibrium", **TIGHT).z
    assert (z - 1).abs().max() < 1e-10


@pytest.mark.parametrize("junk", [0.0, 1e6, math.nan])
def test_padding_does_not_matter_and_stays_as_it_was(junk):
    w = torch.randn(4, 4, dtype=F64) / 4
    x = torch.randn(2, 3, 4, dtype=F64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 3:] = False
    padded = torch.cat([x, torch.full((2, 2, 4), junk, dtype=F64)], 1)

    def field(x):
        return lambda z, l: torch.tanh(z @ w.T + x) - z

    alone = solve(field(x), torch.zeros(2, 3, 4, dtype=F64), solver="equilibrium", rtol=1e-8)
    start = torch.cat([torch.zeros(2, 3, 4, dtype=F64), padded[:, 3:]], 1).requires_grad_()
    together = solve(field(padded), start, solver="equilibrium", rtol=1e-8, mask=mask)
    assert (together.z[:, :3] - alone.z).abs().max() < 1e-12
    assert together.nfe == alone.nfe and together.errors == pytest.approx(alone.errors, rel=1e-6)
    assert torch.equal(together.z[:, 3:], torch.nan_to_num(padded[:, 3:]))
    (grad,) = torch.autograd.grad(together.z[mask].square().sum(), start)
    assert (grad.isfinite().all() and (grad[~mask] == 0).all())


# --- gradients -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_a_linear_field_is_its_closed_form(mode):
    """z* = -A⁻¹ b: with v = -A⁻ᵀ g, dL/db = v and dL/dA = v z*ᵀ."""
    a, b, z0 = (x.requires_grad_() for x in (matrix(6), torch.randn(6, dtype=F64), torch.randn(6, dtype=F64)))
    g = torch.randn(6, dtype=F64)
    solution = solve(lambda z, l: a @ z + b, z0, solver="equilibrium", gradient=mode, **TIGHT)
    got = torch.autograd.grad(solution.z @ g, (a, b, z0))
    with torch.no_grad():
        v = -torch.linalg.solve(a.T, g)
        exact = torch.outer(v, -torch.linalg.solve(a, b)), v, torch.zeros(6, dtype=F64)
    for x, y in zip(got, exact, strict=True):
        assert (x - y).abs().max() < 1e-9
    assert 0 < solution.nfe_backward <= 6 if mode == "implicit" else solution.nfe_backward == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_finite_differences_for_what_f_closes_over(mode):
    """Parameters of a module, a leaf, and a tensor made from another one before the solve."""
    f, weight = Net(n=3), torch.randn(3, 3, dtype=F64)

    def run(w, u, x):
        f.x = torch.sin(x)  # not a leaf
        field = lambda z, l: torch.func.functional_call(f, {"w": w, "u": u}, (z, l))  # noqa: E731
        return solve(field, torch.zeros(3, 3, dtype=F64), solver="equilibrium", gradient=mode, **TIGHT).z * weight

    inputs = [x.detach().requires_grad_() for x in (f.w, f.u, torch.randn(3, 3, dtype=F64))]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-5, atol=1e-7)


def test_the_implicit_gradient_is_that_of_many_iterations():
    """Plain iteration, recorded until rounding: written out here."""
    f = Net()
    z = torch.zeros(3, 6, dtype=F64)
    for _ in range(200):
        z = z + f(z, None)
    wanted = torch.autograd.grad(z.square().sum(), (f.w, f.u))
    for mode in MODES:
        z = solve(f, torch.zeros(3, 6, dtype=F64), solver="equilibrium", gradient=mode, **TIGHT).z
        for x, y in zip(torch.autograd.grad(z.square().sum(), (f.w, f.u)), wanted, strict=True):
            assert (x - y).abs().max() < 1e-9 * y.abs().max()


def test_backprop_is_the_gradient_of_what_was_computed_however_coarse():
    """At a loose tolerance, where the equilibrium's own gradient is another; z0 has a share in what was found."""
    f = Net(n=3)
    z0 = torch.randn(3, 3, dtype=F64, requires_grad=True)

    def run(w, z0):
        field = lambda z, l: torch.func.functional_call(f, {"w": w}, (z, l))  # noqa: E731
        return solve(field, z0, solver=Equilibrium(window=1), rtol=0.05).z

    w = f.w.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (w, z0), eps=1e-6, atol=1e-6)
    assert torch.autograd.grad(run(w, z0).sum(), z0)[0].abs().max() > 1e-4


def test_the_jacobian_free_gradient_is_that_of_one_iteration_at_the_root():
    """Fung et al. 2022: h ∂f/∂b = h for z' = A z + b."""
    a, b = matrix(4), torch.randn(4, dtype=F64, requires_grad=True)
    solution = solve(lambda z, l: a @ z + b, torch.zeros(4, dtype=F64), solver=Equilibrium(h=0.5),
                     gradient="jacobian_free", **TIGHT)
    assert torch.equal(torch.autograd.grad(solution.z.sum(), b)[0], torch.full((4,), 0.5, dtype=F64))
    assert (solution.z + torch.linalg.solve(a, b.detach())).abs().max() < 1e-10 and solution.nfe_backward == 0


def test_second_derivatives_come_from_backprop_and_implicit_says_so():
    b = torch.tensor([0.3], dtype=F64, requires_grad=True)
    options = {"solver": "equilibrium", **TIGHT}
    z = solve(lambda z, l: torch.cos(b * z) - z, torch.zeros(1, dtype=F64), **options).z
    (first,) = torch.autograd.grad(z, b, create_graph=True)
    (second,) = torch.autograd.grad(first, b)
    ends = []
    for shift in (-1e-4, 0, 1e-4):
        c = b.item() + shift
        ends.append(root(lambda x, c=c: np.cos(c * x) - x, 0.9, tol=1e-14).x.item())
    assert second.item() == pytest.approx((ends[0] - 2 * ends[1] + ends[2]) / 1e-8, abs=1e-5)
    z = solve(lambda z, l: torch.cos(b * z) - z, torch.zeros(1, dtype=F64), gradient="implicit", **options).z
    with pytest.raises(RuntimeError, match='gradient="implicit" gives first derivatives only'):
        torch.autograd.grad(torch.autograd.grad(z, b, create_graph=True)[0], b)


def test_the_memory_of_the_implicit_gradient_does_not_grow_with_the_iterations():
    def kept(mode, rtol):
        f, total = Net(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: total.append(x.numel()) or x, lambda x: x):
            solve(f, torch.zeros(3, 6, dtype=F64), solver="equilibrium", gradient=mode, rtol=rtol, atol=0)
        return sum(total)

    assert kept("implicit", 1e-3) == kept("implicit", 1e-12)
    assert kept("backprop", 1e-12) > 2 * kept("backprop", 1e-3)


def test_where_no_gradient_is_wanted_none_is_prepared():
    a, b = matrix(4), torch.randn(4, dtype=F64)
    z0 = torch.zeros(4, dtype=F64, requires_grad=True)
    for mode in Equilibrium.gradients:
        with torch.no_grad():
            assert not solve(Net(), torch.zeros(3, 6, dtype=F64), solver="equilibrium", gradient=mode).z.requires_grad
    solution = solve(lambda z, l: a @ z + b, z0, solver="equilibrium", gradient="implicit")
    assert (torch.autograd.grad(solution.z.sum(), z0)[0] == 0).all() and solution.nfe_backward == 0


def test_a_singular_derivative_ends_the_backward_pass_with_a_sentence():
    b = torch.zeros(2, dtype=F64, requires_grad=True)
    a = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)
    z = solve(lambda z, l: a @ z + b, torch.zeros(2, dtype=F64), solver="equilibrium", gradient="implicit").z
    with pytest.raises(SolverError, match=r"GMRES did not solve .*may be singular at the equilibrium"):
        z.sum().backward()


# --- failures --------------------------------------------------------------------------------------------------------

def test_a_field_without_equilibrium_ends_in_bounded_work_with_a_sentence():
    calls = []

    def f(z, l):
        calls.append(1)
        return torch.ones_like(z)

    text = words_of(SolverError, lambda: solve(f, torch.zeros(2, 3), solver=Equilibrium(max_iterations=20)))
    assert len(calls) <= 22  # two of them to see whether f is noisy
    for word in ("no equilibrium found", "|f(z)| = 1 ", "20 iterations", "lower h", "max_iterations"):
        assert word in text
    text = words_of(SolverError, lambda: solve(f, torch.zeros(2, 3), solver="equilibrium", max_nfe=7))
    assert "max_nfe = 7" in text and "|f(z)| = 1 " in text and "7 iterations" in text
    with pytest.raises(SolverError, match="max_nfe = 1 evaluations"):
        solve(f, torch.zeros(2, 3), solver="equilibrium", max_nfe=1)


def test_iterations_that_blow_up_end_at_once():
    with pytest.raises(SolverError, match="infinite or NaN in iteration"):
        solve(lambda z, l: z**3 + 5, torch.ones(2, 3), solver=Equilibrium(window=0))


def test_nan_in_the_input_or_from_f_is_named():
    z0 = torch.zeros(2, 3)
    z0[0, 0] = math.nan
    with pytest.raises(SolverError, match=r"z0 is not finite \(16.7%"):
        solve(lambda z, l: -z, z0, solver="equilibrium")
    with pytest.raises(SolverError, match="NaN in iteration 1 "):
        solve(lambda z, l: z * math.nan, torch.ones(2, 3), solver="equilibrium")


@pytest.mark.parametrize("size", [1.0, 0.1])
def test_a_noisy_field_is_blamed(size):
    with pytest.raises(SolverError, match="different values at one and the same point"):
        solve(lambda z, l: 1 - z + size * torch.randn_like(z), torch.zeros(2, 30, dtype=F64), solver="equilibrium")


def test_a_field_that_depends_on_l_is_refused_unless_it_rests_at_the_same_state():
    z0 = torch.zeros(2, 3, dtype=F64)
    for mode in Equilibrium.gradients:
        for f in (lambda z, l: 1 + l - z, lambda z, l: l * (1 - z)):  # the second is at rest anywhere at l = 0
            with pytest.raises(ValueError, match="f must not depend on l for solver 'equilibrium'"):
                solve(f, z0, solver="equilibrium", gradient=mode)
    assert (solve(lambda z, l: (1 + l) * (1 - z), z0, solver="equilibrium").z - 1).abs().max() < 1e-3


def test_a_field_in_pieces_is_refused():
    def f(z, l):
        return 1 - z

    f.pieces = [(0.0, 1.0, f), (1.0, 2.0, f)]
    with pytest.raises(ValueError, match=r"the same at every depth.*2 pieces"):
        solve(f, torch.zeros(2, 3), span=(0.0, 2.0), solver="equilibrium")


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"save_at": [0.0, 0.5]}, ValueError, ["save_at", "ends of the span", "[0.5]"]),
    ({"span": (0.0, torch.tensor(1.0, requires_grad=True))}, ValueError, ["span must not require grad"]),
    ({"n_steps": 3}, ValueError, ["n_steps is for fixed-step solvers"]),
    ({"gradient": "adjoint"}, ValueError, ["backprop, implicit, jacobian_free", "'adjoint'"]),
    ({"rtol": 0, "atol": 0}, ValueError, ["rtol and atol"]),
])
def test_what_an_equilibrium_cannot_do_is_refused(options, error, words):
    text = words_of(error, lambda: solve(lambda z, l: 1 - z, torch.zeros(2, 3), **{"solver": "equilibrium"} | options))
    assert all(word in text for word in words)


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: Equilibrium(window=-1), ValueError, "window"),
    (lambda: Equilibrium(window=2.0), TypeError, "window"),
    (lambda: Equilibrium(window=False), TypeError, "window"),
    (lambda: Equilibrium(h=0.0), ValueError, "h must be a finite number above 0"),
    (lambda: Equilibrium(max_iterations=0), ValueError, "max_iterations"),
    (lambda: Equilibrium(gradient_tol=2.0), ValueError, "gradient_tol"),
    (lambda: get_solver("equilibrium", memory=3), ValueError, "known: window, h, max_iterations, gradient_tol"),
    (lambda: get_solver("equilibrium", per_sample=True), ValueError, "embedded row"),
    (lambda: LieTrotter("equilibrium"), ValueError, "fixed-step"),
])
def test_wrong_options_are_refused_by_name(make, error, words):
    assert words in words_of(error, make)


def test_the_registry_knows_it_as_no_approximation_over_a_span():
    solver = get_solver("equilibrium", window=3)
    assert solver == Equilibrium(window=3) and SOLVERS["equilibrium"].to_equilibrium
    assert (solver.order, solver.is_adaptive, solver.is_implicit, solver.is_reversible) == (0, True, False, False)


def test_functional_transforms_are_refused():
    with pytest.raises(NotImplementedError, match=r"torch.func"):
        torch.func.vmap(lambda z: solve(lambda z, l: 1 - z, z, solver="equilibrium").z)(torch.zeros(2, 3, 4))
