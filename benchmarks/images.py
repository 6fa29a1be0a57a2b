"""Image classifiers on real images under several solvers, beside a plain torch.nn Transformer.

Equal parameters, equal data, equal updates, so unequal compute: NFE and seconds say how much. Accuracy on the test
images.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from benchmarks.fronts import Fronts
from benchmarks.reference import TorchVision
from benchmarks.training import BASELINE, REFERENCE, SOLVERS, averaged, compared, depth, grouped, scatter, train
from odeformer import BlockConfig, VisionConfig, VisionEncoder
from odeformer.data import DATA
from odeformer.data.images import Images
from odeformer.tasks import Classification

COLUMNS = ("data", "solver", "NFE", "parameters", "accuracy", "spread", "over euler", "verdict", "CPU s an update")
PRESETS = {
    "quick": {"seeds": 3, "steps": 60, "data": ["digits"], "n_layers": 2, "d_model": 32, "batch_size": 64},
    "cpu": {"seeds": 5, "steps": 150, "data": ["digits", "fashion_mnist"], "n_layers": 2, "d_model": 48,
            "batch_size": 64},
    "gpu": {"seeds": 5, "steps": 10000, "data": ["fashion_mnist"], "n_layers": 6, "d_model": 256, "batch_size": 256},
}
PATCH = {"digits": 2, "fashion_mnist": 4}
SIZE = (10, 3.8)
FRONTS = Fronts(score="accuracy", label="test accuracy", higher=True, panel="data")
WORKERS = 2


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Data x solver x seed."""
    for data in settings["data"]:
        for solver in SOLVERS:
            for seed in range(seeds):
                yield {"data": data, "solver": solver, "seed": seed,
                       **{name: settings[name] for name in ("steps", "n_layers", "d_model", "batch_size")}}


@cache
def images(name: str) -> Images:
    """The data, loaded once a process."""
    return DATA[name]()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run."""
    data = images(case["data"])
    config = VisionConfig(image_size=data.size, patch_size=PATCH[case["data"]], channels=data.channels,
                          n_classes=data.n_classes, n_layers=case["n_layers"],
                          block=BlockConfig(case["d_model"], case["d_model"] // 16), depth=depth(case["solver"]))
    kind, task = TorchVision if case["solver"] == REFERENCE else VisionEncoder, Classification(data)
    model, row = train(lambda: kind(config), task, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=2e-3)
    return [row | task.evaluate(model)]


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a data set and solver, over seeds."""
    lines = []
    groups = grouped(rows, "data", "solver")
    for (data, solver), group in groups.items():
        cells = compared(group, groups[data, BASELINE], "accuracy", higher_is_better=True, digits=4)
        lines.append((data, solver, f"{group[0]['nfe']:g}", f"{group[0]['parameters']}", *cells,
                      f"{averaged(group, 'seconds')[0]:.3f}"))
    return lines


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Accuracy against NFE, a panel for each data set."""
    names = sorted({row["case"]["data"] for row in rows})
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        chosen = [row for row in rows if row["case"]["data"] == name]
        scatter(axes, grouped(chosen, "data", "solver"), "accuracy", f"test accuracy, {name}")
