"""Where the patches of an image stand: ``GRID_POSITIONS[name](rows, columns, d_model, **options)``.

Called ``(rows, columns)`` with the grid of an image, which may be of another size; what comes back is added to the
embedding, row by row. ``rotary(rows, columns, head_dim, device)`` is what attention turns queries and keys by.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.positions import Rotary
from odeformer.tables import finite


class NoGrid(nn.Module):
    """Nothing is added, nothing turned: a bag of patches."""

    def __init__(self, rows: int, columns: int, d_model: int):
        super().__init__()

    def forward(self, rows: int, columns: int) -> float | Tensor:
        """0, or (rows * columns, d_model)."""
        return 0.0

    def rotary(self, rows: int, columns: int, head_dim: int, device: torch.device,
               dtype: torch.dtype = torch.float32) -> Rotary | None:
        """None."""
        return None


class LearnedGrid(NoGrid):
    """A learned vector a patch (Dosovitskiy et al. 2021); for other sizes interpolated bicubically, as they do."""

    def __init__(self, rows: int, columns: int, d_model: int):
        super().__init__(rows, columns, d_model)
        self.table = nn.Parameter(torch.empty(rows, columns, d_model).normal_(std=d_model**-0.5))

    def forward(self, rows: int, columns: int) -> Tensor:
        table = self.table
        if (rows, columns) != table.shape[:2]:
            table = F.interpolate(table.permute(2, 0, 1)[None], (rows, columns), mode="bicubic", antialias=False)
            table = table[0].permute(1, 2, 0)
        return table.flatten(0, 1)


def waves(position: Tensor, width: int) -> Tensor:
    """sin and cos of position / 10000^(2i / width): (...) -> (..., width), all sines first; float64."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width)
    angle = position.double().unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[..., :width]


class SinusoidalGrid(NoGrid):
    """Half of the coordinates from the row, half from the column, in any grid (Chen, Xie & He 2021, MoCo v3).

    Raises ValueError where d_model is no multiple of 4.
    """

    def __init__(self, rows: int, columns: int, d_model: int):
        super().__init__(rows, columns, d_model)
        if d_model % 4:
            raise ValueError(f"d_model must be a multiple of 4 for two-dimensional sinusoids, got {d_model}")
        self.d_model = d_model
        self.register_buffer("at", torch.zeros(()))  # knows the device and the dtype; saved with the model

    def forward(self, rows: int, columns: int) -> Tensor:
        row, column = (waves(torch.arange(n, device=self.at.device), self.d_model // 2) for n in (rows, columns))
        both = torch.cat([row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)], -1)
        return both.flatten(0, 1).to(self.at.dtype)


class RotaryGrid(NoGrid):
    """Axial rotary positions: half of the pairs turn with the row, half with the column (Heo et al. 2024).

    Pair i of head_dim / 4 turns by base^(-4i / head_dim) a row or column. Raises ValueError unless base is above 1.
    """

    turns = True

    def __init__(self, rows: int, columns: int, d_model: int, *, base: float = 100.0):
        super().__init__(rows, columns, d_model)
        finite("base", base, above=1)
        self.base = base

    def rotary(self, rows: int, columns: int, head_dim: int, device: torch.device,
               dtype: torch.dtype = torch.float32) -> Rotary:
        """Tables (rows * columns, head_dim / 2). Raises ValueError where head_dim is no multiple of 4."""
        if head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4 for axial rotary positions, got {head_dim}")
        frequency = self.base ** (-torch.arange(0, head_dim // 2, 2, dtype=torch.float64, device=device)
                                  / (head_dim // 2))
        row, column = (torch.arange(n, dtype=torch.float64, device=device)[:, None] * frequency
                       for n in (rows, columns))
        angle = torch.cat([row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)], -1).flatten(0, 1)
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return Rotary(angle.cos().to(dtype), angle.sin().to(dtype))


GRID_POSITIONS = {
    "none": NoGrid,
    "learned": LearnedGrid,
    "sinusoidal": SinusoidalGrid,
    "rope": RotaryGrid,
}
