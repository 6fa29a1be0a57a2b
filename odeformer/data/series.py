"""What a time series task is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Series:
    """Series of unequal length, and the class or the number that belongs to each, split into train and test.

    ``..._values`` (n, points, channels), float32, NaN where a value is missing; ``..._times`` (n, points), float64;
    ``..._mask`` (n, points), bool, True at real points, which come first; ``..._y`` (n,), int64 where there are
    ``classes``, else float32.
    """

    name: str
    classes: tuple[str, ...]
    train_values: Tensor
    train_times: Tensor
    train_mask: Tensor
    train_y: Tensor
    test_values: Tensor
    test_times: Tensor
    test_mask: Tensor
    test_y: Tensor

    @property
    def n_classes(self) -> int:
        """Classes; 0 where a number is to be predicted."""
        return len(self.classes)

    @property
    def n_channels(self) -> int:
        """Values at a point in time."""
        return self.train_values.shape[-1]


def pad_series(values: Sequence[Tensor], times: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Values (points, channels) and times (points,) of n series as (n, points, channels), (n, points) and the mask.

    Padding comes last and is 0.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(len(t), dtype=torch.bool) for t in times], batch_first=True)
    return pad(list(values), batch_first=True), pad(list(times), batch_first=True), mask


def drop_points(values: Sequence[Tensor], times: Sequence[Tensor], *, share: float,
                generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """The series with every point left out with probability ``share``, times kept; one point always stays."""
    kept = []
    for t in times:
        draws = torch.rand(len(t), generator=generator)
        kept.append((draws >= share) | (draws == draws.max()))
    return ([v[keep] for v, keep in zip(values, kept, strict=True)],
            [t[keep] for t, keep in zip(times, kept, strict=True)])
