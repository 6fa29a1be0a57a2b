"""Gradient of the loss with respect to the state, against depth, for each placement of the norm (eqs. 15-16).

A decoder, freshly initialised, reads random tokens and predicts random next ones; euler with one step a layer, so the
layers are those of the textbook. What is measured is the norm of dE/dz(l) at every whole l, from 0 (the embedding) to L
(before the final norm, where there is one), over that at L. Between l = 0 and 1 the first norm enlarges the gradient,
as the entries of an embedding are small (a standard deviation of 0.18). Learned and predicted weights of eq. 17 start
as the fixed ones, and so have the same curves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor, nn

from odeformer import BlockConfig, Decoder, DecoderConfig

COLUMNS = ("norm", "layers", "at l = 0", "at l = 1", "at l = L/2", "highest / lowest seed")
PRESETS = {
    "quick": {"seeds": 1, "layers": (6, 12, 24)},
    "cpu": {"seeds": 3, "layers": (6, 12, 24, 48, 96)},
}
PLACEMENTS = {  # name -> settings of the block, formula
    "pre": ({"norm": "pre"}, "F(LN(z)) + z"),
    "post": ({"norm": "post"}, "LN(F(z) + z)"),
    "res": ({"norm": "res"}, "LN(F(z)) + z"),
    "weighted": ({"norm": "weighted", "norm_options": {"beta": 0.5, "gamma": 0.5}}, "LN(F(z) + z/2) + z/2"),
    "deepnorm": ({"norm": "deepnorm", "init": "deepnorm"}, "LN(F(z) + α z), own initialiser"),
    "completep": ({"norm": "completep"}, "F(LN(z)) / L + z"),
}
VOCAB, TOKENS, BATCH, WIDTH = 64, 32, 4, 64
WORKERS = 2
SIZE = (12, 6.5)


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Placement x layers x seed, the deepest first."""
    for n_layers, name, seed in product(reversed(settings["layers"]), PLACEMENTS, range(seeds)):
        yield {"norm": name, "layers": n_layers, "seed": seed}


def fresh(name: str, n_layers: int) -> Decoder:
    """A new model."""
    settings, _ = PLACEMENTS[name]
    return Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=TOKENS, n_layers=n_layers,
                                 block=BlockConfig(WIDTH, 4, **settings)))


def gradient_norms(model: Decoder, ids: Tensor) -> list[float]:
    """‖dE/dz(l)‖ at l = 0, 1, ..., L for the next-token loss on ids (batch, tokens + 1)."""
    states = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        states.append(inputs[0])

    hooks = [layer.attention.register_forward_pre_hook(keep) for layer in model.layers]
    logits, solution = model(ids[:, :-1], return_solution=True, save_states=False)
    for hook in hooks:
        hook.remove()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [*states, solution.z])
    return [g.double().norm().item() for g in gradients]


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    torch.manual_seed(case["seed"])
    model = fresh(case["norm"], case["layers"])
    return [{"gradient": gradient_norms(model, torch.randint(VOCAB, (BATCH, TOKENS + 1)))}]


def curves(rows: list[dict[str, Any]], name: str, n_layers: int) -> list[list[float]]:
    """For each seed the gradient norm at every l, over that at l = L."""
    mine = [r["gradient"] for r in rows if (r["case"]["norm"], r["case"]["layers"]) == (name, n_layers)]
    return [[g / gradient[-1] for g in gradient] for gradient in mine]


def layers(rows: list[dict[str, Any]]) -> list[int]:
    """The depths measured."""
    return sorted({r["case"]["layers"] for r in rows})


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows: geometric means over the seeds, and by what factor these differ at l = 1."""
    for name, n_layers in product(PLACEMENTS, layers(rows)):
        mine = curves(rows, name, n_layers)
        if mine:
            means = [geometric_mean(curve[l] for curve in mine) for l in (0, 1, n_layers // 2)]
            first = [curve[1] for curve in mine]
            yield (name, n_layers, *(f"{x:.1f}" for x in means), f"{max(first) / min(first):.1f}")


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """A panel a placement, a line a depth: the median over seeds, shaded from the lowest to the highest."""
    from matplotlib import colormaps

    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    depths = layers(rows)
    colors = dict(zip(depths, colormaps["viridis"](torch.linspace(0, 0.9, len(depths)).tolist()), strict=True))
    for axes, name in zip(panels.flat, PLACEMENTS, strict=True):
        for n_layers in depths:
            by_l = list(zip(*curves(rows, name, n_layers), strict=True))
            if by_l:
                x = [l / n_layers for l in range(n_layers + 1)]
                axes.plot(x, [median(values) for values in by_l], color=colors[n_layers], label=f"{n_layers}")
                axes.fill_between(x, list(map(min, by_l)), list(map(max, by_l)), color=colors[n_layers], alpha=0.2,
                                  linewidth=0)
        axes.axhline(1, color="black", linewidth=0.6, zorder=0)
        axes.set_title(f"{name}:  {PLACEMENTS[name][1]}", fontsize=10)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("‖dE/dz(l)‖ / ‖dE/dz(L)‖")
    for axes in panels[-1]:
        axes.set_xlabel("depth l / L")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, title="layers L")
