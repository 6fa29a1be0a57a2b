"""Trains one model for a task and says what came out: shared by the benchmarks that train on real data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.axes import Axes

from odeformer import DepthConfig
from odeformer.train import TrainConfig, Trainer

REFERENCE = "torch.nn"  # the row of a plain Transformer, in place of a solver
SOLVERS = (REFERENCE, "euler", "ab2 across layers", "midpoint", "rk4")


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Solver x seed."""
    for solver in SOLVERS:
        for seed in range(seeds):
            yield {"solver": solver, "seed": seed, **{name: x for name, x in settings.items() if name != "seeds"}}


def depth(solver: str) -> DepthConfig:
    """One step a layer. Started anew in each layer, a multistep method would be no more than its starter."""
    if solver == REFERENCE:
        return DepthConfig()
    name, _, rest = solver.partition(" ")
    return DepthConfig(solver=name, solver_options={"across_pieces": True} if rest else {})


def train(make: Callable[[], Any], task: Any, *, seed: int, steps: int, batch_size: int,
          learning_rate: float) -> tuple[Any, dict[str, Any]]:
    """The trained model, and its parameters, NFE a pass, CPU seconds an update and training loss (last tenth)."""
    torch.manual_seed(seed)
    model = make()
    config = TrainConfig(steps=steps, seed=seed, batch_size=batch_size, learning_rate=learning_rate,
                         warmup=max(1, steps // 20))
    trainer, begun = Trainer(model, task, config), time.process_time()
    trainer.run(progress=False)
    seconds = time.process_time() - begun
    last = trainer.rows[-max(1, steps // 10):]
    return model, {"parameters": sum(p.numel() for p in model.parameters()), "nfe": trainer.rows[-1]["nfe"],
                   "seconds": seconds / steps, "loss": mean(row["loss"] for row in last)}


def grouped(rows: list[dict[str, Any]], *factors: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows of all seeds together, by the other factors."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row["case"][name] for name in factors), []).append(row)
    return groups


def averaged(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    values = [row[name] for row in rows]
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def scatter(axes: Axes, groups: dict[tuple[Any, ...], list[dict[str, Any]]], name: str, label: str) -> None:
    """A number against the NFE of a pass, one point a solver, with the spread over seeds."""
    for i, (key, rows) in enumerate(groups.items()):
        value, spread = averaged(rows, name)
        axes.errorbar(rows[0]["nfe"], value, spread, marker="s" if key[-1] == REFERENCE else "o", capsize=3,
                      color=f"C{i}", label=key[-1], linestyle="none")
    axes.set_xlabel("NFE of a forward pass")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
