"""A residual stack on sample input: its field, the states along its depth, and how it was integrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.block import AttentionSublayer, CrossAttentionSublayer
from odeformer.depth import taking_turns
from odeformer.diagnostics import MAX_BYTES, Trajectory, check_weights
from odeformer.models.vision import POOLINGS
from odeformer.studio.samples import Sample
from odeformer.tables import at_least
from solvers.stability import is_stable

WHOLE = 640  # numbers in a row's state up to which all eigenvalues are found, from dense Jacobians
TWO_ROWS = 320  # and up to which two rows are looked at


@dataclass(frozen=True)
class Limits:
    """What bounds the work: rows, tokens a row (of what is not given), layers at which Jacobians are taken, bytes kept
    by a diagnostic. ``seed``: of random input and of random directions."""

    samples: int = 4
    max_tokens: int = 32
    max_layers: int = 6
    max_bytes: int = MAX_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens", "max_layers", "max_bytes"):
            at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, eq=False)
class Stack:
    """``run``: field and states; ``few``: the same on the rows at which Jacobians are taken; ``solver``: the model's;
    ``steps``: those that it took; ``source``: what the input is.
    ``model``: whose layers these are, or None. ``read_out``: final states -> outputs, or None where outputs are no
    function of these alone. ``loss``: final states -> a number, ``loss_name``."""

    name: str
    run: Trajectory
    few: Trajectory
    solver: Any
    steps: tuple[float, ...]
    source: str
    limits: Limits
    model: Any = None
    read_out: Callable[[Tensor], Tensor] | None = None
    loss: Callable[[Tensor], Tensor] | None = None
    loss_name: str = ""
    nfe: float = 0
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what several sections share

    @property
    def length(self) -> float:
        """Of depth, in layers."""
        return self.run.depths[-1] - self.run.depths[0]

    @cached_property
    def h(self) -> float:
        """The step: the median of those taken."""
        return median(self.steps)

    @property
    def chooses_steps(self) -> bool:
        """Whether the solver does."""
        return bool(self.solver.is_adaptive)

    @cached_property
    def method(self) -> Any:
        """The method whose stability region is the solver's, for a splitting its base; None where there is none."""
        for candidate in (self.solver, getattr(self.solver, "base", None)):
            try:
                is_stable(candidate, -0.1)
            except (ValueError, TypeError):
                continue
            return candidate
        return None

    @property
    def size(self) -> int:
        """Numbers in a row's state, tokens times d_model."""
        return self.run.states[0, 0].numel()

    @cached_property
    def at(self) -> list[float]:
        """The depths at which Jacobians are taken: of all layers, or so many that are spread over them."""
        depths = [float(site.l) for site in self.run.sites()]
        n = self.limits.max_layers
        if len(depths) <= n:
            return depths
        return [depths[round(i * (len(depths) - 1) / max(1, n - 1))] for i in range(n)]

    @cached_property
    def parts(self) -> list[str]:
        """Names of the sublayers where the field is a sum of them, else none."""
        parts = getattr(self.run.sites()[0].f, "parts", None) or ()
        return [_part_name(part, i) for i, part in enumerate(parts)]

    @property
    def splitting(self) -> str | None:
        """"lie" or "strang" where the coupling lets sublayers take turns."""
        return getattr(self.run.sites()[0].f, "splitting", None)

    @property
    def turns(self) -> bool:
        """Whether the solver's steps do: one that remembers states, or chooses its steps, takes their sum."""
        return not self.chooses_steps and taking_turns(self.solver, self.run.f) is not self.solver


PARTS = ((CrossAttentionSublayer, "cross-attention"), (AttentionSublayer, "attention"), (nn.Module, "feed-forward"))


def _part_name(part: Any, i: int) -> str:
    sublayer = getattr(part, "sublayer", None)
    return next((name for kind, name in PARTS if isinstance(sublayer, kind)), f"part {i}")


def stacks_of(name: str, model: Any, sample: Sample, limits: Limits) -> list[Stack]:
    """The residual stacks of a model: one, or an encoder's and a decoder's. Raises ValueError for weights that are not
    finite, with their names."""
    check_weights(model)
    outputs, solution = sample.run(model)
    both = {part: getattr(solution, part, None) for part in ("encoder", "decoder")}
    if all(both.values()):
        last = {"encoder": (None, None), "decoder": (outputs, sample)}
        return [_stack(f"{name}: {part}", getattr(model, part), both[part], *last[part], _few(model, sample, both[part],
                                                                                             part), limits, sample)
                for part in both]
    return [_stack(name, model, solution, outputs, sample, _few(model, sample, solution), limits, sample)]


def _few(model: Any, sample: Sample, solution: Any, part: str | None = None) -> Trajectory:
    """The first rows, run alone."""
    run = Trajectory.of(solution)
    batch = run.states.shape[1]
    n = 2 if run.states[0, 0].numel() <= TWO_ROWS else 1
    if n >= batch:
        return run
    _, solution = sample.first(n, batch).run(model)
    return Trajectory.of(solution if part is None else getattr(solution, part))


def _stack(name: str, model: Any, solution: Any, outputs: Any, scored: Sample | None, few: Trajectory, limits: Limits,
           sample: Sample) -> Stack:
    run = Trajectory.of(solution)
    read_out = read_out_of(model, run.mask, solution.z, outputs)
    loss, loss_name = directed(run, limits.seed), "a random linear function of the final states"
    if scored is not None and scored.task is not None and read_out is not None:
        loss, loss_name = (lambda z: scored.task.criterion(read_out(z), scored.batch)), "the loss it was trained on"
    steps = solution.steps
    if steps and isinstance(steps[0], list | tuple):  # of each row
        steps = [h for row in steps for h in row]
    steps = [abs(float(h)) for h in steps] or [b - a for a, b in pairwise(run.depths)]
    return Stack(name, run, few, model.solver, tuple(steps), sample.source, limits, model, read_out, loss, loss_name,
                 solution.nfe)


def directed(run: Trajectory, seed: int) -> Callable[[Tensor], Tensor]:
    """The product of final states with a random direction of length 1, over real tokens."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(run.states.shape[1:], generator=generator, dtype=torch.float64)
    g = run.real(g.to(run.states), 0.0)
    g = g / g.norm()
    return lambda z: (run.real(z, 0.0) * g).sum()


def read_out_of(model: Any, mask: Tensor | None, z: Tensor, outputs: Any) -> Callable[[Tensor], Tensor] | None:
    """Final states -> outputs; None where that does not give these outputs."""
    norm, head = getattr(model, "final_norm", None), getattr(model, "head", None)
    pooling = POOLINGS.get(getattr(getattr(model, "config", None), "pooling", None))
    if hasattr(model, "read_out"):
        found = model.read_out
    elif norm is None:
        return None
    elif head is None:
        found = norm
    elif pooling is not None:
        def found(z: Tensor) -> Tensor:
            return head(pooling(norm(z)))
    else:
        def found(z: Tensor) -> Tensor:
            return head(norm(z), mask)
    if outputs is None:
        return found
    again = found(z)
    alike = isinstance(outputs, Tensor) and again.shape == outputs.shape
    return found if alike and torch.allclose(again, outputs, equal_nan=True) else None
