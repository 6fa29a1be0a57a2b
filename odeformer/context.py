"""What one forward pass knows: masks, positions and frozen random draws. Nothing of it stays on a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from odeformer.positions import Rotary


@dataclass
class Context:
    """Made for a forward pass and passed along with the state.

    ``mask``: (batch, tokens), True = real. ``causal``: no token sees a later one. ``training``: dropout acts.
    ``rotary``: what attention turns queries and keys by. ``keep``: for each layer a factor of its increment, a number
    or a tensor (batch, 1, 1): layer drop; None where all is kept.
    """

    mask: Tensor | None = None
    causal: bool = False
    training: bool = False
    rotary: Rotary | None = None
    keep: Sequence[float | Tensor] | None = None
    _drops: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attention(self) -> dict:
        """The arguments of a self-attention beside the state."""
        arguments = {"mask": self.mask, "causal": self.causal}
        return arguments if self.rotary is None else arguments | {"rotary": self.rotary}

    def drop(self, site: nn.Module, layer: int, p: float, x: Tensor) -> Tensor:
        """Dropout with one mask a solve for each site and layer, so that all stages and steps see the same field."""
        if not self.training or p == 0:
            return x
        key = id(site), layer
        if key not in self._drops:
            self._drops[key] = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        return x * self._drops[key]

    def scale(self, layer: int, increment: Tensor) -> Tensor:
        """The increment of a layer under layer drop."""
        return increment if self.keep is None else increment * self.keep[layer]
