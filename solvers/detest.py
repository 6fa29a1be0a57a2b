"""DETEST: 25 non-stiff initial-value problems in five classes, all over (0, 20), on which integrators are compared.

Hull, Enright, Fellen & Sedgwick 1972, "Comparing numerical methods for ordinary differential equations"; Enright &
Pryce 1987, "Two FORTRAN packages for assessing initial value methods". A: single equations, B: small systems, C:
moderate systems, D: orbits of eccentricity 0.1 to 0.9, E: higher-order equations.

A problem without a solution in closed form gets its reference from scipy's DOP853 at rtol 1e-13, when asked for it.

>>> DETEST["A4"].reference
tensor([17.7302], dtype=torch.float64)
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers import fields
from solvers.fields import Linear, VanDerPol, second_difference, state
from solvers.problems import PROBLEMS, Problem

SOURCE = "Hull, Enright, Fellen & Sedgwick 1972; Enright & Pryce 1987"


def a2(z: Tensor, l: Tensor) -> Tensor:
    """z' = -z³ / 2, a Riccati-like equation."""
    return -0.5 * z * z * z


def a4(z: Tensor, l: Tensor) -> Tensor:
    """z' = z / 4 (1 - z / 20), a logistic curve."""
    return z / 4 * (1 - z / 20)


def a5(z: Tensor, l: Tensor) -> Tensor:
    """z' = (z - l) / (z + l), a spiral."""
    return (z - l) / (z + l)


def b1(z: Tensor, l: Tensor) -> Tensor:
    """Two conflicting populations."""
    x, y = z.unbind(-1)
    return torch.stack([2 * (x - x * y), x * y - y], -1)


def b3(z: Tensor, l: Tensor) -> Tensor:
    """A nonlinear chemical reaction."""
    x, y, _ = z.unbind(-1)
    return torch.stack([-x, x - y * y, y * y], -1)


def b4(z: Tensor, l: Tensor) -> Tensor:
    """The integral surface of a torus."""
    x, y, w = z.unbind(-1)
    r = torch.hypot(x, y)
    return torch.stack([-y - x * w / r, x - y * w / r, x / r], -1)


def _cascade(flow: Tensor) -> Tensor:
    """Each species passes its flow on to the next; the last one keeps what it gets."""
    return pad(flow, (1, 0)) - pad(flow, (0, 1))


def c1(z: Tensor, l: Tensor) -> Tensor:
    """Radioactive decay chain, equal rates."""
    return _cascade(z[..., :-1])


def c2(z: Tensor, l: Tensor) -> Tensor:
    """Radioactive decay chain, rates 1, 2, 3, ..."""
    return _cascade(z[..., :-1] * torch.arange(1, z.shape[-1], dtype=z.dtype, device=z.device))


def c3(z: Tensor, l: Tensor) -> Tensor:
    """Heat conduction, without the factor 1 / Δx². C3 has 10 points, C4 has 51."""
    return second_difference(z)


_K2, _SUN = 2.95912208286, 1.00000597682
_PLANETS = (0.000954786104043, 0.000285583733151, 0.0000437273164546, 0.0000517759138449, 0.00000277777777778)


def c5(z: Tensor, l: Tensor) -> Tensor:
    """Sun and five outer planets (Zonneveld 1964); the state is 15 coordinates, planet by planet, then velocities."""
    x = z[..., :15].unflatten(-1, (5, 3))
    mass = torch.stack([torch.full((), m, dtype=z.dtype, device=z.device) for m in _PLANETS])
    square = (x * x).sum(-1, keepdim=True)
    to_sun = x / (square * square.sqrt())  # x_j / r_j³
    apart = x[..., None, :, :] - x[..., :, None, :]  # x_k - x_j
    distance = (apart * apart).sum(-1) + torch.eye(5, dtype=z.dtype, device=z.device)  # 1 between a planet and itself
    pull = (mass / (distance * distance.sqrt())).unsqueeze(-1) * apart
    others = mass * (1 - torch.eye(5, dtype=z.dtype, device=z.device))
    acceleration = _K2 * (pull.sum(-2) - others @ to_sun - (_SUN + mass)[:, None] * to_sun)
    return torch.cat([z[..., 15:], acceleration.flatten(-2)], -1)


def e1(z: Tensor, l: Tensor) -> Tensor:
    """Bessel's equation of order 1/2 in l + 1."""
    x, v = z.unbind(-1)
    return torch.stack([v, -(v / (l + 1) + (1 - 0.25 / (l + 1) ** 2) * x)], -1).to(z.dtype)


def e3(z: Tensor, l: Tensor) -> Tensor:
    """Duffing's equation."""
    x, v = z.unbind(-1)
    return torch.stack([v, x * x * x / 6 - x + 2 * torch.sin(2.78535 * l)], -1).to(z.dtype)


def e4(z: Tensor, l: Tensor) -> Tensor:
    """A falling body with quadratic drag."""
    _, v = z.unbind(-1)
    return torch.stack([v, 0.032 - 0.4 * v * v], -1)


def e5(z: Tensor, l: Tensor) -> Tensor:
    """Linear pursuit."""
    _, v = z.unbind(-1)
    return torch.stack([v, torch.sqrt(1 + v * v) / (25 - l)], -1).to(z.dtype)


# Exact solutions


def c1_exact(l: float) -> Tensor:
    """Poisson weights; the last species holds the tail."""
    early = [math.exp(-l) * l**k / math.factorial(k) for k in range(9)]
    return state(*early, 1 - math.fsum(early))


def c2_exact(l: float) -> Tensor:
    """Geometric weights (Yule 1925); the last species holds the tail."""
    p, q = math.exp(-l), -math.expm1(-l)
    return state(*(p * q**k for k in range(9)), q**9)


def c3_exact(l: float, n: int) -> Tensor:
    """From (1, 0, ..., 0): the sum over the n sine modes."""
    k = torch.arange(1, n + 1, dtype=torch.float64) * math.pi / (n + 1)
    decay = torch.exp(-4 * l * torch.sin(k / 2) ** 2)
    modes = torch.sin(torch.arange(1, n + 1, dtype=torch.float64)[:, None] * k)
    return 2 / (n + 1) * modes @ (decay * torch.sin(k))


def e1_exact(l: float) -> Tensor:
    """J_{1/2}(x) = √(2 / πx) sin x and its derivative, x = l + 1."""
    x = l + 1
    scale = math.sqrt(2 / (math.pi * x))
    return state(scale * math.sin(x), scale * (math.cos(x) - math.sin(x) / (2 * x)))


def e4_exact(l: float) -> Tensor:
    """Towards the final speed √0.08."""
    rate = math.sqrt(0.032 * 0.4)
    return state(30 + math.log(math.cosh(rate * l)) / 0.4, math.sqrt(0.08) * math.tanh(rate * l))


def e5_exact(l: float) -> Tensor:
    """asinh of the slope is ln(25 / (25 - l))."""
    left = 1 - l / 25
    return state((-25 * math.log(left) - l + l * l / 50) / 2, (1 / left - left) / 2)


_B2 = Linear(((-1.0, 1.0, 0.0), (1.0, -2.0, 1.0), (0.0, 1.0, -1.0)))
_C5_START = state(
    3.42947415189, 3.35386959711, 1.35494901715, 6.64145542550, 5.97156957878, 2.18231499728,
    11.2630437207, 14.6952576794, 6.27960525067, -30.1552268759, 1.65699966404, 1.43785752721,
    -21.1238353380, 28.4465098142, 15.3882659679,
    -0.557160570446, 0.505696783289, 0.230578543901, -0.415570776342, 0.365682722812, 0.169143213293,
    -0.325325669158, 0.189706021964, 0.0877265322780, -0.0240476254170, -0.287659532608, -0.117219543175,
    -0.176860753121, -0.216393453025, -0.0148647893090)


def _unit(n: int) -> Tensor:
    return state(1, *[0] * (n - 1))


_problem = partial(Problem, span=(0.0, 20.0), source=SOURCE, digits=11)
_linear = partial(_problem, is_linear=True)


def _orbits() -> tuple[Problem, ...]:
    """D1 to D5."""
    return tuple(_problem(name=f"D{i}", f=fields.orbit, z0=fields.orbit_start(e),
                          exact=partial(fields.orbit_exact, eccentricity=e))
                 for i, e in enumerate((0.1, 0.3, 0.5, 0.7, 0.9), 1))


DETEST: dict[str, Problem] = {problem.name: problem for problem in (
    _linear(name="A1", f=fields.decay, z0=state(1), exact=lambda l: state(math.exp(-l))),
    _problem(name="A2", f=a2, z0=state(1), exact=lambda l: state(1 / math.sqrt(1 + l))),
    _linear(name="A3", f=fields.modulated, z0=state(1), exact=lambda l: state(math.exp(math.sin(l)))),
    _problem(name="A4", f=a4, z0=state(1), exact=lambda l: state(20 / (1 + 19 * math.exp(-l / 4)))),
    _problem(name="A5", f=a5, z0=state(4)),
    _problem(name="B1", f=b1, z0=state(1, 3)),
    _linear(name="B2", f=_B2, z0=state(2, 0, 1), exact=partial(_B2.exact, z0=(2, 0, 1))),
    _problem(name="B3", f=b3, z0=state(1, 0, 0)),
    _problem(name="B4", f=b4, z0=state(3, 0, 0)),
    _problem(name="B5", f=fields.rigid_body, z0=state(0, 1, 1), exact=fields.rigid_body_exact),
    _linear(name="C1", f=c1, z0=_unit(10), exact=c1_exact),
    _linear(name="C2", f=c2, z0=_unit(10), exact=c2_exact),
    _linear(name="C3", f=c3, z0=_unit(10), exact=partial(c3_exact, n=10)),
    _linear(name="C4", f=c3, z0=_unit(51), exact=partial(c3_exact, n=51)),
    _problem(name="C5", f=c5, z0=_C5_START),
    *_orbits(),
    _linear(name="E1", f=e1, z0=e1_exact(0.0), exact=e1_exact),
    _problem(name="E2", f=VanDerPol(1.0), z0=state(2, 0), final=PROBLEMS["van_der_pol"].final),
    _problem(name="E3", f=e3, z0=state(0, 0)),
    _problem(name="E4", f=e4, z0=state(30, 0), exact=e4_exact),
    _problem(name="E5", f=e5, z0=state(0, 0), exact=e5_exact),
)}
