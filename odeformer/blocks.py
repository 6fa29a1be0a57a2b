"""The blocks that hold a model's weights, and the field that they make layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from odeformer.block import Block, block_field
from odeformer.context import Context


class Blocks(nn.ModuleList):
    """The blocks that hold the weights, ``n_blocks`` of them; layer i is ``self[self.index(i)]``.

    Layers that share a block share its parameters, in one place: copies, moves and files hold them once. Each layer
    draws dropout masks of its own. ``by_layer``: whether every layer is one block, as here.
    """

    by_layer = True

    def __init__(self, n_layers: int, make_block: Callable[[], Block], n_blocks: int | None = None):
        super().__init__(make_block() for _ in range(n_layers if n_blocks is None else n_blocks))
        self.n_layers = n_layers

    def __len__(self) -> int:
        """How many blocks; what else the weights are made of is not counted."""
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self) -> Iterator[Block]:
        return iter([module for name, module in self._modules.items() if name.isdigit()])

    def __getitem__(self, index: Any) -> Any:
        """A block, or a plain nn.ModuleList for a slice."""
        return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def index(self, layer: int) -> int:
        """Which block a layer uses."""
        return layer

    def layer_of(self, block: int) -> int:
        """The first layer, counted from 1, that uses a block."""
        return 1 + next((layer for layer in range(self.n_layers) if self.index(layer) == block), self.n_layers - 1)

    def settle(self, model: nn.Module) -> None:
        """Called when the matrices have been drawn."""

    def pieces(self, coupling: str | type, context: Context) -> list[tuple[float, float, Any]]:
        """The field of each layer, with where it begins and ends."""
        blocks = tuple(iter(self))  # of the iterator, as tuple(self) would count the blocks first
        return [(float(i), float(i + 1), block_field(blocks[self.index(i)], coupling, context, i))
                for i in range(self.n_layers)]

    def field(self, coupling: str | type, context: Context) -> Any:
        """The field over [0, n_layers]."""
        return LayeredField(self.pieces(coupling, context))


class LayeredField:
    """A field given piece by piece; solvers use ``pieces`` and never call it as a whole."""

    def __init__(self, pieces: list[tuple[float, float, Any]]):
        self.pieces = pieces

    @property
    def kinks(self) -> tuple[float, ...]:
        """Depths inside the pieces at which a derivative of theirs jumps."""
        return tuple(l for start, stop, f in self.pieces for l in getattr(f, "kinks", ()) if start < l < stop)

    def __call__(self, z: Any, l: Any) -> Any:
        """The piece that holds l; at a boundary the one that begins there."""
        at = float(l)
        for start, stop, f in self.pieces:
            if start <= at < stop:
                return f(z, l)
        return self.pieces[-1][2](z, l)
