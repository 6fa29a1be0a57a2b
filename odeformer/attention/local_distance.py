"""Local attention by distance (eqs. 1-2)."""

from __future__ import annotations

from typing import Any

from odeformer.attention.priors import AdditivePriorAttention, DistancePrior, Numbers


class LocalDistanceAttention(AdditivePriorAttention):
    """softmax(Q K^T / sqrt(head_dim) − γ |i − j|) V.

    ``gamma``: γ >= 0, a number or one for each head; ``gamma_mode``: "fixed", "learned" (kept positive) or "predicted"
    from the query. Raises ValueError for γ < 0.
    """

    def __init__(self, d_model: int, n_heads: int, *, gamma: Numbers = 1.0, gamma_mode: str = "fixed", **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        self.prior = DistancePrior(n_heads, self.head_dim, gamma=gamma, gamma_mode=gamma_mode)
