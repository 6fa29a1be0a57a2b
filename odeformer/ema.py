"""Averages of weights over training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The exponential moving average of a model's parameters: w̄ ← d w̄ + (1 - d) w after each update.

    d = min(``decay``, (1 + t) / (10 + t)) at the t-th update, so that a short run does not average its start
    (Polyak & Juditsky 1992; the warm-up as in TensorFlow's ExponentialMovingAverage). Starts as the parameters.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.live = dict(model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after update number ``step``, from 1."""
        d = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.live.values()], 1 - d)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average within, and what it had before afterwards, bit for bit."""
        kept = {name: p.detach().clone() for name, p in self.live.items()}
        self.apply()
        try:
            yield
        finally:
            copy(kept, self.live)

    def apply(self) -> None:
        """Give the model the average."""
        copy(self.average, self.live)

    def state_dict(self) -> dict[str, Tensor]:
        """The average, by parameter name."""
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over an average. Raises ValueError where it is that of other parameters."""
        if state.keys() != self.average.keys():
            odd = sorted(state.keys() ^ self.average.keys())
            raise ValueError(f"the average is that of other parameters: {', '.join(odd[:3])}")
        copy(state, self.average)


@torch.no_grad()
def copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """The values of source into the tensors of target."""
    for name, tensor in target.items():
        tensor.copy_(source[name])
