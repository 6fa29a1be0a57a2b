"""Layer drop (eq. 31): in training whole layers are left out at random, in evaluation each counts with its odds.

A dropped layer has the increment 0 over its whole piece of depth, at every stage of every step, so a one-step solver
leaves the state as it was. It is evaluated all the same, since rows of a batch differ and every parameter is to have a
gradient (0 there): layer drop regularises and prepares for ``prune``, it saves no time. Huang et al. 2016 (stochastic
depth), Fan et al. 2020 (LayerDrop; who do not scale in evaluation, as eq. 31 does).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# The probability of dropping layer i of n, i from 1
SCHEDULES: dict[str, Callable[[float, int, int], float]] = {
    "constant": lambda p, i, n: p,
    "linear": lambda p, i, n: p * i / n,  # Huang et al. 2016, eq. 4: early layers, on which all others build, stay
}

# The shape of one draw for a state (batch, tokens, d_model)
DRAWS: dict[str, Callable[[Tensor], tuple[int, ...]]] = {
    "sample": lambda z: (z.shape[0], 1, 1),
    "batch": lambda z: (),
}


def survival(p: float, schedule: str, n_layers: int) -> list[float]:
    """ρ of each layer: the probability of being kept.

    >>> survival(0.2, "linear", 2)
    [0.9, 0.8]
    """
    return [1 - SCHEDULES[schedule](p, i, n_layers) for i in range(1, n_layers + 1)]


def draw(p: float, per: str, schedule: str, n_layers: int, z: Tensor, training: bool) -> list[float | Tensor] | None:
    """What the increment of each layer is multiplied by in one forward pass; None where nothing is ever dropped.

    In training 0 or 1 with the probabilities 1 - ρ and ρ, as tensors (batch, 1, 1) or, ``per`` batch, 0-d, drawn from
    torch's generator for z's device; in evaluation ρ (eq. 31).
    """
    if p == 0:
        return None
    kept = survival(p, schedule, n_layers)
    if not training:
        return kept
    shape = DRAWS[per](z)
    return [(torch.rand(shape, device=z.device) < rho).to(z.dtype) for rho in kept]
