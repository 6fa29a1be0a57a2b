"""Relative position representations (Shaw, Uszkoreit & Vaswani 2018; eqs. 8-12)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention, weighted
from odeformer.attention.offsets import Offsets, row_of, spread, summed
from odeformer.attention.pairs import Pairs, fine
from odeformer.attention.tiled import Attend
from odeformer.tables import at_least

MANY_TO_ATTEND = 2**16  # pairs of a head from which tiles are faster
TABLES = {"q": "query_table", "k": "key_table", "v": "value_table"}


class RelativeAttention(Attention):
    """α = softmax((q_i + PE^q_ij) (k_j + PE^k_ij)^T / sqrt(head_dim)), c_i = Σ_j α_ij (v_j + PE^v_ij).

    PE_ij is row clip(j − i, ±max_distance) of a learned table (2 max_distance + 1, head_dim), row 0 being offset
    −max_distance; the heads share it. ``tables``: which of "q", "k", "v" have one (parameters ``query_table``,
    ``key_table``, ``value_table``; None for the others). No (queries x keys x head_dim) tensor is made: products with
    the table's rows are spread over the pairs, and weights of equal offset added up.

    Under rotary positions only q · k is turned; products with the tables take queries and keys as they were, or they
    would depend on more than j − i.

    Raises ValueError for max_distance < 1 and for tables that are no such letters.
    """

    def __init__(self, d_model: int, n_heads: int, *, max_distance: int = 16, tables: str = "qkv", **shared: Any):
        super().__init__(d_model, n_heads, **shared)
        at_least("max_distance", max_distance, 1)
        letters = set(tables) if isinstance(tables, str) else set()
        if not letters or len(letters) < len(tables) or not letters <= TABLES.keys():
            raise ValueError(f'tables must be some of the letters "qkv", each once, got {tables!r}')
        self.max_distance = max_distance
        for letter, name in TABLES.items():
            rows = torch.empty(2 * max_distance + 1, self.head_dim).normal_(std=self.head_dim**-0.5)
            self.register_parameter(name, nn.Parameter(rows) if letter in tables else None)

    @property
    def asks_for_plain_keys(self) -> bool:
        """Whether there is a table for queries."""
        return self.query_table is not None

    def multiply_adds(self, n_seen: int) -> int:
        """With the products of each table's rows."""
        tables = sum(getattr(self, name) is not None for name in TABLES.values())
        return super().multiply_adds(n_seen) + tables * (2 * self.max_distance + 1) * self.n_heads * self.head_dim

    def terms(self, pairs: Pairs) -> tuple[Tensor | None, Tensor | None]:
        """What rows of the tables add to the scores: q_i · PE^k + PE^q · PE^k by query (batch, heads, queries, rows),
        PE^q · k_j by key (batch, heads, keys, rows), over sqrt(head_dim); None without such tables."""
        by_query = by_key = None
        if self.key_table is not None:
            by_query = pairs.source @ self.key_table.mT
            if self.query_table is not None:
                by_query = by_query + (self.query_table * self.key_table).sum(-1)
            by_query = by_query * self.scale
        if self.query_table is not None:
            by_key = (pairs.key if pairs.plain is None else pairs.plain) @ self.query_table.mT * self.scale
        return by_query, by_key

    def bias(self, pairs: Pairs) -> Tensor | None:
        """(q_i · PE^k_ij + PE^q_ij · k_j + PE^q_ij · PE^k_ij) / sqrt(head_dim); None without such tables."""
        by_query, by_key = self.terms(pairs)
        return None if by_query is None and by_key is None else spread(by_query, by_key, pairs, self.max_distance)

    def attend(self, pairs: Pairs) -> Tensor:
        """Through the fused kernel, which has no place for a table of the values; with one, tile by tile where there
        are many pairs (see ``Offsets.of``)."""
        if self.value_table is None:
            return super().attend(pairs)
        offsets, seen = Offsets.of(pairs, self.max_distance, MANY_TO_ATTEND), pairs.seen
        if offsets is not None:
            if seen is not None:
                seen = seen.expand(*(1, 1, *seen.shape)[-4:-2], offsets.n, offsets.m)
            lines = (None if x is None else x.flatten(0, 1)
                     for x in (pairs.query, pairs.key, pairs.value, *self.terms(pairs)))
            y = Attend.apply(*lines, self.value_table, seen, offsets, self.scale)
            return y.unflatten(0, pairs.query.shape[:2])
        weights = self.weights(pairs)
        at_offset = summed(weights, row_of(pairs.offset, self.max_distance), len(self.value_table))
        placed = at_offset @ self.value_table.to(fine(self.value_table.dtype))
        y = weighted(weights, pairs.value)
        return (y + placed).to(y.dtype)
