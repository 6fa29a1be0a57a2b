"""Where the steps fall: pieces of the span over which f is smooth, and the depth points within them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.base import Evaluator, SolverError, State, Step, VectorField, Work
from solvers.kept import kept

_REQUIRES_GRAD = attrgetter("requires_grad")


class Piece(NamedTuple):
    """A stretch of depth from ``l0`` to ``l1`` (in the direction of integration) over which ``f`` is smooth.

    ``nudge``: at which ends f jumps without saying on which side it stands; there it is called with l just inside.
    ``rescaled``: f has been rewritten over [0, 1], so that gradients reach the ends of the span; ``ends`` are then
    those of the piece, as tensors where they move.
    """

    l0: float
    l1: float
    f: Evaluator
    nudge: tuple[bool, bool]
    rescaled: bool
    ends: tuple[float | Tensor, float | Tensor] | None = None

    @property
    def start(self) -> float:
        """The first value of the integration variable."""
        return 0.0 if self.rescaled else self.l0

    @property
    def stop(self) -> float:
        """The last value of the integration variable."""
        return 1.0 if self.rescaled else self.l1

    def local(self, l: float) -> float:
        """The integration variable at depth l."""
        return (l - self.l0) / (self.l1 - self.l0) if self.rescaled else l

    def inside(self, dtype: torch.dtype) -> tuple[float, float]:
        """The ends of the interval in which f may be called, as (first, last) representable values."""
        x, y = self.start, self.stop
        return (_toward(x, y, dtype) if self.nudge[0] else x), (_toward(y, x, dtype) if self.nudge[1] else y)


def _toward(x: float, y: float, dtype: torch.dtype) -> float:
    """x moved by one or two representable values towards y."""
    return x + math.copysign(torch.finfo(dtype).eps * max(abs(x), abs(y - x)), y - x)


class Rescaled:
    """g(z, s) = (b - a) f(z, a + s (b - a)) over [0, 1]: the same solution, with gradients to a and b."""

    def __init__(self, f: VectorField, a: float | Tensor, b: float | Tensor):
        self.f, self.a, self.b = f, a, b

    def __call__(self, z: State, s: Tensor) -> State:
        width = self.b - self.a
        k = self.f(z, (self.a + s * width).to(s.dtype))
        return k * width if isinstance(k, Tensor) else tuple(x * width for x in k)

    @property
    def parts(self) -> tuple[Rescaled, ...] | None:
        """The parts of f, rescaled."""
        parts = getattr(self.f, "parts", None)
        return tuple(Rescaled(part, self.a, self.b) for part in parts) if parts else None


def read_span(span: Any) -> tuple[float, float]:
    """The ends of span as floats. Raises TypeError or ValueError where they are not two different finite numbers."""
    try:
        l0, l1 = span
        ends = tuple(float(l.detach() if isinstance(l, Tensor) else l) for l in (l0, l1))
    except (TypeError, ValueError) as error:
        raise TypeError(f"span must be a pair of numbers or 0-d tensors, got {span!r}") from error
    if not all(map(math.isfinite, ends)):
        raise ValueError(f"span must be finite, got {ends}")
    if ends[0] == ends[1]:
        raise ValueError(f"span must have two different ends, got {ends}")
    return ends


def read_points(name: str, points: Any) -> list[float]:
    """Depth points as floats, from a sequence or a 1-d tensor."""
    if isinstance(points, Tensor) and points.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require grad: its points are constants; detach it (gradients reach span)")
    try:
        values = points.tolist() if hasattr(points, "tolist") else [float(x) for x in points]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a sequence of numbers or a 1-d tensor, got {points!r}") from error
    if not isinstance(values, list) or not all(isinstance(x, float | int) for x in values):
        raise TypeError(f"{name} must be one-dimensional, got {points!r}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name} must be finite, got {values}")
    return [float(x) for x in values]


def read_grid(grid: Any) -> list[float]:
    """A strictly monotone list of at least two depth points."""
    points = read_points("grid", grid)
    steps = [y - x for x, y in pairwise(points)]
    if not steps or not (all(h > 0 for h in steps) or all(h < 0 for h in steps)):
        raise ValueError(f"grid must hold at least two points, strictly increasing or decreasing; got {points}")
    if isinstance(grid, Tensor) and grid.is_floating_point() and grid.dtype != torch.float64:
        even, near = uniform(points[0], points[-1], len(points) - 1), 2 * torch.finfo(grid.dtype).eps
        h = abs(even[1] - even[0])  # what differs by rounding alone is meant to be even
        made = torch.linspace(points[0], points[-1], len(points), dtype=grid.dtype).tolist()
        if made == points or all(abs(x - y) <= near * max(abs(y), h) for x, y in zip(points, even, strict=True)):
            return even
    return points


def _moves(end: Tensor) -> bool:
    """Whether derivatives, backward or forward, are wanted with respect to an end of the span."""
    if end.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(end):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(end).tangent is not None


def make_pieces(f: VectorField, span: tuple, ends: tuple[float, float], breakpoints: Sequence[float] | None,
                work: Work, dtypes: tuple[torch.dtype, ...] | None) -> list[Piece]:
    """Split the span where f jumps: at ``f.pieces``, at ``breakpoints`` and at ``f.breakpoints``."""
    low, high = sorted(ends)
    listed = getattr(f, "pieces", None)
    if listed and not all(isinstance(piece, tuple | list) and len(piece) == 3 for piece in listed):
        raise ValueError("f.pieces must be a list of (l0, l1, field)")
    fields = [g for _, _, g in listed] if listed else [f]
    bounds = tuple([(float(a), float(b)) for a, b, _ in listed]) if listed else ((low, high),)
    jumps = getattr(f, "breakpoints", None) if breakpoints is None else breakpoints
    jumps = frozenset(read_points("breakpoints", jumps)) if jumps is not None else frozenset()
    first, last = (end if isinstance(end, Tensor) and _moves(end) else None for end in span)
    pieces, cuts = [], _cut(bounds, ends, jumps)
    for i, (a, b, number) in enumerate(cuts):
        g, tips = fields[number], None
        moving = first if i == 0 else None, last if i == len(cuts) - 1 else None
        if moving != (None, None):
            tips = tuple(x if end is None else end for x, end in zip((a, b), moving, strict=True))
            g = Rescaled(g, *tips)
        pieces.append(Piece(a, b, Evaluator(g, work, dtypes), (a in jumps, b in jumps), tips is not None, tips))
    return pieces


@kept(length=lambda bounds, ends, jumps: len(bounds) + len(jumps))
def _cut(bounds: tuple[tuple[float, float], ...], ends: tuple[float, float],
         jumps: frozenset[float]) -> tuple[tuple[float, float, int], ...]:
    """(l0, l1, number of the field) of each piece of the span, in the direction of integration."""
    low, high = sorted(ends)
    if not all(a < b for a, b in bounds):
        raise ValueError(f"f.pieces must increase: each l0 below its l1; got {list(bounds)}")
    for (_, b), (a, _) in pairwise(bounds):
        if a != b:
            raise ValueError(f"f.pieces must adjoin and increase; one ends at {b} and the next starts at {a}")
    if bounds[0][0] > low or bounds[-1][1] < high:
        raise ValueError(f"span {ends} leaves the depth that f.pieces covers, [{bounds[0][0]}, {bounds[-1][1]}]")
    cuts = []
    for number, (a, b) in enumerate(bounds):
        a, b = max(a, low), min(b, high)
        inner = sorted(x for x in jumps if a < x < b)
        cuts += [(x, y, number) for x, y in zip([a, *inner], [*inner, b], strict=True) if x < y]
    return tuple(cuts) if ends[0] < ends[1] else tuple((b, a, number) for a, b, number in reversed(cuts))


def uniform(l0: float, l1: float, n_steps: int) -> list[float]:
    """n_steps + 1 equally spaced points, both ends exact (each from the span, never by adding up).

    >>> uniform(0.0, 1.0, 4)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return [l0 + (l1 - l0) * i / n_steps for i in range(n_steps)] + [l1]


def place(pieces: list[Piece], n_steps: int | None, grid: list[float] | None) -> tuple[tuple[float, ...], ...]:
    """The depth points of each piece, ends included.

    A grid must hold every boundary between pieces. n_steps equal steps are taken where that grid holds the
    boundaries, else n_steps must be a multiple of the number of pieces and each gets as many equal steps.
    """
    bounds = tuple([(piece.l0, piece.l1) for piece in pieces])
    return _place(bounds, n_steps, None if grid is None else tuple(grid))


@kept(length=lambda bounds, n_steps, grid: len(bounds) + (n_steps or len(grid)))
def _place(bounds: tuple[tuple[float, float], ...], n_steps: int | None,
           grid: tuple[float, ...] | None) -> tuple[tuple[float, ...], ...]:
    points = grid if grid is not None else uniform(bounds[0][0], bounds[-1][1], n_steps)
    near = 1e-9 * abs(points[-1] - points[0]) / len(points)
    placed, at = [], 0
    for l0, l1 in bounds:
        mine = [l0]
        at += 1
        while at < len(points) and abs(points[at] - l0) < abs(l1 - l0) - near:
            mine.append(points[at])
            at += 1
        if at == len(points) or abs(points[at] - l1) > near:
            break
        placed.append((*mine, l1))
    if len(placed) == len(bounds):
        return tuple(placed)
    missing = [l1 for _, l1 in bounds[:-1]]
    if grid is not None:
        raise ValueError(f"grid must hold every depth where f jumps: {missing}; got {list(grid)}")
    if n_steps % len(bounds):
        raise ValueError(f"n_steps must be a multiple of the number of pieces of f ({len(bounds)}, f jumps at "
                         f"{missing}); got {n_steps}")
    return tuple([tuple(uniform(l0, l1, n_steps // len(bounds))) for l0, l1 in bounds])


def _on_device(depths: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The depths as a 1-d tensor. A GPU is not waited for; while it captures a graph, where nothing may be copied from
    a host that goes on, it writes them itself."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.stack([torch.full((), x, dtype=dtype, device=device) for x in depths])
    at = torch.tensor(depths, dtype=dtype, device="cpu")
    if device.type == "cuda":
        at = at.pin_memory()
    return at if device.type == "cpu" else at.to(device, non_blocking=True)


def make_steps(pieces: Sequence[Piece], placed: Sequence[Sequence[float]], nodes: tuple[float, ...], dtype: torch.dtype,
               device: torch.device) -> Sequence[Sequence[Step]]:
    """The steps of each piece, between its depth points ``placed``, with all their depth tensors, made in one go;
    equal depths of a piece are one tensor.

    On a CPU the tensors of a grid are kept for the next solve over it: they are constants, and making them takes longer
    than all else that a short solve does outside f. Raises SolverError: neighbouring points that are one number in
    dtype.
    """
    grid = tuple([(tuple(map(piece.local, points)) if piece.rescaled else tuple(points),
                   tuple(sorted(piece.inside(dtype))) if piece.nudge != (False, False) else None)
                  for piece, points in zip(pieces, placed, strict=True)])
    if device.type != "cpu" or _is_special():
        return _make_steps.__wrapped__(grid, nodes, dtype, device)[0]
    steps, depths = _make_steps(grid, nodes, dtype, device)
    if depths[0]._version or any(map(_REQUIRES_GRAD, depths)):  # f has written into them; they share their version
        return _make_steps.__wrapped__(grid, nodes, dtype, device)[0]
    return steps


def _is_special() -> bool:
    """Where a tensor that is made now must not be met again later."""
    return (torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack()
            or torch._C._functorch.maybe_current_level() is not None)


@kept(length=lambda grid, *_: sum([len(points) for points, _ in grid]))
def _make_steps(grid: tuple, nodes: tuple[float, ...], dtype: torch.dtype,
                device: torch.device) -> tuple[list[list[Step]], list[Tensor]]:
    """The steps of each piece, and all depth tensors; ``grid``: points, and the interval in which to stay, of each."""
    depths = [_depths(points, nodes, inside, dtype) for points, inside in grid]
    places = {(i, x): None for i, mine in enumerate(depths) for x in mine}
    places = dict(zip(places, _on_device([x for _, x in places], dtype, device).unbind(), strict=True))
    steps, m = [], len(nodes)
    for i, (points, _) in enumerate(grid):
        at = tuple([places[i, x] for x in depths[i]])
        steps.append([Step(l, end - l, at[j * m : (j + 1) * m]) for j, (l, end) in enumerate(pairwise(points))])
    return steps, list(places.values())


def _depths(points: tuple[float, ...], nodes: tuple[float, ...], inside: tuple[float, float] | None,
            dtype: torch.dtype) -> list[float]:
    """Where f is evaluated in each step between the points, ``inside`` an interval."""
    eps, extent = torch.finfo(dtype).eps, max(map(abs, points))
    depths = []
    if extent > torch.finfo(dtype).max or not math.isfinite(points[-1] - points[0]):
        raise ValueError(f"span must lie within what {dtype} can hold, got ({points[0]:g}, {points[-1]:g})")
    for l, end in pairwise(points):
        h = end - l
        if abs(h) <= eps * extent:
            raise SolverError(f"a step below the resolution of {dtype}", l=l, h=h, nfe=0,
                              advice="take fewer steps, a span nearer to zero, or a float64 state")
        for c in nodes:
            x = l if c == 0 else end if c == 1 else l + c * h
            depths.append(x if inside is None else min(max(x, inside[0]), inside[1]))
    return depths
