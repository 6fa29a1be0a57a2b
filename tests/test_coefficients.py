"""The named explicit methods: orders measured, stages and embedded rows against plain published recipes."""

import math
from fractions import Fraction

import pytest
import torch
from convergence import assert_order, orbit, orbit_exact

from solvers import SOLVERS, ExplicitRungeKutta, Tableau, solve
from solvers.base import Evaluator, Step, Work
from solvers.coefficients import ADAPTIVE, EXPLICIT
from solvers.explicit import METHODS

# name: (order, embedded order, evaluations a fixed step), from the publications
PUBLISHED = {
    "euler": (1, None, 1), "midpoint": (2, None, 2), "heun2": (2, None, 2), "ralston2": (2, None, 2),
    "heun_euler21": (2, 1, 2), "fehlberg21": (2, 1, 3), "kutta3": (3, None, 3), "heun3": (3, None, 3),
    "ralston3": (3, None, 3), "wray3": (3, None, 3), "ssprk3": (3, None, 3), "ssprk43": (3, 2, 4),
    "bosh32": (3, 2, 3), "rk4": (4, None, 4), "rk38": (4, None, 4), "gill4": (4, None, 4), "ralston4": (4, None, 4),
    "merson43": (4, 3, 5), "zonneveld43": (4, 3, 4), "rkf45": (4, 5, 5), "ssprk104": (4, None, 10),
    "nystrom5": (5, None, 6), "butcher5": (5, None, 6), "cash_karp54": (5, 4, 6), "dopri54": (5, 4, 6),
    "bosh54": (5, 4, 7), "tsit54": (5, 4, 6), "butcher6": (6, None, 7), "verner65": (6, 5, 8),
    "fehlberg78": (7, 8, 11), "verner76": (7, 6, 9), "cooper_verner8": (8, None, 11), "dopri87": (8, 7, 13),
    "dopri853": (8, 5, 12),
}
DECIMAL = {"gill4", "ralston4", "tsit54", "verner76", "cooper_verner8", "dopri87", "dopri853"}


def test_every_explicit_method_stands_in_the_published_table():
    assert {name: (t.order, t.embedded_order, t.n_evaluations) for name, t in EXPLICIT.items()} == PUBLISHED


def test_rational_tables_are_checked_in_exact_arithmetic():
    assert {name for name, tableau in EXPLICIT.items() if not tableau.exact} == DECIMAL


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_methods_measure_their_order(name, even):
    assert_order(name, EXPLICIT[name].order, even=even)


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_methods_count_their_evaluations(name):
    solution = solve(orbit, orbit_exact(0.0), solver=name, n_steps=3)
    assert solution.nfe == SOLVERS[name].nfe(3) == 3 * PUBLISHED[name][2]


def test_adaptive_names_share_the_tableau_of_the_fixed_step_pair():
    assert ADAPTIVE["dopri5"] is EXPLICIT["dopri54"]
    assert ADAPTIVE["dopri8"] is EXPLICIT["dopri87"]
    assert ADAPTIVE["bosh3"] is EXPLICIT["bosh32"]
    assert ADAPTIVE["adaptive_heun"] is EXPLICIT["heun_euler21"]
    assert ADAPTIVE["fehlberg2"] is EXPLICIT["fehlberg21"]


# Plain recipes, written as they are printed, in Python floats: f(t, y) -> (propagated, embedded)


def plain_rkf45(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 4, y + h * k1 / 4)
    k3 = f(t + 3 * h / 8, y + h * (3 * k1 + 9 * k2) / 32)
    k4 = f(t + 12 * h / 13, y + h * (1932 * k1 - 7200 * k2 + 7296 * k3) / 2197)
    k5 = f(t + h, y + h * (439 * k1 / 216 - 8 * k2 + 3680 * k3 / 513 - 845 * k4 / 4104))
    k6 = f(t + h / 2, y + h * (-8 * k1 / 27 + 2 * k2 - 3544 * k3 / 2565 + 1859 * k4 / 4104 - 11 * k5 / 40))
    return (y + h * (25 * k1 / 216 + 1408 * k3 / 2565 + 2197 * k4 / 4104 - k5 / 5),
            y + h * (16 * k1 / 135 + 6656 * k3 / 12825 + 28561 * k4 / 56430 - 9 * k5 / 50 + 2 * k6 / 55))


def plain_cash_karp(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 5, y + h * k1 / 5)
    k3 = f(t + 3 * h / 10, y + h * (3 * k1 + 9 * k2) / 40)
    k4 = f(t + 3 * h / 5, y + h * (3 * k1 - 9 * k2 + 12 * k3) / 10)
    k5 = f(t + h, y + h * (-11 * k1 / 54 + 5 * k2 / 2 - 70 * k3 / 27 + 35 * k4 / 27))
    k6 = f(t + 7 * h / 8, y + h * (1631 * k1 / 55296 + 175 * k2 / 512 + 575 * k3 / 13824 + 44275 * k4 / 110592
                                  + 253 * k5 / 4096))
    return (y + h * (37 * k1 / 378 + 250 * k3 / 621 + 125 * k4 / 594 + 512 * k6 / 1771),
            y + h * (2825 * k1 / 27648 + 18575 * k3 / 48384 + 13525 * k4 / 55296 + 277 * k5 / 14336 + k6 / 4))


def plain_bosh32(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 2, y + h * k1 / 2)
    k3 = f(t + 3 * h / 4, y + 3 * h * k2 / 4)
    new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
    k4 = f(t + h, new)
    return new, y + h * (7 * k1 / 24 + k2 / 4 + k3 / 3 + k4 / 8)


def plain_merson(f, t, y, h):
    k1 = f(t, y)
    k2 = f(t + h / 3, y + h * k1 / 3)
    k3 = f(t + h / 3, y + h * (k1 + k2) / 6)
    k4 = f(t + h / 2, y + h * (k1 + 3 * k3) / 8)
    k5 = f(t + h, y + h * (k1 - 3 * k3 + 4 * k4) / 2)
    error = h * (2 * k1 - 9 * k3 + 8 * k4 - k5) / 30  # Merson's own estimate: propagated less embedded
    new = y + h * (k1 + 4 * k4 + k5) / 6
    return new, new - error


PLAIN = {"rkf45": plain_rkf45, "cash_karp54": plain_cash_karp, "bosh32": plain_bosh32, "merson43": plain_merson}


def all_stages(tableau, f, z, l, h):
    """Every stage, those that only the embedded row needs included."""
    ks = []
    for row, c in zip(tableau.a, tableau.c, strict=True):
        ks.append(f(z + h * sum((x * k for x, k in zip(row, ks, strict=True)), torch.zeros_like(z)),
                    torch.tensor(l + c * h, dtype=z.dtype)))
    return ks


@pytest.mark.parametrize("name", PLAIN)
def test_pairs_agree_with_the_printed_recipe(name):
    def f(t, y):
        return y * math.cos(t) + math.sin(y) * t - 0.3

    def field(z, l):
        return z * torch.cos(l) + torch.sin(z) * l - 0.3

    t, y, h = 0.4, 0.8, 0.3
    propagated, embedded = PLAIN[name](f, t, y, h)
    z = torch.tensor([y], dtype=torch.float64)
    new = solve(field, z, span=(t, t + h), solver=name, n_steps=1).z
    assert abs(new.item() - propagated) < 1e-15  # a few roundings of numbers near 1
    error = METHODS[name].error(h, all_stages(EXPLICIT[name], field, z, t, h))
    assert abs(error.item() - (propagated - embedded)) < 1e-15


def test_dopri853_agrees_with_scipy_in_state_and_error_estimate():
    import numpy as np
    from scipy.integrate._ivp import dop853_coefficients as d

    tableau = EXPLICIT["dopri853"]
    for i, row in enumerate(tableau.a):
        assert np.abs(np.array(row) - d.A[i, :i]).max(initial=0) < 1e-13
    assert np.abs(np.array(tableau.b) - d.B).max() < 1e-14
    assert np.abs(np.array(tableau.b) - np.array(tableau.b_hat) - d.E5[:-1]).max() < 1e-14
    assert np.abs(np.array(tableau.c) - d.C[:12]).max() < 1e-14


@pytest.mark.parametrize("ours, theirs", [("dopri54", "RK45"), ("bosh32", "RK23")])
def test_pairs_agree_with_scipy(ours, theirs):
    import numpy as np
    from scipy.integrate import RK23, RK45

    scipy_class = {"RK45": RK45, "RK23": RK23}[theirs]
    t = EXPLICIT[ours]
    s = scipy_class.n_stages
    a = np.array([[*row, *[0.0] * (s - len(row))] for row in t.a[:s]])
    theirs = np.zeros((s, s))
    theirs[:, : scipy_class.A.shape[1]] = scipy_class.A
    assert np.abs(a - theirs).max() < 1e-15
    assert np.abs(np.array(t.b[:s]) - scipy_class.B).max() < 1e-15


def test_tsit54_propagates_its_fifth_order_row():
    t = EXPLICIT["tsit54"]
    assert t.is_fsal  # b is the last row of a
    assert (t.order, t.embedded_order) == (5, 4)
    assert_order("tsit54", 5)
    swapped = ExplicitRungeKutta(Tableau(t.a, t.b_hat, b_hat=t.b))
    with pytest.raises(AssertionError):
        assert_order(swapped, 5)


def test_a_shifted_node_shows_as_order_one_on_the_test_problems():
    """The problems find what a linear autonomous one cannot: rk4 whose stages are evaluated at the wrong depths."""
    class Shifted:
        def __init__(self):
            self.rk4 = METHODS["rk4"]

        def __getattr__(self, name):
            return getattr(self.rk4, name)

        def step(self, f, z, step, memory):
            _, middle, last = step.at
            return self.rk4.step(f, z, step._replace(at=(middle, last, last)), memory)

    with pytest.raises(AssertionError):
        assert_order(Shifted(), 4)
    assert_order(Shifted(), 1)


@pytest.mark.parametrize("name", [name for name, tableau in EXPLICIT.items() if tableau.b_hat])
def test_error_estimates_shrink_with_the_order_of_the_lower_row(name):
    method, tableau = METHODS[name], EXPLICIT[name]
    lower = min(tableau.order, tableau.embedded_order)
    h, z = {2: 0.2, 8: 0.4}.get(lower + 1, 0.3), orbit_exact(0.0)
    coarse, fine = (method.error(x, all_stages(tableau, orbit, z, 0.0, x)).abs().max().item() for x in (h, h / 2))
    assert math.log2(coarse / fine) > lower + 1 - 0.45  # h is far from 0, so the slope is rough


def test_error_works_on_tuples_and_says_what_is_missing():
    def field(z, l):
        return (-z[0], z[0] * z[1])

    z = (torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)[:2])
    method = METHODS["bosh32"]
    step = Step(0.0, 0.1, tuple(torch.tensor(0.1 * c, dtype=torch.float64) for c in method.nodes))
    ks = method.stages(Evaluator(field, Work()), z, step)
    with pytest.raises(ValueError, match=r"all 4 stages of bosh32.*got 3"):
        method.error(0.1, ks)
    new = method.finish(z, 0.1, ks)
    error = method.error(0.1, [*ks, field(new, None)])
    weights = [2 / 9 - 7 / 24, 1 / 3 - 1 / 4, 4 / 9 - 1 / 3, -1 / 8]
    expected = 0.1 * sum(w * k[1] for w, k in zip(weights, [*ks, field(new, None)], strict=True))
    assert torch.allclose(error[1], expected, rtol=0, atol=1e-16)
    with pytest.raises(ValueError, match="rk4 has no embedded row"):
        METHODS["rk4"].error(0.1, ks)


def test_importing_the_tables_builds_200_trees_once():
    from solvers.tableau import _catalogue

    assert len(_catalogue()) == 200
    assert _catalogue() is _catalogue()


def test_fractions_and_floats_give_the_same_method():
    a, b = [[], [Fraction(1, 3)], [0, Fraction(2, 3)]], [Fraction(1, 4), 0, Fraction(3, 4)]
    z = orbit_exact(0.0)
    ours = solve(orbit, z, solver=ExplicitRungeKutta(Tableau(a, b)), n_steps=5).z
    assert torch.equal(ours, solve(orbit, z, solver="heun3", n_steps=5).z)
