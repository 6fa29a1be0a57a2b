"""A mixture of attention and a local prior (eq. 6)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from odeformer.attention.base import Attention, closed_softmax, weighted
from odeformer.attention.head_parameter import head_parameter
from odeformer.attention.pairs import Pairs
from odeformer.attention.priors import PRIORS, Numbers
from odeformer.tables import build


class LocalMixtureAttention(Attention):
    """((1 − β) softmax(Q K^T / sqrt(head_dim)) + β softmax(−γ G)) V.

    ``prior``: "gaussian" or "distance", which says what G is (see priors.py); ``gamma``, ``sigma`` and their modes go
    to it, None means its own default. ``beta``: β in [0, 1], a number or one for each head; ``beta_mode``: "fixed",
    "learned" (kept inside), or "predicted", a gate for each query. Raises ValueError for values outside their ranges
    and for an option that the prior does not have.
    """

    def __init__(self, d_model: int, n_heads: int, *, prior: str | type = "gaussian", beta: Numbers = 0.5,
                 beta_mode: str = "fixed", gamma: Numbers | None = None, gamma_mode: str | None = None,
                 sigma: Numbers | None = None, sigma_mode: str | None = None, **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        options = {"gamma": gamma, "gamma_mode": gamma_mode, "sigma": sigma, "sigma_mode": sigma_mode}
        self.prior = build(PRIORS, prior, "prior", n_heads, self.head_dim,
                           options={name: value for name, value in options.items() if value is not None})
        self.beta = head_parameter("beta", beta, beta_mode, n_heads, self.head_dim)

    def weights(self, pairs: Pairs) -> Tensor:
        """The mixture of both distributions."""
        beta = self.beta(pairs.source)
        return (1 - beta) * super().weights(pairs) + beta * closed_softmax(self.prior(pairs), pairs.seen)

    def multiply_adds(self, n_seen: int) -> int:
        """Values are weighted twice."""
        return super().multiply_adds(n_seen) * 3 // 2

    def attend(self, pairs: Pairs) -> Tensor:
        """The mixture of both results; that of the first term through the fused kernel."""
        beta, value = self.beta(pairs.source), pairs.value
        local = weighted(closed_softmax(self.prior(pairs), pairs.seen), value)
        return ((1 - beta) * super().attend(pairs) + beta * local).to(value.dtype)
