"""Accuracy against NFE on real images: which solver, how many evaluations of the field.

``train``: a small vision Transformer, one shared layer over the depth [0, 1], is trained under each solver and number
of steps; parameters are equal throughout. ``swap``: one model trained with fine steps is evaluated, weights unchanged,
under other solvers and step counts; its final state is compared with a reference of 256 rk4 steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from statistics import mean, median, stdev
from typing import Any

import torch

from odeformer import BlockConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.data import DATA
from odeformer.train import TrainConfig, Trainer

COLUMNS = ("part", "solver", "steps", "NFE", "parameters", "accuracy", "spread", "state error", "seconds")
PRESETS = {
    "quick": {"seeds": 3, "updates": 200},
    "cpu": {"seeds": 5, "updates": 1500},
}
STEPS = {"euler": (1, 2, 4, 8), "midpoint": (1, 2, 4), "ab2": (2, 4, 8), "rk4": (1, 2), "dopri5": (None,)}
SWAP_STEPS = {"euler": (1, 2, 4, 8, 16, 32), "midpoint": (1, 2, 4, 8, 16), "ab2": (2, 4, 8, 16, 32),
              "rk4": (1, 2, 4, 8), "dopri5": (None,)}
DEPTH = 1
RTOL = 1e-2
SIZE = (13, 4)
WORKERS = 8


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
    return {"rtol": RTOL, "atol": 1e-4} if steps is None else {"n_steps": steps}


@cache
def data(name: str) -> Any:
    """The data set, loaded once."""
    return DATA[name]()


def trained(case: dict[str, Any], solver: str, steps: int | None) -> tuple[VisionEncoder, float]:
    """A model trained under a solver, and the seconds it took. The data order depends on the seed alone."""
    images = data(case["data"])
    torch.manual_seed(case["seed"])
    block = BlockConfig(32, 4, d_ff=64, coupling="parallel")
    model = VisionEncoder(VisionConfig(
        image_size=images.size, patch_size=2, channels=images.channels, n_classes=images.n_classes, n_layers=DEPTH,
        block=block, depth=DepthConfig(solver=solver, weights="shared", **depth(solver, steps))))
    trainer = Trainer(model, images, TrainConfig(steps=case["updates"], seed=case["seed"], learning_rate=5e-3))
    trainer.run(progress=False)
    return model, trainer.seconds


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Test accuracy, NFE of a forward pass over the test images, seconds (of training, or of the evaluation)."""
    images = data(case["data"])
    if case["part"] == "train":
        model, seconds = trained(case, case["solver"], case["steps"])
        row, _ = evaluated(model, images, case["solver"], case["steps"])
        return [row | {"seconds": seconds}]
    fine, _ = trained(case, "rk4", 4)
    _, reference = evaluated(fine.with_solver("rk4", n_steps=256), images, "rk4", 256)
    rows = []
    for solver, counts in SWAP_STEPS.items():
        for steps in counts:
            row, z = evaluated(fine.with_solver(solver, **depth(solver, steps)), images, solver, steps)
            rows.append(row | {"state_error": ((z - reference).norm() / reference.norm()).item()})
    return rows


@torch.no_grad()
def evaluated(model: VisionEncoder, images: Any, solver: str, steps: int | None) -> tuple[dict[str, Any], torch.Tensor]:
    """A row about the test images, and the final state."""
    start = time.perf_counter()
    logits, solution = model(images.test_x, return_solution=True, save_states=False)
    seconds = time.perf_counter() - start
    hits = (logits.argmax(-1) == images.test_y).float()
    return {"solver": solver, "steps": steps, "nfe": solution.nfe, "n_steps": solution.n_steps,
            "parameters": sum(p.numel() for p in model.parameters()), "accuracy": hits.mean().item(),
            "seconds": seconds}, solution.z


def grouped(rows: list[dict[str, Any]], part: str) -> Iterator[tuple[str, int | None, list[dict[str, Any]]]]:
    """Rows of one part by (solver, steps), the seeds together."""
    chosen = [row for row in rows if row["case"]["part"] == part]
    for solver, steps in dict.fromkeys((row["solver"], row["steps"]) for row in chosen):
        yield solver, steps, [row for row in chosen if (row["solver"], row["steps"]) == (solver, steps)]


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows: means over seeds, spread as the standard deviation."""
    for part, counts in (("train", STEPS), ("swap", SWAP_STEPS)):
        order = [(solver, steps) for solver in counts for steps in counts[solver]]
        for solver, steps, group in sorted(grouped(rows, part), key=lambda x: order.index(x[:2])):
            scores = [row["accuracy"] for row in group]
            error = f"{median(row['state_error'] for row in group):.1e}" if part == "swap" else ""
            yield (part, solver, "adaptive" if steps is None else steps, f"{mean(r['nfe'] for r in group):.3g}",
                   group[0]["parameters"], f"{mean(scores):.4f}", f"{stdev(scores):.4f}" if len(scores) > 1 else "",
                   error, f"{mean(r['seconds'] for r in group):.2f}")


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
