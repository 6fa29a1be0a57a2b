"""A module with places of its own for the same parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def own(module: nn.Module) -> Any:
    """The module as it is now: another object that holds the same parameters and buffers, and goes on to hold them
    when functional_call has put others into the first, or given it back its own. So passes in several threads do not
    see each other's, and a step that is done again on the way back sees what it saw. (As
    nn.Module._replicate_for_data_parallel.)
    """
    if torch.compiler.is_compiling():  # a graph holds values, no places
        return module
    new = module.__new__(type(module))
    new.__dict__ = module.__dict__.copy()
    new._parameters, new._buffers = module._parameters.copy(), module._buffers.copy()
    new._modules = {name: None if child is None else own(child) for name, child in module._modules.items()}
    return new
