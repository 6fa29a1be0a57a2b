"""Input injection: a field that is drawn back to the state it started from, so that its equilibrium depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from odeformer.blocks import LayeredField
from odeformer.tables import look_up
from odeformer.weights import WEIGHTS

Factor = float | Tensor


def inject(f: Any, z0: Tensor, keep: Sequence[Factor] | None = None) -> Any:
    """dz/dl = f(z, l) + z0 - z, whose equilibrium is z* = z0 + f(z*) (Bai, Kolter & Koltun 2019).

    z0: the state at l = 0 (batch, tokens, d_model). With Euler and h = 1 a step gives z0 + f(z): layers that see the
    input again each time. Pieces stay pieces and parts stay parts: the first part carries z0 - z, so that the parts add
    up to the whole and an evaluation of each counts as before. ``keep``: for each layer a factor of its increment
    (layer drop), which then acts on z0 - z, too.

    Raises ValueError for ``keep`` beside a field without a piece for each layer.
    """
    pieces = getattr(f, "pieces", None)
    if keep is not None and len(pieces or ()) != len(keep):
        raise ValueError(f"keep must have a factor for each piece of the field, of which there are "
                         f"{len(pieces or ())}; got {len(keep)}")
    if not pieces:
        return Injected(f, z0)
    factors = [None] * len(pieces) if keep is None else keep
    return LayeredField([(a, b, Injected(piece, z0, factor))
                         for (a, b, piece), factor in zip(pieces, factors, strict=True)])


class Injected:
    """f(z, l) + (z0 - z), the latter times ``keep`` if given; whatever else solvers ask of f goes along."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], z0: Tensor, keep: Factor | None = None):
        self.f, self.z0, self.keep = f, z0, keep
        parts = getattr(f, "parts", None)
        self.parts = (Injected(parts[0], z0, keep), *parts[1:]) if parts else None
        self.splitting = getattr(f, "splitting", None)
        self.breakpoints = getattr(f, "breakpoints", None)
        self.kinks = getattr(f, "kinks", ())

    def __call__(self, z: Tensor, l: Tensor) -> Tensor:
        """dz/dl, shaped like z. Padding, where z stays z0, is not moved."""
        pull = self.z0.to(z.dtype) - z
        return self.f(z, l) + (pull if self.keep is None else pull * self.keep)

    def select(self, rows: Tensor) -> Injected:
        """The field for some rows of the batch."""
        select = getattr(self.f, "select", None)
        keep = self.keep[rows] if isinstance(self.keep, Tensor) and self.keep.dim() else self.keep
        return Injected(self.f if select is None else select(rows), self.z0[rows], keep)


def check_equilibrium(solver: Any, depth: Any, n_layers: int) -> None:
    """Raises ValueError where a model (its DepthConfig is ``depth``) has no equilibrium that depends on its input, or
    options that mean nothing there."""
    if not getattr(solver, "to_equilibrium", False):
        return
    name = solver.name
    if not depth.injection:
        raise ValueError(f"solver {name!r} needs injection=True: it goes to where the field vanishes, and without the "
                         "input in the field that does not depend on the input")
    varies = n_layers > 1 or not getattr(look_up(WEIGHTS, depth.weights, "weights"), "by_layer", True)
    if isinstance(depth.weights, str) and depth.weights != "shared" and varies:
        raise ValueError(f"solver {name!r} needs a field that is the same at every depth: weights='shared', got "
                         f"{depth.weights!r}")
    for option, off in (("layer_drop", 0), ("fusion", None), ("steer", 0)):
        if getattr(depth, option) != off:
            raise ValueError(f"{option} is for layers that are passed one after the other, and solver {name!r} goes "
                             f"straight to an equilibrium; got {getattr(depth, option)!r}")
