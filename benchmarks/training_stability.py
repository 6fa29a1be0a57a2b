"""Stability of training: the largest learning rate, and with it the largest depth, that train, for each placement of
the norm and each solver.

A small vision Transformer, one step a layer, learns the digits by AdamW at a constant rate, without warm-up and without
clipping. It *trains* at a rate if all updates are made, no loss among them is not finite or above ``BLOWN`` times the
first one, and the mean loss of the last tenth of the updates is at most ``SHARE`` of the first (which is that of a
guess, log 10, as the head starts at 0). The rates are powers of 2; bisection finds a rate that trains while the next
one does not (which of them, where more than one is such a boundary, is left to it). That is a statement about the
start of training and about this model, not about the best rate or the accuracy in the end.

Equal in all: width, data, their order, updates and, but for what norms have, parameters. Not equal: NFE (rk4 evaluates
four times where Euler does once), which the table gives. "deepest": the deepest model of the ladder whose largest rate
is at least ``RATE``. Differences are in powers of 2, paired by seed: -1 is half the rate. Where no rate of the ladder
trains, the one below it counts, and where all do, the highest one, so that differences there are bounds; a rate that is
too low to get anywhere in so few updates counts as one that does not train, too. ``momentum`` (γ = 0.9) is reversible;
it adds a tenth of each new layer's increment to a decaying sum, so that a deep model behaves like a shallow one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.comparison import by_seed, difference
from benchmarks.images import images
from benchmarks.norm_gradients import PLACEMENTS
from benchmarks.training import depth, described, grouped, measured_update
from odeformer import BlockConfig, VisionConfig, VisionEncoder
from odeformer.depth import SolverError
from odeformer.tasks import Classification
from odeformer.train import TrainConfig, Trainer

COLUMNS = ("norm", "solver", "layers: largest rate", "NFE", "spread", "deepest at 2^-7", "log2 against pre, euler",
           "verdict", "with warm-up")
SHARE, BLOWN = 0.9, 2.0
RATE = 2.0**-7
NORMS: dict[str, dict[str, Any]] = {
    "pre": PLACEMENTS["pre"][0],
    "pre, RMSNorm": {"norm": "pre", "norm_options": {"kind": "rms"}},
    **{name: PLACEMENTS[name][0] for name in ("post", "res", "weighted", "deepnorm")},
}
SOLVERS = ("euler", "ab2 across layers", "midpoint", "rk4", "momentum")
BASE = ("pre", "euler")
SIZES = {"updates": 30, "d_model": 32, "batch_size": 32, "exponents": [-10, -3]}
PRESETS = {
    "quick": {"seeds": 3, "layers": {"euler": [2, 6], "rk4": [2, 6]}, "few": ["pre, RMSNorm", "res", "weighted"],
              "warm": [], **SIZES},
    "cpu": {"seeds": 5, "layers": {"euler": [2, 6, 12, 24], **{name: [2, 6] for name in SOLVERS[1:]}},
            "few": ["pre, RMSNorm"], "warm": [12], **SIZES},
    "gpu": {"seeds": 5, "layers": {name: [2, 6, 12, 24, 48] for name in SOLVERS}, "few": [], "warm": [12, 48],
            "updates": 100, "d_model": 128, "batch_size": 128, "exponents": [-14, -3], "device": "cuda"},
}
LOOKS = {"euler": ("o", "#0072B2"), "ab2 across layers": ("^", "#009E73"), "midpoint": ("s", "#E69F00"),
         "rk4": ("D", "#D55E00"), "momentum": ("v", "#CC79A7")}
SIZE = (12, 6.5)
WORKERS = 2


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Norm x solver x layers x seed, the deepest first; norms in ``few`` under Euler alone; under Euler, models as deep
    as ``warm`` says also with a warm-up over half of the updates."""
    common = {name: x for name, x in settings.items() if name not in ("seeds", "layers", "few", "warm")}
    plain = [(norm, solver, n_layers, 0) for norm in NORMS for solver, ladder in settings["layers"].items()
             if solver == BASE[1] or norm not in settings["few"] for n_layers in ladder]
    warm = [(norm, BASE[1], n_layers, settings["updates"] // 2) for norm in NORMS for n_layers in settings["warm"]]
    for norm, solver, n_layers, warmup in sorted(plain + warm, key=lambda one: -one[2]):
        for seed in range(seeds):
            yield {"norm": norm, "solver": solver, "n_layers": n_layers, "warmup": warmup, "seed": seed, **common}


def model(case: dict[str, Any]) -> VisionEncoder:
    """A fresh model; its weights depend on the seed alone."""
    torch.manual_seed(case["seed"])
    data, width = images("digits"), case["d_model"]
    block = BlockConfig(width, max(1, width // 16), d_ff=2 * width, **NORMS[case["norm"]])
    return VisionEncoder(VisionConfig(image_size=data.size, patch_size=4, channels=data.channels,
                                      n_classes=data.n_classes, n_layers=case["n_layers"], block=block,
                                      depth=depth(case["solver"]))).to(case.get("device", "cpu"))


def losses(trainer: Trainer) -> list[float]:
    """The loss of every update, up to the end or to the one that has diverged."""
    found: list[float] = []
    trainer.model.train()
    while not trainer.done and not diverged(found):
        try:
            found.append(trainer.train_step()["loss"])
        except (FloatingPointError, SolverError):  # the loss, its gradient or the state is not finite
            found.append(math.nan)
    return found


def diverged(found: Sequence[float]) -> bool:
    """Whether a loss is not finite or more than BLOWN times the first."""
    return any(not x <= BLOWN * found[0] or not math.isfinite(x) for x in found)


def trains(found: Sequence[float], updates: int) -> bool:
    """Whether losses are those of a training that works: see the module."""
    if len(found) < updates or diverged(found):
        return False
    return mean(found[-max(1, updates // 10):]) <= SHARE * found[0]


def boundary(works: Callable[[int], bool], n: int) -> int:
    """An i in -1 ... n - 1 such that i works (or is -1) and i + 1 does not (or is n), by bisection: for a ladder that
    works up to a rung, that rung. Asks log2(n + 1) times, rounded up, at most."""
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The largest rate that trains (None: none of the ladder) and its log2, and what every rate that was tried gave."""
    low, high = case["exponents"]
    ladder = [2.0**i for i in range(low, high + 1)]
    tried: dict[float, Any] = {}
    task, updates, row, done, begun = Classification(images("digits")), case["updates"], {}, 0, time.process_time()

    def works(i: int) -> bool:
        nonlocal row, done
        fresh = model(case)
        trainer = Trainer(fresh, task, TrainConfig(
            steps=updates, seed=case["seed"], batch_size=case["batch_size"], learning_rate=ladder[i],
            warmup=case["warmup"], schedule="constant", clip=math.inf))
        for group in trainer.optimizer.param_groups:  # one kernel for all: the same formula in a fraction of the time
            group.update(fused=True, foreach=False)
        row = row or described(fresh, task) | measured_update(trainer)
        found = losses(trainer)
        done += len(found)
        tried[ladder[i]] = {"trains": trains(found, updates), "updates": len(found), "diverged": diverged(found),
                            "share": mean(found[-max(1, updates // 10):]) / found[0]}
        return tried[ladder[i]]["trains"]

    best = boundary(works, len(ladder))
    tries = [{"rate": rate} | {name: None if x != x else x for name, x in one.items()} for rate, one in tried.items()]
    return [row | {"nfe": nfe(case), "largest_rate": ladder[best] if best >= 0 else None, "log2_rate": low + best,
                   "tried": tries, "seconds": (time.process_time() - begun) / done}]


@torch.no_grad()
def nfe(case: dict[str, Any]) -> float:
    """Of a forward pass."""
    x = images("digits").test_x[:1].to(case.get("device", "cpu"))
    return model(case).eval()(x, return_solution=True, save_states=False)[1].nfe


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a norm and solver; the differences at the largest number of layers that all have."""
    plain = [row for row in rows if row["case"]["warmup"] == 0]
    found = grouped(plain, "norm", "solver", "n_layers")
    ladders = {key: sorted({row["case"]["n_layers"] for row in group})
               for key, group in grouped(plain, "norm", "solver").items()}
    common = max(set.intersection(*map(set, ladders.values())))
    order = sorted(ladders, key=lambda key: (list(NORMS).index(key[0]), SOLVERS.index(key[1])))
    base = found.get((*BASE, common))
    lines = []
    for key in order:
        group = found[*key, common]
        against = difference(by_seed(group, "log2_rate"), by_seed(base, "log2_rate")) if base and key != BASE else None
        rates = ", ".join(f"{n}: {shown(found[*key, n])}" for n in ladders[key])
        verdict = "" if against is None else "both off the ladder" if off(group) and off(base) else against.verdict()
        lines.append((*key, rates, f"{group[0]['nfe']:g}", spread(group), f"{deepest(found, key, ladders[key]):g}",
                      "" if against is None else against.shown(1), verdict, warm(rows, key)))
    return lines


def off(group: list[dict[str, Any]]) -> bool:
    """Whether the largest rate of every seed lies beyond an end of the ladder."""
    low, high = group[0]["case"]["exponents"]
    return all(row["log2_rate"] < low or row["log2_rate"] >= high for row in group)


def shown(group: list[dict[str, Any]]) -> str:
    """The median over seeds of the largest rate."""
    low, high = group[0]["case"]["exponents"]
    middle = median(row["log2_rate"] for row in group)
    return f"below 2^{low}" if middle < low else f"2^{middle:g}" + (" or more" if middle >= high else "")


def spread(group: list[dict[str, Any]]) -> str:
    """The highest over the lowest seed's rate."""
    values = [row["log2_rate"] for row in group]
    return f"x{2 ** (max(values) - min(values)):g}"


def deepest(found: dict[tuple[Any, ...], list[dict[str, Any]]], key: tuple[str, str], ladder: list[int]) -> float:
    """The median over seeds of the largest number of layers with which the rate RATE trains, 0 where none does."""
    by_layers = {n: by_seed(found[*key, n], "log2_rate") for n in ladder}
    seeds = set.intersection(*map(set, by_layers.values()))
    return median(max((n for n in ladder if by_layers[n][seed] >= math.log2(RATE)), default=0) for seed in seeds)


def warm(rows: list[dict[str, Any]], key: tuple[str, str]) -> str:
    """The largest rates with warm-up."""
    chosen = [row for row in rows if row["case"]["warmup"] and (row["case"]["norm"], row["case"]["solver"]) == key]
    return ", ".join(f"{n}: {shown(group)}" for (n,), group in sorted(grouped(chosen, "n_layers").items()))


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """The largest rate against the layers, a panel for each norm, a line for each solver, with the range over seeds."""
    names = [norm for norm in NORMS if any(row["case"]["norm"] == norm for row in rows)]
    low, high = rows[0]["case"]["exponents"]
    panels = figure.subplots(math.ceil(len(names) / 3), min(3, len(names)), squeeze=False, sharex=True, sharey=True)
    for axes, norm in zip(panels.flat, names, strict=False):
        groups = grouped([row for row in rows if row["case"]["norm"] == norm], "solver", "warmup", "n_layers")
        lines = dict.fromkeys(key[:2] for key in groups)
        for solver, warmup in sorted(lines, key=lambda line: (SOLVERS.index(line[0]), line[1])):
            layers = sorted(key[2] for key in groups if key[:2] == (solver, warmup))
            place = 2 ** (0.09 * (SOLVERS.index(solver) - 2))  # beside each other: many lie on the same rung
            values = [[row["log2_rate"] for row in groups[solver, warmup, n]] for n in layers]
            middle = [median(x) for x in values]
            marker, color = LOOKS[solver]
            axes.errorbar([n * place for n in layers], middle,
                          [[m - min(x) for m, x in zip(middle, values, strict=True)],
                           [max(x) - m for m, x in zip(middle, values, strict=True)]],
                          marker="*" if warmup else marker, markersize=11 if warmup else 6, color=color, capsize=2,
                          linewidth=1.2, label=f"{solver}, warm-up" if warmup else solver)
        axes.axhspan(low - 1.4, low - 0.5, color="0.92", zorder=0)
        axes.set_title(norm)
        axes.grid(alpha=0.3)
    ticks = sorted({row["case"]["n_layers"] for row in rows})
    for axes in panels.flat[len(names):]:
        axes.remove()
    for axes in panels[-1]:
        axes.set_xlabel("layers")
    for axes in panels[:, 0]:
        axes.set_ylabel("largest learning rate that trains")
    panels[0, 0].set_xscale("log", base=2)
    panels[0, 0].set_xticks(ticks, map(str, ticks))
    panels[0, 0].minorticks_off()
    panels[0, 0].set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    panels[0, 0].set_ylim(low - 1.4, high + 0.5)
    panels[0, 0].set_yticks(range(low - 1, high + 1), ["none", *(f"$2^{{{i}}}$" for i in range(low, high + 1))])
    handles = {label: handle for axes in figure.axes
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
