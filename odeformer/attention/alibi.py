"""ALiBi, attention with linear biases (Press, Smith & Lewis 2022): eqs. 1-2 with a fixed γ for each head."""

from __future__ import annotations

from typing import Any

from odeformer.attention.priors import AdditivePriorAttention, DistancePrior


def slopes(n_heads: int) -> list[float]:
    """γ of head h = 1 ... n_heads: 2^(−8h / n_heads) for a power of 2.

    Otherwise those of the next lower power p, then every second one of 2p from the first on, as in the authors' code.

    >>> slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    if lower == n_heads:
        return [2 ** (-8 * h / n_heads) for h in range(1, n_heads + 1)]
    return slopes(lower) + slopes(2 * lower)[::2][: n_heads - lower]


class AlibiAttention(AdditivePriorAttention):
    """softmax(Q K^T / sqrt(head_dim) − γ_h |i − j|) V with ``slopes(n_heads)`` as γ_h.

    Under a causal mask the published form; without, both sides are alike.
    """

    def __init__(self, d_model: int, n_heads: int, **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        self.prior = DistancePrior(n_heads, self.head_dim, gamma=slopes(n_heads))
