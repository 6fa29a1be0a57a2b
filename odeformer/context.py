"""What one forward pass knows: masks and frozen random draws. Nothing of it stays on a module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from odeformer.masks import visible


@dataclass
class Context:
    """Made for a forward pass and passed along with the state.

    ``mask``: (batch, tokens), True = real. ``causal``: no token sees a later one. ``training``: dropout acts.
    """

    mask: Tensor | None = None
    causal: bool = False
    training: bool = False
    _seen: Tensor | None = None
    _drops: dict[int, Tensor] = field(default_factory=dict)

    def attention(self, n_tokens: int, device: torch.device) -> dict:
        """The mask arguments of a self-attention, combined once a pass."""
        if self.mask is None:
            return {"causal": self.causal}
        if self._seen is None:
            self._seen = visible(self.mask, self.causal, n_tokens, n_tokens, device)
        return {"mask": self._seen}

    def drop(self, site: nn.Module, p: float, x: Tensor) -> Tensor:
        """Dropout with one mask a solve for each site, so that all stages and steps see the same field."""
        if not self.training or p == 0:
            return x
        if id(site) not in self._drops:
            self._drops[id(site)] = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
        return x * self._drops[id(site)]
