"""High order at equal compute, at equal parameters, and at both.

For the ODE Transformer (Li et al. 2022, ACL, arXiv:2203.09176) 6 encoder layers of RK2 with learned γ are reported
ahead of 12 residual ones, 30.53 to 29.91 BLEU on WMT'14 English-German. Both evaluate a layer 12 times a pass, so there
RK2 has half of the parameters; beside 6 residual layers it has as many, and spends twice the compute. So each method
is compared with Euler three times (numbers in brackets: digits, on smaller models):

* equal NFE: as many layers as make 12 (4) evaluations of the whole field, of one width; parameters differ;
* equal parameters: 6 (2) layers of one width; NFE and multiply-adds differ;
* both: as many layers as make 12 (4) evaluations, of a width (d_model, then d_ff) at which all have as many parameters
  as 6 (2) layers of the usual one. Fewer layers are then wider, and cost up to 4 times the multiply-adds: a gain here
  is one of width before it is one of order.

A model that is in two pairs is trained once. A layer is one field (coupling "composed": Euler is the textbook layer),
but under "strang", where attention and feed-forward take turns. "ab2" and "dense" reach across layers, "abm2" takes two
steps in each and corrects within. Learned coefficients start as published ("rk2_learned" at (1, 1), which is not
consistent), "rk2_family" keeps order 2. "torch.nn" is PyTorch's own pre-norm Transformer.

Same data order by seed; the same learning rate, schedule and number of updates for all models of a task. The rate was
chosen for Euler in short trials, and updates are few: this is about small models early in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison import by_seed, difference
from benchmarks.fronts import Fronts
from benchmarks.images import images
from benchmarks.reference import TorchDecoder, TorchVision
from benchmarks.training import BASELINE, REFERENCE, averaged, compared, train
from benchmarks.truncation import documentation
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.models.base import to_be_filled
from odeformer.plots.style import COLORS, MARKERS
from odeformer.tables import look_up
from odeformer.tasks import Classification

COLUMNS = ("task", "equal", "method", "layers", "d_model", "NFE", "parameters", "multiply-adds a token", "metric",
           "spread", "over euler", "verdict")


@dataclass(frozen=True)
class Method:
    """How a method takes depth: n layers are ``per_layer`` n + ``first`` evaluations."""

    solver: str
    per_layer: int
    first: int = 0
    coupling: str = "composed"
    steps_per_layer: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def layers(self, nfe: int) -> int:
        """How many layers make that many evaluations. Raises ValueError where none do."""
        n, rest = divmod(nfe - self.first, self.per_layer)
        if rest or n < 1:
            raise ValueError(f"nfe must be {self.first} + a multiple of {self.per_layer} for {self.solver}, got {nfe}")
        return n

    def depth(self) -> DepthConfig:
        """The model's depth."""
        return DepthConfig(solver=self.solver, steps_per_layer=self.steps_per_layer, solver_options=self.options)


METHODS: dict[str, Method] = {
    BASELINE: Method("euler", 1),
    REFERENCE: Method("euler", 1),
    "midpoint": Method("midpoint", 2),
    "heun2": Method("heun2", 2),
    "rk4": Method("rk4", 4),
    "ab2": Method("ab2", 1, first=1, options={"across_pieces": True}),
    "dense": Method("dense", 1),
    "abm2": Method("abm2", 4, steps_per_layer=2),
    "pc_ema": Method("pc_ema", 3),
    "rk2_learned": Method("rk2_learned", 2),
    "rk2_gate": Method("rk2_gate", 2),
    "rk2_family": Method("rk2_family", 2),
    "strang": Method("midpoint", 3, coupling="strang"),
}
MAIN = (BASELINE, "midpoint", "rk4")
PAIRS = {  # what is equal -> the methods compared
    "NFE": tuple(METHODS),
    "parameters": (*MAIN, "ab2", "dense", "pc_ema", "rk2_learned", "rk2_gate", "strang"),
    "NFE and parameters": (*MAIN, "ab2", "dense", "strang"),
}
METRICS = {"digits": ("accuracy", "test accuracy, digits", True),
           "python_docs": ("bits_per_byte", "bits per byte, Python's documentation", False)}
DIGITS = {"nfe": 4, "n_layers": 2, "d_model": 32, "batch_size": 32, "learning_rate": 4e-3, "methods": MAIN}
DOCS = {"nfe": 12, "n_layers": 6, "d_model": 32, "batch_size": 8, "length": 32, "learning_rate": 8e-3,
        "methods": tuple(METHODS)}
PRESETS = {
    "quick": {"seeds": 3, "tasks": {"digits": {"steps": 120, **DIGITS}}},
    "cpu": {"seeds": 5, "tasks": {"python_docs": {"steps": 120, **DOCS}, "digits": {"steps": 200, **DIGITS}}},
}
SHAPES = ("nfe", "n_layers", "d_model", "methods")  # settings that say which models there are
COSTS = {"nfe": "NFE of a forward pass", "parameters": "parameters"}
HEADS = 4
PATCH = 2
SIZE = (14, 8)
WORKERS = 2
FRONTS = Fronts(score="bits_per_byte", label="bits per byte, unseen documentation", higher=False, series="method")


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Task x model x seed, with the pairs that the model is in."""
    for name, options in settings["tasks"].items():
        training = {key: value for key, value in options.items() if key not in SHAPES}
        for (method, n_layers, d_model, d_ff), pairs in models(name, options).items():
            for seed in range(seeds):
                yield {"task": name, "method": method, "n_layers": n_layers, "d_model": d_model, "d_ff": d_ff,
                       "equal": pairs, "seed": seed, **training}


def models(task: str, options: dict[str, Any]) -> dict[tuple[str, int, int, int], list[str]]:
    """(method, n_layers, d_model, d_ff) -> the pairs that it is in."""
    found: dict[tuple[str, int, int, int], list[str]] = {}
    n, width = options["n_layers"], options["d_model"]
    for pair, methods in PAIRS.items():
        for method in methods:
            if method not in options["methods"]:
                continue
            layers = n if pair == "parameters" else METHODS[method].layers(options["nfe"])
            shape = (width, 4 * width) if "and" not in pair else matched(task, options, method, layers)
            found.setdefault((method, layers, *shape), []).append(pair)
    return found


def matched(task: str, options: dict[str, Any], method: str, layers: int) -> tuple[int, int]:
    """(d_model, d_ff) at which ``layers`` have nearest to as many parameters as ``n_layers`` of the usual width.

    A layer's parameters go with the square of its width; d_ff takes up what the steps of d_model leave over.
    """
    def count(n: int, d_model: int, d_ff: int, method: str = method) -> int:
        case = options | {"task": task, "method": method, "n_layers": n, "d_model": d_model, "d_ff": d_ff}
        with to_be_filled():
            return sum(p.numel() for p in make(case).parameters())

    n_layers, width = options["n_layers"], options["d_model"]
    d_model = max(1, round(width * (n_layers / layers) ** 0.5 / HEADS)) * HEADS
    few, many = count(layers, d_model, 1), count(layers, d_model, 2)
    return d_model, max(1, 1 + round((count(n_layers, width, 4 * width, BASELINE) - few) / (many - few)))


def make(case: dict[str, Any]) -> Any:
    """The model."""
    method = look_up(METHODS, case["method"], "method")
    common = {"n_layers": case["n_layers"], "depth": method.depth(),
              "block": BlockConfig(case["d_model"], HEADS, d_ff=case["d_ff"], coupling=method.coupling)}
    plain = case["method"] == REFERENCE
    if case["task"] == "digits":
        data = images("digits")
        config = VisionConfig(image_size=data.size, patch_size=PATCH, channels=data.channels,
                              n_classes=data.n_classes, **common)
        return (TorchVision if plain else VisionEncoder)(config)
    return (TorchDecoder if plain else Decoder)(DecoderConfig(vocab_size=256, max_seq_len=case["length"], **common))


@cache
def task_of(name: str, length: int | None) -> Any:
    """The task."""
    return Classification(images(name)) if name == "digits" else documentation(length)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run."""
    task = task_of(case["task"], case.get("length"))
    model, row = train(lambda: make(case), task, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=case["learning_rate"])
    if case["method"] == REFERENCE:  # which does as much as its like of ours
        row["multiply_adds"] = make(case | {"method": BASELINE}).parameter_report()["multiply_adds"]
    return [row | task.evaluate(model)]


Groups = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]


def by_pair(rows: list[dict[str, Any]]) -> Groups:
    """(task, pair) -> {method: its rows, all seeds}, in the order of the tables above."""
    groups: Groups = {}
    for task in dict.fromkeys(row["case"]["task"] for row in rows):
        for pair in PAIRS:
            chosen = [row for row in rows if row["case"]["task"] == task and pair in row["case"]["equal"]]
            groups[task, pair] = {method: group for method in METHODS
                                  if (group := [row for row in chosen if row["case"]["method"] == method])}
    return groups


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a task, pair and method, over seeds; the difference is to euler in the same pair."""
    lines = []
    for (task, pair), methods in by_pair(rows).items():
        name, _, higher = METRICS[task]
        for method, group in methods.items():
            row = group[0]
            cells = compared(group, methods.get(BASELINE, group), name, higher)
            lines.append((task, pair, method, f"{row['case']['n_layers']}", f"{row['case']['d_model']}",
                          f"{row['nfe']:g}", f"{row['parameters']}", f"{row['multiply_adds']}", *cells))
    return lines


def look(method: str, pair: str) -> dict[str, Any]:
    """How a point looks: its method has a colour and is filled or hollow, its pair has a shape."""
    i = list(METHODS).index(method)
    color = COLORS[i % len(COLORS)]
    return {"color": color, "marker": MARKERS[list(PAIRS).index(pair)], "linestyle": "none", "markersize": 5,
            "markerfacecolor": color if i < len(COLORS) else "white"}


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """A row of panels a task: differences to euler, then the metric against NFE and against parameters."""
    groups = by_pair(rows)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    for panels, task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
        mine = {pair: methods for (name, pair), methods in groups.items() if name == task}
        draw_differences(panels[0], mine, task)
        for axes, (cost, label) in zip(panels[1:], COSTS.items(), strict=True):
            draw_costs(axes, mine, METRICS[task][0], cost)
            axes.set_xlabel(label)
            axes.set_ylabel(METRICS[task][1])
    shown = dict.fromkeys(method for methods in groups.values() for method in methods)
    handles = [figure.axes[1].plot([], [], label=method, **look(method, "NFE"))[0] for method in shown]
    handles += [figure.axes[1].plot([], [], label=f"equal {pair}", **look(BASELINE, pair) | {
        "color": "0.5", "markerfacecolor": "0.5"})[0] for pair in PAIRS]
    figure.legend(handles=handles, fontsize=8, loc="outside right center")


def draw_differences(axes: Axes, pairs: dict[str, dict[str, list[dict[str, Any]]]], task: str) -> None:
    """A line a method, a point a pair: the difference to euler with its 95 % interval."""
    name, label, higher = METRICS[task]
    methods = [method for method in METHODS if method != BASELINE and any(method in group for group in pairs.values())]
    for k, (pair, groups) in enumerate(pairs.items()):
        for method in groups.keys() & set(methods) if BASELINE in groups else ():
            found = difference(by_seed(groups[method], name), by_seed(groups[BASELINE], name))
            axes.errorbar(found.mean, -methods.index(method) - 0.22 * (k - 1),
                          xerr=[[found.mean - found.low], [found.high - found.mean]], capsize=2,
                          **look(method, pair))
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks([-i for i in range(len(methods))], methods, fontsize=8)
    axes.set_ylim(0.6 - len(methods), 0.4)
    axes.set_xlabel(f"difference to euler in {label.split(',')[0]}\n({'right' if higher else 'left'}: better; "
                    "95 % intervals)")
    axes.grid(alpha=0.3)


def draw_costs(axes: Axes, pairs: dict[str, dict[str, list[dict[str, Any]]]], name: str, cost: str) -> None:
    """Means with the spread over seeds; equal costs are drawn a little apart."""
    for pair, groups in pairs.items():
        for method, group in groups.items():
            value, spread = averaged(group, name)
            aside = 1 + 0.01 * (list(METHODS).index(method) - len(METHODS) / 2)
            axes.errorbar(group[0][cost] * aside, value, spread, capsize=2, **look(method, pair))
    axes.set_xscale("log")
    costs = sorted({group[0][cost] for groups in pairs.values() for group in groups.values()})
    kept = [x for i, x in enumerate(costs) if not i or x > 1.1 * costs[i - 1]]  # ticks that do not run into each other
    axes.set_xticks(kept, [f"{x:,.0f}" for x in kept], rotation=45 if cost == "parameters" else 0)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
