"""Multistep methods: coefficients against print, orders measured, counts, history, starts, stability polynomials."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from convergence import DIFFERENTIABLE, PROBLEMS, assert_order, error, orbit, orbit_exact, perturbed

from solvers import SOLVERS, LinearMultistep, get_solver, solve
from solvers.implicit_multistep import BDF, AdamsMoulton
from solvers.implicit_multistep import METHODS as IMPLICIT
from solvers.multistep import METHODS as EXPLICIT
from solvers.multistep import History, adams_weights
from solvers.predictor_corrector import METHODS as CORRECTED
from solvers.predictor_corrector import PEC, PECE

EVALUATED = {**EXPLICIT, **CORRECTED}  # evaluations are known beforehand
PUBLISHED_ORDER = {name: int(name.removesuffix("_pec")[-1]) for name in (*EVALUATED, *IMPLICIT)}
EVEN = pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])

# Hairer, Nørsett & Wanner 1993, III.1: (1.5) and (1.9), and the BDF of (1.22'), newest first
ADAMS_BASHFORTH = {1: [1], 2: [3 / 2, -1 / 2], 3: [23 / 12, -16 / 12, 5 / 12], 4: [55 / 24, -59 / 24, 37 / 24, -9 / 24],
                   5: [1901 / 720, -2774 / 720, 2616 / 720, -1274 / 720, 251 / 720]}
ADAMS_MOULTON = {2: [1 / 2, 1 / 2], 3: [5 / 12, 8 / 12, -1 / 12], 4: [9 / 24, 19 / 24, -5 / 24, 1 / 24],
                 5: [251 / 720, 646 / 720, -264 / 720, 106 / 720, -19 / 720]}
BACKWARD = {1: ([1], 1), 2: ([4 / 3, -1 / 3], 2 / 3), 3: ([18 / 11, -9 / 11, 2 / 11], 6 / 11),
            4: ([48 / 25, -36 / 25, 16 / 25, -3 / 25], 12 / 25),
            5: ([300 / 137, -300 / 137, 200 / 137, -75 / 137, 12 / 137], 60 / 137)}


def by_fixed_point(name, tol=1e-13):
    """The implicit method with a solve that suits these mild problems and is faster than Newton's."""
    return replace(IMPLICIT[name], nonlinear="fixed_point", tol=tol)


@pytest.mark.parametrize("name", (*EVALUATED, *IMPLICIT))
def test_the_order_is_that_of_the_name(name):
    assert SOLVERS[name].order == PUBLISHED_ORDER[name]
    assert SOLVERS[name].name == name


@EVEN
@pytest.mark.parametrize("name", EVALUATED)
def test_explicit_multistep_methods_measure_their_order(name, even):
    # PEC comes near its order later; abm5_pec shows 4.7 at the most steps that rounding allows
    finer, within = {"abm4_pec": (8, 0.2), "abm5_pec": (4, 0.3)}.get(name, (4, 0.2))
    assert_order(name, SOLVERS[name].order, even=even, finer=finer, within=within)


@EVEN
@pytest.mark.parametrize("name", IMPLICIT)
def test_implicit_multistep_methods_measure_their_order(name, even):
    finer, tol = {1: (0.25, 1e-6), 2: (1, 1e-8), 3: (0.75, 1e-10), 4: (1.5, 1e-12), 5: (1, 1e-12)}[IMPLICIT[name].order]
    problems = {"orbit": PROBLEMS["orbit"]}  # a solve a step takes its time
    assert_order(by_fixed_point(name, tol), IMPLICIT[name].order, even=even, finer=finer, problems=problems)


def test_adams_weights_are_the_printed_ones_on_an_even_grid():
    for p, printed in ADAMS_BASHFORTH.items():
        assert EXPLICIT[f"ab{p}"].b == pytest.approx(printed, rel=0, abs=1e-15)
        assert adams_weights([-float(i) for i in range(p)]) == pytest.approx(printed, rel=0, abs=1e-13)
    for p, printed in ADAMS_MOULTON.items():
        assert adams_weights([1.0 - i for i in range(p)]) == pytest.approx(printed, rel=0, abs=1e-13)


def test_bdf_weights_are_the_printed_ones_on_an_even_grid():
    for p, (a, beta) in BACKWARD.items():
        ours, weight = BDF.weights([-float(i) for i in range(p)])
        assert ours == pytest.approx(a, rel=0, abs=1e-13)
        assert weight == pytest.approx(beta, rel=0, abs=1e-14)


def test_two_step_weights_on_an_uneven_grid_are_the_textbook_ones():
    w = 0.7  # the ratio of this step to the one before
    assert adams_weights([0.0, -1 / w]) == pytest.approx([1 + w / 2, -w / 2])
    a, beta = BDF.weights([0.0, -1 / w])  # Hairer, Nørsett & Wanner 1993, III.5, example 5.1
    assert a == pytest.approx([(1 + w) ** 2 / (1 + 2 * w), -(w**2) / (1 + 2 * w)])
    assert beta == pytest.approx((1 + w) / (1 + 2 * w))


def plain(f, z, points, method):
    """The state at the last point by loops in NumPy: ``method`` is (p, corrected, evaluates the correction)."""
    p, corrected, again = method
    butcher = {1: lambda z, l, h: z, 2: midpoint, 3: kutta, 4: classical}[p]
    ks = []
    for i, (l, end) in enumerate(pairwise(points)):
        h = end - l
        if i < p - 1:
            ks = [f(z, l), *ks]
            z = butcher(f, z, l, h)
            continue
        if again or len(ks) == p - 1:
            ks = [f(z, l), *ks]
        b = ADAMS_BASHFORTH[p]
        predicted = z + h * sum(x * k for x, k in zip(b, ks, strict=False))
        if not corrected:
            z = predicted
            continue
        k = f(predicted, end)
        z = z + h * sum(x * y for x, y in zip(ADAMS_MOULTON[p], [k, *ks], strict=False))
        if not again:
            ks = [k, *ks]
    return z


def midpoint(f, z, l, h):
    return z + h * f(z + h / 2 * f(z, l), l + h / 2)


def kutta(f, z, l, h):
    a = f(z, l)
    b = f(z + h / 2 * a, l + h / 2)
    return z + h / 6 * (a + 4 * b + f(z - h * a + 2 * h * b, l + h))


def classical(f, z, l, h):
    a = f(z, l)
    b = f(z + h / 2 * a, l + h / 2)
    c = f(z + h / 2 * b, l + h / 2)
    return z + h / 6 * (a + 2 * b + 2 * c + f(z + h * c, l + h))


LOOPS = {"ab2": (2, False, True), "ab3": (3, False, True), "ab4": (4, False, True), "abm2": (2, True, True),
         "abm3": (3, True, True), "abm4": (4, True, True), "abm2_pec": (2, True, False), "abm4_pec": (4, True, False)}


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_those_of_a_loop_written_by_hand(name):
    f, exact = PROBLEMS["orbit"]

    def field(z, l):
        return f(torch.from_numpy(z), torch.tensor(l, dtype=torch.float64)).numpy()

    points = [i / 12 for i in range(13)]
    expected = plain(field, exact(0.0).numpy(), points, LOOPS[name])
    ours = solve(f, exact(0.0), solver=name, n_steps=12).z
    assert np.abs(ours.numpy() - expected).max() < 1e-14  # a few roundings of numbers near 1


def test_bdf2_and_am3_solve_their_equation_on_a_linear_problem():
    def radau(z):  # R of radau5, Hairer & Wanner 1996, table IV.3.1
        return (1 + 2 * z / 5 + z**2 / 20) / (1 - 3 * z / 5 + 3 * z**2 / 20 - z**3 / 60)

    rate, h = -1.3, 0.25
    x = rate * h
    bdf, am = [1.0, radau(x)], [1.0, radau(x)]
    for _ in range(6):
        bdf.append((4 / 3 * bdf[-1] - 1 / 3 * bdf[-2]) / (1 - 2 / 3 * x))
        am.append((am[-1] + x * (8 * am[-1] - am[-2]) / 12) / (1 - 5 / 12 * x))
    z0 = torch.ones(1, dtype=torch.float64)
    for name, expected in (("bdf2", bdf), ("am3", am)):
        states = solve(lambda z, l: rate * z, z0, span=(0.0, 7 * h), solver=name, n_steps=7, save_at="steps").states
        assert states[:, 0].tolist() == pytest.approx(expected, rel=1e-9)  # tol of the solves is 4e-11


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("n_steps", [1, 3, 4, 9])
def test_evaluations_are_as_documented(name, n_steps):
    p, corrected, pec = PUBLISHED_ORDER[name], name.startswith("abm"), name.endswith("_pec")
    starter = {1: 0, 2: 2, 3: 3, 4: 4, 5: 6}[p]  # midpoint, kutta3, rk4, butcher5
    first = min(n_steps, p - 1)
    rest = n_steps - first
    expected = first * starter + rest * (2 if corrected and not pec else 1) + (1 if pec and rest else 0)
    solution = solve(*(lambda f, exact: (f, exact(0.0)))(*PROBLEMS["orbit"]), solver=name, n_steps=n_steps)
    assert solution.nfe == SOLVERS[name].nfe(n_steps) == expected


def test_implicit_methods_say_that_their_evaluations_depend_on_the_values():
    assert all(method.nfe is None and method.is_implicit for method in IMPLICIT.values())


@pytest.mark.parametrize("name", [*EVALUATED, "bdf3", "am4"])
def test_the_starter_is_of_at_least_the_methods_order(name):
    assert SOLVERS[name].starter.order >= SOLVERS[name].order


@pytest.mark.parametrize("name", ["ab4", "abm4", "abm4_pec", "bdf4", "am4"])
def test_history_is_empty_at_each_solve_also_after_an_exception(name):
    f, exact = PROBLEMS["orbit"]
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    before = solve(f, exact(0.0), solver=solver, n_steps=8).z
    calls = 0

    def breaks(z, l):
        nonlocal calls
        calls += 1
        if calls == 15:
            raise KeyError("f broke")
        return f(z, l)

    with pytest.raises(KeyError, match="f broke"):
        solve(breaks, exact(0.0) + 1, solver=solver, n_steps=8)
    assert torch.equal(solve(f, exact(0.0), solver=solver, n_steps=8).z, before)
    assert solver.init(None) == History()


class Kinked:
    """f = l z before 1 and -z after: the second piece must not see the increments of the first."""

    breakpoints = (1.0,)

    def __call__(self, z, l):
        return l * z if l < 1 else -z


@pytest.mark.parametrize("name", ["ab3", "abm3", "abm3_pec", "bdf3", "am3"])
def test_history_ends_where_f_jumps(name):
    z0, exact = torch.ones(1, dtype=torch.float64), math.exp(1 / 2 - 1)
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    errors = [abs(solve(Kinked(), z0, span=(0.0, 2.0), solver=solver, n_steps=n).z.item() - exact) for n in (128, 256)]
    assert math.log2(errors[0] / errors[1]) > 2.8


def test_history_goes_on_over_pieces_where_asked():
    z0 = torch.ones(1, dtype=torch.float64)
    across = get_solver("ab3", across_pieces=True)
    solution = solve(Kinked(), z0, span=(0.0, 2.0), solver=across, n_steps=32)
    assert solution.nfe == across.nfe(32) == 2 * 3 + 30  # one start, not two
    errors = [abs(solve(Kinked(), z0, span=(0.0, 2.0), solver=across, n_steps=n).z.item() - math.exp(-1 / 2))
              for n in (128, 256)]
    assert math.log2(errors[0] / errors[1]) < 1.2  # the price


def test_given_coefficients_run_as_the_named_method():
    f, exact = PROBLEMS["orbit"]
    given = LinearMultistep([1], [3 / 2, -1 / 2])
    assert torch.equal(solve(f, exact(0.0), solver=given, n_steps=9).z, solve(f, exact(0.0), solver="ab2", n_steps=9).z)


@pytest.mark.parametrize("a, b, order", [
    ([0, 1], [2], 2),  # leapfrog
    ([0, 1], [7 / 3, -2 / 3, 1 / 3], 3),  # Nyström 1925
    ([1 / 2, 1 / 2], [7 / 4, -1 / 4], 2),  # found from Σ b = 1 + 1/2, Σ i b = -1/4
])
def test_given_methods_with_several_states_measure_their_order(a, b, order):
    method = LinearMultistep(a, b)
    assert method.order == order
    assert_order(method, order, finer=4)


@pytest.mark.parametrize("a, b, word", [
    ([3, -2], [1 / 2, -3 / 2], "not zero-stable"),  # root 2
    ([2, -1], [1, -1], "not zero-stable"),  # double root 1
    ([-4, 5], [4, 2], "not zero-stable"),  # Dahlquist's example of order 3, root -5
    ([1], [1, 1], "not consistent"),
    ([0.5], [1], "not consistent"),
])
def test_methods_that_cannot_converge_are_refused_with_the_word(a, b, word):
    with pytest.raises(ValueError, match=word):
        LinearMultistep(a, b)


def test_dahlquists_example_is_refused_for_stability_though_it_has_order_three():
    from solvers.multistep import multistep_order

    assert multistep_order([-4, 5], [4, 2]) == 3


@pytest.mark.parametrize("make, error_class, words", [
    (lambda: BDF(7), ValueError, "not zero-stable"),
    (lambda: BDF(0), ValueError, "order must be from 1"),
    (lambda: AdamsMoulton(1), ValueError, "order must be from 2 to 6, got 1"),
    (lambda: PECE(1), ValueError, "order must be from 2 to 8, got 1"),
    (lambda: PEC(2.0), TypeError, "order must be an int, got 2.0"),
    (lambda: PECE(4, starter="midpoint"), ValueError, "starter midpoint has order 2, below the method's 4"),
    (lambda: PECE(4, starter="midpiont"), ValueError, "unknown starter 'midpiont'; known: "),
    (lambda: PECE(4, starter=3), TypeError, "starter must be a name or an ExplicitRungeKutta, got int"),
    (lambda: BDF(4, starter="trapezoid"), ValueError, "starter trapezoid has order 2, below the method's 4"),
    (lambda: BDF(4, starter="rk4"), ValueError, "unknown starter 'rk4'; known: "),
    (lambda: LinearMultistep([1], [3 / 2, -1 / 2], starter="euler"), ValueError, "starter euler has order 1, below"),
    (lambda: LinearMultistep([], [1]), ValueError, "at least one coefficient"),
    (lambda: get_solver("abm4", across_pieces=True), ValueError, "unknown option 'across_pieces'"),
])
def test_wrong_arguments_are_named(make, error_class, words):
    with pytest.raises(error_class) as caught:
        make()
    assert words in str(caught.value)


def test_other_methods_refuse_an_uneven_grid():
    f, exact = PROBLEMS["orbit"]
    with pytest.raises(ValueError, match="needs equal steps"):
        solve(f, exact(0.0), solver=LinearMultistep([0, 1], [2]), grid=[0.0, 0.1, 0.3, 0.4])


def test_bdf_is_zero_stable_up_to_the_growth_of_steps_that_it_states():
    for p, factor in ((2, 2.41), (3, 1.62), (4, 1.28), (5, 1.13)):
        for r, stable in ((factor - 0.02, True), (factor + 0.02, False)):
            offsets, step = [0.0], 1.0
            for _ in range(p - 1):
                step /= r
                offsets.append(offsets[-1] - step)
            a, _ = BDF.weights(offsets)
            second = sorted(abs(np.roots([1, *(-x for x in a)])))[-2]
            largest = max(abs(np.roots([1, *(-x for x in a)])))
            assert (second < 1 and largest < 1 + 1e-9) == stable, (p, r)


@pytest.mark.parametrize("name", [*EVALUATED, *IMPLICIT])
def test_states_obey_the_characteristic_polynomial(name):
    x = complex(-0.11, 0.23)  # h λ
    z0 = torch.ones(1, dtype=torch.complex128)
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    states = solve(lambda z, l: x * z, z0, span=(0.0, 14.0), solver=solver, n_steps=14, save_at="steps").states[:, 0]
    row = np.array(SOLVERS[name].characteristic(x))
    values = states.numpy()[SOLVERS[name].order:]  # once the start is over
    for i in range(len(values) - len(row) + 1):
        assert abs(row @ values[i:i + len(row)][::-1]) < 1e-11


@pytest.mark.parametrize("name", [*EVALUATED, *IMPLICIT])
def test_a_zero_field_is_the_identity_and_tuples_work(name):
    z0 = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(solve(lambda z, l: z * 0, z0, solver=name, n_steps=7).z, z0)
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    whole = solve(lambda z, l: torch.sin(z) * l, z0, solver=solver, n_steps=7).z
    halves = solve(lambda z, l: tuple(torch.sin(x) * l for x in z), (z0[:1], z0[1:]), solver=solver, n_steps=7).z
    assert torch.allclose(torch.cat(halves), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["ab4", "abm4", "abm4_pec", "bdf3", "am4"])
def test_a_solve_backwards_in_depth_returns(name):
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    f, exact = PROBLEMS["orbit"]
    there = solve(f, exact(0.0), solver=solver, n_steps=200).z
    back = solve(f, there, span=(1.0, 0.0), solver=solver, n_steps=200).z
    assert (back - exact(0.0)).abs().max() < 1e-5  # order 3 or more, h = 1/200


@pytest.mark.parametrize("name", ["ab5", "abm5", "abm5_pec"])
def test_float32_states_stay_float32(name):
    z = solve(lambda z, l: -z, torch.ones(3), solver=name, n_steps=12).z
    assert z.dtype == torch.float32
    assert torch.allclose(z, torch.full((3,), math.exp(-1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("grid", [None, perturbed(0.0, 1.0, 6)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["ab3", "abm3", "abm3_pec", "bdf3", "am3"])
def test_gradients_are_those_of_the_computation(name, grid):
    rate = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)
    z0 = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
    solver = by_fixed_point(name) if name in IMPLICIT else SOLVERS[name]
    steps = {"n_steps": 6} if grid is None else {"grid": grid}

    def run(z0, rate):
        return solve(lambda z, l: torch.sin(z) * rate + l * z.flip(0), z0, solver=solver, **steps).z

    assert torch.autograd.gradcheck(run, (z0, rate))


@pytest.mark.parametrize("name, mode", [("ab4", "checkpoint"), ("abm4", "checkpoint"), ("abm4_pec", "checkpoint"),
                                        ("abm4_pec", "checkpoint_recursive"), ("bdf3", "implicit")])
def test_other_gradient_modes_agree_with_backprop(name, mode):
    def gradient(mode):
        rate = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)
        z0 = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
        z = solve(lambda z, l: torch.sin(z) * rate + l * z.flip(0), z0, solver=name, n_steps=6, gradient=mode).z
        z.sum().backward()
        return torch.cat([z0.grad, rate.grad])

    assert torch.allclose(gradient(mode), gradient("backprop"), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["bdf1", "bdf2", "bdf3", "bdf4", "bdf5", "am2"])
def test_stiff_problems_pass_at_steps_that_no_explicit_method_survives(name):
    def f(z, l):  # Prothero & Robinson 1974, λ = -1e5: the solution is cos l
        return -1e5 * (z - torch.cos(l)) - torch.sin(l)

    z = solve(f, torch.ones(1, dtype=torch.float64), span=(0.0, 2.0), solver=name, n_steps=20).z
    assert abs(z.item() - math.cos(2.0)) < 1e-5
    explicit = solve(f, torch.ones(1, dtype=torch.float64), span=(0.0, 2.0), solver="ab3", n_steps=20).z
    assert explicit.abs().item() > 1e6


def test_predictor_corrector_beats_its_predictor_at_equal_evaluations():
    assert error("orbit", "abm4", 128, span=(0.0, 2.0)) < error("orbit", "ab4", 256, span=(0.0, 2.0)) * 2


def test_the_tensor_and_the_float_form_of_the_problems_agree():
    for name, (f, exact) in PROBLEMS.items():
        g = DIFFERENTIABLE[name][0]
        l = torch.tensor(0.37, dtype=torch.float64)
        assert torch.allclose(f(exact(0.2), l), g(exact(0.2), l), rtol=0, atol=1e-15)
    assert orbit is DIFFERENTIABLE["orbit"][0]
    assert orbit_exact(0.0).tolist() == [0.5, 1.0]
