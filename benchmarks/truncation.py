"""The "truncation error" study of the ODE Transformer, with its compute and with the truncation error itself.

Li et al. 2022 ("ODE Transformer", ACL, arXiv:2203.09176) train language models of one and two layers with a residual
block, RK2, RK2 with learned γ and RK4, and take the fall in perplexity from one to the next for a fall in truncation
error. Here the same blocks (and RK2 with a gate) in byte models of Python's documentation, a layer one field of its
own (coupling "composed"), one step a layer. RK2 and its kin evaluate each layer twice, RK4 four times, so beside each
block stands the residual network of as many evaluations, of 2 or 4 times the layers and their parameters.

The truncation error of a trained model is the relative distance of its states from those of the same field, weights
held, solved in 32 rk4 steps a layer: "a layer" begins at the model's own state at the start of each layer (mean over
layers), "in all" at the first state. "If solved so": the change of bits per byte when that state is read out in place
of the model's own. Were perplexity a truncation error, it would fall. A block with free weights (learned γ, from
(1, 1)) integrates γ_1 + γ_2 times its field, which is no small error; ``gamma`` in the results says how much.

Learning rate (2e-3 at its peak) and schedule (cosine) are the same for all but the control: the residual block at
4 times that rate. Its gain is what a change of training alone can do. All see the same batches, by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.fronts import Fronts
from benchmarks.training import averaged, compared, grouped, train
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.data import DATA
from odeformer.plots.style import looks
from odeformer.tasks import Language
from solvers import solve

RESIDUAL = "residual"
CONTROL = "residual, other rate"
BLOCKS = {  # name -> solver; each takes one step a layer
    RESIDUAL: "euler",
    "rk2": "heun2",
    "rk2, learned γ": "rk2_learned",
    "rk2, gate": "rk2_gate",
    "rk4": "rk4",
    CONTROL: "euler",
}
COLUMNS = ("layers", "block", "NFE", "parameters", "multiply-adds a token", "perplexity a byte", "bits per byte",
           "spread", "over residual, same layers", "verdict", "over residual, same NFE", "verdict",
           "truncation error a layer", "in all", "bits per byte if solved so")
PRESETS = {
    "quick": {"seeds": 3, "layers": [1], "steps": 60, "d_model": 32, "length": 32, "batch_size": 8,
              "learning_rate": 2e-3, "other_rate": 8e-3},
    "cpu": {"seeds": 5, "layers": [1, 2], "steps": 200, "d_model": 64, "length": 64, "batch_size": 8,
            "learning_rate": 2e-3, "other_rate": 8e-3},
}
MATCHED = (2, 4)  # how many times as many layers of the residual block cost as much as a block of another kind
REFERENCE_STEPS = 32  # rk4 steps a layer
TEST_BYTES = 12_000  # of the part of the documentation that is held out
WINDOWS = 16  # of the test text, to measure truncation on
HEADS = 4
SIZE = (14, 4.4)
WORKERS = 2
FRONTS = Fronts(score="bits_per_byte", label="bits per byte, unseen documentation", higher=False, series="block")


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Block x layers x seed, the costly ones first."""
    shapes = [(block, n) for n in settings["layers"] for block in BLOCKS]
    shapes += [(RESIDUAL, k * n) for n in settings["layers"] for k in MATCHED]
    names = ("steps", "d_model", "length", "batch_size")
    for block, n_layers in sorted(set(shapes), key=lambda shape: (-shape[1], list(BLOCKS).index(shape[0]))):
        rate = settings["other_rate" if block == CONTROL else "learning_rate"]
        for seed in range(seeds):
            yield {"block": block, "n_layers": n_layers, "seed": seed, "learning_rate": rate,
                   **{name: settings[name] for name in names}}


@cache
def documentation(length: int) -> Language:
    """Python's documentation as bytes, in windows of that length."""
    data = DATA["python_docs"]()
    train_ids, test_ids = (torch.tensor(list(x.encode())) for x in (data.train, data.test))
    return Language("python_docs", train_ids, test_ids[:TEST_BYTES], length=length)


def make(case: dict[str, Any]) -> Decoder:
    """The model."""
    block = BlockConfig(case["d_model"], HEADS, coupling="composed")
    return Decoder(DecoderConfig(vocab_size=256, max_seq_len=case["length"], n_layers=case["n_layers"], block=block,
                                 depth=DepthConfig(solver=BLOCKS[case["block"]])))


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run, and the truncation error of what it left."""
    task = documentation(case["length"])
    model, row = train(lambda: make(case), task, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=case["learning_rate"])
    return [row | task.evaluate(model) | truncated(model, task)]


@dataclass(frozen=True, eq=False)
class Truncation:
    """``layers``: relative error of each layer's step, from the model's own state before it; ``total``: of the final
    state, from the first one; ``exact``: the final state of the fine solve."""

    layers: tuple[float, ...]
    total: float
    exact: Tensor


def truncation(field: Any, states: Sequence[Tensor], n_steps: int = REFERENCE_STEPS) -> Truncation:
    """The truncation error of states (layers + 1), those at whole l, of ``field``, which has a piece a layer.

    |z - z_ref| / |z_ref|, norms over all entries; the reference takes ``n_steps`` rk4 steps a layer.
    Raises ValueError unless there is one state more than there are pieces.
    """
    pieces = field.pieces
    if len(states) != len(pieces) + 1:
        raise ValueError(f"states must be one more than the {len(pieces)} pieces of the field, got {len(states)}")
    with torch.no_grad():
        layers, exact = [], states[0]
        for (start, stop, f), before, after in zip(pieces, states, states[1:], strict=False):
            own, exact = (solve(f, z, span=(start, stop), solver="rk4", n_steps=n_steps).z for z in (before, exact))
            layers.append(distance(after, own))
    return Truncation(tuple(layers), distance(states[-1], exact), exact)


def distance(z: Tensor, reference: Tensor) -> float:
    """|z - reference| / |reference|."""
    return ((z - reference).norm() / reference.norm()).item()


def truncated(model: Decoder, task: Language) -> dict[str, Any]:
    """What a trained model's states are away from a fine solve, and what reading that out instead changes."""
    batch = task.batch(torch.arange(min(WINDOWS, task.splits["test"])), "test")
    with torch.no_grad():
        logits, solution = task.forward(model.eval(), batch, save_states=True)
        found = truncation(solution.field, solution.states)
        change = task.criterion(model.read_out(found.exact), batch) - task.criterion(logits, batch)
    gamma = getattr(model.solver, "gamma", None)
    return {"truncation_layers": list(found.layers), "truncation_layer": mean(found.layers),
            "truncation": found.total, "bits_change": change.item() / log(2),
            "gamma": None if gamma is None else gamma.tolist()}


Groups = dict[tuple[Any, ...], list[dict[str, Any]]]


def shown(groups: Groups) -> Iterator[tuple[int, tuple[str, int]]]:
    """(layers of the study, key of a group) in the order of the table: the blocks, then residual ones of their NFE."""
    layers = sorted({n for block, n in groups if block != RESIDUAL})
    for n in layers:
        for key in [*((block, n) for block in BLOCKS), *((RESIDUAL, k * n) for k in MATCHED)]:
            if key in groups:
                yield n, key


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a study and model, over seeds."""
    groups, lines = grouped(rows, "block", "n_layers"), []
    for n, key in shown(groups):
        group = groups[key]
        row = group[0]
        same_nfe = groups.get((RESIDUAL, row["nfe"]))
        value, spread, *over_layers = against(group, groups.get((RESIDUAL, n)))
        over_nfe = against(group, same_nfe)[2:]
        perplexity, layer, total = (averaged(group, name)[0] for name in ("perplexity", "truncation_layer",
                                                                          "truncation"))
        change, change_spread = averaged(group, "bits_change")
        lines.append((f"{n}", key[0] if key[1] == n else f"{key[0]}, {key[1]} layers", f"{row['nfe']:g}",
                      f"{row['parameters']}", f"{row['multiply_adds']}", f"{perplexity:.2f}", value, spread,
                      *over_layers, *over_nfe, f"{layer:.1e}", f"{total:.1e}", f"{change:+.3f} ± {change_spread:.3f}"))
    return lines


def against(group: list[dict[str, Any]], base: list[dict[str, Any]] | None) -> tuple[str, str, str, str]:
    """Mean, spread, difference and verdict in bits per byte; the last two empty where there is nothing to compare."""
    cells = compared(group, base or group, "bits_per_byte", higher_is_better=False)
    return cells if base else (*cells[:2], "", "")


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Bits per byte against NFE and against the truncation error, and what solving the same field finely changes."""
    groups = grouped(rows, "block", "n_layers")
    by_nfe, by_error, solved = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    look = dict(zip(BLOCKS, looks(), strict=False))
    for (block, n), group in sorted(groups.items(), key=lambda item: (list(BLOCKS).index(item[0][0]), item[0][1])):
        value, spread = averaged(group, "bits_per_byte")
        error, error_spread = averaged(group, "truncation")
        style = {"color": look[block].color, "marker": look[block].marker, "markersize": 4 + n**0.5, "capsize": 2,
                 "linestyle": "none"}
        first = (block, n) == min(key for key in groups if key[0] == block)
        aside = 1 + 0.03 * (list(BLOCKS).index(block) - len(BLOCKS) / 2)  # so that equal costs do not hide each other
        by_nfe.errorbar(group[0]["nfe"] * aside, value, spread, label=block if first else None, **style)
        by_error.errorbar(error, value, spread, min(error_spread, 0.9 * error), **style)
        by_error.annotate(f"{n}", (error, value), xytext=(5, 4), textcoords="offset points", fontsize=7)
    by_nfe.set_xscale("log", base=2)
    by_nfe.xaxis.set_major_formatter("{x:g}")
    by_nfe.set_xlabel("NFE of a forward pass")
    by_nfe.set_ylabel("bits per byte, unseen documentation (lower is better)")
    by_nfe.legend(fontsize=7)
    by_error.set_xscale("log")
    by_error.set_xticks([0.1, 0.2, 0.5, 1.0, 2.0], ["0.1", "0.2", "0.5", "1", "2"])
    by_error.minorticks_off()
    by_error.set_xlabel("truncation error: relative distance of the final state\nfrom a fine solve of the same field")
    by_error.set_ylabel("bits per byte (numbers: layers)")
    draw_solved(groups, solved, look)
    for axes in (by_nfe, by_error, solved):
        axes.grid(alpha=0.3)


def draw_solved(groups: Groups, axes: Any, look: dict[str, Any]) -> None:
    """The change of bits per byte when each trained model's field is solved finely, a line a model."""
    keys = list(dict.fromkeys(key for _, key in shown(groups)))
    for i, key in enumerate(keys):
        change, spread = averaged(groups[key], "bits_change")
        axes.errorbar(change, -i, xerr=spread, color=look[key[0]].color, marker=look[key[0]].marker, capsize=2)
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_yticks([-i for i in range(len(keys))], [f"{block}, {n}" for block, n in keys], fontsize=7)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_xlabel("change of bits per byte when the trained field\nis solved finely (right: worse)")
