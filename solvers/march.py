"""The march along depth: legs (a step each, with the states asked for within it), and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import torch

from solvers.base import Evaluator, Solver, State, Step, add, depth_dtype, tensors
from solvers.grid import Piece, make_steps

Advance = Callable[[Evaluator, State, Step, Any], tuple[State, Any]]


class Leg(NamedTuple):
    """A step of a piece, from depth ``l0`` to ``l1``.

    ``starts``: it is the first of its piece, where the method's memory begins. ``wanted``: depths in (l0, l1] (at the
    start of the span l0 as well) at which the state is asked for, in order.
    """

    piece: Piece
    step: Step
    l0: float
    l1: float
    starts: bool
    wanted: Sequence[float]


def make_legs(pieces: Sequence[Piece], placed: Sequence[Sequence[float]], nodes: tuple[float, ...],
              wanted: Sequence[float], z: State) -> list[Leg]:
    """The legs through the pieces; ``placed``: the depth points of each; ``wanted``: depths, ordered along the span."""
    dtype, device = depth_dtype(z), tensors(z)[0].device
    legs, taken = [], 0
    for piece, points, steps in zip(pieces, placed, make_steps(pieces, placed, nodes, dtype, device), strict=True):
        shares = []
        for l0, l1 in pairwise(points) if wanted else ():
            first = taken
            while taken < len(wanted) and (wanted[taken] - l1) * (l1 - l0) <= 1e-9 * (l1 - l0) ** 2:
                taken += 1
            shares.append(wanted[first:taken])
        starts = chain((True,), repeat(False))
        legs += map(Leg, repeat(piece), steps, points, points[1:], starts, shares or repeat(()))
    return legs


def take(advance: Advance, solver: Solver, leg: Leg, z: State, memory: Any) -> tuple[State, Any, list[State]]:
    """One leg: the next state, the next memory, the states asked for on the way."""
    if leg.starts:
        memory = solver.init(memory)
    after, memory = advance(leg.piece.f, z, leg.step, memory)
    return after, memory, between(leg, z, after) if leg.wanted else []


def march(advance: Advance, solver: Solver, legs: Sequence[Leg], z: State) -> tuple[State, list[State]]:
    """All legs: the final state and those asked for."""
    memory, states = None, []
    for leg in legs:
        z, memory, saved = take(advance, solver, leg, z, memory)
        states += saved
    return z, states


def between(leg: Leg, before: State, after: State) -> list[State]:
    """The states at ``leg.wanted``: an end itself, or cubic Hermite interpolation (two evaluations of f a leg)."""
    states: list[State] = []
    slopes, step = None, leg.step
    near, moving = 1e-9 * abs(leg.l1 - leg.l0), leg.piece.rescaled
    for l in leg.wanted:
        if abs(l - leg.l1) <= near and not (moving and abs(l - leg.piece.l1) > near):
            states.append(after)
        elif abs(l - leg.l0) <= near and not (moving and abs(l - leg.piece.l0) > near):
            states.append(before)
        else:
            if slopes is None:
                at = [torch.as_tensor(x, dtype=step.at[0].dtype, device=step.at[0].device)
                      for x in _inside(leg.piece, (step.l, step.l + step.h), step.at[0].dtype)]
                slopes = leg.piece.f(before, at[0]), leg.piece.f(after, at[1])
            state = _hermite(before, after, *slopes, step.h, (l - leg.l0) / (leg.l1 - leg.l0))
            states.append(_held(leg.piece, l, state, step) if moving else state)
    return states


def _held(piece: Piece, l: float, state: State, step: Step) -> State:
    """The state at a depth that stays where it is while the ends of the span move: its place s = (l - a) / (b - a) in
    the rescaled span then moves, which adds g(z, s) ds to the gradient (and nothing to the value)."""
    a, b = piece.ends
    s = (l - a) / (b - a)
    slope = piece.f(state, s.detach().to(step.at[0].dtype))
    return add(state, 1.0, _scaled(s - s.detach(), slope))


def _scaled(w: torch.Tensor, k: State) -> State:
    return tuple(x * w for x in k) if isinstance(k, tuple) else k * w


def _inside(piece: Piece, ends: tuple[float, float], dtype: torch.dtype) -> list[float]:
    low, high = sorted(piece.inside(dtype))
    return [min(max(x, low), high) for x in ends]


def _hermite(z0: State, z1: State, k0: State, k1: State, h: float, x: float) -> State:
    """The cubic through z0, z1 with slopes k0, k1, at the fraction x of the step (error O(h^4))."""
    if isinstance(z0, tuple):
        return tuple(_hermite(*parts, h, x) for parts in zip(z0, z1, k0, k1, strict=True))
    y = 1 - x
    return (1 + 2 * x) * y * y * z0 + x * x * (3 - 2 * x) * z1 + h * x * y * (y * k0 - x * k1)
