"""Relative position representations (Shaw, Uszkoreit & Vaswani 2018; eqs. 8-12)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention, weighted
from odeformer.attention.pairs import Pairs, fine
from odeformer.tables import at_least

TABLES = {"q": "query_table", "k": "key_table", "v": "value_table"}


class RelativeAttention(Attention):
    """α = softmax((q_i + PE^q_ij) (k_j + PE^k_ij)^T / sqrt(head_dim)), c_i = Σ_j α_ij (v_j + PE^v_ij).

    PE_ij is row clip(j − i, ±max_distance) of a learned table (2 max_distance + 1, head_dim), row 0 being offset
    −max_distance; the heads share it. ``tables``: which of "q", "k", "v" have one (parameters ``query_table``,
    ``key_table``, ``value_table``; None for the others). No (queries x keys x head_dim) tensor is made: products with
    the table's rows are gathered, and weights of equal offset added up.

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

    def rows(self, pairs: Pairs) -> Tensor:
        """Which row of the tables each pair uses: shaped like ``pairs.offset``, int64."""
        k = self.max_distance
        return pairs.offset.clamp(-k, k) + k

    def bias(self, pairs: Pairs) -> Tensor | None:
        """(q_i · PE^k_ij + PE^q_ij · k_j + PE^q_ij · PE^k_ij) / sqrt(head_dim); None without such tables."""
        rows, bias = self.rows(pairs), None
        query, key = pairs.source, pairs.key if pairs.plain is None else pairs.plain
        if self.key_table is not None:  # all small, until the last line
            products = query @ self.key_table.mT  # (batch, heads, queries, rows of the table)
            if self.query_table is not None:
                products = products + (self.query_table * self.key_table).sum(-1)
            bias = (products * self.scale).gather(-1, rows.expand(*query.shape[:2], -1, -1))
        if self.query_table is not None:
            products = key @ self.query_table.mT * self.scale
            other = products.gather(-1, rows.mT.expand(*key.shape[:2], -1, -1)).mT
            bias = other if bias is None else bias + other
        return bias

    def attend(self, pairs: Pairs) -> Tensor:
        """Through the fused kernel where the values have no table."""
        if self.value_table is None:
            return super().attend(pairs)
        weights, rows = self.weights(pairs), self.rows(pairs)
        at_offset = weights.new_zeros(*weights.shape[:3], len(self.value_table))
        at_offset = at_offset.scatter_add(-1, rows.expand(*weights.shape[:2], -1, -1), weights)
        placed = at_offset @ self.value_table.to(fine(self.value_table.dtype))
        y = weighted(weights, pairs.value)
        return (y + placed).to(y.dtype)
