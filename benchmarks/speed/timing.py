"""Calls timed in turn, and the rows that come of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from textwrap import shorten
from typing import Any

import torch

WARM_UP = 2  # calls of each, before any is timed
LEAST, LONGEST = 5, 12.0  # rounds; seconds after which no more than those are made
LIBRARIES = ("torchdiffeq", "torchdyn", "torchode", "torchode, heun", "diffrax, jit", "x-transformers",
             "GPT-2, transformers")  # peers that may be missing, or fail


@dataclass
class Times:
    """Seconds a call, one number a round for each name; what failed, and how."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def ratio(self, label: str, ours: str, peer: str, target: float | None = None, *, times: float = 1.0,
              note: str = "") -> dict[str, Any]:
        """The row of ours over peer: each round gives a ratio, multiplied by ``times``."""
        if peer in self.failed:
            return row(label, f"{ours} / {peer}", None, target, note=self.failed[peer])
        pairs = zip(self.seconds[ours], self.seconds[peer], strict=True)
        return row(label, f"{ours} / {peer}", [times * a / b for a, b in pairs], target, note=note,
                   ours_ms=1e3 * median(self.seconds[ours]), peer_ms=1e3 * median(self.seconds[peer]))


def row(label: str, what: str, values: list[float] | float | None, target: float | None = None, *, note: str = "",
        **more: Any) -> dict[str, Any]:
    """``label``: the promise that a row is of; ``what``: what is divided by what. ``values``: one a round; None where
    nothing could be measured, of which ``note`` then says why. ``target``: the most that a value may be."""
    values = [values] if isinstance(values, float | int) else values
    found = {"value": None, "quartiles": None} if values is None else {"value": median(values),
                                                                       "quartiles": quartiles(values)}
    return {"label": label, "what": what, **found, "target": target, "note": note, **more}


def quartiles(values: list[float]) -> list[float]:
    """First and third."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]]


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> Times:
    """Process time of the calls on one thread, in turn, round after round, with the garbage collector off, as in
    timeit; each is repeated to take about ``seconds`` a round. Long rounds are fewer, down to LEAST. Of another library
    that is missing or fails the exception's name and words are left."""
    times, ready, length = Times(), {}, 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, call in calls.items():
            try:
                once = min(repeated(call, 1) for _ in range(WARM_UP))
                n = max(1, round(seconds / max(once, 1e-7)))
                ready[name], length = (call, n), length + n * once
            except Exception as error:
                if name not in LIBRARIES:
                    raise
                times.failed[name] = shorten(f"{type(error).__name__}: {error}", 100)
        gc.collect()
        gc.disable()
        times.seconds = {name: [] for name in ready}
        for _ in range(min(rounds, max(LEAST, int(LONGEST / length)))):
            for name, (call, n) in ready.items():
                times.seconds[name].append(repeated(call, n))
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    return times


def repeated(call: Callable[[], Any], n: int) -> float:
    """Process seconds of one of n calls."""
    start = time.process_time()
    for _ in range(n):
        call()
    return (time.process_time() - start) / n


def without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call where no graph is made."""
    return torch.no_grad()(call)


def with_backward(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """The call, and backward from the sum of what it gives."""
    return lambda: call().sum().backward()


MODES = {"forward": without_grad, "forward + backward": with_backward}
