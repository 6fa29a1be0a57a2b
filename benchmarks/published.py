"""The field's own methods side by side, as published and corrected (see ``odeformer.presets``): handwritten digits.

Equal data, updates and, to within 1 %, parameters: the feed-forward is made as wide as that takes, so methods that
share one layer cost more multiply-adds. NFE are unequal: "over Euler" compares with the plain Transformer of as many
layers; "at equal NFE" with the same layers in more Euler steps (equal parameters, h below 1), where there is one with
that NFE. "euler, 2 times the layers" is a plain Transformer with twice the NFE and the layers' parameters.
The forms of training_free_loop are the plain model after training. A difference whose interval holds 0 is a tie.
Few updates: what is compared is how far training gets in them, as much as what the forms can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from benchmarks.images import images
from benchmarks.training import averaged, compared, described, train
from odeformer import BlockConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.presets import PRESETS as METHODS
from odeformer.presets import configure
from odeformer.tasks import Classification

COLUMNS = ("method", "form", "NFE", "parameters", "multiply-adds", "accuracy", "spread", "over Euler", "verdict",
           "at equal NFE", "verdict", "CPU s an update")
SETTINGS = {"n_layers": 3, "d_model": 32, "batch_size": 64, "learning_rate": 5e-3}
PRESETS = {
    "quick": {"seeds": 3, "steps": 30, "methods": ["ode_transformer_rk4", "pcformer", "momentum"], **SETTINGS},
    "cpu": {"seeds": 5, "steps": 180, "methods": list(METHODS), **SETTINGS},
    "gpu": {"seeds": 5, "steps": 4000, "methods": list(METHODS), **SETTINGS | {"d_model": 64}},
}
PLAIN = ("euler", "1 step a layer")
REFINED = {f"{k} steps a layer": k for k in (2, 3, 4)}
DEEPER = {f"{k} times the layers": k for k in (2, 4)}
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s")
SIZE = (11, 5)
WORKERS = 2


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Method x form x seed; what is done to a trained plain model goes with the plain case."""
    forms = [("euler", form) for form in (*reversed(REFINED), *reversed(DEEPER), PLAIN[1])]
    forms += [(name, form) for name in settings["methods"] if not METHODS[name].after_training
              for form in METHODS[name].forms]
    common = {name: x for name, x in settings.items() if name not in ("seeds", "methods")}
    for method, form in forms:
        for seed in range(seeds):
            yield {"method": method, "form": form, "seed": seed, **common}


def config(case: dict[str, Any], method: str, form: str, d_ff: int) -> VisionConfig:
    """The model's config."""
    data, many = images("digits"), DEEPER.get(form, 1)
    plain = VisionConfig(
        image_size=data.size, patch_size=2, channels=data.channels, n_classes=data.n_classes,
        n_layers=case["n_layers"] * many, block=BlockConfig(case["d_model"], case["d_model"] // 16, d_ff=d_ff),
        depth=DepthConfig(steps_per_layer=REFINED.get(form, 1)))
    return plain if method == PLAIN[0] else configure(plain, method, corrected=form == "corrected")


def layer_parameters(case: dict[str, Any], method: str, form: str, d_ff: int) -> int:
    """How many parameters the layers and the solver have."""
    model = VisionEncoder(config(case, method, form, d_ff))
    others = getattr(model.solver, "parameters", tuple)
    return sum(p.numel() for p in (*model.layers.parameters(), *others()))


def width(case: dict[str, Any]) -> int:
    """The d_ff with which there are nearest to as many parameters as in the plain model with 2 d_model; that of the
    plain model where it has more layers."""
    plain = 2 * case["d_model"]
    if case["method"] == PLAIN[0]:
        return plain
    few, many = (layer_parameters(case, case["method"], case["form"], d_ff) for d_ff in (8, 9))
    return max(1, 8 + round((layer_parameters(case, *PLAIN, plain) - few) / (many - few)))


@cache
def task() -> Classification:
    """The task."""
    return Classification(images("digits"))


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run, and for the plain model what needs no training."""
    method, form = case["method"], case["form"]
    settings = config(case, method, form, width(case))
    regularize = METHODS[method].regularize if method in METHODS else {}
    model, row = train(lambda: VisionEncoder(settings), task(), seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=case["learning_rate"], regularize=regularize)
    rows = [row | task().evaluate(model) | {"method": method, "form": form}]
    if (method, form) != PLAIN:
        return rows
    for name, preset in METHODS.items():
        if preset.after_training:
            rows += [after(case, name, form, model, rows[0]) for form in preset.forms]
    return rows


def after(case: dict[str, Any], method: str, form: str, model: VisionEncoder, row: dict[str, Any]) -> dict[str, Any]:
    """The row of a form that a trained model is given."""
    other = VisionEncoder(config(case, method, form, 2 * case["d_model"]))
    other.load_state_dict(model.state_dict())
    report = other.parameter_report()
    found = task().evaluate(other.eval()) | {"method": method, "form": form, "nfe": report["nfe"],
                                             "multiply_adds": report["multiply_adds"]}
    return row | described(other, task()) | found | {name: None for name in ("seconds", "memory", "nfe_backward")}


def by_form(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows of all seeds together, Euler first, then in the order of the table of methods."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["form"]), []).append(row)
    order = [PLAIN, *((PLAIN[0], form) for form in (*REFINED, *DEEPER)),
             *((name, form) for name, preset in METHODS.items() for form in preset.forms)]
    return {key: groups[key] for key in order if key in groups}


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a form, over seeds."""
    groups = by_form(rows)
    refined = {groups[PLAIN[0], form][0]["nfe"]: groups[PLAIN[0], form] for form in (PLAIN[1], *REFINED)
               if (PLAIN[0], form) in groups}
    lines = []
    for (method, form), group in groups.items():
        first, equal = group[0], refined.get(group[0]["nfe"])
        at_equal = ("", "") if equal is None else compared(group, equal, "accuracy", True)[2:]
        lines.append((method, form, f"{first['nfe']:g}", f"{first['parameters']}", f"{first['multiply_adds']}",
                      *compared(group, groups[PLAIN], "accuracy", True), *at_equal,
                      "" if first["seconds"] is None else f"{averaged(group, 'seconds')[0]:.3f}"))
    return lines


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Accuracy against NFE: each method's two forms joined, Euler with more steps and with more layers as lines."""
    axes = figure.subplots()
    groups = by_form(rows)
    points = {key: (group[0]["nfe"], *averaged(group, "accuracy")) for key, group in groups.items()}
    for forms, style, label in ((REFINED, "-", "Euler, more steps"), (DEEPER, "--", "Euler, more layers")):
        line = [points[key] for key in (PLAIN, *((PLAIN[0], form) for form in forms)) if key in points]
        axes.errorbar(*zip(*line, strict=True), color="0.6", linestyle=style, marker=".", capsize=2, label=label)
    names = list(dict.fromkeys(method for method, _ in groups if method in METHODS))
    for i, name in enumerate(names):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i // len(COLORS) % len(MARKERS)]
        shift = 2 ** ((i - (len(names) - 1) / 2) * 0.028)  # so that points of equal NFE stand side by side
        pair = {form: points[name, form] for form in METHODS[name].forms if (name, form) in points}
        axes.plot([x * shift for x, _, _ in pair.values()], [y for _, y, _ in pair.values()], color=color,
                  linewidth=0.8)
        for form, (x, y, bar) in pair.items():
            axes.errorbar(x * shift, y, bar, color=color, marker=marker, capsize=2, linestyle="none",
                          markerfacecolor="white" if form == "published" else color,
                          label=name if form == "published" else None)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["nfe"] for row in rows})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel("NFE of a forward pass (points of equal NFE are set side by side)")
    axes.set_ylabel("test accuracy, digits (mean and standard deviation)")
    axes.set_title("white: as published; filled: corrected", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
