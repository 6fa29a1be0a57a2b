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


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """(n_queries, n_keys): query i, counted from the end of the keys, sees keys up to itself."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


def visible(mask: Tensor | None, causal: bool, n_queries: int, n_keys: int, device: torch.device) -> Tensor | None:
    """What each query may see, broadcastable to (batch, heads, n_queries, n_keys); None where all is visible.

    ``mask``: (batch, n_keys), True = real; or already (batch | 1, heads | 1, n_queries | 1, n_keys).
    """
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    if not causal:
        return mask
    future = causal_mask(n_queries, n_keys, device)
    return future if mask is None else mask & future
