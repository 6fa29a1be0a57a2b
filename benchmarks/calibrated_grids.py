"""Does it pay to calibrate the steps? A grid from a sample against equal steps, at equal NFE, on other data.

A calibrated grid has equal local errors in its steps (``odeformer.calibration.calibrate``, ``solvers.calibrate_grid``).
Models: a vision Transformer with one shared layer (digits) and byte decoders (python_docs) with weights that are smooth
in depth (spline) or jump between layers (piecewise), each trained with equal steps; calibrated on training examples,
compared on test examples. Problems of ``solvers.problems``: calibrated from initial states near the given one (1 %, a
draw for each seed), compared on others.

error: of final states, |z - z_fine| / |z_fine|, mean over examples; an error above 1 counts as 1 (lost). agreement: the
share of predictions (classes, next bytes) that are those of the fine solution; accuracy: that are right, which is not
the same, as the weights were trained with the errors of few equal steps. ratio: error on the calibrated grid over error
with equal steps, geometric mean over seeds (spread: geometric standard deviation, a factor); below 1 the grid is
better. Intervals and verdicts are paired by seed, that of the ratio on its logarithm; "both lost": errors above 0.5.

How to read it: equal local errors are the right aim where errors last until the end (orbits, oscillations with fast
stretches). Where the flow contracts, early errors are forgotten, and equal steps may be better. The grid goes by the
error of a method of order 4 (dopri5's estimate), so it suits rk4 best; Euler and midpoint get the same grid with more
steps. The run that calibrates (once, on the sample) is not in the NFE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.comparison import Difference, by_seed, difference
from benchmarks.images import images
from benchmarks.training import train
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.calibration import calibrate
from odeformer.data import DATA
from odeformer.tasks import Classification, Language
from solvers import SOLVERS, SolverError, calibrate_grid, solve
from solvers.problems import get_problem

COLUMNS = ("what", "solver", "NFE", "error, equal steps", "error, calibrated", "ratio", "spread", "verdict",
           "agreement, equal and calibrated", "accuracy, equal steps", "accuracy, difference")
METHODS = ("euler", "midpoint", "rk4")
NFE = {  # (in the table, and in the plot alone)
    "digits, shared": (8, 16), "python_docs, spline": (16, 32), "python_docs, piecewise": (32, 64),
    "kepler": (1600, 6400), "van_der_pol": (400, 1600), "brusselator": (400, 1600), "logistic": (16, 64),
    "attention": (16, 64),
}
PRESETS = {
    "quick": {"seeds": 3, "targets": ["digits, shared", "kepler", "logistic"], "updates": 60},
    "cpu": {"seeds": 5, "targets": list(NFE), "updates": 300},
}
SIZE = (11, 5)
WORKERS = 2
N_LAYERS, LENGTH = 4, 64  # of the decoders
WEIGHTS: dict[str, dict[str, Any]] = {"spline": {"n_knots": 4}, "piecewise": {}}  # of the decoders, with options
NEAR, SAMPLES = 0.01, 16  # initial states of problems: by how much of its size they differ from the given one
LOST = 0.5  # error beyond which a solution says nothing of the true one
FINE = 64  # rk4 steps a layer for a model's reference
TIGHT = {"rtol": 1e-11, "atol": 1e-12, "max_nfe": 200_000}


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Target x seed; the targets that train first."""
    for target in settings["targets"]:
        for seed in range(seeds):
            yield {"target": target, "seed": seed, "updates": settings["updates"] if "," in target else None}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method, NFE and kind of grid."""
    compare = of_model if "," in case["target"] else of_problem
    return [{"method": method, "nfe": nfe, **numbers} for method, nfe, numbers in compare(case)]


@cache
def text() -> Language:
    """Bytes of Python's help."""
    data = DATA["python_docs"]()
    return Language("python_docs", *(torch.tensor(list(part.encode())) for part in (data.train, data.test)),
                    length=LENGTH)


def trained(case: dict[str, Any]) -> tuple[Any, Tensor, tuple[Tensor, Tensor], dict[str, Any]]:
    """A trained model in float64, the inputs it is calibrated on, unseen inputs with what is right for them, a row."""
    name, weights = case["target"].split(", ")
    block = BlockConfig(32, 4, d_ff=64, coupling="parallel")
    options = {"seed": case["seed"], "steps": case["updates"], "learning_rate": 5e-3}
    if name == "digits":
        data = images("digits")
        config = VisionConfig(image_size=data.size, patch_size=2, channels=data.channels, n_classes=data.n_classes,
                              n_layers=1, block=block, depth=DepthConfig(solver="rk4", n_steps=2, weights=weights))
        model, row = train(lambda: VisionEncoder(config), Classification(data), batch_size=64, **options)
        return model.double().eval(), data.train_x[:32].double(), (data.test_x.double(), data.test_y), row
    depth = DepthConfig(solver="midpoint", weights=weights, weights_options=WEIGHTS[weights])
    task, config = text(), DecoderConfig(vocab_size=256, max_seq_len=LENGTH, n_layers=N_LAYERS, block=block,
                                         depth=depth)
    model, row = train(lambda: Decoder(config), task, batch_size=16, **options)
    unseen = task.batch(torch.arange(24) * (task.splits["test"] // 24), "test")
    return model.double().eval(), task.batch(torch.arange(8))[:, :-1], (unseen[:, :-1], unseen[:, 1:]), row


def of_model(case: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Of a trained model."""
    model, sample, unseen, row = trained(case)
    about = {name: row[name] for name in ("parameters", "loss")}
    for method, nfe, numbers in judged(model, sample, unseen, case["target"]):
        yield method, nfe, about | numbers


@torch.no_grad()
def judged(model: Any, sample: Tensor, test: tuple[Tensor, Tensor],
           target: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A model on both grids."""
    n_layers, (unseen, right) = model.config.n_layers, test
    best, fine = model.with_solver("rk4", n_steps=FINE * n_layers)(unseen, return_solution=True, save_states=False)
    for method in METHODS:
        for nfe in NFE[target]:
            steps = steps_for(method, nfe)
            equal = model.with_solver(method, n_steps=steps)
            found = calibrate(equal, sample, nfe=nfe)
            numbers = {"grid": list(found.grid)}
            for kind, on_grid in (("equal", equal), ("calibrated", found.model)):
                logits, solution = on_grid(unseen, return_solution=True, save_states=False)
                check_nfe(solution.nfe, nfe, target, method)
                same, hits = ((logits.argmax(-1) == x).double().mean().item() for x in (best.argmax(-1), right))
                numbers |= {f"{kind}_error": off(solution.z, fine.z), f"{kind}_agreement": same,
                            f"{kind}_accuracy": hits}
            yield method, nfe, numbers


def of_problem(case: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Of an initial-value problem."""
    problem = get_problem(case["target"])
    draws = torch.randn(2 * SAMPLES, *problem.z0.shape, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(case["seed"]))
    sample, unseen = (problem.z0 + NEAR * problem.z0.norm() / problem.z0.numel() ** 0.5 * draws).split(SAMPLES)
    fine = solve(problem.f, unseen, span=problem.span, solver="dopri8", **TIGHT).z
    for method in METHODS:
        for nfe in NFE[case["target"]]:
            steps = steps_for(method, nfe)
            grid = calibrate_grid(problem.f, sample, span=problem.span, n_steps=steps, max_nfe=TIGHT["max_nfe"])
            numbers: dict[str, Any] = {"grid": grid}
            for kind, amounts in (("equal", {"n_steps": steps}), ("calibrated", {"grid": grid})):
                try:
                    solution = solve(problem.f, unseen, span=problem.span, solver=method, **amounts)
                    check_nfe(solution.nfe, nfe, case["target"], method)
                    numbers[f"{kind}_error"] = off(solution.z, fine)
                except SolverError:  # the state ran away
                    numbers[f"{kind}_error"] = 1.0
            yield method, nfe, numbers


def steps_for(method: str, nfe: int) -> int:
    """How many steps take ``nfe`` evaluations."""
    return nfe // SOLVERS[method].n_stages


def check_nfe(got: float, wanted: int, target: str, method: str) -> None:
    """Raises ValueError where NFE would not be equal."""
    if got != wanted:
        raise ValueError(f"{target} with {method!r} took {got} evaluations, and {wanted} are compared")


def off(z: Tensor, fine: Tensor) -> float:
    """|z - fine| / |fine|, mean over examples, each at most 1."""
    error = (z - fine).flatten(1).norm(dim=1) / fine.flatten(1).norm(dim=1)
    return error.nan_to_num(1.0).clamp(max=1.0).mean().item()


def joined(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """Rows of all seeds by (target, method, NFE)."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"]["target"], row["method"], row["nfe"]), []).append(row)
    return groups


def log_errors(group: list[dict[str, Any]], kind: str) -> dict[int, float]:
    """{seed: log error}."""
    return {seed: math.log(x) for seed, x in by_seed(group, f"{kind}_error").items()}


def ratio(group: list[dict[str, Any]]) -> Difference:
    """log of calibrated over equal."""
    return difference(*(log_errors(group, kind) for kind in ("calibrated", "equal")))


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a target and method, at the smaller NFE; errors and ratios are geometric means over seeds."""
    return [(target, method, f"{nfe}", *errors(group), *predictions(group))
            for (target, method, nfe), group in joined(rows).items() if nfe == NFE[target][0]]


def errors(group: list[dict[str, Any]]) -> tuple[str, ...]:
    """The cells about errors."""
    equal, calibrated = (log_errors(group, kind) for kind in ("equal", "calibrated"))
    found, logs = ratio(group), [calibrated[seed] - equal[seed] for seed in equal]
    return (*(f"{math.exp(mean(x.values())):.1e}" for x in (equal, calibrated)),
            "{:.3g} [{:.3g}, {:.3g}]".format(*map(math.exp, (found.mean, found.low, found.high))),
            f"{math.exp(stdev(logs)):.2f}" if len(logs) > 1 else "",
            "both lost" if min(mean(x.values()) for x in (equal, calibrated)) > math.log(LOST) else
            found.verdict(higher_is_better=False))


def predictions(group: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The cells about a model's predictions; a problem has none."""
    if "equal_accuracy" not in group[0]:
        return "", "", ""
    agreement = [mean(row[f"{kind}_agreement"] for row in group) for kind in ("equal", "calibrated")]
    equal = by_seed(group, "equal_accuracy")
    found = difference(by_seed(group, "calibrated_accuracy"), equal)
    return ("{:.3f}, {:.3f}".format(*agreement), f"{mean(equal.values()):.3f}",
            f"{found.shown(4)}: {found.verdict()}")


COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#B8A000")  # of targets
LOOKS = dict(zip(METHODS, (("o", "#0072B2"), ("s", "#E69F00"), ("D", "#D55E00")), strict=True))


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """The ratio of errors, its interval over seeds, for each target and method (filled: the smaller NFE; open: the
    larger); and where steps of rk4 fall."""
    groups, (axes, falls) = joined(rows), figure.subplots(1, 2, width_ratios=(3, 2))
    targets = list(dict.fromkeys(target for target, _, _ in groups))
    for (target, method, nfe), group in groups.items():
        larger = nfe != NFE[target][0]
        marker, color = LOOKS[method]
        found = ratio(group)
        middle, low, high = map(math.exp, (found.mean, found.low, found.high))
        y = targets.index(target) + 0.25 * (METHODS.index(method) - 1) + 0.1 * larger
        axes.errorbar(middle, y, xerr=[[middle - low], [high - middle]], marker=marker, color=color, capsize=2,
                      linestyle="none", markerfacecolor="white" if larger else color,
                      label=None if larger or target != targets[0] else method)
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(targets)), targets)
    axes.invert_yaxis()
    axes.set_xlabel("error on the calibrated grid / error with equal steps (left of 1: calibrated is better)")
    axes.set_title("filled: the NFE of the table; open: more", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    for i, target in enumerate(targets):
        grid = groups[target, "rk4", NFE[target][0]][0]["grid"]
        share = [(l - grid[0]) / (grid[-1] - grid[0]) for l in grid]
        falls.plot(share, [n / (len(grid) - 1) for n in range(len(grid))], color=COLORS[i], label=target,
                   linestyle=("-", "--", ":")[i % 3])
    falls.plot([0, 1], [0, 1], color="0.4", linewidth=1, label="equal steps")
    falls.set_xlabel("depth (share of the span)")
    falls.set_ylabel("share of the steps taken, rk4")
    falls.set_title("where calibrated steps fall (one seed)", fontsize=10)
    falls.legend(frameon=False, fontsize=7)
    falls.grid(alpha=0.3)
