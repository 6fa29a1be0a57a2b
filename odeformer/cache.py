"""Keys and values of earlier tokens, so that a decoder reads each token once.

A step of a solver evaluates the field several times, each time from another state, so keys and values belong to an
evaluation, not to a layer: the exact cache has one slot for each self-attention evaluation of a forward pass, in order.
With it, cached and uncached outputs are equal for every fixed-step solver. ``CACHES`` names cheaper policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from odeformer.tables import at_least, build

ROOM = 64  # tokens for which a slot makes room at first; then it doubles


class Slot:
    """Keys and values (batch, heads, tokens, head_dim) of one evaluation, in buffers that grow by doubling."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.length = 0

    def join(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The first ``start`` with these behind them, which are stored, but count as held only from ``keep`` on."""
        if torch.is_grad_enabled():  # a graph forbids writing in place
            self.key, self.value = self.beside(start, key, value)
        else:
            self.key, self.value = (self._written(buffer, start, new)
                                    for buffer, new in ((self.key, key), (self.value, value)))
        stop = start + key.shape[2]
        return self.key[:, :, :stop], self.value[:, :, :stop]

    def beside(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The first ``start`` with these behind them, which are not stored."""
        if not start:
            return key, value
        return tuple(torch.cat([old[:, :, :start], new], 2) for old, new in ((self.key, key), (self.value, value)))

    def keep(self, n_new: int) -> None:
        """n_new tokens more, joined before, count as held."""
        self.length += n_new

    def _written(self, buffer: Tensor | None, start: int, new: Tensor) -> Tensor:
        stop = start + new.shape[2]
        if buffer is None or buffer.shape[2] < stop or buffer.requires_grad:
            room = max(stop, ROOM, 0 if buffer is None else 2 * buffer.shape[2])
            grown = new.new_empty(*new.shape[:2], room, new.shape[3])
            if start:
                grown[:, :, :start] = buffer[:, :, :start]
            buffer = grown
        buffer[:, :, start:stop] = new
        return buffer

    def keep_last(self, n: int) -> None:
        """Forget all but the last n tokens."""
        if self.length > n:
            self.key, self.value = (x[:, :, self.length - n:self.length].clone() for x in (self.key, self.value))
            self.length = n

    def reorder(self, index: Tensor) -> None:
        """Row i becomes row index[i]."""
        if self.key is not None:
            self.key, self.value = self.key[:, :, :self.length][index], self.value[:, :, :self.length][index]

    def bytes(self) -> int:
        """Of the keys and values held, without the room kept for more."""
        return 0 if self.key is None else sum(x[:, :, :self.length].nbytes for x in (self.key, self.value))


class MemorySlot(Slot):
    """Keys and values of a memory, which is read as a whole by the first pass, and held at once for later stages."""

    def join(self, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if key.shape[2]:
            self.key, self.value, self.length = key, value, key.shape[2]
        return self.key, self.value


class Cache:
    """The exact policy: one slot for each self-attention evaluation of a pass, layers x evaluations x tokens in all.

    ``n_tokens``: tokens read so far, padding included. ``mask``: (batch, n_tokens), True = real, or None. Made by
    ``model.new_cache()`` and filled by ``logits, cache = model(tokens, cache=cache)``. Nothing counts as read until a
    pass has ended, so a pass that failed may be made again.
    """

    def __init__(self) -> None:
        self.slots: dict[Any, Slot] = {}
        self.n_tokens = 0
        self.mask: Tensor | None = None
        self.batch: int | None = None
        self.n_evaluations: int | None = None  # self-attention evaluations of a pass

    def joined_mask(self, mask: Tensor | None, batch: int, n_new: int) -> Tensor | None:
        """The mask of all tokens so far and n_new more; None where none was ever given.

        Raises ValueError where the batch is another.
        """
        if self.batch not in (None, batch):
            raise ValueError(f"cache holds a batch of {self.batch}, got one of {batch}; cache.reorder(index) makes "
                             "rows of others")
        if mask is None and self.mask is None:
            return None
        new = mask if mask is not None else self.mask.new_ones(batch, n_new)
        old = self.mask if self.mask is not None else new.new_ones(batch, self.n_tokens)
        return torch.cat([old, new], 1)

    def begin(self, batch: int, n_new: int, mask: Tensor | None) -> CachePass:
        """A pass over n_new more tokens, with their mask. Raises ValueError where the batch is another."""
        if not self.n_tokens:
            self.slots.clear()  # of a first pass that failed
        return CachePass(self, batch, n_new, mask)

    def slot(self, evaluation: int, layer: int, first: bool) -> tuple[Slot, bool]:
        """The slot of an evaluation (counted over the pass), and whether its tokens are kept there."""
        return self.slots.setdefault(("self", evaluation), Slot()), True

    def trim(self) -> None:
        """Called at the end of a pass."""

    def reorder(self, index: Tensor) -> None:
        """Row i becomes row index[i], in all that is kept: for beam search. index: int64 (new batch,).

        Raises TypeError or ValueError for another index; nothing has moved then.
        """
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            raise TypeError(f"index must be an int64 tensor, got {getattr(index, 'dtype', type(index).__name__)}")
        if index.dim() != 1:
            raise ValueError(f"index must have the shape (new batch,), got {tuple(index.shape)}")
        if self.batch is not None:
            inside = ((index >= 0) & (index < self.batch)).all()
            if index.is_cuda:
                torch._assert_async(inside, f"index outside the batch of {self.batch}")
            elif not inside:
                raise ValueError(f"index must hold rows of the batch, 0 to {self.batch - 1}, got {index.tolist()}")
        for slot in self.slots.values():
            slot.reorder(index)
        if self.mask is not None:
            self.mask = self.mask[index]
        self.batch = len(index)

    def bytes(self) -> int:
        """What the keys and values take."""
        return sum(slot.bytes() for slot in self.slots.values())

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({len(self.slots)} slots, {self.n_tokens} tokens, "
                f"{self.bytes() / 2**20:.2f} MiB)")


class FirstStageCache(Cache):
    """One slot a layer: all later evaluations in a layer see earlier tokens as its first evaluation saw them.

    As small as the cache of a plain Transformer, and an approximation for solvers with more evaluations a layer.
    Weights "shared" are one field for all depths, so there it has one slot in all.
    """

    def slot(self, evaluation: int, layer: int, first: bool) -> tuple[Slot, bool]:
        return self.slots.setdefault(("self", layer), Slot()), first


class WindowCache(Cache):
    """Exact slots that forget all but the last ``window`` tokens: memory that does not grow, an approximation.

    Exact where the attention's own window is no wider. Raises ValueError for a window below 1.
    """

    def __init__(self, window: int = 128):
        at_least("window", window, 1)
        super().__init__()
        self.window = window

    def trim(self) -> None:
        for key, slot in self.slots.items():
            if key[0] == "self":
                slot.keep_last(self.window - 1)


class CachePass:
    """One forward pass with a cache: hands out slots, and makes the pass count at its end."""

    def __init__(self, cache: Cache, batch: int, n_new: int, mask: Tensor | None):
        self.cache, self.batch, self.n_new = cache, batch, n_new
        self.mask = cache.joined_mask(mask, batch, n_new)
        self._evaluations = 0
        self._layers: set[int] = set()
        self._crossings = count()
        self._kept: list[Slot] = []

    def attention(self, layer: int) -> Any:
        """The slot of the next self-attention evaluation, to be called (key, value)."""
        slot, kept = self.cache.slot(self._evaluations, layer, layer not in self._layers)
        self._evaluations += 1
        self._layers.add(layer)
        if kept:
            self._kept.append(slot)
        return partial(slot.join if kept else slot.beside, slot.length)

    def memory(self, site: Any, moving: bool) -> Slot:
        """The slot of a cross-attention: its keys and values are those of the memory, the same in every evaluation
        unless its weights are ``moving`` with depth."""
        number = next(self._crossings) if moving else id(site)
        return self.cache.slots.setdefault(("cross", number), MemorySlot())

    def end(self) -> None:
        """Count the tokens as read. Raises ValueError where another solver or model read the earlier ones."""
        if self.cache.n_evaluations not in (None, self._evaluations):
            raise ValueError(f"cache holds keys and values of {self.cache.n_evaluations} evaluations, got a pass of "
                             f"{self._evaluations}: it goes with the model, solver and steps that filled it")
        for slot in self._kept:
            slot.keep(self.n_new)
        self.cache.n_tokens += self.n_new
        self.cache.n_evaluations, self.cache.mask, self.cache.batch = self._evaluations, self.mask, self.batch
        self.cache.trim()


CACHES = {
    "exact": Cache,
    "first_stage": FirstStageCache,
    "window": WindowCache,
}


def make_cache(policy: str | type = "exact", options: Mapping[str, Any] | None = None) -> Cache:
    """An empty cache of a policy of CACHES, or of an own class."""
    return build(CACHES, policy, "cache policy", options=options)
