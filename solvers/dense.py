"""Dense fusion as a solver (eq. 38): each step combines all earlier states and increments, with learned weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from solvers.base import Evaluator, State, Step, add
from solvers.explicit import ExplicitRungeKutta
from solvers.learned import Learned, plus, times
from solvers.multistep import find_starter, nodes_with, start

Row = tuple[list[float], list[float]]  # weights of the k linked states and increments, oldest first


class Past(NamedTuple):
    """``n``: steps taken; states and h f, oldest first, of the points that later steps may link to."""

    n: int = 0
    zs: tuple[State, ...] = ()
    gs: tuple[State, ...] = ()


def _average(k: int) -> Row:
    return [1 / (k + 1), *[0.0] * (k - 1)], [1 / (k + 1)] * k


def _residual(k: int) -> Row:
    return [*[0.0] * (k - 1), 1.0], [*[0.0] * (k - 1), 1.0]


def _ab2(k: int) -> Row:
    return _residual(k) if k == 1 else ([*[0.0] * (k - 1), 1.0], [*[0.0] * (k - 2), -0.5, 1.5])


INITIAL: dict[str, Callable[[int], Row]] = {"residual": _residual, "average": _average, "ab2": _ab2}


class Dense(Learned):
    """z_{n+1} = Σ_{i<=n} a_{n,i} z_i + Σ_{i<=n} b_{n,i} h f_i, every weight learned (eq. 38; DLCL, Wang et al. 2019).

    ``n_steps``: the steps that have a row of weights of their own. Give it the number of steps a solve takes; further
    steps use the last row again (the last ``stride`` rows in turn), which then reaches back n_steps points. History
    goes on across pieces of f, so that with one step a layer this is a network with links to all earlier layers, one
    evaluation a layer. h f_i is kept as it was, with the h of its own step.

    ``initial``: where the weights start, by name:

    * "residual": z_n + h f_n, Euler, order 1;
    * "average": as in DLCL the average (z_0 + h f_0 + ... + h f_n) / (n + 2), from the oldest linked point where a
      window is set. Not consistent (order 0): the weights of the states sum to 1 / (n + 2), not to 1;
    * "ab2": z_n + h (3/2 f_n - 1/2 f_{n-1}), order 2; Euler in the first row, which is used once and so leaves order 2.

    ``starter``: a Runge-Kutta method whose increment takes the place of h f_0 in the first row (f_0 itself is
    remembered): with initial="ab2" and starter="midpoint" the solver is ``ab2``. ``window``: links reach back to the
    last so many points only, the current one among them. ``stride``: every stride-th step only has links to earlier
    points; the others weigh z_n and h f_n and start as "residual".

    Once trained no order holds. ``attained_order`` reports it, ``matrices`` shows the weights.

    Raises ValueError: an unknown ``initial``, "ab2" with links left out, numbers that are not positive ints, a stride
    above n_steps.
    """

    remembers_states = True  # so that splitting, which moves states in between, refuses it

    name = "dense"
    n_stages = 1
    across_pieces = True

    def __init__(self, n_steps: int = 64, initial: str = "residual", window: int | None = None, stride: int = 1,
                 starter: str | ExplicitRungeKutta | None = None):
        super().__init__(n_steps=n_steps, initial=initial, window=window, stride=stride, starter=starter)
        for option, value in (("n_steps", n_steps), ("window", window), ("stride", stride)):
            if option == "window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option} must be a positive int, got {value!r}")
        if initial not in INITIAL:
            raise ValueError(f"initial must be one of {', '.join(INITIAL)}, got {initial!r}")
        if initial == "ab2" and (window == 1 or stride > 1):
            raise ValueError(f'initial="ab2" links every step to the one before, which window = {window} and '
                             f"stride = {stride} leave out")
        if stride > n_steps:
            raise ValueError(f"stride = {stride} leaves no dense step among n_steps = {n_steps}")
        self.n_steps, self.stride = n_steps, stride
        self.reach = n_steps if window is None else min(window, n_steps)
        self.starter = None if starter is None else find_starter(starter, 1)
        self.nodes, self._places = ((0.0,), ()) if self.starter is None else nodes_with(self.starter, 0.0)
        linked = [(n + 1) % stride == 0 for n in range(n_steps)]
        self.n_links = [min(n + 1, self.reach) if dense else 1 for n, dense in enumerate(linked)]
        rows = [INITIAL[initial if dense else "residual"](k) for k, dense in zip(self.n_links, linked, strict=True)]
        self.a = nn.Parameter(torch.tensor([x for a, _ in rows for x in a]))
        self.b = nn.Parameter(torch.tensor([x for _, b in rows for x in b]))
        self._ends = list(accumulate(self.n_links))

    @property
    def n_history(self) -> int:
        """Earlier points a step may need, besides the current one."""
        return self.reach - 1

    def nfe(self, n_steps: int) -> int:
        """Evaluations of f in n_steps steps: one a step, and those that the starter adds to the first."""
        return n_steps if self.starter is None else n_steps - 1 + self.starter.nfe(1)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """a and b, lower triangular, (n_steps, n_steps); zero where there is no link."""
        places = [(n, i) for n, k in enumerate(self.n_links) for i in range(n + 1 - k, n + 1)]
        rows, columns = torch.tensor(places, device=self.a.device).unbind(1)
        empty = self.a.new_zeros(self.n_steps, self.n_steps)
        return empty.index_put((rows, columns), self.a), empty.index_put((rows, columns), self.b)

    def attained_order(self) -> int:
        """The lowest order among the rows, on an even grid; the first, which is used once, counts one more.

        (Of the formulas alone: it says nothing of their stability.)
        """
        a, b = (x.detach().double().cpu() for x in self.matrices())
        points = torch.arange(self.n_steps, dtype=torch.float64)
        at = points - points[:, None]  # of the links, where the current point is 0 and the next one 1

        def exact(q: int) -> Tensor:
            terms = a * at**q + (q * b * at ** (q - 1) if q else 0)
            return (terms.sum(1) - 1).abs() <= 1e-12 * terms.abs().sum(1).clamp(min=1)

        holds, orders, q = exact(0), torch.zeros(self.n_steps), 1
        while (holds := holds & exact(q)).any():
            orders, q = orders + holds, q + 1
        first, *rest = orders.int().tolist()
        if first and self.starter is not None:
            first = self.starter.order
        return min([first + (first > 0 and len(rest) > 0), *rest])

    def init(self, memory: Past | None) -> Past:
        """The history so far: it goes on from piece to piece."""
        return Past() if memory is None else memory

    def step(self, f: Evaluator, z: State, step: Step, memory: Past) -> tuple[State, Past]:
        """The state at step.l + step.h."""
        n = memory.n
        if n == 0 and self.starter is not None:
            ahead, k = start(self.starter, self._places, f, z, step)
            increment = add(ahead, -1.0, z)
        else:
            k = f(z, step.at[self.nodes.index(0.0)])
            increment = _scaled(step.h, k)
        zs, gs = (*memory.zs, z), (*memory.gs, increment)
        row = n if n < self.n_steps else self.n_steps - self.stride + (n - self.n_steps) % self.stride
        new = self._combine(row, zs, gs)
        if n == 0 and self.starter is not None:
            gs = (_scaled(step.h, k),)
        keep = self.reach - 1
        return new, Past(n + 1, zs[max(0, len(zs) - keep):], gs[max(0, len(gs) - keep):])

    def _combine(self, row: int, zs: tuple[State, ...], gs: tuple[State, ...]) -> State:
        """The sum over the links of a row."""
        k, end = self.n_links[row], self._ends[row]
        a, b = (x[end - k:end].unbind() for x in (self.a, self.b))
        new = times(a[-1], zs[-1])
        for weight, x in (*zip(a[:-1], zs[-k:], strict=False), *zip(b, gs[-k:], strict=True)):
            new = plus(new, weight, x)
        return new


def _scaled(h: float, k: State) -> State:
    return tuple(x * h for x in k) if isinstance(k, tuple) else k * h


METHODS: dict[str, Dense] = {"dense": Dense()}
