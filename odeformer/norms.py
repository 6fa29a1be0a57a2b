"""Where the norm stands: each placement turns a sublayer's core F into an increment (a vector field).

``NORMS[name](d_model, **options)``, called ``(z, branch)`` with branch the core F; what comes back is dz/dl, so that an
Euler step with h = 1 gives the textbook formula. Where that formula does not end in ``+ z`` (post, weighted, deepnorm)
the increment is its right side minus z, and z + (... - z) differs from it by rounding. Options that scale with depth
have ``n_layers``, which a model fills in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.finite import Finite
from odeformer.tables import at_least, finite, look_up

KINDS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
Branch = Callable[[Tensor], Tensor]


def make_norm(d_model: int, kind: str = "layer", eps: float = 1e-5) -> nn.Module:
    """A norm over d_model: with y = (z - mean) / sqrt(variance + eps), layer norm is scale y + shift ([AN]; Ba et al.
    2016); RMSNorm (``kind="rms"``, Zhang & Sennrich 2019) is scale z / sqrt(mean z² + eps).

    Scale (d_model,) is learned and starts at 1, shift at 0. Raises ValueError for eps <= 0 or an unknown kind.
    """
    return look_up(KINDS, kind, "norm kind")(d_model, eps=finite("eps", eps, above=0))


class Placement(Finite, nn.Module):
    """What placements share.

    ``final``: whether the model ends with a norm, as the state leaves the layers without one. ``identity_at_zero``:
    whether a core F = 0 gives the increment 0, as long as the placement's parameters are where they start.
    """

    final = True
    identity_at_zero = True

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        """dz/dl, shaped like z (..., d_model)."""
        raise NotImplementedError


class Normed(Placement):
    """A placement with one norm; ``kind`` and ``eps`` are those of ``make_norm``."""

    def __init__(self, d_model: int, *, kind: str = "layer", eps: float = 1e-5):
        super().__init__()
        at_least("d_model", d_model, 1)
        self.norm = make_norm(d_model, kind, eps)


class PreNorm(Normed):
    """f = F(LN(z)), so that z + f is eq. 14."""

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return branch(self.norm(z))


class PostNorm(Normed):
    """f = LN(F(z) + z) - z, so that z + f is eq. 13 (and [AN])."""

    final = False
    identity_at_zero = False

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.norm(branch(z) + z) - z


class ResNorm(Normed):
    """f = LN(F(z)), as in eqs. 31 and 38: the norm stands in the branch, after the core."""

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.norm(branch(z))


class Fixed(nn.Module):
    """β and γ as they are given."""

    def __init__(self, d_model: int, beta: float, gamma: float):
        super().__init__()
        self.beta, self.gamma = beta, gamma

    def forward(self, z: Tensor) -> tuple[Any, Any]:
        """β and γ for z (..., d_model)."""
        return self.beta, self.gamma


class Learned(nn.Module):
    """β and γ as two parameters."""

    def __init__(self, d_model: int, beta: float, gamma: float):
        super().__init__()
        self.start = nn.Parameter(torch.tensor([beta, gamma]))

    def forward(self, z: Tensor) -> tuple[Any, Any]:
        """β and γ, 0-d each."""
        return self.start[0], self.start[1]


class Predicted(Learned):
    """β and γ for each token: start + tanh(W z / rms(z)), W (2, d_model) from 0, so within 1 of a learned start."""

    def __init__(self, d_model: int, beta: float, gamma: float):
        super().__init__(d_model, beta, gamma)
        self.weight = nn.Parameter(torch.zeros(2, d_model))

    def forward(self, z: Tensor) -> tuple[Any, Any]:
        """β and γ, each (..., 1)."""
        unit = F.rms_norm(z, z.shape[-1:], eps=1e-6)
        factors = self.start + F.linear(unit, self.weight).tanh()
        return factors[..., :1], factors[..., 1:]


FACTORS = {"fixed": Fixed, "learned": Learned, "predicted": Predicted}


class WeightedNorm(Normed):
    """f = LN(F(z) + β z) + (γ - 1) z, so that z + f is eq. 17.

    (β, γ) = (1, 0), the default, is exactly ``post``, (0, 1) exactly ``res``. ``mode``: "fixed"; "learned", two
    scalars that start there; "predicted", a small trainable function of each token that starts there (``Predicted``).
    Without a share of z outside the norm (γ fixed at 0) the model needs no norm at its end, else it has one.
    """

    def __init__(self, d_model: int, *, beta: float = 1.0, gamma: float = 0.0, mode: str = "fixed",
                 kind: str = "layer", eps: float = 1e-5):
        super().__init__(d_model, kind=kind, eps=eps)
        beta, gamma = finite("beta", beta), finite("gamma", gamma)
        self.factors = look_up(FACTORS, mode, "mode")(d_model, beta, gamma)
        self.final = mode != "fixed" or gamma != 0
        self.identity_at_zero = (beta, gamma) == (0, 1)

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        beta, gamma = self.factors(z)
        return self.norm(branch(z) + beta * z) + (gamma - 1) * z


class DeepNorm(Normed):
    """f = LN(α z + F(z)) - z (Wang et al. 2022), with init="deepnorm".

    ``alpha``: (2 n_layers)^(1/4) if None, the value for an encoder or a decoder alone. An encoder-decoder model has
    others there: 0.81 (N^4 M)^(1/16) for an encoder of N layers, (3 M)^(1/4) for a decoder of M.
    """

    final = False
    identity_at_zero = False

    def __init__(self, d_model: int, *, n_layers: int = 1, alpha: float | None = None, kind: str = "layer",
                 eps: float = 1e-5):
        super().__init__(d_model, kind=kind, eps=eps)
        at_least("n_layers", n_layers, 1)
        self.alpha = (2 * n_layers) ** 0.25 if alpha is None else finite("alpha", alpha, above=0)

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.norm(self.alpha * z + branch(z)) - z


class ReZero(Placement):
    """f = α F(z) without any norm, α learned from 0 (Bachlechner et al. 2020): every layer starts as the identity."""

    final = False  # the scheme has no norms, at the end neither

    def __init__(self, d_model: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.alpha * branch(z)


class LayerScale(PreNorm):
    """f = λ F(LN(z)), λ (d_model,) learned from a small value (Touvron et al. 2021).

    ``start``: if None that of CaiT, 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.
    """

    STARTS = ((18, 0.1), (24, 1e-5), (math.inf, 1e-6))

    def __init__(self, d_model: int, *, n_layers: int = 1, start: float | None = None, kind: str = "layer",
                 eps: float = 1e-5):
        super().__init__(d_model, kind=kind, eps=eps)
        at_least("n_layers", n_layers, 1)
        if start is None:
            start = next(value for most, value in self.STARTS if n_layers <= most)
        self.scale = nn.Parameter(torch.full((d_model,), finite("start", start)))

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.scale * super().forward(z, branch)


class SandwichNorm(PreNorm):
    """f = LN(F(LN(z))), a norm on both sides of the core (Ding et al. 2021, CogView; Kim et al. 2025, peri-LN)."""

    def __init__(self, d_model: int, *, kind: str = "layer", eps: float = 1e-5):
        super().__init__(d_model, kind=kind, eps=eps)
        self.output_norm = make_norm(d_model, kind, eps)

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.output_norm(super().forward(z, branch))


class NoNorm(Placement):
    """f = F(z), no norm anywhere: for init="tfixup" (Huang et al. 2020)."""

    final = False

    def __init__(self, d_model: int):
        super().__init__()

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return branch(z)


class CompleteP(PreNorm):
    """f = (base_layers / n_layers)^alpha F(LN(z)) (Dey et al. 2025, who find alpha = 1).

    With alpha = 1 and base_layers = 1 this is pre-norm with depth rescaled: f is F(LN(z)) / n_layers over n_layers
    layers, the same as F(LN(z)) over a depth of 1 in steps of 1 / n_layers. More layers resolve one flow more finely.
    """

    def __init__(self, d_model: int, *, n_layers: int = 1, base_layers: int = 1, alpha: float = 1.0,
                 kind: str = "layer", eps: float = 1e-5):
        super().__init__(d_model, kind=kind, eps=eps)
        at_least("n_layers", n_layers, 1)
        at_least("base_layers", base_layers, 1)
        self.scale = (base_layers / n_layers) ** finite("alpha", alpha)

    def forward(self, z: Tensor, branch: Branch) -> Tensor:
        return self.scale * super().forward(z, branch)


NORMS = {
    "pre": PreNorm,
    "post": PostNorm,
    "res": ResNorm,
    "weighted": WeightedNorm,
    "deepnorm": DeepNorm,
    "rezero": ReZero,
    "layerscale": LayerScale,
    "sandwich": SandwichNorm,
    "none": NoNorm,
    "completep": CompleteP,
}
