"""Scaled dot-product attention (Vaswani et al. 2017)."""

from odeformer.attention.base import Attention


class SoftmaxAttention(Attention):
    """softmax(Q K^T / sqrt(head_dim)) V, with the options of every variant and no prior."""
