"""What the results say: sentences whose words and numbers come out of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import StatisticsError, mean
from typing import Any

from benchmarks import runner, store

Rows = list[dict[str, Any]]
LACKING = (LookupError, StopIteration, StatisticsError)  # what comes of rows that are not there


def findings() -> str:
    """A line a study that has results, each ``* **name**: ...``; of results without what its sentence compares (those
    of a smaller preset, or of a run that was stopped) it says so."""
    lines = []
    for name, say in FINDINGS.items():
        path = store.path_of(name)
        if path.exists():
            rows = store.read_rows(path)
            try:
                said = say(rows)
            except LACKING:
                said = (f"the results of preset {rows[0]['run']['preset']} that are there do not hold all that is "
                        "compared here.") if rows else "no results yet."
            lines.append(f"* **{name}**: {said}")
    return "\n".join(lines)


def table(name: str, rows: Rows) -> list[tuple[str, ...]]:
    """The lines of a study's table."""
    return [tuple(map(str, line)) for line in runner.find(name).summary(rows)]


def tally(verdicts: Iterable[str]) -> str:
    """How often each verdict was found: "3 wins, 1 tie, 0 losses"."""
    count = Counter(verdicts)
    one_or_more = {"better": ("win", "wins"), "tie": ("tie", "ties"), "worse": ("loss", "losses")}
    return ", ".join(f"{count[name]} {words[count[name] != 1]}" for name, words in one_or_more.items())


def accuracy_vs_nfe(rows: Rows) -> str:
    """Training and swapping at equal NFE."""
    lines = table("accuracy_vs_nfe", rows)
    train, swap = ([line for line in lines if line[0] == part] for part in ("train", "swap"))
    error = {(line[1], line[3]): line[8] for line in swap}
    return (f"trained at equal NFE, high order against Euler: {tally(x[7] for x in train if x[7])} in accuracy. "
            f"Swapped in after training, weights held: {tally(x[7] for x in swap if x[7])}; at 32 NFE the state is off "
            f"by {error['euler', '32']} under Euler, {error['midpoint', '32']} under midpoint, {error['rk4', '32']} "
            "under rk4.")


def iso_nfe(rows: Rows) -> str:
    """The ODE Transformer's claim, and the tally of each pair."""
    lines = [line for line in table("iso_nfe", rows) if line[2] not in ("euler", "torch.nn")]
    docs = {(line[1], line[2]): line for line in lines if line[0] == "python_docs"}
    claim, same = docs["NFE", "heun2"], docs["parameters", "midpoint"]
    tallies = "; ".join(f"{name}: {tally(x[11] for x in lines if x[1] == name)}"
                        for name in dict.fromkeys(x[1] for x in lines))
    return (f"rk2 (heun2) with {claim[3]} layers against Euler with twice as many, {claim[5]} NFE each: "
            f"{claim[10]} bits per byte, {named(claim[11])}; midpoint at equal parameters and twice the NFE: "
            f"{same[10]}, {named(same[11])}. All methods against Euler, by what is equal: {tallies}.")


def named(verdict: str) -> str:
    """As a noun."""
    return {"better": "a win", "tie": "a tie", "worse": "a loss"}.get(verdict, verdict)


def published(rows: Rows) -> str:
    """The field's own methods against Euler."""
    all_lines = table("published", rows)
    lines, parts = [line for line in all_lines if line[0] != "euler"], []
    for form in dict.fromkeys(line[1] for line in lines):
        mine = [line for line in lines if line[1] == form]
        parts.append(f"{form}: {tally(x[8] for x in mine)} against Euler of as many layers, "
                     f"{tally(x[10] for x in mine if x[10])} at equal NFE")
    won = [f"{x[0]} ({x[1]}) with {float(x[4]) / float(all_lines[0][4]):.1f} times Euler's multiply-adds" for x in lines
           if x[8] == "better"]
    return "; ".join(parts) + "." + (f" The wins: {', '.join(won)}." if won else "")


def truncation(rows: Rows) -> str:
    """Perplexity beside truncation error."""
    by = {line[1]: line for line in table("truncation", rows) if line[0] == "2"}
    residual, rk4, control = by["residual"], by["rk4"], by["residual, other rate"]
    return (f"two layers, residual to rk4: the true truncation error goes from {residual[13]} to {rk4[13]}, bits per "
            f"byte by {rk4[8]} at equal layers ({named(rk4[9])}) and {rk4[10]} at equal NFE ({named(rk4[11])}). The "
            f"same residual network at another learning rate: {control[8]}.")


def solver_swap(rows: Rows) -> str:
    """What a change of solver after training costs."""
    lines = table("solver_swap", rows)
    parts, layered = [], [line for line in lines if line[1] == "piecewise"]  # for which there are all trainings
    for name in dict.fromkeys(line[2] for line in layered):
        mine = [line for line in layered if line[2] == name]
        parts.append(f"{name} {mean(float(x[9]) for x in mine):.2f}")
    free = sum(line[10] == "all" for line in lines)
    worst = next(x for x in lines if x[:3] == ("digits", "piecewise", "one step"))
    return (f"mean solver invariance by training, a block a layer: {', '.join(parts)}. All swaps are free for {free} "
            f"of {len(lines)} models; the textbook one (one Euler step a layer, digits) moves by {worst[8]} in "
            "accuracy under a fine solver.")


def calibrated_grids(rows: Rows) -> str:
    """Ratios of errors."""
    lines = [line for line in table("calibrated_grids", rows) if line[7] != "both lost"]
    best = min(lines, key=lambda line: float(line[5].split()[0]))
    last = max(lines, key=lambda line: float(line[5].split()[0]))
    return (f"at equal NFE against equal steps: {tally(x[7] for x in lines)} in the error of the final state, which "
            f"is multiplied by {best[5]} at best ({best[0]}, {best[1]}) and {last[5]} at worst ({last[0]}, {last[1]}).")


def refinement(rows: Rows) -> str:
    """Whether pretrained networks are ODEs."""
    lines, parts = table("refinement", rows), []
    for model in dict.fromkeys(line[0] for line in lines):
        by = {line[1]: line for line in lines if line[0] == model}
        own, fine, skipped = by["the original (euler)"], by["fine limit (rk4)"], by["layers skipped"]
        parts.append(f"{model}: the network is {own[10]} of its norm away from the solution of its ODE; solved finely, "
                     f"quality goes from {own[4]} to {fine[4]} ({named(fine[7])}), with every second layer left out to "
                     f"{skipped[4]} ({named(skipped[7])})")
    return "; ".join(parts) + "."


def training_stability(rows: Rows) -> str:
    """Rates that train."""
    by = {line[:2]: line for line in table("training_stability", rows)}
    told = (("pre", "euler"), ("post", "euler"), ("deepnorm", "euler"), ("pre", "rk4"), ("pre", "momentum"))
    parts = [f"{norm} under {solver} ({by[norm, solver][2]})" for norm, solver in told if (norm, solver) in by]
    rk4 = by["pre", "rk4"]
    return (f"largest learning rates by layers: {'; '.join(parts)}. rk4 against Euler under pre-norm: {rk4[6]} powers "
            f"of 2, {named(rk4[7])}.")


def depth_weights(rows: Rows) -> str:
    """Families of weights over depth."""
    lines = [line for line in table("depth_weights", rows) if line[1] != "piecewise"]
    return (f"weights as functions of depth against a block a layer, equal parameters and NFE: "
            f"{tally(x[7] for x in lines)} over {len({x[0] for x in lines})} tasks.")


FINDINGS: dict[str, Callable[[Rows], str]] = {say.__name__: say for say in (
    accuracy_vs_nfe, iso_nfe, published, truncation, solver_swap, calibrated_grids, refinement, training_stability,
    depth_weights)}
