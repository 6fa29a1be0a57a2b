"""What the adaptive engines share: the pairs they run, their clock, error norms over real entries, the first step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solvers.base import SolverError, State, Work, tensors
from solvers.grid import Piece
from solvers.tableau import Tableau

NOISY = ("f gives different values at one and the same point (dropout or other randomness drawn again at each "
         "evaluation?): draw it once a solve, call eval(), or use a fixed-step solver")
ADVICE = ("f may have a pole or a jump there, be stiff, or be noisier than rtol (low precision): end the span before "
          "it, name the jump in breakpoints, loosen rtol and atol, or use a float64 state")
MORE = ("raise max_nfe or loosen rtol and atol; where f is stiff use an implicit solver, where it jumps name "
        "breakpoints, before a pole end the span")

Real = list[Tensor | None]  # for each tensor of a state: which entries are no padding; None where all are real


def check_pair(tableau: Any) -> None:
    """Refuse a tableau that cannot estimate its error. Raises TypeError, ValueError."""
    if not isinstance(tableau, Tableau):
        raise TypeError(f"tableau must be a solvers.Tableau, got {type(tableau).__name__}")
    if not tableau.is_explicit:
        raise ValueError("the adaptive engines run explicit tableaus; this one is implicit")
    if tableau.b_hat is None:
        raise ValueError("an adaptive method needs a tableau with an embedded row b_hat")
    if tableau.b_hat == tableau.b:
        raise ValueError("b_hat must differ from b, or the error estimate is always 0")


def check_control(solver: Any, above_0: Sequence[str], at_least_0: Sequence[str] = ()) -> None:
    """Refuse step size options that are no numbers, or out of range. Raises TypeError, ValueError."""
    for name in (*above_0, *at_least_0):
        value = getattr(solver, name)
        if value is None and name == "first_step":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (value > 0 or (value == 0 and name in at_least_0)):
            raise ValueError(f"{name} must be {'at least' if name in at_least_0 else 'above'} 0, got {value!r}")
    if not (solver.min_factor < 1 < solver.max_factor and solver.safety < 1):
        raise ValueError(f"min_factor and safety must lie below 1 and max_factor above; got min_factor = "
                         f"{solver.min_factor}, safety = {solver.safety}, max_factor = {solver.max_factor}")


def error_order(tableau: Tableau) -> int:
    """The power of h that the error estimate of one step goes with."""
    return min(tableau.order, tableau.embedded_order) + 1


class Clock:
    """The time of an engine within a piece: it runs upwards, whichever way depth runs.

    ``start``, ``stop``: its ends. ``unit``: depth in a unit of time; ``scale``: the same, signed by the direction.
    Raises SolverError for a piece within which ``dtype`` (of l) has next to no depths.
    """

    def __init__(self, piece: Piece, dtype: torch.dtype, work: Work):
        self.piece, self.dtype = piece, dtype
        self.sign = math.copysign(1.0, piece.stop - piece.start)
        self.start, self.stop = self.sign * piece.start, self.sign * piece.stop
        self.scale = (piece.l1 - piece.l0) if piece.rescaled else self.sign
        self.unit = abs(self.scale)
        self.inside = sorted(piece.inside(dtype)) if piece.nudge != (False, False) else None
        length, extent = abs(piece.l1 - piece.l0), max(abs(piece.l0), abs(piece.l1))
        if length <= 8 * torch.finfo(dtype).eps * extent:
            raise SolverError(f"{dtype} cannot resolve the span from {piece.l0} to {piece.l1}", l=piece.l0, h=length,
                              nfe=work.total, advice="use a float64 state, or a span nearer to zero")

    def time(self, l: float) -> float:
        """The time at depth l."""
        return self.sign * self.piece.local(l)

    def ticks(self, times: Sequence[float], device: torch.device) -> Tensor:
        """Times as a tensor. Inside a rescaled piece they belong to depths, so they move as the ends of the span do."""
        ticks = torch.tensor(times, dtype=torch.float64, device=device)
        if not self.piece.rescaled or not torch.is_grad_enabled():
            return ticks
        a, b = self.piece.ends
        depths = self.piece.l0 + ticks * (self.piece.l1 - self.piece.l0)
        moving = (depths - a) / (b - a)
        inside = (ticks > self.start) & (ticks < self.stop)
        return torch.where(inside, ticks + (moving - moving.detach()), ticks)

    def depth(self, t: Any) -> float:
        """The depth at time t."""
        return self.piece.l0 + float(t) * self.scale if self.piece.rescaled else self.sign * float(t)

    def argument(self, t: Tensor) -> Tensor:
        """What the field of the piece is called with at time t: just inside the piece where f jumps at its end."""
        return self.local(t if t.dtype is self.dtype else t.to(self.dtype))

    def local(self, t: Any) -> Any:
        """The same for a tensor or an array in its own dtype."""
        l = t if self.sign > 0 else -t
        return l if self.inside is None else l.clip(*self.inside)

    def floor(self, t: Any) -> Any:
        """The smallest step at time t (a number, an array or a tensor) that l can resolve."""
        eps = torch.finfo(self.dtype).eps
        least = eps * (self.stop - self.start)
        if self.piece.rescaled:
            least = max(least, max(abs(self.piece.l0), abs(self.piece.l1)) / self.unit)
        size = abs(t)
        return 8 * eps * (size.clamp(min=least) if isinstance(size, Tensor) else np.maximum(size, least))


def is_noisy(evaluate: Callable[[], State]) -> bool:
    """Whether two evaluations at one point differ: asked once a failed solve has to be explained."""
    with torch.no_grad(), contextlib.suppress(Exception):
        pairs = zip(tensors(evaluate()), tensors(evaluate()), strict=True)
        return any(bool((a - b).abs().amax() > 1e-3 * a.abs().amax()) for a, b in pairs)
    return False


def real_entries(z: State, mask: Tensor | None) -> Real:
    """For each tensor of two or more axes the mask, broadcastable to it."""
    return [None if mask is None or x.dim() < 2 else mask.expand(x.shape[:-1]).unsqueeze(-1) for x in tensors(z)]


def quiet(z: State, real: Real) -> State:
    """z with padding that is not finite set to 0: it must neither stop the solve nor reach a norm."""
    if all(keep is None for keep in real):
        return z
    cleaned = tuple(x if keep is None else torch.where(keep | torch.isfinite(x), x, 0)
                    for x, keep in zip(tensors(z), real, strict=True))
    return cleaned[0] if isinstance(z, Tensor) else cleaned


def bad_share(z: State, real: Real) -> float:
    """The largest share of a tensor's real entries that is not finite (one host read where all are finite)."""
    if len(real) == 1 and real[0] is None and math.isfinite(abs(tensors(z)[0].detach().sum().item())):
        return 0.0
    shares = []
    for x, keep in zip(tensors(z), real, strict=True):
        bad = ~torch.isfinite(x)
        if keep is None:
            shares.append(bad.double().mean())
        else:
            shares.append((bad & keep).double().sum() / keep.expand(x.shape).sum().clamp(min=1))
    return torch.stack(shares).amax().item()


def row_rms(x: Tensor, keep: Tensor | None) -> Tensor:
    """(rows,): the root mean square over the real entries of each row of x, the first axis."""
    square = x.abs().square()
    if x.dim() == 1:
        return square.sqrt()
    if keep is None:
        return square.flatten(1).mean(1).sqrt()
    count = keep.flatten(1).sum(1).clamp(min=1) * x.shape[-1]
    return (square.masked_fill(~keep, 0).flatten(1).sum(1) / count).sqrt()


def starting_step(ratio: Callable[[State], Tensor], probe: Callable[[Tensor], State], z: State, k: State,
                  extent: Tensor | float, power: int) -> Tensor:
    """A first step size, 0-d or one a row as ``ratio`` has it (Hairer, Nørsett & Wanner 1993, II.4).

    ``ratio(x)``: the norm of x over the tolerance. ``probe(h)``: f after an Euler step of size h, the one evaluation
    spent here. ``power``: of h in the error estimate. Where the probe is not finite the step is a tenth of the probe's.
    """
    d0, d1 = ratio(z), ratio(k)
    small = torch.as_tensor(1e-6 * extent, dtype=d0.dtype, device=d0.device).expand_as(d0)
    h0 = torch.where((d0 < 1e-5) | (d1 < 1e-5), small, 0.01 * d0 / d1)
    h0 = torch.where(torch.isfinite(h0) & (h0 > 0), h0, small).minimum(1e6 * small)
    k1 = probe(h0)
    change = k1 - k if isinstance(k, Tensor) else tuple(x - y for x, y in zip(k1, k, strict=True))
    d2 = ratio(change) / h0
    largest = torch.maximum(d1, d2)
    h1 = torch.where(largest <= 1e-15, torch.maximum(small, 1e-3 * h0), (0.01 / largest) ** (1 / power))
    return torch.where(torch.isfinite(largest) & (d2 < math.inf), torch.minimum(100 * h0, h1), 0.1 * h0)
