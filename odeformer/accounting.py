"""What a model is made of and what a pass costs: parameters, evaluations, multiply-adds."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from odeformer.attention.base import Attention
from odeformer.block import Block, Sublayer
from odeformer.experts import ExpertSlices
from odeformer.generate import evaluating
from odeformer.models.base import to_be_filled
from odeformer.models.parts import check_own_layers, parts_of
from odeformer.tables import at_least


class ParameterReport(dict[str, Any]):
    """Prints as two columns, the model's and the plain Transformer's."""

    def __str__(self) -> str:
        plain = self["plain"]
        rows = [("", "model", "plain"), *((name, _show(self[name]), _show(plain[name])) for name in plain)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width)
                                   for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows)


def _show(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def parameter_report(model: nn.Module, n_tokens: int | None = None) -> ParameterReport:
    """A mapping: ``parameters`` (those of the layers alone in ``layer_parameters``), ``nfe`` of a pass (None for a
    solver whose work depends on the input), ``multiply_adds`` a token of a pass over ``n_tokens`` tokens (if not given
    max_seq_len, or an image's): of the matrices that it goes through, in every evaluation, of scores and weighted
    values against all n_tokens, and of the head. ``plain``: the same for a textbook Transformer of this width, depth
    and kind of layer.

    Not counted: embeddings, norms, activations, and what θ(l) takes to be made, once for each depth of a pass.
    """
    check_own_layers(model, "parameter_report")
    if hasattr(model, "encoder"):
        return _both(model, n_tokens)
    config = model.config
    if n_tokens is None:
        n_tokens = getattr(config, "max_seq_len", None) or getattr(config, "n_tokens", None)
    if n_tokens is None:
        raise ValueError("n_tokens must be given for a model without a max_seq_len")
    at_least("n_tokens", n_tokens, 1)
    block = model.layers[0]
    costs = part_multiply_adds(block, n_tokens)
    with to_be_filled(), evaluating(model):  # which leave the random state alone
        counts, nfe = evaluations(model)
        lone = _count(type(block)(config.block, config.n_layers, cross=model.cross)) * config.n_layers
    layers = _count(model.layers)
    others, head = _count(model) - layers, head_multiply_adds(model, n_tokens)
    one = sum(costs.values())
    spent = None if counts is None else sum(counts[name] * cost for name, cost in costs.items())
    plain = {"parameters": lone + others, "layer_parameters": lone, "nfe": config.n_layers,
             "multiply_adds": config.n_layers * one + head}
    return ParameterReport(parameters=layers + others, layer_parameters=layers, nfe=nfe,
                           multiply_adds=None if spent is None else spent + head, n_tokens=n_tokens,
                           plain=plain)


def _both(model: nn.Module, n_tokens: int | None) -> ParameterReport:
    """Of an encoder and a decoder: sums, and the two by themselves; multiply_adds are those of a source token and a
    target token."""
    parts = {name: parameter_report(part, n_tokens) for name, part in parts_of(model).items()}
    total = ParameterReport(_sum(list(parts.values())), **parts, plain=_sum([part["plain"] for part in parts.values()]))
    total["parameters"] = _count(model)  # what is shared counts once
    return total


def _sum(reports: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("parameters", "layer_parameters", "nfe", "multiply_adds")
    values = {name: [report[name] for report in reports] for name in names}
    return {name: None if None in column else sum(column) for name, column in values.items()}


def evaluations(model: nn.Module) -> tuple[dict[str, int] | None, int | float | None]:
    """How often a pass evaluates each sublayer, and its NFE, from a pass of a single token; None for a solver whose
    work depends on the input."""
    if model.solver.is_adaptive or model.solver.is_implicit:
        return None, None
    p = next(model.layers.parameters())
    z = torch.zeros(1, 1, model.config.block.d_model, device=p.device, dtype=p.dtype)
    memory = {"memory": z} if model.cross else {}
    counts: Counter[str] = Counter()
    hooks = [part.core.register_forward_pre_hook(lambda core, inputs, name=name: counts.update([name]))
             for block in model.layers for name, part in block.parts.items()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiled layers do not see new hooks
            nfe = model.evolve(z, **memory).nfe
    finally:
        for hook in hooks:
            hook.remove()
    return counts, nfe


def part_multiply_adds(block: Block, n_tokens: int) -> dict[str, int]:
    """Of one evaluation of each sublayer of a layer, for a token among n_tokens."""
    return {name: _multiply_adds(part, n_tokens) for name, part in block.parts.items()}


def _multiply_adds(part: Sublayer, n_tokens: int) -> int:
    total, slices = 0, _slices(part.core)
    for module in part.modules():
        if isinstance(module, nn.Linear):
            total += round(module.weight.numel() * slices.get(module, 1))
        elif isinstance(module, Attention):
            total += module.multiply_adds(_seen(module, n_tokens))
        for name in getattr(module, "stacked", ()):
            total += _active(part, getattr(module, name))
    return total


def _seen(attention: Attention, n_tokens: int) -> int:
    window = getattr(attention, "window", None)
    return n_tokens if window is None else min(n_tokens, 2 * window - 1)


def _slices(core: nn.Module) -> dict[nn.Module, Fraction]:
    """Of maps that are cut into slices the share that serves a token."""
    if not isinstance(core, ExpertSlices) or core.router is None:
        return {}
    share = Fraction(core.router.top_k, core.n_experts)
    return {core.hidden: share, core.output: share}


def _active(part: Sublayer, stack: Tensor) -> int:
    """Of a stack of experts' matrices: those of the top_k that serve a token."""
    router = getattr(part.core, "router", None)
    top_k = getattr(router, "top_k", None) or stack.shape[0]
    return top_k * stack[0].numel()


def head_multiply_adds(model: nn.Module, n_tokens: int) -> int:
    """Of the linear maps behind the layers, a token: those of a head that reads all tokens at once are shared among
    them, rounded up."""
    head = getattr(model, "head", None)
    modules = head.modules() if isinstance(head, nn.Module) else ()
    total = sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
    return -(-total // n_tokens) if hasattr(model.config, "image_size") else total


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
