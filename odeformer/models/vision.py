"""VisionEncoder: images to class logits (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.block import BlockConfig
from odeformer.depth import DepthConfig
from odeformer.grid_positions import GRID_POSITIONS
from odeformer.heads import Pooler
from odeformer.masks import check_mask
from odeformer.models.base import DepthModel
from odeformer.positions import Rotary
from odeformer.tables import at_least, build, check_kinds

POOLINGS = {  # states (batch, tokens, d_model), the class token first where there is one -> what the head sees
    "mean": lambda states: states.mean(1),
    "class_token": lambda states: states[:, 0],
    "class_and_mean": lambda states: torch.cat([states[:, 0], states[:, 1:].mean(1)], -1),
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision encoder for images of ``image_size`` pixels a side, cut into patches of ``patch_size``.

    ``pooling``: "mean" over the patches; "class_token", a learned token before them whose state is read out; or
    "class_and_mean", that state with the mean over the patches behind it (DINOv2). ``n_classes`` None: the model gives
    its states. ``class_position``: the class token has a learned position, too. ``mask_token``: a learned vector takes
    the place of patches that ``embed`` is told to hide. ``pooler``: there is a ``Pooler`` beside the states
    (``model.pooled(states)``). ``origin``: see TextConfig.
    ``block.position`` is a key of GRID_POSITIONS. Images of other sizes, square or not, may be passed as well.
    """

    image_size: int
    patch_size: int
    n_classes: int | None
    n_layers: int
    block: BlockConfig
    channels: int = 3
    pooling: str = "mean"
    depth: DepthConfig = field(default_factory=DepthConfig)
    class_position: bool = False
    mask_token: bool = False
    pooler: bool = False
    origin: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("image_size", "patch_size", "channels"):
            at_least(name, getattr(self, name), 1)
        if self.n_classes is not None:
            at_least("n_classes", self.n_classes, 1)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size; got {self.image_size}, {self.patch_size}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        for name in ("class_position", "pooler"):
            if getattr(self, name) and self.pooling == "mean":
                raise ValueError(f"{name} is for a model with a class token, got pooling 'mean'")
        if self.pooler and self.n_classes is not None:
            raise ValueError(f"pooler is for a model that gives its states, got n_classes = {self.n_classes}")

    @property
    def n_tokens(self) -> int:
        """Of an image of this size: its patches, and the class token where there is one."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling != "mean")


class VisionEncoder(DepthModel):
    """Images (batch, channels, height, width) to class logits (batch, n_classes).

    Without n_classes: to states (batch, patches, d_model), the class token first where there is one.
    """

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        block, side = config.block, config.image_size // config.patch_size
        self.patch_embedding = nn.Linear(config.channels * config.patch_size**2, block.d_model)
        nn.init.xavier_uniform_(self.patch_embedding.weight)
        nn.init.zeros_(self.patch_embedding.bias)
        self.position = build(GRID_POSITIONS, block.position, "position", side, side, block.d_model,
                              options=block.position_options)
        self.class_token, self.class_position, self.mask_token = (
            nn.Parameter(torch.zeros(block.d_model)) if present else None
            for present in (config.pooling != "mean", config.class_position, config.mask_token))
        self.turning((side, side), torch.empty(0))  # a head_dim that cannot be turned is refused here, not later
        self.head, self.pooler = None, Pooler(block.d_model) if config.pooler else None
        if config.n_classes is not None:
            width = 2 * block.d_model if config.pooling == "class_and_mean" else block.d_model
            self.head = nn.Linear(width, config.n_classes)
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

    def embed(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The state at l = 0 (batch, patches, d_model), the class token first where there is one.

        ``hidden``: bool (batch, patches), True where the mask token takes a patch's place.
        """
        grid = self.grid(images)
        x = self.patch_embedding(self.patches(images))
        if hidden is not None:
            x = self._hide(x, hidden)
        x = x + self.position(*grid)
        if self.class_token is None:
            return x
        first = self.class_token if self.class_position is None else self.class_token + self.class_position
        return torch.cat([first.expand(len(x), 1, -1), x], 1)

    def _hide(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.mask_token is None:
            raise ValueError("hidden is for a model with a mask token; VisionConfig(mask_token=True) makes one")
        check_mask(hidden, x.shape[:2], "hidden")
        return torch.where(hidden.unsqueeze(-1), self.mask_token, x)

    def pooled(self, states: Tensor) -> Tensor:
        """What the pooler makes of the states that the model gave: (batch, d_model)."""
        if self.pooler is None:
            raise ValueError("this model has no pooler; VisionConfig(pooler=True) makes one")
        return self.pooler(states)

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

    def forward(self, images: Tensor, *, hidden: Tensor | None = None, return_solution: bool = False,
                save_states: bool = True) -> Any:
        """Class logits, or the states after the final norm; with ``return_solution`` also the Solution, with the state
        at every step if ``save_states``. ``hidden``: as of ``embed``."""
        z = self.embed(images, hidden)
        solution = self.evolve(z, save=return_solution and save_states,
                               rotary=self.turning(self.grid(images), z))
        states = self.final_norm(solution.z)
        output = states if self.head is None else self.head(POOLINGS[self.config.pooling](states))
        return (output, solution) if return_solution else output
