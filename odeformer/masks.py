"""Attention masks: bool, True = may be seen."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor | None, shape: tuple[int, ...], name: str = "mask") -> None:
    """Raises TypeError or ValueError unless mask is None or a bool tensor of the shape (batch, tokens)."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor (True = real token), got "
                        f"{getattr(mask, 'dtype', type(mask).__name__)}")
    if tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape (batch, tokens) = {tuple(shape)}, got {tuple(mask.shape)}")
