"""Initialisers: ``INITIALIZERS[name](model, **options)``, applied last, to every matrix of the layers."""

from __future__ import annotations

import math

from torch import nn


def matrices(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear maps of the layers, by name."""
    return [(name, module) for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)]


def _zero_biases(model: nn.Module) -> None:
    for _, linear in matrices(model):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def xavier_uniform(model: nn.Module, *, gain: float = 1.0) -> None:
    """W ~ U(-η, η), η = gain sqrt(6 / (d_in + d_out)) (eqs. 18-19; Glorot & Bengio 2010); biases 0."""
    for _, linear in matrices(model):
        nn.init.xavier_uniform_(linear.weight, gain=gain)
    _zero_biases(model)


def gpt2(model: nn.Module, *, std: float = 0.02) -> None:
    """W ~ N(0, std²), output projections divided by sqrt(2 L) (Radford et al. 2019); biases 0."""
    for name, linear in matrices(model):
        residual = name.endswith("output")
        nn.init.normal_(linear.weight, std=std / math.sqrt(2 * model.config.n_layers) if residual else std)
    _zero_biases(model)


INITIALIZERS = {
    "xavier_uniform": xavier_uniform,
    "gpt2": gpt2,
}
