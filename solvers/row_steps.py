"""Trial steps of rows, each with a time and a step size of its own, and what is kept of them.

What is one number for a row is an array on the host: an operation on so few takes numpy a fraction of torch's time, and
steps are constants to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from solvers.base import State
from solvers.rows import in_order, on_device, take


class Batch(NamedTuple):
    """The rows under way: their states, increments, numbers, times, the step sizes to try, the errors of their last
    accepted steps, and whether the trial before was rejected.
    """

    z: State
    k: State
    index: np.ndarray
    t: np.ndarray
    h: np.ndarray
    error: np.ndarray
    retry: np.ndarray

    def take(self, rows: np.ndarray) -> Batch:
        """These rows only."""
        there = on_device(rows, self.z)
        return Batch(take(self.z, there), take(self.k, there), *(x[rows] for x in self[2:]))


class Trial(NamedTuple):
    """A trial step of each row: its size, its end, state and increment there, h times the increments of all stages."""

    h: np.ndarray
    t1: np.ndarray
    z: State
    k: State
    ks: list[State]


Between = Callable[[Batch, Trial, np.ndarray, np.ndarray], State]  # states of rows inside a step, at which depths


class Log:
    """Trial steps (for some rows their numbers, steps and errors), and how many were in vain."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.n_rejected = 0

    def lists(self, n_rows: int) -> tuple[list[list[float]], ...]:
        """Accepted steps and their errors of each row."""
        index, *columns = map(np.concatenate, zip(*self.parts, strict=True))
        taken = np.flatnonzero((columns[1] <= 1) & (columns[0] != 0))
        order = taken[index[taken].argsort(kind="stable")]
        ends = [0, *np.bincount(index[order], minlength=n_rows).cumsum().tolist()]
        listed = (column[order].tolist() for column in columns)
        return tuple([column[i:j] for i, j in pairwise(ends)] for column in listed)


class Saves:
    """The states at save_at, gathered as rows pass."""

    def __init__(self, times: Sequence[float], batch: Batch):
        self.times = np.array(times)
        self.parts: list[list] = [[(batch.index, batch.z)] if time <= batch.t[0] else [] for time in times]

    def add(self, batch: Batch, trial: Trial, accept: np.ndarray, between: Between) -> None:
        """Keep what lies in the accepted steps; ``between`` gives the states inside them."""
        if not self.parts:
            return
        t1, met = trial.t1[:, None], accept[:, None] & (batch.t[:, None] < self.times)
        self._keep(batch, met & (self.times == t1), lambda rows, which: take(trial.z, on_device(rows, trial.z)))
        self._keep(batch, met & (self.times < t1), lambda rows, which: between(batch, trial, rows, which))

    def _keep(self, batch: Batch, hit: np.ndarray, states: Callable[[np.ndarray, np.ndarray], State]) -> None:
        rows, which = hit.nonzero()
        if len(rows):
            found = states(rows, which)
            for i in np.unique(which):
                mine = np.flatnonzero(which == i)
                self.parts[i].append((batch.index[rows[mine]], take(found, on_device(mine, found))))

    def states(self) -> list[State]:
        """One state a depth, rows in order."""
        return list(map(in_order, self.parts))
