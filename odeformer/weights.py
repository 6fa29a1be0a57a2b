"""Weights over depth: ``WEIGHTS[name](n_layers, make_block, **options)`` holds blocks and gives the field they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from odeformer.block import Block, block_field
from odeformer.context import Context


class Blocks(nn.ModuleList):
    """The blocks that hold the weights, ``n_blocks`` of them; layer i is ``self[self.index(i)]``."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block], n_blocks: int | None = None):
        super().__init__(make_block() for _ in range(n_layers if n_blocks is None else n_blocks))
        self.n_layers = n_layers

    def __getitem__(self, index: Any) -> Any:
        """A block, or a plain nn.ModuleList for a slice."""
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def index(self, layer: int) -> int:
        """Which block a layer uses."""
        return layer

    def pieces(self, coupling: str | type, context: Context) -> list[tuple[float, float, Any]]:
        """The field of each layer, with where it begins and ends."""
        return [(float(i), float(i + 1), block_field(self[self.index(i)], coupling, context, i))
                for i in range(self.n_layers)]

    def field(self, coupling: str | type, context: Context) -> Any:
        """The field over [0, n_layers]."""
        return LayeredField(self.pieces(coupling, context))


class Piecewise(Blocks):
    """One block a layer: f is block i between l = i and i + 1, and jumps at whole l."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block]):
        super().__init__(n_layers, make_block)


class Shared(Blocks):
    """One block for all depths: an autonomous field, smooth in l unless layers are dropped."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block]):
        super().__init__(n_layers, make_block, 1)

    def index(self, layer: int) -> int:
        """0."""
        return 0

    def field(self, coupling: str | type, context: Context) -> Any:
        """The field over [0, n_layers]: one piece, where no layer is dropped."""
        if context.keep is not None:
            return super().field(coupling, context)
        return block_field(self[0], coupling, context)


class LayeredField:
    """A field given piece by piece; solvers use ``pieces`` and never call it as a whole."""

    def __init__(self, pieces: list[tuple[float, float, Any]]):
        self.pieces = pieces

    def __call__(self, z: Any, l: Any) -> Any:
        """The piece that holds l; at a boundary the one that begins there."""
        at = float(l)
        for start, stop, f in self.pieces:
            if start <= at < stop:
                return f(z, l)
        return self.pieces[-1][2](z, l)


WEIGHTS = {
    "piecewise": Piecewise,
    "shared": Shared,
}
