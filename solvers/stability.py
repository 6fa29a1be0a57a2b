"""Linear stability: for which h λ a method keeps the solutions of z' = λ z bounded, and how far along the axes.

Two kinds of method have an answer, and a solver says by an attribute which it is:

* ``tableau``, a Tableau: z_{n+1} = R(hλ) z_n, stable where |R(hλ)| <= 1 (Hairer & Wanner 1996, IV.2-3);
* ``characteristic(hλ)``: z_n = ζ^n solves the recurrence of the method where Σ_j c_j(hλ) ζ^(k-j) = 0. It returns
  [c_0, ..., c_k], the highest power of ζ first, each a number or an array shaped like hλ, and each a polynomial in hλ
  of degree below 32 with real coefficients (clear denominators: 1 - hλ b_0, not its inverse). Stable where every root
  has |ζ| <= 1 and those on the circle are simple: the root condition (Dahlquist 1956; Hairer & Wanner 1996, V.1).

A solver with both is judged by its characteristic polynomial. Methods with neither, such as those that split f into
parts, have no stability region in the plane of one h λ, and a ValueError says so.

Rounding: a modulus counts as 1 up to ``TOLERANCE``, or up to what rounding does to an ill-conditioned root. So where a
method leaves stability tangentially (Euler along the imaginary axis: |R| = 1 + y²/2) is_stable is True a little too
far, for |y| < 1.5e-6 there. The intervals do not lean on that tolerance: see real_interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from solvers.base import Solver
from solvers.registry import get_solver
from solvers.tableau import Tableau

TOLERANCE = 1e-12  # a modulus up to 1 + TOLERANCE counts as 1
FAR = 1e6  # a method that is stable along an axis up to here counts as stable all the way
N_DEGREES = 32  # bound on the degree in hλ of the coefficients of a characteristic polynomial
N_TERMS = 20  # terms of the power series that decide stability next to hλ = 0; the order of a method is far below
EPS = float(np.finfo(float).eps)


def stability_function(solver: str | Solver | Tableau) -> Callable[[complex], complex]:
    """R with z_{n+1} = R(hλ) z_n, for a method with a tableau; takes numbers and arrays.

    >>> stability_function("euler")(-0.5)
    np.complex128(0.5+0j)

    Raises ValueError: a method without a tableau.
    """
    form = _form(solver)
    if not isinstance(form, _Quotient):
        name = get_solver(solver).name
        raise ValueError(f"{name!r} has no tableau and so no stability function R(hλ); it is a recurrence over several "
                         f"steps, whose roots is_stable({name!r}, hλ) and growth_factor({name!r}, hλ) look at")
    return form.value


def growth_factor(solver: str | Solver | Tableau, hλ: complex) -> np.ndarray:
    """By how much a step multiplies |z| in the long run: |R(hλ)|, or the largest |ζ|; shaped like hλ, inf at a pole.

    Its contour at 1 bounds the stability region. Raises ValueError as is_stable does.
    """
    return _form(solver).growth(_read(hλ))[()]


def is_stable(solver: str | Solver | Tableau, hλ: complex) -> np.ndarray:
    """Whether z' = λ z stays bounded under ever more steps of size h: bool, shaped like hλ.

    solver: a name, a solver or a tableau. hλ: complex numbers, finite.

    >>> is_stable("rk4", np.array([-2.78, -2.79, 2.8j]))
    array([ True, False,  True])

    Raises ValueError: a method with no scalar definition of stability; hλ not finite.
    """
    return _form(solver).stable(_read(hλ))[()]


def real_interval(solver: str | Solver | Tableau) -> float:
    """The x <= 0 such that the method is stable on [x, 0] and unstable just beyond; -inf if unbounded.

    The error is below 1e-8. For a method with a tableau |R| = 1 is a polynomial equation, whose roots along the axis
    are found and the signs between them looked at (roots within a relative 1e-6 count as one, so a mere touch does
    not end the interval). For the others the power series of the roots at hλ = 0 decide whether stability is lost at
    once (weakly unstable methods lose it like y^4 and slower, which no evaluation near 0 can see), and if not the
    root condition is scanned outwards at points 0.4 % apart, up to |hλ| = 1e6, and bisected.

    Raises ValueError as is_stable does.
    """
    return 0.0 - _first_exit(_form(solver).ray(-1.0))


def imaginary_interval(solver: str | Solver | Tableau) -> float:
    """The y >= 0 such that the method is stable on i [-y, y] and unstable just beyond; see real_interval.

    At the end itself a multistep method may be unstable (leapfrog has a double root at ±i).
    """
    return _first_exit(_form(solver).ray(1j))


class _Ray(NamedTuple):
    """A method along hλ = d t, t > 0: does it lose stability right at 0; where to look; whether it is unstable at t."""

    leaves: bool
    points: np.ndarray
    unstable: Callable[[np.ndarray], np.ndarray]


def _first_exit(ray: _Ray) -> float:
    """The t up to which the method is stable."""
    if ray.leaves:
        return 0.0
    bad = ray.unstable(ray.points)
    if not bad.any():
        return math.inf
    i = int(np.argmax(bad))
    low, high = (float(ray.points[i - 1]) if i else 0.0), float(ray.points[i])
    while high - low > 4 * EPS * high:
        middle = (low + high) / 2
        low, high = (low, middle) if ray.unstable(np.asarray(middle)) else (middle, high)
    return low


@dataclass(frozen=True)
class _Quotient:
    """A method that multiplies z by R(hλ) = P(hλ) / Q(hλ)."""

    tableau: Tableau

    def value(self, z: complex) -> complex:
        """R(z)."""
        with np.errstate(all="ignore"):  # inf and NaN at poles and beyond the largest float: not stable there
            return self.tableau.stability(np.asarray(z, dtype=complex))

    def growth(self, z: np.ndarray) -> np.ndarray:
        """|R(z)|."""
        modulus = np.abs(self.value(z))
        return np.where(np.isnan(modulus), math.inf, modulus)

    def stable(self, z: np.ndarray) -> np.ndarray:
        """|R(z)| <= 1."""
        return self.growth(z) <= 1 + TOLERANCE

    def polynomials(self) -> tuple[np.ndarray, np.ndarray]:
        """P and Q, lowest power first: Q(z) = det(I - z a), and P the first terms of Q(z) (1 + Σ z^k b a^(k-1) 1)."""
        t = self.tableau
        n = t.n_stages
        a = np.array([[*row, *[0.0] * (n - len(row))] for row in t.a])
        moments, bounds = [1.0], [1.0]  # b a^(k-1) 1, and the same of the absolute values
        v, v_bound = np.ones(n), np.ones(n)
        for _ in range(n):
            moments.append(float(np.dot(t.b, v)))
            bounds.append(float(np.dot(np.abs(t.b), v_bound)))
            v, v_bound = a @ v, np.abs(a) @ v_bound
        q = np.eye(1, n + 1)[0] if t.is_explicit else np.poly(a).real
        q_bound = np.abs(q) if t.is_explicit else np.abs(a).sum(axis=1).max() ** np.arange(n + 1)
        p, p_bound = np.convolve(q, moments)[: n + 1], np.convolve(q_bound, bounds)[: n + 1]
        return _without_noise(p, p_bound), _without_noise(q, q_bound)

    def ray(self, d: complex) -> _Ray:
        """Along z = d t, |R|² - 1 has the sign of |P|² - |Q|²: polynomials in t, or an even one, in t²."""
        p, q = (x * d ** np.arange(x.size) for x in self.polynomials())
        factors, power = ([_excess(p, q)[::2]], 2) if d.imag else ([p - q, p + q], 1)
        roots = np.concatenate([np.roots(x[::-1]) for x in factors]).astype(complex) ** (1 / power)
        knots = np.sort(roots.real[(roots.real > 1e-9) & (np.abs(roots.imag) < 1e-3 * np.abs(roots))])
        knots = knots[np.diff(knots, prepend=0.0) > 1e-6 * knots]
        edges = np.concatenate([[0.0], knots, 2 * knots[-1:]])
        at_once = math.prod(next((c for c in x if c), 0.0) for x in factors) > 0
        return _Ray(at_once, (edges[1:] + edges[:-1]) / 2,
                    lambda t: np.prod([np.polyval(x[::-1], t**power) for x in factors], axis=0) > 0)


@dataclass(frozen=True)
class _Recurrence:
    """A method over several steps: z_n = ζ^n for the roots ζ of its characteristic polynomial."""

    name: str
    characteristic: Callable[[Any], Any]

    def coefficients(self, z: np.ndarray) -> np.ndarray:
        """z.shape + (k + 1,): powers of ζ along the last axis, the highest first."""
        rows = [np.broadcast_to(np.asarray(c, dtype=complex), z.shape) for c in self.characteristic(z)]
        if len(rows) < 2:
            raise ValueError(f"characteristic of {self.name!r} must return at least two coefficients, got {len(rows)}")
        return np.stack(rows, axis=-1)

    def roots(self, c: np.ndarray) -> np.ndarray:
        """The k roots, as eigenvalues of companion matrices; infinite where the leading coefficient vanishes."""
        lead = c[..., :1]
        falls = np.abs(lead) <= 1e-14 * np.abs(c).max(axis=-1, keepdims=True)
        k = c.shape[-1] - 1
        companion = np.zeros((*c.shape[:-1], k, k), dtype=complex)
        companion[..., 0, :] = -c[..., 1:] / np.where(falls, 1.0, lead)
        companion[..., range(1, k), range(k - 1)] = 1.0
        return np.where(falls, math.inf, np.linalg.eigvals(companion))

    def growth(self, z: np.ndarray) -> np.ndarray:
        """The largest |ζ|."""
        return np.abs(self.roots(self.coefficients(z))).max(axis=-1)

    def stable(self, z: np.ndarray) -> np.ndarray:
        """The root condition."""
        c = self.coefficients(z)
        roots = self.roots(c)
        modulus = np.abs(roots)
        slope, terms, slope_terms = (np.zeros_like(x) for x in (roots, modulus, modulus))
        value = np.zeros_like(roots)
        with np.errstate(all="ignore"):
            for coefficient in np.moveaxis(c, -1, 0)[..., None]:
                slope, slope_terms = slope * roots + value, slope_terms * modulus + terms
                value, terms = value * roots + coefficient, terms * modulus + np.abs(coefficient)
            # rounding of the coefficients moves a root by this much; a double root by the square root of EPS
            spread = np.fmin(16 * EPS * terms / np.abs(slope), 1e-6) + TOLERANCE
        multiple = np.abs(slope) <= 1e-7 * slope_terms
        on_circle = np.abs(modulus - 1) <= np.where(multiple, 1e-6, spread)
        return ((modulus <= 1 + spread) & ~(on_circle & multiple)).all(axis=-1)

    def ray(self, d: complex) -> _Ray:
        """Along z = d t by the series at 0 and, from there on, by the root condition."""
        points = np.geomspace(1e-3, FAR, 5200)
        leaves = not self.stable(np.asarray(0j)) or any(_grows(series) for series in self.series(d))
        return _Ray(leaves, points, lambda t: ~self.stable(d * t))

    def series(self, d: complex) -> list[np.ndarray]:
        """Taylor coefficients in t of those roots ζ(d t) that start on the unit circle, by Newton's method."""
        c = self.powers() * d ** np.arange(N_TERMS)
        start = self.roots(c[:, 0])
        found = []
        for root in start[np.abs(start) > 1 - 1e-9]:
            ζ = np.zeros(N_TERMS, dtype=complex)
            ζ[0] = root
            for _ in range(N_TERMS.bit_length() + 1):  # each doubles the number of right terms
                value, slope = np.zeros_like(ζ), np.zeros_like(ζ)
                for row in c:
                    slope = _product(slope, ζ) + value
                    value = _product(value, ζ) + row
                ζ = ζ - _divide(value, slope)
            found.append(ζ)
        return found

    def powers(self) -> np.ndarray:
        """(k + 1, N_TERMS): the coefficients as polynomials in z, lowest power first, from values on |z| = 1."""
        n = 2 * N_DEGREES
        values = self.coefficients(np.exp(-2j * math.pi * np.arange(n) / n))
        c = np.fft.ifft(values, axis=0).T
        if np.abs(c[:, N_DEGREES:]).max() > 1e-10 * np.abs(c).max():
            raise ValueError(f"characteristic of {self.name!r} must return polynomials in hλ of degree below "
                             f"{N_DEGREES}; multiply it by its denominators")
        return c[:, :N_TERMS]


def _form(solver: str | Solver | Tableau) -> _Quotient | _Recurrence:
    if isinstance(solver, Tableau):
        return _Quotient(solver)
    solver = get_solver(solver)
    characteristic = getattr(solver, "characteristic", None)
    if callable(characteristic):
        return _Recurrence(solver.name, characteristic)
    tableau = getattr(solver, "tableau", None)
    if isinstance(tableau, Tableau):
        return _Quotient(tableau)
    raise ValueError(f"{solver.name!r} has no stability region in one h λ: it has neither a tableau nor a "
                     "characteristic polynomial for z' = λ z. Ask about the method that it is made of: a splitting "
                     "method acts on parts of f, each of which may have a λ of its own")


def _read(hλ: Any) -> np.ndarray:
    z = np.asarray(hλ, dtype=complex)
    if not np.isfinite(z).all():
        raise ValueError("hλ must be finite")
    return z


def _without_noise(c: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """c with those entries set to 0 that are rounding errors of sums whose terms add up to ``bounds``."""
    return np.where(np.abs(c) <= TOLERANCE * bounds, 0.0, c)


def _excess(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """|p(t)|² - |q(t)|², a polynomial in t. What the order conditions make zero is zero, so its sign holds near 0."""
    squares = [np.convolve(x, x.conj()).real for x in (p, q)]
    return _without_noise(squares[0] - squares[1], sum(np.convolve(np.abs(x), np.abs(x)) for x in (p, q)))


def _grows(ζ: np.ndarray) -> bool:
    """Whether |ζ(t)|² = 1 + c_m t^m + ... leaves the unit disc: the sign of its first coefficient that is not noise."""
    c, bounds = np.convolve(ζ, ζ.conj()).real, np.convolve(np.abs(ζ), np.abs(ζ))
    first = next((x for x, bound in zip(c[1:N_TERMS], bounds[1:], strict=False) if abs(x) > 1e-9 * bound), 0.0)
    return first > 0


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The product of two power series, as many terms as they have."""
    return np.convolve(x, y)[: x.size]


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The quotient of two power series."""
    quotient = np.zeros_like(x)
    for k in range(x.size):
        quotient[k] = (x[k] - np.dot(quotient[:k], y[k:0:-1])) / y[0]
    return quotient
