"""Eigenvalues, norms and the numerical range of a field's Jacobian, layer by layer and without the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.krylov import Eigenvalues, leading_eigenvalues
from odeformer.diagnostics.linearize import Jacobian
from odeformer.diagnostics.trajectory import MAX_BYTES, Trajectory, bar
from odeformer.tables import at_least

At = str | Sequence[float]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues λ of df/dz, unit 1 / l: ``eigenvalues`` (sites, batch, n) complex, nan where a row has fewer;
    ``residuals`` of the same shape, |J x - λ x| of unit vectors x (0 where all eigenvalues were asked for); ``depths``
    of the sites and ``steps``, the h taken from them. ``whole``: whether all eigenvalues are there. On the CPU."""

    depths: tuple[float, ...]
    steps: tuple[float, ...]
    eigenvalues: Tensor
    residuals: Tensor
    whole: bool


def spectrum(source: Any, n: int | None = 10, *, which: str = "magnitude", at: At = "layers", part: int | None = None,
             krylov: int | None = None, tol: float | None = None, max_restarts: int = 100, vectorize: bool = True,
             max_bytes: int = MAX_BYTES, progress: bool = False, seed: int = 0) -> Spectrum:
    """The ``n`` leading eigenvalues of df/dz at each site, for each row of the batch; None: all of them.

    A row's Jacobian is over all of its real tokens: (tokens d_model) squared. Leading ones by restarted Arnoldi
    (Arnoldi 1951; Stewart 2001) from products with J alone; ``which``, ``krylov``, ``tol``, ``max_restarts``, ``seed``
    as in ``leading_eigenvalues``, which may miss further copies of a multiple eigenvalue. All of them from dense
    matrices, whose columns are made together by torch.vmap unless ``vectorize`` is False. ``at``, ``part``: which
    places and sublayers, as in ``Trajectory.sites``.

    Raises ValueError, with the number of bytes, for what does not fit into max_bytes.
    """
    run = Trajectory.of(source)
    sites = run.sites(at, part=part)
    values, residuals = [], []
    for site in bar(sites, progress, "spectrum"):
        jacobian = Jacobian(site, run.mask)
        if n is None:
            values.append(_all_eigenvalues(jacobian, max_bytes, vectorize))
            residuals.append(torch.zeros(values[-1].shape, dtype=torch.float64))
            continue
        found = leading_eigenvalues(jacobian.jvp, site.z, n, which=which, keep=jacobian.keep, krylov=krylov, tol=tol,
                                    max_restarts=max_restarts, max_bytes=max_bytes, seed=seed)
        values.append(found.values)
        residuals.append(found.residuals)
    return Spectrum(tuple(float(site.l) for site in sites), tuple(site.h for site in sites), torch.stack(values),
                    torch.stack(residuals), n is None)


def _all_eigenvalues(jacobian: Jacobian, max_bytes: int, vectorize: bool) -> Tensor:
    matrices = jacobian.dense(max_bytes=max_bytes, vectorize=vectorize).double().cpu()
    keep = jacobian.dims().cpu()
    values = torch.full(keep.shape, torch.nan, dtype=torch.complex128)
    for i, row in enumerate(keep):
        found = torch.linalg.eigvals(matrices[i][row][:, row])
        values[i, :len(found)] = found[found.abs().argsort(descending=True, stable=True)]
    return values


def dense_jacobians(source: Any, *, at: At = "layers", part: int | None = None, vectorize: bool = True,
                    max_bytes: int = MAX_BYTES, progress: bool = False) -> Tensor:
    """df/dz at each site: (sites, batch, n, n) with n = tokens d_model, token by token, 0 at padding.

    Raises ValueError, with the number of bytes, for what does not fit into max_bytes.
    """
    run = Trajectory.of(source)
    sites = Jacobian.along(run, at, part)
    return torch.stack([jacobian.dense(max_bytes=max_bytes // len(sites), vectorize=vectorize)
                        for jacobian in bar(sites, progress, "Jacobians")])


def spectral_radius(source: Any, **options: Any) -> Tensor:
    """max |λ| of df/dz, (sites, batch), unit 1 / l. Options as of ``spectrum``."""
    return spectrum(source, 1, which="magnitude", **options).eigenvalues.abs().squeeze(-1)


def spectral_norm(source: Any, **options: Any) -> Tensor:
    """‖df/dz‖, the largest singular value, (sites, batch), unit 1 / l: the square root of the leading eigenvalue of
    J^T J, by Lanczos' method from jvp and vjp (Golub & Kahan 1965). Options: at, part, krylov, tol, max_restarts,
    max_bytes, progress, seed, as of ``spectrum``."""
    return _extremes(source, lambda jacobian: jacobian.gram, ("right",), **options)[..., 0].clamp(min=0).sqrt()


def log_norm(source: Any, **options: Any) -> Tensor:
    """The logarithmic norm μ(J), the largest eigenvalue of (J + J^T) / 2, (sites, batch), unit 1 / l.

    Two solutions part at most like exp(∫ μ dl) (Dahlquist 1958; Söderlind 2006): below 0 the field contracts,
    whatever its eigenvalues suggest. Options as of ``spectral_norm``.
    """
    return _extremes(source, lambda jacobian: jacobian.symmetric, ("right",), **options)[..., 0]


def log_norm_interval(source: Any, **options: Any) -> Tensor:
    """(sites, batch, 2): the smallest and the largest eigenvalue of (J + J^T) / 2, between which the real parts of
    the numerical range lie; the first is -μ(-J). Options as of ``spectral_norm``."""
    return _extremes(source, lambda jacobian: jacobian.symmetric, ("left", "right"), **options)


def _extremes(source: Any, operator: Callable[[Jacobian], Callable], ends: Sequence[str], *, at: At = "layers",
              part: int | None = None, progress: bool = False, **options: Any) -> Tensor:
    """The leading eigenvalue of a symmetric operator at each end: (sites, batch, ends) in float64."""
    run = Trajectory.of(source)
    rows = []
    for jacobian in bar(Jacobian.along(run, at, part), progress, "Lanczos"):
        found = [leading_eigenvalues(operator(jacobian), jacobian.z, 1, which=end, keep=jacobian.keep, **options)
                 for end in ends]
        rows.append(torch.stack([x.values[:, 0].real for x in found], -1))
        jacobian.forget()
    return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class NumericalRange:
    """``points`` (sites, batch, angles) complex: the boundary of W(J) = {x* J x : |x| = 1}, in order, counterclockwise.
    ``support`` (sites, batch, angles): the largest real part of exp(-iθ) W(J) at ``angles`` θ, so that W lies within
    the half planes Re(exp(-iθ) w) <= support, and holds the polygon of the points. ``depths`` of the sites."""

    depths: tuple[float, ...]
    angles: Tensor
    points: Tensor
    support: Tensor

    @property
    def radius(self) -> Tensor:
        """The numerical radius max |w|, from the points: (sites, batch)."""
        return self.points.abs().amax(-1)


def numerical_range(source: Any, n_angles: int = 32, *, at: At = "layers", part: int | None = None,
                    progress: bool = False, **options: Any) -> NumericalRange:
    """The numerical range (field of values) of df/dz at each site, unit 1 / l.

    It holds all eigenvalues; for a normal J it is their convex hull, and how far it reaches beyond says how far
    transient growth can. Boundary points are x* J x for the leading eigenvector x of the Hermitian part of exp(-iθ) J
    (Johnson 1978), found by Lanczos' method for angles θ in [0, π]; the other half mirrors it, as J is real.
    Each Lanczos step takes two jvp and two vjp. Options as of ``spectral_norm``.
    """
    at_least("n_angles", n_angles, 4)
    run = Trajectory.of(source)
    half = [2 * math.pi * i / n_angles for i in range(n_angles // 2 + 1)]
    jacobians = Jacobian.along(run, at, part)
    todo, found = [(jacobian, angle) for jacobian in jacobians for angle in half], []
    for jacobian, angle in bar(todo, progress, "numerical range"):
        found.append(_support_point(jacobian, angle, options))
        if angle == half[-1]:
            jacobian.forget()
    points, support = (torch.stack(x).unflatten(0, (len(jacobians), len(half))).movedim(1, -1)
                       for x in zip(*found, strict=True))
    mirrored = slice(1, (n_angles + 1) // 2)
    points, support = (torch.cat([x, x[..., mirrored].flip(-1).conj()], -1) for x in (points, support))
    angles = torch.arange(n_angles, dtype=torch.float64) * (2 * math.pi / n_angles)
    return NumericalRange(tuple(float(jacobian.l) for jacobian in jacobians), angles, points, support)


def _support_point(jacobian: Jacobian, angle: float, options: dict) -> tuple[Tensor, Tensor]:
    """x* J x and the support at an angle; x = u + i w, kept as pairs (batch, 2, tokens, d_model)."""
    c, s = math.cos(angle), math.sin(angle)

    def rotated(x: Tensor) -> Tensor:
        """The Hermitian part c S - i s A of exp(-iθ) J = (c - i s)(S + A), S and A being the symmetric and the
        antisymmetric part."""
        (u, w) = x.unbind(1)
        ju, jw, tu, tw = jacobian.jvp(u), jacobian.jvp(w), jacobian.vjp(u), jacobian.vjp(w)
        return torch.stack([c * (ju + tu) + s * (jw - tw), c * (jw + tw) - s * (ju - tu)], 1) / 2

    z = jacobian.z
    like = torch.stack([z, z], 1)
    keep = None if jacobian.keep is None else jacobian.keep.unsqueeze(1)
    best: Eigenvalues = leading_eigenvalues(rotated, like, 1, which="right", keep=keep, vectors=True, **options)
    u, w = best.vectors[:, 0].unbind(1)
    size = (u.square() + w.square()).double().flatten(1).sum(1)
    ju, jw = jacobian.jvp(u), jacobian.jvp(w)
    real, imaginary = (x.double().flatten(1).sum(1) / size for x in (u * ju + w * jw, u * jw - w * ju))
    return torch.complex(real, imaginary).cpu(), best.values[:, 0].real


def non_normality(source: Any, n_probes: int = 32, *, at: At = "layers", part: int | None = None, seed: int = 0,
                  progress: bool = False) -> Tensor:
    """‖J J^T - J^T J‖_F / ‖J‖_F² at each site, (sites, batch), no unit: 0 for a normal J, at most √2.

    Estimated from ``n_probes`` random vectors g, as ‖C‖_F² is the mean of |C g|² (Hutchinson 1990): a relative error of
    about sqrt(1 / n_probes) at worst. Elsner & Paardekooper 1987 compare measures of non-normality.
    """
    at_least("n_probes", n_probes, 1)
    run = Trajectory.of(source)
    jacobians = Jacobian.along(run, at, part)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for jacobian in bar(jacobians, progress, "non-normality"):
        apart, size = 0.0, 0.0
        for _ in range(n_probes):
            g = torch.randn(jacobian.z.shape, generator=generator, dtype=torch.float64).to(jacobian.z)
            jg, tg = jacobian.jvp(g), jacobian.vjp(g)
            apart = apart + (jacobian.jvp(tg) - jacobian.vjp(jg)).double().flatten(1).square().sum(1)
            size = size + jg.double().flatten(1).square().sum(1)
        rows.append((apart / n_probes).sqrt() / (size / n_probes))
        jacobian.forget()
    return torch.stack(rows)


def departure_from_normality(matrices: Tensor) -> Tensor:
    """Henrici's departure sqrt(‖A‖_F² - Σ|λ|²) of matrices (..., n, n): 0 for normal ones (Henrici 1962)."""
    eigenvalues = torch.linalg.eigvals(matrices)
    return (matrices.square().sum((-2, -1)) - eigenvalues.abs().square().sum(-1)).clamp(min=0).sqrt()


def lipschitz(source: Any, **options: Any) -> Tensor:
    """The largest ‖df/dz‖ over the batch at each site, (sites,), unit 1 / l: a lower bound of the field's Lipschitz
    constant in that layer, and near the states of the batch an estimate of it. Options as of ``spectral_norm``."""
    return spectral_norm(source, **options).amax(-1)


def secant_lipschitz(source: Any, *, at: At = "layers", part: int | None = None, size: float = 0.1, n_probes: int = 8,
                     seed: int = 0) -> Tensor:
    """The largest |f(z + d) - f(z)| / |d| over random d with |d| = size |z|, (sites, batch), unit 1 / l: what the
    Jacobian at z alone does not see. Norms over a row's real tokens."""
    at_least("n_probes", n_probes, 1)
    run = Trajectory.of(source)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for site in run.sites(at, part=part):
        k, z = run.real(site.increment(), 0.0), run.real(site.z, 0.0)
        scale = size * z.flatten(1).norm(dim=1)
        ratios = []
        for _ in range(n_probes):
            d = run.real(torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z), 0.0)
            d = d * (scale / d.flatten(1).norm(dim=1)).view(-1, 1, 1)
            with torch.no_grad():
                moved = run.real(site.f(site.z + d, site.l), 0.0)
            ratios.append((moved - k).flatten(1).norm(dim=1) / scale)
        rows.append(torch.stack(ratios).amax(0))
    return torch.stack(rows)
