"""SeriesEncoder: time series, sampled irregularly, with gaps, of unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.grid_positions import waves
from odeformer.heads import HEADS
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel, check_that
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build, check_kinds, finite, look_up


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Series of ``n_channels`` values at points in time; ``head`` is a key of HEADS with ``n_outputs`` outputs, to
    which ``head_options`` go.

    ``time_scale``: the shortest time, in the unit of the time stamps, that the encoding tells apart; the longest is
    10000 times that.
    """

    n_channels: int
    n_outputs: int
    n_layers: int
    block: BlockConfig
    head: str | type = "regression"
    head_options: Mapping[str, Any] = field(default_factory=dict)
    time_scale: float = 1.0
    depth: DepthConfig = field(default_factory=DepthConfig)

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least("n_channels", self.n_channels, 1)
        at_least("n_outputs", self.n_outputs, 1)
        look_up(HEADS, self.head, "head")
        finite("time_scale", self.time_scale, above=0)
        if self.block.position not in ("none", "rope"):
            raise ValueError(f"position must be 'none' or 'rope' for a series, whose points stand at their times; got "
                             f"{self.block.position!r}")


class SeriesEncoder(DepthModel):
    """Values (batch, points, n_channels) at times (batch, points) to outputs, of the whole series or of each point.

    A value that is NaN is missing: it enters as 0 and a flag says so. ``mask`` (batch, points) is True at real points.
    """

    def __init__(self, config: SeriesConfig):
        super().__init__(config)
        d_model = config.block.d_model
        self.value_embedding = nn.Linear(2 * config.n_channels, d_model)
        self.position = build(POSITIONS, config.block.position, "position", 1, d_model,
                              options=config.block.position_options)
        self.position.check(d_model // config.block.n_heads)
        self.head = build(HEADS, config.head, "head", d_model, config.n_outputs, options=config.head_options)
        self.initialize()

    def embed(self, values: Tensor, times: Tensor) -> Tensor:
        """The state at l = 0 (batch, points, d_model): values, flags of what is there, and waves of the time."""
        missing = values.isnan()
        z = self.value_embedding(torch.cat([values.masked_fill(missing, 0), (~missing).to(values.dtype)], -1))
        return z + waves(times.double() / self.config.time_scale, z.shape[-1]).to(z.dtype)

    def forward(self, values: Tensor, times: Tensor, mask: Tensor | None = None, *, return_solution: bool = False,
                save_states: bool = True) -> Any:
        """What the head makes of the states; with ``return_solution`` also the Solution.

        Raises TypeError or ValueError for shapes that do not fit, and for times or values that are infinite.
        """
        self._check(values, times, mask)
        if mask is not None:
            values, times = values.masked_fill(~mask.unsqueeze(-1), 0), times.masked_fill(~mask, 0)
        solution = self.evolve(self.embed(values, times), mask, save=return_solution and save_states)
        outputs = self.head(self.final_norm(solution.z), mask)
        return (outputs, solution) if return_solution else outputs

    def _check(self, values: Tensor, times: Tensor, mask: Tensor | None) -> None:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"values must be a floating-point tensor, got "
                            f"{getattr(values, 'dtype', type(values).__name__)}")
        if values.dim() != 3 or values.shape[-1] != self.config.n_channels or not values.numel():
            raise ValueError(f"values must have the shape (batch, points, n_channels = {self.config.n_channels}), none "
                             f"of them 0; got {tuple(values.shape)}")
        if not isinstance(times, Tensor) or times.shape != values.shape[:2]:
            raise ValueError(f"times must be a tensor of the shape (batch, points) = {tuple(values.shape[:2])}, got "
                             f"{tuple(getattr(times, 'shape', ())) or type(times).__name__}")
        check_mask(mask, values.shape[:2])
        real = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
        check_that((times.isfinite() | ~real).all(), "times must be finite at real points")
        check_that(~(values.isinf() & real.unsqueeze(-1)).any(), "values must be finite, or NaN where they are missing")
