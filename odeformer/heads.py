"""What an encoder's states are used for: ``HEADS[name](d_model, n_outputs, **options)``, called ``(states, mask)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.feedforward import gelu_tanh, quick_gelu
from odeformer.norms import make_norm
from odeformer.tables import at_least, look_up

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "silu": F.silu,
               "tanh": torch.tanh}


def mean_over(states: Tensor, mask: Tensor | None) -> Tensor:
    """(batch, tokens, d_model) -> (batch, d_model): the mean over real tokens; 0 where there is none."""
    if mask is None:
        return states.mean(1)
    weight = mask.unsqueeze(-1)
    return states.masked_fill(~weight, 0).sum(1) / weight.sum(1).clamp(min=1)


def first_of(states: Tensor, mask: Tensor | None) -> Tensor:
    """The state of the first token that is real (batch, d_model); 0 where there is none."""
    if mask is None:
        return states[:, 0]
    first = mask.int().argmax(1)
    states = states.masked_fill(~mask.unsqueeze(-1), 0)
    return states.take_along_dim(first[:, None, None], 1).squeeze(1)


POOLINGS = {"mean": mean_over, "first": first_of}


class Linear(nn.Module):
    """A linear map from 0, so that training starts from even odds: its loss is log n_outputs."""

    def __init__(self, d_model: int, n_outputs: int):
        super().__init__()
        at_least("n_outputs", n_outputs, 1)
        self.output = nn.Linear(d_model, n_outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)


class Tagging(Linear):
    """Logits for every token (batch, tokens, n_outputs)."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, d_model) -> (batch, tokens, n_outputs)."""
        return self.output(states)


class Classification(Linear):
    """Logits, or real numbers, for a whole sequence (batch, n_outputs); ``pooling``: "mean" over tokens or "first".

    Raises ValueError for an unknown pooling.
    """

    def __init__(self, d_model: int, n_outputs: int, *, pooling: str = "mean"):
        super().__init__(d_model, n_outputs)
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        self.pooling = pooling

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, d_model) -> (batch, n_outputs)."""
        return self.output(POOLINGS[self.pooling](states, mask))


class Pooler(nn.Module):
    """tanh(x W + b), x (batch, d_model) being the state of the first real token (Devlin et al. 2019), under another
    ``activation`` (a key of ACTIVATIONS) if given."""

    def __init__(self, d_model: int, *, activation: str = "tanh"):
        super().__init__()
        self.transform = nn.Linear(d_model, d_model)
        self.activation = look_up(ACTIVATIONS, activation, "activation")

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, d_model) -> (batch, d_model)."""
        return self.activation(self.transform(first_of(states, mask)))


class PooledClassification(Linear):
    """Logits for a whole sequence (batch, n_outputs) from a ``Pooler`` (BERT, RoBERTa; DistilBERT with ReLU)."""

    def __init__(self, d_model: int, n_outputs: int, *, activation: str = "tanh"):
        super().__init__(d_model, n_outputs)
        self.pooler = Pooler(d_model, activation=activation)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, d_model) -> (batch, n_outputs)."""
        return self.output(self.pooler(states, mask))


class MaskedLanguageModelling(nn.Module):
    """BERT's head (Devlin et al. 2019): LN(GELU(x W + b)) W_v + b_v for every token, n_outputs being the vocabulary.

    ``width``: of what is normed, d_model if None (ALBERT: that of its embeddings). ``activation``: a key of
    ACTIVATIONS. ``eps``: the norm's. Raises ValueError for what is unknown or out of range.
    """

    def __init__(self, d_model: int, n_outputs: int, *, width: int | None = None, activation: str = "gelu",
                 eps: float = 1e-5):
        super().__init__()
        at_least("n_outputs", n_outputs, 1)
        width = d_model if width is None else width
        at_least("width", width, 1)
        self.activation = look_up(ACTIVATIONS, activation, "activation")
        self.transform, self.norm = nn.Linear(d_model, width), make_norm(width, "layer", eps)
        self.output = nn.Linear(width, n_outputs)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, tokens, d_model) -> (batch, tokens, n_outputs)."""
        return self.output(self.norm(self.activation(self.transform(states))))


HEADS = {
    "classification": Classification,
    "regression": Classification,
    "pooled_classification": PooledClassification,
    "tagging": Tagging,
    "masked_lm": MaskedLanguageModelling,
}
