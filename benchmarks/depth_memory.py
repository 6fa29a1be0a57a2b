"""Memory and time of a training step against depth, for each gradient mode.

Peak resident memory of a forward and a backward pass above that before them, each measurement in a process of its own,
so that what is counted is what the machine has to hold. Weights do not grow with depth here ("shared", and "spline"
with 4 knots), so what grows is activations.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.runner import one_thread
from odeformer import BlockConfig, DepthConfig, Encoder, EncoderConfig

COLUMNS = ("weights", "gradient", "solver", "MiB at 6 layers", "at 12", "at 24", "at 48", "at 96",
           "time / backprop at 48")
MODES = {"backprop": "midpoint", "checkpoint": "midpoint", "reversible": "reversible_midpoint", "adjoint": "midpoint"}
PRESETS = {
    "quick": {"seeds": 1, "depths": (6, 12, 24), "weights": ("shared",), "d_model": 64, "tokens": 64, "batch": 8},
    "cpu": {"seeds": 1, "depths": (6, 12, 24, 48, 96), "weights": ("shared", "spline"), "d_model": 128, "tokens": 64,
            "batch": 8},
}
OPTIONS = {"spline": {"n_knots": 4}}
SIZE = (9, 3.8)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Weights x gradient mode x depth."""
    for weights in settings["weights"]:
        for mode in MODES:
            for depth in settings["depths"]:
                yield {"weights": weights, "gradient": mode, "n_layers": depth,
                       **{name: settings[name] for name in ("d_model", "tokens", "batch")}}


def resident() -> tuple[int, int]:
    """(now, highest so far) in bytes, of this process (Linux)."""
    with open("/proc/self/status", encoding="utf-8") as file:
        lines = dict(line.split(":", 1) for line in file)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def step(case: dict[str, Any]) -> dict[str, float]:
    """Memory and seconds of a training step."""
    def model(n_layers: int) -> Encoder:
        torch.manual_seed(0)
        depth = DepthConfig(solver=MODES[case["gradient"]], gradient=case["gradient"], weights=case["weights"],
                            weights_options=OPTIONS.get(case["weights"], {}))
        encoder = Encoder(EncoderConfig(vocab_size=8, max_seq_len=case["tokens"], n_layers=n_layers, depth=depth,
                                        block=BlockConfig(case["d_model"], 4, coupling="composed")))
        with torch.no_grad():  # far from 0, where a norm is stiff and the adjoint cannot go back
            encoder.token_embedding.weight.mul_(20)
        return encoder

    def run(encoder: Encoder) -> float:
        tokens = torch.randint(8, (case["batch"], case["tokens"]))
        begun = time.process_time()
        encoder(tokens).square().mean().backward()
        return time.process_time() - begun

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the adjoint on a coarse grid says so
        run(model(1))  # what libraries load and keep the first time
        deep = model(case["n_layers"])
        before = resident()[0]
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # the highest so far is what it is now
        seconds = run(deep)
        return {"memory": resident()[1] - before, "seconds": seconds}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row, from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=one_thread) as pool:
        return [pool.submit(step, case).result()]


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line for each kind of weights and mode."""
    found = {(row["case"]["weights"], row["case"]["gradient"], row["case"]["n_layers"]): row for row in rows}
    lines = []
    for weights, mode in dict.fromkeys(key[:2] for key in found):
        cells = [found.get((weights, mode, depth)) for depth in (6, 12, 24, 48, 96)]
        times = [found.get((weights, name, 48)) for name in (mode, "backprop")]
        ratio = f"{times[0]['seconds'] / times[1]['seconds']:.2f}" if all(times) else "-"
        lines.append((weights, mode, MODES[mode], *(f"{row['memory'] / 2**20:.0f}" if row else "-" for row in cells),
                      ratio))
    return lines


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Memory against depth, both on logarithmic axes, a panel for each kind of weights."""
    names = list(dict.fromkeys(row["case"]["weights"] for row in rows))
    for axes, weights in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
        for mode in MODES:
            chosen = [row for row in rows if (row["case"]["weights"], row["case"]["gradient"]) == (weights, mode)]
            axes.plot([row["case"]["n_layers"] for row in chosen], [row["memory"] / 2**20 for row in chosen],
                      marker="o", label=mode)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(f"layers (weights {weights!r}, one step each)")
        axes.set_ylabel("memory of a training step, MiB")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].legend(fontsize=8)
