"""Queries and keys that meet, and who of them sees whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd import forward_ad


@dataclass(eq=False)
class Sight:
    """Who sees whom under the ``mask`` of a forward pass, kept for all evaluations of self-attention in it.

    Whoever hands it on says with it that what comes out at hidden tokens goes nowhere. It holds for no other mask.
    ``clean``: whether states are 0 at hidden tokens, as they are while the pass runs; later they may be anything.
    """

    mask: Tensor | None
    clean: bool = False
    kept: dict[tuple, Tensor | None] = field(default_factory=dict)

    @contextmanager
    def during(self, clean: bool) -> Iterator[None]:
        """``clean`` for the block; then nothing is kept."""
        self.clean = clean
        try:
            yield
        finally:
            self.clean = False
            self.kept.clear()

    def holds(self, pairs: Pairs) -> bool:
        """Whether the pairs are under this mask."""
        return pairs.mask is self.mask

    def term(self, pairs: Pairs) -> Tensor | None:
        """What is added to the scores, broadcastable to (batch, heads, queries, keys): 0 where a query may look, else
        -inf. A query that sees nothing may look everywhere, as it is hidden itself. None: all see all."""
        if torch.compiler.is_compiling():  # a graph keeps it by itself
            return self._term(pairs)
        query, mask = pairs.query, self.mask
        changes = None if mask is None or mask.is_inference() else mask._version
        key = (pairs.causal, pairs.first, pairs.window, query.shape[2], pairs.key.shape[2], query.dtype, changes,
               torch.is_inference_mode_enabled())
        if key not in self.kept:
            self.kept[key] = self._term(pairs)
        return self.kept[key]

    @staticmethod
    def _term(pairs: Pairs) -> Tensor | None:
        seen = pairs.seen
        if seen is None:
            return None
        if pairs.mask is not None:
            seen = seen | ~seen.any(-1, keepdim=True)
        term = torch.zeros(seen.shape, dtype=pairs.query.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return term.expand(*term.shape[:-2], pairs.query.shape[2], -1)


@dataclass(frozen=True)
class Pairs:
    """Queries and keys that meet.

    ``query`` (batch, n_heads, queries, head_dim); ``key``, ``value`` (batch, n_heads, keys, head_dim). ``source``: the
    query before rotary positions, from which priors are predicted. ``mask``: bool (batch, keys) or (batch, queries,
    keys). ``first``: where the first query stands, a number or, for a memory, (batch, 1, 1, 1); ``origin`` (batch, 1,
    1, 1): the key from which a memory's places are counted, its first real one; None: key 0. ``window``: keys at a
    distance of window or more are out of sight. ``plain``: keys before rotary positions, where a variant asks for them.
    ``sight``: what the pass keeps of who sees what.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor
    mask: Tensor | None = None
    causal: bool = False
    first: int | Tensor = 0
    window: int | None = None
    origin: Tensor | None = None
    plain: Tensor | None = None
    sight: Sight | None = None

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Where queries (queries, 1) and keys (keys,) stand, int64; behind (batch, 1) where padding moves them."""
        n, m, device = self.query.shape[2], self.key.shape[2], self.query.device
        key = torch.arange(m, device=device)
        if self.origin is not None:
            key = key - self.origin
        return torch.arange(n, device=device)[:, None] + self.first, key

    @property
    def offset(self) -> Tensor:
        """j - i, key position minus query position: (queries, keys) or (batch, 1, queries, keys), int64."""
        query, key = self.places
        return key - query

    @property
    def distance(self) -> Tensor:
        """|i - j|, shaped like ``offset``, in a dtype in which priors are exact: float64 or float32."""
        query, key = (x.to(fine(self.query.dtype)) for x in self.places)
        return (key - query).abs()

    def near(self) -> Pairs:
        """The same causal pairs without the keys that are before the first query's window."""
        start = max(0, self.first - self.window + 1)
        mask = None if self.mask is None else self.mask[..., start:]
        return replace(self, key=self.key[:, :, start:], value=self.value[:, :, start:], mask=mask,
                       plain=None if self.plain is None else self.plain[:, :, start:], first=self.first - start,
                       sight=None)

    @property
    def seen(self) -> Tensor | None:
        """What each query may see, bool, broadcastable to (batch, heads, queries, keys); None: everything."""
        parts = []
        if self.mask is not None:
            parts.append(self.mask[:, None, None] if self.mask.dim() == 2 else self.mask[:, None])
        n, m = self.query.shape[2], self.key.shape[2]
        if self.causal and self.first + 1 < m:  # else the first query stands at the last key, and sees all
            query, key = self.places
            parts.append(key <= query)
        if self.window is not None and max(self.first + n, m - self.first) > self.window:
            query, key = self.places
            parts += [key > query - self.window, key < query + self.window]
        return reduce(torch.logical_and, parts) if parts else None


def needs_rules() -> bool:
    """Inside a torch.func transform or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def fine(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)
