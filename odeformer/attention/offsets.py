"""Tables with a row for each clipped offset between a query and a key: spread over all pairs, and pairs summed by row.

The pair of query i, at place ``first`` + i, and key j belongs to row clip(j - first - i, ±reach) + reach. Both maps are
linear and each is the other's adjoint, so each is the other's gradient, to any order. They go tile by tile through the
queries: left and right of the keys near a tile all pairs have the first or the last row, whole stretches that are
filled or summed at once; near it the rows lie along diagonals, which a view of a block shows as columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from odeformer.attention.pairs import Pairs, needs_rules

TILE = 128  # queries
MANY_TO_SPREAD = 2**20  # pairs of a head from which tiles are faster than an index for each pair


@dataclass(frozen=True)
class Tile:
    """``queries``; ``near``: the keys that they may meet at an offset within the reach, as far as there are any, all of
    which would be ``width``; ``inner``: where in these they stand. ``padded``: the same among keys to which ``reach``
    others have been added at both ends. ``fars``: (row, keys) left and right of them."""

    queries: slice
    near: slice
    width: int
    inner: slice
    padded: slice

    @property
    def fars(self) -> tuple[tuple[int, slice], tuple[int, slice]]:
        return (0, slice(self.near.start)), (-1, slice(self.near.stop, None))


@dataclass(frozen=True)
class Offsets:
    """Of n queries, the first at ``first``, and m keys, clipped at ±``reach``."""

    n: int
    m: int
    first: int
    reach: int

    @classmethod
    def of(cls, pairs: Pairs, reach: int, least: int = 0) -> Offsets | None:
        """Those of pairs; None for fewer than ``least``, where places are not plain (a memory's, or queries beyond the
        keys), in half precision, off the CPU, and where torch.compile, torch.jit and torch.func want elementary
        operations."""
        n, m, first, query = pairs.query.shape[2], pairs.key.shape[2], pairs.first, pairs.query
        if n * m < least or not isinstance(first, int) or pairs.origin is not None or not 0 <= first <= m - n:
            return None
        if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
            return None
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or needs_rules():
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        return cls(n, m, first, reach)

    def rows(self) -> Tensor:
        """Which row each pair belongs to: (queries, keys), int64."""
        return row_of(torch.arange(self.m) - torch.arange(self.n)[:, None] - self.first, self.reach)

    def tiles(self) -> Iterator[Tile]:
        """All of them, in order."""
        for start in range(0, self.n, TILE):
            stop = min(start + TILE, self.n)
            width, low = stop - start + 2 * self.reach, start + self.first - self.reach
            near = slice(max(low, 0), min(low + width, self.m))
            yield Tile(slice(start, stop), near, width, slice(near.start - low, near.stop - low),
                       slice(low + self.reach, low + self.reach + width))

    def near(self, block: Tensor) -> Tensor:
        """A view of a tile's block (lines, queries, near keys): (lines, queries, rows)."""
        width = block.shape[2]
        return block.as_strided((*block.shape[:2], 2 * self.reach + 1), (block.stride(0), width + 1, 1))

    def across(self, table: Tensor, tile: Tile) -> Tensor:
        """A view of a table of padded keys (lines, keys, rows), for a tile: (lines, queries, rows), each the row of the
        key that is met there."""
        table = table[:, tile.padded]
        line, key, row = table.stride()
        return table.as_strided((len(table), tile.queries.stop - tile.queries.start, 2 * self.reach + 1),
                                (line, key, key + row), table.storage_offset())


class Tables:
    """What is added to the pairs: (lines, queries, rows) by query and (lines, keys, rows) by key; None counts as 0."""

    def __init__(self, by_query: Tensor | None, by_key: Tensor | None, offsets: Offsets):
        like, rows = by_key if by_query is None else by_query, 2 * offsets.reach + 1
        self.offsets = offsets
        self.by_query = like.new_zeros(1, offsets.n, rows) if by_query is None else by_query
        self.by_key = like.new_zeros(1, offsets.m, rows) if by_key is None else by_key
        self.padded = F.pad(self.by_key, (0, 0, offsets.reach, offsets.reach))

    def fill(self, out: Tensor, tile: Tile) -> None:
        """Into out (lines, queries, keys), of each pair of a tile its row of the query plus that of the key."""
        mine, keys = self.by_query[:, tile.queries], self.padded[:, None, tile.padded]
        block = torch.add(mine[..., -1:], keys[..., -1])
        block += (mine[..., :1] - mine[..., -1:] + keys[..., 0] - keys[..., -1]).tril_(-1)
        self.offsets.near(block).copy_(mine + self.offsets.across(self.padded, tile))
        out[..., tile.near] = block[..., tile.inner]
        for row, far in tile.fars:
            torch.add(mine[..., row, None], self.by_key[:, None, far, row], out=out[..., far])


class Sums:
    """Sums over the pairs of each row, for each query (lines, queries, rows) and each key (lines, keys, rows), tile by
    tile; None unless ``of_queries``, ``of_keys``."""

    def __init__(self, like: Tensor, offsets: Offsets, of_queries: bool, of_keys: bool):
        rows, (reach, m) = 2 * offsets.reach + 1, (offsets.reach, offsets.m)
        self.offsets, self.by_query, self.by_key = offsets, None, None
        if of_queries:
            self.by_query = like.new_empty(len(like), offsets.n, rows)
        if of_keys:
            self.padded = like.new_zeros(len(like), m + 2 * reach, rows)
            self.by_key = self.padded[:, reach : reach + m]

    def add(self, x: Tensor, tile: Tile) -> None:
        """The pairs of a tile, x (lines, queries, keys)."""
        block = x.new_zeros(*x.shape[:2], tile.width)
        block[..., tile.inner] = x[..., tile.near]
        near = self.offsets.near(block)
        if self.by_query is not None:
            self.by_query[:, tile.queries] = near
        if self.by_key is not None:
            self.offsets.across(self.padded, tile).add_(near)
        n, rows, start = x.shape[1], near.shape[-1], tile.padded.start
        left, right = block[..., :n].tril(-1), block[..., rows:].triu()  # of the near keys, those beyond the reach
        fringes = (left, slice(start, start + n)), (right, slice(start + rows, tile.padded.stop))
        for (row, far), (fringe, keys) in zip(tile.fars, fringes, strict=True):
            if self.by_query is not None:
                self.by_query[:, tile.queries, row] += x[..., far].sum(-1) + fringe.sum(-1)
            if self.by_key is not None:
                self.by_key[:, far, row] += x[..., far].sum(-2)
                self.padded[:, keys, row] += fringe.sum(-2)


class Spread(Function):
    """(lines, queries, rows) and (lines, keys, rows), or None -> (lines, queries, keys): ``Tables`` of all tiles."""

    @staticmethod
    def forward(ctx: Any, by_query: Tensor | None, by_key: Tensor | None, offsets: Offsets) -> Tensor:
        ctx.offsets, ctx.wanted = offsets, (by_query is not None, by_key is not None)
        like = by_key if by_query is None else by_query
        tables, out = Tables(by_query, by_key, offsets), like.new_empty(len(like), offsets.n, offsets.m)
        for tile in offsets.tiles():
            tables.fill(out[:, tile.queries], tile)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if is_batched(gradient):
            row, width = ctx.offsets.rows(), 2 * ctx.offsets.reach + 1
            found = summed(gradient, row, width), summed(gradient.mT, row.mT, width)
            return *(x if wanted else None for x, wanted in zip(found, ctx.wanted, strict=True)), None
        return *Collect.apply(gradient, ctx.offsets, *ctx.wanted), None


class Collect(Function):
    """(lines, queries, keys) -> (lines, queries, rows) and (lines, keys, rows), or None: ``Sums`` of all tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Offsets, of_queries: bool,
                of_keys: bool) -> tuple[Tensor | None, Tensor | None]:
        ctx.offsets = offsets
        ctx.set_materialize_grads(False)
        sums = Sums(x, offsets, of_queries, of_keys)
        for tile in offsets.tiles():
            sums.add(x[:, tile.queries], tile)
        return sums.by_query, sums.by_key

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if all(gradient is None for gradient in gradients):
            return None, None, None, None
        if any(is_batched(gradient) for gradient in gradients if gradient is not None):
            return gathered(*gradients, ctx.offsets.rows()), None, None, None
        return Spread.apply(*gradients, ctx.offsets), None, None, None


def is_batched(gradient: Tensor) -> bool:
    """Whether many gradients come at once, under a vmap of torch.func or that of is_grads_batched."""
    return torch._C._functorch.is_batchedtensor(gradient) or torch._C._functorch.is_legacy_batchedtensor(gradient)


def gathered(by_query: Tensor | None, by_key: Tensor | None, row: Tensor) -> Tensor:
    """(..., queries, rows), or None, and (..., keys, rows), or None -> (..., queries, keys), by an index a pair."""
    parts = [None if by_query is None else by_query.gather(-1, row.expand(*by_query.shape[:-2], -1, -1)),
             None if by_key is None else by_key.gather(-1, row.mT.expand(*by_key.shape[:-2], -1, -1)).mT]
    first, *rest = [part for part in parts if part is not None]
    return first + rest[0] if rest else first


def summed(x: Tensor, row: Tensor, width: int) -> Tensor:
    """(..., queries, keys) -> (..., queries, rows), ``width`` of them, by an index for each pair."""
    empty = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], width)
    return empty.scatter_add(-1, row.expand(*x.shape[:-2], -1, -1), x)


def spread(by_query: Tensor | None, by_key: Tensor | None, pairs: Pairs, reach: int) -> Tensor:
    """(batch, heads, queries, 2 reach + 1), or None, and (batch, heads, keys, 2 reach + 1), or None -> (batch, heads,
    queries, keys): of each pair its row of the query plus that of the key."""
    offsets = Offsets.of(pairs, reach, MANY_TO_SPREAD)
    if offsets is None:
        return gathered(by_query, by_key, row_of(pairs.offset, reach))
    lines = (None if x is None else x.flatten(0, 1) for x in (by_query, by_key))
    return Spread.apply(*lines, offsets).unflatten(0, pairs.query.shape[:2])


def row_of(offset: Tensor, reach: int) -> Tensor:
    """The row of a table to which pairs at these offsets belong (eq. 9)."""
    return offset.clamp(-reach, reach) + reach
