"""VisionEncoder: images to class logits (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.grid_positions import GRID_POSITIONS
from odeformer.models.base import DepthModel
from odeformer.positions import Rotary
from odeformer.tables import at_least, build

POOLINGS = ("mean", "class_token")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision encoder for images of ``image_size`` pixels a side, cut into patches of ``patch_size``.

    ``pooling``: "mean" over the patches, or "class_token", a learned token before them whose state is read out.
    ``block.position`` is a key of GRID_POSITIONS. Images of other sizes, square or not, may be passed as well.
    """

    image_size: int
    patch_size: int
    n_classes: int
    n_layers: int
    block: BlockConfig
    channels: int = 3
    pooling: str = "mean"
    depth: DepthConfig = field(default_factory=DepthConfig)

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "n_classes", "channels"):
            at_least(name, getattr(self, name), 1)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size; got {self.image_size}, {self.patch_size}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")


class VisionEncoder(DepthModel):
    """Images (batch, channels, height, width) to class logits (batch, n_classes)."""

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        block, side = config.block, config.image_size // config.patch_size
        self.patch_embedding = nn.Linear(config.channels * config.patch_size**2, block.d_model)
        nn.init.xavier_uniform_(self.patch_embedding.weight)
        nn.init.zeros_(self.patch_embedding.bias)
        self.position = build(GRID_POSITIONS, block.position, "position", side, side, block.d_model,
                              options=block.position_options)
        self.class_token = nn.Parameter(torch.zeros(block.d_model)) if config.pooling == "class_token" else None
        self.turning((side, side), torch.empty(0))  # a head_dim that cannot be turned is refused here, not later
        self.head = nn.Linear(block.d_model, config.n_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.initialize()

    def patches(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, patches, channels * patch_size²), row by row."""
        p = self.config.patch_size
        x = images.unfold(2, p, p).unfold(3, p, p)  # (batch, channels, rows, columns, p, p)
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches. Raises TypeError or ValueError for what is no batch of such images."""
        config, p = self.config, self.config.patch_size
        if not isinstance(images, Tensor) or not images.is_floating_point():
            raise TypeError(f"images must be a floating-point tensor, got "
                            f"{getattr(images, 'dtype', type(images).__name__)}")
        if images.dim() != 4 or images.shape[1] != config.channels:
            raise ValueError(f"images must have the shape (batch, channels = {config.channels}, height, width), got "
                             f"{tuple(images.shape)}")
        height, width = images.shape[2:]
        if not height or not width or height % p or width % p:
            raise ValueError(f"images must have a height and a width that are multiples of patch_size = {p}, got "
                             f"{height} x {width}")
        if not len(images):
            raise ValueError(f"images must hold at least one image, got the shape {tuple(images.shape)}")
        return height // p, width // p

    def embed(self, images: Tensor) -> Tensor:
        """The state at l = 0 (batch, patches, d_model), the class token first where there is one."""
        grid = self.grid(images)
        x = self.patch_embedding(self.patches(images)) + self.position(*grid)
        if self.class_token is None:
            return x
        return torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)

    def rotary(self, z: Tensor, n_before: int = 0) -> Rotary | None:
        """What attention turns queries and keys by in an image of the configured size.

        Raises ValueError for a state of another number of patches, whose grid nobody has told.
        """
        side = self.config.image_size // self.config.patch_size
        rotary, n = self.turning((side, side), z), z.shape[1] - (self.class_token is not None)
        if rotary is not None and n != side**2:
            raise ValueError(f"z holds {n} patches and an image of image_size {side**2}; give evolve "
                             "rotary=model.turning((rows, columns), z)")
        return rotary

    def turning(self, grid: tuple[int, int], z: Tensor) -> Rotary | None:
        """What attention turns queries and keys by in a grid of patches; a class token is not turned."""
        block = self.config.block
        rotary = self.position.rotary(*grid, block.d_model // block.n_heads, z.device, z.dtype)
        if rotary is None or self.class_token is None:
            return rotary
        return rotary._replace(cos=F.pad(rotary.cos, (0, 0, 1, 0), value=1.0), sin=F.pad(rotary.sin, (0, 0, 1, 0)))

    def forward(self, images: Tensor, *, return_solution: bool = False, save_states: bool = True) -> Any:
        """Class logits; with ``return_solution`` also the Solution, with the state at every step if ``save_states``."""
        z = self.embed(images)
        solution = self.evolve(z, save=return_solution and save_states,
                               rotary=self.turning(self.grid(images), z))
        states = self.final_norm(solution.z)
        logits = self.head(states.mean(1) if self.class_token is None else states[:, 0])
        return (logits, solution) if return_solution else logits
