"""How a matrix is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from odeformer.init.matrix import Matrix, biases, matrices

DISTRIBUTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "uniform": lambda w, std: w.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std),
    "normal": lambda w, std: w.normal_(0, std),
}


@dataclass(frozen=True)
class Draw:
    """Independent entries of mean 0: the distribution ("uniform", "normal"), their standard deviation, and the gain by
    which the scheme moved that from its plain value."""

    distribution: str
    std: float
    gain: float = 1.0

    def fill(self, w: Tensor) -> None:
        """Overwrite w."""
        DISTRIBUTIONS[self.distribution](w, self.std)


def apply(model: nn.Module, scheme: str, rule: Callable[[Matrix], Draw], *, beyond: Sequence[Matrix] = ()) -> None:
    """Draw every matrix of the layers, and those of ``beyond``, as the rule says from its shape, role and layer.

    Biases become 0. What was drawn is kept in ``model.draws``, parameter path -> (scheme, Draw), for ``report``.
    """
    draws = {}
    with torch.no_grad():
        for matrix in [*matrices(model), *beyond]:
            draw = rule(matrix)
            draw.fill(matrix.tensor)
            draws[matrix.name] = scheme, draw
        for bias in biases(model):
            bias.zero_()
    model.draws = draws


def rescale(model: nn.Module, matrix: Matrix, factor: float) -> None:
    """Multiply a matrix that ``apply`` has drawn, and say so in ``model.draws``."""
    scheme, draw = model.draws[matrix.name]
    with torch.no_grad():
        matrix.tensor.mul_(factor)
    model.draws[matrix.name] = scheme, Draw(draw.distribution, draw.std * factor, draw.gain * factor)
