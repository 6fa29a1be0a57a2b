"""Finds where f jumps in l, after an adaptive solve that had to creep up to something."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from solvers.base import State, in_functorch, tensors
from solvers.checks import zeroed
from solvers.grid import Piece

SMALL = 0.02  # of the median step: a step that makes one suspicious
STEEP = 30.0  # times the change of f over an equal stretch beside it: a jump


def warn_of_jump(pieces: Sequence[Piece], z: State, steps: Sequence[float], n_rejected: int,
                 mask: Tensor | None) -> None:
    """Warns (UserWarning) where f seems to jump inside a piece: steps shrank there to a small part of what they were,
    and f(z, l) for one and the same z changes across it as it does not beside it.

    A few evaluations of f, which are not counted, and only after a solve with steps that small; none after one with
    steps for each row.
    """
    if n_rejected < 2 or len(steps) < 3 or isinstance(steps[0], list) or in_functorch():
        return
    sizes = [abs(h) for h in steps]
    smallest = min(sizes)
    if smallest > SMALL * median(sizes):
        return
    l = pieces[0].l0 + sum(steps[:sizes.index(smallest)])
    piece = next((p for p in pieces if (l - p.l0) * (p.l1 - l) > 0), None)
    if piece is None or piece.rescaled:
        return
    width = 8 * smallest
    inside = (l - 3 * width - min(piece.l0, piece.l1), max(piece.l0, piece.l1) - l - width)
    if min(inside) < 0:
        return
    dtype = torch.promote_types(tensors(z)[0].dtype, torch.float32)
    if width < 8 * torch.finfo(dtype).eps * max(1.0, abs(l)):
        width = 8 * torch.finfo(dtype).eps * max(1.0, abs(l))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before, below, above = (_values(piece, z, l + shift, mask) for shift in (-3 * width, -width, width))
    beside, across = (before - below).norm(), (above - below).norm()
    if across > STEEP * beside + 100 * torch.finfo(dtype).eps * below.norm():
        warnings.warn(f"f seems to jump near l = {l:.6g}, where steps shrank to {smallest:.1g}: name the depths at "
                      "which it jumps in breakpoints (or give f as pieces), which costs fewer evaluations and is more "
                      "exact", UserWarning, stacklevel=3)


def _values(piece: Piece, z: State, l: float, mask: Tensor | None) -> Tensor:
    first = tensors(z)[0]
    dtype = first.dtype.to_real() if first.dtype.is_complex else torch.promote_types(first.dtype, torch.float32)
    k = zeroed(piece.f.f(zeroed(z, mask), torch.tensor(l, dtype=dtype, device=first.device)), mask)
    return torch.cat([x.flatten().abs() if x.is_complex() else x.flatten() for x in tensors(k)])
