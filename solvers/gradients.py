"""Gradient modes: how a solve is differentiated. Each wraps the step of a fixed-step solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from solvers.base import Evaluator, Solver, State, Step

Advance = Callable[[Evaluator, State, Step, Any], tuple[State, Any]]


def backprop(solver: Solver) -> Advance:
    """Autograd through every operation: exact, memory grows with every evaluation."""
    return solver.step


def checkpoint(solver: Solver) -> Advance:
    """Each step is computed again in backward: exact, one state a step is kept; randomness is replayed."""

    def advance(f: Evaluator, z: State, step: Step, memory: Any) -> tuple[State, Any]:
        if not torch.is_grad_enabled():
            return solver.step(f, z, step, memory)
        return recompute(solver.step, f, z, step, memory, use_reentrant=False)

    return advance


GRADIENTS: dict[str, Callable[[Solver], Advance]] = {"backprop": backprop, "checkpoint": checkpoint}
