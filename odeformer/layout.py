"""How matrices lie in memory: row by row, as torch makes them, or column by column."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)
PRECISIONS = (torch.float32, torch.float64)


def lay_out(model: Model, *, columns: bool = True) -> Model:
    """Store the linear maps of the model that lead to as many features as they come from, or more, column by column,
    in place; ``columns=False``: row by row again. Returns the model.

    A CPU multiplies one row by such a matrix, as writing token by token does, at up to twice the speed; from four rows
    on it is no faster, or a little slower (``speed`` has the row "weights by columns"). Like
    ``model.to(memory_format=torch.channels_last)`` it changes strides and no number: outputs agree up to rounding,
    shared parameters stay shared, gradients, optimizers, copies and files (which hold rows) work as before. New memory
    is that of one matrix at a time.

    Half precision is many times slower by columns on a CPU: undo it before ``model.bfloat16()`` and autocast. Undo it
    also for what needs contiguous parameters, such as ``torch.nn.utils.parameters_to_vector``. Call it before data- or
    tensor-parallel training takes the parameters over.

    Raises TypeError for what is no module, ValueError where a weight is not a plain parameter on a CPU, and for half
    precision by columns.

    >>> lay_out(nn.Linear(2, 3)).weight.stride()
    (1, 3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wide = {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module.out_features >= module.in_features}
    for name, module in wide.items():
        weight = module._parameters.get("weight")
        if weight is None:
            raise ValueError(f"model must have plain weights, and that of {name or type(module).__name__} is computed "
                             "from others (by a parametrization?)")
        if weight.device.type != "cpu" or type(weight.data) is not torch.Tensor or weight.layout is not torch.strided:
            raise ValueError(f"model must have plain parameters on a CPU, got a {type(weight.data).__name__} on "
                             f"{weight.device}: one row is multiplied as fast either way elsewhere")
        if columns and weight.dtype not in PRECISIONS:
            raise ValueError(f"model must have weights of float32 or float64, got {weight.dtype}, with which a CPU is "
                             "many times slower by columns")
    laid: dict[tuple, torch.Tensor] = {}  # what shares memory still does
    for weight in {module.weight for module in wide.values()}:
        data = weight.data
        place = (data.data_ptr(), data.shape, data.stride())
        if place not in laid:
            laid[place] = data.t().contiguous().t() if columns else data.contiguous()
        weight.data = laid[place]
    return model
