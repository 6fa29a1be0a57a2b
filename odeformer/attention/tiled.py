"""Attention with terms by offset, a tile of queries at a time: no numbers of all pairs are kept, forward or
backward (who sees whom is one bool each)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from odeformer.attention.offsets import Offsets, Sums, Tables, gathered, is_batched, summed


def weights_of(query: Tensor, key: Tensor, by_query: Tensor | None, by_key: Tensor | None, seen: Tensor | None,
               row: Tensor, scale: float) -> Tensor:
    """All attention weights (lines, queries, keys)."""
    scores = (query * scale) @ key.mT
    if by_query is not None or by_key is not None:
        scores = scores + gathered(by_query, by_key, row)
    if seen is None:
        return scores.softmax(-1)
    scores = by_head(scores, seen).masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~seen, 0).flatten(0, 1)


def elementary(query: Tensor, key: Tensor, value: Tensor, by_query: Tensor | None, by_key: Tensor | None,
               table: Tensor, seen: Tensor | None, offsets: Offsets, scale: float) -> Tensor:
    """What ``Attend`` gives, in operations that torch can differentiate again."""
    row = offsets.rows()
    weights = weights_of(query, key, by_query, by_key, seen, row, scale)
    return weights @ value + summed(weights, row, len(table)) @ table


def elementary_gradients(query: Tensor, key: Tensor, value: Tensor, by_query: Tensor | None, by_key: Tensor | None,
                         table: Tensor, seen: Tensor | None, offsets: Offsets, scale: float,
                         gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``elementary``, in operations that torch.vmap knows."""
    row, width = offsets.rows(), 2 * offsets.reach + 1
    weights = weights_of(query, key, by_query, by_key, seen, row, scale)
    d_weights = gradient @ value.mT + gathered(gradient @ table.mT, None, row)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    return (d_scores @ key * scale, d_scores.mT @ query * scale, weights.mT @ gradient,
            None if by_query is None else summed(d_scores, row, width),
            None if by_key is None else summed(d_scores.mT, row.mT, width),
            (summed(weights, row, width).mT @ gradient).sum(0))


def by_head(x: Tensor, seen: Tensor) -> Tensor:
    """(batch x heads, ...) as (batch, heads, ...) where seen has a batch."""
    return x.unflatten(0, (len(seen), -1)) if len(seen) > 1 else x.unsqueeze(0)


class Attend(Function):
    """softmax(scale Q K^T + terms) (V + rows of the table), 0 for queries that see nothing.

    ``query`` (lines, queries, head_dim), ``key`` and ``value`` (lines, keys, head_dim); ``by_query`` (lines, queries,
    rows) and ``by_key`` (lines, keys, rows): terms of the scores, or None; ``table`` (rows, head_dim): what is added to
    the values, each by offset (see ``offsets``). ``seen``: bool (1 or batch, 1, queries, keys), or None.

    As in FlashAttention (Dao et al. 2022) the weights are computed again in backward, from what is kept of each query:
    its largest score and the sum of its exponentials. Gradients of gradients, and many gradients at once under a vmap,
    are those of ``elementary``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, by_query: Tensor | None, by_key: Tensor | None,
                table: Tensor, seen: Tensor | None, offsets: Offsets, scale: float) -> Tensor:
        y, kept = torch.empty_like(value[:, : offsets.n]), query.new_empty(2, *query.shape[:2], 1)
        tiles = Tiles(query, key, by_query, by_key, seen, offsets, scale)
        sums = Sums(query, offsets, True, False)
        for tile, scores in tiles:
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            sums.add(scores, tile)
            mine = torch.bmm(scores, value).add_(sums.by_query[:, tile.queries] @ table)
            y[:, tile.queries] = mine.div_(total)
            kept[0, :, tile.queries], kept[1, :, tile.queries] = most, total
        if seen is not None:
            blind = ~seen.any(-1, keepdim=True)
            by_head(y, seen).masked_fill_(blind, 0)
            by_head(kept[1], seen).masked_fill_(blind, math.inf)  # so that all weights are 0
        ctx.save_for_backward(query, key, value, by_query, by_key, table, seen, y, kept)
        ctx.offsets, ctx.scale = offsets, scale
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, seen, y, (most, total) = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = ctx.needs_input_grad[:6]
            y = elementary(*inputs, seen, ctx.offsets, ctx.scale)
            asked = [x for x, want in zip(inputs, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(y, asked, gradient, create_graph=True))
            return *(next(found) if want else None for want in wanted), None, None, None
        if is_batched(gradient):
            return *elementary_gradients(*inputs, seen, ctx.offsets, ctx.scale, gradient), None, None, None
        query, key, value, by_query, by_key, table = inputs
        offsets, scale = ctx.offsets, ctx.scale
        own = (gradient * y).sum(-1, keepdim=True)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        sums = Sums(query, offsets, by_query is not None, by_key is not None)
        at_offset, terms = Sums(query, offsets, True, False), Tables(gradient @ table.mT, None, offsets)
        for tile, scores in Tiles(query, key, by_query, by_key, seen, offsets, scale):
            weights = scores.sub_(most[:, tile.queries]).exp_().div_(total[:, tile.queries])
            mine = gradient[:, tile.queries]
            d_value.baddbmm_(weights.mT, mine)
            at_offset.add(weights, tile)
            d_scores = torch.empty_like(weights)
            terms.fill(d_scores, tile)
            d_scores.baddbmm_(mine, value.mT)
            d_scores.sub_(own[:, tile.queries]).mul_(weights)
            d_query[:, tile.queries] = torch.bmm(d_scores, key).mul_(scale)
            d_key.baddbmm_(d_scores.mT, query[:, tile.queries], alpha=scale)
            sums.add(d_scores, tile)
        d_table = at_offset.by_query.flatten(0, 1).mT @ gradient.flatten(0, 1)
        return d_query, d_key, d_value, sums.by_query, sums.by_key, d_table, None, None, None


class Tiles:
    """Scores of each tile in turn (lines, queries, keys), in the same memory; of hidden pairs the least there is."""

    def __init__(self, query: Tensor, key: Tensor, by_query: Tensor | None, by_key: Tensor | None,
                 seen: Tensor | None, offsets: Offsets, scale: float):
        self.query, self.key, self.seen, self.offsets, self.scale = query, key, seen, offsets, scale
        self.tables = None if by_query is None and by_key is None else Tables(by_query, by_key, offsets)

    def __iter__(self) -> Any:
        scores, least = None, torch.finfo(self.query.dtype).min
        for tile in self.offsets.tiles():
            query = self.query[:, tile.queries]
            if scores is None or scores.shape[1] != query.shape[1]:
                scores = query.new_empty(*query.shape[:2], self.offsets.m)
            if self.tables is None:
                torch.bmm(query, self.key.mT, out=scores).mul_(self.scale)
            else:
                self.tables.fill(scores, tile)
                scores.baddbmm_(query, self.key.mT, alpha=self.scale)
            if self.seen is not None:
                by_head(scores, self.seen).masked_fill_(~self.seen[..., tile.queries, :], least)
            yield tile, scores
