"""Cross-attention with a Gaussian prior centred on a position of the source (eqs. 4-5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention
from odeformer.attention.head_parameter import HeadNetwork
from odeformer.attention.pairs import Pairs, fine
from odeformer.attention.priors import GaussianPrior
from odeformer.tables import build


@dataclass(frozen=True)
class Places:
    """Where the real tokens of the source stand: ``place`` (batch | 1, 1, queries | 1, keys) counts them from 0,
    ``length`` (batch | 1, 1, queries | 1, 1) is their number. Padding, on either side, does not count."""

    place: Tensor
    length: Tensor

    @classmethod
    def of(cls, pairs: Pairs) -> Places:
        """From the mask."""
        m, dtype, device = pairs.key.shape[2], fine(pairs.query.dtype), pairs.query.device
        if pairs.mask is None:
            place = torch.arange(m, dtype=dtype, device=device).view(1, 1, 1, m)
            return cls(place, torch.full((1, 1, 1, 1), m, dtype=dtype, device=device))
        mask = pairs.mask[:, None, None] if pairs.mask.dim() == 2 else pairs.mask[:, None]
        return cls((mask.cumsum(-1) - 1).to(dtype), mask.sum(-1, keepdim=True).to(dtype))


class RatioCenter(nn.Module):
    """μ_i = ratio i inside [0, source length − 1]. ``ratio``: source tokens per target token; None: source length over
    the number of queries, padding among these included."""

    def __init__(self, head_dim: int, *, ratio: float | None = None):
        super().__init__()
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (number and 0 < ratio < math.inf):
            raise ValueError(f"ratio must be a finite number above 0, or None, got {ratio!r}")
        self.ratio = ratio

    def forward(self, pairs: Pairs, places: Places) -> Tensor:
        """μ, broadcastable to (batch, n_heads, queries, 1)."""
        n, length = pairs.query.shape[2], places.length
        if self.ratio is None and not (isinstance(pairs.first, int) and pairs.first == 0):
            raise ValueError("ratio must be a number where queries do not begin at 0, got None, which reads the "
                             "target's whole length")
        ratio = length / n if self.ratio is None else self.ratio
        i = pairs.places[0].to(length.dtype)
        return torch.minimum(i * ratio, length - 1).clamp(min=0)


class PredictedCenter(nn.Module):
    """μ_i = S sigmoid(w^T tanh(W q_i + b)), S the source length of the sample (local-p, Luong et al. 2015, eq. 9)."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.network = HeadNetwork(head_dim)

    def forward(self, pairs: Pairs, places: Places) -> Tensor:
        """As RatioCenter's."""
        return places.length * torch.sigmoid(self.network(pairs.source))


CENTERS = {
    "ratio": RatioCenter,
    "predicted": PredictedCenter,
}


class CrossGaussianAttention(Attention):
    """softmax(Q K^T / sqrt(head_dim) − γ (μ_i − j)² / (2 σ_i²)) V, j counting the real tokens of the memory.

    ``center_mode``: "predicted" from query i, or "ratio" (see RatioCenter for ``ratio``). ``gamma``, ``sigma`` and
    their modes: as in local_gaussian. A target that is generated token by token has no length yet, so there
    center_mode="ratio" needs a number; ``reads_target_length`` says whether that is missing.

    Raises ValueError for values outside their ranges, for a ratio with predicted centres, and, when called, without a
    memory or with causal=True.
    """

    for_memory = True

    def __init__(self, d_model: int, n_heads: int, *, center_mode: str | type = "predicted",
                 ratio: float | None = None, gamma: float | Sequence[float] = 1.0, gamma_mode: str = "fixed",
                 sigma: float | Sequence[float] = 4.0, sigma_mode: str = "fixed", n_kv_heads: int | None = None,
                 qk_norm: str = "none", bias: bool = True):
        super().__init__(d_model, n_heads, n_kv_heads=n_kv_heads, qk_norm=qk_norm, bias=bias)
        self.center = build(CENTERS, center_mode, "center_mode", self.head_dim,
                            options={} if ratio is None else {"ratio": ratio})
        self.prior = GaussianPrior(n_heads, self.head_dim, gamma=gamma, gamma_mode=gamma_mode, sigma=sigma,
                                   sigma_mode=sigma_mode)

    @property
    def reads_target_length(self) -> bool:
        """Whether an output depends on how many queries there are in all."""
        return isinstance(self.center, RatioCenter) and self.center.ratio is None

    def pairs(self, x: Tensor, memory: Tensor | None = None, *, causal: bool = False, **arguments: Any) -> Pairs:
        """As Attention's, refusing what has no source."""
        if memory is None:
            raise ValueError("memory must be given, got None: the prior is centred on the tokens of a source")
        if causal:
            raise ValueError("causal must be False, got True: a source has no tokens that are later than a query")
        return super().pairs(x, memory, **arguments)

    def bias(self, pairs: Pairs) -> Tensor:
        """−γ (μ_i − j)² / (2 σ_i²)."""
        places = Places.of(pairs)
        return self.prior.at(places.place - self.center(pairs, places), pairs.source)
