"""Accuracy against NFE on real images: which solver, how many evaluations of the field.

``train``: a small vision Transformer, one shared layer over the depth [0, 1], is trained under each solver and number
of steps; parameters are equal throughout. ``swap``: one model a seed, trained with four rk4 steps, is evaluated,
weights unchanged, under other solvers and step counts; the error of its final state is relative to 256 rk4 steps.
``over euler``: the difference to as many NFE spent on euler steps, of the same part and seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from statistics import mean, median, stdev
from typing import Any

import torch

from benchmarks.comparison import by_seed, difference
from benchmarks.fronts import Fronts
from benchmarks.training import train
from odeformer import BlockConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.data import DATA
from odeformer.tasks import as_task

COLUMNS = ("part", "solver", "steps", "NFE", "accuracy", "spread", "over euler", "verdict", "state error",
           "ms an update")
PRESETS = {
    "quick": {"seeds": 3, "updates": 200},
    "cpu": {"seeds": 5, "updates": 600},
    "gpu": {"seeds": 5, "updates": 5000},
}
STEPS = {"euler": (1, 2, 4, 8), "midpoint": (1, 2, 4), "ab2": (3, 7), "rk4": (1, 2), "dopri5": (None,)}
SWAP_STEPS = {"euler": (1, 2, 4, 8, 16, 32), "midpoint": (1, 2, 4, 8, 16), "ab2": (3, 7, 15, 31),
              "rk4": (1, 2, 4, 8), "dopri5": (None,)}
DEPTH = 1
TOLERANCE = 1e-2  # of the adaptive solver, relative and absolute
SIZE = (13, 4)
WORKERS = 2
FRONTS = Fronts(score="accuracy", label="test accuracy", higher=True, panel="part")


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """One training each: solver x steps x seed; and one model a seed for the swap."""
    for seed in range(seeds):
        yield {"part": "swap", "data": "digits", "seed": seed, "updates": settings["updates"]}
    for solver, counts in reversed(STEPS.items()):  # the longest first
        for steps in reversed(counts):
            for seed in range(seeds):
                yield {"part": "train", "data": "digits", "solver": solver, "steps": steps, "seed": seed,
                       "updates": settings["updates"]}


def depth(solver: str, steps: int | None) -> dict[str, Any]:
    """The depth options of a case."""
    return {"rtol": TOLERANCE, "atol": TOLERANCE} if steps is None else {"n_steps": steps}


@cache
def data(name: str) -> Any:
    """The data set, loaded once."""
    return DATA[name]()


def trained(case: dict[str, Any], solver: str, steps: int | None) -> tuple[VisionEncoder, dict[str, Any]]:
    """A model trained under a solver, and a row about it."""
    images = data(case["data"])
    config = VisionConfig(image_size=images.size, patch_size=2, channels=images.channels, n_classes=images.n_classes,
                          n_layers=DEPTH, block=BlockConfig(32, 4, d_ff=64, coupling="parallel"),
                          depth=DepthConfig(solver=solver, weights="shared", **depth(solver, steps)))
    return train(lambda: VisionEncoder(config), as_task(images), seed=case["seed"], steps=case["updates"],
                 batch_size=64, learning_rate=5e-3)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Test accuracy, NFE of a forward pass over the test images, CPU seconds of an update; in the swap those of the
    evaluation, for they are not trained again."""
    images = data(case["data"])
    if case["part"] == "train":
        model, row = trained(case, case["solver"], case["steps"])
        found, _ = evaluated(model, images)
        return [row | found | {"steps": case["steps"]}]
    fine, row = trained(case, "rk4", 4)
    _, reference = evaluated(fine.with_solver("rk4", n_steps=256), images)
    rows = []
    for solver, counts in SWAP_STEPS.items():
        for steps in counts:
            begun = time.process_time()
            found, z = evaluated(fine.with_solver(solver, **depth(solver, steps)), images)
            seconds = time.process_time() - begun
            rows.append(row | found | {"solver": solver, "steps": steps, "n_steps": found["n_steps"],
                                       "seconds": seconds,
                                       "state_error": ((z - reference).norm() / reference.norm()).item()})
    return rows


@torch.no_grad()
def evaluated(model: VisionEncoder, images: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """NFE, steps and accuracy on the test images, and the final state."""
    logits, solution = model(images.test_x, return_solution=True, save_states=False)
    hits = (logits.argmax(-1) == images.test_y).float()
    return {"nfe": solution.nfe, "n_steps": solution.n_steps, "accuracy": hits.mean().item()}, solution.z


def grouped(rows: list[dict[str, Any]], part: str) -> Iterator[tuple[str, int | None, list[dict[str, Any]]]]:
    """Rows of one part by (solver, steps), the seeds together."""
    chosen = [row for row in rows if row["case"]["part"] == part]
    for solver, steps in dict.fromkeys((row["solver"], row["steps"]) for row in chosen):
        yield solver, steps, [row for row in chosen if (row["solver"], row["steps"]) == (solver, steps)]


def against_euler(rows: list[dict[str, Any]], part: str, group: list[dict[str, Any]]) -> Any:
    """The difference in accuracy to euler at equal NFE, None where there is no such row."""
    for solver, _, base in grouped(rows, part):
        equal = {row["nfe"] for row in base} == {row["nfe"] for row in group}
        if solver == "euler" and equal and group[0]["solver"] != "euler":
            return difference(by_seed(group, "accuracy"), by_seed(base, "accuracy"))
    return None


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows: means over seeds, spread as the standard deviation."""
    for part, counts in (("train", STEPS), ("swap", SWAP_STEPS)):
        order = [(solver, steps) for solver in counts for steps in counts[solver]]
        for solver, steps, group in sorted(grouped(rows, part), key=lambda x: order.index(x[:2])):
            scores, found = [row["accuracy"] for row in group], against_euler(rows, part, group)
            error = f"{median(row['state_error'] for row in group):.1e}" if part == "swap" else ""
            cost = f"{1e3 * mean(r['seconds'] for r in group):.1f}" if part == "train" else ""
            yield (part, solver, "adaptive" if steps is None else steps, f"{mean(r['nfe'] for r in group):.3g}",
                   f"{mean(scores):.4f}", f"{stdev(scores):.4f}" if len(scores) > 1 else "",
                   "" if found is None else found.shown(4), "" if found is None else found.verdict(), error, cost)


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Accuracy against NFE in training and after it, and the state's error against NFE."""
    panels = figure.subplots(1, 3)
    looks = dict(zip(STEPS, (("o", "#0072B2"), ("s", "#E69F00"), ("^", "#009E73"), ("D", "#D55E00"),
                             ("*", "#CC79A7")), strict=True))
    shown = (("train", "accuracy", "trained under the solver"), ("swap", "accuracy", "one model, solver swapped"),
             ("swap", "state_error", "one model, solver swapped"))
    for axes, (part, value, title) in zip(panels, shown, strict=True):
        for solver, (marker, color) in looks.items():
            groups = [group for name, _, group in grouped(rows, part) if name == solver]
            groups.sort(key=lambda group: group[0]["nfe"])
            x = [mean(r["nfe"] for r in group) for group in groups]
            y = [mean(r[value] for r in group) for group in groups]
            bars = [stdev([r[value] for r in group]) if len(group) > 1 else 0 for group in groups]
            bars = bars if value == "accuracy" else None
            axes.errorbar(x, y, bars, marker=marker, color=color, label=solver, capsize=2, linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("NFE (evaluations of the whole field a forward pass)")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy")
    panels[1].set_ylabel("test accuracy")
    panels[2].set_ylabel("relative error of the final state")
    panels[2].set_yscale("log")
    panels[0].legend(frameon=False)
