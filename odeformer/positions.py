"""Where tokens stand: ``POSITIONS[name](max_seq_len, d_model, **options)``, called ``(n_tokens)``.

What a call returns is added to the embedding; ``rotary(n_tokens, head_dim, device)`` is what attention turns queries
and keys by, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rotary(NamedTuple):
    """Tables of cos and sin (positions, head_dim / 2), float32, and which coordinates make a pair."""

    cos: Tensor
    sin: Tensor
    layout: str = "half"

    def turn(self, x: Tensor) -> Tensor:
        """x (batch, heads, tokens, head_dim) turned; its last token stands at the last position."""
        n = x.shape[2]
        cos, sin = self.cos[-n:], self.sin[-n:]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class NoPosition(nn.Module):
    """Nothing is added, nothing turned."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__()

    def forward(self, n_tokens: int) -> float | Tensor:
        """What is added to the embedding: 0, or (n_tokens, d_model)."""
        return 0.0

    def rotary(self, n_tokens: int, head_dim: int, device: torch.device) -> Rotary | None:
        """What attention turns queries and keys by."""
        return None


class LearnedPosition(NoPosition):
    """A table with one learned row a position."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__(max_seq_len, d_model)
        self.table = nn.Parameter(torch.empty(max_seq_len, d_model).normal_(std=d_model**-0.5))

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[:n_tokens]


class SinusoidalPosition(NoPosition):
    """sin and cos of position / 10000^(2i / d_model), in turn (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, max_seq_len: int, d_model: int):
        super().__init__(max_seq_len, d_model)
        position = torch.arange(max_seq_len, dtype=torch.float64)[:, None]
        pair = torch.arange(d_model, dtype=torch.float64).div(2, rounding_mode="floor")
        angle = position * 10000.0 ** (-2 * pair / d_model)
        even = torch.arange(d_model) % 2 == 0
        self.register_buffer("table", torch.where(even, angle.sin(), angle.cos()).float(), persistent=False)

    def forward(self, n_tokens: int) -> Tensor:
        """(n_tokens, d_model)."""
        return self.table[:n_tokens]


class RotaryPosition(NoPosition):
    """Rotary position embedding (Su et al. 2021): attention sees positions only through j - i."""

    turns = True  # attention must take ``rotary``, and head_dim must be even

    def __init__(self, max_seq_len: int, d_model: int, *, base: float = 10000.0):
        super().__init__(max_seq_len, d_model)
        self.base = base

    def rotary(self, n_tokens: int, head_dim: int, device: torch.device) -> Rotary:
        pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
        angle = torch.arange(n_tokens, dtype=torch.float64, device=device)[:, None] * self.base ** (-pair / head_dim)
        return Rotary(angle.cos().float(), angle.sin().float())


POSITIONS = {
    "none": NoPosition,
    "learned": LearnedPosition,
    "sinusoidal": SinusoidalPosition,
    "rope": RotaryPosition,
}
