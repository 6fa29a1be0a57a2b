"""Absolute positions, added to the embedding: ``POSITIONS[name](max_seq_len, d_model)``, called ``(n_tokens)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoPosition(nn.Module):
    """Nothing is added."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__()

    def forward(self, n_tokens: int) -> float:
        """0."""
        return 0.0


class LearnedPosition(nn.Module):
    """A table with one learned row a position."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_seq_len, d_model).normal_(std=d_model**-0.5))

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[:n_tokens]


class SinusoidalPosition(nn.Module):
    """sin and cos of position / 10000^(2i / d_model), in turn (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__()
        position = torch.arange(max_seq_len, dtype=torch.float64)[:, None]
        pair = torch.arange(d_model, dtype=torch.float64).div(2, rounding_mode="floor")
        angle = position * 10000.0 ** (-2 * pair / d_model)
        even = torch.arange(d_model) % 2 == 0
        self.register_buffer("table", torch.where(even, angle.sin(), angle.cos()).float(), persistent=False)

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[:n_tokens]


POSITIONS = {
    "none": NoPosition,
    "learned": LearnedPosition,
    "sinusoidal": SinusoidalPosition,
}
