"""What a window costs: time and peak memory of attention, forward and backward, from 1k to 8k tokens.

One thread, batch 1, d_model 64, 4 heads, float32. Memory is the most bytes that torch's allocator held at a time in one
forward and backward pass, added up from the allocations that its profiler records, parameters and input left out; time
is process time, the median over rounds. Exponents are slopes of straight lines through the logarithms. Without a prior
and a window torch's fused kernel keeps no scores, so there only the time grows as the square.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from odeformer.attention import ATTENTION

D_MODEL, N_HEADS = 64, 4
WINDOWS = (None, 64, 256)
ATTENTIONS = {"softmax": {}, "local_gaussian": {"sigma": 16.0}}
COLUMNS = ("attention", "window", "tokens", "ms", "quartiles", "peak MiB", "time grows as", "memory grows as")
PRESETS = {
    "quick": {"seeds": 1, "tokens": (1024, 2048, 4096, 8192), "rounds": 3},
    "cpu": {"seeds": 1, "tokens": (1024, 2048, 4096, 8192), "rounds": 7},
}
SIZE = (10, 4.4)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Attention x window x tokens."""
    for attention in ATTENTIONS:
        for window in WINDOWS:
            for tokens in settings["tokens"]:
                yield {"attention": attention, "window": window, "tokens": tokens, "rounds": settings["rounds"]}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    attention = ATTENTION[case["attention"]](D_MODEL, N_HEADS, window=case["window"], **ATTENTIONS[case["attention"]])
    x = torch.randn(1, case["tokens"], D_MODEL, requires_grad=True)

    def once() -> None:
        x.grad = None
        attention.zero_grad()
        attention(x).sum().backward()

    def timed() -> float:
        start = time.process_time()
        once()
        return 1e3 * (time.process_time() - start)

    try:
        once()
        times = sorted(timed() for _ in range(case["rounds"]))
        x.grad = None
        attention.zero_grad()
        peak = peak_mib(once)
    finally:
        torch.set_num_threads(threads)
    return [{"ms": median(times), "ms_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]],
             "peak_mib": peak}]


def peak_mib(call: Callable[[], None]) -> float:
    """The most that torch's allocator holds at a time during a call, beyond what it held before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes of its own stages
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def lines(rows: list[dict[str, Any]]) -> Iterator[tuple[str, int | None, list[dict[str, Any]]]]:
    """(attention, window, its rows by tokens)."""
    for attention in ATTENTIONS:
        for window in WINDOWS:
            mine = [r for r in rows if (r["case"]["attention"], r["case"]["window"]) == (attention, window)]
            if mine:
                yield attention, window, mine


def exponent(rows: list[dict[str, Any]], name: str) -> float:
    """The p of tokens^p that fits best in logarithms."""
    x, y = [math.log(r["case"]["tokens"]) for r in rows], [math.log(r[name]) for r in rows]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows; the exponents stand in the last of each line."""
    for attention, window, mine in lines(rows):
        for row in mine:
            last = row is mine[-1]
            yield (attention, window or "none", row["case"]["tokens"], f"{row['ms']:.1f}",
                   "{:.1f}-{:.1f}".format(*row["ms_quartiles"]), f"{row['peak_mib']:.1f}",
                   f"tokens^{exponent(mine, 'ms'):.2f}" if last else "",
                   f"tokens^{exponent(mine, 'peak_mib'):.2f}" if last else "")


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Time and memory against tokens, in logarithms."""
    from odeformer.plots import COLORS

    panels = figure.subplots(1, 2)
    for axes, name, label in zip(panels, ("ms", "peak_mib"), ("forward and backward, ms", "peak memory, MiB"),
                                 strict=True):
        for attention, window, mine in lines(rows):
            tokens = [r["case"]["tokens"] for r in mine]
            axes.loglog(tokens, [r[name] for r in mine], color=COLORS[WINDOWS.index(window)],
                        linestyle="-" if attention == "softmax" else "--", marker="os"[attention != "softmax"],
                        label=f"{attention}, {f'window {window}' if window else 'all tokens'}: "
                              f"tokens^{exponent(mine, name):.2f}")
        axes.set_xticks(tokens, [str(n) for n in tokens], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
