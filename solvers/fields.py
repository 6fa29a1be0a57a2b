"""The vector fields of solvers.problems and, where there is one, their solution in closed form.

Every field takes a state of any floating dtype on any device, with any leading batch axes, and works under autograd and
torch.func. Constants are Python numbers, or made on the state's device: nothing is sent there. Where a field ends with
``to(z.dtype)``, a float32 l would promote the entries of a single half-precision state, which have no axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers.base import VectorField

Rows = tuple[tuple[float, ...], ...]


def state(*entries: float | Tensor) -> Tensor:
    """A float64 vector.

    >>> state(1, 2).dtype
    torch.float64
    """
    return torch.tensor([float(x) for x in entries], dtype=torch.float64)


@dataclass(frozen=True)
class Linear:
    """f(z) = A z, A given by rows. Written out entry by entry: nothing is sent to the device, any dtype is kept."""

    rows: Rows

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        columns = z.unbind(-1)
        return torch.stack([sum(a * x for a, x in zip(row, columns, strict=True)) for row in self.rows], -1)

    def exact(self, l: float, z0: Sequence[float]) -> Tensor:
        """exp(l A) z0."""
        from scipy.linalg import expm

        return torch.from_numpy(expm(l * torch.tensor(self.rows, dtype=torch.float64).numpy())) @ state(*z0)


@dataclass(frozen=True)
class Sum:
    """f = f_1 + ... + f_m, with ``parts`` for splitting and implicit-explicit methods."""

    parts: tuple[VectorField, ...]

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        first, *others = (part(z, l) for part in self.parts)
        return sum(others, first)


@dataclass(frozen=True)
class Layered:
    """f = f_k for l0_k <= l < l1_k (the last one at its right end too), with ``pieces`` [(l0_k, l1_k, f_k), ...]."""

    pieces: tuple[tuple[float, float, VectorField], ...]

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        k = self.pieces[0][2](z, l)
        for l0, _, f in self.pieces[1:]:
            k = torch.where(l < l0, k, f(z, l))
        return k


@dataclass(frozen=True)
class Relay:
    """z' = u(l) - z, u = 1 before the breakpoint and -1 from there on."""

    breakpoints: tuple[float]

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        return torch.where(l < self.breakpoints[0], 1 - z, -1 - z)

    def exact(self, l: float, z0: float) -> Tensor:
        """Relaxation towards 1, then towards -1."""
        jump = self.breakpoints[0]
        before = 1 + (z0 - 1) * math.exp(-min(l, jump))
        return state(before if l <= jump else -1 + (before + 1) * math.exp(jump - l))


@dataclass(frozen=True)
class VanDerPol:
    """z1' = z2, eps z2' = (1 - z1²) z2 - z1: mild at eps = 1, stiff where eps is small (1 / mu² in rescaled l)."""

    eps: float

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        x, y = z.unbind(-1)
        return torch.stack([y, ((1 - x * x) * y - x) / self.eps], -1)


def decay(z: Tensor, l: Tensor) -> Tensor:
    """z' = -z."""
    return -z


def logistic(z: Tensor, l: Tensor) -> Tensor:
    """z' = z (1 - z)."""
    return z * (1 - z)


def cubic(z: Tensor, l: Tensor) -> Tensor:
    """z' = z - z³: fixed points -1, 0, 1."""
    return z - z * z * z


def modulated(z: Tensor, l: Tensor) -> Tensor:
    """z' = z cos l."""
    return z * torch.cos(l)


def noncommuting(z: Tensor, l: Tensor) -> Tensor:
    """x' = l x + y, y' = l y: linear, non-autonomous, and its matrices do not share eigenvectors."""
    x, y = z.unbind(-1)
    return torch.stack([l * x + y, l * y], -1).to(z.dtype)


def oscillator(z: Tensor, l: Tensor) -> Tensor:
    """x'' = -x."""
    x, v = z.unbind(-1)
    return torch.stack([v, -x], -1)


def forced_oscillator(z: Tensor, l: Tensor) -> Tensor:
    """x'' + x' / 5 + x = cos(3 l / 2)."""
    x, v = z.unbind(-1)
    return torch.stack([v, torch.cos(1.5 * l) - x - 0.2 * v], -1).to(z.dtype)


def lotka_volterra(z: Tensor, l: Tensor) -> Tensor:
    """x' = x (3/2 - y), y' = y (x - 3)."""
    x, y = z.unbind(-1)
    return torch.stack([x * (1.5 - y), y * (x - 3)], -1)


def brusselator(z: Tensor, l: Tensor) -> Tensor:
    """x' = 1 + x² y - 4 x, y' = 3 x - x² y."""
    x, y = z.unbind(-1)
    q = x * x * y
    return torch.stack([1 + q - 4 * x, 3 * x - q], -1)


def lorenz(z: Tensor, l: Tensor) -> Tensor:
    """x' = 10 (y - x), y' = x (28 - w) - y, w' = x y - 8/3 w."""
    x, y, w = z.unbind(-1)
    return torch.stack([10 * (y - x), x * (28 - w) - y, x * y - 8 / 3 * w], -1)


def rigid_body(z: Tensor, l: Tensor) -> Tensor:
    """Euler's equations: a' = b c, b' = -a c, c' = -0.51 a b."""
    a, b, c = z.unbind(-1)
    return torch.stack([b * c, -a * c, -0.51 * a * b], -1)


def orbit(z: Tensor, l: Tensor) -> Tensor:
    """x'' = -x / r³, y'' = -y / r³; the state is (x, y, x', y')."""
    x, y, u, v = z.unbind(-1)
    square = x * x + y * y
    cube = square * square.sqrt()
    return torch.stack([u, v, -x / cube, -y / cube], -1)


def arenstorf(z: Tensor, l: Tensor) -> Tensor:
    """A satellite in the plane of earth and moon, in rotating coordinates; the state is (x, y, x', y')."""
    x, y, u, v = z.unbind(-1)
    moon = 0.012277471
    earth = 1 - moon
    a, b = x + moon, x - earth
    da, db = a * a + y * y, b * b + y * y
    p, q = earth / (da * da.sqrt()), moon / (db * db.sqrt())
    return torch.stack([u, v, x + 2 * v - p * a - q * b, y - 2 * u - (p + q) * y], -1)


def pleiades(z: Tensor, l: Tensor) -> Tensor:
    """Seven stars in a plane, masses 1 to 7; the state is (x, y, x', y'), 7 entries each."""
    x, y, velocity = z[..., :7], z[..., 7:14], z[..., 14:]
    mass = torch.arange(1, 8, dtype=z.dtype, device=z.device)
    dx, dy = x[..., None, :] - x[..., :, None], y[..., None, :] - y[..., :, None]
    square = dx * dx + dy * dy + torch.eye(7, dtype=z.dtype, device=z.device)  # a star pulls itself by 0 / 1, not 0 / 0
    pull = mass / (square * square.sqrt())
    return torch.cat([velocity, (pull * dx).sum(-1), (pull * dy).sum(-1)], -1)


def second_difference(z: Tensor) -> Tensor:
    """z_{i-1} - 2 z_i + z_{i+1} along the last axis, zero beyond both ends."""
    wide = pad(z, (1, 1))
    return wide[..., :-2] - 2 * z + wide[..., 2:]


def heat(z: Tensor, l: Tensor) -> Tensor:
    """u_t = u_xx over (0, 1), zero at both ends, by central differences at the inner points."""
    return (z.shape[-1] + 1) ** 2 * second_difference(z)


def robertson(z: Tensor, l: Tensor) -> Tensor:
    """Three species, rates 0.04, 3e7 and 1e4."""
    a, b, c = z.unbind(-1)
    slow, back, fast = 0.04 * a, 1e4 * b * c, 3e7 * b * b
    return torch.stack([back - slow, slow - back - fast, fast], -1)


def oregonator(z: Tensor, l: Tensor) -> Tensor:
    """Belousov-Zhabotinskii reaction, three species."""
    a, b, c = z.unbind(-1)
    return torch.stack([77.27 * (b + a * (1 - 8.375e-6 * a - b)), (c - (1 + a) * b) / 77.27, 0.161 * (a - c)], -1)


def hires(z: Tensor, l: Tensor) -> Tensor:
    """High irradiance response of a plant, eight species."""
    a, b, c, d, e, f, g, h = z.unbind(-1)
    q = 280 * f * h
    back = q - 1.81 * g
    return torch.stack([
        -1.71 * a + 0.43 * b + 8.32 * c + 0.0007, 1.71 * a - 8.75 * b, -10.03 * c + 0.43 * d + 0.035 * e,
        8.32 * b + 1.71 * c - 1.12 * d, -1.745 * e + 0.43 * (f + g), -q + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
        back, -back], -1)


def prothero_robinson(z: Tensor, l: Tensor) -> Tensor:
    """z' = -1e4 (z - cos l) - sin l."""
    return -1e4 * (z - torch.cos(l)) - torch.sin(l)


def kaps_slow(z: Tensor, l: Tensor) -> Tensor:
    """The part of Kaps' problem without 1 / eps: x' = -2 x, y' = x - y - y²."""
    x, y = z.unbind(-1)
    return torch.stack([-2 * x, x - y - y * y], -1)


def kaps_stiff(z: Tensor, l: Tensor) -> Tensor:
    """The part of Kaps' problem with 1 / eps = 1000: x' = -1000 (x - y²)."""
    x, y = z.unbind(-1)
    return torch.stack([-1e3 * (x - y * y), torch.zeros_like(y)], -1)


def _weight(z: Tensor, rows: int, columns: int, phase: float | Tensor) -> Tensor:
    """sin(phase + 3 i + 2 j + i j) / sqrt(rows): a fixed matrix without a random generator, in z's dtype."""
    i = torch.arange(rows, dtype=z.dtype, device=z.device)[:, None]
    j = torch.arange(columns, dtype=z.dtype, device=z.device)
    return torch.sin(phase + 3 * i + 2 * j + i * j) / math.sqrt(rows)


def _attend(z: Tensor, phase: float | Tensor) -> Tensor:
    d = z.shape[-1]
    q, k, v = (z @ _weight(z, d, d, phase + shift) for shift in (0.0, 1.0, 2.0))
    return torch.softmax(q @ k.mT / math.sqrt(d), -1) @ v


def attention(z: Tensor, l: Tensor) -> Tensor:
    """softmax(z Q (z K)ᵀ / √d) z V over tokens; z is (..., tokens, d)."""
    return _attend(z, 0.0)


def drifting_attention(z: Tensor, l: Tensor) -> Tensor:
    """Attention whose weights turn slowly with depth."""
    return _attend(z, 0.5 * l)


def drifting_feedforward(z: Tensor, l: Tensor) -> Tensor:
    """tanh(z A) B token by token, twice as wide inside, with weights that turn slowly with depth."""
    d = z.shape[-1]
    return torch.tanh(z @ _weight(z, d, 2 * d, 0.5 * l + 3.0)) @ _weight(z, 2 * d, d, 0.5 * l + 4.0)


# Exact solutions, each from the start that solvers.problems gives it


def noncommuting_exact(l: float) -> Tensor:
    """From (1, 1/2)."""
    growth = math.exp(l * l / 2)
    return state((1 + l / 2) * growth, growth / 2)


def forced_oscillator_exact(l: float) -> Tensor:
    """From (1, 0): the forced oscillation p cos + q sin plus a decaying one."""
    w, gap, drag = 1.5, 1 - 1.5**2, 0.2 * 1.5
    p, q = gap / (gap**2 + drag**2), drag / (gap**2 + drag**2)
    rate, own = 0.1, math.sqrt(1 - 0.1**2)
    a = 1 - p
    b = (rate * a - w * q) / own
    c, s, damping = math.cos(own * l), math.sin(own * l), math.exp(-rate * l)
    x = damping * (a * c + b * s) + p * math.cos(w * l) + q * math.sin(w * l)
    v = damping * ((own * b - rate * a) * c - (own * a + rate * b) * s)
    return state(x, v + w * (q * math.cos(w * l) - p * math.sin(w * l)))


def rigid_body_exact(l: float) -> Tensor:
    """From (0, 1, 1): Jacobi's sn, cn, dn with parameter 0.51."""
    from scipy.special import ellipj

    return state(*ellipj(l, 0.51)[:3])


def orbit_exact(l: float, eccentricity: float) -> Tensor:
    """From the pericentre of an ellipse of half axis 1: E - e sin E = l (Kepler 1609), by Newton's method."""
    e = eccentricity
    mean = math.remainder(l, 2 * math.pi)
    angle = mean + math.copysign(0.85 * e, math.sin(mean))  # Danby 1988
    for _ in range(30):
        angle -= (angle - e * math.sin(angle) - mean) / (1 - e * math.cos(angle))
    c, s, minor = math.cos(angle), math.sin(angle), math.sqrt(1 - e * e)
    return state(c - e, minor * s, -s / (1 - e * c), minor * c / (1 - e * c))


def orbit_start(eccentricity: float) -> Tensor:
    """The pericentre."""
    e = eccentricity
    return state(1 - e, 0, 0, math.sqrt((1 + e) / (1 - e)))


LAYERS = Layered((
    (0.0, 1.0, Linear(((-0.2, 1.0), (-1.0, -0.2)))),
    (1.0, 2.0, Linear(((0.3, 0.0), (0.8, -0.6)))),
    (2.0, 3.0, Linear(((-0.5, -1.5), (0.4, 0.1)))),
))


def layers_exact(l: float) -> Tensor:
    """From (1, -1/2): one matrix exponential after the other."""
    z = state(1, -0.5)
    for l0, l1, f in LAYERS.pieces:
        if l > l0:
            z = f.exact(min(l, l1) - l0, z)
    return z


def heat_exact(l: float) -> Tensor:
    """From sin(πx) + sin(3πx) / 2: both are eigenvectors of the differences, so each decays by itself."""
    n = 31
    x = torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)
    modes = ((1, 1.0), (3, 0.5))
    rate = {k: -4 * (n + 1) ** 2 * math.sin(k * math.pi / (2 * (n + 1))) ** 2 for k, _ in modes}
    return sum(size * math.exp(rate[k] * l) * torch.sin(k * math.pi * x) for k, size in modes)
