"""Local attention by a Gaussian (eqs. 1 and 3)."""

from __future__ import annotations

from typing import Any

from odeformer.attention.priors import AdditivePriorAttention, GaussianPrior, Numbers


class LocalGaussianAttention(AdditivePriorAttention):
    """softmax(Q K^T / sqrt(head_dim) − γ (i − j)² / (2 σ_i²)) V.

    ``gamma`` (γ >= 0) and ``sigma`` (σ > 0): a number or one for each head; their modes: "fixed", "learned" (kept
    positive) or "predicted" from query i (Yang et al. 2018). Raises ValueError for γ < 0 and σ <= 0.
    """

    def __init__(self, d_model: int, n_heads: int, *, gamma: Numbers = 1.0, gamma_mode: str = "fixed",
                 sigma: Numbers = 4.0, sigma_mode: str = "fixed", **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        self.prior = GaussianPrior(n_heads, self.head_dim, gamma=gamma, gamma_mode=gamma_mode, sigma=sigma,
                                   sigma_mode=sigma_mode)
