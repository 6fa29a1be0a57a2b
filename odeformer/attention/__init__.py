"""Attention variants, one a file: ``ATTENTION[name](d_model, n_heads, **options)``.

Each is called ``(x, memory=None, *, mask=None, causal=False)``: x (batch, queries, d_model), memory
(batch, keys, d_model) or None for self-attention, mask bool (batch, keys) with True = real.
"""

from odeformer.attention.alibi import AlibiAttention
from odeformer.attention.cross_gaussian import CrossGaussianAttention
from odeformer.attention.l2 import L2Attention
from odeformer.attention.local_distance import LocalDistanceAttention
from odeformer.attention.local_gaussian import LocalGaussianAttention
from odeformer.attention.local_mixture import LocalMixtureAttention
from odeformer.attention.local_multiplicative import LocalMultiplicativeAttention
from odeformer.attention.relative import RelativeAttention
from odeformer.attention.softmax import SoftmaxAttention
from odeformer.attention.window import WindowAttention

ATTENTION = {
    "softmax": SoftmaxAttention,
    "local_distance": LocalDistanceAttention,
    "local_gaussian": LocalGaussianAttention,
    "local_mixture": LocalMixtureAttention,
    "local_multiplicative": LocalMultiplicativeAttention,
    "cross_gaussian": CrossGaussianAttention,
    "relative": RelativeAttention,
    "window": WindowAttention,
    "alibi": AlibiAttention,
    "l2": L2Attention,
}
