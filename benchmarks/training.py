"""Trains one model for a task and says what came out: shared by the benchmarks that train on real data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks.comparison import by_seed, difference
from benchmarks.reference import Reference
from odeformer import DepthConfig
from odeformer.train import TrainConfig, Trainer

REFERENCE = "torch.nn"  # the row of a plain Transformer, in place of a solver
BASELINE = "euler"  # what the others are compared with
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
          learning_rate: float, **config: Any) -> tuple[Any, dict[str, Any]]:
    """The trained model, and a row: what was trained (``described``), NFE of a forward and of a backward pass,
    ``memory`` (bytes that autograd keeps for one update), CPU seconds an update and training loss (last tenth).

    Weights and the order of the data depend on the seed alone. ``config``: further settings of the training.
    """
    torch.manual_seed(seed)
    model = make()
    config = {"warmup": max(1, steps // 20), **config}
    trainer = Trainer(model, task, TrainConfig(steps=steps, seed=seed, batch_size=batch_size,
                                               learning_rate=learning_rate, **config))
    row = described(model, trainer.task) | measured_update(trainer)
    begun = time.process_time()
    if not trainer.run(progress=False):
        raise KeyboardInterrupt("stopped before the last update: no row")
    seconds = time.process_time() - begun
    last = trainer.rows[-max(1, steps // 10):]
    return model, row | {"nfe": trainer.rows[-1]["nfe"], "seconds": seconds / steps,
                         "loss": mean(row["loss"] for row in last)}


def described(model: Any, task: Any) -> dict[str, Any]:
    """The factors that a model and its task say of themselves."""
    depth = model.config.depth
    solver = depth.solver if isinstance(depth.solver, str) else depth.solver.name
    solver = REFERENCE if isinstance(model, Reference) else solver
    with torch.random.fork_rng(devices=[]):
        report = model.parameter_report()
    return {"task": task.name, "model": type(model).__name__, "solver": solver,
            "n_steps": depth.n_steps or depth.steps_per_layer * model.config.n_layers, "weights": depth.weights,
            "gradient": depth.gradient, "parameters": sum(p.numel() for p in model.parameters()),
            "multiply_adds": report["multiply_adds"]}


def measured_update(trainer: Trainer) -> dict[str, Any]:
    """Of one update, which is not made: bytes kept for backward, each tensor once and parameters left out, and NFE of
    the backward pass. The random state is left as it was."""
    known = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.random.fork_rng(devices=[]):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss, solution = trainer.loss(trainer.batch(0))
        loss.backward()
    trainer.model.zero_grad(set_to_none=True)
    return {"memory": sum(kept.values()), "nfe_backward": getattr(solution, "nfe_backward", 0)}


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


def compared(rows: list[dict[str, Any]], base: list[dict[str, Any]], name: str, higher_is_better: bool,
             digits: int = 3) -> tuple[str, str, str, str]:
    """Four cells: mean and spread over seeds, difference to the base with its interval, and what to call it."""
    value, spread = averaged(rows, name)
    found = difference(by_seed(rows, name), by_seed(base, name))
    same = rows is base
    return (f"{value:.{digits}f}", f"{spread:.{digits}f}", "" if same else found.shown(digits),
            "" if same else found.verdict(higher_is_better))


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
