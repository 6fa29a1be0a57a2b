"""A local prior that multiplies the scores (eq. 7)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention, weighted
from odeformer.attention.pairs import Pairs
from odeformer.attention.priors import DistancePrior, GaussianPrior, Numbers
from odeformer.tables import build


class GaussianDecay(nn.Module):
    """G' = exp(−(i − j)² / (2 σ²)), σ > 0."""

    def __init__(self, n_heads: int, head_dim: int, *, sigma: Numbers = 4.0, sigma_mode: str = "fixed"):
        super().__init__()
        self.prior = GaussianPrior(n_heads, head_dim, sigma=sigma, sigma_mode=sigma_mode)

    def forward(self, pairs: Pairs) -> Tensor:
        """G' in [0, 1], 1 on the diagonal, broadcastable to (batch, n_heads, queries, keys)."""
        return self.prior(pairs).exp()


class ExponentialDecay(nn.Module):
    """G' = exp(−γ |i − j|), γ >= 0."""

    def __init__(self, n_heads: int, head_dim: int, *, gamma: Numbers = 1.0, gamma_mode: str = "fixed"):
        super().__init__()
        self.prior = DistancePrior(n_heads, head_dim, gamma=gamma, gamma_mode=gamma_mode)

    def forward(self, pairs: Pairs) -> Tensor:
        """As GaussianDecay's."""
        return self.prior(pairs).exp()


class NormalizedDecay(nn.Module):
    """−G brought to [0, 1] over the j that query i may see: 1 at the nearest, 0 at the farthest.

    ``prior``: "distance", G = |i − j| (eq. 2), or "gaussian", G = (i − j)² / (2 σ_i²) (eq. 3), of which σ cancels. What
    may not be seen has no part in it, so padding and later tokens change nothing. 1 where all are equally far.
    """

    POWERS: ClassVar = {"distance": 1, "gaussian": 2}

    def __init__(self, n_heads: int, head_dim: int, *, prior: str = "distance"):
        super().__init__()
        if prior not in self.POWERS:
            raise ValueError(f"prior must be one of {', '.join(self.POWERS)}, got {prior!r}")
        self.power = self.POWERS[prior]

    def forward(self, pairs: Pairs) -> Tensor:
        """As GaussianDecay's."""
        distance, seen = pairs.distance**self.power, pairs.seen
        if seen is None:
            near, far = distance.amin(-1, keepdim=True), distance.amax(-1, keepdim=True)
        else:
            near = distance.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
            far = distance.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        share = torch.where(far > near, (distance - near) / (far - near), 0)  # never NaN, not even in a blind row
        return (1 - share).clamp(0, 1)


DECAYS = {
    "gaussian": GaussianDecay,
    "exponential": ExponentialDecay,
    "normalized": NormalizedDecay,
}


class LocalMultiplicativeAttention(Attention):
    """softmax(Q K^T / sqrt(head_dim) ⊙ G') V, the product acting on the scores as eq. 7 has it.

    So G' = 0 means a score of 0, not a weight of 0: a far key weighs as much as any with a score of 0, and more than a
    near one whose score is negative. ``decay``: "gaussian" (option ``sigma``), "exponential" (``gamma``) or
    "normalized" (``prior``); None means the decay's own default. Raises ValueError for values outside their ranges and
    for an option that the decay does not have.
    """

    def __init__(self, d_model: int, n_heads: int, *, decay: str | type = "gaussian", sigma: Numbers | None = None,
                 sigma_mode: str | None = None, gamma: Numbers | None = None, gamma_mode: str | None = None,
                 prior: str | None = None, **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        options = {"sigma": sigma, "sigma_mode": sigma_mode, "gamma": gamma, "gamma_mode": gamma_mode, "prior": prior}
        self.decay = build(DECAYS, decay, "decay", n_heads, self.head_dim,
                           options={name: value for name, value in options.items() if value is not None})

    def scores(self, pairs: Pairs) -> Tensor:
        """Q K^T / sqrt(head_dim) ⊙ G'."""
        return super().scores(pairs) * self.decay(pairs)

    def attend(self, pairs: Pairs) -> Tensor:
        """By the weights: no fused kernel multiplies scores."""
        return weighted(self.weights(pairs), pairs.value)
