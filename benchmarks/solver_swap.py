"""Solver and steps changed after training, weights unchanged: what that does to the metric, and which training makes it
free.

A model is trained under one solver, then evaluated under others and with other numbers of steps, up to a fine reference
(``FINE``). Every change of a metric is paired: the same weights before and after, seed by seed. A swap is *free* where
the whole interval of its change loses no more than ``MARGIN``; a tie is less, as its interval may be wide.
``invariance`` is 1 minus the mean relative distance of the final states from those of the fine reference, over
``EVALUATIONS``: the score that ``odeformer evaluate`` prints (``odeformer.invariance``).

Trainings: ``euler``, ``midpoint`` and ``rk4`` at 4 evaluations a layer; ``drawn``, under one of these three drawn anew
for every update; ``straight``, Euler with a penalty on the acceleration of the states, which costs two evaluations more
a step; ``one step``, the textbook Transformer, Euler with a step a layer, so a quarter of the NFE. Equal among them:
parameters, data, their order, updates. Weights over depth: ``shared`` has one block where the others have one a layer;
fewer trainings are made for it and for ``spline``.

Layers are evaluated as one field (coupling "parallel"), since a splitting has an error of its own, of first order, that
no solver takes away. A layer of piecewise weights takes at least one step, so half of one step there is not to be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from benchmarks.comparison import Difference, by_seed, difference
from benchmarks.images import images
from benchmarks.training import averaged, grouped, train
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.data import DATA
from odeformer.invariance import invariance
from odeformer.tasks import Classification, Language, device_of, to_device

COLUMNS = ("data", "weights", "trained under", "NFE", "metric", "spread", "other solver, 4 evaluations a layer: worst",
           "half the steps", "fine reference", "invariance", "free")
EQUAL = {"euler": 4, "midpoint": 2, "rk4": 1}  # steps a layer at which a pass has the same NFE
TRAININGS: dict[str, dict[str, Any]] = {  # name -> solver, steps a layer, and what is added
    "one step": {"solver": "euler", "steps": 1},
    **{solver: {"solver": solver, "steps": steps} for solver, steps in EQUAL.items()},
    "drawn": {"solver": "midpoint", "steps": EQUAL["midpoint"], "drawn": True},
    "straight": {"solver": "euler", "steps": EQUAL["euler"], "regularize": {"acceleration": 0.01}},
}
FAMILIES: dict[str, dict[str, Any]] = {"piecewise": {}, "shared": {}, "spline": {"n_knots": 4}}
SMOOTH = ("shared", "spline")  # a step may be longer than a layer
FINE = ("rk4", 8)
EVALUATIONS = (("euler", 1), ("euler", 2), ("euler", 4), ("euler", 8), ("midpoint", 1), ("midpoint", 2),
               ("midpoint", 4), ("rk4", 1), ("rk4", 2), FINE)
HALVES = (("euler", 0.5), ("midpoint", 0.5), ("rk4", 0.5))  # of one step a layer
MARGIN = 0.01  # of accuracy, or bits a byte
DIGITS = {"d_model": 32, "batch_size": 64, "learning_rate": 3e-3}
DOCS = {"d_model": 32, "batch_size": 16, "learning_rate": 3e-3, "length": 32}
PRESETS = {
    "quick": {"seeds": 3, "n_layers": 2, "trainings": {"piecewise": ["one step", "euler", "rk4", "drawn"]},
              "tasks": {"digits": {"updates": 60, **DIGITS}}},
    "cpu": {"seeds": 5, "n_layers": 4,
            "trainings": {"piecewise": list(TRAININGS), **{name: ["euler", "rk4", "drawn"] for name in SMOOTH}},
            "tasks": {"digits": {"updates": 100, **DIGITS}, "python_docs": {"updates": 100, **DOCS}}},
    "gpu": {"seeds": 5, "n_layers": 8, "trainings": {name: list(TRAININGS) for name in FAMILIES}, "tasks": {
        "digits": {"updates": 4000, "d_model": 128, "batch_size": 128, "learning_rate": 1e-3, "device": "cuda"},
        "python_docs": {"updates": 4000, "d_model": 256, "batch_size": 64, "learning_rate": 1e-3, "length": 256,
                        "device": "cuda"}}},
}
TEST_BYTES, SAMPLES = 5_000, 64  # how much text is evaluated, and of how many samples the states are compared
LOOKS = {"euler": ("o", "#0072B2"), "midpoint": ("s", "#E69F00"), "rk4": ("D", "#D55E00")}
STYLES = {"piecewise": "-", "spline": "--", "shared": ":"}
LABELS = {"accuracy": "change of test accuracy\n(up: better)", "bits_per_byte": "change of bits a byte\n(down: better)"}
SIZE = (15, 6.5)
WORKERS = 2


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Data x weights x training x seed."""
    for data, options in settings["tasks"].items():
        for weights, trainings in settings["trainings"].items():
            for training in trainings:
                for seed in range(seeds):
                    yield {"data": data, "weights": weights, "training": training, "seed": seed,
                           "n_layers": settings["n_layers"], **options}


@cache
def task_of(data: str, length: int | None) -> Any:
    """Digits, or the bytes of Python's documentation in windows of that length; once a process."""
    if length is None:
        return Classification(images(data))
    text = DATA[data]()
    train_ids, test_ids = (torch.tensor(list(x.encode())) for x in (text.train, text.test))
    return Language(data, train_ids, test_ids[:TEST_BYTES], length=length)


def model(case: dict[str, Any]) -> Any:
    """A fresh model under the training's solver."""
    training, width = TRAININGS[case["training"]], case["d_model"]
    common = {"n_layers": case["n_layers"],
              "block": BlockConfig(width, max(1, width // 16), d_ff=2 * width, coupling="parallel"),
              "depth": DepthConfig(solver=training["solver"], steps_per_layer=training["steps"],
                                   weights=case["weights"], weights_options=FAMILIES[case["weights"]])}
    if "length" in case:
        made = Decoder(DecoderConfig(vocab_size=256, max_seq_len=case["length"], **common))
    else:
        data = images(case["data"])
        made = VisionEncoder(VisionConfig(image_size=data.size, patch_size=data.size // 2, channels=data.channels,
                                          n_classes=data.n_classes, **common))
    return made.to(case.get("device", "cpu"))


@dataclass
class Drawn:
    """A task whose every loss is that of the same weights under a solver of EQUAL, drawn by a generator of its own."""

    task: Any
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: Any, batch: Any, **options: Any) -> tuple[Tensor, Any]:
        """As the task's."""
        solver, steps = list(EQUAL.items())[torch.randint(len(EQUAL), (), generator=self.generator).item()]
        return self.task.loss(model.with_solver(solver, steps_per_layer=steps), batch, **options)


def swapped(model: Any, solver: str, steps: float) -> Any:
    """The weights under a solver with that many steps a layer; half a step is one step over two layers."""
    if steps >= 1:
        return model.with_solver(solver, steps_per_layer=int(steps))
    return model.with_solver(solver, n_steps=max(1, round(steps * model.config.n_layers)))


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training, then a row for each evaluation of the trained weights."""
    task, training = task_of(case["data"], case.get("length")), TRAININGS[case["training"]]
    trained, row = train(lambda: model(case), Drawn(task, case["seed"]) if training.get("drawn") else task,
                         seed=case["seed"], steps=case["updates"], batch_size=case["batch_size"],
                         learning_rate=case["learning_rate"], regularize=training.get("regularize", {}))
    return evaluations(trained, task, row | {"trained": name_of((training["solver"], training["steps"]))})


def name_of(evaluation: tuple[str, float]) -> str:
    """Solver and steps a layer."""
    return f"{evaluation[0]}:{evaluation[1]:g}"


@torch.no_grad()
def evaluations(model: Any, task: Any, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row with what each evaluation gave: NFE, the metric and its change since training, the distance of the final
    states from the fine reference and the agreement of predictions with it; and the invariance of the model."""
    batch = task.batch(torch.arange(min(SAMPLES, task.splits["test"])), "test")
    batch = to_device(batch, device_of(model))
    states, outputs, rows = {}, {}, []
    for evaluation in (*EVALUATIONS, *(HALVES if model.config.depth.weights in SMOOTH else ())):
        name, other = name_of(evaluation), swapped(model, *evaluation)
        outputs[name], solution = task.forward(other, batch)
        states[name] = solution.z
        rows.append({"evaluated": name, "evaluated_nfe": solution.nfe, "metric": task.metric,
                     "value": task.evaluate(other)[task.metric]})
    found = invariance(states, outputs, name_of(FINE))
    always = [name_of(evaluation) for evaluation in EVALUATIONS]
    score = invariance({name: states[name] for name in always}, {name: outputs[name] for name in always},
                       name_of(FINE)).score
    before = next(one["value"] for one in rows if one["evaluated"] == row["trained"])
    return [row | one | {"change": one["value"] - before, "distance": found.distances[one["evaluated"]],
                         "agreement": found.agreement[one["evaluated"]], "invariance": score} for one in rows]


def changes(group: list[dict[str, Any]]) -> dict[str, Difference]:
    """For rows of one training: evaluation -> change of the metric since training."""
    by_name = grouped([row | {"case": row["case"] | {"evaluated": row["evaluated"]}} for row in group], "evaluated")
    base = by_seed(by_name[group[0]["trained"],], "value")
    return {name: difference(by_seed(rows, "value"), base) for (name,), rows in by_name.items()}


def swaps(group: list[dict[str, Any]]) -> dict[str, Difference | None]:
    """The three swaps of the table: under the other solvers at equal NFE the worst, half the steps, the reference."""
    found, trained, higher = changes(group), group[0]["trained"], better_is_higher(group)
    solver, steps = trained.split(":")
    equal = [found[name] for name in map(name_of, EQUAL.items()) if name != trained]
    worst = min(equal, key=lambda change: change.mean if higher else -change.mean)
    return {"equal NFE": worst, "half": found.get(name_of((solver, float(steps) / 2))), "fine": found[name_of(FINE)]}


def better_is_higher(group: list[dict[str, Any]]) -> bool:
    """Of the metric."""
    return group[0]["metric"] == "accuracy"


def is_free(change: Difference, higher: bool) -> bool:
    """Whether a swap loses less than MARGIN at either end of the interval."""
    return change.n > 1 and (change.low >= -MARGIN if higher else change.high <= MARGIN)


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a data set, family of weights and training."""
    lines = []
    for (data, weights, training), group in grouped(rows, "data", "weights", "training").items():
        higher, found = better_is_higher(group), swaps(group)
        value, spread = averaged([row for row in group if row["evaluated"] == row["trained"]], "value")
        cells = ["" if change is None else f"{change.shown(3)} {change.verdict(higher)}" for change in found.values()]
        free = [name for name, change in found.items() if change is not None and is_free(change, higher)]
        tried = sum(change is not None for change in found.values())
        lines.append((data, weights, training, f"{group[0]['nfe']:g}", f"{value:.3f}", f"{spread:.3f}", *cells,
                      f"{mean(by_seed_once(group, 'invariance').values()):.3f}",
                      "all" if len(free) == tried else ", ".join(free) or "none"))
    return lines


def by_seed_once(group: list[dict[str, Any]], name: str) -> dict[int, float]:
    """{seed: value} of what is the same in all rows of a seed."""
    return {row["case"]["seed"]: row[name] for row in group}


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Change of the metric against the NFE of the evaluation, a panel for each data set and training; for smooth and
    piecewise weights, under each solver; a star where the model was trained."""
    datas = list(dict.fromkeys(row["case"]["data"] for row in rows))
    trainings = [name for name in TRAININGS if any(row["case"]["training"] == name for row in rows)]
    panels = figure.subplots(len(datas), len(trainings), squeeze=False, sharex=True, sharey="row")
    groups = grouped(rows, "data", "training", "weights")
    for i, data in enumerate(datas):
        for axes, training in zip(panels[i], trainings, strict=True):
            for weights, style in STYLES.items():
                if (data, training, weights) in groups:
                    draw_model(axes, groups[data, training, weights], style)
            axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            axes.grid(alpha=0.3)
            axes.set_xscale("log", base=2)
            axes.set_yscale("symlog", linthresh=MARGIN)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.axhspan(-MARGIN, MARGIN, color="0.92", zorder=0)
            axes.set_title(f"{data}, trained: {training}", fontsize=9)
        metric = groups[next(key for key in groups if key[0] == data)][0]["metric"]
        panels[i, 0].set_ylabel(LABELS[metric])
    for axes in panels[-1]:
        axes.set_xlabel("NFE of a forward pass")
    handles = [Line2D([], [], color=color, marker=marker, label=solver) for solver, (marker, color) in LOOKS.items()]
    handles += [Line2D([], [], color="k", linestyle=style, label=f"{name} weights") for name, style in STYLES.items()
                if any(row["case"]["weights"] == name for row in rows)]
    handles += [Line2D([], [], color="k", marker="*", markersize=11, linestyle="none", label="as trained"),
                Patch(color="0.92", label=f"within {MARGIN:g}")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def draw_model(axes: Any, group: list[dict[str, Any]], style: str) -> None:
    """Mean change over seeds, a line for each solver that evaluates."""
    by_name = {name: change.mean for name, change in changes(group).items()}
    nfe = {row["evaluated"]: row["evaluated_nfe"] for row in group}
    for solver, (marker, color) in LOOKS.items():
        names = sorted((name for name in by_name if name.split(":")[0] == solver), key=nfe.__getitem__)
        axes.plot([nfe[name] for name in names], [by_name[name] for name in names], marker=marker, markersize=4,
                  color=color, linestyle=style, linewidth=1.2)
    trained = group[0]["trained"]
    axes.plot(nfe[trained], 0, marker="*", markersize=11, color="k", linestyle="none")
