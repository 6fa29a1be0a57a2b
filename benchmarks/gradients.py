"""Gradient modes compared: error, evaluations and memory, against the number of steps.

The field is a small Transformer layer with all its parameters; the reference is backprop of the same solve in float64.
``saved`` counts the bytes that autograd keeps for backward, by torch's saved-tensor hooks, each tensor once, parameters
and the input left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from odeformer.block import Block, BlockConfig, Composed, Part
from odeformer.context import Context
from solvers import SOLVERS, solve

COLUMNS = ("solver", "gradient", "steps", "relative error", "NFE", "NFE backward", "saved KiB")
PRESETS = {
    "quick": {"seeds": 1, "steps": (4, 8, 16, 32, 64)},
    "cpu": {"seeds": 1, "steps": (4, 8, 16, 32, 64, 128, 256)},
}
METHODS = ("euler", "rk4", "ab3", "leapfrog", "reversible_midpoint", "implicit_midpoint", "dopri5")
WORKERS = 1
SIZE = (12, 4)
DEPTH = 4.0


def cases(settings: dict[str, Any], seeds: int) -> Iterator[dict[str, Any]]:
    """Solver x each gradient mode it allows x steps (an adaptive one has a tolerance instead)."""
    for name in METHODS:
        for mode in SOLVERS[name].gradients:
            for steps in (None,) if SOLVERS[name].is_adaptive else settings["steps"]:
                yield {"solver": name, "gradient": mode, "steps": steps}


def layer(dtype: torch.dtype) -> tuple[Block, Callable[[Tensor, Tensor], Tensor], Tensor]:
    """The module, its field, and a state (4, 16, 32)."""
    torch.manual_seed(0)
    block = Block(BlockConfig(32, 4, d_ff=64)).to(torch.float64)
    z0 = torch.randn(4, 16, 32, dtype=torch.float64).to(dtype).requires_grad_()
    block = block.to(dtype)
    return block, Composed([Part(sublayer, Context()) for sublayer in block.sublayers]), z0


def gradient(case: dict[str, Any], mode: str, dtype: torch.dtype) -> dict[str, Any]:
    """The gradient of a fixed linear function of the final state, with what it took."""
    block, f, z0 = layer(dtype)
    weight = torch.linspace(-1, 1, z0.numel(), dtype=dtype).view_as(z0)
    amount = {"rtol": 1e-5, "atol": 1e-7} if case["steps"] is None else {"n_steps": case["steps"]}
    known = {p.data_ptr() for p in block.parameters()} | {z0.data_ptr()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in known:
            saved[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    start = time.perf_counter()
    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        warnings.simplefilter("ignore", UserWarning)  # the adjoint on a coarse grid says so; here that is the point
        solution = solve(f, z0, span=(0.0, DEPTH), solver=case["solver"], gradient=mode, **amount)
    kept = sum(saved.values())
    (solution.z * weight).sum().backward()
    flat = torch.cat([z0.grad.flatten(), *(p.grad.flatten() for p in block.parameters())])
    return {"flat": flat.double(), "nfe": solution.nfe, "nfe_backward": solution.nfe_backward, "saved": kept,
            "seconds": time.perf_counter() - start}


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row, in float32."""
    reference = gradient(case, "backprop", torch.float64)["flat"]
    row = gradient(case, case["gradient"], torch.float32)
    flat = row.pop("flat")
    return [row | {"error": ((flat - reference).norm() / reference.norm()).item()}]


def summary(rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Table rows."""
    for row in rows:
        case = row["case"]
        yield (case["solver"], case["gradient"], case["steps"] or "adaptive", f"{row['error']:.1e}", row["nfe"],
               row["nfe_backward"], f"{row['saved'] / 1024:.0f}")


def draw(rows: list[dict[str, Any]], figure: Any) -> None:
    """Bytes kept and gradient error against the number of steps: a colour a mode, a line style a method."""
    memory, error = figure.subplots(1, 2)
    colors = {"backprop": "#0072B2", "checkpoint": "#E69F00", "checkpoint_recursive": "#009E73",
              "adjoint": "#D55E00", "reversible": "#CC79A7", "implicit": "#56B4E9"}
    styles = {"rk4": "-", "leapfrog": "--", "reversible_midpoint": ":", "implicit_midpoint": "-."}
    for solver, style in styles.items():
        for mode in SOLVERS[solver].gradients:
            mine = [r for r in rows if (r["case"]["solver"], r["case"]["gradient"]) == (solver, mode)]
            x = [r["case"]["steps"] for r in mine]
            for axes, values in ((memory, [r["saved"] / 1024 for r in mine]), (error, [r["error"] for r in mine])):
                axes.plot(x, values, style, marker="o", markersize=3, color=colors[mode])
    for axes, title in ((memory, "kept for backward (KiB)"), (error, "relative error of the gradient (float32)")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("steps")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    memory.set_yscale("symlog", linthresh=4)  # recursive checkpointing keeps nothing but the input
    memory.set_ylim(bottom=-0.5)
    error.set_yscale("log")
    lines = [error.plot([], [], color=color, label=mode)[0] for mode, color in colors.items()]
    lines += [error.plot([], [], style, color="black", label=solver)[0] for solver, style in styles.items()]
    figure.legend(handles=lines, loc="outside right upper", frameon=False)
