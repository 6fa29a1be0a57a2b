"""What a model will cost before it is run: time and memory of a forward pass, of a training step and of writing.

The operations of a pass and the memory that they hold are found without doing them (``odeformer.tracing``), and priced
by what a machine was measured to do (``odeformer.machine``):

    seconds = Σ over operations (what such an operation of this size takes + what Python and autograd take around it)

In float32 on a CPU, with all tokens real; without reading data, logging and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odeformer.machine import Machine
from odeformer.models.base import to_be_filled
from odeformer.models.parts import check_model, parts_of
from odeformer.tables import at_least
from odeformer.tracing import Trace, on_nothing, without_choices
from odeformer.workload import inputs, longest, loss, writing


@dataclass(frozen=True)
class Cost:
    """``seconds``; ``bytes`` held at most, the parameters included; ``multiply_adds`` of matrix products; ``nfe``."""

    seconds: float
    bytes: int
    multiply_adds: int
    nfe: float


@dataclass(frozen=True)
class Estimate:
    """``forward``: a pass without gradients; ``step``: a training step, by AdamW; ``token``: writing one more token, in
    the middle of the text, for a decoder (None: for others, and where a text has no room for it). ``parameters``: how
    many. ``batch``, ``n_tokens``: of the passes."""

    parameters: int
    batch: int
    n_tokens: int | None
    forward: Cost
    step: Cost
    token: Cost | None

    def __str__(self) -> str:
        costs = {"forward pass": self.forward, "training step": self.step, "a new token": self.token}
        shape = f"a batch of {self.batch}" + ("" if self.n_tokens is None else f" x {self.n_tokens} tokens")
        lines = [f"{self.parameters:,} parameters; {shape}",
                 f"{'':<14}{'NFE':>6}{'multiply-adds':>16}{'time':>12}{'memory':>12}"]
        lines += [f"{name:<14}{cost.nfe:>6g}{cost.multiply_adds:>16,}{seconds(cost.seconds):>12}"
                  f"{size(cost.bytes):>12}" for name, cost in costs.items() if cost is not None]
        return "\n".join(lines)


def seconds(value: float) -> str:
    """A time with its unit."""
    unit, factor = next(((u, f) for u, f in (("s", 1), ("ms", 1e3)) if value * f >= 1), ("µs", 1e6))
    return f"{value * factor:.3g} {unit}"


def size(value: float) -> str:
    """Bytes with their unit."""
    unit, factor = next(((u, f) for u, f in (("GiB", 2**30), ("MiB", 2**20)) if value >= f), ("KiB", 2**10))
    return f"{value / factor:.3g} {unit}"


def estimate(make: Callable[[], nn.Module], machine: Machine, *, batch: int = 1, n_tokens: int | None = None,
             accumulate: int = 1) -> Estimate:
    """What the model that ``make`` makes costs on a machine.

    ``n_tokens``: of texts and points of series; max_seq_len if None. ``accumulate``: the parts into which a training
    step cuts its batch. Raises ValueError for a solver whose work depends on the input.
    """
    at_least("accumulate", accumulate, 1)
    if accumulate > batch:
        raise ValueError(f"accumulate must be at most batch = {batch}, got {accumulate}")
    with on_nothing(), to_be_filled():
        model = without_choices(make())
        check_fixed(model)
        weights = sum(p.nbytes for p in model.parameters())
        given = inputs(model, batch, n_tokens)
        forward = forward_cost(model, given, machine, weights)
        part = inputs(model, -(-batch // accumulate), n_tokens)
        step = step_cost(model, part, machine, weights, accumulate)
        token = None
        middle = max(1, (n_tokens or longest(model) or 0) // 2)
        if getattr(model, "head", None) is not None and hasattr(model, "stream") and middle + 2 <= longest(model):
            token = token_cost(model, batch, middle, machine, weights)
    return Estimate(sum(p.numel() for p in model.parameters()), batch, n_tokens or longest(model), forward, step, token)


def check_fixed(model: nn.Module) -> None:
    """Raises TypeError for what is no model of ours, ValueError for a solver whose work depends on the input."""
    check_model(model)
    for part in parts_of(model).values():
        if part.solver.is_adaptive or part.solver.is_implicit:
            raise ValueError(f"solver {part.solver.name!r} does as much work as the input asks for, which cannot be "
                             "known beforehand; take a fixed-step solver, or the steps of a calibrated grid")


def forward_cost(model: nn.Module, given: list[Any], machine: Machine, weights: int) -> Cost:
    """Of a pass in evaluation mode."""
    model.eval()
    with torch.no_grad(), Trace() as trace:
        _, solution = model(*given, return_solution=True, save_states=False)
    return Cost(machine.seconds(trace.counts, total(solution, "n_steps"), "evaluate", weights), weights + trace.peak,
                trace.multiply_adds, total(solution, "nfe"))


def step_cost(model: nn.Module, part: list[Any], machine: Machine, weights: int, accumulate: int) -> Cost:
    """Of a training step whose batch is cut into ``accumulate`` parts of this size. Beside the parameters and what the
    passes hold, their gradients included, AdamW keeps two numbers a parameter."""
    model.train()
    passes = []
    with Trace() as trace:
        for _ in range(min(accumulate, 2)):  # the first makes the gradients, all others add to them
            before = trace.counts.copy()
            value, solution = loss(model, part)
            value.backward()
            passes.append(machine.seconds(trace.counts - before, total(solution, "n_steps"), "train", weights))
    tensors = list(model.parameters())
    fixed, each = machine.update
    update = fixed * len(tensors) + each * sum(p.numel() for p in tensors)
    return Cost(passes[0] + (accumulate - 1) * passes[-1] + update, 3 * weights + trace.peak,
                trace.multiply_adds // len(passes) * accumulate, total(solution, "nfe") * accumulate)


def token_cost(model: nn.Module, batch: int, n_tokens: int, machine: Machine, weights: int) -> Cost:
    """Of writing one token behind ``n_tokens``, each read once."""
    model.eval()
    with torch.no_grad():
        _, solution = model(torch.zeros(1, 1, dtype=torch.int64), return_solution=True, save_states=False)
    with torch.no_grad(), Trace() as trace:
        text = writing(model, batch, n_tokens)
        next(text)
        before, done = trace.counts.copy(), trace.multiply_adds
        trace.peak = trace.live
        next(text)
    return Cost(machine.seconds(trace.counts - before, total(solution, "n_steps"), "write", weights),
                weights + trace.peak, trace.multiply_adds - done, total(solution, "nfe"))


def total(solution: Any, name: str) -> float:
    """A number of a Solution, summed over its parts."""
    parts = [getattr(solution, part) for part in ("encoder", "decoder") if hasattr(solution, part)]
    return sum(getattr(part, name) for part in parts or [solution])
