"""Weights over depth: ``WEIGHTS[name](n_layers, make_block, **options)`` holds blocks and gives the field they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odeformer.block import Block, block_field
from odeformer.blocks import Blocks, LayeredField
from odeformer.context import Context
from odeformer.smooth_weights import SMOOTH
from odeformer.tables import at_least

__all__ = ["WEIGHTS", "Blocks", "LayeredField"]


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


class Cycle(Blocks):
    """``n_knots`` blocks in turn: 0 1 2 0 1 2 (CYCLE of Takase & Kiyono 2021). n_knots: half of the layers if None."""

    def __init__(self, n_layers: int, make_block: Callable[[], Block], *, n_knots: int | None = None):
        super().__init__(n_layers, make_block, _n_knots(n_knots, n_layers))

    def index(self, layer: int) -> int:
        """layer mod n_knots."""
        return layer % len(self)


class CycleReversed(Cycle):
    """As ``cycle``, the last round backwards: 0 1 2 2 1 0 (CYCLE (REV) of Takase & Kiyono 2021)."""

    def index(self, layer: int) -> int:
        """layer mod n_knots, counted from the other end in the last round (where there is more than one)."""
        round_, place = divmod(layer, len(self))
        return len(self) - 1 - place if 0 < round_ == (self.n_layers - 1) // len(self) else place


class Sequence(Cycle):
    """``n_knots`` blocks, each for neighbouring layers: 0 0 1 1 2 2 (SEQUENCE of Takase & Kiyono 2021).

    Groups differ by at most one layer where n_knots does not divide n_layers.
    """

    def index(self, layer: int) -> int:
        """layer n_knots / n_layers, rounded down."""
        return layer * len(self) // self.n_layers


def _n_knots(n_knots: int | None, n_layers: int) -> int:
    """How many blocks. Raises TypeError or ValueError unless it is an int from 1 to n_layers."""
    if n_knots is None:
        return (n_layers + 1) // 2
    at_least("n_knots", n_knots, 1)
    if n_knots > n_layers:
        raise ValueError(f"n_knots must be at most n_layers = {n_layers}, got {n_knots}")
    return n_knots


WEIGHTS = {
    "piecewise": Piecewise,
    "shared": Shared,
    "cycle": Cycle,
    "cycle_rev": CycleReversed,
    "sequence": Sequence,
    **SMOOTH,
}
