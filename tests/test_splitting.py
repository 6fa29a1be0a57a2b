"""Splitting: compositions against products of exact flows, orders measured, clocks of the parts, counts."""

import math
from dataclasses import replace

import pytest
import torch
from convergence import PROBLEMS, assert_order, orbit, orbit_exact

from solvers import SOLVERS, LieTrotter, Strang, Yoshida4, get_solver, solve
from solvers.implicit import METHODS as IMPLICIT
from solvers.splitting import METHODS

EVEN = pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
A = torch.tensor([[0.3, 1.0], [-0.5, 0.1]], dtype=torch.float64)
B = torch.tensor([[-0.2, 0.4], [0.7, 0.0]], dtype=torch.float64)
C = torch.tensor([[0.0, -0.6], [0.2, 0.5]], dtype=torch.float64)
Z0 = torch.tensor([0.4, -0.9], dtype=torch.float64)


class Sum:
    """A field with parts given by functions of (z, l)."""

    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, z, l):
        return sum(part(z, l) for part in self.parts)


def linear(matrix):
    return lambda z, l: matrix @ z


@EVEN
@pytest.mark.parametrize("method, order", [
    (LieTrotter(), 1), (LieTrotter("rk4"), 1), (Strang(), 2), (Strang("euler"), 1), (Strang("rk4"), 2), (Yoshida4(), 4),
    (Yoshida4("midpoint"), 3), (Yoshida4("kutta3"), 3), (Yoshida4("butcher6"), 4),
    (Yoshida4(get_solver("revnet")), 2),
], ids=lambda x: getattr(x, "name", str(x)))
def test_splitting_measures_the_order_that_it_states(method, order, even):
    # only the problem in parts that do not commute: one part alone is integrated to the order of the base
    assert method.order == order
    assert_order(method, order, even=even, finer=2, problems={"orbit": PROBLEMS["orbit"]})


def test_names_and_defaults_are_stated():
    assert [(name, m.base.name) for name, m in METHODS.items()] == [
        ("lie", "euler"), ("strang", "midpoint"), ("yoshida4", "rk4")]
    assert all(SOLVERS[name].name == name for name in METHODS)
    assert LieTrotter("rk4").name == "lie(rk4)"
    assert get_solver("strang", base="rk4").name == "strang(rk4)"


def test_lie_with_euler_is_the_residual_network_of_two_sublayers():
    f = Sum(lambda z, l: torch.tanh(A @ z), lambda z, l: torch.sin(B @ z))
    z = Z0 + torch.tanh(A @ Z0)
    z = z + torch.sin(B @ z)
    assert torch.equal(solve(f, Z0, solver="lie", n_steps=1).z, z)


@pytest.mark.parametrize("parts", [(A, B), (A, B, C)], ids=["two", "three"])
def test_compositions_are_products_of_exact_flows(parts):
    """With a base so fine that it is exact, h = 1/2: flows are matrix exponentials."""
    def lie(h):
        product = torch.eye(2, dtype=torch.float64)
        for part in parts:
            product = torch.linalg.matrix_exp(h * part) @ product
        return product

    def strang(h):
        halves = [torch.linalg.matrix_exp(h / 2 * part) for part in parts[:-1]]
        product = torch.eye(2, dtype=torch.float64)
        for half in halves:
            product = half @ product
        product = torch.linalg.matrix_exp(h * parts[-1]) @ product
        for half in reversed(halves):
            product = half @ product
        return product

    w1 = 1.3512071919596578  # Yoshida 1990, 1 / (2 - 2^(1/3))
    w0 = -1.7024143839193153
    yoshida = strang(w1 / 2) @ strang(w0 / 2) @ strang(w1 / 2)
    f = Sum(*map(linear, parts))
    for method, flow in ((LieTrotter, lie(0.5)), (Strang, strang(0.5)), (Yoshida4, yoshida)):
        z = solve(f, Z0, span=(0.0, 0.5), solver=method("dopri853"), n_steps=1).z
        assert (z - flow @ Z0).abs().max() < 1e-9  # one step of an eighth-order base


def test_every_part_keeps_its_own_clock():
    """Two parts that depend on l alone: each must be integrated over the whole step, wherever the others stand."""
    f = Sum(lambda z, l: torch.cos(l) * torch.ones_like(z), lambda z, l: torch.exp(l) * torch.ones_like(z),
            lambda z, l: l**3 * torch.ones_like(z))
    exact = math.sin(1.0) + math.e - 1 + 0.25
    for method in (LieTrotter, Strang, Yoshida4):
        z = solve(f, torch.zeros(1, dtype=torch.float64), solver=method("dopri853"), n_steps=2).z
        assert abs(z.item() - exact) < 1e-10  # two steps of an eighth-order base


def test_depths_of_the_parts_are_those_of_the_documented_windows():
    seen = []

    def part(z, l):
        seen.append(round(l.item(), 4))
        return z * 0

    solve(Sum(part, lambda z, l: z * 0), Z0, span=(2.0, 3.0), solver=Yoshida4("euler"), n_steps=1)
    w1 = 1 / (2 - 2 ** (1 / 3))
    starts = [0, w1 / 2, w1, 0.5, 1 - w1, 1 - w1 / 2]
    assert seen == [round(2 + x, 4) for x in starts]


def test_a_field_without_parts_is_integrated_whole():
    f, exact = PROBLEMS["shear"]
    for name, base in (("lie", "euler"), ("strang", "midpoint")):
        z = solve(f, exact(0.0), solver=name, n_steps=5).z
        assert torch.allclose(z, solve(f, exact(0.0), solver=base, n_steps=5).z, rtol=0, atol=1e-15)
    assert solve(f, exact(0.0), solver="yoshida4", n_steps=5).nfe == SOLVERS["yoshida4"].nfe(5, 1) == 5 * 3 * 4


@pytest.mark.parametrize("name, nfe", [
    ("lie", 7), ("strang", 7 * (2 * 2 + 2) / 2), ("yoshida4", 7 * 3 * (2 * 4 + 4) / 2)])
def test_a_part_of_m_counts_one_mth(name, nfe):
    assert solve(orbit, orbit_exact(0.0), solver=name, n_steps=7).nfe == SOLVERS[name].nfe(7) == nfe


@pytest.mark.parametrize("outer", [LieTrotter, Strang, Yoshida4])
@pytest.mark.parametrize("inner", [LieTrotter, Strang, Yoshida4])
def test_a_splitting_of_a_splitting_counts_what_it_evaluates(outer, inner):
    nested = outer(inner())  # the inner one sees one part at a time
    assert solve(orbit, orbit_exact(0.0), solver=nested, n_steps=4).nfe == nested.nfe(4)


def test_each_part_has_a_memory_of_its_own():
    """AB2 whose memory is a list that it writes into: as the registry's, where the first step is Euler's."""
    class Listing:
        name, order, n_stages, embedded_order = "own", 1, 1, None
        nodes = [0.0]  # noqa: RUF012
        is_adaptive = is_implicit = is_reversible = False
        gradients = ("backprop",)

        def init(self, memory):
            return []

        def step(self, f, z, step, memory):
            memory.append(f(z, step.at[0]))
            k = memory[-1] if len(memory) < 2 else 1.5 * memory[-1] - 0.5 * memory[-2]
            return z + step.h * k, memory[-2:]

    f, z, last = Sum(lambda z, l: -z, lambda z, l: 3 + 0 * z), Z0, None
    for _ in range(8):
        k = -z
        z, last = z + (k if last is None else 1.5 * k - 0.5 * last) / 8, k
        z = z + 3 / 8
    torch.testing.assert_close(solve(f, Z0, solver=LieTrotter(Listing()), n_steps=8).z, z)


@pytest.mark.parametrize("name", ["lie", "strang", "lie(ab2)"])
@pytest.mark.parametrize("numbers", [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_pieces_may_have_different_numbers_of_parts(name, numbers):
    """Each part of z' = -z is -z / n: what comes of a piece depends on it alone."""
    def piece(n):
        f = Sum(*[lambda z, l: -z / n] * n)
        return f if n > 1 else (lambda z, l: -z)

    class Pieces:
        pieces = [(i / 2, (i + 1) / 2, piece(n)) for i, n in enumerate(numbers)]  # noqa: RUF012

    solver = LieTrotter(get_solver("ab2")) if "ab2" in name else name
    z = Z0
    for start, stop, f in Pieces.pieces:
        z = solve(f, z, span=(start, stop), solver=solver, n_steps=3).z
    torch.testing.assert_close(solve(Pieces(), Z0, solver=solver, n_steps=6).z, z, rtol=1e-13, atol=0)


def test_symmetric_compositions_of_a_symmetric_base_run_back_exactly():
    base = replace(IMPLICIT["implicit_midpoint"], nonlinear="fixed_point", tol=1e-14)
    f = Sum(lambda z, l: torch.sin(A @ z) * (1 + l), lambda z, l: torch.tanh(B @ z) - l * z)
    for method, returns in ((Strang, True), (Yoshida4, True), (LieTrotter, False)):
        there = solve(f, Z0, solver=method(base), n_steps=3).z
        back = solve(f, there, span=(1.0, 0.0), solver=method(base), n_steps=3).z
        assert ((back - Z0).abs().max() < 1e-12) == returns, method


def test_yoshida_with_a_self_adjoint_base_of_order_two_has_order_four():
    base = replace(IMPLICIT["implicit_midpoint"], nonlinear="fixed_point", tol=1e-12)
    assert Yoshida4(base).order == Yoshida4(IMPLICIT["trapezoid"]).order == 4
    assert Yoshida4(IMPLICIT["sdirk2"]).order == 3
    assert_order(Yoshida4(base), 4, finer=0.25, problems={"orbit": PROBLEMS["orbit"]})


def test_a_composition_takes_its_traits_from_the_base():
    implicit = Strang(IMPLICIT["trapezoid"])
    assert implicit.is_implicit
    assert implicit.gradients == ("backprop",)
    assert implicit.nfe(3) is None
    assert not Strang().is_implicit
    assert "checkpoint" in Strang().gradients


def test_a_base_with_memory_leaves_order_one():
    assert Strang(SOLVERS["ab2"]).order == 1
    assert_order(Strang(SOLVERS["ab2"]), 1, finer=2, problems={"orbit": PROBLEMS["orbit"]})


@pytest.mark.parametrize("name", METHODS)
def test_tuples_gradients_and_the_zero_field(name):
    assert torch.equal(solve(Sum(lambda z, l: z * 0, lambda z, l: z * 0), Z0, solver=name, n_steps=3).z, Z0)
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def run(rate, z0):
        f = Sum(lambda z, l: (rate * z[1], -z[0] * l), lambda z, l: (torch.sin(z[0]), rate * z[1]))
        return solve(f, (z0[:1], z0[1:]), solver=name, n_steps=2).z

    assert torch.autograd.gradcheck(run, (rate, Z0.clone().requires_grad_()))


@pytest.mark.parametrize("make, error_class, words", [
    (lambda: LieTrotter("rk5"), ValueError, "unknown base 'rk5'; known by name: "),
    (lambda: Strang(SOLVERS["dopri5"]), ValueError, "base must be a fixed-step solver; dopri5 is adaptive"),
    (lambda: Strang(3), TypeError, "base must be a name or a solver object, got 3"),
    (lambda: Yoshida4(LieTrotter), TypeError, "base must be a name or a solver object"),
])
def test_wrong_bases_are_named(make, error_class, words):
    with pytest.raises(error_class) as caught:
        make()
    assert words in str(caught.value)


def test_every_base_of_the_registry_keeps_its_order_under_splitting_or_is_refused():
    """A base that remembers states would undo what the other part did in between, and never converge."""
    from solvers import SOLVERS, LieTrotter, Strang, get_solver
    from solvers.learned import Learned
    from solvers.splitting import Splitting

    refused, orders = set(), {}
    for name, solver in SOLVERS.items():
        if solver.is_adaptive or solver.is_implicit or isinstance(solver, Learned | Splitting):
            continue
        for wrapper in (LieTrotter, Strang):
            try:
                split = wrapper(get_solver(name))
            except ValueError as error:
                assert "must not remember earlier states" in str(error)
                refused.add(name)
                continue
            f, exact = PROBLEMS["orbit"]
            coarse, fine = ((solve(f, exact(0.0), solver=split, n_steps=n).z - exact(1.0)).abs().max().item()
                            for n in (128, 256))
            orders[split.name] = (math.log2(coarse / fine), split.order)
    assert refused == {"leapfrog", "reversible_heun", "reversible_midpoint", "reversible_rk4"}
    low = {name: pair for name, pair in orders.items() if pair[0] < pair[1] - 0.25 and "momentum" not in name}
    assert len(orders) > 60 and not low, low
    with pytest.raises(ValueError, match="must not remember"):
        LieTrotter(get_solver("bdf2"))
