"""Weights over depth compared at equal parameters and equal NFE, and what happens to each when the solver or the number
of steps changes after training.

All models have the same width, depth and number of evaluations; the feed-forward is made as wide as it takes for the
layers to have as many parameters as the piecewise model's, so fewer blocks are wider and cost more multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.images import images
from benchmarks.language import text
from benchmarks.training import compared, grouped, train
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.tasks import Classification, Language

COLUMNS = ("data", "weights", "layer parameters", "multiply-adds a token", "trained: midpoint, NFE 12", "spread",
           "over piecewise", "verdict", "euler, NFE 12", "midpoint, NFE 24", "rk4, NFE 24", "rk4, NFE 96")
FAMILIES: dict[str, dict[str, Any]] = {
    "piecewise": {},
    "shared": {},
    "linear": {"n_knots": 3},
    "spline": {"n_knots": 4},
    "modulated": {},
    "hyper": {"n_basis": 2},
}
TRAINED = ("midpoint", 1)  # solver and steps a layer: NFE 12 at 6 layers
SWAPS = (TRAINED, ("euler", 1), ("euler", 2), ("euler", 8), ("midpoint", 2), ("midpoint", 8), ("rk4", 1), ("rk4", 4))
METRICS = {"digits": "accuracy", "shakespeare": "bits_per_byte"}
PRESETS = {
    "quick": {"seeds": 3, "n_layers": 6, "tasks": {"digits": {"steps": 60, "d_model": 32, "batch_size": 64}}},
    "cpu": {"seeds": 5, "n_layers": 6, "tasks": {
        "digits": {"steps": 150, "d_model": 32, "batch_size": 64},
        "shakespeare": {"steps": 120, "d_model": 48, "batch_size": 16, "length": 64}}},
    "gpu": {"seeds": 5, "n_layers": 6, "tasks": {
        "digits": {"steps": 4000, "d_model": 128, "batch_size": 128},
        "shakespeare": {"steps": 10000, "d_model": 256, "batch_size": 64, "length": 256}}},
}
SIZE = (11, 4)
WORKERS = 2
TEST_BYTES = 20_000  # of the unseen plays


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Data x weights x seed."""
    for data, options in settings["tasks"].items():
        for weights in FAMILIES:
            for seed in range(seeds):
                yield {"data": data, "weights": weights, "seed": seed, "n_layers": settings["n_layers"], **options}


def config(case: dict[str, Any], d_ff: int, weights: str) -> Any:
    """The model's config."""
    solver, steps = TRAINED
    common = {"n_layers": case["n_layers"],
              "block": BlockConfig(case["d_model"], case["d_model"] // 16, d_ff=d_ff, coupling="parallel"),
              "depth": DepthConfig(solver=solver, steps_per_layer=steps, weights=weights,
                                   weights_options=FAMILIES[weights])}
    if case["data"] == "digits":
        data = images("digits")
        return VisionConfig(image_size=data.size, patch_size=2, channels=data.channels, n_classes=data.n_classes,
                            **common)
    return DecoderConfig(vocab_size=256, max_seq_len=case["length"], **common)


def make(config: Any) -> Any:
    """The model."""
    return (VisionEncoder if isinstance(config, VisionConfig) else Decoder)(config)


def layer_parameters(case: dict[str, Any], d_ff: int, weights: str) -> int:
    """How many parameters the layers have."""
    return sum(p.numel() for p in make(config(case, d_ff, weights)).layers.parameters())


def width(case: dict[str, Any]) -> int:
    """The d_ff with which the layers have nearest to as many parameters as the piecewise model's with 2 d_model."""
    wanted = layer_parameters(case, 2 * case["d_model"], "piecewise")
    few, many = (layer_parameters(case, d_ff, case["weights"]) for d_ff in (8, 9))
    return max(1, 8 + round((wanted - few) / (many - few)))


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run, then the trained weights under each solver."""
    settings = config(case, width(case), case["weights"])
    task = Classification(images("digits")) if case["data"] == "digits" else text(case["length"])
    model, row = train(lambda: make(settings), task, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=2e-3)
    report = model.parameter_report(None if case["data"] != "digits" else 16)
    short = shortened(task)
    metric = METRICS[case["data"]]
    swaps = {}
    for solver, steps in SWAPS:
        other = model.with_solver(solver, steps_per_layer=steps)
        swaps[f"{solver}:{steps * case['n_layers']}"] = {"nfe": other.parameter_report(16)["nfe"],
                                                         "metric": short.evaluate(other)[metric]}
    return [row | {"layer_parameters": report["layer_parameters"], "multiply_adds": report["multiply_adds"],
                   "swaps": swaps}]


def shortened(task: Any) -> Any:
    """The task on a shorter test text; images as they are."""
    if not isinstance(task, Language):
        return task
    return Language(task.name, task.train, task.test[:TEST_BYTES], length=task.length)


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a data set and family, means over seeds; shown of the swaps are four."""
    lines = []
    trained = [row | {"metric": row["swaps"][_trained(row)]["metric"]} for row in rows]
    groups = grouped(trained, "data", "weights")
    for (data, weights), group in groups.items():
        cells = compared(group, groups[data, "piecewise"], "metric", higher_is_better=METRICS[data] == "accuracy")
        swapped = [f"{mean(row['swaps'][name]['metric'] for row in group):.3f}"
                   for name in ("euler:12", "midpoint:12", "rk4:6", "rk4:24")]
        lines.append((data, weights, f"{group[0]['layer_parameters']}", f"{group[0]['multiply_adds']}", *cells,
                      *swapped))
    return lines


def _trained(row: dict[str, Any]) -> str:
    return f"{TRAINED[0]}:{TRAINED[1] * row['case']['n_layers']}"


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """The metric against the NFE after training, a panel for each data set, a line for each family and solver."""
    names = list(dict.fromkeys(row["case"]["data"] for row in rows))
    styles = {"euler": (0, (1, 1)), "midpoint": "-", "rk4": "--"}
    for axes, data in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        chosen = [row for row in rows if row["case"]["data"] == data]
        for i, ((_, weights), group) in enumerate(grouped(chosen, "data", "weights").items()):
            for solver, style in styles.items():
                keys = sorted((key for key in group[0]["swaps"] if key.startswith(f"{solver}:")),
                              key=lambda key: group[0]["swaps"][key]["nfe"])
                axes.plot([group[0]["swaps"][key]["nfe"] for key in keys],
                          [mean(row["swaps"][key]["metric"] for row in group) for key in keys], linestyle=style,
                          color=f"C{i}", marker="os^Dvx"[i], markersize=4,
                          label=weights if solver == TRAINED[0] else None)
        axes.axvline(chosen[0]["swaps"][_trained(chosen[0])]["nfe"], color="0.8", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("NFE of a forward pass after training (grey: in training)")
        axes.set_ylabel({"accuracy": "test accuracy", "bits_per_byte": "bits per byte"}[METRICS[data]] + f", {data}")
        axes.grid(alpha=0.3)
    handles = [figure.axes[0].plot([], [], color="k", linestyle=style, label=solver)[0]
               for solver, style in styles.items()]
    first = figure.axes[0].legend(fontsize=7)
    figure.axes[0].add_artist(first)
    figure.axes[-1].legend(handles=handles, fontsize=7, title="solver", title_fontsize=7)
