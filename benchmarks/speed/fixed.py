"""Point 1: ``solve`` with rk4 x 12 steps, over bare calls of the same field and beside other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.timing import MODES, interleaved
from odeformer.block import Block, BlockConfig, Composed, Part
from odeformer.context import Context
from solvers import solve

N_STEPS = 12
SHAPES = [(1, 8, 32), (8, 32, 64), (8, 64, 256)]
BARE = {"forward": (1.08, 1.02, 1.01), "forward + backward": (1.10, 1.03, 1.02)}
TORCHDIFFEQ = (0.80, 0.95, 1.00)


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Field x state x pass."""
    for field in FIELDS:
        for shape in SHAPES[:settings["sizes"]]:
            for mode in MODES:
                yield {"field": field, "shape": list(shape), "pass": mode, "jit": settings["jit"]}


def block(d_model: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A pre-norm Transformer layer as one field."""
    layer = Block(BlockConfig(d_model, 4))
    return Composed([Part(sublayer, Context()) for sublayer in layer.sublayers])


def linear(d_model: int) -> Callable[[Tensor, Tensor], Tensor]:
    """tanh(z W), the cheapest field one may have."""
    weight = (torch.randn(d_model, d_model) * d_model**-0.5).requires_grad_()
    return lambda z, l: torch.tanh(z @ weight)


FIELDS = {"block": block, "linear": linear}


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row a peer."""
    torch.manual_seed(0)
    f, z0 = FIELDS[case["field"]](case["shape"][-1]), torch.randn(case["shape"])
    at, mode = torch.tensor(0.0), case["pass"]

    def bare() -> Tensor:
        z = z0
        for _ in range(4 * N_STEPS):
            z = f(z, at)
        return z

    def ours(solver: str, n_steps: int) -> Tensor:
        return solve(f, z0, span=(0.0, float(n_steps)), n_steps=n_steps, solver=solver).z

    calls = {"bare f": bare, "ours": lambda: ours("rk4", N_STEPS),
             "torchdiffeq": peers.later(peers.torchdiffeq_fixed, f, z0, N_STEPS),
             "torchdyn": peers.later(peers.torchdyn_fixed, f, z0, N_STEPS),
             "ours, heun": lambda: ours("heun2", 2 * N_STEPS),
             "torchode, heun": peers.later(peers.torchode_heun, f, z0, 2 * N_STEPS)}
    calls = {name: MODES[mode](call) for name, call in calls.items()}
    pairs = [("ours", "torchdyn"), ("ours, heun", "torchode, heun")]
    if case["jit"] and case["field"] == "block":
        calls["diffrax, jit"] = peers.later(lambda: peers.diffrax_solve(
            layer_of(f), z0, float(N_STEPS), backward=mode == "forward + backward", dt0=1.0))
        pairs.append(("ours", "diffrax, jit"))
    times = interleaved(calls, rounds, seconds)
    rows, where = [], tuple(case["shape"])
    if case["field"] == "block":
        i = SHAPES.index(where)
        rows = [times.ratio(f"rk4 x {N_STEPS} over bare f, {mode}, {where}", "ours", "bare f", BARE[mode][i]),
                times.ratio(f"rk4 x {N_STEPS} over torchdiffeq, {where}", "ours", "torchdiffeq", TORCHDIFFEQ[i],
                            note=mode)]
    else:
        pairs = [("ours", "bare f"), ("ours", "torchdiffeq"), *pairs]
    return rows + [times.ratio(f"{a} over {b}, {case['field']}", a, b, note=f"{mode}, {where}") for a, b in pairs]


def layer_of(f: Any) -> torch.nn.Module:
    """The layer behind the field ``block``."""
    attention, feedforward = (part.sublayer for part in f._parts)
    layer = torch.nn.Module()
    layer.attention, layer.feedforward = attention, feedforward
    return layer
