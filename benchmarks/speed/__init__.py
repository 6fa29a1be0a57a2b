"""How fast: every promise of speed as a ratio of ours over a peer, in one run, with its target.

A row is one comparison: process time on one thread, warmed up, the garbage collector off, the calls in turn, round
after round; each round gives a ratio, the row is their median with the quartiles, so that a busy machine slows all
alike. A target is the most that a ratio may be; peers without a target are reported. One that is missing or fails is a
row that says how. Where a promise is measured in several cases the table shows the worst. Lower is faster.

Groups: ``fixed`` (solve with fixed steps), ``model`` (Encoder and Decoder), ``adaptive``, ``depth`` (reversible
training, weights over depth), ``attention``, ``generating`` (with a cache), ``start`` (imports). Compiled models and
GPUs are in ``compiled``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.speed import adaptive, attention, depth, fixed, generating, model, start

GROUPS = {"fixed": fixed, "model": model, "adaptive": adaptive, "depth": depth, "attention": attention,
          "generating": generating, "start": start}
COLUMNS = ("group", "promise", "ours / peer", "ratio", "quartiles", "target", "", "worst of, where")
PRESETS = {
    "quick": {"seeds": 1, "rounds": 5, "seconds": 0.03, "sizes": 1, "jit": False, "rate": 10.0, "d_model": 64,
              "weights": ("linear",), "window_tokens": (512, 1024, 2048), "new_tokens": {"small": 16}},
    "cpu": {"seeds": 1, "rounds": 11, "seconds": 0.06, "sizes": 3, "jit": True, "rate": 30.0, "d_model": 128,
            "weights": ("linear", "spline", "chebyshev", "fourier", "lowrank", "modulated", "hyper"),
            "window_tokens": (1024, 2048, 4096, 8192), "new_tokens": {"small": 64, "gpt2": 16}},
}
SIZE = (9, 11)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Those of all groups; what is drawn does not matter here, so there is one seed."""
    for group, module in GROUPS.items():
        for case in module.cases(settings):
            yield {"group": group, "rounds": settings["rounds"], "seconds": settings["seconds"], **case}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a group's case."""
    return GROUPS[case["group"]].measure(case, case["rounds"], case["seconds"])


def promises(rows: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """(the rows of a label, the worst of them): one without a value, which nobody measured, before the largest."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"]["group"], row["label"]), []).append(row)
    for mine in groups.values():
        yield mine, max(mine, key=lambda row: (row["value"] is None, row["value"] or 0.0))


def verdict(row: dict[str, Any]) -> str:
    """Of a row: met, missed or not measured; nothing where there is no target."""
    if row["value"] is None:
        return "not measured"
    if row["target"] is None:
        return ""
    return "met" if row["value"] <= row["target"] else "missed"


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Promises first, then what is reported without one."""
    found = sorted(promises(rows), key=lambda pair: pair[1]["target"] is None)
    for mine, worst in found:
        measured = worst["value"] is not None
        yield (worst["case"]["group"], worst["label"], worst["what"], f"{worst['value']:.2f}" if measured else "-",
               "{:.2f}-{:.2f}".format(*worst["quartiles"]) if measured else "-",
               "-" if worst["target"] is None else f"{worst['target']:g}", verdict(worst),
               "; ".join(filter(None, (f"worst of {len(mine)}" if len(mine) > 1 else "", worst["note"]))))


def finding(rows: list[dict[str, Any]]) -> str:
    """How many promises are kept, and which is missed by most."""
    found = [worst for _, worst in promises(rows) if worst["target"] is not None]
    missed = [row for row in found if verdict(row) == "missed"]
    text = f"{sum(verdict(row) == 'met' for row in found)} of {len(found)} targets of speed are met"
    if not missed:
        return f"{text}."
    worst = max(missed, key=lambda row: row["value"] / row["target"] if row["target"] else float("inf"))
    return f"{text}; missed by most: {worst['label']}, {worst['value']:.2f} of at most {worst['target']:g}."


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Each promise that has a target above 0, as its ratio over that, with the quartiles: left of 1 it is kept."""
    from odeformer.plots import COLORS

    found = [worst for _, worst in promises(rows) if worst["target"] and worst["value"]]
    axes = figure.subplots()
    for kept, color, marker in ((True, COLORS[0], "o"), (False, COLORS[1], "s")):
        mine = [(i, row) for i, row in enumerate(found) if (verdict(row) == "met") is kept]
        if not mine:
            continue
        x = [row["value"] / row["target"] for _, row in mine]
        spread = [[abs(q - row["value"]) / row["target"] for _, row in mine for q in row["quartiles"][end:end + 1]]
                  for end in (0, 1)]
        axes.errorbar(x, [i for i, _ in mine], xerr=spread, linestyle="none", marker=marker, color=color,
                      markerfacecolor=color if kept else "white", label="met" if kept else "missed", capsize=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = (0.06, 0.12, 0.25, 0.5, 1, 2, 4)
    axes.set_xlim(min([0.2, *(row["value"] / row["target"] for row in found)]) / 1.5, 6)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(found)), [f"{row['case']['group']}: {row['label']} ({row['value']:.2f} of "
                                        f"{row['target']:g})" for row in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ours over the peer, divided by its target")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
