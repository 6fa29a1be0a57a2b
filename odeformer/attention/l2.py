"""L2 self-attention, which is Lipschitz (Kim, Papamakarios & Mnih 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention
from odeformer.attention.pairs import Pairs
from odeformer.tables import at_least


class L2Attention(Attention):
    """softmax(−|q_i − q_j|² / sqrt(head_dim)) X A W^V for each head, A = W^Q W^Q^T / sqrt(head_dim).

    Keys are the queries (``key`` is ``query``) and no projection has a bias, so that the map has a Lipschitz constant
    on all inputs, which dot-product attention has not: see ``lipschitz_bound``. With rotary positions or a ``memory``
    queries and keys are no longer tied, and the bound does not hold.
    """

    def __init__(self, d_model: int, n_heads: int, *, window: int | None = None):
        super().__init__(d_model, n_heads, window=window, bias=False)
        del self._modules["key"]

    @property
    def key(self) -> nn.Linear:
        """The queries' projection: not a second name in ``_modules``, by which functional_call would lose the first."""
        return self.query

    @property
    def scale(self) -> float:
        """|q − k|² = |q|² − 2 q·k + |k|², of which softmax over the keys sees 2 q·k − |k|²."""
        return 2 * self.head_dim**-0.5

    def bias(self, pairs: Pairs) -> Tensor:
        """−|k_j|² / sqrt(head_dim): (batch, heads, 1, keys)."""
        return -pairs.key.square().sum(-1).unsqueeze(-2) * self.head_dim**-0.5

    def by_head(self) -> tuple[Tensor, Tensor]:
        """W^Q and W^V, each (n_heads, d_model, head_dim)."""
        return tuple(linear.weight.unflatten(0, (self.n_heads, -1)).mT for linear in (self.query, self.value))

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, and values x W^Q (W^Q^T W^V / sqrt(head_dim))."""
        query, key = self.heads(self.query(x)), self.heads(self.query(memory))
        w_query, w_value = self.by_head()
        return query, key, key @ (w_query.mT @ w_value * self.head_dim**-0.5)

    def lipschitz_bound(self, n_tokens: int) -> Tensor:
        """An upper bound of |f(x) − f(y)|_2 / |x − y|_2 over sequences of n_tokens, a 0-d tensor (theorem 3.2).

        sqrt(N / head_dim) (4 φ^-1(N − 1) + 1) sqrt(Σ_h |W^Q_h|^4 |W^V_h|²) |W^O| with spectral norms and
        φ(x) = x exp(x + 1). It holds for full, causal and windowed self-attention: what counts is that each token sees
        itself. It grows as sqrt(N) log N. Raises ValueError for n_tokens < 1.
        """
        at_least("n_tokens", n_tokens, 1)
        w_query, w_value = self.by_head()
        query, value = (torch.linalg.matrix_norm(w, 2) for w in (w_query, w_value))
        heads = (query.pow(4) * value.square()).sum().sqrt()
        spread = math.sqrt(n_tokens / self.head_dim) * (4 * inverse_phi(n_tokens - 1) + 1)
        return spread * heads * torch.linalg.matrix_norm(self.output.weight, 2)


def inverse_phi(y: float) -> float:
    """x >= 0 with x exp(x + 1) = y: Lambert's W of y / e."""
    from scipy.special import lambertw

    return float(lambertw(y / math.e).real)
