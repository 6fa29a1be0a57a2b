"""What an image classification task is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Square images (n, channels, size, size), float32, and their classes (n,), split into train and test."""

    name: str
    n_classes: int
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def channels(self) -> int:
        """Colour channels."""
        return self.train_x.shape[1]

    @property
    def size(self) -> int:
        """Pixels a side."""
        return self.train_x.shape[-1]
