"""What experts cost: forward and backward against a dense network that does as much per token.

A layer with top_k of n experts of d_ff = 256 is timed in turn with a dense network of d_ff = 256 top_k, on the same
1,024 tokens (d_model 128, float32, one thread, process time); each round gives a ratio. "dense mixture" computes every
expert for every token, as a plain reading of eqs. 49-50 would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from odeformer.experts import Experts
from odeformer.feedforward import FEEDFORWARD

D_MODEL, D_FF, TOKENS = 128, 256, 1024
WAYS = ("loop", "blocks", "dense mixture")
COLUMNS = ("computed by", "experts", "top_k", "ms", "over dense", "quartiles")
PRESETS = {
    "quick": {"seeds": 1, "experts": (4, 8, 16, 32, 64), "top_k": (1, 2, 4), "rounds": 9},
    "cpu": {"seeds": 1, "experts": (4, 8, 16, 32, 64), "top_k": (1, 2, 4), "rounds": 31},
}
SIZE = (9, 3.8)
WORKERS = 1


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Way x top_k x number of experts; the dense mixture has no top_k of its own, and is timed at 2."""
    for way in WAYS:
        for top_k in settings["top_k"]:
            if way != "dense mixture" or top_k == 2:
                for n in settings["experts"]:
                    yield {"way": way, "top_k": top_k, "experts": n, "rounds": settings["rounds"]}


def dense_mixture(layer: Experts) -> Callable[[Tensor], Tensor]:
    """All experts for all tokens, most of them times 0."""
    def run(x: Tensor) -> Tensor:
        top = (x @ layer.router.weight.T).softmax(-1).topk(layer.top_k, -1)
        gates = torch.zeros(*x.shape[:-1], layer.n_experts).scatter(-1, top.indices, top.values)
        hidden = (torch.matmul(x, layer.hidden.weight) + layer.hidden.bias[:, None]).relu()
        each = torch.matmul(hidden, layer.output.weight) + layer.output.bias[:, None]
        return torch.einsum("btn,ntd->btd", gates, each)

    return run


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The median of the rounds' ratios, with quartiles."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        grouping = None if case["way"] == "dense mixture" else case["way"]
        layer = Experts(D_MODEL, D_FF, n_experts=case["experts"], top_k=case["top_k"], grouping=grouping)
        dense = FEEDFORWARD["relu"](D_MODEL, D_FF * case["top_k"])
        ours = dense_mixture(layer) if grouping is None else layer
        x = torch.randn(1, TOKENS, D_MODEL, requires_grad=True)
        for call in (ours, dense):
            timed(call, x)
        rounds = [(timed(ours, x), timed(dense, x)) for _ in range(case["rounds"])]
    finally:
        torch.set_num_threads(threads)
    ratios = sorted(a / b for a, b in rounds)
    return [{"ms": 1e3 * median(a for a, _ in rounds), "over_dense": median(ratios),
             "over_dense_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]}]


def timed(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of a forward and a backward pass."""
    start = time.process_time()
    call(x).sum().backward()
    return time.process_time() - start


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows."""
    for row in rows:
        case = row["case"]
        yield (case["way"], case["experts"], case["top_k"], f"{row['ms']:.1f}", f"{row['over_dense']:.2f}",
               "{:.2f}-{:.2f}".format(*row["over_dense_quartiles"]))


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Time against the number of experts, and the ratio to the dense network."""
    from odeformer.plots import COLORS

    lines = sorted({(r["case"]["way"], r["case"]["top_k"]) for r in rows}, key=lambda line: (WAYS.index(line[0]), line))
    panels = figure.subplots(1, 2)
    labels = ("forward and backward, ms", "over a dense network of equal cost a token")
    for axes, name, label in zip(panels, ("ms", "over_dense"), labels, strict=True):
        for way, top_k in lines:
            mine = [r for r in rows if (r["case"]["way"], r["case"]["top_k"]) == (way, top_k)]
            axes.loglog([r["case"]["experts"] for r in mine], [r[name] for r in mine], marker="os^"[WAYS.index(way)],
                        color=COLORS[top_k % len(COLORS)], linestyle=("-", "--", ":")[WAYS.index(way)],
                        label=way if way == "dense mixture" else f"{way}, top_k = {top_k}")
        experts = sorted({r["case"]["experts"] for r in rows})
        axes.set_xticks(experts, [str(n) for n in experts], minor=False)
        axes.minorticks_off()
        axes.set_xlabel(f"experts ({TOKENS} tokens)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize="small")
