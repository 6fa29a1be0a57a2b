"""Position-wise feed-forward networks: ``FEEDFORWARD[name](d_model, d_ff, **options)``, called ``(x)``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.experts import Experts, ExpertSlices
from odeformer.finite import Finite
from odeformer.tables import at_least


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with tanh in place of erf (Hendrycks & Gimpel 2016): x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x σ(1.702 x) (Hendrycks & Gimpel 2016)."""
    return x * (1.702 * x).sigmoid()


class FeedForward(Finite, nn.Module):
    """activation(x W_h + b_h) W_f + b_f (eq. 48)."""

    activation = staticmethod(F.gelu)

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = True):
        super().__init__()
        at_least("d_model", d_model, 1)
        at_least("d_ff", d_ff, 1)
        self.hidden = nn.Linear(d_model, d_ff, bias=bias)
        self.output = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)."""
        return self.output(self.activation(self.hidden(x)))


class ReluFeedForward(FeedForward):
    """ReLU(x W_h + b_h) W_f + b_f, as in eq. 48."""

    activation = staticmethod(F.relu)


class TanhGeluFeedForward(FeedForward):
    """The same with ``gelu_tanh``: GPT-2."""

    activation = staticmethod(gelu_tanh)


class QuickGeluFeedForward(FeedForward):
    """The same with ``quick_gelu``: CLIP."""

    activation = staticmethod(quick_gelu)


class SiluFeedForward(FeedForward):
    """The same with SiLU, x σ(x), also called swish: Marian."""

    activation = staticmethod(F.silu)


class GatedFeedForward(FeedForward):
    """(activation(x W_g + b_g) ⊙ (x W_h + b_h)) W_f + b_f, with GELU: GEGLU (Shazeer 2020).

    A third matrix more than eq. 48 for the same d_ff; Shazeer compares at 2/3 of the d_ff, where parameters are equal,
    and leaves the biases out (``bias=False``).
    """

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = True):
        super().__init__(d_model, d_ff, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.activation(self.gate(x)) * self.hidden(x))


class SwigluFeedForward(GatedFeedForward):
    """The same with SiLU: SwiGLU (Shazeer 2020)."""

    activation = staticmethod(F.silu)


class RegluFeedForward(GatedFeedForward):
    """The same with ReLU: ReGLU (Shazeer 2020)."""

    activation = staticmethod(F.relu)


FEEDFORWARD = {
    "gelu": FeedForward,
    "relu": ReluFeedForward,
    "gelu_tanh": TanhGeluFeedForward,
    "quick_gelu": QuickGeluFeedForward,
    "silu": SiluFeedForward,
    "swiglu": SwigluFeedForward,
    "geglu": GatedFeedForward,
    "reglu": RegluFeedForward,
    "experts": Experts,
    "expert_slices": ExpertSlices,
}
