"""Which examples are trained on at which step: a function of the seed and the step alone, so nothing has to be kept."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchOrder:
    """Epochs of ``n`` examples, each in a new random order, cut into batches of ``size``.

    What is left at the end of an epoch, less than a batch, is left out; where there are fewer than ``size`` examples, a
    batch holds all.
    """

    def __init__(self, n: int, size: int, seed: int):
        self.n, self.size, self.seed = n, size, seed
        self.per_epoch = max(1, n // size)
        self._epoch, self._rows = -1, torch.empty(0)

    def rows(self, step: int) -> Tensor:
        """The examples of a step, which counts from 0 (int64)."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:  # drawn once an epoch
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self._epoch, self._rows = epoch, torch.randperm(self.n, generator=generator)
        return self._rows[position * self.size : (position + 1) * self.size]


def put_aside(n: int, share: float) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to validate on, a share of n examples, at least one of each; always the same ones.

    With share = 0 all rows are to train on, in their order. Raises ValueError where nothing would be left.
    """
    if not share:
        return torch.arange(n), torch.arange(0)
    n_valid = max(1, round(n * share))
    if n_valid >= n:
        raise ValueError(f"valid = {share} of {n} examples leaves none to train on")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    return order[n_valid:].sort().values, order[:n_valid].sort().values
