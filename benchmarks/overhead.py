"""What solve() costs: rk4, 12 steps, over 48 bare calls of the same field, and over torchdiffeq's rk4.

Process time on one thread; the three are timed in turn, round after round, and each round gives a ratio, so that a
busy machine slows all alike; garbage collection is off, as in timeit. ``block`` is a pre-norm Transformer layer,
``linear`` tanh(z W), the cheapest field one may have.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from odeformer.block import Block, BlockConfig, Composed, Part
from odeformer.context import Context
from solvers import solve

N_STEPS = 12
COLUMNS = ("field", "state", "backward", "over bare f", "spread", "over torchdiffeq", "spread")
PRESETS = {
    "quick": {"seeds": 1, "rounds": 31, "seconds": 0.1},
    "cpu": {"seeds": 1, "rounds": 41, "seconds": 0.5},
}
SHAPES = [(1, 8, 32), (8, 32, 64), (8, 64, 256)]
SIZE = (9, 3.6)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Field x state x with or without backward."""
    for field in FIELDS:
        for shape in SHAPES:
            for backward in (False, True):
                yield {"field": field, "shape": list(shape), "backward": backward, "rounds": settings["rounds"],
                       "seconds": settings["seconds"]}


def block(d_model: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A pre-norm Transformer layer as one field."""
    layer = Block(BlockConfig(d_model, 4))
    return Composed([Part(sublayer, Context()) for sublayer in layer.sublayers])


def linear(d_model: int) -> Callable[[Tensor, Tensor], Tensor]:
    """tanh(z W)."""
    weight = (torch.randn(d_model, d_model) * d_model**-0.5).requires_grad_()
    return lambda z, l: torch.tanh(z @ weight)


FIELDS = {"block": block, "linear": linear}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Median ratios over the rounds, with the quartiles."""
    import torchdiffeq

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    f = FIELDS[case["field"]](case["shape"][-1])
    z0 = torch.randn(case["shape"])
    at, times = torch.tensor(0.0), torch.linspace(0.0, float(N_STEPS), N_STEPS + 1)

    def bare() -> Tensor:
        z = z0
        for _ in range(4 * N_STEPS):
            z = f(z, at)
        return z

    def ours() -> Tensor:
        return solve(f, z0, span=(0.0, float(N_STEPS)), n_steps=N_STEPS, solver="rk4").z

    def theirs() -> Tensor:
        return torchdiffeq.odeint(lambda t, y: f(y, t), z0, times, method="rk4")[-1]

    def timed(call: Callable[[], Tensor], repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            if case["backward"]:
                call().sum().backward()
            else:
                with torch.no_grad():
                    call()
        return (time.process_time() - start) / repeats

    timed(ours, 3), timed(theirs, 3)
    repeats = max(1, round(case["seconds"] / 3 / timed(bare, 3)))
    gc.collect()
    gc.disable()
    try:
        rounds = [[timed(call, repeats) for call in (bare, ours, theirs)] for _ in range(case["rounds"])]
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    over_bare, over_peer = [b / a for a, b, _ in rounds], [b / c for _, b, c in rounds]
    return [{"bare_ms": 1e3 * median(a for a, _, _ in rounds), "over_bare": median(over_bare),
            "over_bare_quartiles": quartiles(over_bare), "over_torchdiffeq": median(over_peer),
            "over_torchdiffeq_quartiles": quartiles(over_peer)}]


def quartiles(values: list[float]) -> list[float]:
    """First and third."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]]


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows."""
    for row in rows:
        case = row["case"]
        yield (case["field"], tuple(case["shape"]), "yes" if case["backward"] else "no", f"{row['over_bare']:.3f}",
               "{:.3f}-{:.3f}".format(*row["over_bare_quartiles"]), f"{row['over_torchdiffeq']:.3f}",
               "{:.3f}-{:.3f}".format(*row["over_torchdiffeq_quartiles"]))


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Ratios by state size, one panel against bare calls and one against torchdiffeq."""
    for axes, name, title in zip(figure.subplots(1, 2), ("over_bare", "over_torchdiffeq"),
                                 ("over 48 bare calls of f", "over torchdiffeq rk4"), strict=True):
        for field, marker in (("block", "o"), ("linear", "s")):
            for backward, style in ((False, "-"), (True, "--")):
                mine = [r for r in rows if r["case"]["field"] == field and r["case"]["backward"] is backward]
                axes.plot([str(tuple(r["case"]["shape"])) for r in mine], [r[name] for r in mine], style,
                          marker=marker, label=f"{field}, {'with' if backward else 'no'} backward")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel("state (batch, tokens, d_model)")
        axes.set_ylabel(f"process time of solve, {title}")
        axes.grid(alpha=0.3)
    axes.legend(frameon=False)
