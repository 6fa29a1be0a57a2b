"""solvers.stability against published limits, independent formulas, and the methods themselves at work."""

import doctest
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import solvers.stability
from solvers import SOLVERS, LieTrotter, LinearMultistep, Strang, Tableau, solve
from solvers.stability import growth_factor, imaginary_interval, is_stable, real_interval, stability_function

INF = math.inf


@dataclass(frozen=True)
class Recurrence:
    """A method known by its recurrence only: Σ α_j z_{n-j} = h Σ β_j f_{n-j}, newest first."""

    alpha: tuple
    beta: tuple
    name: str = "recurrence"
    is_adaptive = False

    def characteristic(self, z):
        return [a - z * b for a, b in zip(self.alpha, self.beta, strict=True)]


LEAPFROG = Recurrence((1, 0, -1), (0, 2, 0))
MILNE = Recurrence((1, 0, -1), (1 / 3, 4 / 3, 1 / 3))  # Milne 1926: weakly unstable
ADAMS_MOULTON = {
    3: Recurrence((1, -1, 0), (5 / 12, 8 / 12, -1 / 12)),
    4: Recurrence((1, -1, 0, 0), (9 / 24, 19 / 24, -5 / 24, 1 / 24)),
    5: Recurrence((1, -1, 0, 0, 0), (251 / 720, 646 / 720, -264 / 720, 106 / 720, -19 / 720)),
}


def bdf(k):
    """Σ_{j=1..k} ∇^j z_n / j = h f_n (Curtiss & Hirschfelder 1952)."""
    alpha = np.zeros(k + 1)
    for j in range(1, k + 1):
        alpha[: j + 1] += [(-1) ** i * math.comb(j, i) / j for i in range(j + 1)]
    return Recurrence(tuple(alpha), (1.0, *[0.0] * k))


def gauss4():
    r = math.sqrt(3)
    return Tableau([[1 / 4, 1 / 4 - r / 6], [1 / 4 + r / 6, 1 / 4]], [1 / 2, 1 / 2])


def gauss6():
    r = math.sqrt(15)
    return Tableau([[5 / 36, 2 / 9 - r / 15, 5 / 36 - r / 30], [5 / 36 + r / 24, 2 / 9, 5 / 36 - r / 24],
                    [5 / 36 + r / 30, 2 / 9 + r / 15, 5 / 36]], [5 / 18, 4 / 9, 5 / 18])


def radau5():
    r = math.sqrt(6)
    a = [[(88 - 7 * r) / 360, (296 - 169 * r) / 1800, (-2 + 3 * r) / 225],
         [(296 + 169 * r) / 1800, (88 + 7 * r) / 360, (-2 - 3 * r) / 225], [(16 - r) / 36, (16 + r) / 36, 1 / 9]]
    return Tableau(a, a[-1])


def sdirk2():
    g = 1 - 1 / math.sqrt(2)
    return Tableau([[g, 0], [1 - g, g]], [1 - g, g])


def tr_bdf2():
    g, w = 2 - math.sqrt(2), math.sqrt(2) / 4
    return Tableau([[0, 0, 0], [g / 2, g / 2, 0], [w, w, g / 2]], [w, w, g / 2])


A_STABLE = {
    "backward_euler": Tableau([[1]], [1]),
    "implicit_midpoint": Tableau([[1 / 2]], [1]),
    "trapezoid": Tableau([[0, 0], [1 / 2, 1 / 2]], [1 / 2, 1 / 2]),
    "sdirk2": sdirk2(),
    "tr_bdf2": tr_bdf2(),
    "gauss4": gauss4(),
    "gauss6": gauss6(),
    "radau3": Tableau([[5 / 12, -1 / 12], [3 / 4, 1 / 4]], [3 / 4, 1 / 4]),
    "radau5": radau5(),
    "bdf1": bdf(1),
    "bdf2": bdf(2),
    "am2": Recurrence((1, -1), (1 / 2, 1 / 2)),
}


def theta(x):
    """z' = z + h ((1 - θ) f + θ f'): R = (1 + (1 - θ) z) / (1 - θ z)."""
    return Tableau([[0, 0], [1 - x, x]], [1 - x, x])


def chebyshev(n):
    """R(z) = T_n(1 + z / n²), by explicit stages in a chain: b a^k 1 is the coefficient of z^(k+1)."""
    line = np.polynomial.Polynomial([1, 1 / n**2])
    before, now = np.polynomial.Polynomial([1]), line
    for _ in range(n - 1):
        before, now = now, 2 * line * now - before
    ratios = (now.coef[2:] / now.coef[1:-1]).tolist()
    return Tableau([[], *([*[0.0] * (i - 1), ratios[n - 1 - i]] for i in range(1, n))], [*[0.0] * (n - 1), 1.0])


# Hairer & Wanner 1996, IV.2 and V.1; for Adams-Bashforth -2 / Σ |b_i|, where ζ = -1; 2 / (1 - 2 θ) for the θ method;
# 2 s² for Chebyshev polynomials, which touch |R| = 1 on the way without leaving (van der Houwen 1977)
REAL = [
    ("euler", -2), ("midpoint", -2), ("heun2", -2), ("ralston2", -2), ("kutta3", -2.5127453266),
    ("heun3", -2.5127453266), ("rk4", -2.7852935634), ("rk38", -2.7852935634), ("ab2", -1), ("ab3", -6 / 11),
    ("ab4", -0.3), ("ab5", -90 / 551), (ADAMS_MOULTON[3], -6), (ADAMS_MOULTON[4], -3),
    (ADAMS_MOULTON[5], -90 / 49), (LEAPFROG, 0), (MILNE, 0),
    (theta(1 / 4), -4), (theta(0.45), -20), *((chebyshev(s), -2 * s * s) for s in range(2, 8)),
    (bdf(3), -INF), (bdf(4), -INF), (bdf(5), -INF), *((method, -INF) for method in A_STABLE.values()),
]
# Hairer & Wanner 1996, IV.2, for Runge-Kutta; 0 by the sign of the error term z^(p+1) (or of the next); |y| <= 1 from
# ζ² - 2 y i ζ - 1 for leapfrog, and in the same way √3 for Milne
IMAGINARY = [
    ("euler", 0), ("midpoint", 0), ("heun2", 0), ("kutta3", math.sqrt(3)), ("ralston3", math.sqrt(3)),
    ("rk4", math.sqrt(8)), ("rk38", math.sqrt(8)), ("ab2", 0), ("ab5", 0), (LEAPFROG, 1), (MILNE, math.sqrt(3)),
    (theta(1 / 4), 0), (bdf(3), 0), (bdf(4), 0), *((method, INF) for method in A_STABLE.values()),
]


def label(x):
    return x if isinstance(x, str) else None


@pytest.mark.parametrize(("solver", "end"), REAL, ids=label)
def test_real_interval_is_the_published_one(solver, end):
    # published with ten decimals, hence 1e-8 also asserts the stated accuracy
    assert real_interval(solver) == pytest.approx(end, rel=0, abs=1e-8)


@pytest.mark.parametrize(("solver", "end"), IMAGINARY, ids=label)
def test_imaginary_interval_is_the_published_one(solver, end):
    assert imaginary_interval(solver) == pytest.approx(end, rel=0, abs=1e-8)


def adams(*b):
    """hλ = ρ(ζ) / σ(ζ) of Adams-Bashforth, b up to a factor."""
    return lambda ζ: sum(b) * (ζ - 1) / sum(x * ζ**-i for i, x in enumerate(b))


@pytest.mark.parametrize(("solver", "locus", "published"), [
    ("ab3", adams(23, -16, 5), 0.7236),
    ("ab4", adams(55, -59, 37, -9), 0.4300),
    (bdf(5), lambda ζ: sum((1 - 1 / ζ) ** j / j for j in range(1, 6)), None),
], ids=["ab3", "ab4", "bdf5"])
def test_imaginary_interval_is_where_the_boundary_locus_first_meets_the_axis(solver, locus, published):
    def real_part(angle):
        return locus(np.exp(1j * angle)).real

    angles = np.linspace(0.2, math.pi, 400)
    signs = np.sign(real_part(angles))
    i = int(np.flatnonzero(signs[1:] != signs[:-1])[0])
    end = abs(locus(np.exp(1j * brentq(real_part, angles[i], angles[i + 1], xtol=1e-14))).imag)
    assert published is None or end == pytest.approx(published, abs=5e-5)
    assert imaginary_interval(solver) == pytest.approx(end, abs=1e-8)


# Hairer & Wanner 1996, V.2, table 2.1
@pytest.mark.parametrize(("k", "degrees"), [(3, 86.03), (4, 73.35), (5, 51.84), (6, 17.84)])
def test_bdf_is_stable_in_the_published_wedge_and_not_in_a_wider_one(k, degrees):
    radii = np.geomspace(1e-2, 1e3, 400)
    inside, outside = (-radii * np.exp(1j * math.radians(degrees + shift)) for shift in (-0.02, 0.02))
    assert is_stable(bdf(k), inside).all()
    assert not is_stable(bdf(k), outside).all()


def test_zero_stable_is_asked_of_the_recurrence_too():
    assert not is_stable(bdf(7), -1e-9)  # Cryer 1972
    assert is_stable(bdf(6), 0)


@cache
def intervals(name):
    """Both intervals of a registered method, or the message of the refusal."""
    try:
        return real_interval(name), imaginary_interval(name)
    except ValueError as error:
        return str(error)


SIMULATED = [name for name, solver in SOLVERS.items() if not solver.is_adaptive]


def is_multistep(solver):
    return hasattr(solver, "characteristic")


def simulate(name, hλ, n):
    """Growth of |z| from the third quarter of n steps of z' = λ z with h = 1 to the last, for each λ of a list."""
    solver = SOLVERS[name]
    λ = torch.tensor(hλ, dtype=torch.complex128)
    z0 = torch.ones(len(hλ), dtype=torch.complex128)
    solution = solve(lambda z, l: λ * z, z0, span=(0.0, float(n)), n_steps=n, solver=solver, save_at="steps")
    size = solution.states.abs()
    return (size[3 * n // 4 :].amax(0) / size[n // 2 : 3 * n // 4].amax(0)).tolist()


SMALL = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
# steps, distance from the end, size of growth above rounding (or the tolerance of the inner solves, which also make
# steps expensive), and places next to 0; a parasitic root starts small and needs time to overtake the others
ONE_STEP, MULTISTEP, IMPLICIT = (200, 0.01, 1e-11, SMALL), (1200, 0.03, 1e-11, SMALL), (40, 0.1, 1e-6, SMALL[3:])


@pytest.mark.parametrize("name", SIMULATED)
def test_solve_decays_just_inside_the_intervals_and_grows_just_outside(name):
    solver = SOLVERS[name]
    if isinstance(intervals(name), str):
        pytest.skip("no scalar definition of stability")
    ends = {-1: -intervals(name)[0], 1j: intervals(name)[1]}
    n, distance, noise, small = IMPLICIT if solver.is_implicit else MULTISTEP if is_multistep(solver) else ONE_STEP
    finite = {direction: end for direction, end in ends.items() if 0 < end < INF}
    if finite:
        points = [direction * end * (1 + s * distance) for direction, end in finite.items() for s in (-1, 1)]
        growth = simulate(name, points, n)
        # two roots of nearly one modulus beat against each other, so maxima over windows differ by a little
        assert max(growth[::2]) <= 1 + (1e-3 if is_multistep(solver) else noise)
        assert min(growth[1::2]) > 1 + 1e-7
    if unbounded := [30 * direction for direction, end in ends.items() if end == INF]:
        assert max(simulate(name, unbounded, 8)) <= 1 + noise
    scale = max(finite.values(), default=1.0)
    for direction in (d for d, end in ends.items() if end == 0):
        # growth of high order in |hλ|: the first value that differs from 1 by more than rounding must be growth
        points = (direction * scale * x for x in small)
        growth = (simulate(name, [point], n)[0] for point in points)
        assert next(x for x in growth if abs(x - 1) > noise) > 1


@pytest.mark.parametrize("name", ["euler", "heun2", "kutta3", "rk4", "butcher5", "ab2", "ab3", "ab4", "ab5"])
def test_is_stable_is_what_solve_does_all_over_the_plane(name):
    """The boundary curves of ab3 to ab5 form loops right of the axis; inside them the methods are unstable."""
    scale = abs(real_interval(name))
    x, y = np.meshgrid(np.linspace(-1.3, 0.7, 21) * scale, np.linspace(0, 1.5, 16) * scale)
    hλ = (x + 1j * y).ravel()
    clear = np.abs(growth_factor(name, hλ) - 1) > 0.03  # decisive within the steps; more of them would overflow
    assert clear.sum() > 250
    grown = np.array(simulate(name, hλ[clear].tolist(), 400 if name.startswith("ab") else 100)) > 1
    assert (is_stable(name, hλ[clear]) == ~grown).all()
    assert 0 < grown.mean() < 1


def test_loops_of_the_boundary_curve_are_not_filled():
    hλ = 0.1 + 0.6j  # inside the loop of ab4 in the upper right; see the growth of a plain recurrence
    z = [np.exp(hλ * n) for n in range(4)]
    for _ in range(200):
        z.append(z[-1] + hλ * (55 * z[-1] - 59 * z[-2] + 37 * z[-3] - 9 * z[-4]) / 24)
    assert abs(z[-1]) > 1e3
    assert not is_stable("ab4", hλ)


def test_stability_functions_equal_their_closed_forms():
    z = np.linspace(-3, 1, 7)[:, None] + 1j * np.linspace(-3, 3, 5)
    forms = {
        "euler": 1 + z, "midpoint": 1 + z + z**2 / 2, "kutta3": 1 + z + z**2 / 2 + z**3 / 6,
        "rk4": 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24,
    }
    for name, expected in forms.items():
        np.testing.assert_allclose(stability_function(name)(z), expected, rtol=1e-13)
    np.testing.assert_allclose(stability_function(A_STABLE["trapezoid"])(z), (1 + z / 2) / (1 - z / 2), rtol=1e-13)
    np.testing.assert_allclose(stability_function(A_STABLE["gauss4"])(z),
                               (1 + z / 2 + z**2 / 12) / (1 - z / 2 + z**2 / 12), rtol=1e-12)
    assert stability_function("rk4")(-1) == pytest.approx(9 / 24)


def test_growth_factor_is_the_largest_root_and_infinite_at_a_pole():
    # ab2 at hλ = x: ζ² - (1 + 3x/2) ζ + x/2 = 0
    x = -1.3
    root = max(abs(np.roots([1, -(1 + 1.5 * x), x / 2])))
    assert growth_factor("ab2", x) == pytest.approx(root, rel=1e-14)
    assert growth_factor("rk4", 2j) == pytest.approx(abs(1 + 2j - 2 - 8j / 6 + 16 / 24), rel=1e-14)
    assert growth_factor(A_STABLE["backward_euler"], 1) == INF
    assert growth_factor(bdf(1), 1) == INF
    assert not is_stable(A_STABLE["backward_euler"], 1)
    assert not is_stable(bdf(1), 1)


def test_double_roots_on_the_unit_circle_are_unstable_and_simple_ones_are_not():
    assert is_stable(LEAPFROG, 1j * np.array([-0.999999999, -0.5, 0.0, 0.5, 0.999999999])).all()
    assert not is_stable(LEAPFROG, [1j, -1j, 1.000000001j, -1e-6, 1e-6]).any()
    double = Recurrence((1, -2, 1), (0, 1, -1), "double")  # ζ = 1 twice at 0
    assert not is_stable(double, 0)
    assert real_interval(double) == 0 and imaginary_interval(double) == 0
    assert is_stable("ab5", 0)  # ζ = 0 four times: inside the circle


@pytest.mark.parametrize("solver", ["rk4", "ab3", A_STABLE["gauss4"]], ids=label)
def test_shapes_are_kept(solver):
    for shape in [(), (3,), (2, 3), (0,)]:
        z = np.full(shape, -0.1 + 0.1j)
        stable, growth = is_stable(solver, z), growth_factor(solver, z)
        assert stable.shape == growth.shape == shape
        assert stable.dtype == bool and stable.all()
    assert is_stable(solver, [-1 + 0j, 100]).shape == (2,)


def test_points_far_out_are_unstable_without_a_warning():
    assert not is_stable("rk4", 1e200)
    assert not is_stable("ab3", 1e200)
    assert is_stable(A_STABLE["radau5"], -1e30)


def test_objects_are_judged_like_names():
    mine = LinearMultistep([1], [3 / 2, -1 / 2])
    assert real_interval(mine) == real_interval("ab2")
    assert real_interval(SOLVERS["rk4"].tableau) == real_interval("rk4")
    typed = LinearMultistep([0, 1], [2, 0], starter="midpoint")  # leapfrog as a user writes it
    assert imaginary_interval(typed) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("ask", [real_interval, imaginary_interval, stability_function,
                                 lambda s: is_stable(s, 0j), lambda s: growth_factor(s, 0j)])
@pytest.mark.parametrize("solver", [LieTrotter("euler"), Strang("midpoint")], ids=["lie", "strang"])
def test_a_splitting_method_has_no_region_and_says_so(ask, solver):
    with pytest.raises(ValueError, match=r"has no stability region in one h λ.*splitting"):
        ask(solver)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"'ab3' has no tableau.*is_stable\('ab3', hλ\)"):
        stability_function("ab3")
    with pytest.raises(ValueError, match="unknown solver 'rk5'"):
        is_stable("rk5", 0)
    with pytest.raises(TypeError, match="solver must be a name"):
        is_stable(3, 0)
    with pytest.raises(ValueError, match="hλ must be finite"):
        is_stable("rk4", [0, math.nan])


def test_a_characteristic_polynomial_that_is_none_is_refused():
    class Divided(Recurrence):
        def characteristic(self, z):
            return [1.0, -1 / (1 - 0.9 * z)]

    class Short(Recurrence):
        def characteristic(self, z):
            return [1.0]

    with pytest.raises(ValueError, match="polynomials in hλ of degree below 32"):
        real_interval(Divided((), ()))
    with pytest.raises(ValueError, match="at least two coefficients, got 1"):
        is_stable(Short((), ()), 0)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_method_answers_or_says_why_not(name):
    if isinstance(intervals(name), str):
        assert "has no stability region" in intervals(name)
        return
    x, y = intervals(name)
    assert x <= 0 <= y
    inside = [s * end for end in (max(x, -1e3), min(y, 1e3) * 1j) for s in (0.25, 0.5, 0.75, 0.999)]
    assert is_stable(name, inside).all()
    if SOLVERS[name].order:  # z_1 = e^{hλ} + O(h^{p+1}); a multistep method's largest root follows it as well
        z = 1e-2 + 1e-2j
        assert growth_factor(name, z) == pytest.approx(abs(np.exp(z)), abs=20 * abs(z) ** (SOLVERS[name].order + 1))


def test_docstrings_hold():
    assert doctest.testmod(solvers.stability).failed == 0
