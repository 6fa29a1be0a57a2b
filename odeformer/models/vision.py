"""VisionEncoder: images to class logits (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.models.base import DepthModel
from odeformer.positions import POSITIONS
from odeformer.tables import at_least, build


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision encoder for square images of ``image_size`` pixels a side, cut into patches of ``patch_size``."""

    image_size: int
    patch_size: int
    n_classes: int
    n_layers: int
    block: BlockConfig
    channels: int = 3
    depth: DepthConfig = field(default_factory=DepthConfig)

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "n_classes", "channels"):
            at_least(name, getattr(self, name), 1)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size; got {self.image_size}, {self.patch_size}")


class VisionEncoder(DepthModel):
    """Images (batch, channels, height, width) to class logits (batch, n_classes): the mean over patches, normed."""

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        d_model, side = config.block.d_model, config.image_size // config.patch_size
        self.patch_embedding = nn.Linear(config.channels * config.patch_size**2, d_model)
        nn.init.xavier_uniform_(self.patch_embedding.weight)
        nn.init.zeros_(self.patch_embedding.bias)
        self.position = build(POSITIONS, config.block.position, "position", side * side, d_model,
                              options=config.block.position_options)
        self.head = nn.Linear(d_model, config.n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.initialize()

    def patches(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, patches, channels * patch_size²), row by row."""
        p = self.config.patch_size
        x = images.unfold(2, p, p).unfold(3, p, p)  # (batch, channels, rows, columns, p, p)
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def embed(self, images: Tensor) -> Tensor:
        """The state at l = 0 (batch, patches, d_model)."""
        config = self.config
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError(f"images must be a floating-point tensor, got "
                            f"{getattr(images, 'dtype', type(images).__name__)}")
        wanted = (config.channels, config.image_size, config.image_size)
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted:
            raise ValueError(f"images must have the shape (batch, channels, height, width) = (batch, "
                             f"{', '.join(map(str, wanted))}), got {tuple(images.shape)}")
        x = self.patch_embedding(self.patches(images))
        return x + self.position(x.shape[1])

    def forward(self, images: Tensor, *, return_solution: bool = False, save_states: bool = True) -> Any:
        """Class logits; with ``return_solution`` also the Solution, with the state at every step if ``save_states``."""
        solution = self.evolve(self.embed(images), None, save=return_solution and save_states)
        logits = self.head(self.final_norm(solution.z).mean(1))
        return (logits, solution) if return_solution else logits
