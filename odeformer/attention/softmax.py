"""Scaled dot-product attention (Vaswani et al. 2017) through torch's fused kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.masks import visible
from odeformer.tables import at_least


class SoftmaxAttention(nn.Module):
    """softmax(Q K^T / sqrt(head_dim)) V with n_heads heads.

    Raises ValueError where d_model is not a multiple of n_heads.
    """

    def __init__(self, d_model: int, n_heads: int, *, bias: bool = True):
        super().__init__()
        at_least("d_model", d_model, 1)
        at_least("n_heads", n_heads, 1)
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got d_model = {d_model}, n_heads = {n_heads}")
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, d_model, bias=bias)
        self.value = nn.Linear(d_model, d_model, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)

    def heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, d_model) -> (batch, heads, tokens, head_dim)."""
        return x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None,
                causal: bool = False) -> Tensor:
        """(batch, queries, d_model) -> (batch, queries, d_model). The last query stands at the last key if causal."""
        memory = x if memory is None else memory
        if mask is not None and mask.dim() == 2:
            memory = memory.masked_fill(~mask.unsqueeze(-1), 0)  # 0 * NaN would pass through the weighted sum
        q, k, v = self.heads(self.query(x)), self.heads(self.key(memory)), self.heads(self.value(memory))
        if mask is None and (not causal or q.shape[2] == k.shape[2]):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            seen = visible(mask, causal, q.shape[2], k.shape[2], q.device)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.output(y.transpose(1, 2).flatten(2))
