"""Which parts of a model ``parallel = "fsdp"`` gathers by themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def stacks(model: nn.Module) -> list[Any]:
    """The parts of a model whose layers are integrated."""
    from odeformer.models.base import DepthModel

    return [module for module in model.modules() if isinstance(module, DepthModel)]


def uneven(stack: Any) -> bool:
    """Whether how often f is evaluated depends on the data."""
    return stack.solver.is_adaptive or stack.solver.is_implicit or getattr(stack.solver, "to_equilibrium", False)


def units(model: nn.Module) -> list[nn.Module]:
    """The sublayers that can be gathered one by one, as they are called.

    Those of blocks that are layers, several of them: not where weights are functions of l or are read elsewhere, where
    experts report losses beside the increment, where the number of evaluations depends on the data, or where a gradient
    mode evaluates f again on the way back, which it does with the weights that it saw.
    """
    found: list[nn.Module] = []
    for stack in stacks(model):
        routed = any(getattr(module, "routed", False) for module in stack.layers.modules())
        if (stack.layers.by_layer and len(stack.layers) > 1 and not routed and not uneven(stack)
                and stack.config.depth.gradient == "backprop"):
            found += [sublayer for block in stack.layers for sublayer in block.sublayers]
    return found


def no_view(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """FSDP's hooks do not survive a change in place of a view."""
    return output.clone() if output._is_view() else output
