"""All adaptive pairs, one of each kind, and what they start from."""

import torch

from solvers.adaptive import METHODS, Adaptive
from solvers.coefficients import EXPLICIT

F64 = torch.float64
NAMED = {pair.tableau: pair for pair in METHODS.values()}
PAIRS = METHODS | {name: Adaptive(t, name) for name, t in EXPLICIT.items() if t.b_hat is not None and t not in NAMED}
LEADING = ["adaptive_heun", "bosh3", "dopri5", "tsit54", "dopri853"]  # one of each kind of interpolation and order


def start(dtype=F64):
    return torch.tensor([[0.7, -0.4], [0.2, 0.3]], dtype=dtype)
