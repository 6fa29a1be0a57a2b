"""Attention variants, one a file: ``ATTENTION[name](d_model, n_heads, **options)``.

Each is called ``(x, memory=None, *, mask=None, causal=False)``: x (batch, queries, d_model), memory
(batch, keys, d_model) or None for self-attention, mask bool (batch, keys) with True = real.
"""

from odeformer.attention.softmax import SoftmaxAttention

ATTENTION = {
    "softmax": SoftmaxAttention,
}
