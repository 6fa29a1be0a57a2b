"""What passes cost in time and memory, against NFE, depth, width, tokens, batch and processes, beside what
``odeformer estimate`` says beforehand.

One factor at a time is changed in a small decoder (``BASE``); ``solver`` changes the NFE at equal depth. Measured are a
forward pass, a training step (with the loss, clipping and AdamW) and a token that is written through the cache:
process time on one thread, all in turn, round after round, the median with its quartiles. A reference pass takes a
turn, too: where it takes longer than it did when the machine was measured for the estimates, the machine has become
slower (others are using it), and the round's times are divided by that. Memory is what a fresh process holds at most
beyond what it held before the model was made, with freed memory given back at once (MALLOC_MMAP_THRESHOLD_=131072);
``as malloc keeps it``: without that, as the C library does by itself.

``processes``: training by 1, 2 and, where there are cores for them, 4 processes (``--train.parallel ddp``, gloo), each
on one thread. Wall time, since they wait for each other, of a training step: ``batch shared``, where the slope would be
-1 if nothing were lost, and ``batch each``, where it would be 0. ``odeformer estimate`` knows of one process;
the prediction here is its time of one's share, times how much longer a reference pass takes where each process makes
one, plus that of summing all gradients, both measured in the same run. The waiting for the slowest is not in it.

``slope``: of a line through log cost against log factor, 1 where cost grows in proportion (2 for multiply-adds against
the width; less in small models, where Python takes the time). ``within 20 %``: the share of the configs for which the
estimate, made from a measurement of the machine in the same run, is no further than that from what was measured.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import islice
from statistics import median, quantiles
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import process_scaling
from benchmarks.depth_memory import resident
from benchmarks.runner import one_thread
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.estimate import estimate
from odeformer.machine import Machine, reference
from odeformer.machine import measure as measure_machine
from odeformer.optim import adamw
from odeformer.workload import inputs, loss, writing

COLUMNS = ("against", "values", "cost", "slope", "predicted slope", "predicted / measured", "within 20 %")
BASE = {"solver": "euler", "n_layers": 4, "d_model": 128, "n_tokens": 64, "batch": 8}
FACTORS = {
    "solver": ("euler", "midpoint", "kutta3", "rk4"),  # 1 to 4 evaluations a step
    "n_layers": (2, 4, 8, 16),
    "d_model": (64, 128, 256, 512),
    "n_tokens": (32, 64, 256, 512),
    "batch": (1, 8, 16, 32),
}
PRESETS = {
    "quick": {"seeds": 1, "rounds": 3, "values": 3},
    "cpu": {"seeds": 1, "rounds": 7, "values": 4},
}
COSTS = {"forward": "forward pass", "step": "training step", "token": "a token written"}
MEASURED = {"solver": "nfe", "processes": "processes"}  # factors whose amount is found when they are measured
LABELS = {"solver": "NFE"}
MEMORY = {"step_bytes": "step, memory", "forward_bytes": "forward, memory"}
KEPT = {"step_kept_bytes": "step, memory as malloc keeps it"}
VOCAB, MOMENT, TOKENS = 256, 0.02, 8
THRESHOLD = (-3, 131072)  # glibc's M_MMAP_THRESHOLD, no longer moved by what is freed
SIZE = (16, 6.4)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Every value of every factor, the base once for each factor that has it; all numbers of processes in one."""
    for factor, values in FACTORS.items():
        for value in values[:settings["values"]]:
            yield {"factor": factor, **BASE, factor: value, "rounds": settings["rounds"]}
    if len(counts := process_scaling.counts()) > 1:
        yield {"factor": "processes", **BASE, "counts": list(counts), "rounds": settings["rounds"]}


def make(case: dict[str, Any]) -> Decoder:
    """The model of a case."""
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=case["n_tokens"], n_layers=case["n_layers"],
                                 block=BlockConfig(case["d_model"], 4), depth=DepthConfig(solver=case["solver"])))


@cache
def machine() -> Machine:
    """This one, measured once a run."""
    return measure_machine()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row, for ``processes`` one a number of them: measured and predicted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if case["factor"] == "processes":
            return process_scaling.measure(case, make, machine(), fresh())
        found = estimate(lambda: make(case), machine(), batch=case["batch"], n_tokens=case["n_tokens"])
        row = {"nfe": found.forward.nfe, "multiply_adds": found.forward.multiply_adds,
               "parameters": found.parameters, **times(case)}
    finally:
        torch.set_num_threads(threads)
    for name in COSTS:
        row[f"{name}_predicted"] = getattr(found, name).seconds
    for kept in (False, True):
        with ProcessPoolExecutor(1, fresh(), initializer=one_thread) as pool:
            row |= pool.submit(memory, case, kept).result()
    for name in MEMORY | KEPT:
        row[f"{name}_predicted"] = getattr(found, name.partition("_")[0]).bytes
    return [row]


@cache
def fresh() -> Any:
    """Where processes come from that have imported this module and done nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def times(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each cost, the median over rounds and the quartiles; ``slower``: the median of how much slower the
    machine had become, by which they were divided."""
    model = make(case)
    calls = {"forward": forward_of(model, case), "step": step_of(model, case), "token": token_of(model, case)}
    calls["slower"] = timed_of(reference())
    repeats = {name: max(1, round(MOMENT / max(call(1), 1e-6))) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()  # which then goes on as for any user
    for _ in range(case["rounds"]):
        for name, call in calls.items():
            rounds[name].append(call(repeats[name]))
    slower = [value / machine().reference for value in rounds.pop("slower")]
    found: dict[str, Any] = {"slower": median(slower)}
    for name, values in rounds.items():
        values = [value / factor for value, factor in zip(values, slower, strict=True)]
        low, _, high = quantiles(values, n=4)
        found |= {name: median(values), f"{name}_quartiles": [low, high]}
    return found


def timed_of(call: Callable[[], Any]) -> Callable[[int], float]:
    """Seconds of a call, over n of them."""
    def timed(n: int) -> float:
        begun = time.process_time()
        for _ in range(n):
            call()
        return (time.process_time() - begun) / n

    return timed


def forward_of(model: Decoder, case: dict[str, Any]) -> Callable[[int], float]:
    """Seconds of a forward pass, over n of them."""
    given = inputs(model, case["batch"], case["n_tokens"])

    def forward() -> None:
        with torch.no_grad():
            model(*given)

    return timed_of(forward)


def step_of(model: Decoder, case: dict[str, Any]) -> Callable[[int], float]:
    """Seconds of a training step."""
    given = inputs(model, case["batch"], case["n_tokens"])
    optimizer = adamw(model, learning_rate=1e-3, weight_decay=0.01)

    def step() -> None:
        loss(model, given)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed_of(step)


def token_of(model: Decoder, case: dict[str, Any]) -> Callable[[int], float]:
    """Seconds of writing a token in the middle of the longest text; those read before it are not timed."""
    before = case["n_tokens"] // 2 - TOKENS // 2

    def timed(n: int) -> float:
        spent = 0.0
        for _ in range(max(1, n // TOKENS)):
            text = writing(model, case["batch"], max(1, before - 1))
            next(text)
            begun = time.process_time()
            for _ in islice(text, TOKENS):
                pass
            spent += time.process_time() - begun
        return spent / (max(1, n // TOKENS) * TOKENS)

    return timed


def memory(case: dict[str, Any], kept: bool) -> dict[str, int]:
    """Bytes that this process comes to hold at most by a model and its passes; ``kept``: as malloc does by itself."""
    library, found = ctypes.CDLL(None), {}
    if not kept:
        library.mallopt(*THRESHOLD)
    small = {**case, "d_model": 16, "n_layers": 1, "n_tokens": 16, "batch": 1}
    for call in (forward_of, step_of):
        call(make(small), small)(2)  # what libraries load and keep the first time
    (torch.ones(1024, 1024) @ torch.ones(1024, 1024)).sum()
    gc.collect()
    library.malloc_trim(0)
    before, model = resident()[0], make(case)
    for name, call in (("forward", forward_of), ("step", step_of)):
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # the highest so far is what it is now
        call(model, case)(2)
        found[f"{name}_{'kept_' if kept else ''}bytes"] = resident()[1] - before
    return found


def amount(row: dict[str, Any]) -> float:
    """The factor as a number: NFE for the solver."""
    case = row["case"]
    factor = case["factor"]
    return row[MEASURED[factor]] if factor in MEASURED else case[factor]


def costs_of(factor: str) -> tuple[dict[str, str], dict[str, str]]:
    """What is measured against a factor: in seconds, and in bytes."""
    return (process_scaling.COSTS, {}) if factor == "processes" else (COSTS, MEMORY)


def slope(rows: list[dict[str, Any]], name: str) -> float:
    """Of log cost against log factor, by least squares."""
    points = [(math.log(amount(row)), math.log(row[name])) for row in rows]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - x)**2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else math.nan  # of a single point there is none


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line for each factor and cost, then what holds for all, those of one process."""
    for factor in dict.fromkeys(row["case"]["factor"] for row in rows):
        mine = [row for row in rows if row["case"]["factor"] == factor]
        values = " ".join(f"{amount(row):g}" for row in mine)
        times, memory = costs_of(factor)
        for name, words in (times | memory).items():
            if name != "forward_bytes":
                yield (LABELS.get(factor, factor), values, words, f"{slope(mine, name):.2f}",
                       f"{slope(mine, f'{name}_predicted'):.2f}", *agreement(mine, [name]))
    alone = [row for row in rows if row["case"]["factor"] != "processes"]
    for names, words in ((COSTS, "time"), (MEMORY, "memory"), (KEPT, "step, memory as malloc keeps it")):
        if alone:
            yield ("all", "", words, "", "", *agreement(alone, names))


def agreement(rows: list[dict[str, Any]], names: Iterable[str]) -> tuple[str, str]:
    """The range of predicted over measured, and how many are within 20 %."""
    ratios = [row[f"{name}_predicted"] / row[name] for row in rows for name in names]
    good = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    return f"{min(ratios):.2f}-{max(ratios):.2f}", f"{good} of {len(ratios)}"


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """Time above and memory below, a panel for each factor: measured as points, predicted as lines."""
    factors = list(dict.fromkeys(row["case"]["factor"] for row in rows))
    panels = figure.subplots(2, len(factors), squeeze=False, sharey="row")
    for column, factor in zip(panels.T, factors, strict=True):
        mine = sorted((row for row in rows if row["case"]["factor"] == factor), key=amount)
        for axes, costs, unit in zip(column, costs_of(factor), (1e3, 2**-20), strict=True):
            axes.set_visible(bool(costs))
            panel(mine, axes, costs, unit)
            axes.set_xlabel(LABELS.get(factor, factor))
    panels[0][0].set_ylabel("process time, ms (lines: predicted)")
    panels[1][0].set_ylabel("memory, MiB (lines: predicted)")


def panel(rows: list[dict[str, Any]], axes: Axes, costs: dict[str, str], unit: float) -> None:
    """Costs, times unit, against a factor on logarithmic axes."""
    x = [amount(row) for row in rows]
    for i, (name, words) in enumerate(costs.items()):
        axes.plot(x, [unit * row[name] for row in rows], linestyle="none", marker="os^"[i], color=f"C{i}",
                  label=f"{words}, slope {slope(rows, name):.2f}")
        axes.plot(x, [unit * row[f"{name}_predicted"] for row in rows], color=f"C{i}", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if costs:
        axes.legend(fontsize=7, frameon=False)
