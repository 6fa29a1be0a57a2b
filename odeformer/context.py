"""What one forward pass knows: masks, positions and frozen random draws. Nothing of it stays on a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.attention.pairs import Sight
from odeformer.cache import CachePass
from odeformer.positions import Rotary
from odeformer.routing import RoutingLog, Visit


@dataclass
class Context:
    """Made for a forward pass and passed along with the state.

    ``mask``: (batch, tokens), True = real. ``causal``: no token sees a later one. ``training``: dropout acts, with one
    mask a solve or, where ``dropout_per`` is "evaluation", a new one at each evaluation of the field.
    ``rotary``: what attention turns queries and keys by. ``keep``: for each layer a factor of its increment, a number
    or a tensor (batch, 1, 1): layer drop; None where all is kept. ``cache``: holds keys and values of earlier tokens.
    ``memory`` (batch, source, d_model) and ``memory_mask``: what cross-attention attends to.
    ``routing``: what experts report. ``moving``: whether weights are functions of l, not the same in all evaluations of
    a layer. ``replayed``: whether the field is evaluated again on the way back. ``compiled``: makes the fields of a
    compiled model's layers (see ``odeformer.compiled``). ``sight``: who sees whom, kept for all layers.
    ``holds_rows``: whether the field holds something of each row of the batch that is not named here.
    """

    mask: Tensor | None = None
    causal: bool = False
    training: bool = False
    dropout_per: str = "solve"
    rotary: Rotary | None = None
    keep: Sequence[float | Tensor] | None = None
    cache: CachePass | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    routing: RoutingLog = field(default_factory=lambda: RoutingLog())
    moving: bool = False
    replayed: bool = False
    compiled: Any = None
    sight: Sight | None = None
    holds_rows: bool = False
    _drops: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def by_row(self) -> bool:
        """Whether the field holds something of each row of the batch, so that no row can leave it."""
        return self.holds_rows or self.mask is not None or self.memory is not None

    def attention(self, layer: int) -> dict[str, Any]:
        """The arguments of a self-attention beside the state."""
        arguments = {"mask": self.mask, "causal": self.causal}
        if self.rotary is not None:
            arguments["rotary"] = self.rotary
        if self.cache is not None:
            arguments |= {"mask": self.cache.mask, "slot": self.cache.attention(layer)}
        return arguments

    def cross_attention(self, site: nn.Module) -> dict[str, Any]:
        """The arguments of a cross-attention beside the state."""
        arguments = {"memory": self.memory, "mask": self.memory_mask}
        if self.cache is not None:
            slot = self.cache.memory(site, self.moving)
            held = slot.length  # all of the memory once it has been read
            arguments["memory"] = self.memory[:, held:]
            arguments["slot"] = lambda key, value: slot.join(held, key, value)
        return arguments

    @property
    def first(self) -> int | Tensor:
        """Where the first token of the state stands, counted from the first real one: a number or (batch, 1, 1, 1)."""
        before = 0 if self.cache is None else self.cache.cache.n_tokens
        mask = self.mask if self.cache is None else self.cache.mask
        return before if mask is None else before - mask.int().argmax(1).view(-1, 1, 1, 1)

    def visit(self, site: nn.Module, layer: int) -> Visit:
        """What a routed layer sees. Raises ValueError for one with a capacity where a cache is read."""
        if self.cache is not None and getattr(site.router, "capacity_factor", None) is not None:
            raise ValueError("capacity_factor cannot be used with a cache, which does not keep how full experts are; "
                             "pass cache=None to generate")
        return self.routing.visit(site, layer, mask=self.mask, causal=self.causal, training=self.training)

    def drop(self, site: nn.Module, layer: int, p: float, x: Tensor) -> Tensor:
        """Dropout with one mask a solve for each site and layer, so that all stages and steps see the same field
        (unless ``dropout_per`` says otherwise)."""
        if not self.training or p == 0:
            return x
        return dropped(x, self.kept(site, layer, p, x), p)

    def kept(self, site: nn.Module, layer: int, p: float, x: Tensor) -> Tensor:
        """The mask of ``drop`` for an x: bool, True where it is kept."""
        if self.dropout_per == "evaluation":
            return _mask(x, p)
        key = id(site), layer
        if key not in self._drops:
            self._drops[key] = _mask(x, p)
        return self._drops[key]

    def increment(self, layer: int, k: Tensor, site: Any = None) -> Tensor:
        """dz/dl of a layer under layer drop; padding stands still, or a norm of zeros would make it stiff.

        ``site``: the sublayer that k is of.
        """
        if self.mask is not None:
            real = self.mask.unsqueeze(-1)  # to multiply is several times as fast as to fill
            known = self.sight is not None and self.sight.clean and site is not None and site.finite
            k = k * real if known else k.masked_fill(~real, 0)
        return k if self.keep is None else k * self.keep[layer]


def _mask(x: Tensor, p: float) -> Tensor:
    """bool, True (kept) with probability 1 - p."""
    return torch.rand(x.shape, device=x.device) >= p


def dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """What is kept, over 1 - p: a Python number, which half precision does not round."""
    return (x * (1 / (1 - p))).masked_fill(~keep, 0)
