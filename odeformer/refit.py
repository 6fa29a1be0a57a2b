"""The same weights over depth in another basis: more or fewer knots, or another family; what is lost is reported."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from odeformer.bases import Basis, Layers
from odeformer.blocks import Blocks
from odeformer.models.base import DepthModel, to_be_filled
from odeformer.models.parts import check_own_layers, parts_of
from odeformer.rebuild import carry_over
from odeformer.smooth_weights import Expansion, Hyper, LowRank, Modulated
from odeformer.tables import at_least, finite

Sample = Callable[[float], Mapping[str, Tensor]]  # l -> tensors by name
SIZES = ("n_knots", "n_basis")  # the options that say how many coefficients there are


class Refit(NamedTuple):
    """``model``: the new one. ``residuals``: for each parameter of a layer what is lost, |new - old| / |old| with norms
    in L2 over depth (or over the depths that were fitted)."""

    model: nn.Module
    residuals: dict[str, float]

    @property
    def residual(self) -> float:
        """The largest."""
        return max(self.residuals.values())


def prolong(model: nn.Module, *, n_knots: int | None = None, n_basis: int | None = None) -> Refit:
    """The model with more knots (or basis functions) and the same θ(l): exact where the old functions are all among the
    new ones: ``linear`` with a multiple of the intervals (n_knots - 1), ``spline`` (n_knots - 3), more terms of
    ``fourier`` and ``chebyshev``, more blocks of ``sequence``. Else the nearest in L2 over depth.

    Raises ValueError for fewer, and for weights that have no such number.
    """
    return _resize(model, n_knots, n_basis, lambda old, new: new >= old, "at least")


def restrict(model: nn.Module, *, n_knots: int | None = None, n_basis: int | None = None) -> Refit:
    """The model with fewer knots (or basis functions), its θ(l) the nearest in L2 over depth.

    Raises ValueError for more, and for weights that have no such number.
    """
    return _resize(model, n_knots, n_basis, lambda old, new: new <= old, "at most")


def fit(model: nn.Module, weights: str, *, at: float | None = None, **weights_options: Any) -> Refit:
    """A model with other weights over depth that are as near as they can be to the old ones.

    From weights that are constant in a layer, layer i is taken to stand at l = i + ``at``: by default at 0 for a solver
    of first order, which evaluates f at the beginning of a step, else in the middle (0.5); to weights that are constant
    in a layer likewise. Otherwise nearness is that of L2 over depth. Layers that were trained independently vary
    wildly from one to the next: residuals near 1 say that no smooth θ(l) goes through them.

    Raises ValueError for "modulated" and "hyper", whose networks have to be trained.
    """
    check_own_layers(model, "fit")
    if at is None:
        at = 0.0 if getattr(next(iter(parts_of(model).values())).solver, "order", 2) < 2 else 0.5
    if not finite("at", at, least=0) < 1:
        raise ValueError(f"at must be a place in a layer, from 0 to below 1, got {at!r}")
    return _refit(model, lambda part: {"weights": weights, "weights_options": weights_options}, at)


def _resize(model: nn.Module, n_knots: int | None, n_basis: int | None, fits: Callable[[int, int], bool],
            words: str) -> Refit:
    given = {name: n for name, n in zip(SIZES, (n_knots, n_basis), strict=True) if n is not None}
    if len(given) != 1:
        raise ValueError(f"one of {' and '.join(SIZES)} must be given, got {given}")
    (name, n), = given.items()
    at_least(name, n, 1)
    check_own_layers(model, "prolong and restrict")
    for which, part in parts_of(model).items():
        kind, layers = part.config.depth.weights, part.layers
        if isinstance(layers, Hyper | Modulated):
            raise ValueError(f"weights {kind!r} have a network in place of a basis; it cannot be resized")
        if name not in inspect.signature(type(layers)).parameters:
            raise ValueError(f"weights {kind!r}{which and f' of the {which}'} have no {name}")
        size = layers.basis.size if hasattr(layers, "basis") else len(layers)
        if not fits(size, n):
            raise ValueError(f"{name} must be {words} what the model has, {size}; got {n}")

    def change(part: DepthModel) -> dict[str, Any]:
        return {"weights_options": {**part.config.depth.weights_options, name: n}}

    return _refit(model, change, None)


def _refit(model: nn.Module, change: Callable[[DepthModel], dict[str, Any]], at: float | None) -> Refit:
    memo: dict[int, Any] = {}
    with to_be_filled(), torch.no_grad():
        done = {name: _refit_one(part, change(part), at, memo) for name, part in parts_of(model).items()}
        if "" in done:
            return done[""]
        encoder, decoder = (done[name].model for name in ("encoder", "decoder"))
        new = type(model)(replace(model.config, depth=encoder.config.depth, decoder_depth=decoder.config.depth))
        new.encoder, new.decoder, new.training = encoder, decoder, model.training
        return Refit(new, {f"{name}.{key}": x for name, part in done.items() for key, x in part.residuals.items()})


def _refit_one(model: DepthModel, changes: dict[str, Any], at: float | None, memo: dict) -> Refit:
    old = model.layers
    depth = replace(model.config.depth, **changes)
    new = type(model)(replace(model.config, depth=depth))
    carry_over(model, new, memo)
    for name in ("fusion", "solver"):
        module = getattr(model, name)
        if isinstance(module, nn.Module):
            setattr(new, name, copy.deepcopy(module, memo))
    device = next(old.parameters())
    new.layers.to(device.device, device.dtype)
    if isinstance(new.layers, Hyper | Modulated):
        raise ValueError(f"weights {depth.weights!r} are made by a network, which has to be trained; fit 'linear', "
                         "'spline', 'fourier', 'chebyshev', 'lowrank' or weights that are constant in a layer")
    residuals = _fill(old, new.layers, at)
    frozen = {name for name, p in old[0].named_parameters() if not p.requires_grad}
    for block in new.layers:
        for name, p in block.named_parameters():
            p.requires_grad_(name not in frozen)
    return Refit(new, residuals)


@dataclass(frozen=True)
class Grid:
    """Depths at which two families are compared, and what each counts for."""

    depths: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def over(cls, old: Blocks, basis: Basis, at: float | None) -> Grid:
        """The layers' places where one of the families is constant in them and ``at`` says where they stand, else
        Gauss-Legendre points between all kinks."""
        if at is not None and (old.by_layer or isinstance(basis, Layers)):
            n = old.n_layers
            if not isinstance(basis, Layers) and basis.size > n:
                raise ValueError(f"{n} layers cannot determine {basis.size} coefficients; take at most {n}")
            return cls(tuple(i + at for i in range(n)), (1.0,) * n)
        kinks = _steps(old).kinks if old.by_layer else old.kinks
        even = np.linspace(0, basis.length, basis.size + 1)
        ends = np.unique(np.concatenate([even, kinks, basis.kinks]))
        ends = ends[np.concatenate([[True], np.diff(ends) > 1e-9 * basis.length])]
        x, w = np.polynomial.legendre.leggauss(8)  # exact for products of piecewise cubics
        middle, half = (ends[1:] + ends[:-1])[:, None] / 2, np.diff(ends)[:, None] / 2
        return cls(tuple((middle + half * x).ravel().tolist()), tuple((half * w).ravel().tolist()))


def _steps(layers: Blocks) -> Layers:
    return Layers([layers.index(i) for i in range(layers.n_layers)])


def _sample(layers: Blocks) -> Sample:
    """All parameters of a layer at depth l."""
    if not layers.by_layer:
        return lambda l: layers.theta(torch.tensor(l, dtype=torch.float64))
    tables = [dict(block.named_parameters()) for block in layers]
    return lambda l: tables[layers.index(min(int(l), layers.n_layers - 1))]


def _project(sample: Sample, basis: Basis, grid: Grid) -> list[dict[str, Tensor]]:
    """Coefficients of the nearest functions in the basis, in float64."""
    depths = list(grid.depths)
    root = torch.tensor(grid.weights, dtype=torch.float64).sqrt()
    values = basis.at(depths)
    q, r = torch.linalg.qr(root.unsqueeze(-1) * values)
    if r.diagonal().abs().min() < 1e-10 * r.diagonal().abs().max():
        raise ValueError(f"the {len(depths)} depths of the old weights do not determine {basis.size} coefficients; "
                         "take fewer")
    rows = torch.linalg.solve_triangular(r, q.mT, upper=True) * root  # (size, depths)
    coefficients: list[dict[str, Tensor]] = [{} for _ in range(basis.size)]
    for i, l in enumerate(depths):
        for name, x in sample(l).items():
            for k in range(basis.size):
                term = rows[k, i].item() * x.double()
                coefficients[k][name] = coefficients[k][name] + term if name in coefficients[k] else term
    return coefficients


def _fill(old: Blocks, new: Blocks, at: float | None) -> dict[str, float]:
    if isinstance(new, LowRank):
        return _fill_lowrank(old, new, at)
    basis = new.basis if isinstance(new, Expansion) else _steps(new)
    grid = Grid.over(old, basis, at)
    coefficients = _project(_sample(old), basis, grid)
    for block, values in zip(new, coefficients, strict=True):
        for name, p in block.named_parameters():
            p.copy_(values[name])
    return _compare(_sample(old), _sample(new), grid)


def _fill_lowrank(old: Blocks, new: LowRank, at: float | None) -> dict[str, float]:
    """W is the mean over depth; B, constant in l, spans the leading right singular vectors of what is left at all
    depths together, and A(l) is what is left along them. From ``lowrank`` itself: A(l) and B(l) as they are."""
    grid, keys = Grid.over(old, new.basis, at), list(new.left)
    if isinstance(old, LowRank) and old.rank == new.rank:
        mean, sides = dict(old[0].named_parameters()), _factors(old)
    else:
        mean, sides = _decompose(_sample(old), new, grid)
    for name, p in new[0].named_parameters():
        p.copy_(mean[name])
    coefficients = _project(sides, new.basis, grid)
    for k, values in enumerate(coefficients):
        for key in keys:
            new.left[key][k].copy_(values[f"left {key}"])
            new.right[key][k].copy_(values[f"right {key}"])
    return _compare(_sample(old), _sample(new), grid)


def _factors(layers: LowRank) -> Sample:
    def sample(l: float) -> dict[str, Tensor]:
        values = layers.basis.at([l])[0].tolist()
        return {f"{side} {key}": sum(v * x[k] for k, v in enumerate(values))
                for side in ("left", "right") for key, x in getattr(layers, side).items()}

    return sample


def _decompose(sample: Sample, new: LowRank, grid: Grid) -> tuple[dict[str, Tensor], Sample]:
    names = {key: key.replace("/", ".") for key in new.left}
    total = sum(grid.weights)
    mean: dict[str, Any] = {}
    for l, w in zip(grid.depths, grid.weights, strict=True):
        for name, x in sample(l).items():
            mean[name] = mean.get(name, 0) + w / total * x.double()
    gram: dict[str, Any] = {}
    for l, w in zip(grid.depths, grid.weights, strict=True):
        at = sample(l)
        for key, name in names.items():
            left = at[name].double() - mean[name]
            gram[key] = gram.get(key, 0) + w * left.mT @ left
    right = {key: torch.linalg.eigh(g).eigenvectors[..., -new.rank:].mT for key, g in gram.items()}
    for key, rows in right.items():  # a rank above what a matrix has
        right[key] = nn.functional.pad(rows, (0, 0, 0, new.rank - rows.shape[-2]))

    def sides(l: float) -> dict[str, Tensor]:
        at = sample(l)
        left = {f"left {key}": (at[name].double() - mean[name]) @ right[key].mT for key, name in names.items()}
        return left | {f"right {key}": x for key, x in right.items()}

    return mean, sides


def _compare(old: Sample, new: Sample, grid: Grid) -> dict[str, float]:
    lost: dict[str, float] = {}
    size: dict[str, float] = {}
    for l, w in zip(grid.depths, grid.weights, strict=True):
        before, after = old(l), new(l)
        for name, x in before.items():
            lost[name] = lost.get(name, 0.0) + w * (after[name].double() - x.double()).square().sum().item()
            size[name] = size.get(name, 0.0) + w * x.double().square().sum().item()
    return {name: (lost[name] / size[name]) ** 0.5 if size[name] else 0.0 for name in lost}

