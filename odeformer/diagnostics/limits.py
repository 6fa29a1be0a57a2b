"""What depth would become if there were ever more of it: an ODE, an SDE or neither; how smooth weights are in l."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.diagnostics.trajectory import Trajectory, check_weights

LIMITS = (("ode", 1.0), ("sde", 0.5), ("neither", 0.0))  # by the Hölder exponent of increments


@dataclass(frozen=True, eq=False)
class WeightSmoothness:
    """By parameter name in a layer: ``changes`` |W_{i+1} - W_i| / ((|W_i| + |W_{i+1}|) / 2) in the Frobenius norm, and
    ``cosines`` between W_i and W_{i+1}, each (n_layers - 1,). Independent layers: about √2 and 0; a smooth function of
    depth: about |W'| / |W| and 1; shared layers: 0 and 1. nan where both are 0."""

    changes: Mapping[str, Tensor]
    cosines: Mapping[str, Tensor]

    @property
    def mean(self) -> Tensor:
        """The mean change of matrices, (n_layers - 1,)."""
        return torch.stack(list(self.changes.values())).nanmean(0)


def weight_smoothness(layers: Any, *, matrices_only: bool = True) -> WeightSmoothness:
    """How much weights change from layer to layer (the smoothness that a limit in depth asks for: Cohen et al. 2021;
    Sander et al. 2022).

    ``layers``: one of our models or a wrapped one, or a sequence of modules. Weights that are functions of l are taken
    in the middle of each layer. ``matrices_only``: without parameters of fewer than two axes.

    Raises ValueError for fewer than two layers, layers whose parameters differ in shape, and numbers that are not
    finite, with their names.
    """
    rows = layer_weights(layers)
    if len(rows) < 2:
        raise ValueError(f"two layers are needed to compare weights, got {len(rows)}")
    names = [name for name, x in rows[0].items() if x.dim() > 1 or not matrices_only]
    for i, row in enumerate(rows):
        for name in names:
            if name not in row or row[name].shape != rows[0][name].shape:
                raise ValueError(f"layers must have parameters of the same names and shapes; layer {i} differs from "
                                 f"layer 0 in {name!r}")
    changes, cosines = {}, {}
    for name in names:
        w = torch.stack([row[name].detach().double().flatten() for row in rows])
        size = w.norm(dim=1)
        changes[name] = w.diff(dim=0).norm(dim=1) / ((size[1:] + size[:-1]) / 2)
        cosines[name] = (w[1:] * w[:-1]).sum(1) / (size[1:] * size[:-1])
    return WeightSmoothness(changes, cosines)


def layer_weights(layers: Any) -> list[dict[str, Tensor]]:
    """The parameters of each layer by their names in it; those that are functions of l in the middle of each layer."""
    stack = getattr(layers, "layers", layers)
    check_weights(layers if isinstance(layers, nn.Module) else nn.ModuleList(layers))
    if not getattr(stack, "by_layer", True):
        dtype = next(stack.parameters())
        middles = [torch.tensor(i + 0.5, dtype=dtype.dtype, device=dtype.device) for i in range(stack.n_layers)]
        with torch.no_grad():
            return [stack.theta(l) for l in middles]
    if hasattr(stack, "index") and hasattr(stack, "n_layers"):
        modules = [stack[stack.index(i)] for i in range(stack.n_layers)]
    else:
        modules = list(stack)
        n = getattr(getattr(layers, "config", None), "n_layers", None)
        if isinstance(n, int) and layers is not stack:
            modules = [modules[i % len(modules)] for i in range(n)]
    return [dict(module.named_parameters()) for module in modules]


@dataclass(frozen=True, eq=False)
class IncrementScaling:
    """``mean_squares`` (lags,): the mean of |x_{i+k} - x_i|² over i for lags k; ``exponent``: half the slope of their
    logs; ``limit``: "ode" (exponent near 1), "sde" (near 1/2), "neither" (near 0), "constant" (nothing moves)."""

    lags: tuple[int, ...]
    mean_squares: Tensor
    exponent: float
    limit: str


def increment_scaling(path: Any, *, max_lag: int | None = None) -> IncrementScaling:
    """Which limit one deep network looks like: how increments over k layers grow with k.

    A differentiable path has |x_{i+k} - x_i| ~ k, a Brownian one ~ k^(1/2), independent values ~ k^0 (the structure
    function of Kolmogorov 1941; exponents of Hölder). ``path``: (points, ...), such as the weights of one matrix over
    layers, or a Solution or Trajectory: its states at real tokens. ``max_lag``: a third of the steps if None.
    With few layers this is a hint and no more: a dozen points tell 1 from 1/2 with an error of about 0.2.

    Raises ValueError for fewer than 4 points.
    """
    x = _path(path)
    n = len(x) - 1
    if n < 3:
        raise ValueError(f"path must have at least 4 points, got {n + 1}")
    max_lag = max(2, n // 3) if max_lag is None else max_lag
    if not 2 <= max_lag <= n:
        raise ValueError(f"max_lag must be from 2 to the number of steps, {n}; got {max_lag}")
    lags = range(1, max_lag + 1)
    squares = torch.stack([(x[k:] - x[:-k]).square().sum(1).mean() for k in lags])
    if not bool((squares > 0).all()):
        return IncrementScaling(tuple(lags), squares, math.nan, "constant")
    exponent = _slope([math.log(k) for k in lags], squares.log().tolist()) / 2
    return IncrementScaling(tuple(lags), squares, exponent, _nearest(exponent))


@dataclass(frozen=True, eq=False)
class DepthScaling:
    """For each of ``n_layers``: ``quadratic_variation`` Σ |x_{i+1} - x_i|² and ``largest_increment`` max |x_{i+1} -
    x_i|; the exponents p of their growth like n_layers^p. ``limit``: "ode" where Σ falls like 1 / L (and the largest
    like 1 / L), "sde" where Σ stays (and the largest falls like L^(-1/2), up to a log), "neither" where Σ grows."""

    n_layers: tuple[int, ...]
    quadratic_variation: Tensor
    largest_increment: Tensor
    variation_exponent: float
    largest_exponent: float
    limit: str


def depth_scaling(paths: Mapping[int, Any]) -> DepthScaling:
    """Which limit a family of networks of ever more layers has: n_layers -> path, a Solution or (points, ...).

    Over the same total depth the increments of a smooth path fall like 1 / L, so that their squares add up to ~ 1 / L;
    those of a diffusion add up to a constant, its quadratic variation (Cohen et al. 2021, who so tell their hypotheses
    apart; for weights W_i of layers take the path of their sums, as there a weight is an increment).

    Raises ValueError for fewer than two depths.
    """
    if len(paths) < 2:
        raise ValueError(f"paths must be given for at least two n_layers, got {len(paths)}")
    depths = sorted(paths)
    sizes = [_path(paths[n]).diff(dim=0).square().sum(1) for n in depths]
    total, largest = torch.stack([x.sum() for x in sizes]), torch.stack([x.amax().sqrt() for x in sizes])
    logs = [math.log(n) for n in depths]
    p, q = (_slope(logs, x.log().tolist()) for x in (total, largest))
    return DepthScaling(tuple(depths), total, largest, p, q, _nearest((1 - p) / 2))


def _nearest(exponent: float) -> str:
    return min(LIMITS, key=lambda item: abs(item[1] - exponent))[0]


def _path(path: Any) -> Tensor:
    """(points, numbers) in float64."""
    if not isinstance(path, Tensor) and not (isinstance(path, Sequence) and isinstance(path[0], Tensor)):
        run = Trajectory.of(path)
        return run.real(run.states, 0.0).double().flatten(1)
    x = path if isinstance(path, Tensor) else torch.stack(list(path))
    x = x.detach().double().reshape(len(x), -1)
    if not bool(x.isfinite().all()):
        raise ValueError("path must be finite")
    return x


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
