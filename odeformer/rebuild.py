"""A model made anew from another with other layers: what both have in common is copied."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

REBUILT = ("layers", "fusion", "solver")  # what depends on the layers


def carry_over(model: nn.Module, new: nn.Module, memo: dict[int, Any]) -> None:
    """Give ``new`` copies of all that ``model`` holds beside its layers, fusion and solver.

    ``memo``: one for all parts of a model of models, so that tied parameters stay tied.
    """
    new.training, new.layers.training = model.training, model.layers.training
    for name, child in model.named_children():
        if name not in REBUILT:
            setattr(new, name, copy.deepcopy(child, memo))
    for name, tensor in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)):
        setattr(new, name, copy.deepcopy(tensor, memo))
