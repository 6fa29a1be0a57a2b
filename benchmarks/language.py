"""A byte language model on Shakespeare's plays under several solvers, beside a plain torch.nn Transformer.

Equal parameters, equal data, equal updates, so unequal compute: NFE and seconds say how much. Bits per byte on plays
that were not trained on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.fronts import Fronts
from benchmarks.reference import TorchDecoder
from benchmarks.training import BASELINE, REFERENCE, averaged, cases, compared, depth, grouped, scatter, train
from odeformer import BlockConfig, Decoder, DecoderConfig
from odeformer.data import DATA
from odeformer.tasks import Language

__all__ = ["COLUMNS", "PRESETS", "cases", "draw", "measure", "summary"]

COLUMNS = ("solver", "NFE", "parameters", "bits per byte", "spread", "over euler", "verdict", "CPU s an update")
PRESETS = {
    "quick": {"seeds": 3, "steps": 60, "n_layers": 2, "d_model": 64, "length": 64, "batch_size": 16},
    "cpu": {"seeds": 5, "steps": 200, "n_layers": 3, "d_model": 64, "length": 64, "batch_size": 16},
    "gpu": {"seeds": 5, "steps": 20000, "n_layers": 8, "d_model": 512, "length": 512, "batch_size": 64},
}
TEST_BYTES = 100_000
SIZE = (5.5, 3.8)
FRONTS = Fronts(score="bits_per_byte", label="bits per byte, unseen plays", higher=False)
WORKERS = 2


@cache
def text(length: int) -> Language:
    """The task."""
    data = DATA["shakespeare"]()
    train_ids, test_ids = (torch.tensor(list(x.encode())) for x in (data.train, data.test))
    return Language("shakespeare", train_ids, test_ids[:TEST_BYTES], length=length)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run."""
    config = DecoderConfig(vocab_size=256, max_seq_len=case["length"], n_layers=case["n_layers"],
                           block=BlockConfig(case["d_model"], case["d_model"] // 32), depth=depth(case["solver"]))
    kind, task = TorchDecoder if case["solver"] == REFERENCE else Decoder, text(case["length"])
    model, row = train(lambda: kind(config), task, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=2e-3)
    return [row | task.evaluate(model)]


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a solver, over seeds."""
    lines = []
    groups = grouped(rows, "solver")
    for (solver,), group in groups.items():
        cells = compared(group, groups[BASELINE,], "bits_per_byte", higher_is_better=False)
        lines.append((solver, f"{group[0]['nfe']:g}", f"{group[0]['parameters']}", *cells,
                      f"{averaged(group, 'seconds')[0]:.3f}"))
    return lines


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Bits per byte against NFE."""
    scatter(figure.subplots(), grouped(rows, "solver"), "bits_per_byte", "bits per byte, unseen plays")
