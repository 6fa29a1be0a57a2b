"""Sliding-window attention (Beltagy et al. 2020; Child et al. 2019)."""

from __future__ import annotations

from typing import Any

from odeformer.attention.base import Attention
from odeformer.tables import at_least


class WindowAttention(Attention):
    """Softmax attention in which token i sees j where |i − j| < window, at a cost of tokens x window.

    All variants but those for a memory have the option ``window``; here it has a default. It works in blocks of
    queries: torch's flex_attention (2.13) has no backward pass on a CPU. Raises ValueError for a window below 1.
    """

    def __init__(self, d_model: int, n_heads: int, *, window: int = 128, **shared: Any):
        at_least("window", window, 1)
        super().__init__(d_model, n_heads, window=window, **shared)
