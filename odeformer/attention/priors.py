"""Priors for local modelling: what is added to the scores, −γ G, by the distance of query and key.

``PRIORS[name](n_heads, head_dim, **options)``, called with Pairs, gives what broadcasts to (batch, n_heads, queries,
keys). Each parameter is a number or one for each head; its mode is "fixed", "learned" (kept in its range) or
"predicted" (from each query by a small network, see head_parameter.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from odeformer.attention.base import Attention
from odeformer.attention.head_parameter import head_parameter
from odeformer.attention.pairs import Pairs

Numbers = float | Sequence[float]


class DistancePrior(nn.Module):
    """−γ |i − j| (eqs. 1-2), γ >= 0."""

    def __init__(self, n_heads: int, head_dim: int, *, gamma: Numbers = 1.0, gamma_mode: str = "fixed"):
        super().__init__()
        self.gamma = head_parameter("gamma", gamma, gamma_mode, n_heads, head_dim)

    def forward(self, pairs: Pairs) -> Tensor:
        """See above."""
        return -self.gamma(pairs.source) * pairs.distance


class GaussianPrior(nn.Module):
    """−γ (i − j)² / (2 σ²) (eqs. 1 and 3), γ >= 0, σ > 0."""

    def __init__(self, n_heads: int, head_dim: int, *, gamma: Numbers = 1.0, gamma_mode: str = "fixed",
                 sigma: Numbers = 4.0, sigma_mode: str = "fixed"):
        super().__init__()
        self.gamma = head_parameter("gamma", gamma, gamma_mode, n_heads, head_dim)
        self.sigma = head_parameter("sigma", sigma, sigma_mode, n_heads, head_dim)

    def forward(self, pairs: Pairs) -> Tensor:
        """See above."""
        return self.at(pairs.distance, pairs.source)

    def at(self, distance: Tensor, source: Tensor) -> Tensor:
        """−γ distance² / (2 σ²), distance broadcastable to (batch, n_heads, queries, keys)."""
        return -self.gamma(source) * (distance / self.sigma(source)).square() / 2


PRIORS = {
    "distance": DistancePrior,
    "gaussian": GaussianPrior,
}


class AdditivePriorAttention(Attention):
    """softmax(Q K^T / sqrt(head_dim) − γ G) V (eq. 1); a variant sets ``prior``, which gives −γ G."""

    prior: nn.Module

    def bias(self, pairs: Pairs) -> Tensor:
        """−γ G."""
        return self.prior(pairs)
