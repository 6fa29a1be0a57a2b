"""The best model so far, judged on validation data, and when to give up waiting for a better one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Best:
    """Early stopping: the weights with the best value of a metric; over after ``patience`` validations without one.

    ``higher``: whether a higher value is better. A value that is NaN is never better.
    """

    def __init__(self, patience: int, *, higher: bool):
        self.patience, self.higher = patience, higher
        self.value: float | None = None
        self.step, self.misses = 0, 0
        self.weights: dict[str, Tensor] = {}

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self.misses >= self.patience

    def report(self, value: float, step: int, model: nn.Module) -> bool:
        """Take in a validation; True where it is the best so far."""
        better = value == value and (self.value is None or (value > self.value if self.higher else value < self.value))
        if better:
            self.value, self.step, self.misses = value, step, 0
            self.weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
        else:
            self.misses += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """All that changes."""
        return {"value": self.value, "step": self.step, "misses": self.misses, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another's."""
        self.value, self.step, self.misses = state["value"], state["step"], state["misses"]
        self.weights = dict(state["weights"])
